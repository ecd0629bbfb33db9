"""The tools of a chat: which the model may call, which calls run without being asked for, and running them.

Nothing runs unless somebody said so: by answering a question about this very call, or about its tool before.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from localllm.conversation.answer import Answer, Call
from localllm.errors import LocalLLMError
from localllm.interface import Facts
from localllm.request import ToolUse
from localllm.terminal import clean, clean_line, counted

MAX_ROUNDS = 16  # of calls in one answer
MIN_RESULT_CHARS = 400
SHOWN_CHARS = 4_000  # of arguments, where a person decides about them
STOPPED = "stopped by the user"
_TOOL = re.compile(r"tools\[(\d+)\]")


class Tool(Protocol):
    """One of the tools that a `Source` has."""

    @property
    def name(self) -> str: ...

    @property
    def server(self) -> str: ...

    @property
    def about(self) -> str: ...

    def in_openai_shape(self) -> dict[str, Any]: ...


class Result(Protocol):
    """What a call gave."""

    @property
    def text(self) -> str: ...

    @property
    def failed(self) -> bool: ...


class Source(Protocol):
    """Where tools come from: the MCP servers. Made by the command, since a conversation knows no servers."""

    @property
    def tools(self) -> Sequence[Tool]: ...

    @property
    def problems(self) -> Sequence[str]: ...

    def connect(self) -> None: ...

    def call(self, name: str, arguments: str, cancel: threading.Event | None = None) -> Result: ...

    def close(self) -> None: ...


class Toolbox:
    """The tools of one chat.

    opens   called by `connect`: it imports much
    only    names that are offered; None: all
    asks    whether somebody can be asked; else what is offered runs
    is_on   offered at all: /tools
    """

    def __init__(self, opens: Callable[[], Source], only: Collection[str] | None = None, *, asks: bool = True) -> None:
        self._opens = opens
        self._source: Source | None = None
        self.only = only
        self.asks = asks
        self._decided: dict[str, bool] = {}  # tools that always run, or never
        self._left_out: set[str] = set()
        self.is_on = True
        self.is_connected = False

    # --- what is offered ---------------------------------------------------------------------------------------------

    def connect(self) -> list[str]:
        """Connect to the servers, which takes up to 20 s. Returns what to say, warnings with a "!" before them."""
        try:
            source = self._opens()
        except LocalLLMError as error:
            self.is_connected = True
            return [f"! {error.message} ({error.hint})"]
        self._source = source  # from here on `close` ends what it started
        source.connect()
        self.is_connected = True
        servers = {tool.server for tool in source.tools}
        found = f"{counted(len(source.tools), 'tool')} of {counted(len(servers), 'MCP server')}"
        about = f"{found}: /tools lists them, every call is asked for" if servers else "there are no tools to call"
        return [*(f"! {problem}" for problem in source.problems), about]

    def close(self) -> None:
        if self._source is not None:
            self._source.close()

    @property
    def tools(self) -> list[Tool]:
        """Those that can be called."""
        known = self._source.tools if self._source is not None else ()
        return [
            tool for tool in known
            if tool.name not in self._left_out and (self.only is None or tool.name in self.only)
        ]  # fmt: skip

    @property
    def names(self) -> list[str]:
        """All there are, also those that are not offered."""
        return [tool.name for tool in self._source.tools] if self._source is not None else []

    @property
    def offered(self) -> ToolUse | None:
        """For `ChatBackend.send`."""
        tools = [tool.in_openai_shape() for tool in self.tools if self._decided.get(tool.name, True)]
        return ToolUse(tuple(tools)) if tools and self.is_on else None

    def leave_out(self, param: str, message: str) -> str:
        """Leave the tool out that a turn failed by, its schema being wrong. Returns what to say; "" if it was none.

        param, message  of the failure
        """
        found = _TOOL.match(param)
        offered = self.offered
        if found is None or offered is None or int(found[1]) >= len(offered.tools):
            return ""
        name = offered.tools[int(found[1])]["function"]["name"]
        self._left_out.add(name)
        return f"the tool {name} is left out: {clean_line(message)}"

    def listed(self) -> str:
        """The tools, one a line."""
        if not self.is_connected:
            return "the servers are not connected yet"
        words = {None: "asks", True: "always runs", False: "never runs"}
        lines = [
            f"{tool.name}  ({clean_line(tool.server)}, {words[self._decided.get(tool.name)]})  "
            + clean_line(tool.about)[:80]
            for tool in self.tools
        ]
        return "\n".join([*([] if self.is_on else ["tools are off; /tools on"]), *lines]) or "there are no tools"

    # --- calls -------------------------------------------------------------------------------------------------------

    def decide(self, name: str, runs: bool) -> None:
        """From now on a tool runs without being asked for, or never."""
        self._decided[name] = runs

    def must_ask(self, call: Call) -> bool:
        """Whether a person must say if this call runs. Where not, it has failed already or is to be run."""
        if call.result is not None:
            return False
        if call.name not in [tool.name for tool in self.tools]:
            fail(call, f"there is no tool {clean_line(call.name)[:64]}")
        elif self._decided.get(call.name) is False:
            fail(call, "the user does not allow this tool")
        elif self.asks and call.name not in self._decided:
            return True
        return False

    def run(self, call: Call, room: int, cancel: threading.Event | None = None) -> None:
        """Fill in the result, at most `room` characters of it. Blocks; `cancel` ends it."""
        assert self._source is not None
        result = self._source.call(call.name, call.arguments, cancel)
        call.result, call.failed = _cut(result.text, room), result.failed


def fail(call: Call, why: str) -> None:
    """Tell the model why a call gave nothing."""
    call.result, call.failed = why, True


def refuse(call: Call) -> None:
    """The user said no, to this call."""
    fail(call, "the user refused this call")


def stop(answer: Answer) -> None:
    """The user stopped: calls without a result get none, and the answer ends."""
    for call in answer.calls:
        if call.result is None:
            fail(call, STOPPED)
    answer.end_round("abort")


def at_limit(answer: Answer) -> str:
    """What to say where tools were called for too many rounds: then the answer ends. "" before that."""
    if len(answer.rounds) < MAX_ROUNDS:
        return ""
    for call in answer.calls:
        fail(call, f"not run: after {MAX_ROUNDS} rounds of calls an answer must end")
    answer.end_round("abort")
    return f"stopped after {MAX_ROUNDS} rounds of tool calls; say “go on” if it should"


def room_for(facts: Facts, used_tokens: int, num_calls: int) -> int:
    """Characters that one of several results may have: half of what is left of the window."""
    if not facts.ctx:
        return 1 << 30
    return max(MIN_RESULT_CHARS, (facts.ctx - used_tokens) * 3 // 2 // max(1, num_calls))


def _cut(text: str, room: int) -> str:
    over = len(text) - room
    return text if over <= 0 else f"{text[:room]}\n[cut: {counted(over, 'more character')} do not fit the context]"


def shown_call(call: Call) -> str:
    """'echo  {"text": "hi"}': name and arguments as they are, safe to show, long ones cut with a notice."""
    try:
        arguments = json.dumps(json.loads(call.arguments or "{}"), ensure_ascii=False)
    except (ValueError, RecursionError):
        arguments = call.arguments
    over = len(arguments) - SHOWN_CHARS
    cut = f" [{counted(over, 'more character')}]" if over > 0 else ""
    return f"{clean_line(call.name)[:64]}  {clean(arguments[:SHOWN_CHARS])}{cut}"


def shown_result(call: Call, lines: int = 0) -> str:
    """One line about a result; with `lines`, so many of its first lines below."""
    text = clean(call.result or "")
    rows = text.split("\n")
    head = f"{'✗' if call.failed else '→'} {counted(len(rows), 'line')}, {counted(len(text), 'character')}"
    if len(rows) == 1 and len(text) <= 80:
        return f"{'✗' if call.failed else '→'} {text}"
    shown = [f"  {row[:200]}" for row in rows[:lines]]
    left = [f"  … {counted(len(rows) - lines, 'more line')}"] if lines and len(rows) > lines else []
    return "\n".join([head, *shown, *left])


def as_values(answer: Answer) -> list[Mapping[str, Any]]:
    """All calls of an answer, for JSON."""
    calls = [call for one in answer.rounds for call in one.calls] + answer.calls
    return [
        {"name": call.name, "arguments": call.arguments, "result": call.result, "failed": call.failed} for call in calls
    ]

"""The tools of a chat: which ones the model may call, which run without asking, and running them.

Nothing runs without permission, given for this very call or earlier for its tool.
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

MAX_ROUNDS = 16  # rounds of calls per answer
MIN_RESULT_CHARS = 400
SHOWN_CHARS = 4_000  # characters of arguments shown to the user who decides
STOPPED = "stopped by the user"
_TOOL = re.compile(r"tools\[(\d+)\]")


class Tool(Protocol):
    """A tool of a `Source`."""

    @property
    def name(self) -> str: ...

    @property
    def server(self) -> str: ...

    @property
    def about(self) -> str: ...

    def in_openai_shape(self) -> dict[str, Any]: ...


class Result(Protocol):
    """The result of a call."""

    @property
    def text(self) -> str: ...

    @property
    def failed(self) -> bool: ...


class Source(Protocol):
    """Where tools come from: the MCP servers. Made by the command, because a conversation knows no servers."""

    @property
    def tools(self) -> Sequence[Tool]: ...

    @property
    def problems(self) -> Sequence[str]: ...

    def connect(self) -> None: ...

    def call(self, name: str, arguments: str, cancel: threading.Event | None = None) -> Result: ...

    def close(self) -> None: ...


class Toolbox:
    """The tools of one chat.

    opens   called by `connect`, because its imports are slow
    only    names to offer; None: all
    asks    whether a user can be asked; if not, every offered tool runs
    is_on   whether tools are offered at all (/tools)
    """

    def __init__(self, opens: Callable[[], Source], only: Collection[str] | None = None, *, asks: bool = True) -> None:
        self._opens = opens
        self._source: Source | None = None
        self.only = only
        self.asks = asks
        self._decided: dict[str, bool] = {}  # tools that always run (True) or never run (False)
        self._left_out: set[str] = set()
        self.is_on = True
        self.is_connected = False

    # --- what is offered ---------------------------------------------------------------------------------------------

    def connect(self) -> list[str]:
        """Connect to the servers, which takes up to 20 s. Returns what to say; warnings start with "!"."""
        try:
            source = self._opens()
        except LocalLLMError as error:
            self.is_connected = True
            return [f"! {error.message} ({error.hint})"]
        self._source = source  # from now on `close` ends what it started
        source.connect()
        self.is_connected = True
        servers = {tool.server for tool in source.tools}
        found = f"{counted(len(source.tools), 'tool')} from {counted(len(servers), 'MCP server')}"
        about = (
            f"{found}; /tools lists them, and every call needs your approval" if servers else "no tools are available"
        )
        return [*(f"! {problem}" for problem in source.problems), about]

    def close(self) -> None:
        if self._source is not None:
            self._source.close()

    @property
    def tools(self) -> list[Tool]:
        """The tools that can be called."""
        known = self._source.tools if self._source is not None else ()
        return [
            tool for tool in known
            if tool.name not in self._left_out and (self.only is None or tool.name in self.only)
        ]  # fmt: skip

    @property
    def names(self) -> list[str]:
        """All tool names, including those not offered."""
        return [tool.name for tool in self._source.tools] if self._source is not None else []

    @property
    def offered(self) -> ToolUse | None:
        """The tools for `ChatBackend.send`."""
        tools = [tool.in_openai_shape() for tool in self.tools if self._decided.get(tool.name, True)]
        return ToolUse(tuple(tools)) if tools and self.is_on else None

    def leave_out(self, param: str, message: str) -> str:
        """Drop the tool whose invalid schema failed a turn. Returns what to say; "" if the failure has another cause.

        param, message  of the failure
        """
        found = _TOOL.match(param)
        offered = self.offered
        if found is None or offered is None or int(found[1]) >= len(offered.tools):
            return ""
        name = offered.tools[int(found[1])]["function"]["name"]
        self._left_out.add(name)
        return f"skipping the tool {name}: {clean_line(message)}"

    def listed(self) -> str:
        """The tools, one per line."""
        if not self.is_connected:
            return "the MCP servers are not connected yet"
        words = {None: "asks", True: "always runs", False: "never runs"}
        lines = [
            f"{tool.name}  ({clean_line(tool.server)}, {words[self._decided.get(tool.name)]})  "
            + clean_line(tool.about)[:80]
            for tool in self.tools
        ]
        return (
            "\n".join([*([] if self.is_on else ["tools are off; turn them on with /tools on"]), *lines]) or "no tools"
        )

    # --- calls -------------------------------------------------------------------------------------------------------

    def decide(self, name: str, runs: bool) -> None:
        """From now on, run a tool without asking, or never run it."""
        self._decided[name] = runs

    def must_ask(self, call: Call) -> bool:
        """Whether the user must approve this call. If not, it has failed already or can run."""
        if call.result is not None:
            return False
        if call.name not in [tool.name for tool in self.tools]:
            fail(call, f"unknown tool {clean_line(call.name)[:64]}")
        elif self._decided.get(call.name) is False:
            fail(call, "the user does not allow this tool")
        elif self.asks and call.name not in self._decided:
            return True
        return False

    def run(self, call: Call, room: int, cancel: threading.Event | None = None) -> None:
        """Run a call and store at most `room` characters of its result. Blocks; `cancel` ends it."""
        assert self._source is not None
        result = self._source.call(call.name, call.arguments, cancel)
        call.result, call.failed = _cut(result.text, room), result.failed


def fail(call: Call, why: str) -> None:
    """Tell the model why a call has no result."""
    call.result, call.failed = why, True


def refuse(call: Call) -> None:
    """Record that the user refused this call."""
    fail(call, "the user refused this call")


def stop(answer: Answer) -> None:
    """Stop: calls without a result get none, and the answer ends."""
    for call in answer.calls:
        if call.result is None:
            fail(call, STOPPED)
    answer.end_round("abort")


def at_limit(answer: Answer) -> str:
    """End an answer after too many rounds of tool calls. Returns what to say; "" below the limit."""
    if len(answer.rounds) < MAX_ROUNDS:
        return ""
    for call in answer.calls:
        fail(call, f"not run: the limit is {MAX_ROUNDS} rounds of calls per answer")
    answer.end_round("abort")
    return f"stopped after {MAX_ROUNDS} rounds of tool calls; say “continue” to resume"


def room_for(facts: Facts, used_tokens: int, num_calls: int) -> int:
    """Maximum characters for each of several results: together, half of the free window."""
    if not facts.ctx:
        return 1 << 30
    return max(MIN_RESULT_CHARS, (facts.ctx - used_tokens) * 3 // 2 // max(1, num_calls))


def _cut(text: str, room: int) -> str:
    over = len(text) - room
    if over <= 0:
        return text
    return f"{text[:room]}\n[truncated: {counted(over, 'more character')} did not fit in the context]"


def shown_call(call: Call) -> str:
    """'echo  {"text": "hi"}': name and arguments, safe to display; long arguments are cut with a notice."""
    try:
        arguments = json.dumps(json.loads(call.arguments or "{}"), ensure_ascii=False)
    except (ValueError, RecursionError):
        arguments = call.arguments
    over = len(arguments) - SHOWN_CHARS
    cut = f" [{counted(over, 'more character')}]" if over > 0 else ""
    return f"{clean_line(call.name)[:64]}  {clean(arguments[:SHOWN_CHARS])}{cut}"


def shown_result(call: Call, lines: int = 0) -> str:
    """One line about a result; with `lines`, also its first lines."""
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

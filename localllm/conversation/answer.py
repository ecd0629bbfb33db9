"""A streamed answer as it accumulates: text, reasoning, calls, and how the turn ended."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from localllm.interface import ChatEvent, Delta, Done, Failed
from localllm.request import Message, Timing, Usage
from localllm.terminal import counted


@dataclass(slots=True)
class Call:
    """A tool call: its arguments as JSON text, and its result, None until there is one."""

    id: str = ""
    name: str = ""
    arguments: str = ""
    result: str | None = None
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """Text and reasoning before a set of tool calls, and the calls with their results."""

    text: str
    reasoning: str
    calls: list[Call]


@dataclass(slots=True, eq=False, kw_only=True)
class Answer:
    """An answer. `stop` is empty until the turn ends, then
    stop | length | full | abort | error | partial | edited | unanswered.

    stop    `length` is the token limit, `full` the end of the context window
    rounds  earlier text, each piece ended by calls
    calls   the calls that the model made after `text`
    known   what `usage` counts: rounds, and characters of `text` and of `reasoning`
    """

    text: str = ""
    reasoning: str = ""
    rounds: list[Round] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    stop: str = ""
    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)
    failed: Failed | None = None
    known: tuple[int, int, int] = (0, 0, 0)

    def add(self, event: ChatEvent) -> None:
        """Add an event of this turn. Tokens of a continued answer are counted once, as output: those sent back to the
        model as part of its prompt do not count as prompt tokens."""
        if isinstance(event, Delta):
            if event.kind == "content":
                self.text += event.text
            elif event.kind == "reasoning":
                self.reasoning += event.text
            else:
                self._add_call(json.loads(event.text))
        elif isinstance(event, Done):
            before, new = self.usage, event.usage
            self.stop, self.timing = str(event.stop), event.timing
            if self.stop == "tool_calls":  # a server's finish reason for an answer with calls
                self.stop = "stop"
            prompt = new.prompt_tokens and max(1, new.prompt_tokens - before.completion_tokens)
            self.usage = Usage(
                prompt, min(new.cached_tokens, prompt), before.completion_tokens + new.completion_tokens,
                before.reasoning_tokens + new.reasoning_tokens,
            )  # fmt: skip
            self.mark()
        elif isinstance(event, Failed):
            self.failed, self.stop = event, "error"

    def mark(self) -> None:
        """Note that `usage` counts all there is, unless it is unknown."""
        if self.usage.prompt_tokens:
            self.known = len(self.rounds), len(self.text), len(self.reasoning)

    @property
    def results(self) -> str:
        """The results of calls that `usage` does not count."""
        return "".join(call.result or "" for one in self.rounds[self.known[0] :] for call in one.calls)

    def _add_call(self, piece: dict[str, Any]) -> None:
        while len(self.calls) <= piece["index"]:
            self.calls.append(Call())
        call = self.calls[piece["index"]]
        call.id, call.name = piece.get("id") or call.id, piece.get("name") or call.name
        call.arguments += piece.get("arguments") or ""

    @property
    def wants_results(self) -> bool:
        """Whether the model waits for the results of its calls."""
        return bool(self.calls) and self.stop == "stop"

    def end_round(self, stop: str = "") -> None:
        """Close the round once its calls have results; the model continues, or the answer ends with `stop`."""
        self.rounds.append(Round(self.text, self.reasoning, self.calls))
        self.text, self.reasoning, self.calls, self.stop = "", "", [], stop
        self.known = self.known[0], 0, 0

    def round_messages(self) -> Iterator[Message]:
        """The rounds as messages for the model."""
        for one in self.rounds:
            calls = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in one.calls
            ]
            said = Message(role="assistant", content=one.text, tool_calls=calls)
            if one.reasoning:
                said["reasoning_content"] = one.reasoning
            yield said
            for call in one.calls:
                yield Message(role="tool", tool_call_id=call.id, name=call.name, content=call.result or "")

    @property
    def stats(self) -> str:
        """The statistics: '↑ 1,204 (cached 1,024)  ↓ 312  ·  91.4 tok/s  ·  TTFT 41 ms', and how the turn ended."""
        usage, timing = self.usage, self.timing
        tokens = counted(usage.completion_tokens, "token")
        cached = f" (cached {usage.cached_tokens:,})" if usage.cached_tokens else ""
        parts = [f"↑ {usage.prompt_tokens:,}{cached}  ↓ {usage.completion_tokens:,}"] if usage.prompt_tokens else []
        if timing.decode_tps:
            parts.append(f"{timing.decode_tps:.1f} tok/s")
        if usage.completion_tokens and timing.total_s:
            parts.append(f"TTFT {timing.ttft_s * 1000:.0f} ms")
        known = f" · {tokens}" if usage.completion_tokens or not self.text else ""
        end = {
            "abort": f"stopped by you{known} · /continue · /regen",
            "length": f"reached the limit of {tokens} · /continue",
            "full": f"the context window is full after {tokens} · /ctx · /new",
            "partial": "interrupted when the program exited · /continue",
            "edited": "edited by you",
            "unanswered": "not answered · /regen",
        }.get(self.stop)
        return "  ·  ".join([*parts, *([end] if end else [])])


def failure_lines(failed: Failed) -> Sequence[str]:
    """A failure as lines: what happened, and what to do next."""
    steps = [failed.hint] if failed.hint else []
    why = [f"  why  {failed.why}"] if failed.why else []
    steps += [f"{command}   {note}".rstrip() for command, note in failed.fixes if command != failed.hint]
    return [
        f"✗ {failed.message}   [{failed.code}]",
        *why,
        *(f"  {'try' if i == 0 else '   '}  {s}" for i, s in enumerate(steps)),
    ]

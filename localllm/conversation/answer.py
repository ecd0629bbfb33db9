"""A streamed answer as it adds up: text, reasoning and how the turn ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from localllm.interface import ChatEvent, Delta, Done, Failed
from localllm.request import Timing, Usage
from localllm.terminal import counted


@dataclass(slots=True, eq=False, kw_only=True)
class Answer:
    """`stop` is empty until the turn has ended: stop | length | abort | error | partial | edited | unanswered."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[str] = field(default_factory=list)
    stop: str = ""
    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)
    failed: Failed | None = None

    def add(self, event: ChatEvent) -> None:
        """Take an event of this turn. The tokens of an answer that was continued are counted together."""
        if isinstance(event, Delta):
            if event.kind == "content":
                self.text += event.text
            elif event.kind == "reasoning":
                self.reasoning += event.text
            else:
                self.tool_calls.append(event.text)
        elif isinstance(event, Done):
            before, new = self.usage, event.usage
            self.stop, self.timing = str(event.stop), event.timing
            self.usage = Usage(
                new.prompt_tokens, new.cached_tokens, before.completion_tokens + new.completion_tokens,
                before.reasoning_tokens + new.reasoning_tokens,
            )  # fmt: skip
        elif isinstance(event, Failed):
            self.failed, self.stop = event, "error"

    @property
    def stats(self) -> str:
        """The line below: '↑ 1,204 (cached 1,024)  ↓ 312  ·  91.4 tok/s  ·  TTFT 41 ms', and how the turn ended."""
        usage, timing = self.usage, self.timing
        tokens = counted(usage.completion_tokens, "token")
        cached = f" (cached {usage.cached_tokens:,})" if usage.cached_tokens else ""
        parts = [f"↑ {usage.prompt_tokens:,}{cached}  ↓ {usage.completion_tokens:,}"] if usage.prompt_tokens else []
        if timing.decode_tps:
            parts.append(f"{timing.decode_tps:.1f} tok/s")
        if usage.completion_tokens and timing.total_s:
            parts.append(f"TTFT {timing.ttft_s * 1000:.0f} ms")
        end = {
            "abort": f"stopped by you · {tokens} · /continue · /regen",
            "length": f"reached the limit of {tokens} · /continue",
            "partial": "cut off when the program ended · /continue",
            "edited": "edited by you",
            "unanswered": "not answered · /regen",
        }.get(self.stop)
        return "  ·  ".join([*parts, *([end] if end else [])])


def failure_lines(failed: Failed) -> Sequence[str]:
    """A failure as lines: what, and what to do next."""
    steps = [failed.hint] if failed.hint else []
    why = [f"  why  {failed.why}"] if failed.why else []
    steps += [f"{command}   {note}".rstrip() for command, note in failed.fixes if command != failed.hint]
    return [
        f"✗ {failed.message}   [{failed.code}]",
        *why,
        *(f"  {'try' if i == 0 else '   '}  {s}" for i, s in enumerate(steps)),
    ]

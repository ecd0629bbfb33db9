"""A streamed answer as it adds up: text, reasoning and how the turn ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from localllm.interface import ChatEvent, Delta, Done, Failed
from localllm.request import Timing, Usage


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

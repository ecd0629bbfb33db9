"""A request for text on its way in: `Generation`, the one value that every API's request is read into.

A request is six objects in all: its `Exchange` (who asks: id, client, log line), the checked body of its API, a
`Generation`, a `Reservation` (its place in the model's queue, then the loaded model), `SamplingParams` (what the engine
is told), and an `AsyncResponseStream` per prompt, which the answer is read from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from localllm.llm.llm import LLM
from localllm.request import Constraint, Message, ToolUse


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, and what the model's template is told beside them."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continue_final: bool = False
    opens_answer: bool = True

    def encode(self, llm: LLM) -> list[int]:
        """Its token ids; takes long enough for a thread."""
        return llm.encode_chat(
            self.messages, self.tools, self.template_kwargs,
            continue_final=self.continue_final, opens_answer=self.opens_answer,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Generation:
    """What is to be generated, checked as far as that goes without the model.

    model       the id that was asked for; None for the default
    prompts     a conversation, or texts and token ids, each of which is answered
    sampling    fields of `SamplingParams` that replace the model's defaults
    streams     deltas are wanted as they come
    generates   False: only the prompt is scored, the token that the engine makes for it is dropped
    user        tells the users of one client apart, for fairness
    priority    lower is earlier
    deadline    on the monotonic clock
    cache_salt  requests with different ones share no cached pages
    """

    model: str | None
    prompts: Conversation | list[str | list[int]]
    sampling: Mapping[str, Any]
    constraint: Constraint | None = None
    tool_use: ToolUse | None = None
    streams: bool = False
    generates: bool = True
    user: str = ""
    priority: int = 0
    deadline: float | None = None
    cache_salt: str = ""

    @property
    def num_sequences(self) -> int:
        """Sequences that the engine runs for it."""
        prompts = 1 if isinstance(self.prompts, Conversation) else len(self.prompts)
        return prompts * int(self.sampling.get("n", 1))

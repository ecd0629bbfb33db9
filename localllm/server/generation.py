"""A request for text on its way in: `Generation`, the one value that every API's request is read into.

A request is six objects in all: its `Exchange` (who asks: id, client, log line), the checked body of its API, a
`Generation`, a `Reservation` (its place in the model's queue, then the loaded model), `SamplingParams` (what the engine
is told), and an `AsyncResponseStream`, which the answers are read from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from localllm.errors import ContextTooLong
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
    """What is to be generated, checked as far as that goes without the model."""

    model: str | None  # the id that was asked for; None for the default
    prompts: Conversation | list[str | list[int]]  # a conversation, or texts and token ids, each of which is answered
    sampling: Mapping[str, Any]  # fields of `SamplingParams` that replace the model's defaults
    constraint: Constraint | None = None
    tool_use: ToolUse | None = None
    streams: bool = False  # deltas are wanted as they come
    generates: bool = True  # False: only the prompt is scored, the token that the engine makes for it is dropped
    user: str = ""  # tells the users of one client apart, for fairness
    priority: int = 0  # lower is earlier
    deadline: float | None = None  # on the monotonic clock
    cache_salt: str = ""  # requests with different ones share no cached pages
    shortens: bool = False  # a conversation longer than the window loses its oldest turns

    @property
    def num_sequences(self) -> int:
        """Sequences that the engine runs for it."""
        prompts = 1 if isinstance(self.prompts, Conversation) else len(self.prompts)
        return prompts * int(self.sampling.get("n", 1))

    def shorter(self, error: ContextTooLong) -> Generation | None:
        """One that may fit where this was too long; None where nothing may be left out, or no more can."""
        if not self.shortens or not isinstance(self.prompts, Conversation):
            return None
        share = 1 - error.context["max_context"] / error.context["prompt_tokens"]
        messages = without_oldest(self.prompts.messages, share)
        return None if messages is None else replace(self, prompts=replace(self.prompts, messages=messages))


def without_oldest(messages: Sequence[Message], share: float) -> list[Message] | None:
    """The messages without the oldest turns, at least this share of the text; None when only the last turn is left.

    What the system says at the beginning stays, and a turn goes as a whole: from a user's message to before the next.
    """
    begin = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    turns = [i for i in range(begin + 1, len(messages)) if messages[i]["role"] == "user"]
    if not turns:
        return None
    sizes = [len(json.dumps(m, ensure_ascii=False)) for m in messages]
    wanted = share * sum(sizes)
    cut = next((i for i in turns if sum(sizes[begin:i]) >= wanted), turns[-1])
    return [*messages[:begin], *messages[cut:]]

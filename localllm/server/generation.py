"""`Generation`: the common form into which every API's generation request is read.

A request passes through six objects: its `Exchange` (id, client, log line), the validated body of its API, a
`Generation`, a `Reservation` (its place in the model's queue, then the loaded model), `SamplingParams` for the engine,
and an `AsyncResponseStream` that yields the responses.
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
    """Messages, with the other arguments of the chat template."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continue_final: bool = False
    opens_answer: bool = True

    def encode(self, llm: LLM) -> list[int]:
        """Return the token ids. Slow enough to belong in a thread."""
        return llm.encode_chat(
            self.messages, self.tools, self.template_kwargs,
            continue_final=self.continue_final, opens_answer=self.opens_answer,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Generation:
    """A generation request, validated as far as possible without the model."""

    model: str | None  # the requested id; None for the default
    prompts: Conversation | list[str | list[int]]  # a conversation, or prompts as text or token ids
    sampling: Mapping[str, Any]  # fields of `SamplingParams` that override the model's defaults
    constraint: Constraint | None = None
    tool_use: ToolUse | None = None
    streams: bool = False  # send deltas as they arrive
    generates: bool = True  # False: score the prompt only; the one token that the engine generates is dropped
    user: str = ""  # distinguishes the users of one client, for fairness
    priority: int = 0  # lower runs earlier
    deadline: float | None = None  # on the monotonic clock
    cache_salt: str = ""  # requests with different salts share no cached pages
    shortens: bool = False  # drop the oldest turns of a conversation that exceeds the context window

    @property
    def num_sequences(self) -> int:
        """Number of sequences that the engine runs for this request."""
        prompts = 1 if isinstance(self.prompts, Conversation) else len(self.prompts)
        return prompts * int(self.sampling.get("n", 1))

    def shorter(self, error: ContextTooLong) -> Generation | None:
        """Return a copy without its oldest turns that may fit; None if that is not allowed or only one turn is left."""
        if not self.shortens or not isinstance(self.prompts, Conversation):
            return None
        share = 1 - error.context["max_context"] / error.context["prompt_tokens"]
        messages = without_oldest(self.prompts.messages, share)
        return None if messages is None else replace(self, prompts=replace(self.prompts, messages=messages))


def without_oldest(messages: Sequence[Message], share: float) -> list[Message] | None:
    """Drop the oldest turns, at least this share of the text; None when only the last turn is left.

    Leading system messages stay. A turn, from one user message up to the next, is dropped as a whole.
    """
    begin = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    turns = [i for i in range(begin + 1, len(messages)) if messages[i]["role"] == "user"]
    if not turns:
        return None
    sizes = [len(json.dumps(m, ensure_ascii=False)) for m in messages]
    wanted = share * sum(sizes)
    cut = next((i for i in turns if sum(sizes[begin:i]) >= wanted), turns[-1])
    return [*messages[:begin], *messages[cut:]]

"""Pinned system prompts: their pages are computed when a model is loaded and evicted last from the prefix cache."""

from __future__ import annotations

import logging
import os.path
from collections.abc import Sequence

from localllm.errors import LocalLLMError
from localllm.llm.llm import LLM
from localllm.request import Message, SamplingParams

log = logging.getLogger(__name__)


def pin_system_prompts(llm: LLM, prompts: Sequence[str]) -> None:
    """Compute and pin the tokens that precede the user's message in every conversation with these system prompts.

    A prompt that the model's template rejects or that exceeds its context is skipped with a warning.
    """
    for text in prompts:
        try:
            prefix = common_prefix(llm, text)
            if len(prefix) >= llm.plan.page_size:
                llm.engine.pins.add(prefix)
                llm.submit(prefix, SamplingParams(temperature=0, max_tokens=1)).answer()
        except LocalLLMError as error:
            log.warning("could not pin a system prompt of %d characters: %s", len(text), error.message)


def common_prefix(llm: LLM, system: str) -> list[int]:
    """The token ids that all conversations with this system prompt begin with."""
    if not llm.has_chat_template:
        return llm.encode_prompt(system)
    both = [
        llm.encode_chat([Message(role="system", content=system), Message(role="user", content=user)])
        for user in ("a", "1")
    ]
    return list(os.path.commonprefix(both))

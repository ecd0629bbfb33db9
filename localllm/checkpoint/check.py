"""Facts and tensors held against each other: every tensor the model needs is there, once, in the shape its numbers imply."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .facts import ModelFacts, count_params
from .gguf_facts import gguf_facts

if TYPE_CHECKING:
    from .checkpoint import Checkpoint


def checked_facts(checkpoint: Checkpoint) -> ModelFacts:
    """The facts of `checkpoint`, complete. Raises BadModelFile or UnsupportedModel."""
    if checkpoint.kind == "gguf":
        facts = gguf_facts(checkpoint.path, checkpoint.metadata, checkpoint.tensors)
    return replace(facts, num_params=count_params(facts))

"""`Architecture`: what a family's file says, so that everything else can load, plan and run its models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from localllm.checkpoint import Checkpoint

from .facts import ModelFacts
from .gguf import GgufConfig
from .hf import HfConfig
from .names import NameMap, gguf_names, hf_names


class Architecture(ABC):
    """One family of models."""

    name: ClassVar[str]  # what we call it
    label: ClassVar[str]  # what people call its models, for lists and refusals
    hf_types: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # model_type -> what config.json may leave out
    hf_renamed: ClassVar[Mapping[str, str]] = {}  # keys of config.json -> what others call the same
    hf_wrappers: ClassVar[Mapping[str, str]] = {}  # multi-modal model_type -> that of its text part
    hf_classes: ClassVar[tuple[str, ...]] = ()  # entries of `architectures`, by which the hub lists a model
    gguf_types: ClassVar[tuple[str, ...]] = ()  # values of general.architecture

    @abstractmethod
    def from_hf(self, config: HfConfig) -> ModelFacts:
        """Facts from config.json. Raises UnsupportedModel for what cannot be computed, BadModelFile for bad values."""

    @abstractmethod
    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        """The same from GGUF metadata."""

    def hf_values(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """Config.json's values of the text model under the keys that `from_hf` reads."""
        ours = {new: text[key] for key, new in self.hf_renamed.items() if key in text}
        return {key: value for key, value in text.items() if key not in self.hf_renamed} | ours

    def names(self, checkpoint: Checkpoint) -> NameMap:
        return gguf_names() if checkpoint.kind == "gguf" else hf_names(checkpoint.tensors)

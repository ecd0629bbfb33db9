"""`Architecture`: the description of a model family from which all other code loads, plans and runs its models."""

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

    name: ClassVar[str]  # canonical name
    label: ClassVar[str]  # common name of its models, for lists and error messages
    hf_types: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # model_type -> defaults for config.json
    hf_renamed: ClassVar[Mapping[str, str]] = {}  # key in this family's config.json -> the usual key
    hf_wrappers: ClassVar[Mapping[str, str]] = {}  # multi-modal model_type -> that of its text part
    hf_classes: ClassVar[tuple[str, ...]] = ()  # entries of `architectures`, by which the hub lists a model
    gguf_types: ClassVar[tuple[str, ...]] = ()  # values of general.architecture
    hf_inner: ClassVar[Mapping[str, str]] = {}  # `NameMap.inner` of safetensors
    gguf_inner: ClassVar[Mapping[str, str]] = {}  # that of GGUF files, on top of `GGUF_LAYER`

    @abstractmethod
    def from_hf(self, config: HfConfig) -> ModelFacts:
        """Facts from config.json. Raises UnsupportedModel for unsupported features, BadModelFile for bad values."""

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        """Facts from GGUF metadata, of families with `gguf_types`. Raises like `from_hf`."""
        raise config.unsupported(config.source)

    def hf_values(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """The text model's values in config.json, under the keys that `from_hf` reads."""
        ours = {new: text[key] for key, new in self.hf_renamed.items() if key in text}
        return {key: value for key, value in text.items() if key not in self.hf_renamed} | ours

    def names(self, checkpoint: Checkpoint) -> NameMap:
        inner = self.inner_names(checkpoint)
        return gguf_names(inner) if checkpoint.kind == "gguf" else hf_names(checkpoint.tensors, inner)

    def inner_names(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        """`hf_inner` or `gguf_inner`; overridden where a family's files differ."""
        return self.gguf_inner if checkpoint.kind == "gguf" else self.hf_inner

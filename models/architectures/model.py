"""`open_model`: a checkpoint with its facts, after checking that every tensor exists with the expected shape."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from localllm.checkpoint import Checkpoint, StoredFormat, open_checkpoint, stored_formats
from localllm.checkpoint.formats import format_label
from localllm.checkpoint.formats.module import DENSE
from localllm.checkpoint.mapped_file import bad
from localllm.errors import BadModelFile, ModelNotFound, UnsupportedFormat

from . import registry
from .facts import ModelFacts, count_params, expanded_modules, idle_experts, linear_shapes, vector_shapes
from .layers import CLUSTERS, D2T, EXPERT_TABLE, Entry, Experts, LayerFacts
from .mmproj import AUTO, tower_of
from .names import TOWER, NameMap
from .vision import ImageFacts

_TOWER = re.compile(
    r"(^|\.)(vision_tower|vision_model|visual|image_tower|audio_tower|vision_embed_tokens|vision_encoder|embed_vision"
    r"|embed_audio)\."
)
_SOUND = re.compile(r"(^|\.)(audio_tower|embed_audio)\.")


def open_model(path: Path | str, mmproj: str = AUTO) -> OpenModel:
    """Open the model at `path`: a .gguf file, or a folder with safetensors or one .gguf. Close it, or use `with`.

    mmproj   for GGUF: "auto" uses the mmproj file next to the model, "off" none; otherwise a path

    Raises what `open_checkpoint` raises; accessing `facts` can raise more.
    """
    found = OpenModel(**vars(open_checkpoint(path)))
    found.mmproj = mmproj
    return found


class OpenModel(Checkpoint):
    """A checkpoint and its facts."""

    mmproj: str
    projector: Path | None = None  # the mmproj file with the tower, if there is one; set by `facts`

    @cached_property
    def _understood(self) -> tuple[ModelFacts, NameMap]:
        return registry.understand(self)

    @property
    def names(self) -> NameMap:
        """The module names in this file. Raises like `facts`."""
        return self._understood[1]

    @cached_property
    def formats(self) -> dict[str, StoredFormat]:
        """The stored format of each linear module, by name in the file. Raises BadModelFile or UnsupportedFormat."""
        return stored_formats(self)

    @cached_property
    def facts(self) -> ModelFacts:
        """The model's facts, checked against limits and tensors.

        Raises BadModelFile, UnsupportedModel or UnsupportedFormat.
        """
        facts = self._understood[0]
        facts = replace(facts, stored_format=facts.stored_format or format_label(self.formats))
        self._check(facts)
        facts = self._with_tower(facts)
        held: Counter[str] = Counter()
        for name, info in self.tensors.items():
            held[name.rpartition(".")[0]] += info.nbytes
        taken_apart = {self.names.source(module): shape for module, shape in expanded_modules(facts).items()}
        decoded = sum(
            max(0, 2 * math.prod(shape) - held[name])
            for name, shape in taken_apart.items()
            if self.formats[name].label not in DENSE.values()
        )
        half = (stored.shape for stored in self.formats.values() if "rows" in stored.params)
        decoded += sum(3 * math.prod(shape) for shape in half)  # FP8 in half blocks becomes float32
        facts = self._with_predictor(facts, held)
        idle = sum(count * held[self.names.source(module)] for module, count in idle_experts(facts).items())
        if facts.loops > 1:
            own = set[str]().union(*(self._modules(facts, index) for index in range(len(facts.stored_layers))))
            idle -= (facts.loops - 1) * sum(held[module] for module in own)
        return replace(
            facts,
            num_params=count_params(facts),
            active_share=1 - idle / max(1, facts.weight_bytes),
            decoded_bytes=facts.decoded_bytes + decoded,
        )

    def _with_tower(self, facts: ModelFacts) -> ModelFacts:
        """Add the tower of an mmproj file, or the reason why the one next to the model cannot be used."""
        if self.kind != "gguf":
            return facts
        whole, found = (self.tensors, self.files, self.formats), None
        try:
            found = tower_of(self, facts, self.mmproj)
            if found is None:
                return facts
            file, vision = found
            self.projector, self.tensors = file.path, self.tensors | file.tensors
            self.files, self.formats = {**self.files, **file.files}, self.formats | stored_formats(file)
            self._check_tower(vision, facts.hidden_size)
        except (BadModelFile, ModelNotFound) as error:
            self.tensors, self.files, self.formats = whole
            if found is not None:
                found[0].close()
            if self.mmproj != AUTO:
                raise
            return replace(facts, vision_flaw=str(error))
        return replace(facts, vision=vision)

    def _with_predictor(self, facts: ModelFacts, held: Mapping[str, int]) -> ModelFacts:
        """Add the bytes of the MTP head, or drop a head that cannot be read, since the model runs without it.

        held   module -> its stored bytes
        """
        if facts.predictor is None:
            return facts
        try:
            self._layer(facts.num_layers, facts.predictor, facts.hidden_size)
        except (BadModelFile, UnsupportedFormat) as error:
            return replace(facts, predictor=None, predictor_flaw=f"the MTP head cannot be used: {error}")
        return replace(facts, predictor_bytes=sum(held[name] for name in self._modules(facts, facts.num_layers)))

    def _modules(self, facts: ModelFacts, index: int) -> set[str]:
        """The modules of a layer, by their names in the file."""
        start, layer = f"model.layers.{index}.", facts.keeping_layers[index]
        vectors = (self.names.tensor(start + name) for name in vector_shapes(layer, facts.hidden_size))
        modules = {self.names.source(start + module) for module in linear_shapes(layer, facts.hidden_size)}
        return modules | {name.rpartition(".")[0] for name in vectors}

    def stored_modules(self, facts: ModelFacts) -> set[str]:
        """The modules of all layers and those between residual streams, by their names in the file."""
        found = (streams.outer(facts.hidden_size) for streams in (facts.streams, facts.hyper) if streams is not None)
        outer = {self.names.source(module) for modules in found for module in modules}
        vectors = {} if facts.hyper is None else facts.hyper.outer_vectors(facts.hidden_size)
        outer |= {self.names.source(name.rpartition(".")[0]) for name in vectors}
        return outer.union(*(self._modules(facts, index) for index in range(len(facts.keeping_layers))))

    @property
    def doubt(self) -> str:
        """A warning if the file lacks something, or if the configuration contradicts the tensors; the latter win."""
        if self.facts.flaw:
            return self.facts.flaw
        said = self.quantization_config.get("quant_method") or self.quantization_config.get("quant_algo")
        stored = self.facts.stored_format
        if not said or stored not in ("bf16", "fp16", "f32"):
            return ""
        return f"the configuration says {str(said)[:40]}, but the weights are {stored}; they are read as {stored}"

    @property
    def unread(self) -> str:
        """A warning about an unsupported tower, without which the rest of the model runs; "" if there is none."""
        if self.facts.vision_flaw:
            return f"{self.facts.vision_flaw}: the model reads text only"
        sees = self.facts.vision is not None
        found = ((_SOUND if sees else _TOWER).search(name) for name in self.tensors)
        tower = next((match[2] for match in found if match is not None), "")
        reads = "text and images" if sees else "text only"
        return f"{tower} is not supported: the model reads {reads}" if tower else ""

    def _check(self, facts: ModelFacts) -> None:
        """Raise for the first tensor that is missing or has the wrong shape."""
        hidden = facts.hidden_size
        num_layers = facts.num_layers + facts.extra_layers
        first = next(self.names.beyond(self.tensors, num_layers), None)
        if first is not None:
            what = f"belongs to a layer beyond the {num_layers} that the file declares"
            raise bad(self.path, what, key=first)
        if facts.follower is not None:
            for module, shape in facts.follower.linears(hidden).items():
                self._linear(module, shape)
            for name, sizes in facts.follower.vectors(hidden).items():
                self._vector(name, sizes)
            if facts.eagle3 is not None and facts.eagle3.mapped:
                self._token_ids(D2T, facts.eagle3.head)
        else:
            self._linear("model.embed_tokens", (facts.vocab_size, hidden))
            if not facts.tied_embeddings:
                self._linear("lm_head", (facts.vocab_size, hidden))
        if facts.final_norm:
            self._vector("model.norm.weight", (hidden,))
        if facts.entry is not None:
            self._entry(facts.entry, hidden, bias=facts.layers[0].norms.bias)
        if facts.inputs is not None:
            for module, shape in facts.inputs.linears(hidden).items():
                self._linear(module, shape)
            for name, sizes in facts.inputs.vectors().items():
                self._vector(name, sizes)
        for module, shape in {} if facts.assistant is None else facts.assistant.linears(hidden).items():
            self._linear(module, shape)
        if facts.assistant is not None and facts.assistant.clusters:
            self._token_ids(CLUSTERS, facts.vocab_size)
        for streams in (facts.streams, facts.hyper):
            for module, shape in {} if streams is None else streams.outer(hidden).items():
                self._linear(module, shape)
        for name, sizes in {} if facts.hyper is None else facts.hyper.outer_vectors(hidden).items():
            self._vector(name, sizes)
        for index, layer in enumerate(facts.layers):
            self._layer(index, layer, hidden)
        size = hidden
        for projection in facts.projections:
            if projection.inputs != size:
                what = f"takes {projection.inputs:,} inputs, but the vector before it has {size:,} elements"
                raise bad(self.path, what, key=projection.name)
            size = projection.outputs
            self._stored_linear(projection.name, (size, projection.inputs))
            if projection.bias:
                self._stored(f"{projection.name}.bias", (size,))
        if facts.vision is not None:
            self._check_tower(facts.vision, hidden)
        for rope in facts.ropes:
            if rope.factors_tensor:
                self._stored(rope.factors_tensor, (rope.dim // 2,))

    def _token_ids(self, name: str, count: int) -> None:
        self._integers(name, (count,), f"{count:,} token ids")

    def _integers(self, name: str, shape: tuple[int, ...], expected: str) -> None:
        info = self.tensors.get(name)
        if info is None or info.dtype not in ("I32", "I64") or info.shape != shape:
            what = "is missing" if info is None else f"holds {info.dtype} {list(info.shape)}"
            raise bad(self.path, f"{what}; {expected} are expected", key=name)

    def _check_tower(self, vision: ImageFacts, hidden: int) -> None:
        for module, shape in vision.linears().items():
            self._linear(module, shape)
        for name, sizes in vision.vectors(hidden).items():
            self._stored(self.names.tensor(name), sizes)

    def _layer(self, index: int, layer: LayerFacts, hidden: int) -> None:
        start = f"model.layers.{index}."
        for module, shape in linear_shapes(layer, hidden).items():
            self._linear(start + module, shape)
        for name, sizes in vector_shapes(layer, hidden).items():
            self._vector(start + name, sizes)
        if isinstance(layer.ffn, Experts) and layer.ffn.hashed:
            shape = layer.ffn.hashed, layer.ffn.top_k
            self._integers(
                self.names.tensor(start + EXPERT_TABLE), shape, f"{shape[1]} experts for {shape[0]:,} tokens"
            )

    def _entry(self, entry: Entry, hidden: int, *, bias: bool) -> None:
        for name, rows in (("position", entry.positions), ("token_type", entry.token_types)):
            if rows:
                self._linear(f"model.{name}_embeddings", (rows, hidden))
        for end in ("weight", "bias") if bias else ("weight",):
            self._vector(f"model.embedding_norm.{end}", (hidden,))

    def _linear(self, module: str, shape: tuple[int, int]) -> None:
        self._stored_linear(self.names.source(module), shape)

    def _stored_linear(self, name: str, shape: tuple[int, int]) -> None:
        stored = self.formats.get(name)
        if stored is None:
            below = sorted(key for key in self.tensors if key.startswith(f"{name}."))
            what = f"is stored as {', '.join(below[:4])}, an unsupported layout" if below else "is missing"
            raise bad(self._holder(name), f"the weight {what}", key=f"{name}.weight")
        if stored.shape != shape:
            what = f"the weight has shape {list(stored.shape)}, expected {list(shape)}"
            raise bad(self._holder(name), what, key=f"{name}.weight")

    def _holder(self, name: str) -> Path:
        """The file or folder that would contain a tensor of this name."""
        return self.projector if self.projector is not None and name.startswith(TOWER) else self.path

    def _vector(self, tensor: str, shape: tuple[int, ...]) -> None:
        self._stored(self.names.tensor(tensor), shape)

    def _stored(self, name: str, shape: tuple[int, ...]) -> None:
        info = self.tensors.get(name)
        if info is None:
            raise bad(self._holder(name), "the tensor is missing", key=name)
        if tuple(n for n in info.shape if n > 1) != tuple(n for n in shape if n > 1):
            raise bad(info.file, f"has shape {list(info.shape)}, expected {list(shape)}", key=name)
        if info.dtype not in DENSE:
            raise bad(info.file, f"is stored as {info.dtype}, expected one of {', '.join(DENSE)}", key=name)

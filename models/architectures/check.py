"""Facts and tensors held against each other: every tensor the model needs is there, in the shape its numbers imply."""

from __future__ import annotations

from dataclasses import replace

from .detect import DENSE, format_label, stored_formats
from .facts import ModelFacts, count_params, linear_shapes, norm_shapes
from .gguf_facts import gguf_facts
from .hf_facts import hf_facts
from .mapped_file import bad
from .names import SourceNames
from .stored_format import StoredFormat
from .tensor_info import StoredModel


def checked_facts(model: StoredModel) -> ModelFacts:
    """The facts of `model`, complete. Raises BadModelFile, UnsupportedModel or UnsupportedFormat."""
    if model.kind == "gguf":
        facts = gguf_facts(model.path, model.metadata, model.tensors)
        formats = stored_formats(model)
    else:
        facts = hf_facts(model)
        formats = stored_formats(model)
        facts = replace(facts, stored_format=format_label(formats))
    _Tensors(model, facts, formats).check()
    return replace(facts, num_params=count_params(facts))


class _Tensors:
    """The tensors a model must have."""

    def __init__(self, model: StoredModel, facts: ModelFacts, formats: dict[str, StoredFormat]) -> None:
        self.model = model
        self.facts = facts
        self.formats = formats
        self.names = SourceNames(model, facts.architecture)

    def check(self) -> None:
        """Raise for the first tensor that is missing or of another shape."""
        facts = self.facts
        table = (facts.vocab_size, facts.hidden_size)
        self._linear("model.embed_tokens", table)
        if not facts.tied_embeddings:
            self._linear("lm_head", table)
        self._vector("model.norm.weight", facts.hidden_size)
        matrices, norms = linear_shapes(facts), norm_shapes(facts)
        biases = {f"self_attn.{name}_proj": facts.attention_bias for name in "qkv"}
        biases["self_attn.o_proj"] = facts.o_bias
        biases.update({f"mlp.{name}_proj": facts.mlp_bias for name in ("gate", "up", "down")})
        for layer in range(facts.num_layers):
            start = f"model.layers.{layer}."
            for inner, shape in matrices.items():
                self._linear(start + inner, shape)
                if biases[inner]:
                    self._vector(f"{start}{inner}.bias", shape[0])
            for inner, (size,) in norms.items():
                self._vector(f"{start}{inner}.weight", size)
        if facts.rope.factors_tensor:
            self._stored(facts.rope.factors_tensor, facts.rope.dim // 2)

    def _linear(self, module: str, shape: tuple[int, int]) -> None:
        name = self.names.source(module)
        stored = self.formats.get(name)
        if stored is None:
            below = sorted(key for key in self.model.tensors if key.startswith(f"{name}."))
            what = f"is stored as {', '.join(below[:4])}, a layout that is not read" if below else "is missing"
            raise bad(self.model.path, f"the weight {what}", key=f"{name}.weight")
        if stored.shape is not None and stored.shape != shape:
            what = f"holds a weight of {list(stored.shape)}, {list(shape)} is expected"
            raise bad(self.model.path, what, key=f"{name}.weight")

    def _vector(self, name: str, size: int) -> None:
        module, _, last = name.rpartition(".")
        self._stored(f"{self.names.source(module)}.{last}", size)

    def _stored(self, name: str, size: int) -> None:
        info = self.model.tensors.get(name)
        if info is None:
            raise bad(self.model.path, "the tensor is missing", key=name)
        if info.shape != (size,):
            raise bad(info.file, f"has shape {list(info.shape)}, [{size}] is expected", key=name)
        if info.dtype not in DENSE:
            raise bad(info.file, f"is stored as {info.dtype}, {', '.join(DENSE)} are expected", key=name)

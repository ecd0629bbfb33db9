"""`GgufConfig`: hyper-parameters from the metadata of a GGUF file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from localllm.checkpoint import Checkpoint, TensorInfo
from localllm.checkpoint.fields import MAX_CONTEXT, MAX_EXPERTS, MAX_HEAD_DIM, MAX_HIDDEN, MAX_LAYERS, MAX_VOCAB, Fields
from localllm.checkpoint.formats.gguf import decoded_bytes
from localllm.checkpoint.gguf_types import FILE_TYPES
from localllm.checkpoint.mapped_file import bad, shown
from localllm.checkpoint.text_modules import Projection
from localllm.checkpoint.vocabulary import check_vocabulary, special_ids
from localllm.errors import UnsupportedModel

from .config import Config
from .layers import Experts
from .mixers import Attention, RopeFacts
from .names import NameMap

_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "top_k": "general.sampling.top_k",
    "repetition_penalty": "general.sampling.penalty_repeat",
    "xtc_probability": "general.sampling.xtc_probability",
    "xtc_threshold": "general.sampling.xtc_threshold",
}
_POOLINGS = ("", "mean", "cls", "last", "rank")  # indexed by llama.cpp's pooling_type
_NOT_MODELS = {
    "adapter": ("is a LoRA adapter", "merge it into its base model first: an adapter cannot run alone"),
    "mmproj": ("is a vision projector", "use the model's own .gguf file next to it"),
    "imatrix": ("is an importance matrix for quantization", "use the model's own .gguf file"),
    "vocab": ("holds a vocabulary but no weights", "download the model itself"),
}


class GgufConfig(Config):
    """`keys` are those below `<architecture>.`; `general` has all metadata."""

    KEYS = {
        "layers": "block_count",
        "hidden": "embedding_length",
        "heads": "attention.head_count",
        "kv_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "inner": "feed_forward_length",
        "eps": "attention.layer_norm_rms_epsilon",
    }

    def __init__(self, checkpoint: Checkpoint, names: NameMap) -> None:
        path, metadata = checkpoint.path, checkpoint.metadata
        source = metadata["general.architecture"]
        self.general = Fields(path, metadata)
        keys = Fields(path, metadata, f"{source}.")
        self.num_experts = keys.integer("expert_count", 0, MAX_EXPERTS, 0)
        self.is_assistant = source.endswith("-assistant")  # only drafts for another model
        extra = keys.integer("nextn_predict_layers", 0, MAX_LAYERS, 0)  # included in block_count
        self.extra_layers = 0 if self.is_assistant else extra  # an assistant counts all of its layers there
        super().__init__(checkpoint, keys, names, source)
        self.num_layers -= self.extra_layers
        if self.num_layers < 1:
            total = self.num_layers + self.extra_layers
            raise keys.fail("nextn_predict_layers", f"is {self.extra_layers}, but the file has only {total} layers")

    @property
    def projections(self) -> tuple[Projection, ...]:
        found = ((name, self.checkpoint.tensors.get(f"{name}.weight")) for name in ("dense_2", "dense_3"))
        shapes = [(name, info.shape) for name, info in found if info is not None and len(info.shape) == 2]
        return tuple(Projection(name, inputs, outputs) for name, (outputs, inputs) in shapes)

    @property
    def causal(self) -> bool:
        return self.keys.flag("attention.causal", True)

    @property
    def pooling(self) -> str:
        kind = self.keys.integer("pooling_type", 0, len(_POOLINGS) - 1, 0)
        if _POOLINGS[kind] == "rank":
            raise self.unsupported(f"{self.source} with a classification head (a reranker)")
        return _POOLINGS[kind]

    def read_vocab_size(self) -> int:
        path, tensors = self.checkpoint.path, self.checkpoint.tensors
        if not tensors:
            what, hint = _NOT_MODELS["vocab"]
            raise bad(path, what, key="tensor count", hint=hint, error=UnsupportedModel)
        name = f"{self.names.source('model.embed_tokens')}.weight"
        table = tensors.get(name)
        if table is None and self.source in ("dflash", "eagle3"):  # it uses the table of the model that it drafts for
            check_vocabulary(path, self.checkpoint.metadata)
            return len(self.checkpoint.metadata["tokenizer.ggml.tokens"])
        if table is None:
            raise bad(path, "the tensor is missing", key=name)
        if len(table.shape) != 2 or table.shape[1] != self.hidden_size:
            raise bad(path, f"has shape {list(table.shape)}, expected rows of {self.hidden_size:,} elements", key=name)
        rows = table.shape[0]
        if rows > MAX_VOCAB:
            raise bad(path, f"has {rows:,} rows; the limit is {MAX_VOCAB:,}", key=name)
        check_vocabulary(path, self.checkpoint.metadata, rows)
        stated = self.keys.integer("vocab_size", 1, MAX_VOCAB, rows)
        if stated != rows:
            raise self.keys.fail("vocab_size", f"is {stated:,}, but the embedding has {rows:,} rows")
        return rows

    def attention(self, rope: RopeFacts, *, scale: float | None = None, **changes: Any) -> Attention:
        """Attention with the file's scale, if it states one. Only families that pass `value_dim` have short values."""
        value_dim = self.keys.integer("attention.value_length", 2, MAX_HEAD_DIM, self.head_dim)
        if value_dim != self.head_dim and "value_dim" not in changes:
            raise self.unsupported(f"{self.source} with keys of {self.head_dim} and values of {value_dim} elements")
        stated = self.keys.number("attention.scale", 1e-6, 1e3, scale or 1 / math.sqrt(self.head_dim))
        return super().attention(rope, scale=stated, **changes)

    def rope(self, *, interleaved: bool = False) -> tuple[RopeFacts, int]:
        """The global rotation and its context length. `interleaved`: the converter permuted the rows of Q and K."""
        rope, context = self._rope(interleaved)
        return replace(rope, permuted=interleaved), context

    def _rope(self, interleaved: bool) -> tuple[RopeFacts, int]:
        keys = self.keys
        context = keys.integer("context_length", 1, MAX_CONTEXT)
        theta = keys.number("rope.freq_base", 1.0, 1e15, 10000.0)
        dim = keys.integer("rope.dimension_count", 2, MAX_HEAD_DIM, self.head_dim)
        if "rope_freqs.weight" in self.checkpoint.tensors:
            # contains Llama 3's scaling; a scaling key next to it must not be applied as well
            tensor = "rope_freqs.weight"
            return RopeFacts(theta, dim, "factors", interleaved=interleaved, factors_tensor=tensor), context
        if "rope_factors_long.weight" in self.checkpoint.tensors:
            original = keys.integer("rope.scaling.original_context_length", 1, MAX_CONTEXT, context)
            plain = RopeFacts(theta, dim, original_context=original, interleaved=interleaved)
            factors = {name: self.numbers(f"rope_factors_{name}.weight") for name in ("short", "long")}
            return self.longrope(plain, factors, keys.number("rope.scaling.attn_factor", 1e-3, 1e3, 1.0)), context
        factor = keys.number("rope.scaling.factor", 1e-3, 1e6, 1.0)
        old = keys.raw("rope.scale_linear")
        kind = keys.text("rope.scaling.type", "linear")
        if kind == "none" or (factor == 1.0 and old is None):
            return RopeFacts(theta, dim, interleaved=interleaved), context
        if kind == "linear":
            factor = keys.number("rope.scale_linear", 1e-3, 1e6, factor)
            return RopeFacts(theta, dim, "linear", factor, interleaved=interleaved), context
        if kind != "yarn":
            raise self.unsupported(f"{self.source} with rope scaling {shown(kind)}")
        original = keys.integer("rope.scaling.original_context_length", 1, MAX_CONTEXT, context)
        # llama.cpp multiplies its attn_factor (1 by default) by the paper's 0.1 ln(factor) + 1
        attention = keys.number("rope.scaling.attn_factor", 1e-3, 1e3, 1.0) * (0.1 * math.log(max(factor, 1.0)) + 1.0)
        rope = RopeFacts(
            theta,
            dim,
            "yarn",
            factor,
            original_context=original,
            attention_factor=attention,
            beta_fast=keys.number("rope.scaling.yarn_beta_fast", 1e-3, 1e6, 32.0),
            beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1e-3, 1e6, 1.0),
            interleaved=interleaved,
        )
        return rope, max(context, min(int(original * factor), MAX_CONTEXT))

    def mixture(self, *, grouped: bool = False, **changes: Any) -> Experts:
        """A mixture of experts from the usual keys; `grouped`: those of groups included; `changes` override fields."""
        keys = self.keys
        inner = "expert_feed_forward_length"
        if not keys.integer(inner, 0, MAX_HIDDEN * 4, 0):
            inner = "feed_forward_length"
        names = {"count": "expert_count", "top_k": "expert_used_count", "inner": inner}
        values: dict[str, Any] = {
            "renormalise": keys.flag("expert_weights_norm", True),
            "scale": keys.number("expert_weights_scale", 1e-6, 1e6, 1.0),
        }
        if grouped:
            values["groups"] = keys.integer("expert_group_count", 1, MAX_EXPERTS, 1)
            values["group_top_k"] = keys.integer("expert_group_used_count", 1, MAX_EXPERTS, 1)
        return super().experts(names, **values | changes)

    def size(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """Read an integer by its name in KEYS; the maximum if it differs by layer."""
        if name in ("heads", "kv_heads", "inner") and isinstance(self.keys.raw(self.KEYS[name]), np.ndarray):
            lowest = 0 if name == "kv_heads" else low  # 0 in layers without attention
            most = max(self.each(self.KEYS[name], lowest, high, 0))
            if most < low:
                raise self.unsupported(f"{self.source} without a full-attention layer")
            return most
        return super().size(name, low, high, default)

    def each(self, key: str, low: int, high: int, default: int) -> tuple[int, ...]:
        """One number per layer; a single number in the file applies to all."""
        values = self.keys.raw(key)
        if not isinstance(values, np.ndarray):
            return (self.keys.integer(key, low, high, default),) * self.num_layers
        if len(values) == self.num_layers + self.extra_layers:
            values = values[: self.num_layers]
        if values.dtype.kind not in "iu" or len(values) != self.num_layers or not low <= values.min() <= high:
            raise self.keys.fail(key, f"must hold {self.num_layers} integers from {low:,} to {high:,}")
        if values.max() > high:
            raise self.keys.fail(key, f"holds {int(values.max()):,}; the limit is {high:,}")
        return tuple(values.tolist())

    def numbers(self, tensor: str) -> list[float]:
        """Read the values of a small F32 vector."""
        info = self.checkpoint.tensors.get(tensor)
        if info is None or info.dtype != "F32" or len(info.shape) != 1 or info.shape[0] > MAX_HEAD_DIM:
            raise bad(self.keys.path, f"must be a vector of at most {MAX_HEAD_DIM} F32 numbers", key=tensor)
        return np.frombuffer(self.checkpoint.read(tensor).tobytes(), "<f4").tolist()

    def windows(self, full_every: int = 0, default: int = 0) -> tuple[int | None, ...]:
        """The window of each layer. If the file has no pattern, every `full_every`-th layer has full attention."""
        keys, num_layers = self.keys, self.num_layers
        window = keys.integer("attention.sliding_window", 0, MAX_CONTEXT, default)
        pattern = keys.raw("attention.sliding_window_pattern")
        if window == 0:
            return (None,) * num_layers
        if isinstance(pattern, np.ndarray):
            return tuple(window if windowed else None for windowed in self.flags("attention.sliding_window_pattern"))
        every = keys.integer("attention.sliding_window_pattern", 1, MAX_LAYERS, full_every)
        return tuple(None if every and (layer + 1) % every == 0 else window for layer in range(num_layers))

    def flags(self, key: str) -> tuple[bool, ...]:
        """True or false for each layer; () where the file has no such list."""
        values = self.keys.raw(key)
        if values is None:
            return ()
        if isinstance(values, np.ndarray) and len(values) == self.num_layers + self.extra_layers:
            values = values[: self.num_layers]
        known = isinstance(values, np.ndarray) and values.dtype.kind in "biu" and len(values) == self.num_layers
        if not known or not np.isin(values, (0, 1)).all():
            raise self.keys.fail(key, f"must hold {self.num_layers} booleans")
        return tuple(bool(value) for value in values)

    def usage(self) -> dict[str, Any]:
        general, tensors, metadata = self.general, self.checkpoint.tensors, self.checkpoint.metadata
        return {
            "extra_layers": self.extra_layers,
            "name": general.text("general.name", self.checkpoint.path.stem)[:200],
            "tied_embeddings": f"{self.names.source('lm_head')}.weight" not in tensors,
            "eos_token_ids": special_ids(general, self.vocab_size, "eos", "eot", "eom"),
            "bos_token_id": next(iter(special_ids(general, self.vocab_size, "bos")), None),
            "sampling_defaults": self.sampling(general, _SAMPLING),
            "has_chat_template": bool(general.text("tokenizer.chat_template")),
            "license": general.text("general.license")[:200],
            "stored_format": _stored_format(metadata, tensors),
            "decoded_bytes": decoded_bytes(tensors.values()),
        }


def source_of(checkpoint: Checkpoint) -> str:
    """`general.architecture`. Raises UnsupportedModel if the file is not a model."""
    path, general = checkpoint.path, Fields(checkpoint.path, checkpoint.metadata)
    kind = general.text("general.type", "model")
    if general.raw("general.architecture") is None and kind not in _NOT_MODELS:
        raise bad(path, "is missing", key="general.architecture")
    source = general.text("general.architecture")
    if source == "clip" or path.name.lower().startswith("mmproj"):
        kind = "mmproj"
    if kind in _NOT_MODELS:
        what, hint = _NOT_MODELS[kind]
        raise bad(path, f"{what}, not a model", key="general.type", hint=hint, error=UnsupportedModel)
    return source


def _stored_format(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> str:
    """The common label if the tensors confirm it, otherwise the type with the most bytes in the layers."""
    layers: Counter[str] = Counter()
    for info in tensors.values():
        if len(info.shape) > 1 and info.name.startswith("blk."):
            layers[info.dtype] += info.nbytes
    if not layers:
        return next(iter(tensors.values())).dtype
    stated = metadata.get("general.file_type")
    label = FILE_TYPES.get(stated, "") if isinstance(stated, int) else ""
    stem = "_".join(label.split("_")[:2]) if label.startswith("Q") and "_K" in label else label.split("_MOE")[0]
    if label and (stem in layers or label.startswith("IQ")):
        return label
    return layers.most_common(1)[0][0]

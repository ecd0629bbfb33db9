"""`Config`: access to a model's hyper-parameters, independent of the container.

`hf.py` and `gguf.py` define the keys of each container, and read what only that container has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_EXPERTS, MAX_HEAD_DIM, MAX_HEADS, MAX_HIDDEN, MAX_LAYERS, Fields
from localllm.checkpoint.mapped_file import bad, shown
from localllm.checkpoint.text_modules import Projection
from localllm.errors import SUPPORTED, UnsupportedModel

from .facts import ModelFacts, shared_layers
from .layers import Dense, Experts, Fusion, LayerFacts
from .mixers import Attention, Paged, RopeFacts
from .names import MTP, NameMap

SAMPLING = {
    "temperature": (0.0, 100.0), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "repetition_penalty": (1e-3, 100.0),
    "xtc_probability": (0.0, 1.0), "xtc_threshold": (0.0, 1.0),
}  # fmt: skip


class Config(ABC):
    """The hyper-parameters that all models share, read and range-checked once."""

    KEYS: ClassVar[dict[str, str]]  # layers, hidden, heads, kv_heads, head_dim, inner, eps -> key
    DEFAULT_EPS: ClassVar[float | None] = None

    def __init__(self, checkpoint: Checkpoint, keys: Fields, names: NameMap, source: str) -> None:
        """`source` is the architecture's name in the file."""
        self.checkpoint = checkpoint
        self.keys = keys
        self.names = names
        self.source = source
        self.num_layers = self.size("layers", 1, MAX_LAYERS)
        self.hidden_size = self.size("hidden", 1, MAX_HIDDEN)
        self.num_heads = self.size("heads", 1, MAX_HEADS)
        self.num_kv_heads = self.size("kv_heads", 1, MAX_HEADS, self.num_heads)
        if keys.raw(self.KEYS["head_dim"]) is None and self.hidden_size % self.num_heads:
            what = f"the hidden size {self.hidden_size:,} is not a multiple of {self.num_heads} heads"
            raise keys.fail(self.KEYS["heads"], what)
        self.head_dim = self.size("head_dim", 2, MAX_HEAD_DIM, max(self.hidden_size // self.num_heads, 2))
        self.vocab_size = self.read_vocab_size()

    def size(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """Read an integer by its name in KEYS."""
        return self.keys.integer(self.KEYS[name], low, high, default)

    def stores(self, tensor: str) -> bool:
        """Whether layer 0 has this tensor, given by canonical name below the layer."""
        module, _, suffix = tensor.rpartition(".")
        return f"{self.names.source(f'model.layers.0.{module}')}.{suffix}" in self.checkpoint.tensors

    def stores_anywhere(self, tensor: str) -> bool:
        """As `stores`, for any layer: a hybrid's first layers may have another mixer."""
        module, _, suffix = tensor.rpartition(".")
        start, end = self.names.layer.split("{}")
        inner = f"{end}{self.names.inner.get(module, module)}.{suffix}"
        return any(name.startswith(start) and name.endswith(inner) for name in self.checkpoint.tensors)

    def stores_module(self, module: str, layer: int = 0) -> bool:
        """Whether a layer has this module, in any format."""
        start = f"{self.names.source(f'model.layers.{layer}.{module}')}."
        return any(name.startswith(start) for name in self.checkpoint.tensors)

    def stores_scale(self) -> bool:
        """Whether layers have a scalar that multiplies their output."""
        name = self.names.source("model.layers.0.layer_scalar")
        return name in self.checkpoint.tensors or f"{name}.weight" in self.checkpoint.tensors

    def unsupported(self, what: str) -> UnsupportedModel:
        """The error for a feature that is not supported."""
        return unsupported(self.keys.path, what)

    def attention(self, rope: RopeFacts, **changes: Any) -> Attention:
        """Full attention with the usual scale and the stored biases.

        A family with non-causal models must pass `causal`; for others, a non-causal model is refused.
        """
        if "causal" not in changes and not self.causal:
            raise self.unsupported(f"{self.source} with bidirectional attention (an embedding model)")
        self.check_heads(self.num_heads, self.num_kv_heads)
        if self.head_dim % 2:
            raise bad(self.keys.path, f"the head size must be even, not {self.head_dim}", key="head_dim")
        if rope.dim > self.head_dim or rope.dim % 2 or rope.dim < 2:
            what = f"{rope.dim} rotated elements do not fit in a head of {self.head_dim}"
            raise bad(self.keys.path, what, key="rope")
        values: dict[str, Any] = {
            "scale": self.head_dim**-0.5,
            "softcap": self.keys.optional_number("attn_logit_softcapping", 1e-3, 1e6),
            "qkv_bias": self.stores("self_attn.q_proj.bias") or self.stores("self_attn.qkv_proj.bias"),
            "o_bias": self.stores("self_attn.o_proj.bias"),
            "fused": self.stores_module("self_attn.qkv_proj"),
        }
        return Attention(self.num_heads, self.num_kv_heads, self.head_dim, rope, **values | changes)

    def check_heads(self, heads: int, kv_heads: int) -> None:
        """Raise BadModelFile if query heads cannot share KV heads evenly."""
        if heads % kv_heads:
            what = f"{heads} attention heads cannot share {kv_heads} KV heads evenly"
            raise bad(self.keys.path, what, key="heads")

    def activation(self, key: str = "hidden_act") -> str:
        """The feed-forward layer's activation, by its name in `Dense`; GGUF has no key for it."""
        return "silu"

    def dense(self, act: str = "silu") -> Dense:
        inner, fused = self.size("inner", 1, MAX_HIDDEN * 4), self.stores_module("mlp.gate_up_proj")
        return Dense(inner, act, self.stores("mlp.down_proj.bias"), fused)

    def longrope(self, rope: RopeFacts, factors: Mapping[str, Sequence[float]], attention: float) -> RopeFacts:
        """`rope` with one factor per rotated pair: "short" up to the original context, "long" beyond.

        attention   factor on cosines and sines
        """
        for name, values in factors.items():
            if len(values) != rope.dim // 2 or not all(1e-3 <= value <= 1e6 for value in values):
                wrong = next((value for value in values if not 1e-3 <= value <= 1e6), None)
                found = f"{len(values)} numbers" if wrong is None else f"{wrong:g}"
                what = f"must hold {rope.dim // 2} numbers from 0.001 to 1,000,000, but has {found}"
                raise bad(self.keys.path, what, key=f"{name} factors of the rope scaling")
        return replace(
            rope,
            scaling="longrope",
            attention_factor=attention,
            short_factors=tuple(factors["short"]),
            long_factors=tuple(factors["long"]),
        )

    def experts(self, keys: Mapping[str, str], act: str = "silu", *, shared: int = 0, **changes: Any) -> Experts:
        """A mixture of experts; `keys` are the container's keys of `count`, `top_k` and `inner`.

        shared   number of shared experts, which become one that is as wide as all of them
        """
        count = self.keys.integer(keys["count"], 1, MAX_EXPERTS)
        top_k = self.keys.integer(keys["top_k"], 1, count)
        inner = self.keys.integer(keys["inner"], 1, MAX_HIDDEN * 4)
        found = Experts(count, top_k, inner, act, **{"shared_inner": shared * inner} | changes)
        if count % found.groups or found.group_top_k > found.groups:
            what = f"{count} experts cannot be split into {found.groups} groups with {found.group_top_k} of them chosen"
            raise bad(self.keys.path, what, key="groups")
        if count // found.groups * found.group_top_k < top_k:
            what = f"{found.group_top_k} of {found.groups} groups hold fewer than the {top_k} experts chosen per token"
            raise bad(self.keys.path, what, key="groups")
        return found

    def facts(
        self, layers: Sequence[LayerFacts], max_context: int, *, eps: float | None = None, **changes: Any
    ) -> ModelFacts:
        """The facts of the whole model, in which equal layers become one object.

        `changes` override fields, `eps` is the default for files without one.
        """
        if self.keys.raw("clip_qkv") is not None:
            raise self.unsupported(f"{self.source} with clip_qkv")
        if not any(isinstance(layer.mixer, Paged) for layer in layers):
            raise self.unsupported(f"{self.source} without a full-attention layer")
        tensors, usage = self.checkpoint.tensors, self.usage()
        spare = set(self.names.beyond(tensors, len(layers))) if usage["extra_layers"] else set()
        values: dict[str, Any] = {
            "architecture": "",
            "source_architecture": self.source,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "max_context": max_context,
            "rms_norm_eps": self.keys.number(self.KEYS["eps"], 1e-12, 0.1, eps or self.DEFAULT_EPS),
            "layers": shared_layers(layers),
            "logit_softcap": self.keys.optional_number("final_logit_softcapping", 1e-3, 1e6),
            "weight_bytes": sum(
                info.nbytes for name, info in tensors.items() if name.startswith(self.names.text) and name not in spare
            ),
        }
        changes |= self._predictor(changes.get("predictor"), usage["extra_layers"])
        causal = all(getattr(layer.mixer, "causal", True) for layer in layers)
        pooling = self.pooling or ("" if causal else "mean")
        if pooling:
            changes["has_chat_template"] = False  # the files may still have that of the base model
        if pooling and not any(name.startswith(f"{self.names.source('lm_head')}.") for name in tensors):
            changes["tied_embeddings"] = True  # nothing is generated, so the head does not matter
        values |= {"pooling": pooling, "projections": self.projections}
        return ModelFacts(**values | usage | changes)

    def _predictor(self, layer: LayerFacts | None, stated: int) -> dict[str, Any]:
        """`layer` if the file has an MTP head, or why it cannot be used if the file declares one."""
        if layer is None or not self.checkpoint.tensors:
            return {"predictor": None}
        assert isinstance(layer.fusion, Fusion)
        first = next(iter(layer.fusion.linears(1)))
        module = self.names.source(f"model.layers.{self.num_layers}.{first}")
        start = MTP if module.startswith(MTP) else f"{module}."
        if self.keys.flag("mtp_use_dedicated_embeddings"):
            return {
                "predictor": None,
                "predictor_flaw": "the MTP head has its own embeddings, which are not supported",
            }
        if any(name.startswith(start) for name in self.checkpoint.tensors):
            return {"predictor": layer}
        stated = stated or self.keys.integer("mtp_num_hidden_layers", 0, MAX_LAYERS, 0)
        flaw = f"the configuration declares an MTP head, but its tensors are missing, starting with {module}.weight"
        return {"predictor": None, "predictor_flaw": flaw if stated else ""}

    def sampling(self, fields: Fields, keys: Mapping[str, str]) -> dict[str, Any]:
        """The recommended sampling parameters; `keys` are the container's keys."""
        stated = {name: key for name, key in keys.items() if fields.raw(key) is not None}
        return {
            name: fields.integer(key, -1, 1 << 31) if name == "top_k" else fields.number(key, *SAMPLING[name])
            for name, key in stated.items()
        }

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The dense layers applied to pooled vectors."""
        return self.checkpoint.text_modules.projections

    @property
    @abstractmethod
    def causal(self) -> bool:
        """Whether the file describes a model with a causal mask."""

    @property
    @abstractmethod
    def pooling(self) -> str:
        """The pooling of an embedding model; "" for other models."""

    @abstractmethod
    def read_vocab_size(self) -> int:
        """Read the number of embedding rows."""

    @abstractmethod
    def usage(self) -> dict[str, Any]:
        """Fields of ModelFacts that each container stores differently: name, tokens, template, license, format."""


def unsupported(path: Path, what: str) -> UnsupportedModel:
    """The error for an unsupported architecture, with a hint at the supported ones."""
    message = f"the architecture {shown(what)} is not supported by this version"
    error = bad(path, message, hint="localllm chat qwen", error=UnsupportedModel)
    error.why = SUPPORTED
    error.context |= {"key": "architecture", "architecture": shown(what)}
    return error

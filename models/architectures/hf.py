"""`HfConfig`: config.json, generation_config.json and the files next to them.

`auto_map` and all other references to code are ignored: nothing is imported from a repository.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_CONTEXT, MAX_EXPERTS, MAX_HEAD_DIM, MAX_LAYERS, MAX_VOCAB, Fields
from localllm.checkpoint.json_file import MAX_CONFIG_BYTES, read_json_object
from localllm.checkpoint.mapped_file import read_small, shown

from .config import SAMPLING, Config
from .layers import Experts
from .mixers import RopeFacts
from .names import TOWER, NameMap

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
PLACES, ENDS = 16, 4 << 20  # samples for comparing two tables: PLACES in between, ENDS bytes at either end
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_TEMPLATE = re.compile(rb'"chat_template"\s*+:\s*+(?!null)')


@dataclass(frozen=True)
class Described:
    """The description of a vision tower in Hugging Face's terms, and facts of its decoder."""

    top: Fields  # config.json, with an object `vision_config`
    processor: Fields  # image processor configuration; empty if there is no such file
    nbytes: int  # stored
    hidden_size: int
    vocab_size: int
    window: int | None


class HfConfig(Config):
    """The text model's values on top of the defaults of its type; `given` has only those in the file."""

    KEYS = {
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "inner": "intermediate_size",
        "eps": "rms_norm_eps",
    }
    DEFAULT_EPS = 1e-6

    def __init__(
        self,
        checkpoint: Checkpoint,
        text: Mapping[str, Any],
        model_type: str,
        defaults: Mapping[str, Any],
        names: NameMap,
    ) -> None:
        """`text` is the part of config.json that describes the text model, `model_type` its type."""
        self.model_type = model_type
        path = checkpoint.path / "config.json"
        self.top = Fields(path, checkpoint.config)
        self.given = Fields(path, text)
        keys = Fields(path, {**defaults, **{key: value for key, value in text.items() if value is not None}})
        super().__init__(checkpoint, keys, names, source_of(self.top))
        self.generation = Fields(path.with_name("generation_config.json"), checkpoint.generation_config)
        self.context = keys.integer("max_position_embeddings", 1, MAX_CONTEXT)

    @property
    def causal(self) -> bool:
        """Embedding models with custom code declare this by class name (LFM2.5) or `is_causal` (GTE)."""
        named = "Bidirectional" in self.source or self.keys.raw("is_causal") is False
        return not named and not self.keys.flag("use_bidirectional_attention")

    @property
    def pooling(self) -> str:
        """The pooling in sentence-transformers' files; a model without a head can only embed, by mean pooling."""
        stated = self.checkpoint.text_modules.pooling
        return stated or ("mean" if self.source.endswith(("Model", "ForMaskedLM")) else "")

    def read_vocab_size(self) -> int:
        return self.keys.integer("vocab_size", 1, MAX_VOCAB)

    def rope(self) -> tuple[RopeFacts, int]:
        """The rotation of all layers, and the context length it supports."""
        return self.rope_from(self.rope_values)

    @property
    def rope_values(self) -> dict[str, Any]:
        """The values of that rotation, wherever the file stores them."""
        theta = {"rope_theta": self.keys.number("rope_theta", 1.0, 1e15, 10_000.0)}
        stated = object_of(self.given, "rope_scaling") | object_of(self.given, "rope_parameters")
        return theta | (stated or object_of(self.keys, "rope_parameters"))

    def ropes(
        self, full_theta: float, local_theta: float | None = None, full_dim: int | None = None
    ) -> tuple[RopeFacts, RopeFacts, int]:
        """The rotations of full-attention and of windowed layers, and the context length. `full_theta` and
        `local_theta` are defaults; without `local_theta`, both share one theta. `full_dim` is the head size of
        full-attention layers, if they have their own.

        Scaling that is stated once applies to the full-attention layers. Values in the file, in either layout, take
        precedence over the defaults of the type.
        """
        given, keys = self.given, self.keys
        stated = object_of(given, "rope_parameters")
        parameters = stated or object_of(keys, "rope_parameters")
        nested = {}
        for kind in ("full_attention", "sliding_attention"):
            nested[kind] = {} if parameters.get(kind) is None else parameters[kind]
            if not isinstance(nested[kind], dict):
                raise given.fail(f"rope_parameters.{kind}", "must be an object")
        flat = {} if any(nested.values()) else parameters
        outside = {key: given.raw(key) for key in ("rope_theta", "partial_rotary_factor") if given.raw(key) is not None}
        below, above = ({}, nested["full_attention"]) if stated else (nested["full_attention"] | outside, {})
        theta = keys.number("rope_theta", 1.0, 1e15, full_theta)
        full = {"rope_theta": theta} | below | object_of(given, "rope_scaling") | flat | above
        local = {"rope_theta": keys.number("rope_local_base_freq", 1.0, 1e15, local_theta or full["rope_theta"])}
        rope, context = self.rope_from(full, full_dim)
        return rope, self.rope_from(local | nested["sliding_attention"])[0], context

    def rope_from(self, values: Mapping[str, Any], head_dim: int | None = None) -> tuple[RopeFacts, int]:
        """A rotation from theta and scaling, and the context length it supports.

        values     from `rope_theta` and `rope_scaling`, or from transformers 5's `rope_parameters`
        head_dim   of these layers, if not the usual one
        """
        given, context, fields = self.given, self.context, Fields(self.given.path, values)
        head_dim = head_dim or self.head_dim
        # it may be outside the rope object
        partial = self.keys.number("partial_rotary_factor", 1e-3, 1.0, 1.0)
        partial = fields.number("partial_rotary_factor", 1e-3, 1.0, partial)
        dim = int(head_dim * partial)
        if not 2 <= dim <= MAX_HEAD_DIM:
            raise fields.fail("partial_rotary_factor", f"leaves {dim} rotated elements of a head of {head_dim}")
        theta = fields.number("rope_theta", 1.0, 1e15)
        kind = fields.text("rope_type", fields.text("type", "default"))
        if kind in ("default", "none", "dynamic", "mrope"):
            # dynamic changes frequencies only beyond the trained context, which is not supported; the three positions
            # that mrope gives a token are equal in text
            return RopeFacts(theta, dim), context
        stated = given.integer("original_max_position_embeddings", 1, MAX_CONTEXT, context)
        original = fields.integer("original_max_position_embeddings", 1, MAX_CONTEXT, stated)
        if kind in ("longrope", "su") or (kind == "yarn" and fields.raw("long_factor") is not None):
            return self._longrope(fields, RopeFacts(theta, dim, original_context=original)), context
        if kind == "proportional" and fields.number("factor", 1e-3, 1e6, 1.0) == 1.0:
            return RopeFacts(theta, head_dim, kind, turning=int(partial * head_dim // 2)), context
        factor = fields.number("factor", 1e-3, 1e6)
        if kind == "linear":
            return RopeFacts(theta, dim, "linear", factor), context
        if kind not in ("llama3", "yarn"):
            raise self.unsupported(f"{self.source} with rope scaling of type {shown(kind)}")
        if kind == "llama3":
            low = fields.number("low_freq_factor", 1e-6, 1e6)
            high = fields.number("high_freq_factor", 1e-6, 1e6)
            if low > high:
                raise fields.fail("high_freq_factor", f"is {high:g}, below low_freq_factor {low:g}")
            return RopeFacts(theta, dim, "llama3", factor, low, high, original), context
        rope = RopeFacts(
            theta,
            dim,
            "yarn",
            factor,
            original_context=original,
            attention_factor=_yarn_attention(fields, factor),
            beta_fast=fields.number("beta_fast", 1e-3, 1e6, 32.0),
            beta_slow=fields.number("beta_slow", 1e-3, 1e6, 1.0),
            truncate=fields.flag("truncate", True),
        )
        return rope, max(context, min(int(original * factor), MAX_CONTEXT))

    def _longrope(self, fields: Fields, rope: RopeFacts) -> RopeFacts:
        factor = fields.number("factor", 1e-3, 1e6, self.context / rope.original_context)
        paper = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(max(rope.original_context, 2)))
        factors = {}
        for name in ("short", "long"):
            values = fields.raw(f"{name}_factor")
            if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
                raise fields.fail(f"{name}_factor", "must be a list of numbers")
            factors[name] = [float(value) for value in values]
        return self.longrope(rope, factors, fields.number("attention_factor", 1e-3, 1e3, paper))

    def activation(self, key: str = "hidden_act") -> str:
        """The feed-forward layer's activation, by its name in `Dense`."""
        name = self.keys.text(key, "silu")
        if name not in _ACTIVATIONS:
            raise self.keys.fail(key, f"is {name[:60]!r}; {', '.join(_ACTIVATIONS)} are supported")
        return _ACTIVATIONS[name]

    def mixture(self, count: str, inner: str, act: str = "silu", **changes: Any) -> Experts:
        """A mixture of experts; `count` and `inner` are the family's keys."""
        count = count if self.keys.raw(count) is not None else "num_local_experts"
        keys = {"count": count, "top_k": "num_experts_per_tok", "inner": inner}
        return super().experts(keys, act, **changes)

    def router(self, *, groups: bool = True) -> dict[str, Any]:
        """Fields of `Experts` from DeepSeek's keys; `groups`: those of groups included."""
        keys = self.keys
        found: dict[str, Any] = {
            "renormalise": keys.flag("norm_topk_prob", True),
            "scale": keys.number("routed_scaling_factor", 1e-6, 1e6, 1.0),
        }
        names = {"groups": "n_group", "group_top_k": "topk_group"} if groups else {}
        return found | {name: keys.integer(key, 1, MAX_EXPERTS, 1) for name, key in names.items()}

    def layer_numbers(self, key: str) -> frozenset[int]:
        """Read a list of layer numbers; empty if the key is absent."""
        value = self.keys.raw(key)
        if value is None:
            return frozenset()
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            raise self.keys.fail(key, "must list layer numbers")
        return frozenset(value)

    def is_null(self, key: str) -> bool:
        """Whether the file sets a key to null explicitly, which turns a default off."""
        return key in self.given.values and self.given.raw(key) is None

    def dense_layers(self) -> frozenset[int]:
        """Layers with a dense feed-forward layer instead of experts, by Qwen's keys."""
        every = self.keys.integer("decoder_sparse_step", 1, MAX_LAYERS, 1)
        listed = self.layer_numbers("mlp_only_layers")
        return frozenset(layer for layer in range(self.num_layers) if layer in listed or (layer + 1) % every)

    def capped(self, key: str) -> float | None:
        """Read a soft cap; an explicit null turns a default off."""
        return None if self.is_null(key) else self.keys.optional_number(key, 1e-3, 1e6)

    @property
    def tower(self) -> Described | None:
        """The description of the stored vision tower; None if there is no tower or no description."""
        starts = tuple(start for part, start in self.names.parts.items() if part in TOWER)
        if not starts or not isinstance(self.top.raw("vision_config"), dict):
            return None
        nbytes = sum(info.nbytes for name, info in self.checkpoint.tensors.items() if name.startswith(starts))
        processor = image_processor(self.checkpoint)
        return Described(self.top, processor, nbytes, self.hidden_size, self.vocab_size, self.window)

    @property
    def window(self) -> int | None:
        """`sliding_window`; an explicit null or 0 turns a default off."""
        absent = self.is_null("sliding_window") or self.keys.raw("sliding_window") is None
        return None if absent else self.keys.integer("sliding_window", 0, MAX_CONTEXT) or None

    def windows(self, windowed: Callable[[int], bool], *, enabled: bool = True) -> tuple[int | None, ...]:
        """The window of each layer, by `layer_types`, or by `windowed` if absent. Without `enabled` there are none."""
        window = self.window if enabled else None
        if self.keys.raw("layer_types") is None:
            return tuple(window if windowed(layer) else None for layer in range(self.num_layers))
        types = self.layer_types(("full_attention", "sliding_attention"))
        if window is None and enabled and "sliding_attention" in types:
            what = "is missing" if self.given.raw("sliding_window") is None else "is 0"
            raise self.keys.fail("sliding_window", f"{what}, but layer_types names windowed layers")
        return tuple(window if item == "sliding_attention" else None for item in types)

    def layer_types(
        self, known: Sequence[str], default: Callable[[int], str] | None = None, key: str = "layer_types"
    ) -> list[str]:
        """The kind of each layer, one of `known`; `default` applies if the file does not list them."""
        types = self.keys.raw(key)
        if types is None and default is not None:
            return [default(layer) for layer in range(self.num_layers)]
        if not isinstance(types, list) or len(types) != self.num_layers:
            raise self.keys.fail(key, f"must list {self.num_layers} layers")
        unknown = [str(item) for item in types if item not in known]
        if unknown:
            raise self.unsupported(f"{self.source} with layers of type {unknown[0][:60]}")
        return types

    def usage(self) -> dict[str, Any]:
        places = (self.generation, self.given, self.top)
        return {
            "extra_layers": self.keys.integer(
                "num_nextn_predict_layers", 0, MAX_LAYERS, self.keys.integer("num_mtp_layers", 0, MAX_LAYERS, 0)
            ),
            "name": _name(self.checkpoint.path),
            "tied_embeddings": self._tied(),
            "eos_token_ids": _ids("eos_token_id", self.vocab_size, *places),
            "bos_token_id": next(iter(_ids("bos_token_id", self.vocab_size, *places)), None),
            "sampling_defaults": self.sampling(self.generation, {name: name for name in (*SAMPLING, "top_k")}),
            "has_chat_template": _has_template(self.checkpoint.tokenizer_files),
            "license": self.checkpoint.license,
        }

    def _tied(self) -> bool:
        """Whether the head is tied to the embedding. A wrapper's value takes precedence over its text part's. A stored
        head is tied only if it has the same bytes, and a missing one if either value says so or both are absent.
        """
        key, tensors = "tie_word_embeddings", self.checkpoint.tensors
        stated = [fields.flag(key) for fields in (self.top, self.given) if fields.raw(key) is not None]
        start = f"{self.names.source('lm_head')}."
        head = {name.rpartition(".")[2] for name in tensors if name.startswith(start)}
        if tensors and not head:
            return any(stated) or not stated
        tied = stated[0] if stated else self.keys.flag(key)
        return tied and (not tensors or (head == {"weight"} and self._equal_tables("lm_head", "model.embed_tokens")))

    def _equal_tables(self, *modules: str) -> bool:
        """Whether two tables are equal, judged by samples: both ends, where added tokens are, and some in between."""
        one, other = (self.checkpoint.tensors.get(f"{self.names.source(module)}.weight") for module in modules)
        if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        ours, theirs = self.checkpoint.read(one.name), self.checkpoint.read(other.name)
        between = (slice(start, start + 4096) for start in range(0, len(ours), len(ours) // PLACES + 1))
        parts = itertools.chain(between, (slice(ENDS), slice(-ENDS, None)))
        found = all(np.array_equal(ours[part], theirs[part]) for part in parts)
        for info in (one, other):
            self.checkpoint.forget(info.name, cached=False)
        return found


def object_of(fields: Fields, key: str) -> dict[str, Any]:
    """The object under `key`; {} if absent."""
    value = fields.raw(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise fields.fail(key, f"is {shown(repr(value))}, expected an object")
    return value


def below(fields: Fields, key: str) -> Fields:
    """The fields of the object under `key`, empty if absent; error messages show the full path."""
    start = f"{fields.prefix}{key}."
    return Fields(fields.path, {start + name: value for name, value in object_of(fields, key).items()}, start)


def image_processor(checkpoint: Checkpoint) -> Fields:
    """The image processor configuration; empty if there is no such file."""
    path = next((file for name in _PROCESSORS if (file := checkpoint.path / name).is_file()), None)
    fields = Fields(path or checkpoint.path / _PROCESSORS[0], {} if path is None else read_json_object(path))
    return below(fields, "image_processor") if isinstance(fields.raw("image_processor"), dict) else fields


def source_of(top: Fields) -> str:
    """The architecture named in config.json; "" if there is none."""
    listed = top.raw("architectures")
    if listed is not None and not (isinstance(listed, list) and all(isinstance(item, str) for item in listed)):
        raise top.fail("architectures", "must be a list of names")
    return str(listed[0]) if listed else top.text("model_type")


def _ids(key: str, vocab_size: int, *places: Fields) -> tuple[int, ...]:
    """Token ids from the first place that has them; some files write -1 for "none"."""
    for fields in places:
        if fields.raw(key) not in (None, -1):
            return fields.token_ids(key, vocab_size)
    return ()


def _has_template(files: Mapping[str, Path]) -> bool:
    if "chat_template.jinja" in files or "chat_template.json" in files:
        return True
    config = files.get("tokenizer_config.json")
    return config is not None and _TEMPLATE.search(read_small(config, 4 * MAX_CONFIG_BYTES)) is not None


def _name(path: Path) -> str:
    """The repository name of a snapshot in the hub cache, otherwise the folder name."""
    if path.parent.name == "snapshots":
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    return path.resolve().name


def _yarn_attention(fields: Fields, factor: float) -> float:
    """The factor on cos and sin: the stated one, or computed from `factor` as in the YaRN paper."""
    stated = fields.optional_number("attention_factor", 1e-3, 1e3)
    if stated is not None:
        return stated

    def grown(strength: float) -> float:
        return 0.1 * strength * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale = fields.optional_number("mscale", 0.0, 1e3)
    over = fields.optional_number("mscale_all_dim", 0.0, 1e3)
    if mscale and over:
        return grown(mscale) / grown(over)
    return grown(1.0) * fields.number("attn_factor", 1e-3, 1e3, 1.0)

"""`HfConfig`: config.json, generation_config.json and what lies beside them.

`auto_map` and every other way to name code are ignored: nothing of a repository is imported.
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
from localllm.checkpoint.fields import MAX_CONTEXT, MAX_HEAD_DIM, MAX_LAYERS, MAX_VOCAB, Fields
from localllm.checkpoint.json_file import MAX_CONFIG_BYTES, read_json_object
from localllm.checkpoint.mapped_file import read_small, shown

from .config import SAMPLING, Config
from .layers import Experts
from .mixers import RopeFacts
from .names import TOWER, NameMap

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
PLACES, ENDS = 16, 4 << 20  # where two tables are compared: so often in between, and so many bytes at either end
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_TEMPLATE = re.compile(rb'"chat_template"\s*+:\s*+(?!null)')


@dataclass(frozen=True)
class Described:
    """What files say of a tower, in the words of Hugging Face's, and the decoder that it is for."""

    top: Fields  # config.json, with an object `vision_config`
    processor: Fields  # of images; empty where there is no such file
    nbytes: int  # stored
    hidden_size: int
    vocab_size: int
    window: int | None


class HfConfig(Config):
    """The text model's values over the defaults of its type; `given` has only what stands in the file."""

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
        runs: str,
    ) -> None:
        """`text` is the part of config.json that describes the text model, `model_type` what it calls itself."""
        self.model_type = model_type
        path = checkpoint.path / "config.json"
        self.top = Fields(path, checkpoint.config)
        self.given = Fields(path, text)
        keys = Fields(path, {**defaults, **{key: value for key, value in text.items() if value is not None}})
        super().__init__(checkpoint, keys, names, source_of(self.top), runs)
        self.generation = Fields(path.with_name("generation_config.json"), checkpoint.generation_config)
        self.context = keys.integer("max_position_embeddings", 1, MAX_CONTEXT)

    @property
    def causal(self) -> bool:
        """The class of LFM2.5's and `is_causal` of GTE's embedding models say it, which bring code of their own."""
        named = "Bidirectional" in self.source or self.keys.raw("is_causal") is False
        return not named and not self.keys.flag("use_bidirectional_attention")

    @property
    def pooling(self) -> str:
        """As sentence-transformers' files say; a model without a head does nothing else."""
        stated = self.checkpoint.text_modules.pooling
        return stated or ("mean" if self.source.endswith(("Model", "ForMaskedLM")) else "")

    def read_vocab_size(self) -> int:
        return self.keys.integer("vocab_size", 1, MAX_VOCAB)

    def rope(self) -> tuple[RopeFacts, int]:
        """The rotation of all layers, and the context it reaches."""
        return self.rope_from(self.rope_values)

    @property
    def rope_values(self) -> dict[str, Any]:
        """What the file says of that rotation, wherever it does."""
        theta = {"rope_theta": self.keys.number("rope_theta", 1.0, 1e15, 10_000.0)}
        stated = object_of(self.given, "rope_scaling") | object_of(self.given, "rope_parameters")
        return theta | (stated or object_of(self.keys, "rope_parameters"))

    def ropes(self, full_theta: float, local_theta: float | None = None) -> tuple[RopeFacts, RopeFacts, int]:
        """The rotation of layers that see all, that of windowed ones, and the context; the thetas of silent files.

        Scaling that is stated once is that of the layers that see all. Without `local_theta` both have one theta.
        """
        given, keys = self.given, self.keys
        parameters = object_of(given, "rope_parameters") or object_of(keys, "rope_parameters")
        nested = {}
        for kind in ("full_attention", "sliding_attention"):
            nested[kind] = {} if parameters.get(kind) is None else parameters[kind]
            if not isinstance(nested[kind], dict):
                raise given.fail(f"rope_parameters.{kind}", "must be an object")
        flat = {} if any(nested.values()) else parameters
        theta = keys.number("rope_theta", 1.0, 1e15, full_theta)
        full = {"rope_theta": theta} | object_of(given, "rope_scaling") | flat | nested["full_attention"]
        local = {"rope_theta": keys.number("rope_local_base_freq", 1.0, 1e15, local_theta or full["rope_theta"])}
        rope, context = self.rope_from(full)
        return rope, self.rope_from(local | nested["sliding_attention"])[0], context

    def rope_from(self, values: Mapping[str, Any]) -> tuple[RopeFacts, int]:
        """A rotation from theta and scaling, which may lie in several places of the file, and the context it reaches.

        `rope_scaling` beside `rope_theta`, or transformers 5's `rope_parameters`.
        """
        given, context, fields = self.given, self.context, Fields(self.given.path, values)
        # it may lie outside of the rope's own object
        partial = self.keys.number("partial_rotary_factor", 1e-3, 1.0, 1.0)
        partial = fields.number("partial_rotary_factor", 1e-3, 1.0, partial)
        dim = int(self.head_dim * partial)
        if not 2 <= dim <= MAX_HEAD_DIM:
            raise fields.fail("partial_rotary_factor", f"leaves {dim} rotated elements of a head of {self.head_dim}")
        theta = fields.number("rope_theta", 1.0, 1e15)
        kind = fields.text("rope_type", fields.text("type", "default"))
        if kind in ("default", "none", "dynamic", "mrope"):
            # dynamic changes frequencies only beyond the trained context, which is not offered; the three positions
            # that mrope gives a token are one in text.
            return RopeFacts(theta, dim), context
        stated = given.integer("original_max_position_embeddings", 1, MAX_CONTEXT, context)
        original = fields.integer("original_max_position_embeddings", 1, MAX_CONTEXT, stated)
        if kind in ("longrope", "su") or (kind == "yarn" and fields.raw("long_factor") is not None):
            return self._longrope(fields, RopeFacts(theta, dim, original_context=original)), context
        if kind == "proportional" and fields.number("factor", 1e-3, 1e6, 1.0) == 1.0:
            return RopeFacts(theta, self.head_dim, kind, turning=int(partial * self.head_dim // 2)), context
        factor = fields.number("factor", 1e-3, 1e6)
        if kind == "linear":
            return RopeFacts(theta, dim, "linear", factor), context
        if kind not in ("llama3", "yarn"):
            raise self.unsupported(f"rope scaling of type {shown(kind)}")
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
        """The feed-forward layer's activation, as `Dense` names it."""
        name = self.keys.text(key, "silu")
        if name not in _ACTIVATIONS:
            raise self.keys.fail(key, f"is {name[:60]!r}; {', '.join(_ACTIVATIONS)} are supported")
        return _ACTIVATIONS[name]

    def mixture(self, count: str, inner: str, act: str = "silu", **changes: Any) -> Experts:
        """Experts; `count` and `inner` are the family's keys."""
        count = count if self.keys.raw(count) is not None else "num_local_experts"
        keys = {"count": count, "top_k": "num_experts_per_tok", "inner": inner}
        return super().experts(keys, act, **changes)

    def layer_numbers(self, key: str) -> frozenset[int]:
        """A list of layers; none where the key is absent."""
        value = self.keys.raw(key)
        if value is None:
            return frozenset()
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            raise self.keys.fail(key, "must list layer numbers")
        return frozenset(value)

    def is_null(self, key: str) -> bool:
        """Whether the file switches a default off."""
        return key in self.given.values and self.given.raw(key) is None

    def dense_layers(self) -> frozenset[int]:
        """Layers of a mixture that have one feed-forward layer instead, as Qwen's files say."""
        every = self.keys.integer("decoder_sparse_step", 1, MAX_LAYERS, 1)
        listed = self.layer_numbers("mlp_only_layers")
        return frozenset(layer for layer in range(self.num_layers) if layer in listed or (layer + 1) % every)

    def capped(self, key: str) -> float | None:
        """A soft-cap; an explicit null switches a default off."""
        return None if self.is_null(key) else self.keys.optional_number(key, 1e-3, 1e6)

    @property
    def tower(self) -> Described | None:
        """What the files say of the tower that they have; None where they have none, or do not describe it."""
        starts = tuple(start for part, start in self.names.parts.items() if part in TOWER)
        if not starts or not isinstance(self.top.raw("vision_config"), dict):
            return None
        nbytes = sum(info.nbytes for name, info in self.checkpoint.tensors.items() if name.startswith(starts))
        processor = image_processor(self.checkpoint)
        return Described(self.top, processor, nbytes, self.hidden_size, self.vocab_size, self.window)

    @property
    def window(self) -> int | None:
        """`sliding_window`; an explicit null switches a default off."""
        absent = self.is_null("sliding_window") or self.keys.raw("sliding_window") is None
        return None if absent else self.keys.integer("sliding_window", 1, MAX_CONTEXT)

    def windows(self, windowed: Callable[[int], bool], *, enabled: bool = True) -> tuple[int | None, ...]:
        """The window of each layer: as `layer_types` says, else of those that `windowed` says. `enabled`: at all."""
        window = self.window if enabled else None
        if self.keys.raw("layer_types") is None:
            return tuple(window if windowed(layer) else None for layer in range(self.num_layers))
        types = self.layer_types(("full_attention", "sliding_attention"))
        if window is None and enabled and "sliding_attention" in types:
            raise self.keys.fail("sliding_window", "is missing, but layer_types names windowed layers")
        return tuple(window if item == "sliding_attention" else None for item in types)

    def layer_types(self, known: Sequence[str], default: Callable[[int], str] | None = None) -> list[str]:
        """The kind of each layer, one of `known`; `default` says it where the file does not."""
        types = self.keys.raw("layer_types")
        if types is None and default is not None:
            return [default(layer) for layer in range(self.num_layers)]
        if not isinstance(types, list) or len(types) != self.num_layers:
            raise self.keys.fail("layer_types", f"must list {self.num_layers} layers")
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
        """Whether the head is the embedding. A wrapper's value comes before that of its text part. But a stored head
        is tied only where it has the same bytes; a missing one where either of the two says so, or neither anything.
        """
        key, tensors = "tie_word_embeddings", self.checkpoint.tensors
        stated = [fields.flag(key) for fields in (self.top, self.given) if fields.raw(key) is not None]
        start = f"{self.names.source('lm_head')}."
        head = {name.rpartition(".")[2] for name in tensors if name.startswith(start)}
        if tensors and not head:
            return any(stated) or not stated
        tied = stated[0] if stated else self.keys.flag(key)
        return tied and (not tensors or (head == {"weight"} and self._stored_alike("lm_head", "model.embed_tokens")))

    def _stored_alike(self, *modules: str) -> bool:
        """Whether two tables hold the same, as far as a few of their bytes say: both ends, where added tokens lie, and
        some in between.
        """
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
    """The object under `key`; {} where there is none."""
    value = fields.raw(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise fields.fail(key, f"is {shown(repr(value))}, expected an object")
    return value


def below(fields: Fields, key: str) -> Fields:
    """The object under `key`, an empty one where there is none, with its place in the messages."""
    start = f"{fields.prefix}{key}."
    return Fields(fields.path, {start + name: value for name, value in object_of(fields, key).items()}, start)


def image_processor(checkpoint: Checkpoint) -> Fields:
    """What the file of the processor says of images; nothing where there is no such file."""
    path = next((file for name in _PROCESSORS if (file := checkpoint.path / name).is_file()), None)
    fields = Fields(path or checkpoint.path / _PROCESSORS[0], {} if path is None else read_json_object(path))
    return below(fields, "image_processor") if isinstance(fields.raw("image_processor"), dict) else fields


def source_of(top: Fields) -> str:
    """What config.json calls its architecture; "" where it does not say."""
    listed = top.raw("architectures")
    if listed is not None and not (isinstance(listed, list) and all(isinstance(item, str) for item in listed)):
        raise top.fail("architectures", "must be a list of names")
    return str(listed[0]) if listed else top.text("model_type")


def _ids(key: str, vocab_size: int, *places: Fields) -> tuple[int, ...]:
    """Token ids from the first place that has them; -1 is how some files write "none"."""
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
    """The repository of a snapshot in the hub's cache, else the folder's name."""
    if path.parent.name == "snapshots":
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    return path.resolve().name


def _yarn_attention(fields: Fields, factor: float) -> float:
    """What multiplies cos and sin: as stated, or from the factor as in the paper."""
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

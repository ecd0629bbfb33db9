"""config.json and generation_config.json -> `ModelFacts`, with each architecture's defaults and quirks.

`auto_map` and every other way to name code are ignored: nothing of a repository is imported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .facts import ModelFacts
from .gguf_facts import unsupported
from .hf_rope import full_and_local_rope
from .json_file import MAX_CONFIG_BYTES
from .limits import MAX_CONTEXT, MAX_HEAD_DIM, MAX_HEADS, MAX_HIDDEN, MAX_LAYERS, MAX_VOCAB, Fields, check_heads
from .mapped_file import read_small
from .names import SourceNames
from .tensor_info import StoredModel


@dataclass(frozen=True)
class _Family:
    """What config.json may leave out for one model type."""

    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    act_key: str = "hidden_act"


# Gemma's published multi-modal configs leave out whatever equals these.
_GEMMA3 = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
_QWEN = {"max_window_layers": 28, "sliding_window": 4096}
_FAMILIES = {
    "llama": _Family("llama"),
    "mistral": _Family("llama", {"sliding_window": 4096, "num_key_value_heads": 8}),
    "qwen2": _Family("qwen2", _QWEN),
    "qwen3": _Family("qwen3", {**_QWEN, "head_dim": 128}),
    "gemma3_text": _Family("gemma3", _GEMMA3, "hidden_activation"),
}
_WRAPPERS = {"gemma3": "gemma3_text", "mistral3": "mistral"}
"""Multi-modal model types -> the type of their text part, when their text_config does not say."""

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_TEMPLATE = re.compile(rb'"chat_template"\s*+:\s*+(?!null)')
_SAMPLING = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 100.0),
}


def hf_facts(model: StoredModel) -> ModelFacts:
    """Facts of a safetensors model. Raises UnsupportedModel for other architectures, BadModelFile for bad values."""
    path = model.path / "config.json" if model.path.suffix != ".json" else model.path
    top = Fields(path, model.config)
    source, family, config = _family(top)
    keys = Fields(path, {**family.defaults, **{key: value for key, value in config.items() if value is not None}})
    given = Fields(path, config)
    num_layers = keys.integer("num_hidden_layers", 1, MAX_LAYERS)
    hidden = keys.integer("hidden_size", 1, MAX_HIDDEN)
    num_heads = keys.integer("num_attention_heads", 1, MAX_HEADS)
    num_kv_heads = keys.integer("num_key_value_heads", 1, MAX_HEADS, num_heads)
    if keys.raw("head_dim") is None and hidden % num_heads:
        raise keys.fail("num_attention_heads", f"{num_heads} heads do not divide the hidden size {hidden:,}")
    head_dim = keys.integer("head_dim", 2, MAX_HEAD_DIM, max(hidden // num_heads, 2))
    vocab_size = keys.integer("vocab_size", 1, MAX_VOCAB)
    rope, local_rope, max_context = full_and_local_rope(given, keys, family.architecture, head_dim)
    check_heads(keys, num_heads, num_kv_heads, head_dim, rope.dim)
    names = SourceNames(model, family.architecture)
    windows = _windows(given, keys, family, source, num_layers)
    gemma = family.architecture == "gemma3"
    if keys.flag("use_bidirectional_attention"):
        raise unsupported(path, f"{source} with bidirectional attention (an embedding model)")
    generation = Fields(path.with_name("generation_config.json"), model.generation_config)
    scalar = keys.number("query_pre_attn_scalar", 1e-3, 1e9, head_dim) if gemma else float(head_dim)
    return ModelFacts(
        architecture=family.architecture,
        source_architecture=source,
        name=_name(model.path),
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=keys.integer("intermediate_size", 1, MAX_HIDDEN * 4),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_context=max_context,
        rms_norm_eps=keys.number("rms_norm_eps", 1e-12, 0.1, 1e-6),
        hidden_act=_activation(keys, family.act_key),
        attention_bias=_has(model, names, "self_attn.q_proj.bias"),
        o_bias=_has(model, names, "self_attn.o_proj.bias"),
        mlp_bias=_has(model, names, "mlp.down_proj.bias"),
        qk_norm=family.architecture in ("qwen3", "gemma3"),
        norm_offset=1.0 if gemma else 0.0,
        embedding_scale=math.sqrt(hidden) if gemma else 1.0,
        attention_scale=scalar**-0.5,
        attn_softcap=keys.optional_number("attn_logit_softcapping", 1e-3, 1e6),
        logit_softcap=keys.optional_number("final_logit_softcapping", 1e-3, 1e6),
        tied_embeddings=_tied(model, names, top, keys),
        windows=windows,
        rope=rope,
        local_rope=local_rope if any(windows) else None,
        post_norms=gemma,
        eos_token_ids=_ids("eos_token_id", vocab_size, generation, given, top),
        bos_token_id=next(iter(_ids("bos_token_id", vocab_size, generation, given, top)), None),
        sampling_defaults=_sampling(generation),
        has_chat_template=_has_template(model),
        licence=model.licence,
        weight_bytes=_text_bytes(model, names),
    )


def _family(top: Fields) -> tuple[str, _Family, Mapping[str, Any]]:
    """What the file calls itself, its family, and the dict with the text model's values."""
    listed = top.raw("architectures")
    if listed is not None and not (isinstance(listed, list) and all(isinstance(item, str) for item in listed)):
        raise top.fail("architectures", "must be a list of names")
    model_type = top.text("model_type")
    source = listed[0] if listed else model_type
    if not source:
        raise top.fail("model_type", "is missing: the file does not say what model this is")
    if listed and not source.endswith(("ForCausalLM", "ForConditionalGeneration")):
        raise unsupported(top.path, f"{source} (no language model head)")
    config: Mapping[str, Any] = top.values
    if model_type in _WRAPPERS:
        inner = top.raw("text_config")
        if not isinstance(inner, dict):
            raise top.fail("text_config", "must be an object")
        inner_type = Fields(top.path, inner).text("model_type", _WRAPPERS[model_type])
        config, model_type = inner, inner_type
    if model_type not in _FAMILIES:
        raise unsupported(top.path, f"{source} (model_type {model_type})" if model_type else source)
    return source, _FAMILIES[model_type], config


def _activation(keys: Fields, key: str) -> str:
    # Gemma's first configs carry hidden_act "gelu" beside it, which nothing reads.
    name = keys.text(key, "silu")
    if name not in _ACTIVATIONS:
        raise keys.fail(key, f"is {name[:60]!r}; {', '.join(_ACTIVATIONS)} are supported")
    return _ACTIVATIONS[name]


def _windows(given: Fields, keys: Fields, family: _Family, source: str, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer, as transformers derives it. An explicit null switches a default window off."""
    key, architecture = "sliding_window", family.architecture
    if key not in family.defaults:
        return (None,) * num_layers  # Llama has none, whatever its config carries along
    off = key in given.values and given.values[key] is None
    window = None if off or keys.raw(key) is None else keys.integer(key, 1, MAX_CONTEXT)
    if architecture.startswith("qwen") and not keys.flag("use_sliding_window"):
        window = None
    types = keys.raw("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != num_layers:
            raise keys.fail("layer_types", f"must list {num_layers} layers")
        unknown = [str(item) for item in types if item not in ("full_attention", "sliding_attention")]
        if unknown:
            raise unsupported(keys.path, f"{source} with layers of type {unknown[0][:60]}")
        if window is None and "sliding_attention" in types and not architecture.startswith("qwen"):
            raise keys.fail(key, "is missing, layer_types names windowed layers")
        return tuple(window if item == "sliding_attention" else None for item in types)
    if architecture == "qwen2" or architecture == "qwen3":
        first = keys.integer("max_window_layers", 0, MAX_LAYERS)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if architecture == "gemma3":
        every = keys.integer("sliding_window_pattern", 1, MAX_LAYERS, 6)
        return tuple(None if (layer + 1) % every == 0 else window for layer in range(num_layers))
    return (window,) * num_layers


def _tied(model: StoredModel, names: SourceNames, top: Fields, keys: Fields) -> bool:
    """Whether the head is the embedding: by the config, but a missing head is tied, and a quantised one is not."""
    head = {name.rpartition(".")[2] for name in model.tensors if name.startswith(f"{names.head}.")}
    stated = keys.raw("tie_word_embeddings")
    if stated is None:
        stated = top.raw("tie_word_embeddings")
    if stated is not None and not isinstance(stated, bool):
        raise keys.fail("tie_word_embeddings", f"is {stated!r:.60}, it must be true or false")
    if not model.tensors:
        return bool(stated)
    if not head:
        return stated is not False
    return bool(stated) and head <= {"weight"}


def _ids(key: str, vocab_size: int, *places: Fields) -> tuple[int, ...]:
    """Token ids from the first place that has them; -1 is how some files write "none"."""
    for fields in places:
        if fields.raw(key) not in (None, -1):
            return fields.token_ids(key, vocab_size)
    return ()


def _sampling(generation: Fields) -> dict[str, Any]:
    values: dict[str, Any] = {
        key: generation.number(key, low, high)
        for key, (low, high) in _SAMPLING.items()
        if generation.raw(key) is not None
    }
    if generation.raw("top_k") is not None:
        values["top_k"] = generation.integer("top_k", -1, 1 << 31)
    return values


def _has_template(model: StoredModel) -> bool:
    if "chat_template.jinja" in model.tokenizer_files or "chat_template.json" in model.tokenizer_files:
        return True
    config = model.tokenizer_files.get("tokenizer_config.json")
    return config is not None and _TEMPLATE.search(read_small(config, 4 * MAX_CONFIG_BYTES)) is not None


def _has(model: StoredModel, names: SourceNames, inner: str) -> bool:
    return names.source(f"model.layers.0.{inner}") in model.tensors


def _text_bytes(model: StoredModel, names: SourceNames) -> int:
    """Bytes of the text model's tensors: vision towers and projectors are not loaded."""
    return sum(info.nbytes for name, info in model.tensors.items() if names.canonical(name.rpartition(".")[0]))


def _name(path: Path) -> str:
    """The repository of a snapshot in the hub's cache, else the folder's name."""
    if path.parent.name == "snapshots":
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    return path.resolve().name

"""GGUF metadata -> `ModelFacts`: keys, defaults, quirks of each architecture, and the vocabulary's consistency."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from localllm.errors import UnsupportedModel

from .facts import RUNNABLE, ModelFacts, RopeFacts
from .gguf_file import StringArray
from .gguf_types import DECODED_TYPES, FILE_TYPES
from .limits import MAX_CONTEXT, MAX_HEAD_DIM, MAX_HEADS, MAX_HIDDEN, MAX_LAYERS, MAX_VOCAB, Fields, check_heads
from .mapped_file import bad, shown
from .tensor_info import TensorInfo

_CANONICAL = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3"}
_INTERLEAVED = {"llama"}  # NORM rope: the converter permuted the rows of Q and K
_NOT_MODELS = {
    "adapter": ("is a LoRA adapter", "merge it into its base model first; adapters alone cannot run"),
    "mmproj": ("is a vision projector", "name the model's own .gguf beside it"),
    "imatrix": ("is an importance matrix, made for quantising", "name the model's own .gguf"),
    "vocab": ("holds a vocabulary and no weights", "fetch the model itself"),
}
_INT, _FLOAT = "iu", "f"
_KEY_ARRAYS = {
    # arrays the tokenizer and the facts rely on: what their elements must be
    "tokenizer.ggml.tokens": "string",
    "tokenizer.ggml.merges": "string",
    "tokenizer.ggml.scores": _FLOAT,
    "tokenizer.ggml.token_type": _INT,
}
_TOKEN_IDS = ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask")
_NO_TOKEN = (None, -1, 2**32 - 1)  # how converters write "none": nothing, -1, or -1 as u32
_TEXT_KEYS = ("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.chat_template", "tokenizer.huggingface.json")
_FLAG_KEYS = tuple(f"tokenizer.ggml.add_{name}" for name in ("bos_token", "eos_token", "sep_token", "space_prefix"))
MAX_TEMPLATE_CHARS = 1 << 20
MAX_MERGES_PER_TOKEN = 8  # Gemma has 2; each costs the tokenizer 500 bytes


def gguf_facts(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelFacts:
    """Facts of a GGUF model. Raises UnsupportedModel for other architectures, BadModelFile for values out of range."""
    arch = model_architecture(path, metadata)
    general, keys = Fields(path, metadata), Fields(path, metadata, f"{arch}.")
    if keys.integer("expert_count", 0, 1 << 20, 0) > 0:
        raise unsupported(path, f"{arch} with {keys.integer('expert_count', 0, 1 << 20)} experts (mixture of experts)")
    num_layers = keys.integer("block_count", 1, MAX_LAYERS)
    hidden = keys.integer("embedding_length", 1, MAX_HIDDEN)
    num_heads = keys.integer("attention.head_count", 1, MAX_HEADS)
    num_kv_heads = keys.integer("attention.head_count_kv", 1, MAX_HEADS, num_heads)
    if keys.raw("attention.key_length") is None and hidden % num_heads:
        raise keys.fail("attention.head_count", f"{num_heads} heads do not divide the hidden size {hidden:,}")
    head_dim = keys.integer("attention.key_length", 2, MAX_HEAD_DIM, max(hidden // num_heads, 2))
    value_dim = keys.integer("attention.value_length", 2, MAX_HEAD_DIM, head_dim)
    if value_dim != head_dim:
        raise unsupported(path, f"{arch} with keys of {head_dim} and values of {value_dim} elements")
    vocab_size = _vocab_size(path, metadata, tensors, hidden)
    if keys.integer("vocab_size", 1, MAX_VOCAB, vocab_size) != vocab_size:
        raise keys.fail("vocab_size", f"is {keys.raw('vocab_size'):,}, the embedding has {vocab_size:,} rows")
    rope, max_context = _rope(keys, arch, head_dim, tensors)
    check_heads(keys, num_heads, num_kv_heads, head_dim, rope.dim)
    windows = _windows(keys, arch, num_layers)
    gemma = arch == "gemma3"
    scale = 1 / math.sqrt(head_dim)
    if gemma and num_layers == 62:  # the 27B model scales by its hidden size instead
        scale = 1 / math.sqrt(hidden / num_heads)
    return ModelFacts(
        architecture=_CANONICAL[arch],
        source_architecture=arch,
        name=general.text("general.name", path.stem)[:200],
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=keys.integer("feed_forward_length", 1, MAX_HIDDEN * 4),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_context=max_context,
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon", 1e-12, 0.1),
        hidden_act="gelu_tanh" if gemma else "silu",
        attention_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        embedding_scale=math.sqrt(hidden) if gemma else 1.0,
        attention_scale=keys.number("attention.scale", 1e-6, 1e3, scale),
        attn_softcap=keys.optional_number("attn_logit_softcapping", 1e-3, 1e6),
        logit_softcap=keys.optional_number("final_logit_softcapping", 1e-3, 1e6),
        tied_embeddings="output.weight" not in tensors,
        windows=windows,
        rope=rope,
        local_rope=_local_rope(keys, head_dim) if gemma and any(windows) else None,
        post_norms=gemma,
        eos_token_ids=_special_ids(general, vocab_size, "eos", "eot", "eom"),
        bos_token_id=next(iter(_special_ids(general, vocab_size, "bos")), None),
        sampling_defaults=_sampling(general),
        has_chat_template=bool(general.text("tokenizer.chat_template")),
        licence=general.text("general.license")[:200],
        stored_format=_stored_format(metadata, tensors),
        weight_bytes=sum(info.nbytes for info in tensors.values()),
        decoded_bytes=sum(2 * math.prod(t.shape) - t.nbytes for t in tensors.values() if t.dtype in DECODED_TYPES),
    )


def model_architecture(path: Path, metadata: Mapping[str, Any]) -> str:
    """`general.architecture`, once it is known to be a model this version runs."""
    general = Fields(path, metadata)
    kind = general.text("general.type", "model")
    if general.raw("general.architecture") is None and kind not in _NOT_MODELS:
        raise bad(path, "is missing", key="general.architecture")
    arch = general.text("general.architecture")
    if arch == "clip" or path.name.lower().startswith("mmproj"):
        kind = "mmproj"
    if kind in _NOT_MODELS:
        what, hint = _NOT_MODELS[kind]
        raise bad(path, f"{what}, not a model", key="general.type", hint=hint, error=UnsupportedModel)
    if arch not in _CANONICAL:
        raise unsupported(path, arch or "(empty)")
    return arch


def unsupported(path: Path, architecture: str) -> UnsupportedModel:
    """The refusal of an architecture, with what would work."""
    what = f"the architecture {shown(architecture)} is not supported by this version"
    error = bad(path, what, hint=f"it runs {RUNNABLE}: try localllm chat qwen", error=UnsupportedModel)
    error.context |= {"key": "architecture", "architecture": shown(architecture)}
    assert isinstance(error, UnsupportedModel)
    return error


def check_vocabulary(path: Path, metadata: Mapping[str, Any], vocab_size: int) -> None:
    """Refuse a vocabulary whose parts do not fit together: array types, lengths, special ids, merges."""
    general = Fields(path, metadata)
    for key, kind in _KEY_ARRAYS.items():
        value = metadata.get(key)
        fits = isinstance(value, StringArray) if kind == "string" else getattr(value, "dtype", None) is not None
        if value is not None and not (fits and (kind == "string" or value.dtype.kind in kind)):
            wanted = {"string": "strings", _FLOAT: "floats", _INT: "integers"}[kind]
            raise bad(path, f"must be an array of {wanted}", key=key)
    for key in _TEXT_KEYS:
        general.text(key)
    for key in _FLAG_KEYS:
        general.flag(key)
    if len(general.text("tokenizer.chat_template")) > MAX_TEMPLATE_CHARS:
        what = f"has {len(metadata['tokenizer.chat_template']):,} characters, the limit is {MAX_TEMPLATE_CHARS:,}"
        raise bad(path, what, key="tokenizer.chat_template")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        raise bad(path, "is missing: the file has no vocabulary", key="tokenizer.ggml.tokens")
    if len(tokens) != vocab_size:
        what = f"holds {len(tokens):,} tokens, the embedding has {vocab_size:,} rows"
        raise bad(path, what, key="tokenizer.ggml.tokens")
    for key in ("tokenizer.ggml.scores", "tokenizer.ggml.token_type"):
        if metadata.get(key) is not None and len(metadata[key]) != vocab_size:
            raise bad(path, f"has {len(metadata[key]):,} entries for {vocab_size:,} tokens", key=key)
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is not None and not np.isfinite(scores).all():
        raise bad(path, "holds a value that is not finite", key="tokenizer.ggml.scores")
    _special_ids(general, vocab_size, *_TOKEN_IDS)
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is not None and len(merges):
        if len(merges) > MAX_MERGES_PER_TOKEN * vocab_size:
            what = f"holds {len(merges):,} merges, the limit for {vocab_size:,} tokens is"
            raise bad(path, f"{what} {MAX_MERGES_PER_TOKEN * vocab_size:,}", key="tokenizer.ggml.merges")
        _check_merges(path, merges)


def _check_merges(path: Path, merges: StringArray) -> None:
    """Each merge is `left right`: a space that is neither its first nor its last byte."""
    blob = np.frombuffer(merges.blob, np.uint8)
    spaces = np.flatnonzero(blob == 0x20)
    found = np.searchsorted(spaces, merges.starts + 1)
    at = np.append(spaces, len(blob))[found]
    wrong = at >= merges.ends - 1
    if wrong.any():
        index = int(np.argmax(wrong))
        what = f"entry {index:,}, '{shown(merges[index])}', is not two parts with a space between them"
        raise bad(path, what, key="tokenizer.ggml.merges")


def _vocab_size(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], hidden: int) -> int:
    if not tensors:
        what, hint = _NOT_MODELS["vocab"]
        raise bad(path, what, key="tensor count", hint=hint, error=UnsupportedModel)
    table = tensors.get("token_embd.weight")
    if table is None:
        raise bad(path, "the tensor is missing", key="token_embd.weight")
    if len(table.shape) != 2 or table.shape[1] != hidden:
        raise bad(path, f"has shape {table.shape}, rows of {hidden:,} are expected", key="token_embd.weight")
    if table.shape[0] > MAX_VOCAB:
        raise bad(path, f"has {table.shape[0]:,} rows, the limit is {MAX_VOCAB:,}", key="token_embd.weight")
    check_vocabulary(path, metadata, table.shape[0])
    return table.shape[0]


def _rope(keys: Fields, arch: str, head_dim: int, tensors: Mapping[str, TensorInfo]) -> tuple[RopeFacts, int]:
    """The global rope, and the context it reaches."""
    context = keys.integer("context_length", 1, MAX_CONTEXT)
    theta = keys.number("rope.freq_base", 1.0, 1e15, 10000.0)
    dim = keys.integer("rope.dimension_count", 2, MAX_HEAD_DIM, head_dim)
    interleaved = arch in _INTERLEAVED
    if "rope_freqs.weight" in tensors:
        # Carries Llama 3's scaling; a scaling key beside it must not be applied as well.
        return RopeFacts(theta, dim, "factors", interleaved=interleaved, factors_tensor="rope_freqs.weight"), context
    factor = keys.number("rope.scaling.factor", 1e-3, 1e6, 1.0)
    old = keys.raw("rope.scale_linear")
    kind = keys.text("rope.scaling.type", "none" if old is None else "linear")
    if kind == "none" or (factor == 1.0 and old is None):
        return RopeFacts(theta, dim, interleaved=interleaved), context
    if kind == "linear":
        factor = keys.number("rope.scale_linear", 1e-3, 1e6, factor)
        return RopeFacts(theta, dim, "linear", factor, interleaved=interleaved), context
    if kind != "yarn":
        raise unsupported(keys.path, f"{arch} with rope scaling {shown(kind)}")
    original = keys.integer("rope.scaling.original_context_length", 1, MAX_CONTEXT, context)
    # llama.cpp multiplies its own attn_factor (1 by default) with the paper's 0.1 ln(factor) + 1.
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


def _local_rope(keys: Fields, head_dim: int) -> RopeFacts:
    return RopeFacts(keys.number("rope.freq_base_swa", 1.0, 1e15, 10000.0), head_dim)


def _windows(keys: Fields, arch: str, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer; Gemma 3 files often leave out the pattern: five windowed layers, then a full one."""
    window = keys.integer("attention.sliding_window", 0, MAX_CONTEXT, 0)
    pattern = keys.raw("attention.sliding_window_pattern")
    if window == 0:
        return (None,) * num_layers
    if isinstance(pattern, np.ndarray):
        if pattern.dtype != bool or len(pattern) != num_layers:
            raise keys.fail("attention.sliding_window_pattern", f"must hold {num_layers} bools")
        return tuple(window if windowed else None for windowed in pattern.tolist())
    every = keys.integer("attention.sliding_window_pattern", 1, MAX_LAYERS, 6 if arch == "gemma3" else 0)
    if every == 0:
        return (window,) * num_layers
    return tuple(None if (layer + 1) % every == 0 else window for layer in range(num_layers))


def _special_ids(general: Fields, vocab_size: int, *names: str) -> tuple[int, ...]:
    """The ids of the named special tokens that there are, in order, each once."""
    ids: list[int] = []
    for name in names:
        key = f"tokenizer.ggml.{name}_token_id"
        if general.raw(key) not in _NO_TOKEN:
            ids += general.token_ids(key, vocab_size)
    return tuple(dict.fromkeys(ids))


def _sampling(general: Fields) -> dict[str, Any]:
    values = {
        "temperature": general.optional_number("general.sampling.temp", 0.0, 100.0),
        "top_p": general.optional_number("general.sampling.top_p", 0.0, 1.0),
        "min_p": general.optional_number("general.sampling.min_p", 0.0, 1.0),
    }
    if general.raw("general.sampling.top_k") is not None:
        values["top_k"] = general.integer("general.sampling.top_k", -1, 1 << 31)
    return {key: value for key, value in values.items() if value is not None}


def _stored_format(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> str:
    """The label people know when the tensors bear it out, else the type that holds most bytes of the layers."""
    layers: Counter[str] = Counter()
    for info in tensors.values():
        if len(info.shape) > 1 and info.name.startswith("blk."):
            layers[info.dtype] += info.nbytes
    if not layers:
        return next(iter(tensors.values())).dtype
    label = FILE_TYPES.get(metadata.get("general.file_type", -1), "") if tensors else ""
    stem = "_".join(label.split("_")[:2]) if label.startswith("Q") and "_K" in label else label.split("_MOE")[0]
    if label and (stem in layers or label.startswith("IQ")):
        return label
    return layers.most_common(1)[0][0]

"""Qwen4-Exp (Qwen3.8-Flash-Next): the layers of Qwen3.5 MoE with sparse attention, several residual streams
(hyper-connections) instead of norms before blocks, and a table of n-gram embeddings in one layer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_CONTEXT, MAX_CONV, MAX_HEAD_DIM, MAX_HEADS, MAX_HIDDEN, Fields
from localllm.checkpoint.formats import NGRAMS
from localllm.checkpoint.gguf_types import TENSOR_TYPES
from localllm.checkpoint.mapped_file import TensorInfo, bad
from localllm.errors import UnsupportedFormat

from .config import Config
from .facts import ModelFacts, shared_layers
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import MIXER, Fusion, HyperConnections, LayerFacts, NGrams, NGramTable, Norms
from .mixers import Attention, GatedDelta, TokenIndex
from .names import TOWER, NameMap
from .qwen3_5 import DEFAULTS, GGUF_HYBRID, Qwen3_5Moe

PAGE = 16  # the smallest page of the KV cache; it must hold whole blocks of the index
MOST_STREAMS, MOST_ORDER, MOST_NGRAM_HEADS = 16, 8, 1024  # published: 4, 3 and 16
ROW_DTYPES = ("BF16", "F16", "F32", "F8_E4M3")
NO_NORMS = Norms(before_mixer=None, before_ffn=None)
_SHARD = re.compile(rf".*\.layers\.(\d+)\..*{re.escape(NGRAMS)}(?:shard_(\d+)\.)?weight", re.ASCII)
_HYPER = {"hc_norm": "norm", "input_mix_weight_down": "down", "input_mix_weight_up": "up"}
GGUF_QWEN4 = GGUF_HYBRID | {
    f"{ours}_hyper_connection.{name}": f"hc_{theirs}_{short}"
    for ours, theirs in (("attn", "attn"), ("mlp", "ffn"))
    for name, short in (_HYPER | {"block_inject_weight": "inject"}).items()
}
GGUF_QWEN4 |= {f"self_attn.indexer.{name}_proj": f"indexer.{name}_proj" for name in "qk"}
GGUF_QWEN4 |= {f"self_attn.indexer.{name}_layernorm": f"indexer.{name}_norm" for name in "qk"}
GGUF_QWEN4 |= {f"ple.{name}_proj": f"ple_{name}" for name in ("key", "value")}
GGUF_QWEN4 |= {f"ple.{name}": f"ple_{name}" for name in ("norm_key", "norm_query", "norm_conv", "conv1d")}
GGUF_TABLE = "per_layer_token_embd.weight"


class Qwen4Exp(Qwen3_5Moe):
    """Output gates of gated delta layers are sigmoids. No norm follows the last layer; its streams are mixed."""

    name = "qwen4_exp"
    label = "Qwen3.8-Flash-Next (text)"
    hf_types = {
        "qwen4_exp_text": DEFAULTS
        | {"num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512}
        | {"shared_expert_intermediate_size": 512, "intermediate_size": 512, "norm_topk_prob": True}
        | {"hc_count": 4, "hc_lowrank": 320, "ple_conv_kernel_size": 4, "ngram_size": 3, "heads_per_ngram": 8}
        | {"ngram_vocab_size_base": 20_000_000, "make_ngram_vocab_size_divisible_by": 128, "seed": 1234}
    }
    hf_wrappers = {"qwen4_exp": "qwen4_exp_text"}
    hf_classes: ClassVar[tuple[str, ...]] = ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration")
    gguf_types = ("qwen4exp",)
    gguf_inner = GGUF_QWEN4

    def from_hf(self, config: HfConfig) -> ModelFacts:
        keys = config.keys
        types = config.keys.raw("layer_types")
        if isinstance(types, list):  # transformers saves the other name
            keys.values = {**keys.values, "layer_types": [_USUAL.get(str(one), one) for one in types]}
        gate = keys.text("output_gate_type", keys.text("hidden_act", "silu"))
        if gate not in ("silu", "sigmoid"):
            raise keys.fail("output_gate_type", f"is {gate[:40]!r}; silu and sigmoid are supported")
        index = _index(keys, "indexer_n_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
        if index is not None and keys.integer("indexer_kv_heads", 1, MAX_HEADS, 1) > 1:
            raise config.unsupported(f"{config.source} with several index keys per token")
        hyper = HyperConnections(keys.integer("hc_count", 2, MOST_STREAMS), keys.integer("hc_lowrank", 1, MAX_HIDDEN))
        facts = super().from_hf(config)
        _check_index(facts, index, keys)
        layers = [_layer(layer, hyper, index, gate == "sigmoid") for layer in facts.layers]
        if facts.predictor is not None:
            head = replace(_layer(facts.predictor, hyper, index, gate == "sigmoid"), fusion=Fusion(hyper))
            facts = replace(facts, predictor=head)
        listed = sorted(config.layer_numbers("ple_layer_ids"))  # counted from 1
        if not listed:
            return replace(facts, layers=shared_layers(layers), final_norm=False)
        if len(listed) > 1:
            raise config.unsupported(f"{config.source} with n-gram embeddings in {len(listed)} layers")
        _check_place(config, layers, listed[0] - 1)
        order = keys.integer("ngram_size", 2, MOST_ORDER)
        size = keys.integer("ple_embed_dim", 1, MAX_HIDDEN, config.hidden_size)
        table = _stored_table(config, listed[0] - 1, order, size)
        sizes = size, order, keys.integer("ple_conv_kernel_size", 2, MAX_CONV)
        return _with_table(facts, config, layers, listed[0] - 1, sizes, table)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        keys = config.keys
        ratios = config.each("attention.compress_ratios", 0, MAX_CONTEXT, 0)
        _check_keys(config, "indexer", "attention.compress_ratios")
        _check_keys(config, "ple_key", "ple.layers")
        index = None
        if ratio := max(ratios):
            if set(ratios) - {0, ratio}:
                raise config.unsupported(f"{config.source} with blocks of different sizes")
            names = ("attention.indexer.head_count", "attention.indexer.key_length", "attention.indexer.top_k")
            index = replace(indexed(keys, names, ratio), fused=False)
        hyper = HyperConnections(
            keys.integer("hyper_connection.count", 2, MOST_STREAMS),
            keys.integer("hyper_connection.low_rank", 1, MAX_HIDDEN),
        )
        facts = super().from_gguf(config)
        if facts.predictor is not None:
            flaw = "the MTP head of a GGUF file reads all residual streams, which is not supported"
            facts = replace(facts, predictor=None, predictor_flaw=flaw)
        _check_index(facts, index, keys)
        layers = [
            _layer(layer, hyper, index if own == ratio else None, sigmoid=True)
            for layer, own in zip(facts.layers, ratios, strict=True)
        ]
        listed = keys.raw("ple.layers")
        if listed is None:
            return replace(facts, layers=shared_layers(layers), final_norm=False)
        if not isinstance(listed, np.ndarray) or listed.dtype.kind not in "iu" or not len(listed):
            raise keys.fail("ple.layers", "must list layer numbers")
        if len(listed) > 1:
            raise config.unsupported(f"{config.source} with n-gram embeddings in {len(listed)} layers")
        place = int(listed[0])
        _check_place(config, layers, place)
        order = keys.integer("ple.ngram_size", 2, MOST_ORDER)
        heads = (order - 1) * keys.integer("ple.heads_per_ngram", 1, MOST_NGRAM_HEADS)
        dim = keys.integer("embedding_length_per_layer_input", 1, MAX_HIDDEN)
        multipliers = _numbers(config, "ple.layer_multipliers", order)
        sizes, offsets = (_numbers(config, f"ple.{name}", heads) for name in ("head_vocab_sizes", "head_offsets"))
        end = keys.integer("ple.eos_token_id", 0, config.vocab_size - 1)
        table = _table(config, [GGUF_TABLE], dim, multipliers, sizes, offsets, end)
        return _with_table(
            facts,
            config,
            layers,
            place,
            (heads * dim, order, keys.integer("ple.conv_kernel", 2, MAX_CONV)),
            table,
        )

    def names(self, checkpoint: Checkpoint) -> NameMap:
        found = super().names(checkpoint)
        if checkpoint.kind == "gguf":
            return replace(found, top={**found.top, **{f"{MIXER}.{a}": f"output_hc_{b}" for a, b in _HYPER.items()}})
        start = found.top["model.norm"].removesuffix("norm")
        own = {f"{MIXER}.{name}": start + f"{MIXER}.{name}".removeprefix("model.") for name in _HYPER}
        parts = {name: stored for name, stored in found.parts.items() if not name.startswith(TOWER)}
        return replace(found, top={**found.top, **own}, parts=parts)


_USUAL = {"indexed_attention": "full_attention"}


def _check_keys(config: GgufConfig, part: str, key: str) -> None:
    """Raise BadModelFile if the file has tensors of `part` and no numbers for them."""
    name = next((name for name in config.checkpoint.tensors if re.match(rf"blk\.\d+\.{part}\b", name)), None)
    if name is not None and config.keys.raw(key) is None:
        raise config.keys.fail(key, f"is missing, and the file has {name}")


def _index(keys: Fields, heads: str, dim: str, budget: str, ratio: str) -> TokenIndex | None:
    """The index of safetensors; None without one."""
    if all(keys.raw(key) is None for key in (heads, dim, budget, ratio)):
        return None
    return indexed(keys, (heads, dim, budget), keys.integer(ratio, 1, MAX_CONTEXT), ratio)


def indexed(keys: Fields, names: Sequence[str], ratio: int, key: str = "attention.compress_ratios") -> TokenIndex:
    """`names` are those of heads, their size, and the tokens that a query sees."""
    heads, dim, budget = names
    if PAGE % ratio:
        raise bad(keys.path, f"blocks of {ratio} tokens do not fit in pages of {PAGE}", key=keys.prefix + key)
    tokens = keys.integer(budget, 1, MAX_CONTEXT)
    if tokens % ratio:
        raise keys.fail(budget, f"is {tokens:,}, not a multiple of {ratio} tokens")
    return TokenIndex(keys.integer(heads, 1, MAX_HEADS), keys.integer(dim, 2, MAX_HEAD_DIM), ratio, tokens // ratio)


def _check_index(facts: ModelFacts, index: TokenIndex | None, keys: Fields) -> None:
    turned = max((mixer.rope.dim for mixer in facts.attention), default=0)
    if index is not None and turned > index.dim:
        raise bad(keys.path, f"attention rotates {turned} elements, and an index key has {index.dim}", key="indexer")


def _layer(layer: LayerFacts, hyper: HyperConnections, index: TokenIndex | None, sigmoid: bool) -> LayerFacts:
    mixer = layer.mixer
    if isinstance(mixer, Attention) and index is not None:
        mixer = replace(mixer, index=index)
    elif isinstance(mixer, GatedDelta):
        mixer = replace(mixer, sigmoid_gate=sigmoid)
    return replace(layer, mixer=mixer, norms=NO_NORMS, hyper=hyper)


def _check_place(config: Config, layers: Sequence[LayerFacts], place: int) -> None:
    """Raise BadModelFile unless layer `place` can have n-gram embeddings."""
    if not (0 <= place < len(layers)) or not isinstance(layers[place].mixer, GatedDelta):
        what = f"layer {place} has n-gram embeddings, but it is not a gated delta layer"
        raise bad(config.keys.path, what, key="ple layers")


def _with_table(
    facts: ModelFacts,
    config: Config,
    layers: list[LayerFacts],
    place: int,
    sizes: tuple[int, int, int],
    table: NGramTable | None,
) -> ModelFacts:
    """Facts with n-gram embeddings in layer `place`. `sizes`: elements per token, order, taps of the convolution."""
    size, order, taps = sizes
    hyper = layers[place].hyper
    assert hyper is not None
    layers[place] = replace(layers[place], ngrams=NGrams(hyper.count * config.hidden_size, size, order, taps))
    nbytes = 0 if table is None else table.nbytes
    return replace(
        facts, layers=shared_layers(layers), final_norm=False, ngrams=table, weight_bytes=facts.weight_bytes - nbytes
    )


def _table(
    config: Config,
    shards: Sequence[str],
    dim: int,
    multipliers: Sequence[int],
    sizes: Sequence[int],
    offsets: Sequence[int],
    end: int,
    scale: str = "",
) -> NGramTable | None:
    """The table, after checking that rows and products are in range; None where only the configuration is known."""
    tensors, path = config.checkpoint.tensors, config.checkpoint.path
    if not tensors:
        return None
    found: list[TensorInfo] = []
    for name in shards:
        info = tensors.get(name)
        if info is None:
            raise bad(path, "the tensor is missing", key=name)
        if len(info.shape) != 2 or info.shape[1] != dim:
            raise bad(info.file, f"has shape {list(info.shape)}, expected rows of {dim:,} elements", key=name)
        found.append(info)
    blocks = {name for name, *_ in TENSOR_TYPES.values()} if config.checkpoint.kind == "gguf" else ROW_DTYPES
    if {info.dtype for info in found} != {found[0].dtype} or found[0].dtype not in blocks:
        what = (
            f"the n-gram table is stored as {', '.join(sorted({info.dtype for info in found}))}, which is not supported"
        )
        raise bad(path, what, key=shards[0], hint="download a BF16, FP8 or GGUF version", error=UnsupportedFormat)
    if found[0].dtype == "F8_E4M3" and not scale:
        raise bad(
            path,
            "the scale of the n-gram table is missing",
            key=f"{shards[0].partition(NGRAMS)[0]}{NGRAMS}weight_scale",
        )
    rows = sum(info.shape[0] for info in found)
    most = max((offset + size for offset, size in zip(offsets, sizes, strict=True)), default=0)
    if min(sizes) < 1 or min(offsets) < 0:
        raise bad(path, "a head of the n-gram table has no rows, or begins before the first", key=shards[0])
    if most > rows:
        raise bad(path, f"the n-gram heads need {most:,} rows, and the table has {rows:,}", key=shards[0])
    if min(multipliers) < 0 or max(multipliers) > (2**63 - 1) // max(1, config.vocab_size):
        raise bad(path, "a multiplier of the n-gram hash is out of range", key="layer_multipliers")
    nbytes = sum(info.nbytes for info in found)
    numbers = tuple(multipliers), tuple(sizes), tuple(offsets)
    return NGramTable(tuple(shards), rows, dim, *numbers, end, nbytes, scale)


def _numbers(config: GgufConfig, key: str, count: int) -> list[int]:
    values = config.keys.raw(key)
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "iu" or len(values) < count:
        raise config.keys.fail(key, f"must hold {count} integers")
    return [int(value) for value in values[:count]]


def _stored_table(config: HfConfig, place: int, order: int, size: int) -> NGramTable | None:
    """The table of layer `place` in safetensors: its parts, and the numbers of the hash, derived where the file has
    none. None where only the configuration is known.
    """
    keys, checkpoint = config.keys, config.checkpoint
    per = keys.integer("heads_per_ngram", 1, MOST_NGRAM_HEADS)
    heads = (order - 1) * per
    if size % heads:
        raise keys.fail("ple_embed_dim", f"is {size:,}, not a multiple of {heads} heads")
    ids = config.given.token_ids("eos_token_id", config.vocab_size)
    if not ids:
        raise keys.fail("eos_token_id", "is missing; n-grams end there")
    if not checkpoint.tensors:
        return None
    found = [match for name in checkpoint.tensors if (match := _SHARD.fullmatch(name)) and int(match[1]) == place]
    found.sort(key=lambda match: int(match[2] or 0))
    is_whole = [match[2] for match in found] == [None]
    if not is_whole and [int(match[2] or -1) for match in found] != list(range(len(found))):
        raise bad(checkpoint.path, "a part of the n-gram table is missing, or there twice", key=found[0][0])
    if not found:
        raise bad(checkpoint.path, "the n-gram table is missing", key=f"ple.ple_embedding{NGRAMS}weight")
    shards = [match[0] for match in found]
    start = shards[0].partition(NGRAMS)[0]
    multipliers = _integers(checkpoint, f"{start}.layer_multipliers", order)
    sizes = _integers(checkpoint, f"{start}.ngram_heads_vocab_sizes", heads)
    offsets = _integers(checkpoint, f"{start}.ngram_heads_offsets", heads)
    multipliers = multipliers or _multipliers(config.vocab_size, order, keys.integer("seed", 0, 2**63 - 1))
    if sizes is None:
        base = keys.integer("ngram_vocab_size_base", 1, 2**40)
        rows = sum(math.prod(checkpoint.tensors[name].shape[:1]) for name in shards)
        if base * heads > rows:  # before it takes hours to find primes of that size
            raise keys.fail("ngram_vocab_size_base", f"is {base:,}, and {heads} heads have {rows:,} rows")
        sizes = _primes(base, heads)
    offsets = offsets or [sum(sizes[:head]) for head in range(heads)]
    scale = checkpoint.tensors.get(f"{start}{NGRAMS}weight_scale")
    if scale is not None and math.prod(scale.shape) != 1:
        what = f"has shape {list(scale.shape)}, expected one scale for the n-gram table"
        raise bad(scale.file, what, key=scale.name)
    return _table(
        config, shards, size // heads, multipliers, sizes, offsets, ids[0], "" if scale is None else scale.name
    )


def _integers(checkpoint: Checkpoint, name: str, count: int) -> list[int] | None:
    """Numbers of the hash; None where the file has none."""
    info = checkpoint.tensors.get(name)
    if info is None:
        return None
    if info.dtype != "I64" or info.shape != (count,):
        what = f"is {info.dtype} of shape {list(info.shape)}, expected {count} numbers as I64"
        raise bad(info.file, what, key=name)
    return np.frombuffer(checkpoint.read(name).tobytes(), "<i8").tolist()


def _multipliers(vocab_size: int, order: int, seed: int) -> list[int]:
    """Odd numbers of a splitmix64 sequence, below half of what keeps products with token ids in 63 bits."""
    half, mask = max(1, (2**63 - 1) // max(1, vocab_size) // 2), 2**64 - 1
    found = []
    for index in range(order):
        value = (seed + 0x9E3779B97F4A7C15 * (index + 2)) & mask
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        found.append(2 * ((value ^ (value >> 31)) % half) + 1)
    return found


def _primes(start: int, count: int) -> list[int]:
    """The first `count` primes from `start` on."""

    def is_prime(value: int) -> bool:
        return value > 1 and all(value % divisor for divisor in range(2, math.isqrt(value) + 1))

    found: list[int] = []
    value = start
    while len(found) < count:
        if is_prime(value):
            found.append(value)
        value += 1
    return found

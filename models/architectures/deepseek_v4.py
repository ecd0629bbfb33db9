"""DeepSeek V4 (Flash, 284B-A13B): attention over the last tokens and compressed entries of earlier ones, several
residual streams (mHC), and experts that the first layers choose by token id.

The layer after the last one is an MTP head, with residual streams of its own. It is read from published files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_CONTEXT, MAX_EXPERTS, MAX_HEAD_DIM, MAX_HEADS, MAX_HIDDEN, MAX_LAYERS, Fields
from localllm.checkpoint.mapped_file import bad

from .architecture import Architecture
from .config import Config
from .facts import ModelFacts
from .gguf import GgufConfig
from .glm5_next import MOST_ROUNDS
from .hf import HfConfig, object_of
from .kimi_linear import limits_of
from .layers import EXPERT_TABLE, Experts, Fusion, LayerFacts, MixedConnections
from .mixers import CompressedAttention, EntryIndex, RopeFacts
from .names import CHOICE_BIAS, MTP, NameMap, gguf_names
from .qwen4_exp import MOST_STREAMS, PAGE

SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
RATES = {"sliding_attention": 0, SPARSE: 4, HEAVY: 128}
HASHED = 3  # layers at the start whose experts token ids choose
SQRT_SOFTPLUS = 4  # expert_gating_func
THETA, ENTRY_THETA = 10_000.0, 160_000.0
TURNED = 64  # rotated elements of a head
_COMPRESSOR, _INDEXER = "self_attn.compressor", "self_attn.compressor.indexer"
_HEAD = ("base", "fn", "scale")
_ATTENTION = {"q_a_proj": "wq_a", "q_b_proj": "wq_b", "kv_proj": "wkv", "o_a_proj": "wo_a", "o_b_proj": "wo_b"}
_ATTENTION |= {"q_a_norm": "q_norm", "kv_norm": "kv_norm", "sinks": "attn_sink"}
_EXPERT = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
# canonical name -> that in published files
PUBLISHED = {f"self_attn.{ours}": f"attn.{theirs}" for ours, theirs in _ATTENTION.items()}
for _ours, _theirs in ((_COMPRESSOR, "attn.compressor"), (_INDEXER, "attn.indexer.compressor")):
    PUBLISHED |= {f"{_ours}.kv_proj": f"{_theirs}.wkv", f"{_ours}.gate_proj": f"{_theirs}.wgate"}
    PUBLISHED |= {f"{_ours}.position_bias": f"{_theirs}.ape", f"{_ours}.kv_norm": f"{_theirs}.norm"}
PUBLISHED |= {f"{_INDEXER}.q_b_proj": "attn.indexer.wq_b", f"{_INDEXER}.weights_proj": "attn.indexer.weights_proj"}
PUBLISHED |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn.gate"}
PUBLISHED |= {CHOICE_BIAS: "ffn.gate.e_score_correction_bias", EXPERT_TABLE: "ffn.gate.tid2eid"}
PUBLISHED |= {f"mlp.experts.{{}}.{ours}": f"ffn.experts.{{}}.{theirs}" for ours, theirs in _EXPERT.items()}
PUBLISHED |= {f"mlp.shared_expert.{ours}": f"ffn.shared_experts.{theirs}" for ours, theirs in _EXPERT.items()}
_GGUF = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_norm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_proj": "attn_kv",
    "self_attn.kv_norm": "attn_kv_a_norm",
    "self_attn.o_a_proj": "attn_output_a",
    "self_attn.o_b_proj": "attn_output_b",
    "self_attn.sinks": "attn_sinks.weight",
    f"{_INDEXER}.q_b_proj": "indexer.attn_q_b",
    f"{_INDEXER}.weights_proj": "indexer.proj",
    EXPERT_TABLE: "ffn_gate_tid2eid.ids",
}
for _ours, _theirs in ((_COMPRESSOR, "attn_compressor"), (_INDEXER, "indexer_compressor")):
    _GGUF |= {f"{_ours}.kv_proj": f"{_theirs}_kv", f"{_ours}.gate_proj": f"{_theirs}_gate"}
    _GGUF |= {f"{_ours}.position_bias": f"{_theirs}_ape.weight", f"{_ours}.kv_norm": f"{_theirs}_norm"}


class DeepseekV4(Architecture):
    """Layers without entries rotate with another base than those with entries, and without scaling."""

    name = "deepseek_v4"
    label = "DeepSeek V4"
    hf_types: ClassVar[dict[str, Mapping[str, Any]]] = {
        "deepseek_v4": {
            "vocab_size": 129_280, "hidden_size": 4096, "moe_intermediate_size": 2048, "num_hidden_layers": 43,
            "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "q_lora_rank": 1024,
            "num_experts_per_tok": 6, "n_routed_experts": 256, "n_shared_experts": 1, "routed_scaling_factor": 1.5,
            "max_position_embeddings": 1_048_576, "rope_theta": THETA, "compress_rope_theta": ENTRY_THETA, "hc_mult": 4,
            "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "swiglu_limit": 10.0, "sliding_window": 128, "o_groups": 8,
            "o_lora_rank": 1024, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "rms_norm_eps": 1e-6,
        }
    }  # fmt: skip
    hf_classes = ("DeepseekV4ForCausalLM",)
    gguf_types = ("deepseek4",)

    def from_hf(self, config: HfConfig) -> ModelFacts:
        keys, act = config.keys, config.activation()
        if any(key.startswith(("engram", "kv_source_layer")) for key in keys.values):
            raise config.unsupported("DeepSeek V4.1")
        scoring = keys.text("scoring_func", "sqrtsoftplus")
        if act != "silu" or scoring != "sqrtsoftplus":
            raise config.unsupported(f"{config.source} with {act[:60]} and a router of type {scoring[:60]}")
        for key, wanted in (("attention_bias", False), ("mlp_bias", False), ("norm_topk_prob", True)):
            if keys.flag(key, wanted) != wanted:
                raise config.unsupported(f"{config.source} with another {key} than {str(wanted).lower()}")
        if keys.integer("n_shared_experts", 1, MAX_EXPERTS) != 1:
            raise config.unsupported(f"{config.source} with more than one shared expert")
        kinds = list(RATES)
        values = object_of(keys, "compress_rates")
        stated = [values.get(kind, RATES[kind]) for kind in kinds]
        for kind, key in ((SPARSE, "csa"), (HEAVY, "hca")):
            stated[kinds.index(kind)] = keys.raw(f"compress_rate_{key}") or stated[kinds.index(kind)]
        if not all(type(one) is int and 0 <= one <= MAX_CONTEXT for one in stated):
            raise keys.fail("compress_rates", "must be numbers of tokens")
        found = _kinds(config)
        ratios = [stated[kinds.index(kind)] for kind in found]
        plain, scaled, context = _ropes(config)
        experts = config.mixture(
            "n_routed_experts", "moe_intermediate_size", "silu_clamped", router="sqrt_softplus",
            scale=keys.number("routed_scaling_factor", 1e-6, 1e6), shared=1,
        )  # fmt: skip
        limit = keys.number("swiglu_limit", 1e-3, 1e6)
        attention = _attention(
            config, plain, keys.integer("q_lora_rank", 1, MAX_HIDDEN), keys.integer("o_groups", 1, MAX_HEADS),
            keys.integer("o_lora_rank", 1, MAX_HIDDEN), keys.integer("sliding_window", 1, MAX_CONTEXT),
        )  # fmt: skip
        names = "index_n_heads", "index_head_dim", "index_topk"
        mixers = [
            _mixer(config, attention, ratio, kind == SPARSE, scaled, names)
            for ratio, kind in zip(ratios, found, strict=True)
        ]
        hyper = MixedConnections(
            keys.integer("hc_mult", 2, MOST_STREAMS), keys.integer("hc_sinkhorn_iters", 1, MOST_ROUNDS),
            keys.number("hc_eps", 0.0, 0.1), weighted=True,
        )  # fmt: skip
        count = keys.integer("num_hash_layers", 0, MAX_LAYERS, HASHED)
        listed = config.layer_types(
            ("hash_moe", "moe"), lambda layer: "moe" if layer >= count else "hash_moe", key="mlp_layer_types"
        )
        hashed = [config.vocab_size * (kind == "hash_moe") for kind in listed]
        layers = _layers(mixers, experts, hashed, [limit] * len(mixers), hyper)
        return _with_head(config.facts(layers, context, predictor=_head(attention, layers[-1], hyper)), config)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        keys = config.keys
        if not any(".nextn." in name for name in config.checkpoint.tensors):  # some files state an MTP head without it
            config.num_layers, config.extra_layers = config.num_layers + config.extra_layers, 0
        if any(name.startswith((f"{keys.prefix}engram.", f"{keys.prefix}attention.kv_source")) for name in keys.values):
            raise config.unsupported("DeepSeek V4.1")
        if keys.integer("expert_gating_func", 0, 1 << 16, SQRT_SOFTPLUS) != SQRT_SOFTPLUS:
            raise config.unsupported(f"{config.source} with another router than the root of softplus")
        scaled, context = config.rope()
        scaled = replace(scaled, interleaved=True, attention_factor=1.0)  # no factor on cosines and sines
        plain = RopeFacts(scaled.theta, scaled.dim, interleaved=True)
        scaled = replace(scaled, theta=keys.number("attention.compress_rope_freq_base", 1.0, 1e15, ENTRY_THETA))
        listed = keys.raw("attention.compress_ratios")
        stated = isinstance(listed, np.ndarray) and listed.dtype.kind in "iu"
        ratios = [int(one) for one in listed][: config.num_layers] if stated else []
        if len(ratios) < config.num_layers or not all(0 <= one <= MAX_CONTEXT for one in ratios):
            raise keys.fail("attention.compress_ratios", f"must hold a number of tokens for {config.num_layers} layers")
        with_index = [config.stores_module(f"{_INDEXER}.q_b_proj", layer) for layer in range(config.num_layers)]
        names = tuple(f"attention.indexer.{name}" for name in ("head_count", "key_length", "top_k"))
        attention = _attention(
            config, plain, keys.integer("attention.q_lora_rank", 1, MAX_HIDDEN),
            keys.integer("attention.output_group_count", 1, MAX_HEADS),
            keys.integer("attention.output_lora_rank", 1, MAX_HIDDEN),
            keys.integer("attention.sliding_window", 1, MAX_CONTEXT),
        )  # fmt: skip
        mixers = [_mixer(config, attention, *one, scaled, names) for one in zip(ratios, with_index, strict=True)]
        shared = keys.integer("expert_shared_count", 1, MAX_EXPERTS, 1)
        experts = config.mixture(act="silu_clamped", router="sqrt_softplus", shared=shared)
        hyper = MixedConnections(
            keys.integer("hyper_connection.count", 2, MOST_STREAMS),
            keys.integer("hyper_connection.sinkhorn_iterations", 1, MOST_ROUNDS),
            keys.number("hyper_connection.epsilon", 0.0, 0.1), weighted=True,
        )  # fmt: skip
        first = keys.integer("hash_layer_count", 0, MAX_LAYERS, 0)
        hashed = [config.vocab_size * (layer < first) for layer in range(config.num_layers)]
        limits = limits_of(config, "swiglu_clamp_exp")[: config.num_layers]
        return config.facts(_layers(mixers, experts, hashed, limits, hyper), context)

    def names(self, checkpoint: Checkpoint) -> NameMap:
        tensors = checkpoint.tensors
        if checkpoint.kind == "gguf":
            found = gguf_names(_GGUF)
            return replace(found, top={**found.top, **{f"model.hc_head_{part}": f"output_hc_{part}" for part in _HEAD}})
        saved = any(name.startswith("model.layers.") for name in tensors)  # by transformers, not as on the hub
        start, inner = ("model.", PUBLISHED | {"self_attn.kv_norm": "attn.norm"}) if saved else ("", PUBLISHED)
        mixer = "hc_head.hc" if saved else "hc_head"
        top = {"model.embed_tokens": f"{start}embed_tokens" if saved else "embed", "model.norm": f"{start}norm"}
        top |= {"lm_head": "head"} | {f"model.hc_head_{part}": f"{start}{mixer}_{part}" for part in _HEAD}
        parts = (f"{start}layers.", *(f"{name}." for name in top.values()))  # not the MTP head
        count = checkpoint.config.get("num_hidden_layers")
        heads = {count: f"{MTP}0."} if type(count) is int else {}
        return NameMap(top, f"{start}layers.{{}}.", inner | {"shared_head.norm": "norm"}, heads=heads, text=parts)


def _head(attention: CompressedAttention, last: LayerFacts, hyper: MixedConnections) -> LayerFacts:
    """The MTP head's layer: attention over the last tokens, and experts that a router chooses."""
    assert isinstance(last.ffn, Experts)
    ffn = replace(last.ffn, hashed=0, choice_bias=True)
    return LayerFacts(attention, ffn, hyper=hyper, fusion=Fusion(hyper))


def _with_head(facts: ModelFacts, config: HfConfig) -> ModelFacts:
    """The facts without an MTP head whose attention is not that of the first layers, whose pages it shares."""
    ratios, head = config.keys.raw("compress_ratios"), facts.predictor
    same = head is None or any(layer.mixer == head.mixer for layer in facts.layers)
    stated = isinstance(ratios, list) and len(ratios) > facts.num_layers and ratios[facts.num_layers]
    if same and not stated:
        return facts
    flaw = "the MTP head has compressed entries, or attention that no layer has, which is not supported"
    return replace(facts, predictor=None, predictor_flaw=flaw)


def _kinds(config: HfConfig) -> list[str]:
    """The kind of each layer; files of the hub list the tokens of an entry instead."""
    keys, count = config.keys, config.num_layers
    ratios = keys.raw("compress_ratios")
    if keys.raw("layer_types") is None and ratios is not None:
        kinds = {ratio: kind for kind, ratio in RATES.items()}
        if (
            not isinstance(ratios, list)
            or len(ratios) < count
            or not all(type(one) is int and one in kinds for one in ratios[:count])
        ):
            raise keys.fail("compress_ratios", f"must list 0, 4 or 128 for each of {count} layers")
        return [kinds[one] for one in ratios[:count]]
    return config.layer_types(tuple(RATES), lambda layer: SPARSE if layer > 1 and layer % 2 else HEAVY)


def _ropes(config: HfConfig) -> tuple[RopeFacts, RopeFacts, int]:
    """The rotations of layers without entries and with them, and the context length."""
    keys = config.keys
    stated = object_of(config.given, "rope_scaling") | object_of(config.given, "rope_parameters")
    nested = [object_of(Fields(keys.path, stated), name) for name in ("main", "compress")]
    if keys.raw("partial_rotary_factor") is not None:
        share = keys.number("partial_rotary_factor", 1e-3, 1.0)
    else:
        share = keys.integer("qk_rope_head_dim", 2, MAX_HEAD_DIM, TURNED) / config.head_dim
    common = {"partial_rotary_factor": share}
    nested = nested if all(nested) else [{}, {}]
    flat = {} if all(nested) else {key: value for key, value in stated.items() if key not in ("main", "compress")}
    plain = {"rope_theta": keys.number("rope_theta", 1.0, 1e15)} | common | nested[0]
    scaled = flat | {"rope_theta": keys.number("compress_rope_theta", 1.0, 1e15)} | common | nested[1]
    if scaled.get("rope_type", scaled.get("type")) == "yarn":
        scaled = {"attention_factor": 1.0} | scaled
    (first, _), (second, context) = config.rope_from(plain), config.rope_from(scaled)
    return replace(first, interleaved=True), replace(second, interleaved=True), context


def _attention(
    config: Config, rope: RopeFacts, query_rank: int, groups: int, out_rank: int, window: int
) -> CompressedAttention:
    """Attention over the last tokens alone."""
    heads, dim = config.num_heads, config.head_dim
    if heads % groups:
        raise bad(config.keys.path, f"{heads} heads cannot be split evenly into {groups} groups", key="groups")
    if rope.dim > dim or rope.dim % 2:
        raise bad(config.keys.path, f"{rope.dim} rotated elements do not fit in a head of {dim}", key="rope")
    if not config.causal or config.num_kv_heads != 1:
        raise config.unsupported(f"{config.source} with {config.num_kv_heads} KV heads or bidirectional attention")
    return CompressedAttention(heads, dim, window, rope, dim**-0.5, query_rank, groups, out_rank)


def _mixer(
    config: Config,
    plain: CompressedAttention,
    ratio: int,
    indexed: bool,
    rope: RopeFacts,
    names: tuple[str, ...],
) -> CompressedAttention:
    """The mixer of a layer with `ratio` tokens to an entry; with an index its entries overlap.

    names   keys of index heads, their size, and the entries that a query sees
    """
    keys = config.keys
    if ratio == 0:
        return plain
    if PAGE % min(ratio, PAGE) or ratio % min(ratio, PAGE):
        raise bad(keys.path, f"entries of {ratio} tokens do not fit in pages of {PAGE}", key="compress ratios")
    if plain.window < ratio * (1 + indexed):
        what = f"is {plain.window}, fewer than the tokens of an entry, {ratio * (1 + indexed)}"
        raise bad(keys.path, what, key="sliding_window")
    index = None
    if indexed:
        heads, dim, top = names
        index = EntryIndex(
            keys.integer(heads, 1, MAX_HEADS), keys.integer(dim, 2, MAX_HEAD_DIM), keys.integer(top, 1, MAX_CONTEXT)
        )
        if rope.dim > index.dim:
            what = f"attention rotates {rope.dim} elements, and an index key has {index.dim}"
            raise bad(keys.path, what, key=f"{keys.prefix}{dim}")
    return replace(plain, ratio=ratio, rope=rope, overlaps=indexed, entry_index=index)


def _layers(
    mixers: Sequence[CompressedAttention],
    experts: Experts,
    hashed: Sequence[int],
    limits: Sequence[float | None],
    hyper: MixedConnections,
) -> list[LayerFacts]:
    """`hashed`: rows of the table that chooses a layer's experts, 0 where there is none."""

    def ffn(rows: int, limit: float | None) -> Experts:
        return replace(experts, hashed=rows, choice_bias=not rows, limit=limit, shared_limit=limit)

    each = zip(mixers, hashed, limits, strict=True)
    return [LayerFacts(mixer, ffn(rows, limit), hyper=hyper) for mixer, rows, limit in each]

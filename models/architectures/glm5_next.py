"""GLM-5.3 Flash (321B-A18B): three layers of Kimi Delta Attention to each of sparse latent attention, several residual
streams (mHC), and experts as in DeepSeek V3, whose activations are clamped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_CONTEXT, MAX_HEAD_DIM, MAX_HEADS, MAX_HIDDEN, MAX_LAYERS

from .config import Config
from .deepseek import LATENT
from .facts import ModelFacts
from .gguf import GgufConfig
from .glm4_moe import SHARED
from .hf import HfConfig
from .kimi_linear import GGUF_KIMI, KimiLinear, delta_names, limits_of
from .layers import Dense, Experts, Fusion, LayerFacts, MixedConnections
from .mixers import KimiDelta, LatentAttention, PooledIndex, RopeFacts
from .names import NameMap, gguf_names, hf_names
from .qwen4_exp import MOST_STREAMS, indexed

MOST_ROUNDS = 1000
KINDS = {
    "linear_attention": "linear_attention",
    **dict.fromkeys(("full_attention", "indexed_attention", "deepseek_sparse_attention"), "full_attention"),
}
DENSE = 3  # layers without experts at the start
MAINLINE = "glm5-next"  # as llama.cpp names it; the other name is that of an earlier port with the same tensors
INDEXER = "self_attn.indexer"
_POOL = {f"{INDEXER}.index_kpool_compress_{part}": part for part in ("ape", "gate")}
_GGUF = GGUF_KIMI | {f"{INDEXER}.wq_b": "indexer.attn_q_b", f"{INDEXER}.wk": "indexer.attn_k"}
_GGUF |= {f"{INDEXER}.weights_proj": "indexer.proj", f"{INDEXER}.k_norm": "indexer.k_norm"}


class Glm5Next(KimiLinear):
    """Nothing is rotated. The layer after the last one is an MTP head, with one residual stream."""

    name = "glm5_next"
    label = "GLM-5.3 Flash (text)"
    hf_types: ClassVar[dict[str, Mapping[str, Any]]] = {
        "glm5_next_text": LATENT
        | {"vocab_size": 154_880, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 45}
        | {"num_attention_heads": 64, "max_position_embeddings": 1_048_576, "rms_norm_eps": 1e-5}
        | {"qk_nope_head_dim": 256, "v_head_dim": 256, "n_routed_experts": 288, "num_experts_per_tok": 8}
        | {"moe_intermediate_size": 2048, "routed_scaling_factor": 2.5, "swiglu_limit": 10.0}
        | {"linear_head_dim": 128, "linear_num_heads": 64, "linear_conv_kernel_dim": 4, "linear_lower_bound": -5.0}
        | {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32, "index_kpool": 16}
        | {"hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20}
    }
    hf_renamed: ClassVar[dict[str, str]] = {}
    hf_wrappers: ClassVar[dict[str, str]] = {"glm5_next": "glm5_next_text"}
    hf_classes: ClassVar[tuple[str, ...]] = ("Glm5NextForConditionalGeneration", "Glm5NextForCausalLM")
    gguf_types = (MAINLINE, "glm5next")

    def hf_values(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """Take the values of the delta layers out of `linear_attn_config`."""
        names = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
        names |= {"short_conv_kernel_size": "linear_conv_kernel_dim", "gate_lower_bound": "linear_lower_bound"}
        linear, types = text.get("linear_attn_config"), text.get("layer_types")
        stated = linear if isinstance(linear, dict) else {}
        found = dict(text) | {new: stated[key] for key, new in names.items() if key in stated}
        if stated.get("safe_gate", isinstance(linear, dict)) and found.get("linear_lower_bound", 0.0) is None:
            del found["linear_lower_bound"]
        if "num_local_experts" in found:
            found.setdefault("n_routed_experts", found["num_local_experts"])
        if isinstance(types, list):
            found["layer_types"] = [KINDS.get(str(one), one) for one in types]
        turned = found.pop("qk_rope_head_dim", 0)
        return found | {"head_dim": 2, "qk_rope_head_dim": turned}  # the size of a head is stated in other keys

    def from_hf(self, config: HfConfig) -> ModelFacts:
        keys, context = config.keys, config.context
        for key in ("index_kpool_always_select_tail", "index_kpool_compress", "mhc", "mla_use_nope"):
            if not keys.flag(key, True):
                raise config.unsupported(f"{config.source} without {key}")
        if keys.integer("qk_rope_head_dim", 0, MAX_HEAD_DIM, 0):
            raise config.unsupported(f"{config.source} with RoPE (qk_rope_head_dim)")
        kinds = config.layer_types(
            tuple(KINDS), lambda layer: "linear_attention" if layer % 4 != 3 else "full_attention"
        )
        if any(not own and kind == "full_attention" for own, kind in zip(_indexers(config), kinds, strict=True)):
            raise config.unsupported(f"{config.source} with layers that share an index (indexer_types)")
        act = config.activation()
        if act != "silu":  # transformers has another one in dense layers, but silu in routed experts
            raise config.unsupported(f"{config.source} with hidden_act {act}")
        still = keys.integer("qk_nope_head_dim", 1, MAX_HEAD_DIM)
        attention = self.latent(
            config, keys.integer("kv_lora_rank", 2, MAX_HIDDEN), still, keys.integer("v_head_dim", 1, MAX_HEAD_DIM),
            keys.integer("q_lora_rank", 1, MAX_HIDDEN),
            ("index_n_heads", "index_head_dim", "index_topk", "index_kpool"),
        )  # fmt: skip
        delta = self.delta(config)
        mixers = [attention if kind == "full_attention" else delta for kind in kinds]
        limits = [keys.number("swiglu_limit", 1e-3, 1e6)]
        experts = self.experts(config, act)
        hyper = MixedConnections(
            keys.integer("hc_mult", 2, MOST_STREAMS),
            keys.integer("hc_sinkhorn_iters", 1, MOST_ROUNDS),
            keys.number("hc_eps", 0.0, 0.1),
        )
        limits = limits * (config.num_layers + 1)
        layers, predictor = _layers(config, mixers, self.dense_layers(config), experts, (limits, limits), hyper)
        return config.facts(layers, context, predictor=predictor)

    def latent(
        self, config: Config, rank: int, still: int, value: int, query_rank: int, index: tuple[str, str, str, str]
    ) -> LatentAttention:
        """The sparse latent attention; `index` are the keys of index heads, their size, tokens seen, and tokens pooled.

        Raises like `from_hf`.
        """
        heads, dim, budget, ratio = index
        found = indexed(config.keys, (heads, dim, budget), config.keys.integer(ratio, 1, MAX_CONTEXT), ratio)
        pooled = PooledIndex(found.num_heads, found.dim, found.ratio, found.top, query_rank=query_rank)
        eps = config.keys.number(config.KEYS["eps"], 1e-12, 0.1, 1e-5)
        return self.attention(
            config, RopeFacts(10_000.0, 0, "off"), rank,
            still_dim=still, value_dim=value, query_rank=query_rank, scale=still**-0.5, eps=eps, index=pooled,
        )  # fmt: skip

    def delta(self, config: HfConfig) -> KimiDelta:
        keys = config.keys
        floor = None if config.is_null("linear_lower_bound") else keys.number("linear_lower_bound", -100.0, -1e-3)
        return replace(super().delta(config), floor=floor)

    def dense_layers(self, config: HfConfig) -> list[bool]:
        if config.keys.raw("mlp_layer_types") is not None:
            return super().dense_layers(config)
        first = config.keys.integer("first_k_dense_replace", 0, MAX_LAYERS, DENSE)
        return [layer < first for layer in range(config.num_layers)]

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        keys = config.keys
        context = keys.integer("context_length", 1, MAX_CONTEXT)
        if keys.integer("rope.dimension_count", 0, MAX_HEAD_DIM, 0):
            raise config.unsupported(f"{config.source} with RoPE")
        kept = config.each(config.KEYS["kv_heads"], 0, MAX_HEADS, 1)
        indexers = config.flags("attention.indexer.types") or (True,) * config.num_layers
        if any(heads and not own for heads, own in zip(kept, indexers, strict=True)):
            raise config.unsupported(f"{config.source} with layers that share an index (attention.indexer.types)")
        if not keys.flag("attention.indexer.kpool_select_tail", True):
            raise config.unsupported(f"{config.source} without attention.indexer.kpool_select_tail")
        still = keys.integer("attention.key_length_mla", 1, MAX_HEAD_DIM)
        if keys.raw("attention.indexer.kpool") is None:  # early files omit it
            keys.values = {**keys.values, f"{keys.prefix}attention.indexer.kpool": 4}
        names = tuple(f"attention.indexer.{name}" for name in ("head_count", "key_length", "top_k", "kpool"))
        heads, dim, budget, ratio = names
        attention = self.latent(
            config, keys.integer("attention.kv_lora_rank", 2, MAX_HIDDEN), still,
            keys.integer("attention.value_length_mla", 1, MAX_HEAD_DIM),
            keys.integer("attention.q_lora_rank", 1, MAX_HIDDEN), (heads, dim, budget, ratio),
        )  # fmt: skip
        attention = replace(attention, by_head=self.stores_by_head(config))
        first = keys.integer("leading_dense_block_count", 0, MAX_LAYERS, 0)
        hyper = MixedConnections(
            keys.integer("hyper_connection.count", 2, MOST_STREAMS),
            keys.integer("hyper_connection.sinkhorn_iterations", 1, MOST_ROUNDS),
            keys.number("hyper_connection.epsilon", 0.0, 0.1),
        )
        dense = [layer < first for layer in range(config.num_layers)]
        of_shared = "swiglu_clamp_exp" if keys.raw("swiglu_clamp_shexp") is None else "swiglu_clamp_shexp"
        limits = limits_of(config, "swiglu_clamp_exp"), limits_of(config, of_shared)
        mixers, experts = self.gguf_mixers(config, attention), self.gguf_experts(config, first)
        layers, predictor = _layers(config, mixers, dense, experts, limits, hyper)
        return config.facts(layers, context, predictor=predictor)

    def gguf_delta(self, config: GgufConfig) -> KimiDelta:
        found, keys = super().gguf_delta(config), config.keys
        if keys.raw("kda.gate_lower_bound") is None and config.source == MAINLINE:  # no bound
            return replace(found, floor=None)
        return replace(found, floor=keys.number("kda.gate_lower_bound", -100.0, -1e-3, -5.0))

    def names(self, checkpoint: Checkpoint) -> NameMap:
        tensors = checkpoint.tensors
        if checkpoint.kind == "gguf":
            old = any(".indexer.kpool_ape." in name for name in tensors)
            pool = {
                ours: f"indexer.kpool_{part}" if old else f"indexer_compressor_{part}" for ours, part in _POOL.items()
            }
            return gguf_names(_GGUF | pool)
        trained = {f"linear_attn.{name}": f"self_attn.forget_gate.{name}" for name in ("f_a_proj", "f_b_proj")}
        return replace(hf_names(tensors, delta_names("self_attn", "o_proj") | SHARED), trained=trained)


def _indexers(config: HfConfig) -> list[bool]:
    """Whether each layer, if it has sparse attention, has its own index; as transformers derives it."""
    keys, count = config.keys, config.num_layers
    key = "indexer_types" if keys.raw("indexer_types") is not None else "index_topk_pattern"
    kinds = keys.raw(key)
    if kinds is None:
        every = keys.integer("index_topk_freq", 0, MAX_LAYERS, 1) or 1
        first = keys.integer("index_skip_topk_offset", 0, MAX_LAYERS, 2)
        return [max(layer - first + 1, 0) % every == 0 for layer in range(count)]
    kinds = [{"F": "full", "S": "shared"}.get(one, one) for one in kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or len(kinds) != count or any(one not in ("full", "shared") for one in kinds):
        raise keys.fail(key, f"must name each of {count} layers full or shared")
    return [one == "full" for one in kinds]


def _layers(
    config: Config,
    mixers: Sequence[LatentAttention | KimiDelta],
    dense: Sequence[bool],
    experts: Experts,
    limits: tuple[Sequence[float | None], Sequence[float | None]],
    hyper: MixedConnections,
) -> tuple[list[LayerFacts], LayerFacts]:
    """The layers and the MTP head; `limits`, one more than layers, are those of routed and of shared experts, of which
    the former apply to dense layers.
    """

    def ffn(is_dense: bool, limit: float | None, of_shared: float | None) -> Dense | Experts:
        act = "silu" if limit is None and of_shared is None else "silu_clamped"
        if is_dense:
            return replace(config.dense(act), limit=limit)
        return replace(experts, act=act, limit=limit, shared_limit=of_shared)

    each = zip(mixers, dense, *(one[: config.num_layers] for one in limits), strict=True)
    layers = [LayerFacts(mixer, ffn(*rest), hyper=hyper) for mixer, *rest in each]
    attention = next((mixer for mixer in mixers if isinstance(mixer, LatentAttention)), None)
    return layers, LayerFacts(attention, ffn(False, *(one[-1] for one in limits)), fusion=Fusion())

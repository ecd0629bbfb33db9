"""Hunyuan (0.5B to 7B, A13B): Llama with query and key norms after RoPE, and an NTK-scaled RoPE base. Hy3: norms before
RoPE, a sigmoid router with a choice bias, a shared expert, and an MTP head after the last layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_EXPERTS, MAX_HIDDEN, MAX_LAYERS

from .architecture import Architecture
from .config import Config
from .facts import ModelFacts
from .gguf import GgufConfig
from .glm4_moe import SHARED
from .hf import HfConfig
from .layers import Dense, Experts, Fusion, LayerFacts
from .mixers import RopeFacts
from .names import CHOICE_BIAS

KINDS = "sparse", "dense"
# defaults for keys that configurations may omit
DEFAULTS = {
    "vocab_size": 290_943, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
}  # fmt: skip
NAMES = {"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"}
OF_EXPERTS = {"mlp.gate": "mlp.gate.wg"} | {
    f"mlp.shared_expert.{kind}_proj": f"mlp.shared_mlp.{kind}_proj" for kind in ("gate", "up", "down")
}


class HunYuanDense(Architecture):
    """GGUF files do not permute rows, and store the scaled RoPE base."""

    name = "hunyuan_v1_dense"
    label = "Hunyuan"
    hf_types: ClassVar[Mapping[str, Mapping[str, Any]]] = {"hunyuan_v1_dense": DEFAULTS}
    hf_classes: ClassVar[tuple[str, ...]] = ("HunYuanDenseV1ForCausalLM",)
    gguf_types: ClassVar[tuple[str, ...]] = ("hunyuan-dense",)
    hf_inner = NAMES

    def from_hf(self, config: HfConfig) -> ModelFacts:
        if config.keys.flag("use_cla"):
            raise config.unsupported(f"{config.source} with use_cla (layers that share a KV cache)")
        rope, context = config.rope()
        return self.facts(config, _ntk_scaled(config, rope), context)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        return self.facts(config, *config.rope())

    def facts(self, config: HfConfig | GgufConfig, rope: RopeFacts, context: int) -> ModelFacts:
        """The whole model; all layers are identical."""
        layer = LayerFacts(config.attention(rope, qk_norm=True, late_norms=True), self.ffn(config))
        return config.facts((layer,) * config.num_layers, context)

    def ffn(self, config: HfConfig | GgufConfig) -> Dense | Experts:
        """The feed-forward layer."""
        return config.dense(config.activation())


class HunYuanMoe(HunYuanDense):
    """Experts in all layers, and a shared expert."""

    name = "hunyuan_v1_moe"
    label = "Hunyuan A13B"
    hf_types = {"hunyuan_v1_moe": DEFAULTS | {"num_experts": 1, "moe_topk": 1, "num_shared_expert": 1}}
    hf_classes = ("HunYuanMoEV1ForCausalLM",)
    gguf_types = ("hunyuan-moe",)
    hf_inner = NAMES | OF_EXPERTS

    def ffn(self, config: HfConfig | GgufConfig) -> Dense | Experts:
        inner = config.size("inner", 1, MAX_HIDDEN * 4)
        if isinstance(config, GgufConfig):
            shared = config.keys.integer("expert_shared_feed_forward_length", 1, MAX_HIDDEN * 4, inner)
            return replace(config.mixture(), shared_inner=shared)
        stated = "moe_intermediate_size"
        keys = {
            "count": "num_experts",
            "top_k": "moe_topk",
            "inner": stated if config.keys.raw(stated) else config.KEYS["inner"],
        }
        shared = inner * config.keys.integer("num_shared_expert", 0, MAX_EXPERTS)
        return replace(config.experts(keys, config.activation()), shared_inner=shared)

    def hf_values(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """Replace lists with the same number for every layer by that number."""
        values = super().hf_values(text)
        lists = ((key, values.get(key)) for key in ("moe_topk", "moe_intermediate_size", "num_shared_expert"))
        alike = {
            key: each[0] for key, each in lists if isinstance(each, list) and each and each == each[:1] * len(each)
        }
        return values | alike


class HyV3(Architecture):
    """The first layers are dense."""

    name = "hy_v3"
    label = "Hy3, Hy-MT2"
    hf_types: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "hy_v3": {
            "vocab_size": 120_832, "hidden_size": 4096, "intermediate_size": 13_312, "num_hidden_layers": 80,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5, "rope_theta": 11_158_840.0, "num_local_experts": 192, "num_experts_per_tok": 8,
            "num_shared_experts": 1, "moe_intermediate_size": 1536, "router_scaling_factor": 2.826,
        }
    }  # fmt: skip
    hf_classes: ClassVar[tuple[str, ...]] = ("HYV3ForCausalLM",)
    gguf_types: ClassVar[tuple[str, ...]] = ("hy_v3",)

    def from_hf(self, config: HfConfig) -> ModelFacts:
        keys, act = config.keys, config.activation()
        experts = config.mixture(
            "num_experts", "moe_intermediate_size", act,
            router="sigmoid",
            choice_bias=True,
            renormalise=keys.flag("route_norm", True),
            scale=keys.number("router_scaling_factor", 1e-6, 1e6),
            shared=keys.integer("num_shared_experts", 1, MAX_EXPERTS),
        )  # fmt: skip
        first = keys.integer("first_k_dense_replace", 0, MAX_LAYERS, 1)
        kinds = config.layer_types(KINDS, lambda layer: KINDS[layer < first], key="mlp_layer_types")
        return _hy_v3(config, *config.rope(), experts, [kind == "dense" for kind in kinds], act)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        experts = config.mixture(router="sigmoid", choice_bias=True)
        shared = config.keys.integer("expert_shared_feed_forward_length", 0, MAX_HIDDEN * 4, experts.inner)
        routers = [f"{config.names.source(f'model.layers.{i}.mlp.gate')}.weight" for i in range(config.num_layers)]
        dense = [name not in config.checkpoint.tensors for name in routers]
        return _hy_v3(config, *config.rope(), replace(experts, shared_inner=shared), dense, "silu")

    def inner_names(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        tensors = checkpoint.tensors
        if checkpoint.kind == "gguf":
            old = any(name.endswith(".exp_probs_b.bias") for name in tensors)  # from before llama.cpp read such files
            return {} if old else {CHOICE_BIAS: "exp_probs_b"}
        own = {"shared_head.norm": "final_layernorm"}
        if any(name.endswith(".mlp.router.gate.weight") for name in tensors):
            shared = {name: name.replace("shared_expert", "shared_mlp") for name in SHARED}
            return own | shared | {"mlp.gate": "mlp.router.gate", CHOICE_BIAS: "mlp.expert_bias"}
        return own | SHARED | {CHOICE_BIAS: "mlp.e_score_correction_bias"}


def _hy_v3(
    config: Config, rope: RopeFacts, context: int, experts: Experts, dense: Sequence[bool], act: str
) -> ModelFacts:
    """`dense`: whether each layer has no experts."""
    attention = config.attention(rope, qk_norm=True)
    sparse = LayerFacts(attention, experts)
    plain = LayerFacts(attention, config.dense(act)) if any(dense) else sparse
    layers = tuple(plain if is_dense else sparse for is_dense in dense)
    return config.facts(layers, context, predictor=replace(sparse, fusion=Fusion()))


def _ntk_scaled(config: HfConfig, rope: RopeFacts) -> RopeFacts:
    """NTK-aware scaling with a fixed alpha, which files call "dynamic": it only changes the base."""
    values = config.rope_values
    alpha = values.get("alpha") if values.get("rope_type", values.get("type")) == "dynamic" else None
    if alpha is None or rope.dim == 2:
        return rope
    if type(alpha) not in (int, float) or not 1 <= alpha <= 1e9:
        raise config.keys.fail("rope_scaling.alpha", f"is {alpha!r:.60}, expected a number from 1 to 1e9")
    return replace(rope, theta=rope.theta * alpha ** (rope.dim / (rope.dim - 2)))

"""Hunyuan (0.5B to 7B, A13B): Llama with query and key norms after RoPE, and an NTK-scaled RoPE base."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_EXPERTS, MAX_HIDDEN

from .architecture import Architecture
from .facts import ModelFacts
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import Dense, Experts, LayerFacts
from .mixers import RopeFacts
from .names import NameMap, hf_names

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
    stored_names: ClassVar[Mapping[str, str]] = NAMES

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

    def names(self, checkpoint: Checkpoint) -> NameMap:
        if checkpoint.kind == "gguf":
            return super().names(checkpoint)
        return hf_names(checkpoint.tensors, self.stored_names)


class HunYuanMoe(HunYuanDense):
    """Experts in all layers, and a shared expert."""

    name = "hunyuan_v1_moe"
    label = "Hunyuan A13B"
    hf_types = {"hunyuan_v1_moe": DEFAULTS | {"num_experts": 1, "moe_topk": 1, "num_shared_expert": 1}}
    hf_classes = ("HunYuanMoEV1ForCausalLM",)
    gguf_types = ("hunyuan-moe",)
    stored_names = NAMES | OF_EXPERTS

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


def _ntk_scaled(config: HfConfig, rope: RopeFacts) -> RopeFacts:
    """NTK-aware scaling with a fixed alpha, which files call "dynamic": it only changes the base."""
    values = config.rope_values
    alpha = values.get("alpha") if values.get("rope_type", values.get("type")) == "dynamic" else None
    if alpha is None or rope.dim == 2:
        return rope
    if type(alpha) not in (int, float) or not 1 <= alpha <= 1e9:
        raise config.keys.fail("rope_scaling.alpha", f"is {alpha!r:.60}, expected a number from 1 to 1e9")
    return replace(rope, theta=rope.theta * alpha ** (rope.dim / (rope.dim - 2)))

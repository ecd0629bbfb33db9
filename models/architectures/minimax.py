"""MiniMax-M2: Qwen3's attention with norms over all heads, RoPE on half of each head, and Mixtral's experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localllm.checkpoint import Checkpoint

from .architecture import Architecture
from .config import Config
from .facts import ModelFacts
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import Experts, LayerFacts
from .mixers import RopeFacts
from .mixtral import BLOCK
from .names import CHOICE_BIAS

# defaults for keys that configurations may omit
DEFAULTS = {
    "vocab_size": 200_064, "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
    "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196_608,
    "rope_theta": 5_000_000.0, "num_local_experts": 256, "num_experts_per_tok": 8,
}  # fmt: skip


class MiniMaxM2(Architecture):
    """A sigmoid router with a choice bias; no shared expert."""

    name = "minimax_m2"
    label = "MiniMax-M2"
    hf_types = {"minimax_m2": DEFAULTS}
    hf_classes = ("MiniMaxM2ForCausalLM",)
    gguf_types = ("minimax-m2",)

    def from_hf(self, config: HfConfig) -> ModelFacts:
        experts = config.mixture(
            "num_local_experts", "intermediate_size", config.activation(), router="sigmoid", choice_bias=True
        )
        return _facts(config, *config.rope(), experts)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        return _facts(config, *config.rope(), config.mixture(router="sigmoid", choice_bias=True))

    def hf_values(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """Add the rotated share of a head, which published files state as a number of elements."""
        values = super().hf_values(text)
        turned, dim = values.get("rotary_dim"), values.get("head_dim") or DEFAULTS["head_dim"]
        if type(turned) is int and type(dim) is int and dim > 0:
            values.setdefault("partial_rotary_factor", turned / dim)
        return values

    def inner_names(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        if checkpoint.kind == "gguf":
            return {}
        published = any(".block_sparse_moe." in name for name in checkpoint.tensors)
        inner, owner = (BLOCK, "block_sparse_moe") if published else ({}, "mlp")
        return inner | {CHOICE_BIAS: f"{owner}.e_score_correction_bias"}


def _facts(config: Config, rope: RopeFacts, context: int, experts: Experts) -> ModelFacts:
    layer = LayerFacts(config.attention(rope, qk_norm=True, whole_norms=True), experts)
    return config.facts((layer,) * config.num_layers, context)

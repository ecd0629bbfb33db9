"""K2-Horizon (dense: 0.9B to 32B): Llama whose norms are RMSNorms over groups of values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from localllm.checkpoint.fields import MAX_HIDDEN
from localllm.checkpoint.mapped_file import bad

from .architecture import Architecture
from .config import Config
from .facts import ModelFacts
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import LayerFacts, Norms
from .mixers import RopeFacts

MIXTURE = "a mixture of experts, or of values (MoVA)"
# what a configuration may leave out, as in its class; the values of the 7B
DEFAULTS = {
    "vocab_size": 250_624, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524_288,
    "rms_norm_eps": 1e-6, "rope_theta": 10_000_000.0, "layernorm_num_groups": 1,
}  # fmt: skip


class K2Horizon(Architecture):
    """The mixtures of the family route values, too, and gate attention; they are refused."""

    name = "k2_horizon"
    label = "K2-Horizon"
    hf_types: ClassVar[dict[str, Mapping[str, Any]]] = {"k2_horizon": DEFAULTS}
    hf_classes: ClassVar[tuple[str, ...]] = ("K2HorizonForCausalLM",)
    gguf_types = ("k2-horizon",)

    def from_hf(self, config: HfConfig) -> ModelFacts:
        keys = config.keys
        if keys.raw("num_experts") or keys.raw("mova_num_experts"):
            raise config.unsupported(f"{config.source} with {MIXTURE}")
        for key in ("query_key_norm", "attention_gate_func", "use_sliding_window"):
            if keys.raw(key):
                raise config.unsupported(f"{config.source} with {key}")
        if keys.integer("rope_head_dim", 1, MAX_HIDDEN, config.head_dim) != config.head_dim:
            raise config.unsupported(f"{config.source} with RoPE on a part of each head")
        groups = keys.integer("layernorm_num_groups", 1, MAX_HIDDEN)
        return _facts(config, config.rope(), config.activation(), groups, "layernorm_num_groups")

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        if config.num_experts or any("attn_v_exps" in name for name in config.checkpoint.tensors):
            raise config.unsupported(f"{config.source} with {MIXTURE}")
        key = "attention.group_norm_groups"
        groups = max(1, config.keys.integer(key, 0, MAX_HIDDEN, 1))
        return _facts(config, config.rope(), "silu", groups, key)


def _facts(config: Config, rope: tuple[RopeFacts, int], act: str, groups: int, key: str) -> ModelFacts:
    if config.hidden_size % groups:
        what = f"{config.hidden_size:,} hidden units cannot be split into {groups} groups"
        raise bad(config.keys.path, what, key=key)
    layer = LayerFacts(config.attention(rope[0]), config.dense(act), Norms(groups=groups))
    return config.facts((layer,) * config.num_layers, rope[1])

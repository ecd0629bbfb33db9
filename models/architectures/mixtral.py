"""Mixtral: Llama's layers with two of eight experts per token. In GGUF its architecture name is llama."""

from __future__ import annotations

from collections.abc import Mapping

from localllm.checkpoint import Checkpoint

from .architecture import Architecture
from .facts import ModelFacts, repeated
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import LayerFacts
from .llama import Llama

# names in published checkpoints; transformers 5 uses our names
BLOCK = {"mlp.gate": "block_sparse_moe.gate"} | {
    f"mlp.experts.{{}}.{ours}_proj": f"block_sparse_moe.experts.{{}}.{theirs}"
    for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}


class Mixtral(Architecture):
    """The weights of the chosen experts are renormalised."""

    name = "mixtral"
    label = "Mixtral"
    hf_types = {
        "mixtral": {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2}
        | {"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5}
    }
    hf_classes = ("MixtralForCausalLM",)

    def from_hf(self, config: HfConfig) -> ModelFacts:
        rope, context = config.rope()
        experts = config.mixture("num_local_experts", "intermediate_size", config.activation())
        layer = LayerFacts(config.attention(rope), experts)
        return config.facts(repeated(layer, config.windows(lambda layer: True)), context)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        return Llama().from_gguf(config)

    def inner_names(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        return BLOCK if any(".block_sparse_moe." in name for name in checkpoint.tensors) else {}

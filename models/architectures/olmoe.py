"""OLMoE (7B-A1B): Llama with norms over all queries or keys of a token, and 8 of 64 experts in every layer."""

from __future__ import annotations

from .architecture import Architecture
from .config import Config
from .facts import ModelFacts
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import Experts, LayerFacts
from .mixers import RopeFacts

# What configurations may leave out.
DEFAULTS = {
    "vocab_size": 50_304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16,
    "num_attention_heads": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts": 64,
    "num_experts_per_tok": 8,
}  # fmt: skip


class Olmoe(Architecture):
    """Routing weights do not add up to 1 unless the file says so."""

    name = "olmoe"
    label = "OLMoE"
    hf_types = {"olmoe": DEFAULTS}
    hf_classes = ("OlmoeForCausalLM",)
    gguf_types = ("olmoe",)

    def from_hf(self, config: HfConfig) -> ModelFacts:
        renormalise = config.keys.flag("norm_topk_prob")
        experts = config.mixture("num_experts", "intermediate_size", config.activation(), renormalise=renormalise)
        return _facts(config, *config.rope(), experts)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        return _facts(config, *config.rope(), config.mixture(renormalise=False))


def _facts(config: Config, rope: RopeFacts, context: int, experts: Experts) -> ModelFacts:
    layer = LayerFacts(config.attention(rope, qk_norm=True, whole_norms=True), experts)
    return config.facts((layer,) * config.num_layers, context)

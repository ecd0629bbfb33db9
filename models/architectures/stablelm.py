"""StableLM 2: LayerNorms with a bias, RoPE on a part of each head. Both halves of a layer may have one input."""

from __future__ import annotations

from dataclasses import replace

from .architecture import Architecture
from .config import Config
from .facts import ModelFacts
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import LayerFacts, Norms
from .mixers import RopeFacts

EPS = 1e-5
NORMS = Norms(centred=True, bias=True)
HEAD_NORMS = "a separate query and key norm per head (StableLM 2 12B)"
DEFAULTS = {
    "vocab_size": 50_304, "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096, "rms_norm_eps": EPS,
    "partial_rotary_factor": 0.25,
}  # fmt: skip


class StableLm(Architecture):
    """A parallel layer has one norm."""

    name = "stablelm"
    label = "StableLM 2"
    hf_types = {"stablelm": DEFAULTS}
    hf_renamed = {"layer_norm_eps": "rms_norm_eps"}
    hf_classes = ("StableLmForCausalLM",)
    gguf_types = ("stablelm",)

    def from_hf(self, config: HfConfig) -> ModelFacts:
        if config.keys.flag("qk_layernorm"):
            raise config.unsupported(f"{config.source} with {HEAD_NORMS}")
        rope, context = config.rope()
        return config.facts(_layers(config, rope, config.activation()), context)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        if config.stores("self_attn.q_norm.weight"):
            raise config.unsupported(f"{config.source} with {HEAD_NORMS}")
        eps = config.keys.number("attention.layer_norm_epsilon", 1e-12, 0.1, EPS)
        rope, context = config.rope()
        return config.facts(_layers(config, rope, "silu"), context, eps=EPS, rms_norm_eps=eps)


def _layers(config: Config, rope: RopeFacts, act: str) -> tuple[LayerFacts, ...]:
    parallel = config.keys.flag("use_parallel_residual")
    norms = replace(NORMS, before_ffn="input_layernorm") if parallel else NORMS
    return (LayerFacts(config.attention(rope), config.dense(act), norms, parallel=parallel),) * config.num_layers

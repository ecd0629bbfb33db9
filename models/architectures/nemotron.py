"""Nemotron 3 and 4, Minitron: LayerNorms with a bias, RoPE on half of each head, squared ReLU without a gate."""

from __future__ import annotations

from dataclasses import replace

from .arcee import ACTIVATION
from .architecture import Architecture
from .config import Config
from .facts import ModelFacts
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import LayerFacts, Norms
from .mixers import RopeFacts

EPS = 1e-5
NORMS = Norms(centred=True, bias=True)
DEFAULTS = {
    "vocab_size": 256_000, "hidden_size": 6144, "intermediate_size": 24_576, "num_hidden_layers": 32,
    "num_attention_heads": 48, "max_position_embeddings": 4096, "rms_norm_eps": EPS, "partial_rotary_factor": 0.5,
}  # fmt: skip


class Nemotron(Architecture):
    """Checkpoints store the weights of norms less 1, GGUF files as they are."""

    name = "nemotron"
    label = "Nemotron Mini, Minitron"
    hf_types = {"nemotron": DEFAULTS}
    hf_renamed = {"norm_eps": "rms_norm_eps"}
    hf_classes = ("NemotronForCausalLM",)
    gguf_types = ("nemotron",)

    def from_hf(self, config: HfConfig) -> ModelFacts:
        stated = config.keys.text("hidden_act", ACTIVATION)
        if stated != ACTIVATION:
            raise config.keys.fail("hidden_act", f"is {stated[:60]!r}; {ACTIVATION} is supported")
        rope, context = config.rope()
        return config.facts(_layers(config, rope), context, norm_offset=1.0)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        eps = config.keys.number("attention.layer_norm_epsilon", 1e-12, 0.1, EPS)
        rope, context = config.rope()
        return config.facts(_layers(config, rope), context, eps=EPS, rms_norm_eps=eps)


def _layers(config: Config, rope: RopeFacts) -> tuple[LayerFacts, ...]:
    dense = replace(config.dense(ACTIVATION), gated=False)
    return (LayerFacts(config.attention(rope), dense, NORMS),) * config.num_layers

"""Arcee's AFM-4.5B: Llama whose feed-forward layer has no gate; its activation is the squared ReLU."""

from __future__ import annotations

from dataclasses import replace

from .architecture import Architecture
from .config import Config
from .facts import ModelFacts
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import LayerFacts
from .mixers import RopeFacts

# What configurations may leave out.
DEFAULTS = {
    "vocab_size": 32_000, "hidden_size": 2560, "intermediate_size": 18_432, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
}  # fmt: skip
ACTIVATION = "relu2"


class Arcee(Architecture):
    """Its converter permutes rows of queries and keys, as Llama's does."""

    name = "arcee"
    label = "Arcee AFM"
    hf_types = {"arcee": DEFAULTS}
    hf_classes = ("ArceeForCausalLM",)
    gguf_types = ("arcee",)

    def from_hf(self, config: HfConfig) -> ModelFacts:
        stated = config.keys.text("hidden_act", ACTIVATION)
        if stated != ACTIVATION:
            raise config.keys.fail("hidden_act", f"is {stated[:60]!r}; {ACTIVATION} is supported")
        return _facts(config, *config.rope())

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        return _facts(config, *config.rope(interleaved=True))


def _facts(config: Config, rope: RopeFacts, context: int) -> ModelFacts:
    layer = LayerFacts(config.attention(rope), replace(config.dense(ACTIVATION), gated=False))
    return config.facts((layer,) * config.num_layers, context)

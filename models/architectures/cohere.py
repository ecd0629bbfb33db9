"""Command R and Command A: attention and feed-forward layer share one norm and run in parallel."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from localllm.checkpoint.fields import MAX_CONTEXT, MAX_LAYERS

from .architecture import Architecture
from .facts import ModelFacts, repeated
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import LayerFacts, Norms
from .mixers import RopeFacts

FULL_EVERY, EPS = 4, 1e-5
HEAD_NORMS = "a separate query and key norm per head (Command R+)"
NORMS = Norms(before_ffn="input_layernorm", centred=True)
DEFAULTS = {
    "vocab_size": 256_000, "hidden_size": 8192, "intermediate_size": 22_528, "num_hidden_layers": 40,
    "num_attention_heads": 64, "max_position_embeddings": 8192, "rms_norm_eps": EPS, "logit_scale": 0.0625,
    "tie_word_embeddings": True,
}  # fmt: skip


class Cohere(Architecture):
    """LayerNorms without a bias, interleaved RoPE, scaled logits."""

    name = "cohere"
    label = "Command R"
    hf_types = {"cohere": DEFAULTS | {"rope_theta": 500_000.0}}
    hf_renamed = {"layer_norm_eps": "rms_norm_eps"}
    hf_classes: ClassVar[tuple[str, ...]] = ("CohereForCausalLM",)
    gguf_types: ClassVar[tuple[str, ...]] = ("command-r",)

    def from_hf(self, config: HfConfig) -> ModelFacts:
        rope, context = config.rope()
        if config.keys.flag("use_qk_norm"):
            raise config.unsupported(f"{config.source} with {HEAD_NORMS}")
        layers = self.layers(config, replace(rope, interleaved=True), config.activation())
        # models trained further on longer contexts state the length here
        context = config.keys.integer("model_max_length", 1, MAX_CONTEXT, context)
        return config.facts(layers, context, logit_scale=config.keys.number("logit_scale", 1e-6, 1e6))

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        rope, context = config.rope(interleaved=True)
        rope = replace(rope, permuted=False)  # interleaved in both containers
        if config.stores("self_attn.q_norm.weight"):
            raise config.unsupported(f"{config.source} with {HEAD_NORMS}")
        eps = config.keys.number("attention.layer_norm_epsilon", 1e-12, 0.1, EPS)
        scale = config.keys.number("logit_scale", 1e-6, 1e6, 1.0)
        layers = self.layers(config, rope, "silu")
        return config.facts(layers, context, eps=EPS, rms_norm_eps=eps, logit_scale=scale)

    def layers(self, config: HfConfig | GgufConfig, rope: RopeFacts, act: str) -> tuple[LayerFacts, ...]:
        """All layers, which are identical."""
        return (LayerFacts(config.attention(rope), config.dense(act), NORMS, parallel=True),) * config.num_layers


class Cohere2(Cohere):
    """Three of four layers have a window; the fourth has full attention without RoPE."""

    name = "cohere2"
    label = "Command R7B and A"
    hf_types = {"cohere2": DEFAULTS | {"sliding_window": 4096}}
    hf_wrappers = {"cohere2_vision": "cohere2", "aya_vision": "cohere2"}
    hf_classes = ("Cohere2ForCausalLM", "Cohere2VisionForConditionalGeneration")
    gguf_types = ("cohere2",)

    def layers(self, config: HfConfig | GgufConfig, rope: RopeFacts, act: str) -> tuple[LayerFacts, ...]:
        if isinstance(config, GgufConfig):
            windows = config.windows(FULL_EVERY)
        else:
            every = config.keys.integer("sliding_window_pattern", 1, MAX_LAYERS, FULL_EVERY)
            windows = config.windows(lambda layer: (layer + 1) % every != 0)
        still = RopeFacts(rope.theta, rope.dim, "off", interleaved=True)
        return repeated(super().layers(config, still, act)[0], windows, rope)

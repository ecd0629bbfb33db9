"""Muse Glimmer: gated attention, four norms per layer; three of four layers have a window, and only those have RoPE."""

from __future__ import annotations

from dataclasses import replace

from .architecture import Architecture
from .facts import ModelFacts, repeated
from .gemma3 import GGUF_NORMS, NORMS
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import LayerFacts
from .mixers import RopeFacts

FULL_EVERY, LOGIT_CAP = 4, 20.0  # counted from the last layer
POST_NORM_EPS = 1e-8  # GGUF files have no key for it


class MuseGlimmer(Architecture):
    """Embedding rows, queries and keys are normed without weights; the final norm's weight has no offset."""

    name = "muse_glimmer"
    label = "Muse Glimmer (text)"
    hf_types = {
        "muse_glimmer_text": {
            "vocab_size": 202_048, "hidden_size": 6656, "intermediate_size": 19_968, "num_hidden_layers": 52,
            "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5,
            "hidden_activation": "silu", "max_position_embeddings": 131_072, "sliding_window": 2048,
            "final_logit_softcapping": LOGIT_CAP, "qk_scale_factor": 3.87, "post_norm_eps": POST_NORM_EPS,
            "output_multiplier": 0.19611613513818404,
        }
    }  # fmt: skip
    hf_wrappers = {"muse_glimmer": "muse_glimmer_text"}
    hf_classes = ("MuseGlimmerForConditionalGeneration",)
    gguf_types = ("muse-glimmer",)
    gguf_inner = GGUF_NORMS | {"self_attn.gate_proj": "attn_gate"}

    def from_hf(self, config: HfConfig) -> ModelFacts:
        keys, (rope, context) = config.keys, config.rope()
        windows = config.windows(lambda layer: (config.num_layers - 1 - layer) % FULL_EVERY != 0)
        if keys.flag("attention_bias"):
            raise config.unsupported(f"{config.source} with attention_bias")
        turns = keys.raw("layer_rope_theta")
        given = [rope.theta * (window is not None) for window in windows]
        if turns is not None and turns != given:
            raise config.unsupported(f"{config.source} with a layer_rope_theta that does not match its windowed layers")
        scale = config.head_dim**-0.5 * keys.number("qk_scale_factor", 1e-6, 1e6)
        still = RopeFacts(rope.theta, rope.dim, "off")
        attention = config.attention(still, scale=scale, qk_norm=True, bare_norms=True, gate="apart", fused=False)
        norms = replace(NORMS, after_eps=keys.number("post_norm_eps", 1e-12, 0.1))
        layer = LayerFacts(attention, config.dense(config.activation("hidden_activation")), norms)
        return config.facts(
            repeated(layer, windows, rope), context, norm_offset=1.0, final_offset=False, embedding_norm=True,
            logit_scale=keys.number("output_multiplier", 1e-6, 1e6),
        )  # fmt: skip

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        """The converter adds 1 to the norms of the layers and stores the scale of scores as the norm of queries."""
        keys, (rope, context) = config.keys, config.rope(interleaved=True)
        local_rope = replace(rope, theta=keys.number("rope.freq_base_swa", 1.0, 1e15, rope.theta))
        attention = config.attention(replace(rope, scaling="off"), qk_norm=True, gate="apart")
        layer = LayerFacts(attention, config.dense(), replace(NORMS, after_eps=POST_NORM_EPS))
        layers = repeated(layer, config.windows(FULL_EVERY), local_rope)
        scale = keys.number("logit_scale", 1e-6, 1e6)
        return config.facts(layers, context, embedding_norm=True, logit_scale=scale)

"""Gemma 2: four norms per layer, a window in every second layer, soft caps on scores and logits, GELU."""

from __future__ import annotations

import math
from dataclasses import replace

from .architecture import Architecture
from .facts import ModelFacts, repeated
from .gemma3 import GGUF_NORMS, NORMS
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import LayerFacts

FULL_EVERY, WINDOW, SCORE_CAP, LOGIT_CAP = 2, 4096, 50.0, 30.0  # the same in all models; omitted in old files
DEFAULTS = {
    "vocab_size": 256_000, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_size": 2304,
    "intermediate_size": 9216, "num_hidden_layers": 26, "max_position_embeddings": 8192, "sliding_window": WINDOW,
    "query_pre_attn_scalar": 256, "tie_word_embeddings": True, "attn_logit_softcapping": SCORE_CAP,
    "final_logit_softcapping": LOGIT_CAP, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip


class Gemma2(Architecture):
    """Windowed and full-attention layers alternate, starting with a windowed one. VaultGemma norms no outputs."""

    name = "gemma2"
    label = "Gemma 2, VaultGemma"
    hf_types = {"gemma2": DEFAULTS, "vaultgemma": DEFAULTS}
    hf_classes = ("Gemma2ForCausalLM", "VaultGemmaForCausalLM")
    gguf_types = ("gemma2",)
    gguf_inner = GGUF_NORMS

    def from_hf(self, config: HfConfig) -> ModelFacts:
        rope, context = config.rope()
        scalar = config.keys.number("query_pre_attn_scalar", 1e-3, 1e9)
        caps = {key: config.capped(key) for key in ("attn_logit_softcapping", "final_logit_softcapping")}
        attention = config.attention(rope, scale=scalar**-0.5, softcap=caps["attn_logit_softcapping"])
        norms = NORMS if config.model_type == "gemma2" else replace(NORMS, after_mixer=None, after_ffn=None)
        layer = LayerFacts(attention, config.dense(config.activation("hidden_activation")), norms)
        layers = repeated(layer, config.windows(lambda layer: (layer + 1) % FULL_EVERY != 0))
        scaled = {"embedding_scale": math.sqrt(config.hidden_size), "logit_softcap": caps["final_logit_softcapping"]}
        return config.facts(layers, context, norm_offset=1.0, **scaled)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        rope, context = config.rope()
        # The 27B model scales by its hidden size instead.
        scale = 1 / math.sqrt(config.hidden_size / config.num_heads) if config.num_layers == 46 else None
        cap = config.keys.number("attn_logit_softcapping", 1e-3, 1e6, SCORE_CAP)
        layer = LayerFacts(config.attention(rope, scale=scale, softcap=cap), config.dense("gelu_tanh"), NORMS)
        layers = repeated(layer, config.windows(FULL_EVERY, WINDOW))
        cap = config.keys.number("final_logit_softcapping", 1e-3, 1e6, LOGIT_CAP)
        return config.facts(layers, context, embedding_scale=math.sqrt(config.hidden_size), logit_softcap=cap)

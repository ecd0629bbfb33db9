"""Spark-X2.5: three windowed layers to each of full attention, a gate per head, and exact GELU.

Windowed layers have RoPE of their own. Queries, keys and values are stored as one module, and the gates apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from localllm.checkpoint import Checkpoint

from .architecture import Architecture
from .config import Config
from .facts import ModelFacts, repeated
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import LayerFacts
from .mixers import RopeFacts
from .names import NameMap

FULL_EVERY, THETA, LOCAL_THETA = 4, 5_000_000.0, 10_000.0
GATE = "self_attn.gate_proj"
DEFAULTS = {
    "vocab_size": 133_120, "hidden_size": 2048, "intermediate_size": 6656, "num_hidden_layers": 28,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 8192,
    "sliding_window": 512, "hidden_act": "gelu", "gate_attn_act_mode": "sigmoid", "headwise_attn_output_gate": True,
    "rope_parameters": {
        "full_attention": {"rope_theta": THETA, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_theta": LOCAL_THETA},
    },
}  # fmt: skip


class Spark2_5(Architecture):
    """Its files have another name for the embedding, too."""

    name = "spark2_5"
    label = "Spark-X2.5"
    hf_types = {"spark2_5": DEFAULTS}
    hf_classes = ("Spark2_5ForCausalLM",)
    gguf_types = ("spark2_5",)
    hf_inner = {"self_attn.qkv_proj": "self_attn.q_k_v_proj", "self_attn.o_proj": "self_attn.out_proj"}
    hf_inner |= {GATE: "self_attn.g_proj"}
    gguf_inner = {GATE: "attn_gate"}

    def from_hf(self, config: HfConfig) -> ModelFacts:
        keys = config.keys
        for key, wanted in (("hidden_act", "gelu"), ("gate_attn_act_mode", "sigmoid")):
            if keys.text(key) != wanted:
                raise config.unsupported(f"{config.source} with {key} {keys.text(key)[:40]}")
        if not keys.flag("headwise_attn_output_gate"):
            raise config.unsupported(f"{config.source} without gates")
        rope, local_rope, context = config.ropes(THETA, LOCAL_THETA)
        windows = config.windows(lambda layer: (layer + 1) % FULL_EVERY != 0)
        return _facts(config, (rope, local_rope), context, windows)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        keys, (rope, context) = config.keys, config.rope()
        theta = keys.number("rope.freq_base_swa", 1.0, 1e15, LOCAL_THETA)
        local_rope = RopeFacts(theta, keys.integer("rope.dimension_count_swa", 2, config.head_dim, config.head_dim))
        return _facts(config, (rope, local_rope), context, config.windows(FULL_EVERY))

    def names(self, checkpoint: Checkpoint) -> NameMap:
        found = super().names(checkpoint)
        if checkpoint.kind == "gguf":
            return found
        return replace(found, top={**found.top, "model.embed_tokens": "model.embedding"})


def _facts(
    config: Config, ropes: tuple[RopeFacts, RopeFacts], context: int, windows: Sequence[int | None]
) -> ModelFacts:
    layer = LayerFacts(config.attention(ropes[0], gate="heads"), config.dense("gelu_erf"))
    return config.facts(repeated(layer, windows, ropes[1]), context)

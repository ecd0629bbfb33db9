"""EmbeddingGemma 2: Gemma 4's layers without a causal mask, whose per-layer inputs are projections alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_HIDDEN, MAX_LAYERS
from localllm.checkpoint.text_modules import Projection

from .architecture import Architecture
from .facts import ModelFacts
from .gemma4 import FULL_EVERY, FULL_THETA, LOCAL_THETA, Stack, full_attention, global_heads
from .hf import HfConfig
from .layers import InputTable
from .mixers import RopeFacts
from .names import NameMap

# What configurations may leave out.
DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 1,
    "max_position_embeddings": 262_144,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 512,
    "embedding_dim": 768,
    "hidden_activation": "gelu_pytorch_tanh",
}
INPUTS = ("per_layer_model_projection", "per_layer_projection_norm")
_BLOCK = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")


class EmbeddingGemma2(Architecture):
    """The text part. Its last layer always has full attention; a projection follows pooling."""

    name = "embedding_gemma2"
    label = "EmbeddingGemma 2 (text)"
    hf_types = {"embedding_gemma2_text": DEFAULTS}
    hf_wrappers = {"embedding_gemma2": "embedding_gemma2_text"}
    hf_classes = ("EmbeddingGemma2Model", "EmbeddingGemma2TextModel")
    hf_inner = {name: f"ple_block.{name}" for name in _BLOCK}

    def hf_values(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """Without a factor for all layers: only the scaling "proportional" has one, of its own."""
        return {key: value for key, value in super().hf_values(text).items() if key != "partial_rotary_factor"}

    def from_hf(self, config: HfConfig) -> ModelFacts:
        keys = config.keys
        dim, kv_heads = global_heads(config, keys.integer("num_global_key_value_heads", 1, config.num_heads))
        full_rope, rope, context = config.ropes(FULL_THETA, LOCAL_THETA, dim)
        # without scaling, transformers rotates whole heads, whatever the file says
        full_rope, rope = _whole(full_rope, dim), _whole(rope, config.head_dim)
        attention = config.attention(rope, scale=1.0, qk_norm=True, v_norm=True, causal=False)
        every = keys.integer("sliding_window_pattern", 1, MAX_LAYERS, FULL_EVERY)
        windows = config.windows(lambda layer: (layer + 1) % every != 0)
        dense = config.dense(config.activation("hidden_activation"))
        size = keys.integer("hidden_size_per_layer_input", 1, MAX_HIDDEN)
        stack = Stack(
            narrow=attention,
            full=full_attention(config, attention, full_rope, dim, kv_heads),
            ffn=dense,
            # the configuration states how far a token sees to either side
            windows=(*(None if window is None else window + 1 for window in windows[:-1]), None),
            inners=[dense.inner] * config.num_layers,
            keeping=config.num_layers,
            inputs=InputTable(0, size, config.num_layers),
        )
        last = Projection(
            config.names.source("model.embedding_projection"),
            config.hidden_size,
            keys.integer("embedding_dim", 1, MAX_HIDDEN),
        )
        return stack.facts(config, context, projections=(last, *config.projections))

    def names(self, checkpoint: Checkpoint) -> NameMap:
        found = super().names(checkpoint)
        start = found.top["model.norm"].removesuffix("norm")
        inputs = {f"model.{name}": f"{start}ple.{name}" for name in INPUTS}
        return replace(found, top={**found.top, **inputs, "model.embedding_projection": f"{start}embedding_projection"})


def _whole(rope: RopeFacts, dim: int) -> RopeFacts:
    return replace(rope, dim=dim) if rope.scaling == "none" else rope

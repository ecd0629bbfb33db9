"""SmolLM3: Llama with some layers without RoPE."""

from __future__ import annotations

from dataclasses import replace

from localllm.checkpoint.fields import MAX_LAYERS

from .architecture import Architecture
from .facts import ModelFacts
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import Dense, LayerFacts
from .mixers import Attention, RopeFacts

STILL_EVERY = 4  # every fourth layer has no RoPE by default


class SmolLM3(Architecture):
    """Every fourth layer has no RoPE; only those layers may have a window."""

    name = "smollm3"
    label = "SmolLM3"
    hf_types = {
        "smollm3": {"rope_theta": 2_000_000.0, "max_position_embeddings": 32_768, "vocab_size": 128_256}
        | {"hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 36, "tie_word_embeddings": True}
        | {"num_attention_heads": 16, "num_key_value_heads": 4}
    }
    hf_classes = ("SmolLM3ForCausalLM",)
    gguf_types = ("smollm3",)

    def from_hf(self, config: HfConfig) -> ModelFacts:
        keys, num_layers = config.keys, config.num_layers
        rope, context = config.rope()
        every = keys.integer("no_rope_layer_interval", 1, MAX_LAYERS, STILL_EVERY)
        turns = keys.raw("no_rope_layers")  # despite the name, 1 means that a layer has RoPE
        if turns is None:
            turns = [int((layer + 1) % every != 0) for layer in range(num_layers)]
        if not isinstance(turns, list) or len(turns) != num_layers or any(turn not in (0, 1) for turn in turns):
            raise keys.fail("no_rope_layers", f"must list 0 or 1 for each of {num_layers} layers")
        enabled = keys.flag("use_sliding_window") and config.window is not None
        windows = config.windows(lambda layer: not turns[layer], enabled=enabled)
        attention, dense = config.attention(rope), config.dense(config.activation())
        return config.facts(_layers(attention, dense, turns, windows), context)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        rope, context = config.rope(interleaved=True)
        turns = [int((layer + 1) % STILL_EVERY != 0) for layer in range(config.num_layers)]
        layers = _layers(config.attention(rope), config.dense(), turns, config.windows())
        return config.facts(layers, context)


def _layers(mixer: Attention, dense: Dense, turns: list[int], windows: tuple[int | None, ...]) -> list[LayerFacts]:
    rope = mixer.rope
    still = RopeFacts(rope.theta, rope.dim, "off", interleaved=rope.interleaved, permuted=rope.permuted)
    return [
        LayerFacts(replace(mixer, rope=rope if turn else still, window=window), dense)
        for turn, window in zip(turns, windows, strict=True)
    ]

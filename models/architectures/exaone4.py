"""EXAONE 4.0 and the text model of 4.5: norms as in OLMo 2; in models with windows, full-attention layers lack RoPE."""

from __future__ import annotations

from collections.abc import Callable

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_LAYERS

from .architecture import Architecture
from .facts import ModelFacts, repeated
from .gguf import GgufConfig
from .hf import HfConfig
from .layers import Dense, LayerFacts
from .mixers import RopeFacts
from .names import GGUF_LAYER, NameMap, gguf_names
from .olmo2 import AFTER, FULL_EVERY, NORMS

DEFAULTS = {
    "vocab_size": 102_400, "hidden_size": 4096, "intermediate_size": 16_384, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "sliding_window": 4096,
}  # fmt: skip


class Exaone4(Architecture):
    """Per-head query and key norms; small models have no windows, and RoPE in all layers."""

    name = "exaone4"
    label = "EXAONE 4"
    hf_types = {"exaone4": DEFAULTS, "exaone4_5_text": DEFAULTS}
    hf_wrappers = {"exaone4_5": "exaone4"}
    hf_classes = ("Exaone4ForCausalLM",)
    gguf_types = ("exaone4",)

    def from_hf(self, config: HfConfig) -> ModelFacts:
        rope, context = config.rope()
        windows, dense = config.windows(_windowed(config)), config.dense(config.activation())
        return _facts(config, rope, context, windows, dense, turns=config.window is None)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        rope, context = config.rope()
        windows = config.windows(FULL_EVERY)
        return _facts(config, rope, context, windows, config.dense(), turns=not any(windows))

    def names(self, checkpoint: Checkpoint) -> NameMap:
        return gguf_names(GGUF_LAYER | AFTER) if checkpoint.kind == "gguf" else super().names(checkpoint)


def _facts(
    config: HfConfig | GgufConfig, rope: RopeFacts, context: int, windows: tuple[int | None, ...], dense: Dense,
    *, turns: bool,
) -> ModelFacts:  # fmt: skip
    """The whole model. `turns`: layers without a window also have RoPE."""
    of_all = rope if turns else RopeFacts(rope.theta, rope.dim, "off")
    layer = LayerFacts(config.attention(of_all, qk_norm=True), dense, NORMS)
    return config.facts(repeated(layer, windows, rope), context)


def _windowed(config: HfConfig) -> Callable[[int], bool]:
    """Which layers have a window if the file does not list them: from a repeated pattern of L (local) and G (global),
    or from the distance between full-attention layers.
    """
    pattern = config.keys.raw("sliding_window_pattern")
    if config.window is None or not pattern:
        return lambda layer: (layer + 1) % FULL_EVERY != 0
    if isinstance(pattern, str) and set(pattern) <= {"L", "G"}:
        return lambda layer: pattern[layer % len(pattern)] == "L"
    every = config.keys.integer("sliding_window_pattern", 1, MAX_LAYERS)
    return lambda layer: (layer + 1) % every != 0

"""EXAONE 4.0 and the text model of 4.5: norms as in OLMo 2; in models with windows, full-attention layers lack RoPE.
K-EXAONE: the usual norms, experts behind a sigmoid router with a choice bias, a shared expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_EXPERTS, MAX_LAYERS

from .architecture import Architecture
from .facts import ModelFacts, repeated
from .gguf import GgufConfig
from .glm4_moe import SHARED
from .hf import HfConfig
from .layers import Dense, Experts, Fusion, LayerFacts
from .mixers import RopeFacts
from .names import CHOICE_BIAS, MTP, NameMap, predictor_names
from .olmo2 import AFTER, FULL_EVERY, NORMS

KINDS = "sparse", "dense"
SLIDING = "sliding_attention"
DEFAULTS = {
    "vocab_size": 102_400, "hidden_size": 4096, "intermediate_size": 16_384, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
}  # fmt: skip


class Exaone4(Architecture):
    """Per-head query and key norms; small models have no windows, and RoPE in all layers."""

    name = "exaone4"
    label = "EXAONE 4"
    hf_types = {"exaone4": DEFAULTS, "exaone4_5_text": DEFAULTS}
    hf_wrappers = {"exaone4_5": "exaone4"}
    hf_classes = ("Exaone4ForCausalLM",)
    gguf_types = ("exaone4",)
    gguf_inner = AFTER

    def from_hf(self, config: HfConfig) -> ModelFacts:
        rope, context = config.rope()
        windows, dense = config.windows(_windowed(config)), config.dense(config.activation())
        return _facts(config, rope, context, windows, dense, turns=config.window is None)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        rope, context = config.rope()
        windows = config.windows(FULL_EVERY)
        return _facts(config, rope, context, windows, config.dense(), turns=not any(windows))


class ExaoneMoe(Architecture):
    """The first layers are dense, and so is the MTP head; GGUF files do not say whether it has a window."""

    name = "exaone_moe"
    label = "K-EXAONE"
    hf_types = {
        "exaone_moe": DEFAULTS
        | {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 1024, "num_shared_experts": 1}
        | {"routed_scaling_factor": 2.5, "norm_topk_prob": True, "first_k_dense_replace": 1}
    }
    hf_classes = ("ExaoneMoeForCausalLM",)
    gguf_types = ("exaone-moe",)
    hf_inner = SHARED

    def from_hf(self, config: HfConfig) -> ModelFacts:
        keys, act, (rope, context) = config.keys, config.activation(), config.rope()
        experts = config.mixture(
            "num_experts", "moe_intermediate_size", act,
            router="sigmoid",
            choice_bias=True,
            shared=keys.integer("num_shared_experts", 0, MAX_EXPERTS),
            **config.router(),
        )  # fmt: skip
        first = keys.integer("first_k_dense_replace", 0, MAX_LAYERS)
        kinds = config.layer_types(KINDS, lambda layer: KINDS[layer < first], key="mlp_layer_types")
        dense = config.dense(act) if "dense" in kinds else None
        ffns = [experts if kind == "sparse" else dense for kind in kinds]
        windows, of_head = config.windows(_windowed(config)), keys.raw("mtp_layer_types")
        facts = _mixed(config, rope, context, windows, ffns)
        kind = of_head[0] if isinstance(of_head, list) and of_head else None
        alike = (layer for layer, one in zip(facts.layers, windows, strict=True) if bool(one) == (kind == SLIDING))
        head = next(alike, None) if kind is not None else None
        if head is None and any(name.startswith(MTP) for name in config.checkpoint.tensors):
            flaw = "the configuration does not say what the MTP head sees, or no layer sees the same: mtp_layer_types"
            return replace(facts, predictor_flaw=flaw)
        head = head and replace(head, ffn=config.dense(act), fusion=Fusion())
        return config.facts(facts.layers, context, predictor=head)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        keys, (rope, context) = config.keys, config.rope()
        shared = keys.integer("expert_shared_count", 0, MAX_EXPERTS, 1)
        experts = config.mixture(grouped=True, router="sigmoid", choice_bias=True, shared=shared)
        first = keys.integer("leading_dense_block_count", 0, MAX_LAYERS, 0)
        dense = config.dense() if first else experts
        ffns = [dense if layer < first else experts for layer in range(config.num_layers)]
        return _mixed(config, rope, context, config.windows(FULL_EVERY), ffns)

    def names(self, checkpoint: Checkpoint) -> NameMap:
        found, number = super().names(checkpoint), checkpoint.config.get("num_hidden_layers")
        return found if checkpoint.kind == "gguf" else replace(found, parts=predictor_names(number))

    def inner_names(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        published = any(name.endswith(".mlp.e_score_correction_bias") for name in checkpoint.tensors)
        own = {CHOICE_BIAS: "mlp.e_score_correction_bias"} if published else {}
        return {**super().inner_names(checkpoint), **own}


def _mixed(
    config: HfConfig | GgufConfig, rope: RopeFacts, context: int, windows: tuple[int | None, ...],
    ffns: Sequence[Dense | Experts | None],
) -> ModelFacts:  # fmt: skip
    """`ffns`: of each layer. Layers without a window have no RoPE."""
    attention = config.attention(RopeFacts(rope.theta, rope.dim, "off"), qk_norm=True)
    layers = repeated(LayerFacts(attention, None), windows, rope)
    return config.facts([replace(layer, ffn=ffn) for layer, ffn in zip(layers, ffns, strict=True)], context)


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

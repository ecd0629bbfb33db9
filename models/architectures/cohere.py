"""Command R, Command A and North: attention and feed-forward layer share one norm and run in parallel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from localllm.checkpoint.fields import MAX_CONTEXT, MAX_EXPERTS, MAX_HIDDEN, MAX_LAYERS

from .architecture import Architecture
from .config import Config
from .deepseek import SIGMOID
from .facts import ModelFacts, repeated
from .gguf import GgufConfig
from .glm4_moe import SHARED
from .hf import HfConfig
from .layers import Dense, Experts, LayerFacts, Norms
from .mixers import RopeFacts

FULL_EVERY, EPS = 4, 1e-5
KINDS = "sparse", "dense"
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
    hf_classes: ClassVar[tuple[str, ...]] = ("Cohere2ForCausalLM", "Cohere2VisionForConditionalGeneration")
    gguf_types = ("cohere2",)

    def layers(self, config: HfConfig | GgufConfig, rope: RopeFacts, act: str) -> tuple[LayerFacts, ...]:
        if isinstance(config, GgufConfig):
            windows = config.windows(FULL_EVERY)
        else:
            every = config.keys.integer("sliding_window_pattern", 1, MAX_LAYERS, FULL_EVERY)
            windows = config.windows(lambda layer: (layer + 1) % every != 0)
        still = RopeFacts(rope.theta, rope.dim, "off", interleaved=True)
        return repeated(super().layers(config, still, act)[0], windows, rope)


class Cohere2Moe(Cohere2):
    """Experts in most layers. The first ones may be dense, with RoPE even without a window. Norms may be RMSNorms."""

    name = "cohere2_moe"
    label = "Command A+, North Mini"
    hf_types = {
        "cohere2_moe": DEFAULTS
        | {"head_dim": 128, "sliding_window": 4096, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
    }
    hf_wrappers: ClassVar[dict[str, str]] = {}
    hf_classes = ("Cohere2MoeForCausalLM",)
    gguf_types = ("cohere2moe",)
    hf_inner = SHARED

    def hf_values(self, text: Mapping[str, Any]) -> dict[str, Any]:
        values = super().hf_values(text)
        if text.get("rms_norm_eps") is not None:  # instead of the epsilon of LayerNorms
            values |= {"rms_norm_eps": text["rms_norm_eps"], "rms_norms": True}
        return values

    def from_hf(self, config: HfConfig) -> ModelFacts:
        keys, act = config.keys, config.activation()
        rope, context = config.rope()
        if keys.flag("use_qk_norm"):
            raise config.unsupported(f"{config.source} with use_qk_norm")
        first = keys.integer("first_k_dense_replace", 0, MAX_LAYERS, 0)
        kinds = config.layer_types(KINDS, lambda layer: KINDS[layer < first], key="mlp_layer_types")
        turned = keys.integer("prefix_dense_sliding_window_pattern", 1, MAX_LAYERS, 1)
        every = keys.integer("sliding_window_pattern", 1, MAX_LAYERS, FULL_EVERY)
        windows = config.windows(
            lambda layer: (layer + 1) % turned != 0 if layer < first else (layer - first + 1) % every != 0
        )
        layers = self.mixed(
            config, replace(rope, interleaved=True), windows, [kind == "dense" for kind in kinds],
            _hf_experts(config, act), self.dense(config, act) if "dense" in kinds else None, turned == 1,
            keys.flag("rms_norms"),
        )  # fmt: skip
        return config.facts(layers, context, logit_scale=keys.number("logit_scale", 1e-6, 1e6))

    def dense(self, config: HfConfig, act: str) -> Dense:
        """The feed-forward layer of dense layers."""
        dense = config.dense(act)
        inner = config.keys.integer("prefix_dense_intermediate_size", 1, MAX_HIDDEN * 4, dense.inner)
        return replace(dense, inner=inner)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        keys = config.keys
        rope, context = config.rope(interleaved=True)
        rope = replace(rope, permuted=False)
        kind = keys.integer("expert_gating_func", 1, 4, SIGMOID)
        if kind != SIGMOID:
            raise config.unsupported(f"{config.source} with expert_gating_func {kind}")
        experts = config.mixture(router="sigmoid", renormalise=keys.flag("expert_weights_norm"))
        if keys.integer("expert_shared_count", 0, MAX_EXPERTS, 0):
            shared = keys.integer("expert_shared_feed_forward_length", 1, MAX_HIDDEN * 4, experts.inner)
            experts = _averaged(replace(experts, shared_inner=shared))
        first = keys.integer("leading_dense_block_count", 0, MAX_LAYERS, 0)
        dense = [layer < first for layer in range(config.num_layers)]
        bare = keys.raw("attention.layer_norm_epsilon") is None
        eps = keys.number("attention.layer_norm_rms_epsilon" if bare else "attention.layer_norm_epsilon", 1e-12, 0.1)
        plain = config.dense() if first else None
        layers = self.mixed(config, rope, config.windows(FULL_EVERY), dense, experts, plain, True, bare)
        scale = keys.number("logit_scale", 1e-6, 1e6, 1.0)
        return config.facts(layers, context, eps=EPS, rms_norm_eps=eps, logit_scale=scale)

    def mixed(
        self, config: Config, rope: RopeFacts, windows: Sequence[int | None], dense: Sequence[bool], experts: Experts,
        plain: Dense | None, turned: bool, rms: bool,
    ) -> list[LayerFacts]:  # fmt: skip
        """All layers. `dense`: which have `plain` instead of experts; `turned`: these have RoPE; `rms`: RMSNorms."""
        still = RopeFacts(rope.theta, rope.dim, "off", interleaved=True)
        attention, norms, layers = config.attention(rope), replace(NORMS, centred=not rms), []
        for window, is_dense in zip(windows, dense, strict=True):
            own = rope if window is not None or (is_dense and turned) else still
            ffn = plain if is_dense and plain is not None else experts
            layers.append(LayerFacts(replace(attention, rope=own, window=window), ffn, norms, parallel=True))
        return layers


def _hf_experts(config: HfConfig, act: str) -> Experts:
    keys = config.keys
    kind = keys.text("expert_selection_fn", "softmax")
    if kind not in ("softmax", "sigmoid"):
        raise keys.fail("expert_selection_fn", f"is {kind[:40]!r}; softmax and sigmoid are supported")
    router = "sigmoid" if kind == "sigmoid" else "softmax_topk"
    experts = config.mixture(
        "num_experts", "intermediate_size", act, router=router, renormalise=keys.flag("norm_topk_prob")
    )
    shared = keys.integer("num_shared_experts", 0, MAX_EXPERTS, 0)
    if not shared:
        return experts
    way = keys.text("shared_expert_combination_strategy", "average")
    if way not in ("average", "sum"):
        raise keys.fail("shared_expert_combination_strategy", f"is {way[:40]!r}; average and sum are supported")
    experts = replace(experts, shared_inner=shared * experts.inner)
    return experts if way == "sum" else _averaged(experts)


def _averaged(experts: Experts) -> Experts:
    """The mean of the routed and the shared experts' outputs."""
    return replace(experts, scale=experts.scale / 2, shared_scale=0.5)

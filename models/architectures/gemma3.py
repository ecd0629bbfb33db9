"""Gemma 3 and EmbeddingGemma: four norms per layer, query and key norms, a separate RoPE in windowed layers, GELU."""

from __future__ import annotations

import math
from dataclasses import replace

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_LAYERS, MAX_VOCAB

from .architecture import Architecture
from .facts import ModelFacts, repeated
from .gguf import GgufConfig
from .hf import Described, HfConfig, below
from .layers import LayerFacts, Norms
from .mixers import RopeFacts
from .names import NameMap
from .vision import VisionFacts

FULL_EVERY = 6  # five windowed layers, then one of full attention; files often omit the pattern
FULL_THETA, LOCAL_THETA, EPS = 1_000_000.0, 10_000.0, 1e-6
EMBEDDING = "gemma-embedding"  # the GGUF name of the model without a causal mask
MULTIMODAL, MULTIMODAL_FACTOR = (34, 48, 62), 8.0  # layers of 4B, 12B and 27B, and their linear RoPE scaling factor
# defaults, which published multi-modal configs omit
DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
NORMS = Norms(
    before_ffn="pre_feedforward_layernorm",
    after_mixer="post_attention_layernorm",
    after_ffn="post_feedforward_layernorm",
)
GGUF_NORMS = {  # there, ffn_norm is the norm before the feed-forward layer, since there is one on each side
    "pre_feedforward_layernorm": "ffn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


class Gemma3(Architecture):
    """The outputs of attention and of the feed-forward layer are normed before they are added."""

    name = "gemma3"
    label = "Gemma 3, EmbeddingGemma"
    hf_types = {"gemma3_text": DEFAULTS}
    hf_wrappers = {"gemma3": "gemma3_text"}
    hf_classes = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma3TextModel")
    gguf_types = ("gemma3", EMBEDDING)
    gguf_inner = GGUF_NORMS

    def from_hf(self, config: HfConfig) -> ModelFacts:
        rope, local_rope, context = config.ropes(FULL_THETA, LOCAL_THETA)
        scalar = config.keys.number("query_pre_attn_scalar", 1e-3, 1e9)
        attention = config.attention(rope, scale=scalar**-0.5, qk_norm=True, causal=config.causal)
        # The first configs also contain hidden_act "gelu", which is unused.
        layer = LayerFacts(attention, config.dense(config.activation("hidden_activation")), NORMS)
        every = config.keys.integer("sliding_window_pattern", 1, MAX_LAYERS, FULL_EVERY)
        windows = halved(config.windows(lambda layer: (layer + 1) % every != 0), config.causal)
        layers = repeated(layer, windows, local_rope)
        scale = math.sqrt(config.hidden_size)
        return config.facts(layers, context, norm_offset=1.0, embedding_scale=scale, vision=gemma3_vision(config.tower))

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        rope, context = config.rope()
        if config.keys.raw("rope.freq_base") is None:
            rope = _unstated_rope(config, rope)
        theta = config.keys.number("rope.local.freq_base", 1.0, 1e15, LOCAL_THETA)
        local_rope = RopeFacts(config.keys.number("rope.freq_base_swa", 1.0, 1e15, theta), config.head_dim)
        # The 27B model scales by its hidden size instead.
        scale = 1 / math.sqrt(config.hidden_size / config.num_heads) if config.num_layers == 62 else None
        causal = config.causal and config.source != EMBEDDING
        attention = config.attention(rope, scale=scale, qk_norm=True, causal=causal)
        layer = LayerFacts(attention, config.dense("gelu_tanh"), NORMS)
        layers = repeated(layer, halved(config.windows(FULL_EVERY), causal), local_rope)
        return config.facts(layers, context, eps=EPS, embedding_scale=math.sqrt(config.hidden_size))

    def names(self, checkpoint: Checkpoint) -> NameMap:
        found = super().names(checkpoint)
        return found if checkpoint.kind == "gguf" else replace(found, parts=_part_names(checkpoint))


def halved(windows: tuple[int | None, ...], causal: bool) -> tuple[int | None, ...]:
    """Split a bidirectional window in half: the stored width covers both sides."""
    return windows if causal else tuple(None if window is None else window // 2 + 1 for window in windows)


def _part_names(checkpoint: Checkpoint) -> dict[str, str]:
    """The name prefixes of tower and projector; {} if the file has only the text model."""
    ends = {"vision.": "embeddings.patch_embedding.weight", "projector.": "mm_input_projection_weight"}
    found = {part: name.removesuffix(end) for name in checkpoint.tensors for part, end in ends.items()
             if name.endswith(end)}  # fmt: skip
    return found if found.keys() == ends.keys() else {}


def gemma3_vision(described: Described | None) -> VisionFacts | None:
    """The tower, if the files have and describe it; the limits are far above published models."""
    if described is None:
        return None
    top, own = described.top, below(described.top, "vision_config")
    facts = VisionFacts(
        num_layers=own.integer("num_hidden_layers", 1, MAX_LAYERS, 12),
        hidden=own.integer("hidden_size", 1, 1 << 14, 768),
        inner=own.integer("intermediate_size", 1, 1 << 16, 3072),
        num_heads=own.integer("num_attention_heads", 1, 1 << 10, 12),
        image_size=own.integer("image_size", 1, 1 << 11, 224),
        patch_size=own.integer("patch_size", 1, 1 << 8, 16),
        eps=own.number("layer_norm_eps", 1e-12, 0.1, EPS),
        tokens=top.integer("mm_tokens_per_image", 1, 1 << 12, 256),
        image_token=top.integer("image_token_index", 0, MAX_VOCAB, 262144),
        begin_token=top.integer("boi_token_index", 0, MAX_VOCAB, 255999),
        end_token=top.integer("eoi_token_index", 0, MAX_VOCAB, 256000),
        nbytes=described.nbytes,
    )
    if facts.hidden % facts.num_heads:
        raise own.fail("hidden_size", f"is {facts.hidden}, not a multiple of {facts.num_heads} heads")
    if facts.image_size % facts.patch_size:
        raise own.fail("image_size", f"is {facts.image_size}, not a multiple of the patch_size {facts.patch_size}")
    across = math.isqrt(facts.tokens)
    pooled = across**2 == facts.tokens and facts.side % across == 0
    known = max(facts.image_token, facts.begin_token, facts.end_token) < described.vocab_size
    if not pooled or not known or facts.tokens > (described.window or facts.tokens):
        return None  # unsupported pooling, or a window would split an image: run the text model only
    return facts


def _unstated_rope(config: GgufConfig, rope: RopeFacts) -> RopeFacts:
    """The rotation in files converted by Ollama, which omit what is the same in all models of that size."""
    theta = config.keys.number("rope.global.freq_base", 1.0, 1e15, FULL_THETA)
    if config.num_layers in MULTIMODAL and rope.scaling == "none":
        return replace(rope, theta=theta, scaling="linear", factor=MULTIMODAL_FACTOR)
    return replace(rope, theta=theta)

"""Vision facts of Gemma 4: a tower, or in the unified model a projection of pixel squares."""

from __future__ import annotations

from typing import Any

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_VOCAB, Fields

from .hf import Described, below
from .vision import MAX_IMAGE_TOKENS, Bidirectional, PatchFacts, PooledFacts

_TOWER, _PATCHES, _PROJECTION = "patch_embedder.input_proj.weight", "patch_dense.weight", "embedding_projection.weight"
THETA, TOKENS = 100.0, 280


def gemma4_parts(checkpoint: Checkpoint) -> dict[str, str]:
    """The name prefixes of the vision tensors; {} if the file has only the text model."""
    found = {}
    for name in checkpoint.tensors:
        if name.endswith((_TOWER, _PATCHES)):
            found["vision."] = name.removesuffix(_TOWER).removesuffix(_PATCHES)
        elif name.endswith(_PROJECTION) and "embed_vision." in name:  # audio has a projection of the same name
            found["projector."] = name.removesuffix(_PROJECTION)
    return found if len(found) == 2 else {}


def gemma4_vision(
    described: Described | None, bidirectional: Bidirectional, unified: bool = False
) -> PooledFacts | PatchFacts | None:
    """The vision facts, if the files have a supported variant; the limits are far above published models."""
    if described is None:
        return None
    own, processor = below(described.top, "vision_config"), described.processor
    colours = processor.raw("image_mean") or [0.0] * 3, processor.raw("image_std") or [1.0] * 3
    scaled = processor.flag("do_normalize") and colours != ([0.0] * 3, [1.0] * 3)
    if scaled or own.text("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        return None  # unsupported activation or colour scaling: run the text model only
    places = "mm_posemb_size" if unified else "position_embedding_size"
    common = _common(described, own, bidirectional) | {
        "places": own.integer(places, 1, 1 << 20, 1120 if unified else 10_240)
    }
    facts = (
        PatchFacts(hidden=own.integer("mm_embed_dim", 1, 1 << 16, 3840), **common) if unified else _tower(own, common)
    )
    longest = facts.tokens * (1 if unified else facts.merge)
    if facts.places < longest:
        raise own.fail(places, f"is {facts.places}, but an image may have {longest} patches in a row")
    known = max(facts.image_token, facts.begin_token, facts.end_token) < described.vocab_size
    return facts if known else None


def _common(described: Described, own: Fields, bidirectional: Bidirectional) -> dict[str, Any]:
    """The fields of both variants: image sizes, tokens, and attention between image tokens."""
    top, window = described.top, described.window
    most = min(described.processor.integer("max_soft_tokens", 1, 1 << 20, TOKENS), MAX_IMAGE_TOKENS)
    return {
        "patch_size": own.integer("patch_size", 1, 1 << 8, 16),
        "merge": own.integer("pooling_kernel_size", 1, 16, 3),
        "tokens": min(most, window or most) if bidirectional else most,  # no window may split such an image
        "outputs": described.hidden_size,
        "eps": own.number("rms_norm_eps", 1e-12, 0.1, 1e-6),
        "image_token": top.integer("image_token_id", 0, MAX_VOCAB, 258_880),
        "begin_token": top.integer("boi_token_id", 0, MAX_VOCAB, 255_999),
        "end_token": top.integer("eoi_token_id", 0, MAX_VOCAB, 258_882),
        "bidirectional": bidirectional,
        "nbytes": described.nbytes,
    }


def _tower(own: Fields, common: dict[str, Any]) -> PooledFacts:
    heads = own.integer("num_attention_heads", 1, MAX_HEADS, 12)
    facts = PooledFacts(
        hidden=own.integer("hidden_size", 1, 1 << 14, 768),
        num_layers=own.integer("num_hidden_layers", 1, MAX_LAYERS, 16),
        inner=own.integer("intermediate_size", 1, 1 << 16, 3072),
        num_heads=heads,
        num_kv_heads=own.integer("num_key_value_heads", 1, heads, 12),
        head_dim=own.integer("head_dim", 4, MAX_HEAD_DIM, 64),
        theta=below(own, "rope_parameters").number("rope_theta", 1.0, 1e15, THETA),
        clipped=own.flag("use_clipped_linears"),
        standardized=own.flag("standardize"),
        **common,
    )
    if facts.head_dim % 4:
        raise own.fail("head_dim", f"is {facts.head_dim}, not a multiple of 4")
    if heads % facts.num_kv_heads:
        raise own.fail("num_key_value_heads", f"is {facts.num_kv_heads}, which does not divide {heads} heads")
    return facts

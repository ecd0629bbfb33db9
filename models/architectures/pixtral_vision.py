"""Vision facts of Mistral 3 files, from `vision_config`, the processor configuration and the projector's keys."""

from __future__ import annotations

import math
from dataclasses import replace

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_LAYERS, MAX_VOCAB

from .hf import Described, HfConfig, below
from .names import NameMap
from .qwen_vision import CLIP_MEAN, CLIP_STD, colours
from .vision import MAX_IMAGE_TOKENS, RowFacts

_TOWER, _PROJECTOR = "patch_conv.weight", "patch_merger.merging_layer.weight"
# token ids in every published model; files state at most the first
IMAGE_TOKEN, BREAK_TOKEN, END_TOKEN = 10, 12, 13


def with_rows(names: NameMap, checkpoint: Checkpoint) -> NameMap:
    """Add the name prefixes of tower and projector in safetensors, if both are stored."""
    ends = {"vision.": _TOWER, "projector.": _PROJECTOR}
    found = {part: name.removesuffix(end) for name in checkpoint.tensors for part, end in ends.items()
             if name.endswith(end)}  # fmt: skip
    return replace(names, parts={**names.parts, **found}) if found.keys() == ends.keys() else names


def row_vision(config: HfConfig) -> RowFacts | None:
    """The tower of a wrapper's file, if it is supported."""
    eps = config.keys.number("rms_norm_eps", 1e-12, 0.1, config.DEFAULT_EPS)
    return None if config.tower is None else described_rows(config.tower, eps)


def described_rows(described: Described, eps: float) -> RowFacts | None:
    """The tower, with limits far above published models; None if it is not supported, so only the text model runs.

    eps   of the norms of decoder and projector
    """
    top, own = described.top, below(described.top, "vision_config")
    if own.text("hidden_act", "gelu") != "silu" or top.text("projector_hidden_act", "gelu") != "gelu":
        return None
    if top.raw("vision_feature_layer") not in (None, -1):
        return None
    hidden, heads = own.integer("hidden_size", 4, 1 << 14, 1024), own.integer("num_attention_heads", 1, 1 << 10, 16)
    if hidden % (4 * heads) or own.integer("head_dim", 1, 1 << 14, hidden // heads) != hidden // heads:
        raise own.fail("hidden_size", f"is {hidden}, not a multiple of 4 for each of {heads} heads")
    patch, merge = own.integer("patch_size", 1, 1 << 8, 16), top.integer("spatial_merge_size", 1, 16, 2)
    stated = own.integer("image_size", 1, 1 << 16, 1024)
    stated = below(described.processor, "size").integer("longest_edge", 1, 1 << 16, stated)
    columns = (math.isqrt(4 * MAX_IMAGE_TOKENS + 5) - 1) // 2  # of a square image, counting the break tokens
    mean, std = colours(described.processor, CLIP_MEAN, CLIP_STD)
    image_token = top.integer("image_token_id", 0, MAX_VOCAB, IMAGE_TOKEN)
    image_token = top.integer("image_token_index", 0, MAX_VOCAB, image_token)
    if image_token != IMAGE_TOKEN and top.raw("image_break_token_id") is None:
        return None  # another vocabulary, whose break and end tokens are unknown
    facts = RowFacts(
        num_layers=own.integer("num_hidden_layers", 1, MAX_LAYERS, 24),
        hidden=hidden,
        inner=own.integer("intermediate_size", 1, 1 << 16, 4096),
        num_heads=heads,
        patch_size=patch,
        merge=merge,
        outputs=described.hidden_size,
        theta=below(own, "rope_parameters").number("rope_theta", 1.0, 1e15, own.number("rope_theta", 1.0, 1e15, 1e4)),
        longest=min(stated, columns * patch * merge),
        mean=mean,
        std=std,
        eps=eps,
        biased=top.flag("multimodal_projector_bias"),
        image_token=image_token,
        break_token=top.integer("image_break_token_id", 0, MAX_VOCAB, BREAK_TOKEN),
        end_token=top.integer("image_end_token_id", 0, MAX_VOCAB, END_TOKEN),
        nbytes=described.nbytes,
    )
    return facts if max(facts.image_token, facts.break_token, facts.end_token) < described.vocab_size else None

"""The tower of Qwen3.5's files as facts: `vision_config`, `preprocessor_config.json`, and the decoder's sections."""

from __future__ import annotations

import math
from typing import Any

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_LAYERS, MAX_VOCAB

from .hf import HfConfig, below, image_processor, object_of
from .mixers import RopeFacts
from .vision import MAX_IMAGE_TOKENS, GridFacts

_END = "patch_embed.proj.weight"
_SECTIONS = [11, 11, 10]  # pairs that turn by time, row and column
MIN_PIXELS, MAX_PIXELS = 1 << 16, 1 << 24  # what files without a processor's configuration mean
SHARE = 0.5  # mean and deviation of a colour, where they are not stated


def grid_parts(checkpoint: Checkpoint) -> dict[str, str]:
    """What the tower's tensors begin with; {} where the file has the text model only."""
    start = next((name.removesuffix(_END) for name in checkpoint.tensors if name.endswith(_END)), None)
    return {} if start is None else {"vision.": start}


def grid_vision(config: HfConfig, rope: RopeFacts) -> GridFacts | None:
    """The tower, where the file has one that is computed here; limits are far above those of published models."""
    stated, start = config.top.raw("vision_config"), config.names.parts.get("vision.")
    if not isinstance(stated, dict) or start is None:
        return None
    own = below(config.top, "vision_config")
    if own.raw("deepstack_visual_indexes") or own.text("hidden_act", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        return None  # layers that add to the decoder's, another function: the text part runs
    hidden, heads = own.integer("hidden_size", 4, 1 << 14, 1152), own.integer("num_heads", 1, 1 << 10, 16)
    if hidden % (4 * heads):
        raise own.fail("hidden_size", f"is {hidden}, no multiple of 4 for each of {heads} heads")
    patch, merge = own.integer("patch_size", 1, 1 << 8, 16), own.integer("spatial_merge_size", 1, 16, 2)
    places = own.integer("num_position_embeddings", 1, 1 << 20, 2304)
    if math.isqrt(places) ** 2 != places:
        raise own.fail("num_position_embeddings", f"is {places}, no square number")
    factor = patch * merge
    parameters = below(own, "rope_parameters")
    pixels, mean, std = _processing(config.checkpoint)
    facts = GridFacts(
        num_layers=own.integer("depth", 1, MAX_LAYERS, 27),
        hidden=hidden,
        inner=own.integer("intermediate_size", 1, 1 << 16, 4304),
        num_heads=heads,
        patch_size=patch,
        merge=merge,
        frames=own.integer("temporal_patch_size", 1, 16, 2),
        side=math.isqrt(places),
        outputs=own.integer("out_hidden_size", 1, 1 << 16, 3584),
        theta=parameters.number("rope_theta", 1.0, 1e15, 10_000.0),
        min_pixels=max(factor**2, min(pixels[0], MAX_IMAGE_TOKENS * factor**2)),
        max_pixels=max(factor**2, min(pixels[1], MAX_IMAGE_TOKENS * factor**2)),
        mean=mean,
        std=std,
        image_token=config.top.integer("image_token_id", 0, MAX_VOCAB, 248056),
        axes=_axes(config, rope),
        nbytes=sum(info.nbytes for name, info in config.checkpoint.tensors.items() if name.startswith(start)),
    )
    if facts.outputs != config.hidden_size:
        raise own.fail("out_hidden_size", f"is {facts.outputs}, the decoder's hidden_size {config.hidden_size}")
    is_known = facts.image_token < config.vocab_size and len(facts.axes) == rope.dim // 2
    return facts if is_known else None


def _axes(config: HfConfig, rope: RopeFacts) -> tuple[int, ...]:
    """By which axis each pair turns: every third by row and by column, or one section after the other."""
    values = object_of(config.given, "rope_scaling") | object_of(config.given, "rope_parameters")
    sections = values.get("mrope_section", _SECTIONS)
    half = rope.dim // 2
    if not isinstance(sections, list) or len(sections) != 3 or not all(type(n) is int and n >= 0 for n in sections):
        raise config.keys.fail("rope_parameters.mrope_section", "must list three numbers")
    if values.get("mrope_interleaved", True):
        return tuple(next((a for a in (1, 2) if pair % 3 == a and pair < 3 * sections[a]), 0) for pair in range(half))
    return tuple(axis for axis, count in enumerate(sections) for _ in range(count))


def _processing(checkpoint: Checkpoint) -> tuple[tuple[int, int], Any, Any]:
    """(the least and the most pixels), means and deviations of the colours, as the processor's file says."""
    fields = image_processor(checkpoint)
    size = below(fields, "size")
    least = size.integer("shortest_edge", 1, 1 << 30, fields.integer("min_pixels", 1, 1 << 30, MIN_PIXELS))
    most = size.integer("longest_edge", 1, 1 << 30, fields.integer("max_pixels", 1, 1 << 30, MAX_PIXELS))
    colours = []
    for name in ("image_mean", "image_std"):
        stated = fields.raw(name)
        numbers = [SHARE] * 3 if stated is None else stated
        if not isinstance(numbers, list) or len(numbers) != 3 or not all(type(n) in (int, float) for n in numbers):
            raise fields.fail(name, "must list three numbers")
        colours.append(tuple(map(float, numbers)))
    if min(map(abs, colours[1])) < 1e-6:
        raise fields.fail("image_std", "has a number that is 0")
    return (least, max(least, most)), colours[0], colours[1]

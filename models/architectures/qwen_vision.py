"""The tower of Qwen3-VL's and Qwen3.5's files: `vision_config`, `preprocessor_config.json`, the decoder's sections."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_LAYERS, MAX_VOCAB, Fields

from .hf import Described, HfConfig, below, object_of
from .names import NameMap
from .vision import MAX_IMAGE_TOKENS, GridFacts

_END = "patch_embed.proj.weight"
SECTIONS = [11, 11, 10]  # pairs that turn by time, row and column, where files do not say it
VL_SECTIONS = [24, 20, 20]  # Qwen3-VL's, which turns whole heads
MIN_PIXELS, MAX_PIXELS = 1 << 16, 1 << 24  # what files without a processor's configuration mean
SHARE = 0.5  # mean and deviation of a colour, where they are not stated


def grid_parts(checkpoint: Checkpoint) -> dict[str, str]:
    """What the tower's tensors begin with; {} where the file has the text model only."""
    start = next((name.removesuffix(_END) for name in checkpoint.tensors if name.endswith(_END)), None)
    return {} if start is None else {"vision.": start}


def with_grid(names: NameMap, checkpoint: Checkpoint) -> NameMap:
    """With what the tower's tensors begin with in safetensors."""
    return names if checkpoint.kind == "gguf" else replace(names, parts={**names.parts, **grid_parts(checkpoint)})


def grid_vision(given: Described | None, axes: tuple[int, ...]) -> GridFacts | None:
    """The tower, where files have one that is computed here; limits are far above those of published models.

    axes   as in `GridFacts`
    """
    if given is None:
        return None
    own = below(given.top, "vision_config")
    if own.text("hidden_act", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        return None  # another function: the text part runs
    hidden, heads = own.integer("hidden_size", 4, 1 << 14, 1152), own.integer("num_heads", 1, 1 << 10, 16)
    if hidden % (4 * heads):
        raise own.fail("hidden_size", f"is {hidden}, no multiple of 4 for each of {heads} heads")
    patch, merge = own.integer("patch_size", 1, 1 << 8, 16), own.integer("spatial_merge_size", 1, 16, 2)
    places = own.integer("num_position_embeddings", 1, 1 << 20, 2304)
    if math.isqrt(places) ** 2 != places:
        raise own.fail("num_position_embeddings", f"is {places}, no square number")
    factor, depth = patch * merge, own.integer("depth", 1, MAX_LAYERS, 27)
    taps = own.raw("deepstack_visual_indexes") or []
    if not isinstance(taps, list) or not all(type(n) is int and 0 <= n < depth for n in taps):
        raise own.fail("deepstack_visual_indexes", f"must list layers of {depth}")
    if taps != sorted(set(taps)):
        raise own.fail("deepstack_visual_indexes", "must list each layer once, in ascending order")
    parameters = below(own, "rope_parameters")
    pixels, mean, std = _processing(given.processor)
    facts = GridFacts(
        num_layers=depth,
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
        image_token=given.top.integer("image_token_id", 0, MAX_VOCAB, 248056),
        axes=axes,
        nbytes=given.nbytes,
        taps=tuple(taps),
    )
    if facts.outputs != given.hidden_size:
        raise own.fail("out_hidden_size", f"is {facts.outputs}, the decoder's hidden_size {given.hidden_size}")
    return facts if facts.axes and facts.image_token < given.vocab_size else None


def hf_axes(config: HfConfig, half: int, usual: Sequence[int] = SECTIONS) -> tuple[int, ...]:
    """By which axis each of `half` pairs turns: interleaved, or one section after the other; () where these differ."""
    values = object_of(config.given, "rope_scaling") | object_of(config.given, "rope_parameters")
    sections = values.get("mrope_section", list(usual))
    if not isinstance(sections, list) or len(sections) != 3 or not all(type(n) is int and n >= 0 for n in sections):
        raise config.keys.fail("rope_parameters.mrope_section", "must list three numbers")
    if values.get("mrope_interleaved", True):
        return interleaved(sections, half)
    axes = tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    return axes if len(axes) == half else ()


def interleaved(sections: Sequence[int], half: int) -> tuple[int, ...]:
    """Every third pair turns by row and by column, as many as their sections say."""
    return tuple(next((a for a in (1, 2) if pair % 3 == a and pair < 3 * sections[a]), 0) for pair in range(half))


def _processing(fields: Fields) -> tuple[tuple[int, int], Any, Any]:
    """(the least and the most pixels), means and deviations of the colours, as the processor's file says."""
    size = below(fields, "size")
    least = size.integer("shortest_edge", 1, 1 << 30, fields.integer("min_pixels", 1, 1 << 30, MIN_PIXELS))
    most = size.integer("longest_edge", 1, 1 << 30, fields.integer("max_pixels", 1, 1 << 30, MAX_PIXELS))
    return (least, max(least, most)), *colours(fields, [SHARE] * 3, [SHARE] * 3)


def colours(fields: Fields, mean: list[float], std: list[float]) -> tuple[Any, Any]:
    """Means and deviations of the colours as the processor's file says, else these."""
    found = []
    for name, usual in (("image_mean", mean), ("image_std", std)):
        stated = fields.raw(name)
        numbers = usual if stated is None else stated
        if not isinstance(numbers, list) or len(numbers) != 3 or not all(type(n) in (int, float) for n in numbers):
            raise fields.fail(name, "must list three numbers")
        found.append(tuple(map(float, numbers)))
    if min(map(abs, found[1])) < 1e-6:
        raise fields.fail("image_std", "has a number that is 0")
    return found[0], found[1]

"""Vision facts of Qwen2.5-VL, Qwen3-VL and Qwen3.5, from `vision_config`, the processor and the M-RoPE sections."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import MAX_LAYERS, MAX_VOCAB, Fields

from .hf import Described, HfConfig, below, object_of
from .names import NameMap
from .vision import MAX_IMAGE_TOKENS, GridFacts

_END = "patch_embed.proj.weight"
_GATED_MERGER = {"merger.norm": "merger.ln_q", "merger.linear_fc1": "merger.mlp.0", "merger.linear_fc2": "merger.mlp.2"}
SECTIONS = [11, 11, 10]  # default number of pairs that rotate by time, row and column
VL_SECTIONS = [24, 20, 20]  # of Qwen3-VL, which rotates whole heads
GATED_SECTIONS = [16, 24, 24]  # of Qwen2.5-VL, one section after another
# defaults of a tower's configuration: re-saved files contain only values that differ
TOWER: dict[str, Any] = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}
TOWER |= {"patch_size": 16}
DEEP_TOWER = TOWER | {"deepstack_visual_indexes": [8, 16, 24]}  # of Qwen3-VL
GATED_TOWER = TOWER | {"depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "patch_size": 14}
GATED_TOWER |= {"fullatt_block_indexes": [7, 15, 23, 31]}  # of Qwen2.5-VL
MIN_PIXELS, MAX_PIXELS = 1 << 16, 1 << 24  # defaults for files without a processor configuration
HALF = [0.5] * 3  # default means and deviations of the colours
CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]  # of Qwen2.5-VL


def grid_parts(checkpoint: Checkpoint) -> dict[str, str]:
    """The name prefixes of the tower; {} if the file has only the text model."""
    start = next((name.removesuffix(_END) for name in checkpoint.tensors if name.endswith(_END)), None)
    if start is None:
        return {}
    own = _GATED_MERGER if f"{start}merger.ln_q.weight" in checkpoint.tensors else {}
    return {f"vision.{name}": f"{start}{stored}" for name, stored in own.items()} | {"vision.": start}


def with_grid(names: NameMap, checkpoint: Checkpoint) -> NameMap:
    """Add the name prefixes of the tower in safetensors."""
    return names if checkpoint.kind == "gguf" else replace(names, parts={**names.parts, **grid_parts(checkpoint)})


def grid_vision(
    described: Described | None, axes: tuple[int, ...], usual: Mapping[str, Any] = TOWER, *, gated: bool = False
) -> GridFacts | None:
    """The tower, if the files have a supported one; the limits are far above published models.

    axes, gated   as in `GridFacts`
    usual         defaults for keys that the file may omit
    """
    if described is None:
        return None
    own = below(described.top, "vision_config")
    stated = {key: value for key, value in own.values.items() if value is not None}
    own = Fields(own.path, {own.prefix + key: value for key, value in usual.items()} | stated, own.prefix)
    act = "silu" if gated else "gelu_pytorch_tanh"
    if own.text("hidden_act", act) != act:
        return None  # unsupported activation: run the text model only
    hidden, heads = own.integer("hidden_size", 4, 1 << 14), own.integer("num_heads", 1, 1 << 10)
    if hidden % (4 * heads):
        raise own.fail("hidden_size", f"is {hidden}, not a multiple of 4 for each of {heads} heads")
    patch, merge = own.integer("patch_size", 1, 1 << 8), own.integer("spatial_merge_size", 1, 16, 2)
    places = 0 if gated else own.integer("num_position_embeddings", 1, 1 << 20, 2304)
    if math.isqrt(places) ** 2 != places:
        raise own.fail("num_position_embeddings", f"is {places}, not a square number")
    factor, depth = patch * merge, own.integer("depth", 1, MAX_LAYERS)
    taps = () if gated else _layers(own, "deepstack_visual_indexes", depth)
    window = own.integer("window_size", 1, 1 << 16, 112) // factor if gated else 0
    if gated and not window:
        raise own.fail("window_size", f"is smaller than one square of {factor} x {factor} pixels")
    parameters = below(own, "rope_parameters")
    pixels = _pixels(described.processor)
    mean, std = colours(described.processor, *((CLIP_MEAN, CLIP_STD) if gated else (HALF, HALF)))
    facts = GridFacts(
        num_layers=depth,
        hidden=hidden,
        inner=own.integer("intermediate_size", 1, 1 << 16),
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
        image_token=described.top.integer("image_token_id", 0, MAX_VOCAB, 248056),
        axes=axes,
        nbytes=described.nbytes,
        taps=taps,
        gated=gated,
        window=window,
        whole=_layers(own, "fullatt_block_indexes", depth) if gated else (),
    )
    if facts.outputs != described.hidden_size:
        raise own.fail(
            "out_hidden_size", f"is {facts.outputs}, but the decoder's hidden_size is {described.hidden_size}"
        )
    return facts if facts.axes and facts.image_token < described.vocab_size else None


def _layers(own: Fields, key: str, depth: int) -> tuple[int, ...]:
    """Read a list of tower layer numbers."""
    stated = own.raw(key) or []
    if not isinstance(stated, list) or not all(type(n) is int and 0 <= n < depth for n in stated):
        raise own.fail(key, f"must list layer numbers from 0 to {depth - 1}")
    if stated != sorted(set(stated)):
        raise own.fail(key, "must list each layer once, in ascending order")
    return tuple(stated)


def hf_axes(config: HfConfig, half: int, usual: Sequence[int] = SECTIONS, *, in_turn: bool = True) -> tuple[int, ...]:
    """The axis by which each of `half` pairs rotates, interleaved or in sections; () if the sections do not add up.

    in_turn   whether they are interleaved by default
    """
    values = object_of(config.given, "rope_scaling") | object_of(config.given, "rope_parameters")
    sections = values.get("mrope_section", list(usual))
    if not isinstance(sections, list) or len(sections) != 3 or not all(type(n) is int and n >= 0 for n in sections):
        raise config.keys.fail("rope_parameters.mrope_section", "must list three numbers")
    if values.get("mrope_interleaved", in_turn):
        return interleaved(sections, half)
    return in_sections(sections, half)


def in_sections(sections: Sequence[int], half: int) -> tuple[int, ...]:
    """Axes of pairs in sections: by time, then by row, then by column; () if they are not `half` pairs."""
    axes = tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    return axes if len(axes) == half else ()


def interleaved(sections: Sequence[int], half: int) -> tuple[int, ...]:
    """Interleaved axes: every third pair rotates by row or by column, up to the size of their sections."""
    return tuple(next((a for a in (1, 2) if pair % 3 == a and pair < 3 * sections[a]), 0) for pair in range(half))


def _pixels(fields: Fields) -> tuple[int, int]:
    """The minimum and maximum pixels of an image from the processor configuration; old key names take precedence."""
    size = below(fields, "size")
    least = fields.integer("min_pixels", 1, 1 << 30, size.integer("shortest_edge", 1, 1 << 30, MIN_PIXELS))
    most = fields.integer("max_pixels", 1, 1 << 30, size.integer("longest_edge", 1, 1 << 30, MAX_PIXELS))
    return least, max(least, most)


def colours(fields: Fields, mean: list[float], std: list[float]) -> tuple[Any, Any]:
    """Means and deviations of the colours from the processor configuration, defaulting to these."""
    found = []
    for name, usual in (("image_mean", mean), ("image_std", std)):
        stated = fields.raw(name)
        numbers = usual if stated is None else stated
        if not isinstance(numbers, list) or len(numbers) != 3 or not all(type(n) in (int, float) for n in numbers):
            raise fields.fail(name, "must list three numbers")
        found.append(tuple(map(float, numbers)))
    if min(map(abs, found[1])) < 1e-6:
        raise fields.fail("image_std", "must not contain 0")
    return found[0], found[1]

"""Exact slices of a canonical weight: by rows, or by columns if groups, blocks and packed codes allow it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from localllm.kernels import Weight
from localllm.kernels.dequant import FP8_BLOCK
from localllm.kernels.gguf_blocks import BLOCK_TYPES


def rows_of(weight: Weight, ranges: Sequence[range]) -> Weight | None:
    """The weight's rows in these ranges, concatenated; None if they share scales with other rows."""
    n = weight.shape[0]
    parts = {name: getattr(weight, name) for name in ("qweight", "scales", "zeros", "mins", "global_scale")}
    found = {name: _picked(part, ranges, 0) for name, part in parts.items() if part is not None and len(part) == n}
    scales = weight.scales
    if _has_blocks(weight) and scales is not None and scales.shape[0] != n:
        ends = {edge for one in ranges for edge in (one.start, one.stop) if edge != n}
        inner = [one for one in ranges if one is not ranges[-1]]
        if any(edge % FP8_BLOCK for edge in ends) or any(len(one) % FP8_BLOCK for one in inner):
            return None
        found["scales"] = _picked(scales, [range(r.start // FP8_BLOCK, -(-r.stop // FP8_BLOCK)) for r in ranges], 0)
    return weight._replace(shape=(sum(map(len, ranges)), weight.shape[1]), **found)


def columns_of(weight: Weight, of_ranks: Sequence[Sequence[range]], rank: int) -> Weight | None:
    """The weight's columns in the ranges of one rank; None if any rank's columns share scales with another's, or if the
    inputs are reordered.
    """
    k, unit = weight.shape[1], column_unit(weight)
    edges = {edge for ranges in of_ranks for one in ranges for edge in (one.start, one.stop)}
    if weight.perm is not None or any(edge % unit and edge != k for edge in edges):
        return None
    ranges, wide = of_ranks[rank], k
    found: dict[str, Tensor] = {}
    for name in ("qweight", "scales", "zeros", "mins"):
        part = getattr(weight, name)
        if part is None or part.dim() < 2 or part.shape[1] == 1:
            continue
        if name == "qweight":
            of, per = _code_units(weight)
        else:
            of, per = weight.group_size or FP8_BLOCK, 1
        scaled = [range(one.start // of * per, -(-one.stop // of) * per) for one in ranges]
        found[name] = _picked(part, scaled, 1)
    if weight.pre_scale is not None:
        found["pre_scale"] = _picked(weight.pre_scale, ranges, 0)
    count = sum(map(len, ranges))
    size = count if weight.group_size == wide else weight.group_size
    return weight._replace(shape=(weight.shape[0], count), group_size=size, **found)


def column_unit(weight: Weight) -> int:
    """Columns that must stay together."""
    codes = _code_units(weight)[0]
    has_groups = weight.scales is not None and weight.scales.dim() == 2 and weight.scales.shape[1] > 1
    return max(codes, weight.group_size) if has_groups or weight.form == "gguf" else codes


def _code_units(weight: Weight) -> tuple[int, int]:
    """The smallest unit of codes: (columns, elements of `qweight`)."""
    if weight.form == "gguf":
        layout = BLOCK_TYPES[weight.block_type]
        return layout.elems, layout.nbytes
    return (2, 1) if weight.form in ("int4g", "fp4g16", "fp4g32") else (1, 1)


def _has_blocks(weight: Weight) -> bool:
    scales = weight.scales
    return weight.form == "fp8" and scales is not None and scales.dim() == 2 and scales.shape[1] > 1


def _picked(part: Tensor, ranges: Sequence[range], dim: int) -> Tensor:
    """Slices of `part`, concatenated; a single range of rows stays a view."""
    found = [part.narrow(dim, one.start, len(one)) for one in ranges]
    return (found[0] if len(found) == 1 else torch.cat(found, dim)).contiguous()

"""Exact fusion of weights with the same input (q/k/v, gate/up) along N, and exact reordering of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from localllm.kernels import Weight
from localllm.kernels.dequant import FP8_BLOCK


def fuse(weights: Sequence[Weight], take: Callable[[int], Tensor] | None = None) -> Weight | None:
    """Stack weights along N exactly; None if that is impossible: form, K, groups or input order differ.

    take   allocates uint8 [count] for the codes, on their device; None: a new tensor

    NVFP4 keeps its global scale per row; per-tensor FP8 scales become per-row scales.
    """
    first = weights[0]
    for other in weights[1:]:
        inputs = ((first.perm, other.perm), (first.pre_scale, other.pre_scale))
        if _kind(other) != _kind(first) or not all(_same_input(a, b) for a, b in inputs):
            return None
    if len(weights) == 1:
        return first
    parts: dict[str, Any] = {
        "scales": _fp8_scales(weights) if first.form == "fp8" else _stacked([w.scales for w in weights]),
        "zeros": _zeros(weights),
        "mins": _stacked([w.mins for w in weights]),
        "global_scale": _stacked([w.global_scale for w in weights]),
    }
    if any(part is None and any(getattr(w, name) is not None for w in weights) for name, part in parts.items()):
        return None
    shape = (sum(w.shape[0] for w in weights), first.shape[1])
    codes = [w.qweight for w in weights]
    if take is None:
        return first._replace(shape=shape, qweight=torch.cat(codes), **parts)
    stacked = take(sum(map(_nbytes, codes))).view(first.qweight.dtype).view(-1, *first.qweight.shape[1:])
    return first._replace(shape=shape, qweight=torch.cat(codes, out=stacked), **parts)


def reordered(weight: Weight, order: Tensor) -> Weight | None:
    """The weight with row `order[n]` as row n; None if rows with different scales would have to share one.

    order   int64 [N], a permutation of the rows
    """
    n = weight.shape[0]
    parts = {name: getattr(weight, name) for name in ("qweight", "scales", "zeros", "mins", "global_scale")}
    blocks = parts["scales"]
    if weight.form == "fp8" and blocks is not None and blocks.numel() > 1 and blocks.shape != (n, 1):
        firsts = order[::FP8_BLOCK] // FP8_BLOCK
        spread = firsts.repeat_interleave(FP8_BLOCK)[:n]
        if not torch.equal(blocks[order // FP8_BLOCK], blocks[spread]):
            return None
        del parts["scales"]
        weight = weight._replace(scales=blocks[firsts])
    rows = {name: part[order] for name, part in parts.items() if part is not None and part.shape[:1] == (n,)}
    return weight._replace(**rows)


def multiplied(weight: Weight, factors: Tensor) -> Weight | None:
    """The weight with row n multiplied by `factors[n]`; None if rows with different factors share scales, or if scales
    are powers of two. Dense values are rounded to their type again.

    factors   float32 [N]
    """
    each = factors.unsqueeze(-1)
    if weight.form == "dense":
        return weight._replace(qweight=(weight.qweight * each).to(weight.qweight.dtype))
    if weight.form == "fp4g16" and weight.global_scale is not None:
        return weight._replace(global_scale=weight.global_scale * factors)
    scales, mins = weight.scales, weight.mins
    is_one = bool((factors == factors[0]).all())
    if weight.form not in ("int4g", "int8", "fp8") or scales is None:
        return None
    if weight.form == "fp8" and scales.shape != (len(factors), 1) and not is_one:
        if scales.numel() > 1:
            return None
        scales = scales.expand(len(factors), 1)
    each = factors[0] if is_one else each
    return weight._replace(
        scales=(scales * each).to(scales.dtype), mins=None if mins is None else (mins * each).to(mins.dtype)
    )


def _kind(weight: Weight) -> tuple[object, ...]:
    """The properties that must match to fuse two weights."""
    return weight.form, weight.shape[1], weight.group_size, weight.block_type, weight.qweight.dtype


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _same_input(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _stacked(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Concatenate along N; None if some are absent or their widths differ. Mixed float dtypes widen exactly to f32."""
    present = [part for part in parts if part is not None]
    if len(present) < len(parts) or len({part.shape[1:] for part in present}) > 1:
        return None
    if len({part.dtype for part in present}) > 1:
        present = [part.float() for part in present]
    return torch.cat(present)


def _zeros(weights: Sequence[Weight]) -> Tensor | None:
    """The stacked zeros. An `int4g` without zeros means 8 everywhere, which is filled in if another weight has some."""
    zeros = [w.zeros for w in weights]
    if any(part is not None for part in zeros) and all(w.mins is None for w in weights):
        eights = [None if w.scales is None else torch.full(w.scales.shape, 8, dtype=torch.uint8) for w in weights]
        zeros = [eight if part is None else part for part, eight in zip(zeros, eights, strict=True)]
    return _stacked(zeros)


def _fp8_scales(weights: Sequence[Weight]) -> Tensor | None:
    scales = [w.scales for w in weights if w.scales is not None]
    per_row = [s.numel() == 1 or s.shape == (w.shape[0], 1) for s, w in zip(scales, weights, strict=True)]
    if all(per_row):
        return torch.cat([s.view(-1, 1).expand(w.shape[0], 1) for s, w in zip(scales, weights, strict=True)])
    if any(per_row) or any(w.shape[0] % FP8_BLOCK for w in weights[:-1]):
        return None
    return torch.cat(scales)

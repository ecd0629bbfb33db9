"""Quantize float weights to canonical forms: round to nearest, or compensate errors in later columns (GPTQ).

target      form     group    one scale per                    stored scale
int4        int4g    64       group of 32, 64 or 128           with a zero point; int4-sym without
int8        int8     K        row
fp8         fp8      -        row
fp8-block   fp8      128      128 x 128 block
nvfp4       fp4g16   16       group, E4M3, times one number per tensor
mxfp4       fp4g32   32       group, a power of two

Scales are first rounded to their stored precision, then codes are chosen for the rounded scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels import Weight
from localllm.kernels.dequant import FP8_BLOCK
from localllm.kernels.gguf_blocks import E2M1

from .packing import pack_nibbles

E4M3_MAX = 448.0
E2M1_MAX = 6.0
# clipping ratios to try per group; the least squared error wins. On Gaussian rows with groups of 64 this reduces the
# error of int4 by 3 %
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
# block size of GPTQ: errors propagate within a block, then to the rest of the matrix in one product
COLUMNS_AT_ONCE = 32
DAMPING = 0.01  # share of the mean of the Hessian's diagonal added to the diagonal, as in the GPTQ paper


@dataclass(frozen=True, slots=True)
class Target:
    """The target format of a weight."""

    name: str  # from the table above
    group_size: int = 0
    scale_dtype: torch.dtype = torch.float32  # of the stored int4 and int8 scales

    def __post_init__(self) -> None:
        if self.name not in GROUP_SIZES:
            raise ValueError(f"the format must be one of {', '.join(GROUP_SIZES)}, not {self.name!r}")
        allowed = GROUP_SIZES[self.name]
        if self.group_size == 0:
            object.__setattr__(self, "group_size", allowed[0])
        elif self.group_size not in allowed:
            fixed = f"{self.name} has a fixed group size; it takes none, not {self.group_size}"
            sizes = ", ".join(map(str, sorted(allowed)))
            raise ValueError(
                fixed if len(allowed) == 1 else f"{self.name} has group sizes {sizes}, not {self.group_size}"
            )

    def fits(self, n: int, k: int) -> str | None:
        """None, or why a weight [n, k] is not quantized."""
        group = self.group_size
        if min(n, k) < SMALLEST:
            return f"{n} x {k} has a side below {SMALLEST}"
        if self.name not in ("int8", "fp8", "fp8-block") and (k % group or k % 8):
            return f"{k} inputs are not a multiple of {max(group, 8)}"
        return None


GROUP_SIZES = {  # target -> supported group sizes, default first
    "int4": (64, 32, 128),
    "int4-sym": (64, 32, 128),
    "int8": (0,),
    "fp8": (0,),
    "fp8-block": (FP8_BLOCK,),
    "nvfp4": (16,),
    "mxfp4": (32,),
}
SMALLEST = 64  # quantizing weights with fewer rows or columns gains nothing


class Fit(NamedTuple):
    """Quantization parameters of groups: tensors [..., 1] for elements [..., group]."""

    scale: Tensor  # float32 multiplier of the codes, rounded to its stored precision
    zero: Tensor | None = None  # int4: zero point, the code of 0
    stored: Tensor | None = None  # the scale in its stored form if it differs; E4M3 as bytes


def encode(weight: Tensor, target: Target, *, amax: float | None = None, hessian: Tensor | None = None) -> Weight:
    """Quantize `weight`.

    weight   [N, K], any float type and device
    amax     nvfp4: largest absolute value over all weights that will be fused with this one; None: of this one
    hessian  float32 [K, K], sum of x xᵀ over calibration inputs: later columns compensate the error of each column,
             weighted by it (Frantar et al., GPTQ, 2022). Ignored for int8 and fp8, whose error is already small.

    Raises ValueError if the weight is not finite or its shape does not fit the target.
    """
    n, k = weight.shape
    wide = weight.float()
    if not bool(torch.isfinite(wide).all()):
        raise ValueError("the weight has values that are not finite")
    if target.name == "int8":
        return _int8(wide, target)
    if target.name.startswith("fp8"):
        return _fp8(wide, target)
    if k % target.group_size or k % 2:
        raise ValueError(f"{k} inputs are not a multiple of {target.group_size}")
    alpha = _alpha(wide, amax) if target.name == "nvfp4" else 1.0
    if hessian is None:
        groups = wide.unflatten(-1, (-1, target.group_size))
        fitted = _fit(groups, None, target, alpha)
        codes = _codes(groups, fitted, target).flatten(-2)
    else:
        codes, fitted = _gptq(wide, hessian, target, alpha)
    scales = (fitted.scale if fitted.stored is None else fitted.stored).squeeze(-1)
    packed = pack_nibbles(codes)
    shape, group = (n, k), target.group_size
    if target.name == "mxfp4":
        return Weight("fp4g32", shape, packed, scales, group_size=group)
    if target.name == "nvfp4":
        per_row = torch.full((n,), alpha, dtype=torch.float32, device=weight.device)
        scales = scales.view(torch.float8_e4m3fn)
        return Weight("fp4g16", shape, packed, scales, global_scale=per_row, group_size=group)
    zeros = None if fitted.zero is None else fitted.zero.squeeze(-1).to(torch.uint8)
    return Weight("int4g", shape, packed, scales, zeros, group_size=group)


def e2m1_codes(x: Tensor) -> Tensor:
    """Nearest E2M1 code of every element, ties to even: u8 0..15 with the sign in bit 3. Values beyond 6 saturate."""
    size = x.abs()
    codes = torch.zeros_like(size, dtype=torch.uint8)
    for border in (0.25, 1.25, 2.5, 5.0):
        codes += size > border
    for border in (0.75, 1.75, 3.5):
        codes += size >= border
    return codes | ((x < 0) & (codes > 0)).to(torch.uint8) << 3


def relative_error(weight: Tensor, decoded: Tensor) -> float:
    """‖decoded - weight‖ / ‖weight‖, as a smoke test: a value far above 0.12 means that something is wrong."""
    wide = weight.float()
    return float((decoded - wide).norm() / wide.norm().clamp(min=1e-30))


def _alpha(wide: Tensor, amax: float | None) -> float:
    largest = float(wide.abs().amax()) if amax is None else amax
    return max(largest / (E2M1_MAX * E4M3_MAX), 1e-30)


def _rounded(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales rounded to `dtype`, as float32; never zero, which would turn a group of zeros into NaN."""
    least = 2.0**-24 if dtype is torch.float16 else 1e-10  # the smallest positive half-precision number
    return scale.clamp(least, torch.finfo(dtype).max).to(dtype).float()


def _int8(wide: Tensor, target: Target) -> Weight:
    k = wide.shape[1]
    scale = _rounded(wide.abs().amax(-1, keepdim=True) / 127, target.scale_dtype).to(target.scale_dtype)
    codes = torch.round(wide / scale.float()).clamp(-127, 127).to(torch.int8)
    return Weight("int8", tuple(wide.shape), codes, scale, group_size=k)


def _fp8(wide: Tensor, target: Target) -> Weight:
    shape = (wide.shape[0], wide.shape[1])
    if target.name == "fp8":
        scale = (wide.abs().amax(-1, keepdim=True) / E4M3_MAX).clamp(min=1e-12)
        return Weight("fp8", shape, _e4m3(wide / scale), scale)
    n, k = shape
    padded = functional.pad(wide, (0, -k % FP8_BLOCK, 0, -n % FP8_BLOCK))
    tiles = padded.view(padded.shape[0] // FP8_BLOCK, FP8_BLOCK, -1, FP8_BLOCK)
    scale = tiles.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / E4M3_MAX
    codes = _e4m3((tiles / scale).view(padded.shape)[:n, :k]).contiguous()
    return Weight("fp8", shape, codes, scale.view(scale.shape[0], -1).contiguous(), group_size=FP8_BLOCK)


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _fit(groups: Tensor, importance: Tensor | None, target: Target, alpha: float) -> Fit:
    """Fit the scales of groups [..., group]; `importance` [..., group] weights their errors."""
    if target.name == "nvfp4":
        return _fit_nvfp4(groups, importance, alpha)
    return _fit_mxfp4(groups) if target.name == "mxfp4" else _fit_int4(groups, importance, target)


def _codes(groups: Tensor, fit: Fit, target: Target) -> Tensor:
    if target.name in ("nvfp4", "mxfp4"):
        return e2m1_codes(groups / fit.scale)
    zero = 8.0 if fit.zero is None else fit.zero
    return (torch.round(groups / fit.scale) + zero).clamp(0, 15).to(torch.uint8)


def _values(codes: Tensor, fit: Fit, target: Target) -> Tensor:
    if target.name in ("nvfp4", "mxfp4"):
        return _e2m1(codes.device).index_select(0, codes.flatten().int()).view(codes.shape) * fit.scale
    return (codes.float() - (8.0 if fit.zero is None else fit.zero)) * fit.scale


@cache
def _e2m1(device: torch.device) -> Tensor:
    return torch.tensor(E2M1, dtype=torch.float32, device=device)


def _error(groups: Tensor, fit: Fit, target: Target, importance: Tensor | None) -> Tensor:
    """Squared error per group, [..., 1]."""
    error = (_values(_codes(groups, fit, target), fit, target) - groups).square_()
    return (error if importance is None else error.mul_(importance)).sum(-1, keepdim=True)


def _best(groups: Tensor, fits: list[Fit], target: Target, importance: Tensor | None) -> Fit:
    """For each group, the fit with the least squared error; ties go to the earlier fit."""
    least = torch.stack([_error(groups, fit, target, importance) for fit in fits]).argmin(0, keepdim=True)
    fields = zip(*fits, strict=True)
    return Fit(*(None if field[0] is None else torch.stack(field).gather(0, least)[0] for field in fields))


def _fit_int4(groups: Tensor, importance: Tensor | None, target: Target) -> Fit:
    fits = []
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    size = groups.abs().amax(-1, keepdim=True)
    for shrink in SHRINKS:
        if target.name == "int4-sym":
            fits.append(Fit(_rounded(size * shrink / 7.5, target.scale_dtype)))
            continue
        scale = _rounded((high - low) * shrink / 15, target.scale_dtype)
        fits.append(Fit(scale, torch.round(-low * shrink / scale).clamp_(0, 15)))
    best = _best(groups, fits, target, importance)
    return best._replace(stored=best.scale.to(target.scale_dtype))


def _fit_nvfp4(groups: Tensor, importance: Tensor | None, alpha: float) -> Fit:
    """Map a group's largest value to 6, or to 4 if the error is lower, because the codes 4 and 6 are far apart."""
    size = groups.abs().amax(-1, keepdim=True)
    fits = []
    for top in (6.0, 4.0):
        stored = (size / (top * alpha)).clamp(2.0**-9, E4M3_MAX).to(torch.float8_e4m3fn)
        fits.append(Fit(stored.float() * alpha, None, stored.view(torch.uint8)))
    return _best(groups, fits, Target("nvfp4"), importance)


def _fit_mxfp4(groups: Tensor) -> Fit:
    """The smallest power of two that clips no value."""
    size = groups.abs().amax(-1, keepdim=True)
    exponent = torch.ceil(torch.log2((size / E2M1_MAX).clamp(min=2.0**-126))).clamp(-127, 127)
    return Fit(torch.exp2(exponent), None, (exponent + 127).to(torch.uint8))


def _gptq(wide: Tensor, hessian: Tensor, target: Target, alpha: float) -> tuple[Tensor, Fit]:
    """GPTQ: quantize column by column, and compensate each column's error in the columns after it."""
    n, k = wide.shape
    group = target.group_size
    left = wide.clone()
    upper, importance = _inverse_root(hessian.to(wide.device))
    codes = torch.empty(n, k, dtype=torch.uint8, device=wide.device)
    fits: list[Fit] = []
    for start in range(0, k, COLUMNS_AT_ONCE):
        end = min(start + COLUMNS_AT_ONCE, k)
        lost = torch.zeros(n, end - start, device=wide.device)
        for column in range(start, end):
            if column % group == 0:
                part = slice(column, column + group)
                fits.append(_fit(left[:, part], importance[part], target, alpha))
            value = left[:, column : column + 1]
            code = _codes(value, fits[-1], target)
            codes[:, column : column + 1] = code
            error = (value - _values(code, fits[-1], target)) / upper[column, column]
            left[:, column + 1 : end] -= error * upper[column, column + 1 : end]
            lost[:, column - start : column - start + 1] = error
        left[:, end:] -= lost @ upper[start:end, end:]

    stacked = [None if parts[0] is None else torch.stack(parts, 1) for parts in zip(*fits, strict=True)]
    return codes, Fit(*stacked)  # type: ignore[arg-type]


def _inverse_root(hessian: Tensor) -> tuple[Tensor, Tensor]:
    """Upper Cholesky factor of the damped inverse [K, K], and the Hessian's diagonal [K] as error weights.

    An input that was always zero gets a diagonal of 1, so its column is rounded independently. Damping increases until
    the factor exists.
    """
    damped = hessian.float().clone()
    diagonal = damped.diagonal()
    diagonal[diagonal == 0] = 1.0
    importance = diagonal.clone()
    mean = float(importance.mean())
    for attempt in range(6):
        diagonal += DAMPING * mean * (10**attempt if attempt else 1)
        root, failed = torch.linalg.cholesky_ex(damped)
        if int(failed) == 0:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(root), upper=True)
            if int(failed) == 0 and bool(torch.isfinite(upper).all()):
                return upper, importance
    raise ValueError("the calibration text gives no usable Hessian; use another text, or none")

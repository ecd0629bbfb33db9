"""Which product kernel runs for how many rows of x, and with what: launches are built here, for use and for the table.

one row            `gemv`: a program per few rows of W
2 to 255 rows      `gemm`: tensor cores, W decoded in registers (dense weights: cuBLAS from 17 rows)
more               `dequantize` into a slab that stays in the L2 cache, then cuBLAS
below sm_80        Triton has no tensor cores there: `gemv` for up to 4 rows, else the slab

On paper (nothing here ran on a card yet), products of one row of an 8B model's layer, 218 M weights: qkv 6144 x 4096, o
4096 x 4096, gate and up 28672 x 4096, down 4096 x 14336. Bytes at the nominal bandwidth, what the model of
`product_tiles` makes of instructions, residency and waves without launches, and their ratio; registers as compiled.

                    H100, 3.35 TB/s                                RTX 5090, 1.79 TB/s
    bf16            130 us  145 us  0.90   57..117 registers       244 us  261 us  0.93   37..56
    FP8 row          65 us   81 us  0.80   80..128                 122 us  139 us  0.88   42..74
    int4, g 128      34 us   45 us  0.75   80..122 (51 us)          63 us   75 us  0.84   60..74
    Q4_K             38 us   45 us  0.85   95..128 (51 us)          70 us   75 us  0.94   48..96
    NVFP4            37 us   58 us  0.63   95..168 (66 us)          69 us   77 us  0.90   52..117

Programs: 512 to 7168 of one to four warps, 8 to 36 warps resident on a multiprocessor, 4 to 16 KB asked for by each
at a time. A copy reaches some nine tenths of the nominal bandwidth, so MBU is to be expected a tenth higher. With four
bits a weight an H100 at full bandwidth can issue 4.4 instructions for each: in float32 `gemv` needs 3 to 5 and the
time in brackets, in whole numbers (`fixed.py`) 2.6 to 3.6, and `gemm`, a candidate for one row as well, 2 to 3. No
other card is near that bound.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dense_linear import gathered
from ..layer_weights import Norm
from ..verify.tuning import Shape, Tile, tuner
from . import dequantize, gemm, gemv
from .cards import Card
from .launch import Launch, card_of, interpreting, overlap
from .layout import Prepared
from .layout_codes import CODES
from .product_tiles import SMALL_TOKENS, gemm_tiles, may_be_fixed, one_row_tiles, token_class

SLAB_BYTES = 32 << 20  # dense rows decoded at a time: what the plan reserves for long prompts
SLAB_TOKENS = 256  # from so many rows of x weights are decoded once for all of them; not measured
ROWS_WITHOUT_TENSOR_CORES = 4
NATIVE = {torch.bfloat16: "bf16", torch.float16: "f16"}
WHOLE_ROW = 1 << 20  # the group size that stands for one scale a row
CUBLAS: Tile = {"cublas": 1}  # the candidate of dense weights that is no kernel of ours
FIXED_TOKENS = 16  # rows of x in a tile when every row must be summed the same way


class Extras(NamedTuple):
    """What a product does besides: y = act(...)(norm(x) Wᵀ + bias) + residual."""

    bias: Tensor | None = None
    norm: Norm | None = None
    residual: Tensor | None = None
    gate: str = ""  # silu or gelu_tanh: W is gate over up, y = act(gate) * up


PLAIN = Extras()


def product(
    x: Tensor, p: Prepared, extras: Extras = PLAIN, *, out: Tensor | None = None, fixed_order: bool = False
) -> Tensor:
    """x [num_tokens, K] times the weight: [num_tokens, N], or [num_tokens, N / 2] where gated; dtype of x.

    out           where to put it, in its own dtype; may be `extras.residual`; only where `fusable`
    fixed_order   every row is summed in the same order, however many there are

    Raises ValueError when x does not have K columns; norm, gate and residual want `fusable`.
    """
    if x.dim() != 2 or x.shape[1] != p.shape[1]:
        raise ValueError(f"x has shape {tuple(x.shape)}, the weight takes {p.shape[1]} inputs")
    x = gathered(x, p.perm, p.pre_scale)
    if p.is_float32:
        return torch.nn.functional.linear(x.float(), p.low, extras.bias).to(x.dtype)
    x = x.contiguous()
    n, tokens = p.shape[0] // (2 if extras.gate else 1), x.shape[0]
    if out is None:
        out = torch.empty(tokens, n, dtype=x.dtype, device=x.device)
    card = card_of(x.device)
    if fixed_order:
        choice = gemm_tiles(*p.shape, p.code, FIXED_TOKENS, card, whole=True)[0]
        gemm_launch(x, p, out, extras, choice).start()
    elif tokens == 1 or (card.capability < 80 and tokens <= ROWS_WITHOUT_TENSOR_CORES):
        choice = _picked(x, p, extras, card)
        build = gemv_launch if "chunks" in choice else gemm_launch
        build(x, p, out, extras, choice).start()
    elif tokens >= SLAB_TOKENS or card.capability < 80 or (_is_plain(x, p) and tokens > SMALL_TOKENS):
        _slab_product(x, p, out, extras.bias)
    else:
        choice = _picked(x, p, extras, card)
        if choice is CUBLAS:
            _slab_product(x, p, out, extras.bias)
        else:
            gemm_launch(x, p, out, extras, choice).start()
    return out


def linear(x: Tensor, p: Prepared, bias: Tensor | None = None, *, fixed_order: bool = False) -> Tensor:
    """x Wᵀ + bias."""
    return product(x, p, Extras(bias), fixed_order=fixed_order)


def fusable(x: Tensor, p: Any) -> bool:
    """Whether norm, gate and residual may be part of the product: few rows, x read as it is, float32 inside."""
    if not isinstance(p, Prepared) or p.perm is not None or p.pre_scale is not None or p.is_float32:
        return False
    if x.shape[0] == 1:
        return True
    # in float16 the product of x and the norm's weight may overflow before it is divided by the root mean square
    return x.shape[0] <= SMALL_TOKENS and x.dtype == torch.bfloat16 and card_of(x.device).capability >= 80


def _is_plain(x: Tensor, p: Prepared) -> bool:
    """A matrix of x's own type, which cuBLAS reads as it lies."""
    return p.code == NATIVE.get(x.dtype) and p.low.shape[1] == p.shape[1]


# ---- launches


def _pointers(p: Prepared) -> dict[str, Tensor]:
    """The weight's tensors by the kernels' names; what it lacks is not read there."""
    names = ("scale_ptr", "min_ptr", "super_ptr", "super_min_ptr", "row_scale_ptr")
    parts = (p.scales, p.mins, p.supers, p.super_mins, p.row_scale)
    return {name: p.low if part is None else part for name, part in zip(names, parts, strict=True)}


def _constants(p: Prepared) -> dict[str, Any]:
    kind = CODES[p.code]
    return {
        "K": p.shape[1],
        "CODE": p.code,
        "LOW": kind.low,
        "HIGH": kind.high,
        "SCALE": p.scale_kind,
        "MIN": p.min_kind,
        "ZERO": p.zero,
        "GROUP": p.group if p.scales is not None and p.scales.shape[1] > 1 else WHOLE_ROW,
        "RUN": p.run,
        "SCALE_ROWS": p.scale_rows,
        "ROW_SCALE": p.row_scale is not None,
    }


def _extra_arguments(extras: Extras, nothing: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    norm = extras.norm or Norm(nothing, 0.0)
    given = {"bias_ptr": extras.bias, "norm_ptr": norm.weight, "residual_ptr": extras.residual}
    args: dict[str, Any] = {name: nothing if part is None else part for name, part in given.items()}
    args |= {"eps": float(norm.eps), "norm_offset": float(norm.offset)}
    has = {"BIAS": extras.bias, "NORM": extras.norm, "RESIDUAL": extras.residual}
    return args, {name: part is not None for name, part in has.items()} | {"GATE": extras.gate}


def gemv_launch(x: Tensor, p: Prepared, out: Tensor, extras: Extras, choice: Tile) -> Launch:
    """`gemv.gemv_kernel` for x [num_tokens, K], a row at a time."""
    high = p.low if p.high is None else p.high
    args, constants = _extra_arguments(extras, p.low)
    args |= {
        "x_ptr": x,
        "low_ptr": p.low.view(torch.int32),
        # the high bits that go with a word of two halves: a byte for int5, two for int6 and int3
        "high_ptr": high.view(torch.int16) if p.high is not None and p.code != "int5" else high,
        "out_ptr": out,
        "n": out.shape[1],
        **_pointers(p),
    }
    outputs = choice["rows"] // (2 if extras.gate else 1)
    grid = (-(-out.shape[1] // outputs), x.shape[0])
    constants |= _constants(p) | {
        "ROWS": choice["rows"],
        "CHUNKS": choice["chunks"],
        "FIXED": "" if "fixed" not in choice else "plain" if interpreting() else "assembly",
    }
    pdl, options = overlap(x.device)
    return Launch(gemv.gemv_kernel, grid, args, constants | pdl, choice["warps"], options=options, subnormals=True)


def gemm_launch(x: Tensor, p: Prepared, out: Tensor, extras: Extras, choice: Tile) -> Launch:
    """`gemm.gemm_kernel` for x [num_tokens, K]."""
    rows, tokens, split = choice["rows"], choice["tokens"], choice["split"]
    outputs = rows // (2 if extras.gate else 1)
    grid = (-(-x.shape[0] // tokens), -(-out.shape[1] // outputs), split)
    args, constants = _extra_arguments(extras, p.low)
    partial, counter = x, p.low
    if split > 1:
        partial = torch.empty(grid[0] * grid[1] * split * (rows + 1) * tokens, dtype=torch.float32, device=x.device)
        counter = _counters(x.device)
        if grid[0] * grid[1] > COUNTERS:
            raise ValueError(f"{grid[0] * grid[1]} tiles share a split product, at most {COUNTERS}")
    args |= {
        "x_ptr": x,
        "low_ptr": p.low,
        "high_ptr": p.low if p.high is None else p.high,
        "out_ptr": out,
        "partial_ptr": partial,
        "counter_ptr": counter,
        "m": x.shape[0],
        "n": out.shape[1],
        **_pointers(p),
    }
    constants |= _constants(p) | {
        "OPERAND": "f32" if interpreting() and x.dtype != torch.float16 else NATIVE[x.dtype],
        "PAIRS": not interpreting(),
        "ROWS": rows,
        "TOKENS": tokens,
        "HALVES": choice["halves"],
        "SPLIT": split,
        "STAGES": choice["stages"],
    }
    pdl, options = overlap(x.device)
    # said aloud, since the compiler's own limit of 64 registers made it keep two values in memory (sm_121, M = 16)
    options["maxnreg"] = 168 if tokens <= SMALL_TOKENS else 248
    return Launch(gemm.gemm_kernel, grid, args, constants | pdl, choice["warps"], choice["stages"], options, True)


COUNTERS = 4096  # programs that may take part in split products of one launch


@cache
def _counters(device: torch.device) -> Tensor:
    """int32 zeros, which every kernel leaves as zeros: one set a card, products of one stream at a time."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def dequantize_launch(p: Prepared, first_row: int, out: Tensor) -> Launch:
    """`dequantize.dequantize_kernel`: rows first_row.. of the weight into out [rows, K]."""
    kind = CODES[p.code]
    rows, halves = 4, 128 if kind.planes <= 4 else 64
    in_row = p.low.shape[1]
    args = {
        "low_ptr": p.low,
        "high_ptr": p.low if p.high is None else p.high,
        "out_ptr": out,
        "first_row": first_row,
        "num_rows": out.shape[0],
        **_pointers(p),
    }
    grid = (-(-out.shape[0] // rows), -(-in_row // halves))
    constants = _constants(p) | {"ROWS": rows, "HALVES": halves}
    return Launch(dequantize.dequantize_kernel, grid, args, constants, subnormals=True)


def dequantized(p: Prepared, first_row: int, num_rows: int, dtype: torch.dtype) -> Tensor:
    """Rows of the weight as a dense matrix [num_rows, K], in stored column order and rounded to `dtype`."""
    if _is_plain(torch.empty(0, dtype=dtype), p):
        return p.low[first_row : first_row + num_rows].view(dtype)
    out = torch.empty(num_rows, p.shape[1], dtype=dtype, device=p.low.device)
    dequantize_launch(p, first_row, out).start()
    return out


def _slab_product(x: Tensor, p: Prepared, out: Tensor, bias: Tensor | None) -> None:
    n, k = p.shape
    step = n if _is_plain(x, p) else max(128, SLAB_BYTES // (k * x.element_size()) // 128 * 128)
    for first in range(0, n, step):
        part = slice(first, min(first + step, n))
        slab = dequantized(p, first, part.stop - first, x.dtype)
        if bias is None:
            torch.mm(x, slab.t(), out=out[:, part])
        else:
            torch.addmm(bias[part].to(x.dtype), x, slab.t(), out=out[:, part])


# ---- the choice of constants


def _picked(x: Tensor, p: Prepared, extras: Extras, card: Card) -> Tile:
    """The constants for this shape: the winner on this card, or what the model expects to be best."""
    n, k = p.shape
    tokens = token_class(x.shape[0])
    if x.shape[0] == 1 or card.capability < 80:
        shape = Shape("linear_gemv", (n, k, p.code, p.group, extras.gate))
        either = card.capability >= 80 and x.dtype == torch.bfloat16
        fixed = may_be_fixed(p.code, p.run, card)
        candidates = one_row_tiles(n, k, p.code, card, bool(extras.gate), either, fixed)
    elif _is_plain(x, p) and extras[1:] == PLAIN[1:]:
        shape = Shape("linear_dense", (n, k, p.code, tokens))
        candidates = (*gemm_tiles(n, k, p.code, tokens, card)[:-1], CUBLAS)
    else:
        shape = Shape("linear_gemm", (n, k, p.code, p.group, tokens, extras.gate))
        candidates = gemm_tiles(n, k, p.code, tokens, card)
    return tuner().pick(shape, candidates, None if x.device.type != "cuda" else _trial(x, p, extras))


def _trial(x: Tensor, p: Prepared, extras: Extras) -> Callable[[Tile], Callable[[], object]]:
    """Launches a candidate on weights of this shape made up when they are needed; holds no tensor before."""
    kinds = {name: (part.shape, part.dtype) for name, part in p._asdict().items() if isinstance(part, Tensor)}
    no_tensors: dict[str, Any] = dict.fromkeys(kinds)
    empty = p._replace(**no_tensors)
    device, dtype, tokens = x.device, x.dtype, x.shape[0]
    n, k = p.shape[0] // (2 if extras.gate else 1), p.shape[1]
    gate = extras.gate
    made: list[tuple[Tensor, Prepared, Tensor]] = []

    def trial(choice: Tile) -> Callable[[], object]:
        if not made:
            noise = {name: _noise(name, empty, *kind, device) for name, kind in kinds.items()}
            sample = torch.randn(tokens, k, device=device, dtype=dtype)
            made.append((sample, empty._replace(**noise), torch.empty(tokens, n, device=device, dtype=dtype)))
        sample, weight, out = made[0]
        out.fill_(float("nan"))  # what a kernel leaves out does not pass for the result of the one before it
        start: Callable[[], None]
        if choice is CUBLAS:
            start = partial(_slab_product, sample, weight, out, None)
        else:
            build = gemv_launch if "chunks" in choice else gemm_launch
            start = build(sample, weight, out, Extras(gate=gate), choice).start

        def run() -> Tensor:
            start()
            return out

        return run

    return trial


def _noise(name: str, p: Prepared, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A made-up part of a weight like p: any codes, scales that keep the products of usual size."""
    if name == "low" and p.code in ("bf16", "f16"):
        kind = torch.bfloat16 if p.code == "bf16" else torch.float16
        return torch.randn(shape, device=device, dtype=kind).view(dtype)
    if dtype.is_floating_point:
        return torch.ones(shape, device=device, dtype=dtype)
    if name == "low":
        codes = torch.randint(-(1 << 15), 1 << 15, shape, device=device, dtype=dtype)
        return codes & -0x0809 if p.code == "e4m3" else codes  # without bit 3 of a byte: no NaN
    if name == "scales" and p.scale_kind == "e8m0":
        return torch.randint(120, 131, shape, device=device, dtype=dtype)
    return torch.randint(0, 100, shape, device=device, dtype=dtype)

"""Quantized matrix products on a GPU: selects the kernel by the number of rows of x and launches it.

1 row              `gemv`: one program per few rows of W
2 to 4 rows        `gemv` as well for 4-bit codes, up to 2 rows for 16-bit weights (`few_rows`)
up to 255 rows     `gemm`: tensor cores, W decoded in registers (dense weights: cuBLAS from 17 rows)
more               `dequantize` into slabs, then cuBLAS
below sm_80        no tensor cores in Triton: `gemv` for up to 4 rows, else slabs
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dense_linear import gathered
from ..dequant import natural
from ..layer_weights import Norm
from ..verify.tuning import Sampled, Shape, Tile, tuner
from . import dequantize, gemm, gemv
from .cards import Card
from .digits import digits, empty_digits, gemv_digits_kernel
from .launch import card_of, counters, has_ptx, interpreting, launch
from .layout import CODES, Prepared
from .product_tiles import SMALL_TOKENS, TOKEN_CLASSES, few_rows, few_tiles, gemm_tiles, gemv_tiles, is_fixed
from .rms_norm import rms_norm

SLAB_BYTES = 64 << 20  # maximum size of a decoded slab: reuses the memory that the plan reserves for attention
# slab size that stays in L2 between the dequantize kernel and the product. For 2,048 rows and an 8B model's gate and up
# in INT4, an H100 takes 603 us; decoding the whole matrix first takes 97 us, and the product after it 525 us
CACHED_BYTES = 32 << 20
CUBLAS_TILE = 128, 256  # rows of x and of W per SM tile in cuBLAS; not measured
SLAB_TOKENS = 256  # from this many rows of x on, weights are decoded into slabs; not measured
ROWS_WITHOUT_TENSOR_CORES = 4
NATIVE = {torch.bfloat16: "bf16", torch.float16: "f16"}
WHOLE_ROW = 1 << 20  # group size that means one scale per row
CUBLAS: Tile = {"cublas": 1}  # tuning candidate for dense weights that uses cuBLAS
FIXED_TOKENS = 16  # rows of x per tile for batch-invariant products


class Extras(NamedTuple):
    """Operations fused into a product: y = act(norm(x) Wᵀ + bias) + residual."""

    bias: Tensor | None = None
    norm: Norm | None = None
    residual: Tensor | None = None
    gate: str = ""  # silu, silu_clamped or gelu_tanh: W is gate stacked on up, y = act(gate) * up
    limit: float = 0.0  # clamps gate and up, see `activation.gated`; 0: no limit


PLAIN = Extras()


class After(NamedTuple):
    """A kernel that is a GEMV and what follows it, done by its last programs."""

    kernel: Any
    programs: int = 0  # besides those of the GEMV
    arguments: tuple[Any, ...] = ()  # after those of the GEMV
    constants: Mapping[str, Any] = {}
    subnormals: bool = True  # see `Launch`; False: it has functions of libdevice that flush them
    registers: int = 0  # as in `launch`


class Tiles(NamedTuple):
    """Pairs sorted by expert, in tiles of one expert each."""

    size: int  # pairs in a tile
    places: Tensor  # int32 [num_tiles * size]: pair index, or -1
    experts: Tensor  # int32 [num_tiles]: expert index, or -1


class Pairs(NamedTuple):
    """(token, expert) pairs; without `tiles` each pair is multiplied separately."""

    chosen: Tensor  # int32 [num_tokens, top_k]
    num_experts: int
    tiles: Tiles | None


def product(
    x: Tensor, p: Prepared, extras: Extras = PLAIN, *, out: Tensor | None = None, fixed_order: bool = False,
    after: After | None = None,
) -> Tensor:  # fmt: skip
    """x [num_tokens, K] times the weight: [num_tokens, N], or [num_tokens, N / 2] if gated; dtype of x.

    out           output tensor in its own dtype; may be `extras.residual`; requires `fusable`
    fixed_order   batch-invariant: every row is summed in the same order for any number of rows
    after         runs instead of `gemv_kernel`; requires `fusable` and a single row

    norm, gate and residual require `fusable`. Raises ValueError if x does not have K columns.
    """
    if x.dim() != 2 or x.shape[1] != p.shape[1]:
        raise ValueError(f"x has shape {tuple(x.shape)}, but the weight takes {p.shape[1]} inputs")
    x = gathered(x, p.perm, p.pre_scale)
    if p.is_float32:
        return torch.nn.functional.linear(x.float(), p.low, extras.bias).to(x.dtype)
    x = x.contiguous()
    n, tokens = p.shape[0] // (2 if extras.gate else 1), x.shape[0]
    if out is None:
        out = torch.empty(tokens, n, dtype=x.dtype, device=x.device)
    card = card_of(x.device)
    own = SMALL_TOKENS if _is_plain(x, p) else SLAB_TOKENS - 1  # most rows for which a Triton kernel runs
    if x.dtype not in NATIVE and extras[1:] == PLAIN[1:]:
        choice = CUBLAS  # float32, e.g. for DoRA's weight norms: not a tensor core dtype
    elif fixed_order:
        choice = gemm_tiles(*p.shape, p.code, FIXED_TOKENS, card, whole=True, group=p.group)[0]
    elif tokens <= (own if card.capability >= 80 else ROWS_WITHOUT_TENSOR_CORES):
        choice = _picked(x, p, out, extras, card)
    else:
        choice = CUBLAS
    _run(x, p, out, extras, choice, after=after)
    return out


def chained(
    x: Tensor, p: Prepared, extras: Extras, second: Prepared, then: Extras, *, out: Tensor | None = None,
    pairs: Pairs | None = None, given: Tensor | None = None, after: After | None = None, apart: bool = False,
) -> Tensor:  # fmt: skip
    """product(product(x, p, extras), second, then, out=out) for `fusable` weights, or `expert_product` twice.

    If the second product reads fixed point, the first one converts its own outputs, which saves a launch.

    given   x in fixed point for this code and runs, normalized, if a kernel before converted it
    after   replaces the second kernel, which must be a GEMV
    apart   conversions are launches of their own
    """
    x, card = x.contiguous(), card_of(x.device)
    hidden = _empty_outputs(x, p, extras.gate, pairs)
    if out is None:
        out = _empty_outputs(x, second, then.gate, pairs)
    if pairs is None:
        choice = _picked(x, p, hidden, extras, card, given is not None)
        next_choice = _picked(hidden, second, out, then, card, "chunks" in choice and not apart)
    else:
        choice, next_choice = (expert_tile(*one, pairs, card) for one in ((p, extras), (second, then)))
    made = converting = None
    if "chunks" in choice and "fixed" in next_choice and not apart:
        made, converting = _converting(hidden, choice, extras.gate, pairs, second)
    _run(x, p, hidden, extras, choice, pairs, given, converting)
    _run(hidden, second, out, then, next_choice, pairs, made, after)
    return out


def _empty_outputs(x: Tensor, p: Prepared, gate: str, pairs: Pairs | None) -> Tensor:
    count, experts = (x.shape[0], 1) if pairs is None else (pairs.chosen.numel(), pairs.num_experts)
    return torch.empty(count, p.shape[0] // (experts * (2 if gate else 1)), dtype=x.dtype, device=x.device)


def _run(
    x: Tensor, p: Prepared, out: Tensor, extras: Extras, choice: Tile, pairs: Pairs | None = None,
    given: Tensor | None = None, after: After | None = None,
) -> None:  # fmt: skip
    """Run the product with the kernel of `choice`; other arguments as in `launch_gemv`."""
    if extras.norm is not None and (x.shape[0] > 1 or "apart" in choice) and "fixed" not in choice:
        # with several rows a separate norm kernel costs less than reading all rows in every program
        x, extras = rms_norm(x, extras.norm.weight, extras.norm.eps), extras._replace(norm=None)
    assert after is None or "chunks" in choice, "only a GEMV's programs can do more"
    if choice is CUBLAS:
        _slab_product(x, p, out, extras.bias)
    elif "chunks" in choice:
        launch_gemv(x, p, out, extras, choice, pairs, given, after)
    else:
        launch_gemm(x, p, out, extras, choice, pairs)


def linear(x: Tensor, p: Prepared, bias: Tensor | None = None, *, fixed_order: bool = False) -> Tensor:
    """x Wᵀ + bias."""
    return product(x, p, Extras(bias), fixed_order=fixed_order)


def fusable(x: Tensor, p: Any) -> bool:
    """Whether norm, gate and residual can be fused: few rows, no `perm` or `pre_scale`, not a float32 weight."""
    if not isinstance(p, Prepared) or p.perm is not None or p.pre_scale is not None or p.is_float32:
        return False
    return x.shape[0] == 1 or (x.shape[0] <= SMALL_TOKENS and card_of(x.device).capability >= 80)


def _is_plain(x: Tensor, p: Prepared) -> bool:
    """Whether the weight is a dense matrix in the dtype of x, which cuBLAS can read directly."""
    return p.code == NATIVE.get(x.dtype) and p.low.shape[1] == p.shape[1]


# ---- launches


def _scales(p: Prepared) -> tuple[Tensor, ...]:
    """Scales, minima, super scales, super minima and row scales; placeholders for absent ones, which are not read."""
    parts = (p.scales, p.mins, p.supers, p.super_mins, p.row_scale)
    return tuple(p.low if part is None else part for part in parts)


def _constants(p: Prepared) -> Mapping[str, Any]:
    group = p.group if p.scales is not None and p.scales.shape[1] > 1 else WHOLE_ROW
    kinds = p.shape[1], p.code, p.scale_kind, p.min_kind, p.zero, group, p.run, p.scale_rows, p.row_scale is not None
    return _constants_of(*kinds)


@cache
def _constants_of(
    k: int, code: str, scale: str, least: str, zero: int, group: int, run: int, scale_rows: int, row_scale: bool
) -> Mapping[str, Any]:
    kind = CODES[code]
    return {
        "K": k,
        "CODE": code,
        "LOW": kind.low,
        "HIGH": kind.high,
        "SCALE": scale,
        "MIN": least,
        "ZERO": zero,
        "GROUP": group,
        "RUN": run,
        "SCALE_ROWS": scale_rows,
        "ROW_SCALE": row_scale,
    }


def expert_product(x: Tensor, p: Prepared, extras: Extras, pairs: Pairs) -> Tensor:
    """Rows of x times the weights of their experts: [num_tokens * top_k, N] (N / 2 if gated), dtype of x.

    x        [num_tokens, K], or [num_tokens * top_k, K]
    p        weights of all experts, stacked; biases likewise
    extras   a norm requires pairs without tiles; the gate may be swiglu_oai
    """
    x, out = x.contiguous(), _empty_outputs(x, p, extras.gate, pairs)
    _run(x, p, out, extras, expert_tile(p, extras, pairs, card_of(x.device)), pairs)
    return out


def expert_tile(p: Prepared, extras: Extras, pairs: Pairs, card: Card) -> Tile:
    """Tile constants for a product of pairs."""
    n, k = p.shape[0] // pairs.num_experts, p.shape[1]
    if pairs.tiles is None:
        fixed = is_fixed(p.code, p.run, card)
        return gemv_tiles(n * pairs.chosen.numel(), k, p.code, card, bool(extras.gate), fixed)[0]
    assert extras.norm is None, "tiled products do not support a norm"
    choice = gemm_tiles(n, k, p.code, pairs.tiles.size, card, whole=True, group=p.group)[0]
    assert choice["tokens"] == pairs.tiles.size
    return choice


def launch_gemv(
    x: Tensor, p: Prepared, out: Tensor, extras: Extras, choice: Tile, pairs: Pairs | None = None,
    given: Tensor | None = None, after: After | None = None,
) -> None:  # fmt: skip
    """Launch `gemv.gemv_kernel`, or the kernel of `after`, for x [num_tokens, K]; `pairs` as in `expert_product`.

    given   x in fixed point, if a kernel before this one converted it
    """
    high = p.low if p.high is None else p.high
    bias, norm, residual, gate, limit = extras
    outputs = choice["rows"] // (2 if gate else 1)
    fixed, alone = "fixed" in choice, pairs is not None or card_of(x.device).capability < 80
    together = 1 if alone else max(1, out.shape[0])  # rows of x per program
    if fixed:
        x, norm = digits(x, p.code, p.run, norm) if given is None else given, None
    kernel, programs, more, constants, subnormals, registers = after or After(gemv.gemv_kernel)
    launch(
        kernel,
        (-(-out.shape[1] // outputs) + programs, out.shape[0] // together),
        *(x, p.low.view(torch.int32)),
        # high bits per 32-bit word of low codes: one byte for int5, two for int6 and int3
        high.view(torch.int16) if p.high is not None and p.code != "int5" else high,
        *_scales(p),
        *(p.low if part is None else part for part in (bias, norm and norm.weight, residual, pairs and pairs.chosen)),
        *(out, out.shape[1], 0.0 if norm is None else float(norm.eps), *more),
        BIAS=bias is not None,
        NORM=norm is not None,
        RESIDUAL=residual is not None,
        GATE=gate,
        LIMIT=limit,
        SHARE=0 if pairs is None else out.shape[0] // x.shape[0],
        ROWS=choice["rows"],
        CHUNKS=choice["chunks"],
        TOKENS=together,
        FIXED="" if not fixed else "assembly" if has_ptx(x.device) else "plain",
        LATE=CODES[p.code].low == 16,  # on an H100: 4 % less time per step, but 1 % more with 4-bit codes
        num_warps=choice["warps"],
        subnormals=subnormals,
        registers=registers,
        **_constants(p),
        **constants,
    )


def _converting(
    out: Tensor, choice: Tile, gate: str, pairs: Pairs | None, reader: Prepared
) -> tuple[Tensor, After] | tuple[None, None]:
    """`out` in fixed point for the product with `reader`, and the kernel that also writes that.

    Nones if that takes a launch of its own: chunks that are not whole, or more of them than there are counters.
    """
    tokens, n = out.shape
    chunk, programs = CODES[reader.code].chunk, tokens if pairs is not None else 1
    if n % chunk or programs * n // chunk > COUNTERS:
        return None, None
    made = empty_digits(tokens, n, reader.run, out.device)
    kinds = {"NEXT_N": n, "NEXT_CODE": reader.code, "NEXT_RUN": reader.run, "ASSEMBLY": has_ptx(out.device)}
    return made, After(gemv_digits_kernel, 0, (made, counters(out.device, COUNTERS)), kinds)


def launch_gemm(x: Tensor, p: Prepared, out: Tensor, extras: Extras, choice: Tile, pairs: Pairs | None = None) -> None:
    """Launch `gemm.gemm_kernel` for x [num_tokens, K]; no norm. `pairs` as in `expert_product`, with tiles."""
    rows, tokens, split = choice["rows"], choice["tokens"], choice["split"]
    bias, _, residual, gate, limit = extras
    outputs = rows // (2 if gate else 1)
    tiles = None if pairs is None else pairs.tiles
    across = -(-x.shape[0] // tokens) if tiles is None else tiles.experts.shape[0]
    grid = (across, -(-out.shape[1] // outputs), split)
    partial_sums, counter = x, p.low
    if split > 1:
        partial_sums = torch.empty(grid[0] * grid[1] * split * rows * tokens, dtype=torch.float32, device=x.device)
        counter = counters(x.device, COUNTERS)
        if grid[0] * grid[1] > COUNTERS:
            raise ValueError(f"a split product has {grid[0] * grid[1]} tiles; at most {COUNTERS} are supported")
    launch(
        gemm.gemm_kernel,
        grid,
        *(x, p.low, p.low if p.high is None else p.high, *_scales(p)),
        *(
            p.low if part is None else part
            for part in (bias, residual, *((None, None) if tiles is None else tiles[1:]))
        ),
        *(out, partial_sums, counter, x.shape[0], out.shape[1]),
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        GATE=gate,
        LIMIT=limit,
        SHARE=0 if pairs is None else out.shape[0] // x.shape[0],
        OPERAND="f32" if interpreting() and x.dtype != torch.float16 else NATIVE[x.dtype],
        PAIRS=has_ptx(x.device),
        ROWS=rows,
        TOKENS=tokens,
        HALVES=choice["halves"],
        SPLIT=split,
        STAGES=choice["stages"],
        num_warps=choice["warps"],
        num_stages=choice["stages"],
        # explicit, because the compiler's own limit of 64 registers made it spill two values (sm_121, M = 16)
        registers=168 if tokens <= SMALL_TOKENS else 248,
        subnormals=True,
        **_constants(p),
    )


COUNTERS = 1 << 16  # maximum number of output tiles of a split product, or of chunks that a GEMV converts


def dequantized(p: Prepared, rows: slice | Tensor, dtype: torch.dtype, place: Tensor | None = None) -> Tensor:
    """Decode rows of the weight (slice or indices) to a dense matrix in stored column order, rounded to `dtype`.

    place   optional output buffer of that dtype
    """
    if p.code in NATIVE.values():
        stored = p.low[rows, : p.shape[1]]
        kinds = {code: kind for kind, code in NATIVE.items()}
        return (stored if p.is_float32 else stored.view(kinds[p.code])).to(dtype)
    gathers = isinstance(rows, Tensor)
    first, count = (0, rows.shape[0]) if isinstance(rows, Tensor) else (rows.start, rows.stop - rows.start)
    out = torch.empty(count, p.shape[1], dtype=dtype, device=p.low.device) if place is None else place[:count]
    tile, columns = 4 if gathers else 8, 512
    launch(
        dequantize.dequantize_kernel,
        (-(-count // tile), -(-p.shape[1] // columns)),
        *(p.low, p.low if p.high is None else p.high, *_scales(p), rows if gathers else p.low, out, first, count),
        GATHER=gathers,
        ROWS=tile,
        COLUMNS=columns,
        subnormals=True,
        fuses=False,
        **_constants(p),
    )
    return out


def rows(p: Prepared, ids: Tensor) -> Tensor:
    """Exact rows `ids` of the weight, float32 [len(ids), K]: embedding lookup."""
    return natural(dequantized(p, ids, torch.float32), p.perm, p.pre_scale)


def slab_rows(n: int, tokens: int, row_bytes: int, num_sms: int) -> int:
    """Slab height in whole tiles that minimizes, in this order, waves of SMs, L2 overflow, and the number of slabs."""
    per_row = -(-tokens // CUBLAS_TILE[0])

    def cost(tiles: int) -> tuple[int, bool, int, int]:
        whole, rest = divmod(-(-n // CUBLAS_TILE[1]), tiles)
        waves = whole * -(-per_row * tiles // num_sms) + -(-per_row * rest // num_sms)
        return waves, tiles * CUBLAS_TILE[1] * row_bytes > CACHED_BYTES, whole + (rest > 0), tiles

    return min(range(1, 1 + max(1, SLAB_BYTES // (row_bytes * CUBLAS_TILE[1]))), key=cost) * CUBLAS_TILE[1]


def _slab_product(x: Tensor, p: Prepared, out: Tensor, bias: Tensor | None) -> None:
    n, k = p.shape
    plain = _is_plain(x, p)
    step = n if plain else slab_rows(n, x.shape[0], k * x.element_size(), card_of(x.device).num_sms)
    place = None if plain else torch.empty(min(step, n), k, dtype=x.dtype, device=x.device)
    for first in range(0, n, step):
        part = slice(first, min(first + step, n))
        slab = dequantized(p, part, x.dtype, place)
        if bias is None:
            torch.mm(x, slab.t(), out=out[:, part])
        else:
            torch.addmm(bias[part].to(x.dtype), x, slab.t(), out=out[:, part])


# ---- the choice of constants


def _picked(x: Tensor, p: Prepared, out: Tensor, extras: Extras, card: Card, given: bool = False) -> Tile:
    """Tile constants for this shape: the measured winner on this GPU, or the first candidate.

    given   a kernel before converts x to fixed point, if this product reads that
    """
    n, k = p.shape
    tokens = next((size for size in TOKEN_CLASSES if x.shape[0] <= size), TOKEN_CLASSES[-1])
    fixed = is_fixed(p.code, p.run, card)
    has_norm = extras.norm is not None and (fixed or CODES[p.code].low == 8)
    of_input = ("given",) if given and fixed else ("norm",) if has_norm else ()
    if x.shape[0] == 1 or card.capability < 80:
        shape = Shape("linear_gemv", (n, k, p.code, p.group, extras.gate, *of_input))
    elif x.shape[0] <= few_rows(p.code, fixed):
        shape = Shape("linear_few", (n, k, p.code, p.group, x.shape[0], extras.gate, *of_input))
    elif _is_plain(x, p) and extras[1:] == PLAIN[1:] and out.dtype == x.dtype:  # cuBLAS writes the dtype of x
        shape = Shape("linear_dense", (n, k, p.code, tokens))
    else:
        shape = Shape("linear_gemm", (n, k, p.code, p.group, tokens, extras.gate))
    if not x.is_meta and (known := tuner(x.device).picked(shape)) is not None:
        return known
    if shape.op == "linear_gemv":
        candidates = gemv_tiles(n, k, p.code, card, bool(extras.gate), fixed, not of_input)
    elif shape.op == "linear_few":
        candidates = few_tiles(n, k, p.code, card, bool(extras.gate), fixed, p.group)
    elif shape.op == "linear_dense":
        candidates = (*gemm_tiles(n, k, p.code, tokens, card), CUBLAS)
    else:
        candidates = gemm_tiles(n, k, p.code, tokens, card, group=p.group)
    if x.is_meta:  # launches recorded ahead of time, possibly for another GPU
        return candidates[0]
    trial = None if x.device.type != "cuda" else _trial(x, p, extras, "given" in of_input)
    return tuner(x.device).pick(shape, candidates, trial)


def _trial(x: Tensor, p: Prepared, extras: Extras, given: bool = False) -> Sampled:
    """Return a trial that runs a candidate on random weights of this shape, created only when it is needed."""
    kinds = {name: (part.shape, part.dtype) for name, part in p._asdict().items() if isinstance(part, Tensor)}
    no_tensors: dict[str, Any] = dict.fromkeys(kinds)
    empty = p._replace(**no_tensors)
    device, dtype, tokens = x.device, x.dtype, x.shape[0]
    n, k = p.shape[0] // (2 if extras.gate else 1), p.shape[1]
    activation, has_norm, has_residual = extras[3:], extras.norm is not None, extras.residual is not None

    def made() -> tuple[Tensor, Prepared, Tensor, Extras, Tensor | None]:
        noise = {name: _noise(name, empty, *kind, device) for name, kind in kinds.items()}
        out = torch.empty(tokens, n, device=device, dtype=dtype)
        norm = Norm(torch.ones(k, device=device), 1e-6) if has_norm else None
        more = Extras(None, norm, torch.zeros_like(out) if has_residual else None, *activation)
        sample = torch.randn(tokens, k, device=device, dtype=dtype)
        converted = digits(sample, p.code, p.run, norm) if given else None
        return sample, empty._replace(**noise), out, more, converted

    def trial(data: tuple[Tensor, Prepared, Tensor, Extras, Tensor | None], choice: Tile) -> Callable[[], Tensor]:
        sample, weight, out, more, converted = data
        out.fill_(float("nan"))  # so that skipped outputs do not keep the previous candidate's results

        def run() -> Tensor:
            _run(sample, weight, out, more, choice, given=converted)
            return out

        return run

    return Sampled(made, trial)


def _noise(name: str, p: Prepared, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A random tensor for one part of a weight like p, with scales that keep the products in a normal range."""
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

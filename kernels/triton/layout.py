"""Repacks canonical weights into `Prepared`, the layout that all Triton product kernels read. Plain torch, no Triton.

A row is divided into chunks of 16 bytes: eight 16-bit halves h with P = 16 / bits planes each. The halves of a chunk
form runs of R halves that hold one scale group: R = 8, or fewer if groups are smaller than a chunk. Plane i of half h
holds element (h // R) * R * P + i * R + h % R. A thread thus loads 16 bytes with 8 * P elements of whole scale groups,
the R activations for plane i are contiguous, and each plane of a tile of halves is an `mma` operand. The bytes of a
group stay together in a permuted order, so block-scaled products of 16 elements can read them directly.

code   bits low+high  value of a code q        from
bf16   16             q                        dense
f16    16             q                        dense
e4m3    8             e4m3(q)                  fp8, fp8mx
int8    8             q - 128                  int8
int4    4             q - zero                 int4g, Q4_K
e2m1    4             e2m1(q)                  fp4g16, fp4g32
iq4     4             the IQ4 table            IQ4_NL, IQ4_XS
int5    4+1           q - zero                 Q5_0, Q5_1, Q5_K
int6    4+2           q - 32                   Q6_K
int2    2             q                        Q2_K
int3    2+1           q - 4                    Q3_K

The high bits of half h are in a separate byte, from bit bits*i on for plane i (int3, int6); for int5, halves 2j and
2j + 1 share byte j, low nibble first.

weight = row_scale[n] * (s * (q - zero) + m), with s and m per group depending on `scale_kind` and `min_kind`:
    none   1 (0)
    float  a stored float16, bfloat16 or float32
    e4m3   bits of E4M3              e8m0   2^(s - 127)
    sub    super[n, k / 256] * (int8 scale) and -super_min * (uint8 minimum)
    nibble super * (byte & 15) and -super_min * (byte >> 4)
    zero   m = -s * (uint8 zero), instead of the constant zero

6-bit scales are widened to a byte, so Q4_K grows from 4.5 to 4.625 bits per weight, Q5_K from 5.5 to 5.625 and Q3_K
from 3.44 to 3.56; other types keep their size.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..dequant import FP8_BLOCK, row_chunk, unpack_nibbles
from ..gguf_blocks import BLOCK_TYPES, SPLITS
from ..weight import Weight

HALVES = 8  # 16-bit halves in a chunk of 16 bytes


class Code(NamedTuple):
    """Storage of one kind of code."""

    low: int  # bits per element in the 16-bit halves
    high: int = 0  # bits per element stored separately

    @property
    def planes(self) -> int:
        """Elements per half."""
        return 16 // self.low

    @property
    def chunk(self) -> int:
        """Elements per chunk (16 bytes of halves)."""
        return HALVES * self.planes

    @property
    def high_bytes(self) -> int:
        """Bytes of high bits per chunk."""
        return self.chunk * self.high // 8


CODES = {
    "bf16": Code(16),
    "f16": Code(16),
    "e4m3": Code(8),
    "int8": Code(8),
    "int4": Code(4),
    "e2m1": Code(4),
    "iq4": Code(4),
    "int5": Code(4, 1),
    "int6": Code(4, 2),
    "int2": Code(2),
    "int3": Code(2, 1),
}


@cache
def run_of(code: str, group: int) -> int:
    """Halves per run: all eight, or as many as hold one scale group. `group` 0: no groups."""
    chunk = CODES[code].chunk
    return HALVES if group == 0 or group >= chunk else HALVES * group // chunk


SUPER = 256  # elements that share one super scale
# block type -> (code, scale_kind, min_kind, elements of a group)
GGUF = {
    "Q2_K": ("int2", "nibble", "nibble", 16),
    "Q3_K": ("int3", "sub", "none", 16),
    "Q4_K": ("int4", "sub", "sub", 32),
    "Q5_K": ("int5", "sub", "sub", 32),
    "Q6_K": ("int6", "sub", "none", 16),
    "Q5_0": ("int5", "float", "none", 32),
    "Q5_1": ("int5", "float", "float", 32),
    "IQ4_NL": ("iq4", "float", "none", 32),
    "IQ4_XS": ("iq4", "sub", "none", 32),
}


class Prepared(NamedTuple):
    """A weight in kernel layout. C = chunks per row, G = groups per row."""

    shape: tuple[int, int]  # (N, K)
    code: str
    low: Tensor  # int16 [N, C * 8]; float32 [N, K] for weights that need float32, which cuBLAS multiplies
    high: Tensor | None = None  # uint8 [N, C * high_bytes]
    scale_kind: str = "none"
    scales: Tensor | None = None  # [N, G]; [ceil N/128, G] if `scale_rows` is 128
    min_kind: str = "none"
    mins: Tensor | None = None  # [N, G]
    supers: Tensor | None = None  # float16 [N, K/256]
    super_mins: Tensor | None = None
    row_scale: Tensor | None = None  # float32 [N]; NaN for rows with NaN among their E4M3 codes
    zero: int = 0
    group: int = 0  # elements per group; 0: no group scales
    scale_rows: int = 1
    perm: Tensor | None = None  # int64 [K]: gathers x before the product
    pre_scale: Tensor | None = None  # [K]: multiplies x, before `perm`

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self if isinstance(t, Tensor))

    @property
    def run(self) -> int:
        """Halves per run."""
        return run_of(self.code, self.group)

    @property
    def stacks(self) -> bool:
        """Whether several weights like this can be concatenated along rows into one."""
        alone = self.perm is None and self.pre_scale is None and not self.is_float32
        return alone and self.shape[0] % self.scale_rows == 0

    @property
    def is_float32(self) -> bool:
        """Whether the weight is stored as float32 and multiplied by torch."""
        return self.low.dtype == torch.float32


def prepare(weight: Weight) -> Prepared:
    """Repack a weight losslessly on its own device. Raises ValueError for unsupported forms."""
    maker = _MAKERS.get(weight.form)
    if maker is None:
        raise ValueError(f"no layout for weights of form {weight.form}")
    perm = None if weight.perm is None else weight.perm.to(torch.int64)
    return maker(weight)._replace(perm=perm, pre_scale=weight.pre_scale)


def _dense(w: Weight) -> Prepared:
    names = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
    name = names.get(w.qweight.dtype)
    if name is None:
        raise ValueError(f"no layout for dense weights of {w.qweight.dtype}")
    stored = w.qweight.contiguous()
    if name == "f32":
        bits = stored.view(torch.int32)
        if bool((bits & 0xFFFF).any()):
            return Prepared(w.shape, "bf16", w.qweight)
        stored = stored.bfloat16()  # GGUF files have routers of bfloat16 models in float32: nothing is rounded
    return Prepared(w.shape, "f16" if name == "f16" else "bf16", _pad_columns(stored.view(torch.int16), HALVES))


def _int4g(w: Weight) -> Prepared:
    assert w.scales is not None
    low, high = _packed(w, "int4", _group(w))
    made = Prepared(w.shape, "int4", low, high, "float", _rows(w.scales), zero=8, group=_group(w))
    if w.mins is not None:
        return made._replace(min_kind="float", mins=_rows(w.mins), zero=0)
    if w.zeros is not None:
        return made._replace(min_kind="zero", mins=_rows(w.zeros), zero=0)
    return made


def _int8(w: Weight) -> Prepared:
    assert w.scales is not None
    group = 0 if w.scales.shape[1] == 1 else _group(w)
    low, _ = _packed(w, "int8", group)
    if w.scales.shape[1] == 1:
        return Prepared(w.shape, "int8", low, row_scale=w.scales.float().reshape(-1), zero=128)
    return Prepared(w.shape, "int8", low, None, "float", _rows(w.scales), zero=128, group=group)


# form -> (code, scale_kind, elements of a group)
NARROW = {"fp4g16": ("e2m1", "e4m3", 16), "fp4g32": ("e2m1", "e8m0", 32), "fp8mx": ("e4m3", "e8m0", 32)}


def _narrow(w: Weight) -> Prepared:
    assert w.scales is not None
    code, kind, group = NARROW[w.form]
    low, _ = _packed(w, code, group)
    row_scale = _nan_scale(w) if code == "e4m3" else None if w.global_scale is None else w.global_scale.float()
    scales = _rows(w.scales.view(torch.uint8))
    return Prepared(w.shape, code, low, None, kind, scales, row_scale=row_scale, group=group)


def _fp8(w: Weight) -> Prepared:
    assert w.scales is not None
    n, k = w.shape
    low, _ = _packed(w, "e4m3")
    row_scale = _nan_scale(w)
    if w.scales.numel() == 1 or w.scales.shape == (n, 1):
        stored = w.scales.float().reshape(-1).expand(n)
        return Prepared(w.shape, "e4m3", low, row_scale=stored.clone() if row_scale is None else stored * row_scale)
    if w.scales.shape != (-(-n // FP8_BLOCK), -(-k // FP8_BLOCK)):
        raise ValueError(f"fp8 scales of shape {tuple(w.scales.shape)} for a weight of shape {w.shape}")
    made = Prepared(w.shape, "e4m3", low, None, "float", _rows(w.scales.float()), group=128, scale_rows=128)
    return made._replace(row_scale=row_scale)


def _nan_scale(w: Weight) -> Tensor | None:
    """float32 [N]: NaN for rows with NaN among their E4M3 codes, else 1; None if no row has one."""
    broken = ((w.qweight.view(torch.uint8) & 0x7F) == 0x7F).any(1)
    return torch.where(broken, float("nan"), 1.0) if bool(broken.any()) else None


def _gguf(w: Weight) -> Prepared:
    if w.block_type not in GGUF:
        raise ValueError(f"no layout for {w.block_type} blocks")
    code, scale_kind, min_kind, group = GGUF[w.block_type]
    low, high = _packed(w, code, group)
    parts = SPLITS[w.block_type].parts(_blocks(w, slice(None)))
    if scale_kind == "nibble" and parts.mins is not None:  # keep scale and minimum in one byte, as in the file
        parts = parts._replace(scales=parts.scales | (parts.mins << 4), mins=None)
    scales, mins, supers, super_mins = (None if part is None else _rows(part.flatten(1)) for part in parts)
    made = Prepared(w.shape, code, low, high, scale_kind, scales, min_kind, mins, supers, super_mins, group=group)
    return made._replace(zero=SPLITS[w.block_type].zero)


def _blocks(w: Weight, rows: slice) -> Tensor:
    data = w.qweight[rows]
    return data.view(data.shape[0], -1, BLOCK_TYPES[w.block_type].nbytes)


_MAKERS = {
    "dense": _dense,
    "int4g": _int4g,
    "int8": _int8,
    "fp8": _fp8,
    "gguf": _gguf,
    **dict.fromkeys(NARROW, _narrow),
}
FORMS = frozenset(_MAKERS)


def _rows(t: Tensor) -> Tensor:
    """Make contiguous; copies views, so that they do not keep a larger tensor alive."""
    return t.contiguous() if t.is_contiguous() and t.untyped_storage().nbytes() == t.nbytes else t.clone()


def _group(w: Weight) -> int:
    """Elements per group; the whole row if it has a single scale."""
    assert w.scales is not None
    return w.group_size if 0 < w.group_size < w.shape[1] else -(-w.shape[1] // w.scales.shape[1])


def _codes(w: Weight, rows: slice) -> Tensor:
    """Unpacked codes, uint8 [rows, K]."""
    if w.form == "gguf":
        return SPLITS[w.block_type].codes(_blocks(w, rows)).flatten(1)
    if w.form in ("int4g", "fp4g16", "fp4g32"):
        return unpack_nibbles(w.qweight[rows])[:, : w.shape[1]]
    codes = w.qweight[rows].view(torch.uint8)
    return codes ^ 0x80 if w.form == "int8" else codes


def _packed(w: Weight, code: str, group: int = 0) -> tuple[Tensor, Tensor | None]:
    """Halves int16 [N, C * 8] and high bits uint8 [N, C * high_bytes], converted in bounded chunks of rows."""
    n, k = w.shape
    kind, run = CODES[code], run_of(code, group)
    chunks = -(-k // kind.chunk)
    low = torch.empty(n, chunks * HALVES, dtype=torch.int16, device=w.qweight.device)
    high = low.new_empty(n, chunks * kind.high_bytes, dtype=torch.uint8) if kind.high else None
    step = max(1, 16 * row_chunk(k)) if low.is_cuda else row_chunk(k)
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        # [rows, C, runs, planes, run] -> [rows, C, planes, halves]
        codes = _pad_columns(_codes(w, rows), kind.chunk).view(-1, chunks, HALVES // run, kind.planes, run)
        codes = codes.transpose(2, 3).flatten(3)
        low[rows] = _joined(codes, kind.low).to(torch.int16).flatten(1)
        if high is not None:
            bits = _joined(codes >> kind.low, kind.high).to(torch.uint8)
            high[rows] = (bits[..., 0::2] | (bits[..., 1::2] << 4) if kind.high_bytes == 4 else bits).flatten(1)
    return low, high


def _pad_columns(t: Tensor, multiple: int) -> Tensor:
    missing = -t.shape[1] % multiple
    return torch.nn.functional.pad(t, (0, missing)) if missing else t


def _joined(values: Tensor, bits: int) -> Tensor:
    """Pack the low `bits` of uint8 [rows, C, planes, 8] into int32 [rows, C, 8], plane i at bit bits * i."""
    out = torch.zeros(values.shape[:2] + (HALVES,), dtype=torch.int32, device=values.device)
    for i in range(values.shape[2]):
        out |= (values[:, :, i].int() & ((1 << bits) - 1)) << (bits * i)
    return out

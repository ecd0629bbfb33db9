"""Repacks canonical weights into tiles of 32 rows (weight.h), losslessly: codes, scales and mins keep their bits."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..gguf_blocks import E2M1, IQ4
from ..weight import Weight
from .build import lib
from .interface import Code, CSource, CWeight, From, Number

FLOAT_FORMS = frozenset({"dense", "fp8", "fp8mx"})
INTEGER_FORMS = frozenset({"int4g", "int8", "fp4g16", "fp4g32", "gguf"})
NUMBERS = {torch.float32: Number.F32, torch.float16: Number.F16, torch.bfloat16: Number.BF16}
DENSE = {torch.float32: Code.F32, torch.float16: Code.F16, torch.bfloat16: Code.BF16}

# block type -> (input format, codes, scales, mins, zero offset, group)
GGUF = {
    "Q5_0": (From.Q5_0, Code.INT5, Number.F16, Number.NONE, 16, 32),
    "Q5_1": (From.Q5_1, Code.INT5, Number.F16, Number.F16, 0, 32),
    "Q2_K": (From.Q2_K, Code.INT2, Number.SUB8, Number.SUB8, 0, 16),
    "Q3_K": (From.Q3_K, Code.INT3, Number.SUB8, Number.NONE, 4, 16),
    "Q4_K": (From.Q4_K, Code.INT4, Number.SUB8, Number.SUB8, 0, 32),
    "Q5_K": (From.Q5_K, Code.INT5, Number.SUB8, Number.SUB8, 0, 32),
    "Q6_K": (From.Q6_K, Code.INT6, Number.SUB8, Number.NONE, 32, 16),
    "IQ4_NL": (From.IQ4_NL, Code.TABLE4, Number.F16, Number.NONE, 128, 32),
    "IQ4_XS": (From.IQ4_XS, Code.TABLE4, Number.SUB8, Number.NONE, 128, 32),
}


class Prepared:
    """A weight in tiles. Keeps alive the memory that the C struct points to."""

    __slots__ = ("address", "data", "decoder", "k", "kept", "layer", "n", "struct")

    def __init__(self, struct: CWeight, data: Tensor, kept: tuple[Tensor, ...]) -> None:
        self.struct, self.data, self.kept = struct, data, kept
        self.address = ctypes.addressof(struct)
        self.n, self.k = int(struct.n), int(struct.k)
        # cache of `segments`: a layer's weights and its C struct
        self.layer: tuple[Any, Any] | None = None
        self.decoder: Any = None  # the same for a whole model: C structs of its layers and their pages

    def forget(self, pages_only: bool = False) -> None:
        """Drop what `segments` has cached here."""
        self.decoder = None
        if not pages_only:
            self.layer = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tiles and of `row_scale`, `perm` and `pre_scale`."""
        return self.data.numel() + sum(t.numel() * t.element_size() for t in self.kept)


class Arena:
    """Allocator for weights: cuts them from large blocks, so that Linux can back them with 2 MiB pages."""

    SIZE = 32 << 20
    ALIGN = 64

    def __init__(self, size: int = SIZE) -> None:
        self._size = size
        self._piece: weakref.ref[torch.UntypedStorage] | None = None
        self._used = 0
        # two threads may load models at the same time
        self._lock = threading.Lock()

    def take(self, count: int) -> Tensor:
        """Return uint8 [count], aligned to 64 bytes; a block is freed with the last tensor cut from it."""
        with self._lock:
            storage = self._piece() if self._piece is not None else None
            if storage is None or self._used + count > storage.nbytes():
                piece = torch.empty(max(self._size, count + self.ALIGN), dtype=torch.uint8)
                storage = piece.untyped_storage()
                lib().ll_advise(piece.data_ptr(), piece.numel())
                self._piece, self._used = weakref.ref(storage), -piece.data_ptr() % self.ALIGN
            data = torch.empty(0, dtype=torch.uint8).set_(storage, self._used, (count,), (1,))
            self._used += -(-count // self.ALIGN) * self.ALIGN
            return data


@cache
def _arena() -> Arena:
    return Arena()


# tensors a struct points to besides its tiles
KEPT = {"row_scale": torch.float32, "perm": torch.int32, "pre_scale": torch.float32}


def prepare(weight: Weight) -> Prepared:
    """Repack a canonical weight losslessly.

    Raises ValueError for weights that `fits` rejects.
    """
    struct = CWeight(n=weight.shape[0], k=weight.shape[1], group=32)
    kind, codes, scales, mins = _describe(weight, struct)
    kept: list[Tensor] = []
    row_scale = weight.global_scale if weight.form == "fp4g16" else _row_scale(weight)
    for name, tensor in zip(KEPT, (row_scale, weight.perm, weight.pre_scale), strict=True):
        if tensor is not None:
            kept.append(tensor.contiguous().to(KEPT[name], copy=True))  # copy: must not be a view of the file
            setattr(struct, name, kept[-1].data_ptr())
    library = lib()
    data = _arena().take(library.ll_layout(ctypes.addressof(struct)))
    struct.data = data.data_ptr()
    codes = codes.contiguous()
    scales, mins = _padded(scales, struct), _padded(mins, struct)
    source = CSource(
        kind=kind,
        row_bytes=codes.shape[1] * codes.element_size(),
        q=codes.data_ptr(),
        scales=scales.data_ptr() if scales is not None else None,
        mins=mins.data_ptr() if mins is not None else None,
    )
    if library.ll_pack(ctypes.addressof(struct), ctypes.addressof(source)):
        raise MemoryError("out of memory while repacking a weight")
    return Prepared(struct, data, tuple(kept))


def kept_of(prepared: Prepared) -> dict[str, Tensor]:
    """Tensors kept besides the tiles, by name."""
    return dict(zip((name for name in KEPT if getattr(prepared.struct, name)), prepared.kept, strict=True))


def stored_struct(prepared: Prepared) -> bytes:
    """The struct without addresses; together with the tiles and `kept_of` it is the input of `revived`."""
    struct = CWeight.from_buffer_copy(prepared.struct)
    for name in ("data", *KEPT):
        setattr(struct, name, None)
    return bytes(struct)


def revived(struct: bytes, data: Tensor, kept: Mapping[str, Tensor]) -> Prepared:
    """Rebuild a weight that the same library repacked earlier. Its memory may be read-only."""
    made = CWeight.from_buffer_copy(struct)
    made.data = data.data_ptr()
    for name, part in kept.items():
        setattr(made, name, part.data_ptr())
    return Prepared(made, data, tuple(kept.values()))


def _describe(w: Weight, struct: CWeight) -> tuple[int, Tensor, Tensor | None, Tensor | None]:
    """Set the struct's formats; return (input format, codes [N, bytes], scales [N, groups], mins [N, groups])."""
    if w.form == "gguf":
        kind, struct.code, struct.scale_kind, struct.min_kind, struct.zero_offset, struct.group = GGUF[w.block_type]
        if struct.code == Code.TABLE4:
            struct.table[:] = [v + 128 for v in IQ4]
        return kind, w.qweight, None, None
    if w.form == "dense":
        struct.code = DENSE[w.qweight.dtype]
        return From.FLOATS, w.qweight, None, None
    assert w.scales is not None, w.form
    if w.form in ("fp8", "fp8mx"):
        return _describe_fp8(w, struct)
    if w.form == "int4g":
        struct.code, struct.zero_offset = Code.INT4, 8
        scales, mins = w.scales, w.mins
        if mins is not None:
            struct.min_kind, struct.zero_offset = NUMBERS[mins.dtype], 0
        elif w.zeros is not None:
            mins, struct.min_kind, struct.zero_offset = w.zeros, Number.ZERO8, 0
        kind = From.NIBBLES
    elif w.form == "int8":
        struct.code, struct.zero_offset, scales, mins, kind = Code.INT8, 128, w.scales, None, From.BYTES_SIGNED
    elif w.form in ("fp4g16", "fp4g32"):
        struct.code, struct.zero_offset, mins, kind = Code.TABLE4, 12, None, From.NIBBLES
        struct.table[:] = [int(2 * v) + 12 for v in E2M1]
        # codes are twice the E2M1 values, so scales are halved when they are read
        struct.group = 16 if w.form == "fp4g16" else 32
        scales, struct.scale_kind = _halves_of(w.scales) if w.form == "fp4g16" else _powers(w.scales, half=True)
        return kind, w.qweight, scales, None
    else:
        raise ValueError(f"no CPU layout for weights of form {w.form}")
    struct.scale_kind = NUMBERS[scales.dtype]
    if w.form in ("int4g", "int8"):
        struct.group = -(-w.shape[1] // 32) * 32 if scales.shape[1] == 1 else w.group_size
    return kind, w.qweight, scales, mins


def _describe_fp8(w: Weight, struct: CWeight) -> tuple[int, Tensor, Tensor | None, Tensor | None]:
    assert w.scales is not None
    n, k = w.shape
    codes = w.qweight.view(torch.uint8)
    struct.code = Code.E4M3
    if bool(((codes & 0x7F) == 0x7F).any()):  # the fast E4M3 decoder does not handle NaN
        codes, struct.code = w.qweight.view(torch.float8_e4m3fn).to(torch.bfloat16), Code.BF16
    if w.form == "fp8mx":
        scales, struct.scale_kind = _powers(w.scales, half=False)
    elif _row_scale(w) is not None:
        return From.FLOATS, codes, None, None
    else:
        struct.scale_kind, struct.group = Number.F32, 128
        scales = w.scales.float().repeat_interleave(128, 0)[:n]
        if scales.shape != (n, -(-k // 128)):
            raise ValueError(f"fp8 scales of shape {tuple(w.scales.shape)} for a weight of shape {w.shape}")
    return From.FLOATS, codes, scales, None


def _row_scale(w: Weight) -> Tensor | None:
    """Row scales of fp8 weights with one scale, or one per row; None otherwise."""
    if w.form != "fp8" or w.scales is None or (w.scales.dim() == 2 and w.scales.shape[1] > 1):
        return None
    if w.scales.numel() == 1:
        return w.scales.float().reshape(1).expand(w.shape[0])
    return w.scales.float().reshape(-1) if w.scales.numel() == w.shape[0] else None


# The fast decoders of E4M3 and E8M0 do not handle NaN: scales that contain one are stored as floats.


def _powers(exponents: Tensor, half: bool) -> tuple[Tensor, int]:
    """Scales 2^(e - 127), or `half` of that, and their storage format."""
    e = exponents.view(torch.uint8)
    if bool((e == 255).any()):
        return torch.ldexp(torch.where(e == 255, torch.nan, 0.5 if half else 1.0), e.int() - 127), Number.F32
    return e, Number.E8M0_HALF if half else Number.E8M0


def _halves_of(scales: Tensor) -> tuple[Tensor, int]:
    codes = scales.view(torch.uint8)
    if bool(((codes & 0x7F) == 0x7F).any()):
        return scales.float() * 0.5, Number.F32
    return codes, Number.E4M3_HALF


def _padded(numbers: Tensor | None, struct: CWeight) -> Tensor | None:
    """Pad rows to the layout's number of groups (K may end inside a block)."""
    if numbers is None:
        return None
    missing = int(struct.groups) - numbers.shape[1]
    return torch.nn.functional.pad(numbers, (0, missing)).contiguous() if missing else numbers.contiguous()

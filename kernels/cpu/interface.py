"""The C side as ctypes sees it: the structs of weight.h and pack.h, and the functions' argument types."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_uint8, c_void_p

__all__ = ["CWeight", "CSource", "Code", "From", "Number", "declare"]


class Code:
    """How codes lie in a tile (weight.h)."""

    INT8, INT4, TABLE4, INT5, INT6, INT2, INT3, F32, F16, BF16, E4M3 = range(11)


class Number:
    """How scales and mins are stored (weight.h)."""

    NONE, F32, F16, BF16, SUB8, ZERO8 = range(6)


class From:
    """What stored rows look like (pack.h)."""

    NIBBLES, BYTES_SIGNED, FLOATS, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS = range(12)


class CWeight(ctypes.Structure):
    """`ll_weight`."""

    _fields_ = [
        *[(name, c_int64) for name in ("n", "k", "tiles", "blocks", "code", "scale_kind", "min_kind", "zero_offset")],
        *[(name, c_int64) for name in ("group", "groups", "supers", "tile_bytes", "at_min", "at_super_scale")],
        *[(name, c_int64) for name in ("at_super_min", "at_codes", "block_bytes")],
        *[(name, c_void_p) for name in ("data", "row_scale", "perm", "pre_scale")],
        ("table", c_uint8 * 16),
    ]


class CSource(ctypes.Structure):
    """`ll_source`; the member called `from` in C is `kind` here."""

    _fields_ = [("kind", c_int64), ("row_bytes", c_int64), ("q", c_void_p), ("scales", c_void_p), ("mins", c_void_p)]


_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "ll_abi": (c_int64, ()),
    "ll_threads": (c_int64, (c_int64,)),
    "ll_advise": (None, (c_void_p, c_int64)),
    "ll_layout": (c_int64, (c_void_p,)),
    "ll_pack": (c_int64, (c_void_p, c_void_p)),
    "ll_unpack": (None, (c_void_p, c_void_p, c_int64, c_void_p)),
    "ll_linear": (c_int64, (c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64)),
}


def declare(lib: ctypes.CDLL) -> None:
    """Sets argument and result types. Raises AttributeError or ValueError when the library is not ours."""
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = arguments
    if lib.ll_abi() >> 32 != ctypes.sizeof(CWeight):
        raise ValueError("the library's structs differ from interface.py")

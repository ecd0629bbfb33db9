"""Inline assembly of the kernels, run instruction by instruction over arrays: no card is needed."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import torch

Registers = np.ndarray
"""uint32, any shape"""


def execute(text: str, given: Mapping[str, Registers]) -> Registers:
    """What `$0` holds after the text, for what `$1`, `$2`, ... hold."""
    held = dict(given)
    like = next(iter(held.values()))
    for line in text.strip("{} ").split(";"):
        if not line.strip() or ".reg" in line:
            continue
        op, rest = line.split(None, 1)
        to, *names = re.split(r",\s*", rest.strip())
        operands = [held[n] if n in held else np.full_like(like, int(n, 0)) for n in names[:3]]
        held[to] = _perform(op, operands, int(names[3], 0) if len(names) > 3 else 0)
    return held["$0"]


def numbers(register: Registers, dtype: torch.dtype) -> torch.Tensor:
    """float64 [.., 2] of both halves of a register, the low one first."""
    return torch.from_numpy(register.view(np.uint16).astype(np.int32)).to(torch.int16).view(dtype).double().view(-1, 2)


def _perform(op: str, a: list[Registers], table: int) -> Registers:
    """One instruction on its operands."""
    if op == "lop3.b32":
        return _lop3(a[0], a[1], a[2], table)
    if op == "prmt.b32":
        return _prmt(a[0], a[1], a[2])
    if op.startswith("dp4a.u32."):
        return _dp4a(a[0], a[1], a[2], np.int8 if op.endswith("s32") else np.uint8)
    if op == "sub.rn.f16x2":
        return _registers(numbers(a[0], torch.float16) - numbers(a[1], torch.float16), torch.float16)
    if op == "fma.rn.bf16x2":
        x, y, z = (numbers(part, torch.bfloat16) for part in a)
        return _registers(x * y + z, torch.bfloat16)
    simple = {
        "shl.b32": np.left_shift, "shr.u32": np.right_shift, "and.b32": np.bitwise_and, "or.b32": np.bitwise_or,
        "xor.b32": np.bitwise_xor,
    }  # fmt: skip
    return a[0] if op in ("mov.b32", "mov.u32") else simple[op](a[0], a[1]).astype(np.uint32)


def _lop3(a: Registers, b: Registers, c: Registers, table: int) -> Registers:
    """Any function of three bits, as the bits of a table."""
    out = np.zeros_like(a)
    for index in range(8):
        if table >> index & 1:
            out |= (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
    return out


def _prmt(a: Registers, b: Registers, pick: Registers) -> Registers:
    """Four bytes of eight, each by three bits of a nibble; where its fourth is set, the byte's top bit eight times."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    out = np.zeros_like(a)
    for i in range(4):
        nibble = pick >> np.uint32(4 * i) & np.uint32(15)
        byte = (both >> (8 * (nibble & 7)).astype(np.uint64) & np.uint64(255)).astype(np.uint32)
        byte = np.where(nibble & 8, 255 * (byte >> 7), byte)
        out |= (byte << (8 * i)).astype(np.uint32)
    return out


def _dp4a(a: Registers, b: Registers, c: Registers, kind: type) -> Registers:
    codes = a[..., None].view(np.uint8).astype(np.int64)
    others = b[..., None].view(kind).astype(np.int64)
    return ((codes * others).sum(-1) + c.astype(np.int64)).astype(np.uint32)


def _registers(values: torch.Tensor, dtype: torch.dtype) -> Registers:
    rounded = values.to(dtype)
    assert torch.equal(rounded.double(), values), "the result is not exact"
    return rounded.flatten().view(torch.int16).numpy().view(np.uint32)

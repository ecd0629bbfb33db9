"""The inline assembly that decodes two codes at once, run here instruction by instruction over every half."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from localllm.kernels.gguf_blocks import E2M1
from localllm.kernels.triton import pairs

HALVES = np.arange(1 << 16, dtype=np.uint32)
OTHERS = np.random.default_rng(0).permutation(HALVES)
"""what stands in the upper half beside each"""


def lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    """Any function of three bits, as the bits of a table."""
    out = np.zeros_like(a)
    for index in range(8):
        if table >> index & 1:
            out |= (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
    return out


def numbers(register: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """float64 [.., 2] of both halves of a register, the low one first."""
    return torch.from_numpy(register.view(np.uint16).astype(np.int32)).to(torch.int16).view(dtype).double().view(-1, 2)


def registers(values: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    rounded = values.to(dtype)
    assert torch.equal(rounded.double(), values), "the result is not exact"
    return rounded.flatten().view(torch.int16).numpy().view(np.uint32)


def perform(op: str, a: list[np.ndarray], table: int) -> np.ndarray:
    """One instruction on its operands."""
    if op == "lop3.b32":
        return lop3(a[0], a[1], a[2], table)
    if op == "sub.rn.f16x2":
        return registers(numbers(a[0], torch.float16) - numbers(a[1], torch.float16), torch.float16)
    if op == "fma.rn.bf16x2":
        x, y, z = (numbers(part, torch.bfloat16) for part in a)
        return registers(x * y + z, torch.bfloat16)
    simple = {"shl.b32": np.left_shift, "shr.u32": np.right_shift, "and.b32": np.bitwise_and}
    return a[0] if op == "mov.b32" else simple[op](a[0], a[1]).astype(np.uint32)


def execute(text: str) -> np.ndarray:
    """What `$0` holds for `$1` = (half, other half)."""
    held: dict[str, np.ndarray] = {"$1": HALVES | (OTHERS << 16)}
    for line in text.strip("{} ").split(";"):
        if not line.strip() or ".reg" in line:
            continue
        op, rest = line.split(None, 1)
        to, *names = re.split(r",\s*", rest.strip())
        operands = [held[n] if n in held else np.full_like(HALVES, int(n, 0)) for n in names[:3]]
        held[to] = perform(op, operands, int(names[3], 0) if len(names) > 3 else 0)
    return held["$0"]


def both(decode: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """[65536, 2]: what each half and its neighbour stand for."""
    return torch.stack([decode(torch.from_numpy(h.astype(np.int64))) for h in (HALVES, OTHERS)], -1).double()


@pytest.mark.parametrize("plane", range(4))
def test_int4(plane: int) -> None:
    for zero in (0, 8, 16):
        expected = both(lambda h, zero=zero: ((h >> 4 * plane) & 15) - zero)
        assert torch.equal(numbers(execute(pairs.int4_text(plane, zero, "bf16")), torch.bfloat16), expected)
        assert torch.equal(numbers(execute(pairs.int4_text(plane, zero, "f16")), torch.float16), expected)


@pytest.mark.parametrize("plane", range(4))
def test_e2m1(plane: int) -> None:
    values = torch.tensor(E2M1, dtype=torch.float64)
    found = numbers(execute(pairs.e2m1_text(plane)), torch.bfloat16) * 2.0**126
    assert torch.equal(found, both(lambda h: values[(h >> 4 * plane) & 15]))


@pytest.mark.parametrize("plane", range(2))
def test_int8_and_e4m3(plane: int) -> None:
    found = numbers(execute(pairs.int8_text(plane)), torch.bfloat16)
    assert torch.equal(found, both(lambda h: ((h >> 8 * plane) & 255) - 128))
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    values[[0x7F, 0xFF]] = torch.tensor([480.0, -480.0], dtype=torch.float64)  # rows with NaN say so in their scale
    found = numbers(execute(pairs.e4m3_text(plane)), torch.bfloat16) * 2.0**120
    assert torch.equal(found, both(lambda h: values[(h >> 8 * plane) & 255]))

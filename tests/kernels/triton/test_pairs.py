"""The inline assembly that decodes two codes at once, run here instruction by instruction over every half."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from localllm.kernels.gguf_blocks import E2M1
from localllm.kernels.triton import pairs

from .ptx import execute, numbers

HALVES = np.arange(1 << 16, dtype=np.uint32)
OTHERS = np.random.default_rng(0).permutation(HALVES)
"""what stands in the upper half beside each"""
GIVEN = {"$1": HALVES | (OTHERS << 16)}


def both(decode: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """[65536, 2]: what each half and its neighbour stand for."""
    return torch.stack([decode(torch.from_numpy(h.astype(np.int64))) for h in (HALVES, OTHERS)], -1).double()


@pytest.mark.parametrize("plane", range(4))
def test_int4(plane: int) -> None:
    for zero in (0, 8, 16):
        expected = both(lambda h, zero=zero: ((h >> 4 * plane) & 15) - zero)
        assert torch.equal(numbers(execute(pairs.int4_text(plane, zero, "bf16"), GIVEN), torch.bfloat16), expected)
        assert torch.equal(numbers(execute(pairs.int4_text(plane, zero, "f16"), GIVEN), torch.float16), expected)


@pytest.mark.parametrize("plane", range(4))
def test_e2m1(plane: int) -> None:
    values = torch.tensor(E2M1, dtype=torch.float64)
    found = numbers(execute(pairs.e2m1_text(plane), GIVEN), torch.bfloat16) * 2.0**126
    assert torch.equal(found, both(lambda h: values[(h >> 4 * plane) & 15]))


@pytest.mark.parametrize("plane", range(2))
def test_int8_and_e4m3(plane: int) -> None:
    found = numbers(execute(pairs.int8_text(plane), GIVEN), torch.bfloat16)
    assert torch.equal(found, both(lambda h: ((h >> 8 * plane) & 255) - 128))
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    values[[0x7F, 0xFF]] = torch.tensor([480.0, -480.0], dtype=torch.float64)  # rows with NaN say so in their scale
    found = numbers(execute(pairs.e4m3_text(plane), GIVEN), torch.bfloat16) * 2.0**120
    assert torch.equal(found, both(lambda h: values[(h >> 8 * plane) & 255]))

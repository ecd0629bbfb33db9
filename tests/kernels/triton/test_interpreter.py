"""What Triton's interpreter computes wrongly, so that a Triton that mends it is noticed and our detours can go."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels run on a card")


@triton.jit
def _add_bf16(x, y, out):
    i = tl.arange(0, 4)
    tl.store(out + i, (tl.load(x + i) + tl.load(y + i)).to(tl.float32))


@triton.jit
def _dot_bf16(x, y, out):
    i = tl.arange(0, 16)
    place = i[:, None] * 16 + i[None, :]
    tl.store(out + place, tl.dot(tl.load(x + place), tl.load(y + place)))


@triton.jit
def _cast(x, out):
    i = tl.arange(0, 4)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


def test_bfloat16_sums_are_wrong() -> None:
    x, y, out = torch.tensor([1.0, 2, 3, 4]).bfloat16(), torch.ones(4).bfloat16(), torch.empty(4)
    _add_bf16[(1,)](x, y, out)
    assert not torch.equal(out, (x + y).float()), "arithmetic on bfloat16 works now: the casts to float32 may go"


def test_bfloat16_products_are_wrong() -> None:
    x, out = torch.eye(16).bfloat16(), torch.empty(16, 16)
    _dot_bf16[(1,)](x, x, out)
    assert not torch.equal(out, torch.eye(16)), "tl.dot on bfloat16 works now: INTERPRET need not widen operands"


def test_float32_to_bfloat16_truncates() -> None:
    x, out = torch.tensor([1 + 2**-8 + 2**-9, 1.0, 2.0, 3.0]), torch.empty(4, dtype=torch.bfloat16)
    _cast[(1,)](x, out)
    assert out[0] == 1.0 and x.bfloat16()[0] > 1.0, "casts to bfloat16 round now: tests may compare bits"


def test_float32_to_e4m3_loses_the_carry() -> None:
    x, out = torch.tensor([1.97, 1.0, 3.94, 15.8]), torch.empty(4, dtype=torch.float8_e4m3fn)
    _cast[(1,)](x, out)
    assert not torch.equal(out.float(), x.to(torch.float8_e4m3fn).float()), "casts to E4M3 round now"

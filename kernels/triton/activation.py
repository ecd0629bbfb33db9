"""Gates: silu(gate) · up, gelu(gate) · up, and the gates of attention. Memory-bound: 6 bytes per output in bf16."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, wait_for_previous

BLOCK = 1024


@triton.jit
def gate(x, GELU: tl.constexpr):
    """silu(x), or tanh gelu(x), of float32; finite for every finite x."""
    if GELU:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp2(tl.minimum(inner * -2.885390081777927, 126.0)))
    return x / (1.0 + tl.exp2(tl.minimum(x * -1.4426950408889634, 126.0)))


@triton.jit
def gated(first, second, GATE: tl.constexpr, LIMIT: tl.constexpr):
    """act(gate) · up in float32. NaN propagates.

    LIMIT clamps up on both sides and the gate from above, before swiglu_oai and silu_clamped, after other activations;
    0: no limit.
    """
    EARLY: tl.constexpr = (GATE == "swiglu_oai") or (GATE == "silu_clamped")
    if LIMIT > 0.0:
        if EARLY:
            first = tl.where(first > LIMIT, LIMIT, first)
        second = tl.where(second > LIMIT, LIMIT, tl.where(second < -LIMIT, -LIMIT, second))
    if GATE == "swiglu_oai":
        y = first / (1.0 + tl.exp2(tl.minimum(first * -2.4554669595930157, 126.0))) * (second + 1.0)
    else:
        y = gate(first, GATE == "gelu_tanh")
        if (LIMIT > 0.0) and not EARLY:
            y = tl.where(y > LIMIT, LIMIT, y)
        y *= second
    return y


@triton.jit(do_not_specialize=["num_blocks"])
def _gated(
    gates, ups, out, dim, num_blocks, gates_stride, ups_stride,
    BLOCK: tl.constexpr, GATE: tl.constexpr, LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    d = (tl.program_id(0) % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    ok = d < dim
    first = tl.load(gates + row * gates_stride + d, mask=ok, other=0.0).to(tl.float32)
    second = tl.load(ups + row * ups_stride + d, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * dim + d, gated(first, second, GATE, LIMIT).to(out.dtype.element_ty), mask=ok)


def gate_rows(gates: Tensor, ups: Tensor, gate: str, limit: float | None = None) -> Tensor:
    """act(gates) · ups: [num_rows, dim]. Rows of both may be strided; `gate` and `limit` as in `gated`."""
    num_rows, dim = gates.shape
    out = torch.empty((num_rows, dim), dtype=gates.dtype, device=gates.device)
    blocks = -(-dim // BLOCK)
    numbers = dim, blocks, gates.stride(0), ups.stride(0)
    launch(_gated, (num_rows * blocks,), gates, ups, out, *numbers, BLOCK=BLOCK, GATE=gate, LIMIT=limit or 0.0)
    return out


def _run(gate_up: Tensor, gate: str, limit: float | None) -> Tensor:
    dim = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * dim)
    return gate_rows(rows[:, :dim], rows[:, dim:], gate, limit).view(*gate_up.shape[:-1], dim)


def silu_mul(gate_up: Tensor, limit: float | None = None) -> Tensor:
    """`reference.silu_mul`: [num_tokens, 2 · intermediate], gate first -> [num_tokens, intermediate]."""
    return _run(gate_up, "silu", limit)


def gelu_tanh_mul(gate_up: Tensor, limit: float | None = None) -> Tensor:
    """`reference.gelu_tanh_mul`: [num_tokens, 2 · intermediate], gate first -> [num_tokens, intermediate]."""
    return _run(gate_up, "gelu_tanh", limit)


@triton.jit
def _times_gates(
    out, q, SIZE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, SOFTPLUS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < SIZE
    gate = tl.load(q + token * 2 * SIZE + i + (i // DIM + 1) * DIM, mask=ok, other=0.0).to(tl.float32)
    shrunk = tl.exp2(tl.abs(gate) * -1.4426950408889634)
    if SOFTPLUS:
        factor = tl.log2(1.0 + shrunk) * 0.6931471805599453 + tl.maximum(gate, 0.0)
    else:
        factor = tl.where(gate < 0.0, shrunk, 1.0) / (1.0 + shrunk)
    at = out + token * SIZE + i
    y = tl.load(at, mask=ok, other=0.0).to(tl.float32) * factor
    tl.store(at, y.to(out.dtype.element_ty), mask=ok)


def times_gates(out: Tensor, q: Tensor, softplus: bool) -> Tensor:
    """Multiply attention's output by sigmoid(gate) or softplus(gate), in place.

    out  [num_tokens, num_heads * head_dim], contiguous
    q    [num_tokens, num_heads, 2 head_dim]: each query followed by its gate
    """
    size, (count, heads, _) = out.shape[1], q.shape
    grid = count, -(-size // BLOCK)
    launch(_times_gates, grid, out, q.contiguous(), SIZE=size, DIM=size // heads, BLOCK=BLOCK, SOFTPLUS=softplus)
    return out

"""Gated activations: silu(gate) · up or gelu(gate) · up. Memory-bound: 6 bytes per output element in bf16."""

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

    LIMIT clamps up on both sides and the gate from above, before swiglu_oai and after other activations; 0: no limit.
    """
    if LIMIT > 0.0:
        if GATE == "swiglu_oai":
            first = tl.where(first > LIMIT, LIMIT, first)
        second = tl.where(second > LIMIT, LIMIT, tl.where(second < -LIMIT, -LIMIT, second))
    if GATE == "swiglu_oai":
        y = first / (1.0 + tl.exp2(tl.minimum(first * -2.4554669595930157, 126.0))) * (second + 1.0)
    else:
        y = gate(first, GATE == "gelu_tanh")
        if LIMIT > 0.0:
            y = tl.where(y > LIMIT, LIMIT, y)
        y *= second
    return y


@triton.jit(do_not_specialize=["num_blocks"])
def _gated(
    gate_up, out, dim, num_blocks, BLOCK: tl.constexpr, GATE: tl.constexpr, LIMIT: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    wait_for_previous(PDL)
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    d = (tl.program_id(0) % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    ok = d < dim
    first = tl.load(gate_up + row * 2 * dim + d, mask=ok, other=0.0).to(tl.float32)
    second = tl.load(gate_up + row * 2 * dim + dim + d, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * dim + d, gated(first, second, GATE, LIMIT).to(out.dtype.element_ty), mask=ok)


def _run(gate_up: Tensor, gate: str, limit: float | None) -> Tensor:
    gate_up = gate_up.contiguous()
    dim = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], dim), dtype=gate_up.dtype, device=gate_up.device)
    blocks = -(-dim // BLOCK)
    grid = (out.numel() // dim * blocks if dim else 0,)
    launch(_gated, grid, gate_up, out, dim, blocks, BLOCK=BLOCK, GATE=gate, LIMIT=limit or 0.0)
    return out


def silu_mul(gate_up: Tensor, limit: float | None = None) -> Tensor:
    """`reference.silu_mul`: [num_tokens, 2 · intermediate], gate first -> [num_tokens, intermediate]."""
    return _run(gate_up, "silu", limit)


def gelu_tanh_mul(gate_up: Tensor, limit: float | None = None) -> Tensor:
    """`reference.gelu_tanh_mul`: [num_tokens, 2 · intermediate], gate first -> [num_tokens, intermediate]."""
    return _run(gate_up, "gelu_tanh", limit)

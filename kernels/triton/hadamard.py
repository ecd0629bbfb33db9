"""Hadamard rotation of int8 keys and their queries inside kernels: `kv_codes.hadamard` on tiles of whole vectors."""

from __future__ import annotations

import triton
import triton.language as tl

# longest run that is exchanged along rows: a gather takes as many shuffles as the square of a thread's elements. In the
# PTX for a latent of 512 there are 122, and 2,306 without this limit
SPAN = tl.constexpr(128)


def run_length(head_dim: int) -> int:
    """The largest power of two that divides head_dim: the size of the Hadamard matrix."""
    return head_dim & -head_dim


@triton.jit
def _butterflies(x, RUN: tl.constexpr, AXIS: tl.constexpr):
    """Unnormalized fast Walsh-Hadamard transform of float32 x on blocks of RUN elements along AXIS."""
    index = tl.arange(0, x.shape[AXIS])
    index = tl.broadcast_to(tl.expand_dims(index, 1 - AXIS), x.shape)
    for stage in tl.static_range(0, 10):
        if (1 << stage) < RUN:
            other = tl.gather(x, index ^ (1 << stage), AXIS)
            x = tl.where((index & (1 << stage)) != 0, other - x, x + other)
    return x


@triton.jit
def rotate_rows(x, RUN: tl.constexpr):
    """x · H for float32 [rows, D], D a multiple of RUN."""
    if RUN > SPAN:
        parts = tl.reshape(x, (x.shape[0] * (x.shape[1] // SPAN), SPAN))
        parts = _butterflies(_butterflies(parts, SPAN, 1), RUN // SPAN, 0)
        x = tl.reshape(parts, x.shape) * ((1.0 / RUN) ** 0.5)
    elif RUN > 1:
        x = _butterflies(x, RUN, 1) * ((1.0 / RUN) ** 0.5)
    return x


@triton.jit
def rotate_halves(even, odd, RUN: tl.constexpr, AXIS: tl.constexpr):
    """x · H for vectors along AXIS whose even and odd dimensions are in two float32 tiles."""
    if RUN > 1:
        first, second = even + odd, even - odd
        even = _butterflies(first, RUN // 2, AXIS) * ((1.0 / RUN) ** 0.5)
        odd = _butterflies(second, RUN // 2, AXIS) * ((1.0 / RUN) ** 0.5)
    return even, odd

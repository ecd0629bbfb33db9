"""Layers that keep states as segments in C, against those composed of references: steps, chunks, odd sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.kernels.cpu import segments as cpu
from localllm.kernels.cpu.build import library
from localllm.kernels.cpu.layers import conv_layer, delta_layer, mamba_layer
from localllm.kernels.layer_weights import ConvWeights, DeltaWeights, Linear, MambaWeights, Norm
from localllm.kernels.segments import REFERENCES, STATEFUL
from localllm.kernels.state_slots import StateSlots

from .test_experts import HIDDEN, product

SLOTS = 5
NORM = Norm(torch.linspace(0.5, 1.5, HIDDEN), 1e-6)

pytestmark = pytest.mark.skipif(bool(library().reason), reason="no C compiler")

Weights = DeltaWeights | ConvWeights | MambaWeights


def products(sizes: tuple[int, ...], k: int, seed: int) -> Linear:
    """Random weights in parts of so many outputs."""
    return Linear(tuple(part for i, n in enumerate(sizes) for part in product(n, k, 10 * seed + i).parts))


def normal(*shape: int, seed: int = 4) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.5


def delta(
    k_heads: int, v_heads: int, k_dim: int, v_dim: int, width: int, *, tiled: bool = False, rates: int = 2
) -> DeltaWeights:
    channels, values = 2 * k_heads * k_dim + v_heads * v_dim, v_heads * v_dim
    return DeltaWeights(
        norm=NORM,
        qkvz=products((channels, values), HIDDEN, 1),
        ba=products((2 * v_heads // rates,) * rates, HIDDEN, 2),
        out=products((HIDDEN,), values, 3),
        conv=normal(channels, width),
        decay=-torch.linspace(0.1, 2.0, v_heads),
        dt_bias=torch.linspace(-1.0, 1.0, v_heads),
        out_norm=Norm(torch.linspace(0.5, 1.5, v_dim), 1e-6),
        num_k_heads=k_heads,
        num_v_heads=v_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        tiled=tiled,
    )


def conv(channels: int, width: int, *, bias: bool) -> ConvWeights:
    return ConvWeights(
        norm=NORM,
        inputs=products((3 * channels,), HIDDEN, 1),
        out=products((HIDDEN,), channels, 3),
        conv=normal(channels, width),
        bias=normal(channels) if bias else None,
    )


def mamba(
    heads: int, dim: int, groups: int, size: int, width: int, steps: tuple[float, float] | None = None
) -> MambaWeights:
    inner, channels = heads * dim, heads * dim + 2 * groups * size
    return MambaWeights(
        norm=NORM,
        inputs=products((inner + channels, heads), HIDDEN, 1),
        out=products((HIDDEN,), inner, 3),
        conv=normal(channels, width),
        decay=-torch.linspace(0.1, 2.0, heads),
        skip=torch.linspace(0.2, 1.0, heads),
        dt_bias=torch.linspace(-1.0, 1.0, heads),
        out_norm=Norm(torch.ones(inner // groups), 1e-5),
        gain=torch.linspace(0.5, 1.5, inner),
        num_heads=heads,
        head_dim=dim,
        num_groups=groups,
        state_size=size,
        conv_bias=normal(channels, seed=6) if steps is None else None,
        steps=steps,
    )


KINDS: dict[str, Callable[[], Weights]] = {
    "delta": lambda: delta(2, 4, 32, 48, 4),
    "delta doubled": lambda: replace(delta(2, 2, 21, 42, 3), beta_scale=2.0),
    "delta tiled": lambda: delta(3, 9, 21, 37, 4, tiled=True),
    "delta single": lambda: delta(1, 1, 40, 16, 2, rates=1),
    "conv": lambda: conv(160, 3, bias=False),
    "conv bias": lambda: conv(201, 5, bias=True),
    "mamba": lambda: mamba(6, 24, 1, 32, 4),
    "mamba groups": lambda: mamba(6, 21, 2, 19, 3, (0.05, 0.5)),
}


def states(weights: Weights) -> StateSlots:
    taps = normal(SLOTS, weights.conv.shape[0], weights.conv.shape[1] - 1, seed=5)
    if isinstance(weights, ConvWeights):
        return StateSlots(taps, None)
    if isinstance(weights, DeltaWeights):
        shape = weights.num_v_heads, weights.v_dim, weights.k_dim
    else:
        shape = weights.num_heads, weights.head_dim, weights.state_size
    return StateSlots(taps, normal(SLOTS, *shape, seed=7) * 0.2)


def composed(*_: object) -> Tensor:
    raise AssertionError("C must take this layer")


def in_c(x: Tensor, weights: Weights, kept: StateSlots, slots: list[int], starts: list[int]) -> Tensor:
    run = getattr(cpu, STATEFUL[type(weights)])
    y: Tensor = run(composed, x.clone(), weights, kept, torch.tensor(slots), torch.tensor(starts, dtype=torch.int32))
    return y


def in_torch(x: Tensor, weights: Weights, kept: StateSlots, slots: list[int], starts: list[int]) -> Tensor:
    run = REFERENCES[STATEFUL[type(weights)]]
    y: Tensor = run(x.clone(), weights, kept, torch.tensor(slots), torch.tensor(starts, dtype=torch.int32))
    return y


def rows(count: int) -> Tensor:
    return normal(count, HIDDEN, seed=count) * 2


def close(ours: StateSlots | tuple[Tensor], theirs: StateSlots | tuple[Tensor]) -> None:
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_c_computes_what_the_composed_segment_does(kind: str, isa: str) -> None:
    weights = KINDS[kind]()
    for step in (([3], [0, 1]), ([4, 0, 2], [0, 1, 2, 3]), ([1, 4, 0, 2], [0, 2, 2, 140, 301])):
        x, ours, plain = rows(step[1][-1]), states(weights), states(weights)
        close((in_c(x, weights, ours, *step),), (in_torch(x, weights, plain, *step),))
        close(ours, plain)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_gives_the_bits_of_its_tokens_whatever_lies_beside_them(kind: str) -> None:
    weights, x = KINDS[kind](), rows(300)
    whole, beside, single = states(weights), states(weights), states(weights)
    y = in_c(x, weights, whole, [2], [0, 300])
    pieces = [in_c(x[at : at + 1], weights, single, [2], [0, 1]) for at in range(70)]
    pieces += [in_c(x[at : at + 115], weights, single, [2], [0, 115]) for at in (70, 185)]
    assert torch.equal(torch.cat(pieces), y)
    given = torch.cat([x[:5], x, x[:9]])
    assert torch.equal(in_c(given, weights, beside, [0, 2, 4], [0, 5, 305, 314])[5:305], y)
    for other in (beside, single):
        assert all(a is None or torch.equal(a[2], b[2]) for a, b in zip(other, whole, strict=True))


def test_more_parts_than_a_product_takes_are_two() -> None:
    weights = KINDS["delta"]()
    assert isinstance(weights, DeltaWeights)
    for sizes in ((100, 100, 184, 128), (512,)):
        used = replace(weights, qkvz=products(sizes, HIDDEN, 1))
        ours, plain = states(used), states(used)
        close((in_c(rows(30), used, ours, [1], [0, 30]),), (in_torch(rows(30), used, plain, [1], [0, 30]),))


@pytest.mark.parametrize("option", [{"norm": None}, {"join": object()}, {"conv": torch.zeros(512, 9)}])
def test_c_declines_what_it_does_not_know(option: dict[str, Any]) -> None:
    packers: dict[str, Callable[[Any], object]] = {"delta": delta_layer, "conv": conv_layer, "mamba": mamba_layer}
    for kind, pack in packers.items():
        assert pack(KINDS[kind]()) is not None
        assert pack(replace(KINDS[kind](), **option)) is None

"""The gated delta rule as a segment in C, against the one composed of references: steps, chunks, odd sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.kernels.cpu import segments as cpu
from localllm.kernels.cpu.build import library
from localllm.kernels.cpu.layers import delta_layer
from localllm.kernels.layer_weights import DeltaWeights, Linear, Norm
from localllm.kernels.segments import REFERENCES
from localllm.kernels.state_slots import StateSlots

from .test_experts import HIDDEN, product

SLOTS = 5
# key heads, value heads, their sizes, width of the convolution
SIZES = {"pairs": (2, 4, 32, 48, 4), "tiled": (3, 9, 21, 37, 4), "single": (1, 1, 40, 16, 2)}

pytestmark = pytest.mark.skipif(bool(library().reason), reason="no C compiler")


def products(sizes: tuple[int, ...], k: int, seed: int) -> Linear:
    """Random weights in parts of so many outputs."""
    return Linear(tuple(part for i, n in enumerate(sizes) for part in product(n, k, 10 * seed + i).parts))


def layer(kind: str, *, rates: int = 2) -> DeltaWeights:
    k_heads, v_heads, k_dim, v_dim, width = SIZES[kind]
    channels, values = 2 * k_heads * k_dim + v_heads * v_dim, v_heads * v_dim
    return DeltaWeights(
        norm=Norm(torch.linspace(0.5, 1.5, HIDDEN), 1e-6),
        qkvz=products((channels, values), HIDDEN, 1),
        ba=products((2 * v_heads // rates,) * rates, HIDDEN, 2),
        out=products((HIDDEN,), values, 3),
        conv=torch.randn((channels, width), generator=torch.Generator().manual_seed(4)) * 0.5,
        decay=-torch.linspace(0.1, 2.0, v_heads),
        dt_bias=torch.linspace(-1.0, 1.0, v_heads),
        out_norm=Norm(torch.linspace(0.5, 1.5, v_dim), 1e-6),
        num_k_heads=k_heads,
        num_v_heads=v_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        tiled=kind == "tiled",
    )


def states(weights: DeltaWeights) -> StateSlots:
    draw = torch.Generator().manual_seed(5)
    conv = torch.randn((SLOTS, weights.conv.shape[0], weights.conv.shape[1] - 1), generator=draw)
    shape = SLOTS, weights.num_v_heads, weights.v_dim, weights.k_dim
    return StateSlots(conv, torch.randn(shape, generator=draw) * 0.1)


def same(ours: StateSlots, theirs: StateSlots, slot: int) -> bool:
    return all(torch.equal(one[slot], other[slot]) for one, other in zip(ours, theirs, strict=True))


def composed(*_: object) -> Tensor:
    raise AssertionError("C must take this layer")


def in_c(x: Tensor, weights: DeltaWeights, kept: StateSlots, slots: list[int], starts: list[int]) -> Tensor:
    given = torch.tensor(slots), torch.tensor(starts, dtype=torch.int32)
    return cpu.gated_delta(composed, x.clone(), weights, kept, *given)


def rows(count: int) -> Tensor:
    return torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("kind", SIZES)
def test_c_computes_what_the_composed_segment_does(kind: str, isa: str) -> None:
    weights = layer(kind, rates=1 if kind == "single" else 2)
    for slots, starts in (([3], [0, 1]), ([4, 0, 2], [0, 1, 2, 3]), ([1, 4, 0, 2], [0, 2, 2, 140, 301])):
        x, ours, plain = rows(starts[-1]), states(weights), states(weights)
        y = in_c(x, weights, ours, slots, starts)
        given = torch.tensor(slots), torch.tensor(starts, dtype=torch.int32)
        wanted = REFERENCES["gated_delta"](x.clone(), weights, plain, *given)
        for found, expected in ((y, wanted), (ours.conv, plain.conv), (ours.state, plain.state)):
            torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind", SIZES)
def test_a_prompt_gives_the_bits_of_its_tokens_whatever_lies_beside_them(kind: str) -> None:
    weights, x = layer(kind), rows(300)
    whole, beside, single = states(weights), states(weights), states(weights)
    y = in_c(x, weights, whole, [2], [0, 300])
    pieces = [in_c(x[at : at + 1], weights, single, [2], [0, 1]) for at in range(70)]
    pieces += [in_c(x[at : at + 115], weights, single, [2], [0, 115]) for at in (70, 185)]
    assert torch.equal(torch.cat(pieces), y)
    given = torch.cat([x[:5], x, x[:9]])
    assert torch.equal(in_c(given, weights, beside, [0, 2, 4], [0, 5, 305, 314])[5:305], y)
    for other in (beside, single):
        assert same(other, whole, 2)


def test_more_parts_than_a_product_takes_are_two() -> None:
    weights = layer("pairs")
    slots, starts = torch.tensor([1]), torch.tensor([0, 30], dtype=torch.int32)
    for sizes in ((100, 100, 184, 128), (512,)):
        used = replace(weights, qkvz=products(sizes, HIDDEN, 1))
        ours, plain = states(used), states(used)
        wanted = REFERENCES["gated_delta"](rows(30), used, plain, slots, starts)
        torch.testing.assert_close(in_c(rows(30), used, ours, [1], [0, 30]), wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("option", [{"norm": None}, {"join": object()}, {"conv": torch.zeros(512, 9)}])
def test_c_declines_what_it_does_not_know(option: dict[str, Any]) -> None:
    assert delta_layer(layer("pairs")) is not None
    assert delta_layer(replace(layer("pairs"), **option)) is None

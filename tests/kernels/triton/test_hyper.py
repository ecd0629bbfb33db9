"""Hyper-connections in few launches against the composed segments: odd sizes, NaN, weights of either back end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.kernels import Weight
from localllm.kernels.dense_linear import REFERENCE
from localllm.kernels.layer_weights import HyperWeights, Linear, LinearPart, MixedWeights, Norm
from localllm.kernels.registry import OpFacts, choose
from localllm.kernels.segments import REFERENCES
from localllm.kernels.table import implementations
from localllm.kernels.triton import hyper
from localllm.kernels.triton.cards import Card
from localllm.kernels.triton.launch import recording
from localllm.kernels.verify.trial import TOLERANCE, compare
from localllm.models.architectures.layers import HyperConnections

SLOW = pytest.mark.slow
IMPLS = {"reference": REFERENCE} | {impl.name: impl for impl in implementations("linear")}
TYPES = [torch.float16, torch.bfloat16, torch.float32]
SIZES = [(44, 3, 5), (600, 4, 20), pytest.param(100, 16, 700, marks=SLOW), pytest.param(520, 2, 511, marks=SLOW)]


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def linear(sizes: tuple[int, ...], k: int, device: torch.device, impl: str, scale: float = 1.0) -> Linear:
    """Random half-precision weights in parts of so many outputs."""
    made = []
    for seed, n in enumerate(sizes):
        dense = normal(n, k, seed=n + seed, scale=scale * k**-0.5).half().to(device)
        made.append(LinearPart(IMPLS[impl], IMPLS[impl].prepare(Weight("dense", (n, k), dense)), None, (n, k)))
    return Linear(tuple(made))


def weights_of(
    hidden: int, count: int, rank: int, device: torch.device, impl: str = "reference", *, last: bool = False
) -> HyperWeights:
    wide, gains = count * hidden, () if last else (count,)
    return HyperWeights(
        count=count,
        norm=Norm(torch.linspace(0.5, 1.5, wide, device=device), 1e-6),
        down=linear((rank, *gains), wide, device, impl, scale=8.0),
        up=linear((wide,), rank, device, impl, scale=8.0),
        rank=rank,
    )


def not_called(*_: object) -> Any:
    raise AssertionError("the composed segment was called")


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert compare(found, wanted, 2 * TOLERANCE[str(dtype).removeprefix("torch.")]) == ""


def mixed_of(hidden: int, count: int, device: torch.device) -> MixedWeights:
    rows, wide = (2 + count) * count, count * hidden
    fn, base = normal(rows, wide, seed=5, scale=wide**-0.5), normal(rows, seed=6)
    scale = torch.tensor([0.9, 1.3, 2.0])
    return MixedWeights(count, *(part.to(device) for part in (fn, base, scale)), rounds=20, eps=1e-6, norm_eps=1e-5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("hidden", "count"), [(45, 4), (300, 2), pytest.param(1000, 8, marks=SLOW)])
def test_streams_are_mixed(hidden: int, count: int, dtype: torch.dtype, device: torch.device) -> None:
    """mHC; a token's result does not depend on the others."""
    weights, x = mixed_of(hidden, count, device), normal(3, count * hidden, seed=2, scale=3.0).to(device, dtype)
    mixed, gains = hyper.hyper_in(not_called, x, weights)
    wanted, wanted_gains = REFERENCES["hyper_in"](x.float(), weights)
    assert (mixed.dtype, gains.dtype) == (dtype, torch.float32)
    close(mixed, wanted, dtype)
    close(gains, wanted_gains, dtype)
    matrix = gains[:, count:].unflatten(-1, (count, count))
    torch.testing.assert_close(matrix.sum(1), torch.ones(3, count, device=device), rtol=1e-4, atol=1e-4)
    output = normal(3, hidden, seed=3).to(device, dtype)
    before = x.clone()
    wanted = REFERENCES["hyper_out"](x.clone().float(), output.float(), gains)
    found = hyper.hyper_out(not_called, x, output, gains)
    assert found is x
    close(found, wanted, dtype)
    for row in range(3):
        alone = before[row : row + 1].clone()
        own, own_gains = hyper.hyper_in(not_called, alone, weights)
        assert torch.equal(own[0], mixed[row]) and torch.equal(own_gains[0], gains[row])
        assert torch.equal(hyper.hyper_out(not_called, alone, output[row : row + 1], own_gains)[0], found[row])


def test_streams_that_no_kernel_mixes(device: torch.device) -> None:
    """Three of them, and rows that are not contiguous."""
    x = normal(2, 2 * 3 * 44, seed=2).to(device)
    assert hyper.hyper_in(lambda *_: "composed", x[:, : 3 * 44].contiguous(), mixed_of(44, 3, device)) == "composed"
    assert hyper.hyper_in(lambda *_: "composed", x[:, : 2 * 44], mixed_of(44, 2, device)) == "composed"
    gains = torch.ones(2, 12, device=device)
    output = x[:, :44].contiguous()
    assert hyper.hyper_out(lambda *_: "composed", x[:, : 3 * 44].contiguous(), output, gains) == "composed"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, pytest.param(70, marks=SLOW)])
@pytest.mark.parametrize(("hidden", "count", "rank"), SIZES)
def test_a_block_reads_and_writes_streams(
    hidden: int, count: int, rank: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    weights = weights_of(hidden, count, rank, device)
    x = normal(tokens, count * hidden, seed=2, scale=3.0).to(device, dtype)
    mixed, gains = hyper.hyper_in(not_called, x, weights)
    wanted, wanted_gains = REFERENCES["hyper_in"](x.float(), weights)
    assert (mixed.dtype, gains.dtype) == (dtype, torch.float32)
    close(mixed, wanted, dtype)
    close(gains, wanted_gains, dtype)
    output = normal(tokens, hidden, seed=3).to(device, dtype)
    wanted = REFERENCES["hyper_out"](x.float(), output.float(), gains)
    found = hyper.hyper_out(not_called, x, output, gains)
    assert found is x
    close(found, wanted, dtype)


@pytest.mark.parametrize("impl", ["reference", "triton_invariant"])
def test_a_token_has_the_same_bits_in_every_batch(impl: str, device: torch.device) -> None:
    """With products of either back end that are the same for every number of rows."""
    weights = weights_of(90, 4, 12, device)
    x = normal(5, 360, seed=2).to(device).half()
    mixed, gains = hyper.hyper_in(not_called, x, weights)
    output = hyper.hyper_out(not_called, x.clone(), mixed, gains)
    for row in range(5):
        alone = x[row : row + 1].clone()
        own, own_gains = hyper.hyper_in(not_called, alone, weights)
        assert torch.equal(own[0], mixed[row]) and torch.equal(own_gains[0], gains[row])
        assert torch.equal(hyper.hyper_out(not_called, alone, own, own_gains)[0], output[row])


def test_the_last_mixer_has_no_gains(device: torch.device) -> None:
    weights = weights_of(44, 3, 5, device, last=True)
    x = normal(3, 132, seed=2).to(device)
    mixed, gains = hyper.hyper_in(not_called, x, weights)
    assert gains.shape == (3, 0)
    close(mixed, REFERENCES["hyper_in"](x, weights)[0], torch.float32)


def test_what_is_no_number_shows(device: torch.device) -> None:
    """In its token alone: neither a sigmoid nor a mask may turn it into a closed gate."""
    weights = weights_of(44, 3, 5, device)
    x = normal(2, 132, seed=2).to(device)
    x[1, 50] = float("nan")
    mixed, gains = hyper.hyper_in(not_called, x, weights)
    assert mixed[1].isnan().all() and gains[1].isnan().all()
    assert mixed[0].isfinite().all() and gains[0].isfinite().all()
    found = hyper.hyper_out(not_called, normal(2, 132, seed=4).to(device), mixed, gains)
    assert found[1].isnan().all() and found[0].isfinite().all()


def test_gates_far_from_zero_stay_finite(device: torch.device) -> None:
    weights = weights_of(44, 3, 5, device)
    parts = tuple(replace(part, bias=torch.full(part.shape[:1], -1e6, device=device)) for part in weights.down.parts)
    x = normal(2, 132, seed=2).to(device)
    for sign in (1, -1):
        given = tuple(replace(part, bias=sign * part.bias) for part in parts)
        mixed, gains = hyper.hyper_in(not_called, x, replace(weights, down=Linear(given)))
        assert mixed.isfinite().all()
        torch.testing.assert_close(gains, torch.full_like(gains, 1.0 - sign), rtol=1e-6, atol=1e-30)


def test_what_they_do_not_know_is_composed(device: torch.device) -> None:
    weights = weights_of(44, 3, 5, device)
    x, gains = normal(2, 264, seed=2).to(device), torch.ones(2, 3, device=device)
    biased = replace(weights, norm=replace(weights.norm, bias=x[0, :132]))
    for rows, layer in ((x[:, ::2], weights), (x[:, :132].contiguous(), biased)):
        assert hyper.hyper_in(lambda *_: "composed", rows, layer) == "composed"
    assert hyper.hyper_out(lambda *_: "composed", x[:, ::2], x[:, :44].contiguous(), gains) == "composed"


def test_no_tokens(device: torch.device) -> None:
    weights = weights_of(44, 3, 5, device)
    mixed, gains = hyper.hyper_in(not_called, torch.empty(0, 132, device=device), weights)
    assert (mixed.shape, gains.shape) == ((0, 44), (0, 3))
    assert hyper.hyper_out(not_called, torch.empty(0, 132, device=device), mixed, gains).shape == (0, 132)


def test_a_block_launches_what_the_plan_expects(device: torch.device) -> None:
    """Around a block of Qwen3.8-Flash-Next, with half-precision weights."""
    facts = HyperConnections(4, 320)
    weights = weights_of(80, 4, 12, device, "triton")
    weights = replace(weights, down=linear((16,), 320, device, "triton"))  # the gains' rows are part of the matrix
    x = torch.zeros(1, 320, device=device).half()
    with recording(Card(90, 132)) as launches:
        mixed, gains = hyper.hyper_in(not_called, x, weights)
        hyper.hyper_out(not_called, x, mixed, gains)
    names = [one.kernel.__name__ for one in launches]
    assert names == ["_norm_rows", "gemv_kernel", "_split", "gemv_kernel", "_mean", "_spread"]
    assert len(names) == facts.launches


@pytest.mark.parametrize("name", ["hyper_in", "hyper_out"])
def test_they_are_chosen_on_a_card(name: str) -> None:
    facts = OpFacts(device="cuda", capability=90, dtype="bfloat16")
    assert choose(implementations(name), facts).impl.name == "triton"

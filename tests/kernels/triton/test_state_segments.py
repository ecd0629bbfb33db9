"""Fused segments of recurrent mixers against the composed ones: single rows, several, prompts in chunks, odd sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.kernels import Weight
from localllm.kernels.layer_weights import ConvWeights, DeltaWeights, Linear, LinearPart, MambaWeights, Norm
from localllm.kernels.segments import REFERENCES, STATEFUL
from localllm.kernels.state_slots import StateSlots
from localllm.kernels.table import implementations
from localllm.kernels.triton import product, recurrent, segments
from localllm.kernels.triton.launch import counters
from localllm.kernels.triton.recurrent import gated_norm

HIDDEN, SLOTS = 48, 5
SLOW = pytest.mark.slow
IMPL = next(impl for impl in implementations("linear") if impl.name == "triton")


def normal(*shape: int, seed: int = 4, scale: float = 0.5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def products(sizes: tuple[int, ...], k: int, device: torch.device, seed: int) -> Linear:
    """Random half-precision weights in parts of so many outputs."""
    made = []
    for index, n in enumerate(sizes):
        dense = normal(n, k, seed=10 * seed + index, scale=k**-0.5).half().to(device)
        made.append(LinearPart(IMPL, IMPL.prepare(Weight("dense", (n, k), dense)), None, (n, k)))
    return Linear(tuple(made))


def delta(
    k_heads: int, v_heads: int, k_dim: int, v_dim: int, device: torch.device, *, kimi: bool = False, rank: int = 0
) -> DeltaWeights:
    keys, values = k_heads * k_dim, v_heads * v_dim
    decays = keys if kimi else v_heads
    return DeltaWeights(
        norm=Norm(torch.linspace(0.5, 1.5, HIDDEN, device=device), 1e-6),
        qkvz=products((2 * keys + values, rank or values), HIDDEN, device, 1),
        ba=products((v_heads, rank or decays), HIDDEN, device, 2),
        out=products((HIDDEN,), values, device, 3),
        conv=normal(2 * keys + values, 4).to(device),
        decay=-torch.linspace(0.1, 2.0, v_heads, device=device),
        dt_bias=torch.linspace(-1.0, 1.0, decays, device=device),
        out_norm=Norm(torch.linspace(0.5, 1.5, v_dim, device=device), 1e-6),
        num_k_heads=k_heads,
        num_v_heads=v_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        sigmoid_gate=kimi,
        floor=-5.0 if kimi and not rank else None,
        a_up=products((decays,), rank, device, 5) if rank else None,
        z_up=products((values,), rank, device, 6) if rank else None,
    )


def short(device: torch.device, width: int = 3, normed: bool = False) -> ConvWeights:
    channels, norm = 40, Norm(torch.linspace(0.5, 1.5, HIDDEN, device=device), 1e-6)
    return ConvWeights(
        norm=norm,
        inputs=products((3 * channels,), HIDDEN, device, 1),
        out=products((HIDDEN,), channels, device, 3),
        conv=normal(channels, width).to(device),
        bias=normal(channels, seed=5).to(device) if normed else None,
        post_norm=norm if normed else None,
    )


def mamba(groups: int, device: torch.device, steps: tuple[float, float] | None = None) -> MambaWeights:
    heads, dim, size = 6, 10, 12
    inner, channels = heads * dim, heads * dim + 2 * groups * size
    return MambaWeights(
        norm=Norm(torch.linspace(0.5, 1.5, HIDDEN, device=device), 1e-6),
        inputs=products((inner + channels + heads,), HIDDEN, device, 1),
        out=products((HIDDEN,), inner, device, 3),
        conv=normal(channels, 4).to(device),
        decay=-torch.linspace(0.1, 2.0, heads, device=device),
        skip=torch.linspace(0.2, 1.0, heads, device=device),
        dt_bias=torch.linspace(-1.0, 1.0, heads, device=device),
        out_norm=Norm(torch.ones(inner // groups, device=device), 1e-5),
        gain=torch.linspace(0.5, 1.5, inner, device=device),
        num_heads=heads,
        head_dim=dim,
        num_groups=groups,
        state_size=size,
        conv_bias=normal(channels, seed=9).to(device),
        steps=steps,
    )


KINDS: dict[str, Callable[[torch.device], Any]] = {
    "gated delta": lambda device: delta(2, 4, 10, 6, device),
    "doubled": lambda device: replace(delta(2, 2, 10, 20, device), beta_scale=2.0),
    "tiled": lambda device: replace(delta(2, 4, 16, 20, device), tiled=True),
    "kimi": lambda device: delta(3, 3, 10, 14, device, kimi=True, rank=8),
    "ling": lambda device: delta(2, 2, 16, 16, device, kimi=True),
    "hyper": lambda device: replace(delta(2, 4, 10, 6, device), norm=None, hyper=object(), ngrams=object()),
    "mamba": lambda device: mamba(2, device),
    "limited mamba": lambda device: mamba(3, device, (0.3, 0.9)),
    "plain mamba": lambda device: replace(mamba(2, device), out_norm=None, gain=None),
    "conv": lambda device: short(device),
    "normed conv": lambda device: short(device, 4, True),
    "half-limited mamba": lambda device: mamba(1, device, (0.3, float("inf"))),
}


def slots_of(weights: Any, device: torch.device) -> StateSlots:
    if isinstance(weights, ConvWeights):
        channels, width = weights.conv.shape
        return StateSlots(normal(SLOTS, channels, width - 1, seed=7).to(device), None)
    if isinstance(weights, DeltaWeights):
        shape = weights.num_v_heads, weights.v_dim, weights.k_dim
    else:
        shape = weights.num_heads, weights.head_dim, weights.state_size
    channels, width = weights.conv.shape
    conv, state = normal(SLOTS, channels, width - 1, seed=7), normal(SLOTS, *shape, seed=8)
    return StateSlots(conv.to(device), state.to(device))


CASES = [
    *(("gated delta", lengths) for lengths in ([1], [1, 1, 1])),
    *(pytest.param("gated delta", lengths, marks=SLOW) for lengths in ([37, 0, 5], [2])),
    *(pytest.param(kind, lengths, marks=SLOW) for kind in list(KINDS)[1:] for lengths in ([1], [1, 1, 1], [18, 0, 3])),
    ("ling", [5]),
    ("hyper", [1]),
    ("doubled", [5]),
    ("mamba", [1, 1]),
    ("plain mamba", [1]),
    ("conv", [1]),
    ("normed conv", [5]),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("by_token", [pytest.param(True, marks=SLOW), False])
@pytest.mark.parametrize(("kind", "lengths"), CASES)
def test_fused_segments(kind: str, lengths: list[int], by_token: bool, device: torch.device) -> None:
    weights = KINDS[kind](device)
    name = STATEFUL[type(weights)]
    more = {} if name == "short_conv" else {"by_token": by_token}
    x = normal(sum(lengths), HIDDEN, seed=3, scale=1.0).half().to(device)
    slots = torch.tensor([3, 0, 4][: len(lengths)], device=device)
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()

    def composed(*_: object) -> Tensor:
        raise AssertionError("the composed segment was called")

    found, wanted, before = (slots_of(weights, device) for _ in range(3))
    y = getattr(segments, name)(composed, x.clone(), weights, found, slots, starts, **more)
    expected = REFERENCES[name](x.clone(), weights, wanted, slots, starts)
    assert y.dtype is torch.float16
    torch.testing.assert_close(y.float(), expected.float(), rtol=1e-2, atol=1e-2)
    for ours, theirs, old in zip(vars_of(found), vars_of(wanted), vars_of(before), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=5e-3)
        assert torch.equal(ours[[1, 2]], old[[1, 2]]) and not torch.equal(ours[3], old[3])


@pytest.mark.parametrize(("kind", "ending"), [("kimi", "walk_and_gate"), ("mamba", "walk_and_gate_groups")])
def test_a_row_is_convolved_and_gated_by_the_kernels_before(
    kind: str, ending: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counters are zero afterwards. Groups that are too wide for a warp have a launch of their own, as have all that
    are to be apart.
    """
    launched: list[str] = []
    for module in (recurrent, product):

        def launch(kernel: Any, *given: Any, own: Any = module.launch, **how: Any) -> None:
            launched.append(kernel.fn.__name__.strip("_"))
            own(kernel, *given, **how)

        monkeypatch.setattr(module, "launch", launch)
    weights = KINDS[kind](device)
    first = weights.qkvz if kind == "kimi" else weights.inputs
    x, slots = normal(1, HIDDEN).half().to(device), torch.tensor([3], device=device)
    starts, run = torch.tensor([0, 1], device=device).int(), getattr(segments, STATEFUL[type(weights)])
    y = run(None, x.clone(), weights, slots_of(weights, device), slots, starts)
    kernels = [name for name in launched if name != "gemv_kernel"]
    assert kernels == ["gemv_conv_kernel"] * len(first.parts) + [ending]
    assert not counters(device, product.COUNTERS).any()
    launched.clear()
    monkeypatch.setattr(recurrent, "WIDEST_GROUP", 8)
    monkeypatch.setattr(recurrent, "COUNTERS", 2)
    again = run(None, x.clone(), weights, slots_of(weights, device), slots, starts)
    assert launched[-3:-1] == ["walk", "gate" if kind == "kimi" else "gate_groups"]
    torch.testing.assert_close(again, y, rtol=1e-3, atol=1e-3)
    monkeypatch.setattr(recurrent, "COUNTERS", 1 << 16)
    launched.clear()
    again = run(None, x.clone(), weights, slots_of(weights, device), slots, starts, apart=True)
    kernels = ["convolve", "walk", "gate" if kind == "kimi" else "gate_groups"]
    assert [name for name in launched if name != "gemv_kernel"] == kernels
    torch.testing.assert_close(again, y, rtol=1e-3, atol=1e-3)


def test_several_rows_are_normed_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    norms: list[Norm | None] = []
    own = segments.normed
    monkeypatch.setattr(segments, "normed", lambda x, norm: norms.append(norm) or own(x, norm))
    weights, x = KINDS["gated delta"](device), normal(3, HIDDEN).half().to(device)
    slots, starts = torch.tensor([3, 0, 4], device=device), torch.arange(4, device=device).int()
    segments.gated_delta(None, x, weights, slots_of(weights, device), slots, starts)
    assert sum(norm is not None for norm in norms) == 1


def vars_of(kept: StateSlots) -> tuple[Tensor, ...]:
    return (kept.conv,) if kept.state is None else (kept.conv, kept.state)


@pytest.mark.parametrize("lengths", [[1], pytest.param([2], marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["beta", pytest.param("decay", marks=SLOW), "step"])
def test_a_rate_that_is_no_number_shows(kind: str, lengths: list[int], device: torch.device) -> None:
    """Some products overflow before others, and a fused gate must not turn NaN into a closed one."""
    weights = mamba(3, device, (0.3, 0.9)) if kind == "step" else KINDS["ling"](device)
    broken = replace(weights, dt_bias=weights.dt_bias * float("nan"))
    if kind == "beta":  # its rows come first
        part = weights.ba.parts[0]
        bias = torch.full((part.shape[0],), float("nan"), device=device)
        broken = replace(weights, ba=Linear((replace(part, bias=bias), *weights.ba.parts[1:])))
    slots = torch.tensor([3], device=device)
    starts = torch.tensor([0, *lengths], device=device).int()
    x = normal(lengths[0], HIDDEN, seed=3, scale=1.0).half().to(device)
    name = "mamba" if kind == "step" else "gated_delta"
    for by_token in (True, False):
        kept = slots_of(weights, device)
        y = getattr(segments, name)(None, x.clone(), broken, kept, slots, starts, by_token=by_token)
        assert y.isnan().all(), by_token


@pytest.mark.parametrize("is_sigmoid", [False, True])
def test_a_gate_that_is_no_number_shows(is_sigmoid: bool, device: torch.device) -> None:
    y, z = torch.ones(1, 2, 8, device=device), torch.ones(1, 16, device=device).half()
    z[0, 3] = float("nan")
    found = gated_norm(y, z, Norm(torch.ones(8, device=device), 1e-6), is_sigmoid)
    assert found.isnan().nonzero().tolist() == [[0, 3]]


def test_what_they_do_not_know_is_composed(device: torch.device) -> None:
    """An output that ranks must join, and rows that are not contiguous."""
    weights = mamba(2, device)
    kept, starts = slots_of(weights, device), torch.tensor([0, 1], device=device).int()
    x, slots = normal(1, 2 * HIDDEN).half().to(device), torch.tensor([3], device=device)
    for rows, layer in ((x[:, ::2], weights), (x[:, :HIDDEN], replace(weights, join=object()))):
        assert segments.mamba(lambda *_: "composed", rows, layer, kept, slots, starts) == "composed"

"""Ops that carry a state against their references: decoding, prompts, strided inputs, and which slots change."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.kernels import recurrent as plain
from localllm.kernels.registry import RECURRENT, OpFacts
from localllm.kernels.table import implementations
from localllm.kernels.triton import recurrent
from localllm.kernels.verify.cases import ModelShapes
from localllm.kernels.verify.trial import op_error

SLOW = pytest.mark.slow
Made = tuple[tuple[Any, ...], Tensor, tuple[Any, ...]]  # arguments before the state, the state, arguments after it


def starts(lengths: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """(slots, cu_query_lens) of sequences of so many tokens."""
    slots = torch.tensor([2, 0, 3][: len(lengths)], device=device)
    return slots, torch.tensor([0, *lengths], device=device).cumsum(0).int()


def heads(x: Tensor, sizes: list[tuple[int, int]]) -> list[Tensor]:
    """Parts of rows, as heads: tokens are strided."""
    parts = x.split([count * dim for count, dim in sizes], -1)
    return [part.unflatten(-1, size) for part, size in zip(parts, sizes, strict=True)]


def of_conv(lengths: list[int], device: torch.device, channels: int = 20, width: int = 4) -> Made:
    draw, count = torch.Generator().manual_seed(7), sum(lengths)
    x = torch.randn(count, channels + 3, generator=draw).to(device)[:, 3:]
    weight, bias = (torch.randn(*shape, generator=draw).to(device) for shape in ((channels, width), (channels,)))
    state = torch.randn(4, channels, width - 1, generator=draw).to(device)
    return (x, weight, bias), state, (*starts(lengths, device), True)


def of_delta(lengths: list[int], device: torch.device, tiled: bool = False, dim: int = 10) -> Made:
    draw, count = torch.Generator().manual_seed(8), sum(lengths)
    rows = torch.randn(count, 3 * 2 * dim + 4 * 6, generator=draw).to(device)
    q, k, _, v = heads(rows, [(2, dim), (2, dim), (2, dim), (4, 6)])
    decay, beta = (torch.rand(count, 4, generator=draw).to(device) for _ in range(2))
    state = torch.randn(4, 4, 6, dim, generator=draw).to(device)
    return (q, k, v, -decay, beta), state, (*starts(lengths, device), tiled)


def of_channels(lengths: list[int], device: torch.device, tiled: bool = False, dim: int = 10) -> Made:
    """`of_delta` with a decay per key channel: none in the first, about -30 per token in the last."""
    (q, k, v, decay, beta), state, after = of_delta(lengths, device, tiled, dim)
    decay = decay.unsqueeze(-1) * torch.linspace(0.0, 60.0, dim, device=device)
    return (q, k, v, decay.contiguous(), beta), state, after


def of_space(lengths: list[int], device: torch.device, size: int = 12) -> Made:
    draw, count = torch.Generator().manual_seed(9), sum(lengths)
    x, b, c = heads(torch.randn(count, 4 * 5 + 4 * size, generator=draw).to(device), [(4, 5), (2, size), (2, size)])
    steps, decay = (torch.rand(*shape, generator=draw).to(device) for shape in ((count, 4), (4,)))
    state = torch.randn(4, 4, 5, size, generator=draw).to(device)
    return (x, b, c, steps, -decay), state, starts(lengths, device)


def compare(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], made: Made, limit: float = 2e-6) -> None:
    """Outputs and states of both, also those of slots that no sequence has."""
    before, state, after = made
    found, wanted = state.clone(), state.clone()
    y, expected = ours(*before, found, *after), theirs(*before, wanted, *after)
    torch.testing.assert_close(y, expected, rtol=limit, atol=4 * limit)
    torch.testing.assert_close(found, wanted, rtol=limit, atol=4 * limit)
    assert torch.equal(found[1], state[1])


DECODING, PROMPTS = [1, 1, 1], [2, 1, 5]
GUESSES = [3, 2, 0]  # as a captured step has them: what no sequence fills is one of its own, and others are empty


@pytest.mark.parametrize("lengths", [DECODING, GUESSES, *(pytest.param(one, marks=SLOW) for one in (PROMPTS, [40, 3]))])
def test_causal_conv(lengths: list[int], device: torch.device) -> None:
    """Tiles of 16 tokens: 40 and 3 begin and end inside of some, and are shorter than the filter."""
    compare(recurrent.causal_conv, plain.causal_conv, of_conv(lengths, device))


@pytest.mark.slow
@pytest.mark.parametrize("width", [10, *(pytest.param(width, marks=SLOW) for width in (2, 3, 20))])
def test_causal_conv_of_other_widths(width: int, device: torch.device) -> None:
    """10: four taps, three tokens apart, as n-gram embeddings have; 20: longer than a tile."""
    for lengths in (DECODING, PROMPTS, [40, 3]):
        compare(recurrent.causal_conv, plain.causal_conv, of_conv(lengths, device, channels=300, width=width))


@pytest.mark.parametrize("tiled", [pytest.param(False, marks=SLOW), True])
@pytest.mark.parametrize("lengths", [DECODING[:1], GUESSES, pytest.param(PROMPTS, marks=SLOW)])
def test_delta_rule_token_by_token(lengths: list[int], tiled: bool, device: torch.device) -> None:
    compare(partial(recurrent.delta_rule, by_token=True), plain.delta_rule, of_delta(lengths, device, tiled))


@pytest.mark.parametrize("lengths", [GUESSES, *(pytest.param(one, marks=SLOW) for one in (DECODING, PROMPTS))])
def test_delta_rule_with_a_decay_per_channel(lengths: list[int], device: torch.device) -> None:
    made = of_channels(lengths, device, tiled=True)
    compare(partial(recurrent.delta_rule, by_token=True), plain.delta_rule, made)


@pytest.mark.parametrize("lengths", [DECODING[:1], *(pytest.param(one, marks=SLOW) for one in (GUESSES, PROMPTS))])
def test_state_space_token_by_token(lengths: list[int], device: torch.device) -> None:
    compare(partial(recurrent.state_space, by_token=True), plain.state_space, of_space(lengths, device))


@SLOW
@pytest.mark.parametrize("lengths", [[37, 1], [5], [2, 70, 3], GUESSES], ids=str)
@pytest.mark.parametrize("made", [of_delta, of_channels, of_space])
def test_prompts_in_chunks(made: Callable[..., Made], lengths: list[int], device: torch.device) -> None:
    op = "state_space" if made is of_space else "delta_rule"
    compare(getattr(recurrent, op), getattr(plain, op), made(lengths, device), 1e-5 if device.type == "cpu" else 2e-3)


def test_a_chunk_with_a_decay_per_channel(device: torch.device) -> None:
    """Its sequences end inside a chunk, whose padding neither decays nor adds."""
    made = of_channels([18, 0, 3], device, tiled=True)
    compare(recurrent.delta_rule, plain.delta_rule, made, 1e-5 if device.type == "cpu" else 2e-3)


@SLOW
@pytest.mark.parametrize("dim", [3, 16, 33])
def test_decays_per_channel_of_other_sizes(dim: int, device: torch.device) -> None:
    """A token that erases every channel, and others around it that erase none."""
    (q, k, v, decay, beta), state, after = of_channels([21, 33], device, dim=dim)
    decay = torch.zeros_like(decay)
    decay[11], decay[30] = -500.0, -30.0
    made = (q, k, v, decay, beta), state, after
    compare(recurrent.delta_rule, plain.delta_rule, made, 1e-4 if device.type == "cpu" else 2e-3)


@SLOW
@pytest.mark.parametrize("made_of", [of_delta, of_channels])
def test_a_chunk_of_equal_keys_is_solved(made_of: Callable[..., Made], device: torch.device) -> None:
    """Without decay every token takes back what the one before has written: powers of such a system grow to 1e8."""
    (q, k, v, decay, beta), state, after = made_of([32], device)
    made = (q, torch.ones_like(k), v, decay * 0, torch.ones_like(beta)), state, after
    compare(recurrent.delta_rule, plain.delta_rule, made, 1e-5 if device.type == "cpu" else 2e-3)


@SLOW
@pytest.mark.parametrize("made", [of_conv, of_delta, of_channels, of_space])
def test_a_prompt_gives_the_bits_of_its_tokens(made: Callable[..., Made], device: torch.device) -> None:
    delta_rule, state_space = (partial(run, by_token=True) for run in (recurrent.delta_rule, recurrent.state_space))
    run: Any = {of_conv: recurrent.causal_conv, of_space: state_space}.get(made, delta_rule)
    before, state, (_, _, *more) = made([19], device)
    whole, single = state.clone(), state.clone()
    y = run(*before, whole, *starts([19], device), *more)
    for t in range(19):
        at = [part[t : t + 1] if part is not None and part.shape[0] == 19 else part for part in before]
        assert torch.equal(run(*at, single, *starts([1], device), *more)[0], y[t]), t
    assert torch.equal(whole, single)


@SLOW
@pytest.mark.parametrize("op", RECURRENT)
def test_the_self_test_passes(op: str, device: torch.device) -> None:
    facts = OpFacts(device="cuda", capability=90, dtype="float16", deterministic=False)
    runs = [impl.run for impl in implementations(op) if impl.fits(facts) is None and impl.name.startswith("triton")]
    shapes = ModelShapes(hidden=64, intermediate=128, facts=OpFacts(device=device.type, dtype="float16"))
    assert runs and all(op_error(op, run, shapes) == "" for run in runs)

"""Attention over latents in splits against the reference: every format, prompts and single tokens, many heads."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from localllm.kernels import Weight, kv_codes, reference
from localllm.kernels.experts import Stack
from localllm.kernels.kv_pages import KVPages
from localllm.kernels.layer_weights import LatentWeights, Linear, LinearPart, Norm
from localllm.kernels.segments import REFERENCES
from localllm.kernels.table import implementations
from localllm.kernels.triton import latent
from localllm.kernels.triton.cards import Card
from localllm.kernels.triton.launch import recording

from ..compressed_layers import COUNT, PAGE, step

SLOW = pytest.mark.slow
IMPL = next(impl for impl in implementations("linear") if impl.name == "triton")


def pages_of(kv_format: str, rank: int, turned: int, device: torch.device, layer: bool) -> KVPages:
    """Pages full of random latents."""
    pages = KVPages.empty(kv_format, COUNT, 1, PAGE, rank, turned)
    if layer:
        pages = pages._replace(k_scales=torch.tensor([0.013]), v_scales=torch.tensor([0.009]))
    kept, pieces = torch.randn(COUNT * PAGE, 1, rank), torch.randn(COUNT * PAGE, 1, turned)
    reference.kv_write(kept, pieces, pages, torch.arange(COUNT * PAGE))
    return KVPages(*(None if part is None else part.to(device) for part in pages))


@pytest.mark.parametrize(
    ("kv_format", "lengths", "heads"),
    [
        ("fp8", [(1, 20)], 3),
        *(pytest.param(name, [(1, 150), (1, 7)], 3, marks=SLOW) for name in ("bf16", "fp16", "int8", "fp8")),
        pytest.param("fp16", [(2, 20), (1, 5)], 33, marks=SLOW),
        pytest.param("fp8 layer", [(2, 20), (1, 33)], 17, marks=SLOW),
    ],
)
@pytest.mark.parametrize("by_token", [pytest.param(False, marks=SLOW), True])
def test_attend(
    kv_format: str, lengths: list[tuple[int, int]], heads: int, by_token: bool, device: torch.device
) -> None:
    torch.manual_seed(5)
    name, _, layer = kv_format.partition(" ")
    pages, where = pages_of(name, 24, 8, device, bool(layer)), step(lengths, device)
    q = torch.randn(int(where[1][-1]), heads, 32).to(device)
    found = latent.attend(q, pages, *where, 0.2, by_token=by_token)
    limit = 1e-5 if device.type == "cpu" else 2e-2
    torch.testing.assert_close(found, reference.latent_attention(q, pages, *where, 0.2), rtol=limit, atol=limit)


def test_queries_of_rotated_latents_turn_a_few_at_a_time(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once they took three times what the plan counts."""
    torch.manual_seed(7)
    pages, where, turned = pages_of("int8", 24, 8, device, False), step([(3, 20), (2, 5)], device), []

    def hadamard(x: Tensor) -> Tensor:
        turned.append(x.shape[0])
        return kv_codes.hadamard(x)

    monkeypatch.setattr(latent, "hadamard", hadamard)
    monkeypatch.setattr(latent, "PART_BYTES", 2 * 3 * (1 + latent.ROTATING) * 26 * 4)
    q = torch.randn(5, 3, 32).to(device)
    found = latent.attend(q, pages, *where, 0.2)
    assert turned == [2, 2, 2, 2, 1, 1]
    limit = 1e-5 if device.type == "cpu" else 2e-2
    torch.testing.assert_close(found, reference.latent_attention(q, pages, *where, 0.2), rtol=limit, atol=limit)


def test_no_more_programs_than_keep_the_card_busy(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Mock(return_value=1)
    monkeypatch.setattr(latent, "side_by_side", asked)
    pages, q = pages_of("fp16", 24, 8, device, False), torch.randn(1, 3, 32).to(device)
    with recording(Card(90, 132)):
        latent.attend(q, pages, *step([(1, 150)], device), 0.2)
    asked.assert_called_once()


@SLOW
def test_no_chunk_changes_a_bit_of_a_token(device: torch.device) -> None:
    """A prompt at once, and its last token alone; keys of two splits."""
    torch.manual_seed(6)
    pages, q = pages_of("fp16", 24, 8, device, False), torch.randn(2, 3, 32).to(device)
    whole = latent.attend(q, pages, *step([(2, 150)], device), 0.2, by_token=True)
    alone = latent.attend(q[1:], pages, *step([(1, 150)], device), 0.2, by_token=True)
    assert torch.equal(whole[1:], alone)


def layer(heads: int, rank: int, turned: int, device: torch.device, query_rank: int, gated: bool) -> LatentWeights:
    still, value, hidden = 12, 20, 40

    def linear(n: int, k: int, seed: int) -> Linear:
        dense = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * k**-0.5
        weight = Weight("dense", (n, k), dense.half().to(device))
        return Linear((LinearPart(IMPL, IMPL.prepare(weight), None, (n, k)),))

    def norm(size: int, eps: float = 1e-6) -> Norm:
        return Norm(torch.linspace(0.5, 1.5, size).to(device), eps)

    stacks = Stack(heads), Stack(heads)
    for head in range(heads):
        stacks[0].add(linear(rank, still, 10 + head))
        stacks[1].add(linear(value, rank, 30 + head))
    (k_up, all_k), (v_up, all_v) = (stack.finished() for stack in stacks)
    assert all_k is not None and all_v is not None
    queries = heads * (still + turned)
    return LatentWeights(
        norm=norm(hidden),
        qkv=linear((query_rank or queries) + rank + turned + heads * gated, hidden, 1),
        q_up=linear(queries, query_rank, 2) if query_rank else None,
        q_norm=norm(query_rank) if query_rank else None,
        kv_norm=norm(rank),
        k_up=k_up,
        v_up=v_up,
        out=linear(hidden, heads * value, 3),
        rank=rank,
        turned=turned,
        scale=0.2,
        interleaved=bool(query_rank),
        gated=gated,
        stacked=(all_k, all_v),
    )


@pytest.mark.parametrize(
    ("kv_format", "lengths", "query_rank", "gated"),
    [
        ("fp16", [(1, 20)], 14, True),
        *(pytest.param(name, [(1, 40)], 0, False, marks=SLOW) for name in ("fp16", "int8", "fp8", "fp8 layer")),
        pytest.param("fp16", [(1, 20), (2, 5)], 14, False, marks=SLOW),
        pytest.param("int8", [(1, 20), (1, 33)], 0, True, marks=SLOW),
    ],
)
def test_the_segment_of_few_rows(
    kv_format: str, lengths: list[tuple[int, int]], query_rank: int, gated: bool, device: torch.device
) -> None:
    torch.manual_seed(8)
    name, _, scaled = kv_format.partition(" ")
    weights, pages = layer(3, 24, 8, device, query_rank, gated), pages_of(name, 24, 8, device, bool(scaled))
    block_table, starts, seen = step(lengths, device)
    at = [(length - new + i, row) for row, (new, length) in enumerate(lengths) for i in range(new)]
    slots = torch.tensor([int(block_table[row, p // PAGE]) * PAGE + p % PAGE for p, row in at], device=device)
    angles = torch.randn(len(at), 4)
    view = angles.cos().to(device), angles.sin().to(device), block_table, slots
    x = torch.randn(len(at), 40).half().to(device)

    def composed(*_: object, **__: object) -> Tensor:
        raise AssertionError("the composed segment was called")

    found, wanted = (KVPages(*(None if part is None else part.clone() for part in pages)) for _ in range(2))
    y = latent.latent_attention(composed, x.clone(), weights, found, view, starts, seen)
    expected = REFERENCES["latent_attention"](x.clone(), weights, wanted, view, starts, seen)
    torch.testing.assert_close(y.float(), expected.float(), rtol=2e-2, atol=2e-2)
    for ours, theirs in zip(found[:2], wanted[:2], strict=True):
        off = (ours.float() - theirs.float()).abs()
        assert float(off.max()) <= (1 if name == "int8" else 0.01 if name == "fp16" else 64)
        assert float((off > 0).float().mean()) < 0.02


def test_products_of_another_implementation_are_composed(device: torch.device) -> None:
    """Such as the one that replaced `triton` when it failed its self-test: its kernel must not run for the heads."""
    weights, pages, (table, *bounds) = (
        layer(3, 24, 8, device, 0, False),
        pages_of("fp16", 24, 8, device, False),
        step([(1, 20)], device),
    )
    assert weights.stacked is not None
    first, second = weights.stacked
    other = next(impl for impl in implementations("linear") if impl.name == "triton_invariant")
    view = *(torch.ones(1, 4, device=device) for _ in range(2)), table, torch.tensor([3], device=device)
    x = torch.ones(1, 40, device=device).half()
    for stacked in ((replace(first, impl=other), second), (first, replace(second, impl=other)), None):
        changed = replace(weights, stacked=stacked)
        assert latent.latent_attention(lambda *_, **__: "composed", x, changed, pages, view, *bounds) == "composed"


def test_a_gate_of_a_head_that_is_no_number_shows(device: torch.device) -> None:
    values, gates = torch.ones(1, 40, device=device).half(), torch.tensor([[1.0, float("nan")]], device=device).half()
    assert latent._gated(values, gates).isnan().nonzero()[:, 1].tolist() == [*range(20, 40)]


def test_a_padding_row_of_a_captured_step_stores_nothing(device: torch.device) -> None:
    weights, pages = layer(3, 24, 8, device, 0, False), pages_of("fp16", 24, 8, device, False)
    kept = pages.k.clone(), pages.v.clone()
    block_table, starts, seen = step([(1, 20)], device)
    view = *(torch.ones(1, 4, device=device) for _ in range(2)), block_table, torch.tensor([-1], device=device)
    latent.latent_attention(
        lambda *_: None, torch.ones(1, 40, device=device).half(), weights, pages, view, starts, seen
    )
    assert torch.equal(pages.k, kept[0]) and torch.equal(pages.v, kept[1])

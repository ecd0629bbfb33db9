"""Compressed attention in kernels against the reference: entries, with an index or without, formats, prompts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from localllm.kernels import Weight, reference
from localllm.kernels.experts import Stack
from localllm.kernels.kv_pages import CompressedPages, KVPages
from localllm.kernels.layer_weights import (
    CompressedWeights,
    EntryIndexWeights,
    Linear,
    LinearPart,
    Norm,
    PoolWeights,
    View,
)
from localllm.kernels.segments import REFERENCES
from localllm.kernels.table import implementations
from localllm.kernels.triton import compressed
from localllm.kernels.verify.trial import compare

from .test_latent import COUNT, PAGE, SLOW, step

IMPL = next(impl for impl in implementations("linear") if impl.name == "triton")
HIDDEN, HEADS, DIM, HALF, WINDOW, INDEX, TOP = 40, 3, 24, 4, 20, 16, 5


def linear(n: int, k: int, seed: int, device: torch.device) -> Linear:
    dense = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * k**-0.5
    weight = Weight("dense", (n, k), dense.half().to(device))
    return Linear((LinearPart(IMPL, IMPL.prepare(weight), None, (n, k)),))


def layer(ratio: int, device: torch.device) -> CompressedWeights:
    """Entries of four tokens overlap and have an index."""

    def norm(size: int) -> Norm:
        return Norm(torch.linspace(0.5, 1.5, size).to(device), 1e-6)

    def pool(width: int, seed: int) -> PoolWeights:
        places = torch.randn(ratio, sets * width, generator=torch.Generator().manual_seed(seed)).to(device)
        return PoolWeights(linear(2 * sets * width, HIDDEN, seed, device), places, norm(width))

    stack, sets, angles = Stack(3), 1 + (ratio == 4), torch.linspace(0.1, 2.0, HALF) * (ratio - 1)
    for group in range(3):
        stack.add(linear(10, DIM, 10 + group, device))
    narrow, stacked = stack.finished()
    assert stacked is not None
    index = EntryIndexWeights(linear(4 * INDEX, 14, 7, device), linear(4, HIDDEN, 8, device), 4, TOP)
    return CompressedWeights(
        norm=norm(HIDDEN),
        inputs=linear(14 + DIM, HIDDEN, 1, device),
        q_norm=norm(14),
        q_up=linear(HEADS * DIM, 14, 2, device),
        head_norm=Norm(torch.ones(DIM, device=device), 1e-6),
        kv_norm=norm(DIM),
        narrow=narrow,
        out=linear(HIDDEN, 30, 3, device),
        sinks=torch.tensor([0.3, -1.0, 2.0], device=device),
        num_heads=HEADS,
        head_dim=DIM,
        scale=0.2,
        window=WINDOW,
        interleaved=True,
        pools=(pool(DIM, 4), pool(INDEX, 5))[: sets * bool(ratio)],
        ratio=ratio,
        overlaps=ratio == 4,
        back=torch.stack([angles.cos(), angles.sin()]).to(device) if ratio else None,
        index=index if ratio == 4 else None,
        stacked=stacked,
    )


def pages_of(kv_format: str, weights: CompressedWeights, device: torch.device) -> CompressedPages | KVPages:
    """Pages full of random values, of what entries are made of, and of entries."""
    window, entries = KVPages.empty(kv_format, COUNT, 1, PAGE, DIM, 0), KVPages.empty("bf16", COUNT, 1, PAGE, 0, 0)
    kept = torch.randn(COUNT * PAGE, 1, DIM)
    reference.kv_write(kept, kept[..., :0], window, torch.arange(COUNT * PAGE))
    widths = [pool.norm.weight.shape[0] for pool in weights.pools]
    if widths:
        made = torch.randn(COUNT, PAGE, 2 * (1 + weights.overlaps) * sum(widths)).bfloat16()
        window = window._replace(index_keys=made, block_keys=made[..., :0])
        places = PAGE // min(weights.ratio, PAGE)
        own = torch.randn(COUNT, places, sum(widths)).bfloat16()
        entries = entries._replace(index_keys=made[..., :0], block_keys=own)
    window, entries = (KVPages(*(None if x is None else x.to(device) for x in part)) for part in (window, entries))
    return CompressedPages(window, entries) if widths else window


def copied(pages: CompressedPages | KVPages) -> CompressedPages | KVPages:
    if isinstance(pages, CompressedPages):
        return CompressedPages(*(copied(part) for part in pages))  # type: ignore[arg-type]
    return KVPages(*(None if part is None else part.clone() for part in pages))


def views_of(lengths: list[tuple[int, int]], device: torch.device) -> tuple[View, View, Tensor, Tensor]:
    """Views of the last tokens and of the entries, whose pages are others; cu_query_lens and seq_lens."""
    table, starts, seen = step(lengths, device)
    at = [(length - new + i, row) for row, (new, length) in enumerate(lengths) for i in range(new)]
    angles = torch.tensor([position for position, _ in at]).unsqueeze(1) * torch.linspace(0.1, 2.0, HALF)
    turns, views = (angles.cos().to(device), angles.sin().to(device)), []
    for own in (table, torch.where(table < 0, table, COUNT - 1 - table)):
        slots = [int(own[row, position // PAGE]) * PAGE + position % PAGE for position, row in at]
        views.append((*turns, own, torch.tensor(slots, device=device)))
    return views[0], views[1], starts, seen


def parts_of(pages: CompressedPages | KVPages) -> list[Tensor]:
    parts = pages if isinstance(pages, CompressedPages) else (pages,)
    return [one for part in parts for one in part if one is not None and one.numel()]


@pytest.mark.parametrize(
    ("ratio", "kv_format", "lengths"),
    [
        (4, "fp16", [(1, 20), (1, 64)]),
        (4, "fp8", [(3, 28), (1, 5)]),
        (32, "int8", [(1, 64)]),
        *(pytest.param(ratio, "bf16", [(1, 7)], marks=SLOW) for ratio in (0, 4, 32)),
        *(pytest.param(4, name, [(1, 100), (1, 4), (1, 3)], marks=SLOW) for name in ("bf16", "int8", "fp8", "fp16")),
        *(pytest.param(ratio, "fp16", [(20, 20), (2, 70), (1, 33)], marks=SLOW) for ratio in (0, 4, 32)),
        pytest.param(4, "fp16", [(70, 150)], marks=SLOW),
        pytest.param(32, "fp16", [(70, 150)], marks=SLOW),
    ],
)
@pytest.mark.parametrize("by_token", [False, pytest.param(True, marks=SLOW)])
def test_the_segment(
    ratio: int, kv_format: str, lengths: list[tuple[int, int]], by_token: bool, device: torch.device
) -> None:
    torch.manual_seed(9)
    weights = layer(ratio, device)
    pages = pages_of(kv_format, weights, device)
    view, of_entries, *bounds = views_of(lengths, device)
    x = torch.randn(len(view[0]), HIDDEN).half().to(device)

    def composed(*_: object) -> Tensor:
        raise AssertionError("the composed segment was called")

    found, wanted = copied(pages), copied(pages)
    ours = compressed.compressed_attention(
        composed, x.clone(), weights, found, view, of_entries, *bounds, by_token=by_token
    )
    theirs = REFERENCES["compressed_attention"](x.clone(), weights, wanted, view, of_entries, *bounds)
    for own, other in zip(parts_of(found), parts_of(wanted), strict=True):
        assert float((own.float() - other.float()).abs().max()) <= (
            1 if own.dtype in (torch.int8, torch.uint8) else 0.04
        )
    off = (ours.float() - theirs.float()).abs().amax(1)
    alike = off < 0.1  # of 150 tokens' choices one has scores that are equal but for rounding
    assert int((~alike).sum()) <= (weights.index is not None and len(x) > 20)
    assert compare(ours[alike].float(), theirs[alike].float(), 4e-3 if kv_format == "fp16" else 2e-2) == ""


@pytest.mark.parametrize("ratio", [4, pytest.param(32, marks=SLOW)])
def test_no_chunk_changes_a_bit_of_a_token(ratio: int, device: torch.device) -> None:
    """A prompt at once, and its last token alone after the others."""
    torch.manual_seed(6)
    weights, lengths = layer(ratio, device), [(3, 64)]
    pages, x = pages_of("fp16", weights, device), torch.randn(3, HIDDEN).half().to(device)
    run = partial(compressed.compressed_attention, lambda *_: pytest.fail("composed"), by_token=True)
    whole, parts = copied(pages), copied(pages)
    together = run(x.clone(), weights, whole, *views_of(lengths, device))
    for part, chunk in ((slice(0, 2), [(2, 63)]), (slice(2, 3), [(1, 64)])):
        apart = run(x[part].clone(), weights, parts, *views_of(chunk, device))
    assert compare(apart.float(), together[2:].float(), 1e-3) == ""
    for own, other in zip(parts_of(whole), parts_of(parts), strict=True):
        assert float((own.float() - other.float()).abs().max()) < 0.01


def test_several_tokens_of_a_sequence_take_rows_of_their_own(device: torch.device) -> None:
    """As draft tokens do in captured steps: each row is a sequence, and its entries are made of those before it."""
    torch.manual_seed(7)
    weights, pages = layer(4, device), None
    pages = pages_of("fp16", weights, device)
    view, of_entries, starts, seen = views_of([(3, 64)], device)
    x = torch.randn(3, HIDDEN).half().to(device)
    run = partial(compressed.compressed_attention, lambda *_: pytest.fail("composed"))
    wanted = run(x.clone(), weights, copied(pages), view, of_entries, starts, seen)
    rows = [(*one[:2], one[2].expand(3, -1).contiguous(), one[3]) for one in (view, of_entries)]
    each = (
        torch.arange(4, dtype=torch.int32, device=device),
        torch.tensor([62, 63, 64], dtype=torch.int32, device=device),
    )
    found = run(x.clone(), weights, copied(pages), *rows, *each)
    assert compare(found.float(), wanted.float(), 1e-3) == ""


def test_a_padding_row_of_a_captured_step_stores_nothing(device: torch.device) -> None:
    weights = layer(4, device)
    pages = pages_of("fp16", weights, device)
    kept, views = copied(pages), views_of([(1, 20)], device)
    nowhere = torch.tensor([-1], device=device)
    padding = [(*view[:3], nowhere) for view in views[:2]]
    x = torch.ones(1, HIDDEN, device=device).half()
    compressed.compressed_attention(lambda *_: pytest.fail("composed"), x, weights, pages, *padding, *views[2:])
    assert all(map(torch.equal, parts_of(pages), parts_of(kept)))


def test_layers_with_other_options_are_composed(device: torch.device) -> None:
    weights = layer(32, device)
    pages, views = pages_of("fp16", weights, device), views_of([(1, 20)], device)
    x = torch.ones(1, HIDDEN, device=device).half()
    changed = replace(weights, interleaved=False)
    assert compressed.compressed_attention(lambda *_: "composed", x, changed, pages, *views) == "composed"

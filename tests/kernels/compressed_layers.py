"""Layers of compressed attention with random weights, their pages, and steps over them."""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.kernels import Impl, Weight, reference
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

PAGE, COUNT = 16, 12
HIDDEN, HEADS, DIM, HALF, WINDOW, INDEX, TOP = 40, 3, 24, 4, 20, 16, 5


def linear(n: int, k: int, seed: int, device: torch.device, impl: Impl) -> Linear:
    dense = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * k**-0.5
    weight = Weight("dense", (n, k), dense.half().to(device))
    return Linear((LinearPart(impl, impl.prepare(weight), None, (n, k)),))


def layer(ratio: int, device: torch.device, impl: Impl) -> CompressedWeights:
    """Entries of four tokens overlap and have an index."""

    def norm(size: int) -> Norm:
        return Norm(torch.linspace(0.5, 1.5, size).to(device), 1e-6)

    def pool(width: int, seed: int) -> PoolWeights:
        places = torch.randn(ratio, sets * width, generator=torch.Generator().manual_seed(seed)).to(device)
        return PoolWeights(linear(2 * sets * width, HIDDEN, seed, device, impl), places, norm(width))

    stack, sets, angles = Stack(3), 1 + (ratio == 4), torch.linspace(0.1, 2.0, HALF) * (ratio - 1)
    for group in range(3):
        stack.add(linear(10, DIM, 10 + group, device, impl))
    narrow, stacked = stack.finished()
    index = EntryIndexWeights(linear(4 * INDEX, 14, 7, device, impl), linear(4, HIDDEN, 8, device, impl), 4, TOP)
    return CompressedWeights(
        norm=norm(HIDDEN),
        inputs=linear(14 + DIM, HIDDEN, 1, device, impl),
        q_norm=norm(14),
        q_up=linear(HEADS * DIM, 14, 2, device, impl),
        head_norm=Norm(torch.ones(DIM, device=device), 1e-6),
        kv_norm=norm(DIM),
        narrow=narrow,
        out=linear(HIDDEN, 30, 3, device, impl),
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
    dtype = torch.float32 if kv_format == "f32" else torch.bfloat16
    kept = torch.randn(COUNT * PAGE, 1, DIM)
    reference.kv_write(kept, kept[..., :0], window, torch.arange(COUNT * PAGE))
    widths = [pool.norm.weight.shape[0] for pool in weights.pools]
    if widths:
        made = torch.randn(COUNT, PAGE, 2 * (1 + weights.overlaps) * sum(widths)).to(dtype)
        window = window._replace(index_keys=made, block_keys=made[..., :0])
        places = PAGE // min(weights.ratio, PAGE)
        own = torch.randn(COUNT, places, sum(widths)).to(dtype)
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


def step(lengths: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """block_table, cu_query_lens and seq_lens of sequences of (new tokens, tokens); pages in no order."""
    wide, free = max(-(-length // PAGE) for _, length in lengths), [(7 * i + 3) % COUNT for i in range(COUNT)]
    rows = []
    for _, length in lengths:
        used = -(-length // PAGE)
        rows.append([*free[:used], *[-1] * (wide - used)])
        free = free[used:]
    starts = torch.tensor([0, *(new for new, _ in lengths)]).cumsum(0).int()
    seen = torch.tensor([length for _, length in lengths], dtype=torch.int32)
    return torch.tensor(rows, dtype=torch.int32).to(device), starts.to(device), seen.to(device)

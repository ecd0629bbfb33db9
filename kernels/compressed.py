"""Compressed attention (DeepSeek V4): a query sees the last tokens and entries that each stand for several tokens.

An entry is a mean of values of its tokens, weighted per channel by the softmax of logits and a bias per place; it is
normed and rotated to the position of its first token. Overlapping entries begin `ratio` tokens earlier: those tokens
have a second set of values and logits for them. An index has entries of its own, its keys, and chooses among many.

Keys are values, and all heads share them. What a query has seen is rotated back by its own position, so that it depends
on distances only.

Plain PyTorch on every device. Batch-invariant: each product has the shape of one query and one tile of keys, and tiles
are summed in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .kv_codes import decode, hadamard
from .kv_pages import CompressedPages, KVPages
from .layer_weights import CompressedWeights, View, product
from .mixers import add_output, norm_rows
from .reference import kv_write
from .sparse import highest

ENTRY_TILE = 64  # entries of one product
GATHERED_BYTES = 32 << 20  # memory for gathered keys: queries are processed in pieces


@dataclass(frozen=True)
class _Sequence:
    """One sequence of a step: its rows of the step, its index, the position of its first token, its length."""

    rows: slice
    index: int
    position: int
    length: int


def compressed_attention(
    rms_norm: Callable[..., Tensor],
    rope: Callable[..., Tensor],
    index_scores: Callable[..., Tensor],
    x: Tensor,
    weights: CompressedWeights,
    pages: CompressedPages | KVPages,
    view: View,
    of_entries: View | None,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    """x + out(attention of norm(x) over the last tokens and entries): [num_tokens, hidden], in place.

    With hyper-connections x is not added.

    pages        without entries those of the last tokens alone
    view         of the last tokens; `of_entries`: the block table and the slots of entries
    """
    cos, sin, block_table, slots = view
    window = pages.window if isinstance(pages, CompressedPages) else pages
    count, heads, dim = x.shape[0], weights.num_heads, weights.head_dim

    def turned(rows: Tensor, sine: Tensor = sin) -> Tensor:
        """Rotate the last elements of each head: [num_tokens, heads, ...]."""
        kept = rows.shape[2] - 2 * cos.shape[1]
        return torch.cat([rows[..., :kept], rope(rows[..., kept:].contiguous(), cos, sine, weights.interleaved)], -1)

    normed = norm_rows(rms_norm, x, weights.norm)
    latents, values = weights.inputs(normed).tensor_split([weights.q_norm.weight.shape[0]], -1)
    latents = norm_rows(rms_norm, latents.contiguous(), weights.q_norm)
    q = turned(norm_rows(rms_norm, weights.q_up(latents).view(count, heads, dim), weights.head_norm))
    stored = turned(norm_rows(rms_norm, values.contiguous(), weights.kv_norm).unsqueeze(1))
    kv_write(stored, stored[..., :0], window, slots)
    steps = list(_sequences(cu_query_lens, seq_lens))
    asked: tuple[Tensor, Tensor] | None = None
    stored_entries: _Entries | None = None
    if weights.pools:
        assert isinstance(pages, CompressedPages) and of_entries is not None
        stored_entries = _Entries(pages.entries, weights.ratio, dim)
        _write_entries(rms_norm, rope, normed, weights, window, view, stored_entries, of_entries[3], steps)
        index = weights.index
        if index is not None and max(one.length for one in steps) // weights.ratio > index.top:
            queries = turned(index.q_up(latents).view(count, index.num_heads, -1))
            asked = queries, index.shares(normed).float()
    out = q.new_empty(q.shape)
    for one in steps:
        table = None if of_entries is None else of_entries[2][one.index]
        of_one = None if asked is None else (asked[0][one.rows], asked[1][one.rows])
        seen = _attend(
            index_scores, q[one.rows], weights, window, block_table[one.index], one, stored_entries, table, of_one
        )
        out[one.rows] = seen.to(q.dtype)
    out = turned(out, -sin)
    parts = out.view(count, len(weights.narrow), -1).unbind(1)
    low = torch.cat([linear(part.contiguous()) for linear, part in zip(weights.narrow, parts, strict=True)], -1)
    output = product(weights.out, low, None)
    return output if weights.hyper is not None else add_output(rms_norm, x, output, None)


class _Entries:
    """The entries of a layer in their pages."""

    def __init__(self, pages: KVPages, ratio: int, dim: int) -> None:
        assert pages.block_keys is not None and pages.index_keys is not None
        self.rows = pages.block_keys.flatten(0, 1)
        self.ratio, self.dim = ratio, dim
        self.page_size = pages.index_keys.shape[1]
        self.unit = self.page_size // pages.block_keys.shape[1]  # tokens that share a place

    def places(self, numbers: Tensor, page_ids: Tensor) -> Tensor:
        """Rows of entries of one sequence, by number."""
        last = (numbers + 1) * self.ratio - 1
        pages = page_ids[last // self.page_size].long()
        return pages * (self.page_size // self.unit) + last % self.page_size // self.unit


def _sequences(cu_query_lens: Tensor, seq_lens: Tensor) -> Iterator[_Sequence]:
    starts = cu_query_lens.tolist()
    for index, length in enumerate(seq_lens.tolist()):
        rows = slice(starts[index], starts[index + 1])
        if rows.stop > rows.start:
            yield _Sequence(rows, index, length - (rows.stop - rows.start), length)


def _write_entries(
    rms_norm: Callable[..., Tensor],
    rope: Callable[..., Tensor],
    normed: Tensor,
    weights: CompressedWeights,
    window: KVPages,
    view: View,
    entries: _Entries,
    slots: Tensor,
    steps: list[_Sequence],
) -> None:
    """Store what entries are made of for each token of a step, and the entries that it completes.

    slots   of the step's tokens in the pages of entries
    """
    cos, sin, block_table, own_slots = view
    assert window.index_keys is not None
    page_size, ratio = window.index_keys.shape[1], weights.ratio
    made = torch.cat([pool.rows(normed) for pool in weights.pools], -1)
    stored = window.index_keys.flatten(0, 1)
    stored[own_slots] = made.to(stored.dtype)
    span, at, last = ratio * (1 + weights.overlaps), [], []
    for one in steps:
        numbers = torch.arange(one.position // ratio, one.length // ratio, device=normed.device)
        if numbers.numel():
            tokens = (numbers + 1).unsqueeze(1) * ratio - span + torch.arange(span, device=normed.device)
            pages = block_table[one.index][tokens.clamp(min=0) // page_size]
            at.append(torch.where(tokens < 0, -1, pages * page_size + tokens % page_size))
            last.append((numbers + 1) * ratio - 1 - one.position + one.rows.start)
    if not at:
        return
    where, row = torch.cat(at), torch.cat(last)
    rows, absent, first = stored[where.clamp(min=0)].float(), (where < 0).unsqueeze(-1), 0
    parts = []
    assert weights.back is not None
    # the rotation of a block's first token, by the angle of its last one minus that of ratio - 1 positions
    c, s, back = cos[row], sin[row], weights.back
    turn = c * back[0] + s * back[1], s * back[0] - c * back[1]
    for pool in weights.pools:
        width = pool.norm.weight.shape[0]
        sets = (1 + weights.overlaps) * width
        values, logits = rows[..., first : first + sets], rows[..., first + sets : first + 2 * sets]
        logits = logits.unflatten(1, (-1, ratio)).add(pool.places).flatten(1, 2)
        if weights.overlaps:
            values, logits = (
                torch.cat([both[:, :ratio, :width], both[:, ratio:, width:]], 1) for both in (values, logits)
            )
        entry = norm_rows(rms_norm, _mean(values, logits.masked_fill(absent, float("-inf"))), pool.norm)
        still = width - 2 * cos.shape[1]
        rotated = rope(entry[:, still:].contiguous().unsqueeze(1), *turn, weights.interleaved).squeeze(1)
        parts += [entry[:, :still], rotated]
        first += 2 * sets
    entries.rows[slots[row] // entries.unit] = torch.cat(parts, -1).to(entries.rows.dtype)


def _mean(values: Tensor, logits: Tensor) -> Tensor:
    """The mean over tokens, weighted per channel by the softmax of logits: [count, tokens, width] -> [count, width]."""
    most = logits.amax(1)
    total, weights = torch.zeros_like(most), torch.zeros_like(most)
    for token in range(values.shape[1]):
        share = (logits[:, token] - most).exp_()
        total, weights = total + share * values[:, token].masked_fill(share == 0, 0.0), weights + share
    return total.div_(weights)


def _attend(
    index_scores: Callable[..., Tensor],
    q: Tensor,
    weights: CompressedWeights,
    window: KVPages,
    page_ids: Tensor,
    one: _Sequence,
    entries: _Entries | None,
    entry_pages: Tensor | None,
    asked: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """What the queries of one sequence see: float32 [queries, heads, head_dim].

    asked   index queries and the shares of their heads, if queries do not see all entries
    """
    count, heads, dim = q.shape
    size = -(-weights.window // 16) * 16  # otherwise MKL sums in another order
    whole = 0 if entries is None else one.length // weights.ratio
    most = whole if asked is None or weights.index is None else min(whole, weights.index.top)
    tiled = -(-most // ENTRY_TILE) * ENTRY_TILE
    each = 4 * ((dim + 2 * heads) * (size + tiled) + 3 * whole * (asked is not None) + 3 * heads * dim)
    at_once = max(1, GATHERED_BYTES // each)
    found = []
    for first in range(0, count, at_once):
        queries = q[first : first + at_once].float() * weights.scale
        position = one.position + first
        at = torch.arange(position, position + len(queries), device=q.device)
        tiles = [_window_tile(queries, weights.window, size, window, page_ids, position)]
        if entries is not None and entry_pages is not None and most:
            seen = ((at + 1) // weights.ratio).unsqueeze(1)
            numbers = torch.arange(tiled, device=q.device).unsqueeze(0)
            if asked is not None and weights.index is not None:
                some = tuple(part[first : first + at_once] for part in asked)
                numbers = _chosen(index_scores, some, weights.index.top, entries, entry_pages, whole, seen, tiled)
            keys = entries.rows[..., :dim][entries.places(numbers.clamp(max=whole - 1), entry_pages)].float()
            hidden = numbers >= seen
            keys = keys.masked_fill_((numbers >= whole).unsqueeze(-1), 0.0).expand(len(queries), -1, -1)
            for start in range(0, tiled, ENTRY_TILE):
                here = slice(start, start + ENTRY_TILE)
                scores = torch.bmm(queries, keys[:, here].transpose(1, 2))
                tiles.append((scores.masked_fill_(hidden[:, None, here], float("-inf")), keys[:, here]))
        found.append(_summed(tiles, weights.sinks))
    return torch.cat(found)


def _window_tile(
    queries: Tensor, window: int, size: int, pages: KVPages, page_ids: Tensor, position: int
) -> tuple[Tensor, Tensor]:
    """Scores and values of the last tokens: [queries, heads, size], [queries, size, dim].

    position   of the first query
    """
    tokens = torch.arange(position - size + 1, position + len(queries), device=queries.device)
    absent = tokens < max(0, position - window + 1)  # these pages may be those of other sequences
    rows = page_ids[tokens.clamp(min=0) // pages.k.shape[2]].clamp(min=0).long()
    places = rows * pages.k.shape[2] + tokens.clamp(min=0) % pages.k.shape[2]
    keys = pages.k.flatten(0, 2)[places]
    if pages.k_scales is not None:
        scales = pages.k_scales if pages.k_scales.dim() == 1 else pages.k_scales.flatten()[places]
        keys = decode(keys, scales)
    keys = hadamard(keys.float()) if pages.format == "int8" else keys.float()
    keys = keys.masked_fill(absent.unsqueeze(-1), 0.0).unfold(0, size, 1).transpose(1, 2).contiguous()
    scores = torch.bmm(queries, keys.transpose(1, 2))
    numbers = tokens.unfold(0, size, 1)
    hidden = (numbers < 0) | (numbers <= numbers[:, -1:] - window)
    return scores.masked_fill_(hidden.unsqueeze(1), float("-inf")), keys


def _chosen(
    index_scores: Callable[..., Tensor],
    asked: tuple[Tensor, ...],
    top: int,
    entries: _Entries,
    page_ids: Tensor,
    whole: int,
    seen: Tensor,
    tiled: int,
) -> Tensor:
    """The numbers of the entries that each query sees, ascending, then `whole`: int64 [queries, tiled].

    Of entries with equal scores the first ones are chosen.
    """
    queries, shares = asked
    number = torch.arange(whole, device=queries.device)
    keys = entries.rows[..., entries.dim :][entries.places(number, page_ids)]
    scores = index_scores(queries, keys, None, shares).masked_fill_(number >= seen, float("-inf"))
    taken = highest(scores, top) & (number < seen)
    found = torch.where(taken, number, whole).topk(min(top, whole), largest=False).values
    return torch.cat([found, found.new_full((len(found), tiled - found.shape[1]), whole)], 1)


def _summed(tiles: list[tuple[Tensor, Tensor]], sinks: Tensor) -> Tensor:
    """softmax(scores) · values over all tiles and a sink per head without a value: [queries, heads, dim]."""
    most = sinks.float().view(1, -1, 1)
    for scores, _ in tiles:
        most = torch.maximum(most, scores.amax(-1, keepdim=True))
    norm = (sinks.float().view(1, -1, 1) - most).exp_()
    total = torch.zeros((), device=sinks.device)
    for scores, values in tiles:
        shares = scores.sub_(most).exp_()
        norm, total = norm + shares.sum(-1, keepdim=True), total + torch.bmm(shares, values)
    return total / norm

"""The index of sparse attention: chooses the blocks of tokens that a query sees.

Every token has an index key, and every `ratio` tokens form a block, whose key is a mean of theirs: normed and rotated
(QSA), or weighted per channel (DSA with pooled keys, whose tokens keep the logits of these weights). A query's score
for a block is the sum over index heads of relu(q · k), in DSA weighted by the query. It sees the `top` blocks with the
highest scores and the tokens after the last whole block. Sequences of at most `reach` tokens see everything and have no
scores.

Chosen blocks are pages to the attention kernels: the pages of one KV head, cut into blocks of `ratio` tokens, are again
pages of contiguous rows, and a query with one KV head is a sequence of one token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from . import sparse
from .kv_pages import KVPages
from .layer_weights import AttentionWeights, IndexWeights, LatentWeights, View
from .mixers import norm_rows

SCORE_BYTES = 32 << 20  # memory for scores and the choice: queries are scored in pieces


class Chosen(NamedTuple):
    """What the tokens of a step's long sequences see.

    block_table  int32 [n * kv_heads, top + 1]: blocks of the pages of `by_block`, in order; -1 after the last
    lens         int32 [n * kv_heads]: tokens in these blocks
    rows         int64 [n]: these tokens; None for all
    short        int64: the other sequences of the step; None if there are none
    """

    block_table: Tensor
    lens: Tensor
    rows: Tensor | None = None
    short: Tensor | None = None


def token_index(
    rms_norm: Callable[..., Tensor],
    rope: Callable[..., Tensor],
    index_write: Callable[..., None],
    index_pool: Callable[..., None],
    index_scores: Callable[..., Tensor],
    choose_blocks: Callable[..., tuple[Tensor, Tensor]],
    x: Tensor,
    weights: AttentionWeights | LatentWeights,
    pages: KVPages,
    view: View,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
) -> Chosen | None:
    """Store the index keys of a step's tokens and choose what they see; None if all of them see everything.

    On a GPU a step with one token per sequence does not wait for the host, whatever its lengths: it can be captured.

    x   input of the attention layer [num_tokens, hidden]
    """
    cos, sin, block_table, slot_mapping = view
    index = weights.index
    assert index is not None
    heads, dim, ratio = index.num_heads, index.dim, index.ratio
    lens: list[int] = []
    starts: list[int] = []
    long: list[int] = []
    far = block_table.shape[1] * pages.k.shape[2] > index.reach
    decodes = far and not sparse.reads_back(x) and block_table.shape[0] == x.shape[0]
    if far and not decodes:
        lens, starts = seq_lens.tolist(), cu_query_lens.tolist()
        long = [n for n, length in enumerate(lens) if length > index.reach and starts[n + 1] > starts[n]]
    if isinstance(index, IndexWeights):
        rows = (index.linear if long or decodes else index.key)(x)
        index_write(rows[:, -dim:], index.k_norm, pages, slot_mapping, cos, sin, index.back)
    else:
        rows = norm_rows(rms_norm, x, weights.norm)
        made = index.keys(rows)
        keys = norm_rows(rms_norm, made[:, :dim].contiguous(), index.k_norm)
        index_pool(torch.cat([keys, made[:, dim:]], -1), index.places, pages, slot_mapping)
    if not long and not decodes:
        return None
    assert pages.block_keys is not None
    per_page, kv_heads = pages.block_keys.shape[1], pages.k.shape[1]
    found: list[tuple[Tensor, Tensor]] = []

    def choose(here: slice, table: Tensor, lens: Tensor, keys: Tensor, own: bool) -> None:
        """Choose for the tokens `here`; `own`: each has pages of its own in `keys`."""
        shares: Tensor | None = None
        if isinstance(index, IndexWeights):
            q = norm_rows(rms_norm, rows[here, : heads * dim].reshape(-1, heads, dim), index.q_norm)
            q = rope(q, cos[here], sin[here], False)
        else:
            assert isinstance(weights, LatentWeights) and weights.q_norm is not None
            size = weights.q_norm.weight.shape[0]
            asked = norm_rows(rms_norm, weights.qkv(rows[here])[:, :size].contiguous(), weights.q_norm)
            q, shares = index.q_up(asked).view(-1, heads, dim), index.shares(rows[here]).float()
        blocks = table.shape[1] * per_page if own else keys.shape[0]
        # per query: scores, masks, counts of equal ones and numbers; the choice; products
        each = (24 if own else 12) * blocks + 60 * index.top + (0 if own else 4 * heads * sparse.index_tile(keys))
        size = max(1, SCORE_BYTES // each)
        for first in range(0, q.shape[0], size):
            some = slice(first, first + size)
            share = None if shares is None else shares[some]
            scores = index_scores(q[some], keys, table[some] if own else None, share)
            found.append(choose_blocks(scores, table[some], lens[some], ratio, index.top, per_page, kv_heads))

    if decodes:
        choose(slice(None), block_table, seq_lens, pages.block_keys, True)
        return Chosen(*_joined(found))
    for number in long:
        here = slice(starts[number], starts[number + 1])
        whole, count = lens[number] // ratio, here.stop - here.start
        own = block_table[number : number + 1, : -(-lens[number] // (ratio * per_page))]
        seen = torch.arange(lens[number] - count + 1, lens[number] + 1, dtype=torch.int32, device=x.device)
        choose(here, own.expand(count, -1), seen, pages.block_keys[own[0].long()].flatten(0, 1)[:whole], False)
    all_rows = torch.cat([torch.arange(starts[number], starts[number + 1], device=x.device) for number in long])
    short = torch.tensor([n for n in range(len(lens)) if n not in set(long)], dtype=torch.int64, device=x.device)
    return Chosen(*_joined(found), all_rows, short)


def _joined(found: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    tables, lens = zip(*found, strict=True)
    return found[0] if len(found) == 1 else (torch.cat(tables), torch.cat(lens))


def by_block(pages: KVPages, ratio: int) -> KVPages:
    """Pages of `ratio` tokens of one KV head, without copying: [pages * kv_heads * blocks of a page, 1, ratio, dim]."""

    def cut(part: Tensor | None) -> Tensor | None:
        if part is None or part.dim() == 1:
            return part
        return part.view(part.shape[0] * part.shape[1] * part.shape[2] // ratio, 1, ratio, *part.shape[3:])

    return KVPages(*(cut(part) for part in pages[:4]))  # type: ignore[arg-type]


def sparse_attention(
    attention: Callable[..., Tensor],
    q: Tensor,
    weights: AttentionWeights,
    pages: KVPages,
    block_table: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    chosen: Chosen | None,
) -> Tensor:
    """`attention` of every token over the tokens it sees: [num_tokens, num_heads * head_dim].

    q   queries, with their gates where heads have gates: [num_tokens, num_heads, head_dim or 2 head_dim]
    """
    if chosen is None:
        return attention(q, weights, pages, block_table, cu_query_lens, seq_lens)
    assert weights.index is not None
    kv_heads, blocks = weights.num_kv_heads, by_block(pages, weights.index.ratio)
    of_group = replace(weights, num_heads=weights.num_heads // kv_heads, num_kv_heads=1, index=None)

    def seen(q: Tensor) -> Tensor:
        count = q.shape[0] * kv_heads
        # Triton's attention reads tables before it waits for the kernel before it, which must be a plain one
        cu = torch.arange(count + 1, dtype=torch.int32, device=q.device)
        q = q.view(count, weights.num_heads // kv_heads, -1)
        return attention(q, of_group, blocks, chosen.block_table, cu, chosen.lens).view(count // kv_heads, -1)

    if chosen.rows is None or chosen.short is None:
        return seen(q)
    out = q.new_empty(q.shape[0], weights.num_heads * weights.head_dim)
    if chosen.short.numel():
        starts = cu_query_lens.long()
        counts = starts[chosen.short + 1] - starts[chosen.short]
        rows = torch.cat([torch.arange(*pair, device=q.device) for pair in _bounds(starts, chosen.short)])
        cu = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        places = block_table[chosen.short].contiguous(), cu, seq_lens[chosen.short].contiguous()
        out[rows] = attention(q[rows].contiguous(), weights, pages, *places).to(out.dtype)
    out[chosen.rows] = seen(q[chosen.rows]).to(out.dtype)
    return out


def sparse_latent(
    latent_attention: Callable[..., Tensor],
    x: Tensor,
    weights: LatentWeights,
    pages: KVPages,
    view: View,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    chosen: Chosen | None,
) -> Tensor:
    """`latent_attention` of every token over the tokens it sees. A layer has one KV head, so that tokens have the same
    slots in pages that are cut into blocks.
    """
    if chosen is None:
        return latent_attention(x, weights, pages, view, cu_query_lens, seq_lens)
    assert weights.index is not None
    cos, sin, block_table, slots = view
    blocks, rows = by_block(pages, weights.index.ratio), chosen.rows

    def seen(here: Tensor | slice) -> Tensor:
        count = chosen.lens.shape[0]
        cu = torch.arange(count + 1, dtype=torch.int32, device=x.device)
        of_rows = cos[here].contiguous(), sin[here].contiguous(), chosen.block_table, slots[here].contiguous()
        return latent_attention(x[here].contiguous(), weights, blocks, of_rows, cu, chosen.lens)

    if rows is None or chosen.short is None:
        return seen(slice(None))
    out = torch.empty_like(x)
    if chosen.short.numel():
        starts = cu_query_lens.long()
        counts = starts[chosen.short + 1] - starts[chosen.short]
        here = torch.cat([torch.arange(*pair, device=x.device) for pair in _bounds(starts, chosen.short)])
        cu = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        of_rows = cos[here], sin[here], block_table[chosen.short].contiguous(), slots[here]
        out[here] = latent_attention(x[here], weights, pages, of_rows, cu, seq_lens[chosen.short].contiguous())
    out[rows] = seen(rows)
    return out


def _bounds(starts: Tensor, sequences: Tensor) -> list[tuple[int, int]]:
    ends = starts.tolist()
    return [(ends[number], ends[number + 1]) for number in sequences.tolist()]

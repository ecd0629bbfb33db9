"""The index of sparse attention (QSA): chooses the blocks of tokens that a query sees.

Every token has an index key, and every `ratio` tokens form a block, whose key is the normed and rotated mean of theirs.
A query's score for a block is the sum over index heads of relu(q · k). It sees the `top` blocks with the highest scores
and the tokens after the last whole block. Sequences of at most `reach` tokens see everything and have no scores.

Chosen blocks are pages to the attention kernels: the pages of one KV head, cut into blocks of `ratio` tokens, are again
pages of contiguous rows, and a query with one KV head is a sequence of one token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .kv_pages import KVPages
from .layer_weights import AttentionWeights, IndexWeights, View
from .mixers import norm_rows
from .reference import index_tile

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
    index_scores: Callable[..., Tensor],
    x: Tensor,
    weights: IndexWeights,
    pages: KVPages,
    view: View,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
) -> Chosen | None:
    """Store the index keys of a step's tokens and choose what they see; None if all of them see everything.

    x   input of the attention layer [num_tokens, hidden]
    """
    cos, sin, block_table, slot_mapping = view
    heads, dim, ratio = weights.num_heads, weights.dim, weights.ratio
    lens: list[int] = []
    starts: list[int] = []
    long: list[int] = []
    far = block_table.shape[1] * pages.k.shape[2] > weights.reach
    decodes = far and not reads_back(x) and block_table.shape[0] == x.shape[0]  # a token of every sequence
    if far and not decodes:
        lens, starts = seq_lens.tolist(), cu_query_lens.tolist()
        long = [n for n, length in enumerate(lens) if length > weights.reach and starts[n + 1] > starts[n]]
    rows = (weights.linear if long or decodes else weights.key)(x)
    _store(rms_norm, rope, rows[:, -dim:], weights, pages, cos, sin, slot_mapping, reads_back(x))
    if not long and not decodes:
        return None
    assert pages.block_keys is not None
    per_page = pages.block_keys.shape[1]

    def query(of: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = norm_rows(rms_norm, of[:, : heads * dim].reshape(-1, heads, dim), weights.q_norm)
        return rope(q, cos, sin, False)

    if decodes:
        return _each(index_scores, query(rows, cos, sin), weights, pages, block_table, seq_lens)
    tables, counts, found = [], [], []
    for number in long:
        here = slice(starts[number], starts[number + 1])
        found.append(torch.arange(here.start, here.stop, device=x.device))
        q = query(rows[here], cos[here], sin[here])
        positions = torch.arange(lens[number] - q.shape[0], lens[number], device=x.device)
        whole = lens[number] // ratio
        own = block_table[number, : -(-lens[number] // (ratio * per_page))].long()
        keys = pages.block_keys[own].flatten(0, 1)[:whole]
        blocks = (own.unsqueeze(1) * per_page + torch.arange(per_page, device=x.device)).flatten()
        # per query: scores, counts of equal ones and masks; the choice; products
        each = 12 * whole + 60 * weights.top + 4 * heads * index_tile(keys)
        size = max(1, SCORE_BYTES // each)
        for part in (slice(start, start + size) for start in range(0, q.shape[0], size)):
            chosen, tokens = _best(index_scores(q[part], keys), positions[part], weights)
            tables.append(torch.where(chosen < 0, -1, blocks[chosen.clamp(min=0)]))
            counts.append(tokens)
    short = torch.tensor([n for n in range(len(lens)) if n not in set(long)], dtype=torch.int64, device=x.device)
    return Chosen(*_of_heads(tables, counts, pages), torch.cat(found), short)


def reads_back(x: Tensor) -> bool:
    """Whether the host may look at results: a GPU would have to wait, and a captured step cannot."""
    return x.device.type == "cpu"


def _each(
    index_scores: Callable[..., Tensor],
    q: Tensor,
    weights: IndexWeights,
    pages: KVPages,
    block_table: Tensor,
    seq_lens: Tensor,
) -> Chosen:
    """What each sequence's only token sees, however long the sequence: shapes do not depend on lengths.

    q   normed and rotated: [num_seqs, heads, dim]
    """
    assert pages.block_keys is not None
    per_page, keys = pages.block_keys.shape[1], pages.block_keys.flatten(0, 1)
    inside = torch.arange(per_page, dtype=torch.int32, device=q.device)
    number = torch.arange(block_table.shape[1] * per_page, device=q.device)
    tables, counts = [], []
    # per query: places, scores, masks, counts of equal ones and the choice
    size = max(1, SCORE_BYTES // (40 * number.shape[0] + 60 * weights.top))
    for table, lens, some in zip(block_table.split(size), seq_lens.split(size), q.split(size), strict=True):
        places = (table.unsqueeze(2) * per_page + inside).flatten(1)
        places = torch.where(number * weights.ratio < lens.unsqueeze(1), places, -1)
        chosen, tokens = _best(index_scores(some, keys, places), lens.long() - 1, weights)
        tables.append(torch.where(chosen < 0, -1, places.gather(1, chosen.clamp(min=0))))
        counts.append(tokens)
    return Chosen(*_of_heads(tables, counts, pages))


def _of_heads(tables: list[Tensor], counts: list[Tensor], pages: KVPages) -> tuple[Tensor, Tensor]:
    """Blocks [n, top + 1] of tokens and their sizes [n] -> `block_table` and `lens` of `Chosen`."""
    assert pages.block_keys is not None
    kv_heads, per_page = pages.k.shape[1], pages.block_keys.shape[1]
    table, lens = torch.cat(tables).unsqueeze(1), torch.cat(counts).unsqueeze(1)
    of_head = torch.arange(kv_heads, device=table.device).view(1, -1, 1)
    table = torch.where(table < 0, -1, (table // per_page * kv_heads + of_head) * per_page + table % per_page)
    return table.flatten(0, 1).int(), lens.expand(-1, kv_heads).flatten().int()


def _store(
    rms_norm: Callable[..., Tensor],
    rope: Callable[..., Tensor],
    keys: Tensor,
    weights: IndexWeights,
    pages: KVPages,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    on_host: bool,
) -> None:
    """Write the tokens' keys [num_tokens, dim], and those of the blocks that they complete.

    A page holds whole blocks, so a token's slot says where its block ends, whose tokens follow each other in a step.

    on_host   compute only whole blocks. A GPU would have to wait until the host knows how many there are, so there all
              tokens of a block write its key: the same one, or what it was before if the step does not complete it
    """
    assert pages.index_keys is not None and pages.block_keys is not None
    ratio, stored = weights.ratio, pages.index_keys.view(-1, weights.dim)
    blocks = pages.block_keys.view(-1, weights.dim)
    stored[slot_mapping] = keys.to(stored.dtype)
    ends = slot_mapping // ratio * ratio + (ratio - 1)
    last, done = torch.arange(len(keys), device=keys.device), None
    if on_host:
        last = (slot_mapping == ends).nonzero().flatten()
        if not last.numel():
            return
        ends = ends[last]
    else:
        last = (last + ends - slot_mapping).clamp_(max=len(keys) - 1)
        done = (slot_mapping[last] == ends).unsqueeze(1)
    block = stored[ends.unsqueeze(1) + torch.arange(1 - ratio, 1, device=ends.device)].float()
    total = block[:, 0]
    for token in range(1, ratio):
        total = total + block[:, token]
    mean = norm_rows(rms_norm, total.mul_(1 / ratio), weights.k_norm)
    # the rotation of a block's first token, by the angle of its last one minus that of ratio - 1 positions
    c, s = cos[last], sin[last]
    first = c * weights.back[0] + s * weights.back[1], s * weights.back[0] - c * weights.back[1]
    turned = rope(mean.unsqueeze(1), *first, False).squeeze(1).to(blocks.dtype)
    at = ends // ratio
    blocks[at] = turned if done is None else torch.where(done, turned, blocks[at])


def _best(scores: Tensor, positions: Tensor, weights: IndexWeights) -> tuple[Tensor, Tensor]:
    """The blocks that queries see, ascending: int64 [n, top + 1], -1 after the last; and their tokens: int64 [n].

    Of blocks with equal scores, such as 0, the first ones are seen.

    scores  float32 [n, whole blocks], modified
    """
    ratio, top, device = weights.ratio, weights.top, scores.device
    whole = ((positions + 1) // ratio).unsqueeze(1)
    number = torch.arange(scores.shape[1], device=device)
    scores.masked_fill_(number >= whole, -1.0)
    least = scores.topk(min(top, scores.shape[1]), sorted=False).values.amin(1, keepdim=True)
    seen, equal = scores > least, scores == least
    seen |= equal & (equal.cumsum(1, dtype=torch.int32) <= top - seen.sum(1, keepdim=True))
    seen &= number < whole
    count, rest = whole.clamp(max=top), (positions + 1) % ratio
    chosen = torch.full((scores.shape[0], top + 1), -1, dtype=torch.int64, device=device)
    if reads_back(scores):
        row, block = seen.nonzero().unbind(1)
        before = (count.cumsum(0) - count).flatten()
        chosen[row, torch.arange(row.shape[0], device=device) - before[row]] = block
    else:
        first = torch.where(seen, number, scores.shape[1]).topk(min(top, scores.shape[1]), largest=False).values
        chosen[:, : first.shape[1]] = first.masked_fill_(first == scores.shape[1], -1)
    chosen.scatter_(1, count, torch.where(rest.unsqueeze(1) > 0, whole, -1))
    return chosen, count.squeeze(1) * ratio + rest


def by_block(pages: KVPages, ratio: int) -> KVPages:
    """Pages of `ratio` tokens of one KV head, without copying: [pages * kv_heads * blocks of a page, 1, ratio, dim]."""

    def cut(part: Tensor | None) -> Tensor | None:
        return part if part is None or part.dim() == 1 else part.view(-1, 1, ratio, *part.shape[3:])

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


def _bounds(starts: Tensor, sequences: Tensor) -> list[tuple[int, int]]:
    ends = starts.tolist()
    return [(ends[number], ends[number + 1]) for number in sequences.tolist()]

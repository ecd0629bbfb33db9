"""References of the ops of sparse attention, which `token_index` describes: index keys, scores and the choice."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .kv_pages import KVPages
from .layer_weights import Norm
from .reference import rms_norm, rope

INDEX_TILE = 512  # block keys of one product of index scores


def reads_back(x: Tensor) -> bool:
    """Whether the host may look at results: a GPU would have to wait, and a captured step cannot."""
    return x.device.type == "cpu"


def index_write(
    keys: Tensor, norm: Norm, pages: KVPages, slot_mapping: Tensor, cos: Tensor, sin: Tensor, back: Tensor
) -> None:
    """Write the index keys of a step's tokens, and those of the blocks that they complete: the normed and rotated mean.

    A page holds whole blocks, so a token's slot says where its block ends, whose tokens follow each other in a step.

    keys      [num_tokens, dim], may be strided
    norm      of block keys
    cos, sin  float32 [num_tokens, half]
    back      float32 [2, half]: see `IndexWeights`
    """
    found = _stored(keys, pages, slot_mapping)
    if found is None:
        return
    tokens, last = found.tokens, found.last
    total = tokens[:, 0]
    for token in range(1, tokens.shape[1]):
        total = total + tokens[:, token]
    mean = rms_norm(total.mul_(1 / tokens.shape[1]), norm.weight, norm.eps)
    # the rotation of a block's first token, by the angle of its last one minus that of ratio - 1 positions
    c, s = cos[last], sin[last]
    first = c * back[0] + s * back[1], s * back[0] - c * back[1]
    found.write(rope(mean.unsqueeze(1), *first, False).squeeze(1))


def index_pool(keys: Tensor, places: Tensor, pages: KVPages, slot_mapping: Tensor) -> None:
    """Write the index keys of a step's tokens and the logits of their weights, and the keys of the blocks that they
    complete: per channel, the mean of the tokens' keys, weighted by the softmax of logits + places.

    keys    [num_tokens, 2 dim]: the key, then the logits; may be strided
    places  float32 [ratio, dim]
    """
    found = _stored(keys, pages, slot_mapping)
    if found is None:
        return
    key, logits = found.tokens.chunk(2, -1)
    logits = logits + places
    most = logits.amax(1)
    total, weights = torch.zeros_like(most), torch.zeros_like(most)
    for token in range(key.shape[1]):
        share = (logits[:, token] - most).exp_()
        total, weights = total + share * key[:, token], weights + share
    found.write(total.div_(weights))


class _Stored(NamedTuple):
    """The blocks that a step may have completed.

    tokens  float32 [count, ratio, ...]: what is stored of their tokens
    last    int64 [count]: the token of the step that is their last one
    at      int64 [count]: where their keys are in `blocks`
    done    bool [count, 1]: whether the step has completed them; None for all
    """

    tokens: Tensor
    last: Tensor
    at: Tensor
    done: Tensor | None
    blocks: Tensor

    def write(self, keys: Tensor) -> None:
        keys, at = keys.to(self.blocks.dtype), self.at
        self.blocks[at] = keys if self.done is None else torch.where(self.done, keys, self.blocks[at])


def _stored(keys: Tensor, pages: KVPages, slot_mapping: Tensor) -> _Stored | None:
    """Store what tokens keep; None if the step is known to complete no block."""
    assert pages.index_keys is not None and pages.block_keys is not None
    ratio = pages.index_keys.shape[1] // pages.block_keys.shape[1]
    stored, blocks = pages.index_keys.view(-1, keys.shape[1]), pages.block_keys.view(-1, pages.block_keys.shape[2])
    stored[slot_mapping] = keys.to(stored.dtype)
    ends = slot_mapping // ratio * ratio + (ratio - 1)
    last, done = torch.arange(len(keys), device=keys.device), None
    if reads_back(keys):
        last = (slot_mapping == ends).nonzero().flatten()
        if not last.numel():
            return None
        ends = ends[last]
    else:  # all tokens of a block write its key: the same one, or what it was before if the step does not complete it
        last = (last + ends - slot_mapping).clamp_(max=len(keys) - 1)
        done = (slot_mapping[last] == ends).unsqueeze(1)
    tokens = stored[ends.unsqueeze(1) + torch.arange(1 - ratio, 1, device=ends.device)].float()
    return _Stored(tokens, last, ends // ratio, done, blocks)


def index_scores(q: Tensor, keys: Tensor, block_table: Tensor | None = None, shares: Tensor | None = None) -> Tensor:
    """score = sum over heads of relu(q · k), times the head's share, with 0 for NaN, which no choice could order.

    Products have the shape of one query and one tile of keys, so that a score depends on neither the other queries nor
    the number of keys; with thousands of keys the last bits of some scores differ otherwise. GPUs compute one product.

    q            [num_queries, heads, dim]   f32 | bf16 | f16
    keys         [num_keys, dim]             f32 | bf16; with a table [num_pages, blocks of a page, dim]
    block_table  int32 [num_queries, max_pages]: the pages of each query's keys, -1 for none, with scores of 0; may be
                 strided. None: all queries have all keys
    shares       float32 [num_queries, heads]; None for 1
    returns      [num_queries, number of keys of a query]  float32
    """
    if block_table is not None:
        each = [None] * len(q) if shares is None else shares.split(1)
        found = [
            index_scores(query, keys[pages.clamp(min=0)].flatten(0, 1), None, share)
            for query, pages, share in zip(q.split(1), block_table, each, strict=True)
        ]
        scores = torch.cat(found)
        return scores.masked_fill_((block_table < 0).repeat_interleave(keys.shape[1], 1), 0.0)
    q, size = q.float(), index_tile(keys)
    scores = torch.zeros(q.shape[0], keys.shape[0], device=q.device)
    spare = -q.shape[2] % 16  # otherwise MKL sums in another order
    for part, tile in zip(scores.split(size, 1), keys.split(size), strict=True):
        tile = tile.float()
        if q.device.type == "cpu":
            tile = functional.pad(tile, (0, spare, 0, size - tile.shape[0]))
            products = torch.bmm(functional.pad(q, (0, spare)), tile.T.expand(q.shape[0], -1, -1))
        else:
            products = (q.flatten(0, 1) @ tile.T).view(*q.shape[:2], -1)
        products = products.relu_()[..., : part.shape[1]]
        for product in (products if shares is None else products.mul_(shares.unsqueeze(-1))).unbind(1):
            part += product
    return scores.masked_fill_(scores.isnan(), 0.0)


def index_tile(keys: Tensor) -> int:
    """Keys of one product of `index_scores`."""
    return INDEX_TILE if keys.device.type == "cpu" else max(1, keys.shape[0])


def highest(scores: Tensor, top: int) -> Tensor:
    """Which scores of each row are among the `top` highest, of equal ones the first: bool [rows, scores]."""
    least = scores.topk(min(top, scores.shape[1]), sorted=False).values.amin(1, keepdim=True)
    found, equal = scores > least, scores == least
    return found | equal & (equal.cumsum(1, dtype=torch.int32) <= top - found.sum(1, keepdim=True))


def choose_blocks(
    scores: Tensor, block_table: Tensor, seq_lens: Tensor, ratio: int, top: int, per_page: int, kv_heads: int
) -> tuple[Tensor, Tensor]:
    """What queries see: the `top` whole blocks with the highest scores, of equal ones the first, and the tokens after.

    scores       float32 [num_queries, blocks], no NaN, of at least all whole blocks; modified
    block_table  int32 [num_queries, max_pages], may be strided
    seq_lens     int32 [num_queries]: tokens up to the query
    per_page     blocks of a page
    returns      int32 [num_queries * kv_heads, top + 1]: blocks of the pages of one KV head (`token_index.by_block`),
                 ascending, -1 after the last; int32 [num_queries * kv_heads]: tokens in these blocks
    """
    count, blocks = scores.shape
    whole = (seq_lens.long() // ratio).unsqueeze(1)
    number = torch.arange(blocks, device=scores.device)
    scores.masked_fill_(number >= whole, float("-inf"))
    seen = highest(scores, top) & (number < whole)
    num_seen, rest = whole.clamp(max=top), seq_lens.unsqueeze(1) % ratio
    chosen = torch.full((count, top + 1), -1, dtype=torch.int64, device=scores.device)
    if reads_back(scores):
        row, block = seen.nonzero().unbind(1)
        before = (num_seen.cumsum(0) - num_seen).flatten()
        chosen[row, torch.arange(row.shape[0], device=row.device) - before[row]] = block
    else:
        first = torch.where(seen, number, blocks).topk(min(top, blocks), largest=False).values
        chosen[:, : first.shape[1]] = first.masked_fill_(first == blocks, -1)
    chosen.scatter_(1, num_seen, torch.where(rest > 0, whole, -1))
    pages = block_table.gather(1, chosen.clamp(min=0) // per_page).unsqueeze(1)
    of_head = torch.arange(kv_heads, device=scores.device).view(1, -1, 1)
    chosen = chosen.unsqueeze(1)
    table = torch.where(chosen < 0, -1, (pages * kv_heads + of_head) * per_page + chosen % per_page)
    lens = (num_seen * ratio + rest).expand(-1, kv_heads)
    return table.flatten(0, 1).int(), lens.flatten().int()

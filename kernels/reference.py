"""Reference implementation of every op in plain PyTorch: test oracle, fallback without a C compiler, and documentation.

Batch-invariant: a token's result does not depend on the rest of the batch. Reductions run along the contiguous last
dimension of one row, matrix products have fixed shapes, and transcendental functions are built from `exp` and `tanh`,
whose vector tails use the same polynomial in PyTorch (those of `silu` and `sigmoid` do not).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from .kv_codes import decode, encode, hadamard
from .kv_pages import KVPages

KEY_TILE = 128  # keys per attention tile, aligned to absolute positions; a multiple of every page size
QUERY_ROWS = 16  # rows of a query tile: query tokens times query heads per KV head, filled with whole tokens
# scores held at once: 4 MiB of float32 stays in cache. Splitting longer chunks of queries does not change results
SCORE_LIMIT = 1 << 20


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = x / sqrt(mean(x², -1) + eps) · weight, computed in float32.

    x       [..., dim]   f32 | bf16 | f16
    weight  [dim]        any float type
    returns [..., dim]   dtype of x
    """
    wide = x.float()
    scale = (wide * wide).mean(-1, keepdim=True).add_(eps).sqrt_().reciprocal_()
    return (wide * scale).mul_(weight.float()).to(x.dtype)


def group_norm(x: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    """`rms_norm` of each of `groups` equal parts of x [..., dim] by itself; weight [dim]."""
    wide = x.float().unflatten(-1, (groups, -1))
    scale = (wide * wide).mean(-1, keepdim=True).add_(eps).sqrt_().reciprocal_()
    return (wide * scale).flatten(-2).mul_(weight.float()).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first 2 · half dimensions of every head; the others pass through.

    pairs: (x[j], x[j + half]), or (x[2j], x[2j + 1]) when `interleaved`

    x         [num_tokens, heads, head_dim]   f32 | bf16 | f16
    cos, sin  [num_tokens, half]              float32, rows of a `RopeTable` at the tokens' positions
    returns   [num_tokens, heads, head_dim]   dtype of x, contiguous
    """
    half = cos.shape[-1]
    wide = x.float()
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = wide[..., : 2 * half]
    out = torch.empty_like(wide, memory_format=torch.contiguous_format)
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
        out_first, out_second = out[..., 0 : 2 * half : 2], out[..., 1 : 2 * half : 2]
    else:
        first, second = rotated[..., :half], rotated[..., half:]
        out_first, out_second = out[..., :half], out[..., half : 2 * half]
    torch.sub(first * c, second * s, out=out_first)
    torch.add(second * c, first * s, out=out_second)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = wide[..., 2 * half :]
    return out.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """y = (x - mean(x, -1)) / sqrt(var(x, -1) + eps) · weight + bias, computed in float32.

    x             [..., dim]   f32 | bf16 | f16
    weight, bias  [dim]        float32
    returns       [..., dim]   dtype of x
    """
    wide = x.float()
    wide = wide - wide.mean(-1, keepdim=True)
    scale = (wide * wide).mean(-1, keepdim=True).add_(eps).sqrt_().reciprocal_()
    return (wide * scale).mul_(weight).add_(bias).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """x/2 · (1 + erf(x / sqrt(2))) in float32, dtype of x."""
    wide = x.float()
    return torch.erf(wide * 0.7071067811865476).add_(1.0).mul_(wide).mul_(0.5).to(x.dtype)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) · up with the exact (erf) gelu; shapes as in `gelu_tanh_mul`."""
    gate, up = gate_up.chunk(2, -1)
    return (gelu(gate.float()) * up.float()).to(gate_up.dtype)


def relu2(x: Tensor) -> Tensor:
    """max(x, 0)², computed in float32, dtype of x."""
    return x.clamp(min=0.0).float().square().to(x.dtype)


def xielu(x: Tensor, curve: tuple[float, float, float, float]) -> Tensor:
    """b·x + p·x² for x > 0, else b·x + n·(exp(min(x, eps)) - 1 - x), in float32, dtype of x: arXiv 2411.13010.

    curve   p, n, b and eps, which is below 0
    """
    p, n, b, eps = curve
    wide = x.float()
    below = wide.clamp(max=eps)
    below = (below * 0.5).tanh_().mul_(below.exp_().add_(1.0))  # exp(y) - 1, without cancellation
    below.sub_(wide).mul_(n)
    return torch.where(wide > 0, (wide * wide).mul_(p), below).add_(wide, alpha=b).to(x.dtype)


def silu_mul(gate_up: Tensor, limit: float | None = None) -> Tensor:
    """silu(gate) · up with silu(g) = g / (1 + exp(-g)).

    gate_up  [num_tokens, 2 · intermediate]   gate first
    limit    clamps silu(gate) from above, and up on both sides
    returns  [num_tokens, intermediate]       dtype of gate_up
    """
    gate, up = gate_up.float().chunk(2, -1)
    return _clamped_mul(gate / torch.neg(gate).exp_().add_(1.0), up, limit).to(gate_up.dtype)


def silu_clamped(gate_up: Tensor, limit: float | None = None) -> Tensor:
    """silu(gate) · up: [num_tokens, 2 · intermediate] (gate first) -> half the width.

    limit    clamps gate from above, and up on both sides, before that
    """
    if limit is None:
        return silu_mul(gate_up)
    gate, up = gate_up.float().chunk(2, -1)
    return silu_mul(torch.cat([gate.clamp(max=limit), up.clamp(-limit, limit)], -1)).to(gate_up.dtype)


def gelu_tanh_mul(gate_up: Tensor, limit: float | None = None) -> Tensor:
    """gelu(gate) · up with gelu(g) = g/2 · (1 + tanh(sqrt(2/π) · (g + 0.044715 g³))).

    gate_up  [num_tokens, 2 · intermediate]   gate first
    limit    clamps gelu(gate) from above, and up on both sides
    returns  [num_tokens, intermediate]       dtype of gate_up
    """
    gate, up = gate_up.float().chunk(2, -1)
    inner = (gate * gate).mul_(gate).mul_(0.044715).add_(gate).mul_(0.7978845608028654).tanh_().add_(1.0)
    return _clamped_mul(inner.mul_(gate).mul_(0.5), up, limit).to(gate_up.dtype)


def _clamped_mul(acted: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """acted · up, in place of `acted`, clamped first if there is a limit."""
    return acted.mul_(up) if limit is None else acted.clamp_(max=limit).mul_(up.clamp(-limit, limit))


def kv_write(k: Tensor, v: Tensor, pages: KVPages, slot_mapping: Tensor) -> None:
    """Write each token's key and value to its slot, in the pages' format; int8 keys are rotated (`hadamard`).

    k, v          [num_tokens, num_kv_heads, head_dim]   any float type, after RoPE
    pages         modified: codes, and per-token scales if the format has them
    slot_mapping  int64 [num_tokens]                     page_id * page_size + offset; no padding entries
    """
    kv_format, page_size = pages.format, pages.k.shape[2]
    page: Tensor | int
    offset: Tensor | int
    page, offset = slot_mapping // page_size, slot_mapping % page_size
    if slot_mapping.shape[0] == 1 and slot_mapping.device.type == "cpu":  # 3 times as fast as indexing with tensors
        page, offset = divmod(int(slot_mapping), page_size)
    for x, cache, scales in (
        (hadamard(k) if kv_format == "int8" else k, pages.k, pages.k_scales),
        (v, pages.v, pages.v_scales),
    ):
        if scales is None or not cache.shape[3]:
            cache[page, :, offset] = x.to(cache.dtype)
            continue
        of_layer = scales.dim() == 1
        cache[page, :, offset], found = encode(x, kv_format, scales if of_layer else None)
        if not of_layer:
            scales[page, :, offset] = found


def paged_attention(
    q: Tensor,
    pages: KVPages,
    block_table: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chunked: bool = False,
    causal: bool = True,
) -> Tensor:
    """Paged attention: softmax(q·k·scale) v per query over the pages of its sequence; softmax and sums in float32.

    Query i of a sequence has position p = seq_len - query_len + i and attends to keys j <= p; with a window, to
    p - window < j <= p, or, if `chunked`, to p - p mod window <= j <= p. If not `causal`, it attends to all keys, or
    with a window to p - window < j < p + window. With a softcap c, scores become c · tanh(score / c). A sink adds one
    score per head to the softmax, without a value. With int8 pages q is rotated like the keys.

    q              [num_tokens, num_heads, head_dim]   f32 | bf16 | f16, after RoPE
    pages          include this step's tokens
    block_table    int32 [num_seqs, max_pages]         -1 for pages freed behind the window
    cu_query_lens  int32 [num_seqs + 1]
    seq_lens       int32 [num_seqs]                    including this step's tokens
    sinks          float32 [num_heads] or None
    returns        [num_tokens, num_heads, head_dim]   dtype of q

    Raises ValueError if page_size does not divide 128 or num_heads is not a multiple of num_kv_heads.
    """
    num_heads, num_kv_heads, page_size = q.shape[1], pages.k.shape[1], pages.k.shape[2]
    if KEY_TILE % page_size or num_heads % num_kv_heads:
        raise ValueError(
            f"page_size {page_size} must divide {KEY_TILE}, and {num_kv_heads} KV heads must divide {num_heads} heads"
        )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rotated = hadamard(q) if pages.format == "int8" else q
    heads = num_heads, num_kv_heads
    for rows, index, position, seq_len in _pieces(cu_query_lens, seq_lens, window if causal else None, heads):
        length = None if causal else seq_len
        how = (scale, window, softcap, sinks, chunked)
        out[rows] = _attend(rotated[rows], pages, block_table[index], position, length, *how)
    return out


def latent_attention(
    q: Tensor, pages: KVPages, block_table: Tensor, cu_query_lens: Tensor, seq_lens: Tensor, scale: float
) -> Tensor:
    """Causal latent attention (MLA, absorbed form) of all query heads; softmax and sums in float32.

    A token's key is its latent followed by the RoPE part; its value is the latent. With int8 pages q is rotated like
    the latents (`hadamard`), and the weighted sum is rotated back.

    q             [num_tokens, num_heads, rank + turned]   f32 | bf16 | f16, after RoPE; turned = RoPE dimensions
    pages         k: latents, v: RoPE parts of the keys, maybe without elements; one head; include this step's tokens
    block_table, cu_query_lens, seq_lens                   as in `paged_attention`
    returns       [num_tokens, num_heads, rank]            dtype of q
    """
    rank, rotates = pages.k.shape[3], pages.format == "int8"
    queries = torch.cat([hadamard(q[..., :rank]), q[..., rank:]], -1) if rotates else q
    if q.shape[2] == rank:  # no part of a key is rotated, so that keys are values
        pages = pages._replace(v=pages.k, v_scales=pages.k_scales)
    out = q.new_empty((*q.shape[:2], rank))
    for rows, index, position, _ in _pieces(cu_query_lens, seq_lens, None, (q.shape[1], 1)):
        mixed = _attend(queries[rows], pages, block_table[index], position, None, scale, None, None, None)
        out[rows] = hadamard(mixed) if rotates else mixed
    return out


def _pieces(
    cu_query_lens: Tensor, seq_lens: Tensor, window: int | None, heads: tuple[int, int]
) -> Iterator[tuple[slice, int, int, int]]:
    """Split queries into chunks computed at once: (rows, sequence index, position of the first query, seq_len).

    heads   (num_heads, num_kv_heads)
    """
    starts = cu_query_lens.tolist()
    for index, seq_len in enumerate(seq_lens.tolist()):
        first, last = starts[index], starts[index + 1]
        step = _queries_at_once(last - first, seq_len, window, *heads)
        for begin in range(first, last, step):
            yield slice(begin, min(begin + step, last)), index, seq_len - (last - begin), seq_len


def image_attention(
    q: Tensor,
    pages: KVPages,
    page_ids: Tensor,
    position: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`paged_attention` for the rows of one image starting at `position`: each attends to all keys up to the last row.

    page_ids  int32 [max_pages], the sequence's row of the block table
    window    at least the size of the image
    returns   float32 [rows, num_heads, head_dim]
    """
    rotated = hadamard(q) if pages.format == "int8" else q
    end = position + q.shape[0]
    step = _queries_at_once(q.shape[0], end, window, q.shape[1], pages.k.shape[1])
    how = (end, scale, window, softcap, sinks)
    parts = [
        _attend(rotated[begin : begin + step], pages, page_ids, position + begin, *how)
        for begin in range(0, q.shape[0], step)
    ]
    return torch.cat(parts)


def _query_tile(num_heads: int, num_kv_heads: int) -> int:
    """Query tokens per tile."""
    return max(1, QUERY_ROWS * num_kv_heads // num_heads)


def _queries_at_once(num_queries: int, seq_len: int, window: int | None, num_heads: int, num_kv_heads: int) -> int:
    """Number of queries, in whole tiles, whose scores fit in SCORE_LIMIT."""
    if num_queries == 1:
        return 1
    tile = _query_tile(num_heads, num_kv_heads)
    keys = seq_len if window is None else min(seq_len, window + num_queries)
    padded = (keys // KEY_TILE + 2) * KEY_TILE
    return max(1, SCORE_LIMIT // (padded * num_heads * tile)) * tile


def _attend(
    q: Tensor,
    pages: KVPages,
    page_ids: Tensor,
    position: int,
    length: int | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    chunked: bool = False,
) -> Tensor:
    """Attention of consecutive queries of one sequence, the first at `position`: float32 [queries, heads, head_dim].

    Queries wider than the rows of `pages.k` mean latent attention: [queries, heads, rank].

    length   sequence length if queries also attend to later keys; None for causal attention

    Batch-invariant bit for bit: every matrix product has the shape of one (query tile, key tile, KV head), tiles start
    at multiples of their size, the maximum is exact, and tiles are summed in order, so neighbouring queries and masked
    keys change nothing. (MKL's result depends on a query's row in its tile and on the tile's alignment: when head_dim
    is not a multiple of 16 it sums in a different order, hence the padding.)
    """
    num_queries, num_heads, width = q.shape
    spare = -width % 16
    num_kv_heads = pages.k.shape[1]
    per_kv = num_heads // num_kv_heads
    tile = _query_tile(num_heads, num_kv_heads)
    last = position + num_queries - 1
    newest = last if length is None else length - 1 if window is None else min(length - 1, last + window - 1)
    lead, num_q = position % tile, last // tile - position // tile + 1
    oldest = 0 if window is None else position - position % window if chunked else max(0, position - window + 1)
    first_tile, end_tile = oldest // KEY_TILE, newest // KEY_TILE + 1
    num_k = end_tile - first_tile
    base = first_tile * KEY_TILE

    rows = _page_rows(page_ids, pages.k.shape[2], num_kv_heads, first_tile, end_tile)
    keys, values, dim = _keys_and_values(pages, rows, num_k, width)
    # rows outside the sequence may hold another sequence's inf or NaN, and 0 · inf = NaN
    if oldest > base:
        values[0, :, : oldest - base] = 0.0
    if newest + 1 < end_tile * KEY_TILE:
        values[-1, :, newest + 1 - (end_tile - 1) * KEY_TILE :] = 0.0

    queries = _in_tiles(q.float() * scale, (num_q, tile, num_kv_heads, per_kv), lead, spare)
    scores = _products(queries.expand(num_k, -1, -1, -1, -1), keys.transpose(2, 3))
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if num_queries == 1:
        scores[0, ..., : oldest - base] = float("-inf")
        scores[-1, ..., newest + 1 - (end_tile - 1) * KEY_TILE :] = float("-inf")
    else:
        steps = torch.arange(position - lead, position - lead + num_q * tile, device=q.device).clamp_(position, last)
        at = steps.view(num_q, tile, 1).expand(-1, -1, per_kv)
        _hide(scores, base, at, window, None if length is None else newest, chunked)

    sink = None
    if sinks is not None:
        sink = sinks.float().view(num_kv_heads, 1, 1, per_kv).expand(-1, -1, tile, -1).reshape(num_kv_heads, 1, -1, 1)
    mixed = _mixed(scores, values, sink).view(num_kv_heads, num_q * tile, per_kv, -1)
    mixed = mixed[:, lead : lead + num_queries, :, :dim]
    return mixed.permute(1, 0, 2, 3).reshape(num_queries, num_heads, dim)


def _in_tiles(queries: Tensor, shape: tuple[int, int, int, int], lead: int, spare: int) -> Tensor:
    """[queries, heads, head_dim] -> [num_kv_heads, num_q, tile rows, head_dim + spare], after `lead` rows of zeros."""
    num_q, tile, num_kv_heads, per_kv = shape
    if num_q * tile != queries.shape[0] or spare:
        queries = functional.pad(queries, (0, spare, 0, 0, lead, num_q * tile - lead - queries.shape[0]))
    queries = queries.view(num_q, tile, num_kv_heads, per_kv, -1).permute(2, 0, 1, 3, 4)
    return queries.reshape(num_kv_heads, num_q, tile * per_kv, -1)


def _mixed(scores: Tensor, values: Tensor, sink: Tensor | None) -> Tensor:
    """softmax(scores) · values, summed over key tiles in order; `scores` is overwritten.

    scores   [num_k, num_kv_heads, num_q, rows, KEY_TILE]
    sink     [num_kv_heads, 1, rows, 1]: an extra score without a value
    returns  [num_kv_heads, num_q, rows, d]
    """
    top = scores.amax((0, 4), keepdim=True)
    if sink is not None:
        top = torch.maximum(top, sink)
    weights = scores.sub_(top).exp_()
    sums = weights.sum(-1, keepdim=True)
    parts = _products(weights, values)
    total, norm = parts[0], sums[0]
    for index in range(1, scores.shape[0]):
        total, norm = total + parts[index], norm + sums[index]
    if sink is not None:
        norm = norm + torch.exp(sink - top[0])
    return total / norm


def _page_rows(page_ids: Tensor, page_size: int, num_kv_heads: int, first_tile: int, end_tile: int) -> Tensor:
    """Row indices into a cache viewed as [num_pages * num_kv_heads, ...], ordered tile, head, page; absent pages: 0."""
    per_tile = KEY_TILE // page_size
    wanted = page_ids[first_tile * per_tile : end_tile * per_tile]
    missing = (end_tile - first_tile) * per_tile - wanted.shape[0]
    if missing:
        wanted = functional.pad(wanted, (0, missing))
    wanted = wanted.clamp(min=0).mul_(num_kv_heads).view(-1, 1, per_tile)
    return (wanted + torch.arange(num_kv_heads, dtype=wanted.dtype, device=page_ids.device).view(-1, 1)).view(-1)


def _keys_and_values(pages: KVPages, rows: Tensor, num_tiles: int, width: int) -> tuple[Tensor, Tensor, int]:
    """Gathered keys and values (see `_gather`) for queries of `width`, and the value width without padding."""
    key_dim = pages.k.shape[3]
    if width == key_dim:
        spare = -width % 16
        values = _gather(pages.v, pages.v_scales, rows, num_tiles, spare)
        return _gather(pages.k, pages.k_scales, rows, num_tiles, spare), values, key_dim
    values = _gather(pages.k, pages.k_scales, rows, num_tiles, -key_dim % 16)
    turned = _gather(pages.v, pages.v_scales, rows, num_tiles, -width % 16)
    return torch.cat([values[..., :key_dim], turned], -1), values, key_dim


def _gather(cache: Tensor, scales: Tensor | None, rows: Tensor, num_tiles: int, spare: int) -> Tensor:
    """Copy a sequence's keys or values: float32 [num_tiles, num_kv_heads, KEY_TILE, head_dim + spare], zero-padded."""
    num_kv_heads, head_dim = cache.shape[1], cache.shape[3]
    tiles = cache.flatten(0, 1).index_select(0, rows)  # [num_tiles * num_kv_heads * pages per tile, page_size, d]
    if scales is not None:
        found = scales if scales.dim() == 1 else scales.flatten(0, 1).index_select(0, rows)
        tiles = decode(tiles, found)
    tiles = tiles.float().view(num_tiles, num_kv_heads, KEY_TILE, head_dim)
    return functional.pad(tiles, (0, spare)) if spare else tiles


def _hide(scores: Tensor, base: int, positions: Tensor, window: int | None, newest: int | None, chunked: bool) -> None:
    """Mask scores with -inf where the query at `positions` [num_q, tile, per_kv] must not attend to the key.

    newest   last visible key if attention is not causal; None if causal
    """
    num_k, _, num_q, rows, _ = scores.shape
    keys = torch.arange(base, base + num_k * KEY_TILE, device=scores.device).view(num_k, 1, 1, 1, KEY_TILE)
    queries = positions.reshape(1, 1, num_q, rows, 1)
    hidden = keys > (queries if newest is None else torch.full_like(queries, newest))
    if window is not None:
        hidden |= keys < queries - queries % window if chunked else keys <= queries - window
        if newest is not None:
            hidden |= keys >= queries + window
    scores.masked_fill_(hidden, float("-inf"))


def _products(left: Tensor, right: Tensor) -> Tensor:
    """[num_k, num_kv_heads, num_q, rows, x] @ [num_k, num_kv_heads, x, y], one matrix product per tile pair."""
    num_k, num_kv_heads, num_q, rows, inner = left.shape
    width = right.shape[-1]
    if num_q == 1:
        flat = torch.bmm(left.reshape(-1, rows, inner), right.flatten(0, 1))
        return flat.view(num_k, num_kv_heads, 1, rows, width)
    out = torch.empty((num_k, num_kv_heads, num_q, rows, width), dtype=torch.float32, device=left.device)
    for index in range(num_k):
        for head in range(num_kv_heads):
            torch.bmm(left[index, head], right[index, head].expand(num_q, -1, -1), out=out[index, head])
    return out


def embedding(token_ids: Tensor, table: Tensor, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Look up rows of a dense table and multiply them by `scale`.

    token_ids  int64 [num_tokens]
    table      [vocab, hidden]       f32 | bf16 | f16
    returns    [num_tokens, hidden]  `dtype`
    """
    rows = table.index_select(0, token_ids).to(dtype)
    return rows if scale == 1.0 else rows.mul_(scale)

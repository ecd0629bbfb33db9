"""Hyper-connections and n-gram embeddings: a token has several residual streams, side by side.

Qwen3.8-Flash-Next   a block reads a mean of the normed streams, gated value by value, and its output is added to every
                     stream, multiplied by a gain per token and stream
GLM-5.3 Flash,       mHC: a block reads a weighted sum of the streams; afterwards a doubly stochastic matrix mixes
DeepSeek V4          these, and the output is added to each, multiplied by a gain; all weights depend on the token

Plain PyTorch. Batch-invariant: sums run within a row, over streams in their order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .layer_weights import HyperWeights, MixedWeights, NGramWeights, Norm
from .recurrent import sigmoid
from .state_slots import StateSlots

SMALLEST = 1e-6  # lower bound of a gate's absolute value before its root is taken, as in transformers


def widened(x: Tensor, weights: HyperWeights | MixedWeights) -> Tensor:
    """The streams before the first layer, all equal: [num_tokens, hidden] -> [num_tokens, count * hidden].

    Streams [num_tokens, count * hidden] are returned unchanged.
    """
    return x if x.shape[1] == weights.wide else x.repeat(1, weights.count)


def hyper_in(rms_norm: Callable[..., Tensor], x: Tensor, weights: HyperWeights | MixedWeights) -> tuple[Tensor, Tensor]:
    """A block's input [num_tokens, hidden], and the gains of its output: float32 [num_tokens, count], with
    `MixedWeights` [num_tokens, count + count²], followed by the matrix that mixes the streams.

    x   streams [num_tokens, count * hidden]
    """
    if isinstance(weights, MixedWeights):
        return _mixed_in(x, weights)
    count, rank = weights.count, weights.rank
    normed = _normed(rms_norm, x, weights.norm, count)
    low = weights.down(normed).float().mul_(1 / count)
    gains = sigmoid(low[:, rank:]).mul_(2.0)
    low = low[:, :rank]
    gates = sigmoid(weights.up((low * sigmoid(low)).to(x.dtype))).mul_(normed).unflatten(-1, (count, -1))
    mixed = gates[:, 0]
    for stream in range(1, count):
        mixed = mixed + gates[:, stream]
    return mixed.mul_(1 / count).to(x.dtype), gains


def _mixed_in(x: Tensor, weights: MixedWeights) -> tuple[Tensor, Tensor]:
    count = weights.count
    before, after, matrix = (
        part.mul(scale).add_(base)
        for part, scale, base in zip(
            _normed_products(x, weights.fn, weights.norm_eps).split([count, count, count**2], -1),
            weights.scale,
            weights.base.split([count, count, count**2]),
            strict=True,
        )
    )
    matrix = matrix.unflatten(-1, (count, count))
    matrix = (matrix - matrix.amax(-1, keepdim=True)).exp_()
    matrix = matrix / _sum(matrix, -1) + weights.eps
    matrix = matrix / (_sum(matrix, -2) + weights.eps)
    for _ in range(weights.rounds - 1):
        matrix = matrix / (_sum(matrix, -1) + weights.eps)
        matrix = matrix / (_sum(matrix, -2) + weights.eps)
    return _weighted(x, before, weights), torch.cat([sigmoid(after).mul_(2.0), matrix.flatten(1)], -1)


def _normed_products(x: Tensor, fn: Tensor, eps: float) -> Tensor:
    """The products of all normed streams with the rows of fn: float32 [num_tokens, rows]."""
    streams = x.float()
    size = streams.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
    made = torch.stack([fn @ row for row in streams]) if len(x) else streams[:, : len(fn)]
    return made.mul(size)


def _weighted(x: Tensor, before: Tensor, weights: MixedWeights) -> Tensor:
    """The sum of the streams, weighted by the sigmoids of `before` [num_tokens, count]: [num_tokens, hidden]."""
    before, parts = sigmoid(before).add_(weights.eps).unsqueeze(-1), x.float().unflatten(-1, (weights.count, -1))
    mixed = parts[:, 0] * before[:, 0]
    for stream in range(1, weights.count):
        mixed = mixed + parts[:, stream] * before[:, stream]
    return mixed.to(x.dtype)


def _sum(matrix: Tensor, dim: int) -> Tensor:
    """The sum over a dimension, kept, in the order of its elements, for any number of tokens."""
    first, *others = matrix.split(1, dim)
    return sum(others, first)


def hyper_out(x: Tensor, output: Tensor, gains: Tensor) -> Tensor:
    """The streams x after a block, in place: x or its mixture, plus the block's output [num_tokens, hidden] times the
    gain of each stream.

    gains   as from `hyper_in`: entry (i, j) of the matrix weighs stream i in what stream j becomes
    """
    count = x.shape[1] // output.shape[1]
    streams, added = x.unflatten(-1, (count, -1)), output.float().unsqueeze(1) * gains[:, :count].unsqueeze(-1)
    if gains.shape[1] == count:
        streams += added.to(x.dtype)
        return x
    matrix = gains[:, count:].unflatten(-1, (count, count, 1))
    for stream in range(count):
        added += streams[:, stream].float().unsqueeze(1) * matrix[:, stream]
    return x.copy_(added.flatten(1))


def reduced(block_in: Callable[..., tuple[Tensor, Tensor]], x: Tensor, weights: HyperWeights | MixedWeights) -> Tensor:
    """The model's output after the block of `weights`: [num_tokens, count * hidden] -> [num_tokens, hidden]; the
    streams unchanged if other blocks follow.

    block_in   `hyper_in` of the weights' device
    """
    if isinstance(weights, HyperWeights):
        return x if weights.final is None else block_in(x, weights.final)[0]
    if weights.final is None:
        return mean_stream(x, weights.count) if weights.last else x
    fn, base, scale = weights.final
    return _weighted(x, _normed_products(x, fn, weights.norm_eps).mul_(scale).add_(base), weights)


def mean_stream(x: Tensor, count: int) -> Tensor:
    """The mean of the streams: [num_tokens, count * hidden] -> [num_tokens, hidden]."""
    parts = x.unflatten(-1, (count, -1)).float()
    total = parts[:, 0]
    for stream in range(1, count):
        total = total + parts[:, stream]
    return total.mul_(1 / count).to(x.dtype)


def ngrams(
    rms_norm: Callable[..., Tensor],
    causal_conv: Callable[..., Tensor],
    x: Tensor,
    rows: Tensor,
    weights: NGramWeights,
    kept: StateSlots,
    slots: Tensor,
    cu_query_lens: Tensor,
) -> Tensor:
    """x + v + silu(conv(norm(v))), in place: v = sigmoid(signed root of key · query) · value, per stream.

    x      streams [num_tokens, count * hidden]
    rows   [num_tokens, size]: table rows of each token
    kept   last inputs of the convolution, modified
    """
    value = weights.value(rows)
    hidden = value.shape[1]
    count = x.shape[1] // hidden
    key = _normed(rms_norm, weights.key(rows), weights.key_norm, count).unflatten(-1, (count, hidden))
    query = _normed(rms_norm, x, weights.query_norm, count).unflatten(-1, (count, hidden))
    gate = (key.float() * query).sum(-1, keepdim=True).mul_(hidden**-0.5)
    gate = sigmoid(gate.abs().clamp_(min=SMALLEST).sqrt_().copysign_(gate).mul_(gate != 0))
    del key, query  # before the convolution; the memory plan counts on it
    gated = (gate * value.unsqueeze(1)).to(x.dtype).flatten(1)
    normed = _normed(rms_norm, gated, weights.conv_norm, count)
    mixed = causal_conv(normed, weights.conv, None, kept.conv, slots, cu_query_lens, True)
    return x.add_(mixed.add_(gated).to(x.dtype))


def ngram_rows(
    token_ids: Tensor,
    last: Tensor,
    slots: Tensor,
    cu_query_lens: Tensor,
    multipliers: Tensor,
    sizes: Tensor,
    offsets: Tensor,
    end: int,
) -> Tensor:
    """The table rows of each token: int64 [num_tokens, heads], on the CPU.

    A head hashes a token and those before it; tokens before the last `end` count as `end`. See `NGramTable`.

    token_ids      int64 [num_tokens]
    last           float32 [num_slots, order - 1], modified: last tokens, oldest first, as id + 1; 0 for none
    multipliers    int64 [order], on the CPU as sizes and offsets
    sizes, offsets int64 [heads]
    """
    order, count = multipliers.shape[0], token_ids.shape[0]
    before = torch.empty(count, order, dtype=torch.int64)  # the token, then the ones before it
    kept, ids, bounds = last[slots].cpu().long() - 1, token_ids.cpu(), cu_query_lens.tolist()
    for sequence, row in enumerate(kept):
        start, stop = bounds[sequence], bounds[sequence + 1]
        known = torch.cat([row, ids[start:stop]])
        if stop > start:
            before[start:stop] = known.unfold(0, order, 1).flip(1)
        row.copy_(known[known.shape[0] - order + 1 :])
    last[slots] = (kept + 1).to(last)
    before = torch.where(before < 0, end, before)
    ended = torch.zeros(count, dtype=torch.bool)
    mixed, per = before[:, 0] * multipliers[0], sizes.shape[0] // (order - 1)
    found = []
    for distance in range(1, order):
        ended |= before[:, distance] == end
        mixed = mixed ^ torch.where(ended, end, before[:, distance]) * multipliers[distance]
        heads = slice((distance - 1) * per, distance * per)
        found.append(mixed.unsqueeze(-1) % sizes[heads] + offsets[heads])
    return torch.cat(found, -1)


def _normed(rms_norm: Callable[..., Tensor], x: Tensor, norm: Norm, count: int) -> Tensor:
    """RMSNorm of every stream, with a weight of its own: shape of x."""
    streams = x.view(x.shape[0] * count, -1)
    ones = torch.ones(streams.shape[1], device=x.device)
    return (rms_norm(streams, ones, norm.eps).view(x.shape) * norm.weight).to(x.dtype)

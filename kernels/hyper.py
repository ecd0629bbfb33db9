"""Hyper-connections and n-gram embeddings (Qwen3.8-Flash-Next): a token has several residual streams, side by side.

A block reads a mean of the normed streams, gated value by value, and its output is added to every stream, multiplied by
a gain per token and stream. Plain PyTorch. Batch-invariant: sums run within a row, over streams in their order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .layer_weights import HyperWeights, NGramWeights, Norm
from .recurrent import sigmoid
from .state_slots import StateSlots

SMALLEST = 1e-6  # lower bound of a gate's absolute value before its root is taken, as in transformers


def widened(x: Tensor, weights: HyperWeights) -> Tensor:
    """The streams before the first layer, all equal: [num_tokens, hidden] -> [num_tokens, count * hidden].

    Streams [num_tokens, count * hidden] are returned unchanged.
    """
    return x if x.shape[1] == weights.norm.weight.shape[0] else x.repeat(1, weights.count)


def hyper_in(rms_norm: Callable[..., Tensor], x: Tensor, weights: HyperWeights) -> tuple[Tensor, Tensor]:
    """A block's input [num_tokens, hidden], and the gains of its output: float32 [num_tokens, count].

    x   streams [num_tokens, count * hidden]
    """
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


def hyper_out(x: Tensor, output: Tensor, gains: Tensor) -> Tensor:
    """x plus a block's output [num_tokens, hidden] times the gain of each stream, in place."""
    streams = x.unflatten(-1, (gains.shape[1], -1))
    streams += (output.float().unsqueeze(1) * gains.unsqueeze(-1)).to(x.dtype)
    return x


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

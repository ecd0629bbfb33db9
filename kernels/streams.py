"""AltUp and LAuReL (Gemma 3n): a token has several residual streams, of which layers compute the first.

Before a layer every stream is predicted from all of them; behind it what the layer made of the first corrects the
predictions. Beside attention, a product of two narrow matrices is added. In plain PyTorch, without a branch on values:
decoding steps of it are captured in graphs. Rows are summed alone or element by element, so that none depends on the
rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .layer_weights import AttentionWeights, InputWeights, StreamWeights
from .mixers import norm_rows

SMALLEST = 1e-5  # of the mean square that a projected stream is divided by the root of


def streams_in(rms_norm: Callable[..., Tensor], x: Tensor, weights: AttentionWeights) -> tuple[Tensor, Tensor, Tensor]:
    """The predicted streams [num_tokens, streams, hidden], a copy of the first of them, and what LAuReL adds to it.

    x   what the layer before gives: as the result; or of a first layer [num_tokens, hidden]
    """
    own = weights.streams
    assert own is not None
    streams = x if x.ndim == 3 else _widened(x, own)
    coefs = _coefficients(rms_norm, streams[:, 0].contiguous(), own, own.predict).unflatten(-1, (own.count, -1))
    wide = streams.float()
    # over all streams j: coefs[i, j] of each, one after the other
    total = coefs[:, :, :1] * wide[:, :1]
    for other in range(1, own.count):
        total += coefs[:, :, other : other + 1] * wide[:, other : other + 1]
    streams = total.add_(wide).to(x.dtype)
    first = streams[:, 0].clone(memory_format=torch.contiguous_format)  # of one token `contiguous` would be no copy
    normed = norm_rows(rms_norm, first, weights.norm)
    return streams, first, normed + norm_rows(rms_norm, own.right(own.left(normed)), own.laurel_norm)


def streams_out(
    rms_norm: Callable[..., Tensor],
    silu_mul: Callable[..., Tensor],
    gelu_tanh_mul: Callable[..., Tensor],
    streams: Tensor,
    x: Tensor,
    weights: StreamWeights,
    input_weights: InputWeights,
    given: Tensor,
) -> Tensor:
    """The corrected streams, all but the first with what the token has for this layer.

    streams   as predicted [num_tokens, streams, hidden]
    x         what the layer made of the first [num_tokens, hidden]
    given     [num_tokens, size]
    """
    coefs = _coefficients(rms_norm, x, weights, weights.correct).add_(1.0)
    changed = (x.float() - streams[:, 0]).unsqueeze(1)
    streams = (changed * coefs.unsqueeze(-1)).add_(streams).to(x.dtype)
    first = streams[:, 0] if weights.scale is None else (streams[:, 0] * weights.scale).to(x.dtype)
    streams[:, 1:] += let_in(rms_norm, silu_mul, gelu_tanh_mul, first.contiguous(), input_weights, given).unsqueeze(1)
    return streams


def let_in(
    rms_norm: Callable[..., Tensor],
    silu_mul: Callable[..., Tensor],
    gelu_tanh_mul: Callable[..., Tensor],
    x: Tensor,
    weights: InputWeights,
    given: Tensor,
) -> Tensor:
    """norm(projection(act(gate of x) · given)): [num_tokens, hidden], what is added where a layer takes `given` in."""
    activated = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}[weights.activation]
    return norm_rows(rms_norm, weights.projection(activated(torch.cat([weights.gate(x), given], -1))), weights.norm)


def joined(x: Tensor, added: Tensor) -> Tensor:
    """The residual stream behind attention, with what LAuReL adds, in the place of x."""
    return x.add_(added).mul_(2**-0.5)


def narrowed(streams: Tensor, weights: StreamWeights) -> Tensor:
    """The mean of the streams behind the last layer, all but the first projected to its length: [num_tokens, hidden].

    The first of them behind any other layer.
    """
    first = streams[:, 0]
    if not weights.narrow:
        return first.contiguous()
    length, total = _length(first), first.float()
    for number, linear in enumerate(weights.narrow, 1):
        total = total + _of_length(linear(streams[:, number].contiguous()), length)
    return total.div_(streams.shape[1]).to(streams.dtype)


def _widened(x: Tensor, weights: StreamWeights) -> Tensor:
    """The streams before the first layer: x, and projections of it of the same length."""
    if weights.widen is None:
        return x.unsqueeze(1).repeat(1, weights.count, 1)
    others = _of_length(weights.widen(x).unflatten(-1, (weights.count - 1, -1)), _length(x).unsqueeze(1))
    return torch.cat([x.unsqueeze(1), others.to(x.dtype)], 1)


def _coefficients(rms_norm: Callable[..., Tensor], x: Tensor, weights: StreamWeights, matrix: Tensor) -> Tensor:
    """float32 [num_tokens, N]: `matrix` [N, streams] times what the router says of x."""
    said = weights.router(norm_rows(rms_norm, x, weights.router_norm)).float().mul(1 / x.shape[-1]).tanh_()
    return (said.unsqueeze(-1) * matrix.T).sum(-2)


def _of_length(x: Tensor, length: Tensor) -> Tensor:
    """float32, rows as long as `length` says."""
    return x.float() * (length / _length(x).clamp(min=SMALLEST**0.5))


def _length(x: Tensor) -> Tensor:
    """The root of each row's mean square: float32 [..., 1]."""
    mean, spread = moments(x)
    return (mean.square() + spread.square()).sqrt_()


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each row: float32 [..., 1].

    As a LayerNorm finds them, which sums a row in one order however many there are; `torch.mean` does not on a GPU.
    """
    _, mean, inverse = torch.native_layer_norm(x.float(), x.shape[-1:], None, None, 0.0)
    return mean, inverse.reciprocal()

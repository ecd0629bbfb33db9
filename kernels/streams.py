"""AltUp and LAuReL (Gemma 3n): each token has several residual streams, and layers compute only the first.

AltUp: before a layer, every stream is predicted from all of them; after it, the layer's output for the first stream
corrects the predictions. LAuReL: a low-rank product in parallel with attention. Plain PyTorch without data-dependent
branches, so decode steps can be captured in CUDA graphs. Batch-invariant: sums run within a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .layer_weights import AttentionWeights, InputWeights, StreamWeights
from .mixers import norm_rows

SMALLEST = 1e-5  # lower bound of the mean square by which a projected stream is normalized


def streams_in(rms_norm: Callable[..., Tensor], x: Tensor, weights: AttentionWeights) -> tuple[Tensor, Tensor, Tensor]:
    """Return the predicted streams [num_tokens, streams, hidden], a copy of the first one, and its LAuReL term.

    x   the previous layer's streams [num_tokens, streams, hidden]; for the first layer [num_tokens, hidden]
    """
    own = weights.streams
    assert own is not None
    streams = x if x.ndim == 3 else _widened(x, own)
    coefs = _coefficients(rms_norm, streams[:, 0].contiguous(), own, own.predict).unflatten(-1, (own.count, -1))
    wide = streams.float()
    # sum over streams j of coefs[i, j] · stream j, in order of j
    total = coefs[:, :, :1] * wide[:, :1]
    for other in range(1, own.count):
        total += coefs[:, :, other : other + 1] * wide[:, other : other + 1]
    streams = total.add_(wide).to(x.dtype)
    first = streams[:, 0].clone(memory_format=torch.contiguous_format)  # for one token `contiguous` would not copy
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
    """Return the corrected streams; all but the first also get the token's per-layer input.

    streams   predicted [num_tokens, streams, hidden]
    x         the layer's output for the first stream [num_tokens, hidden]
    given     per-layer inputs [num_tokens, size]
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
    """norm(projection(act(gate(x)) · given)): [num_tokens, hidden], the contribution of the per-layer inputs."""
    activated = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}[weights.activation]
    return norm_rows(rms_norm, weights.projection(activated(torch.cat([weights.gate(x), given], -1))), weights.norm)


def joined(x: Tensor, added: Tensor) -> Tensor:
    """(x + added) / sqrt(2), in place: the residual stream after attention plus the LAuReL term."""
    return x.add_(added).mul_(2**-0.5)


def narrowed(streams: Tensor, weights: StreamWeights) -> Tensor:
    """After the last layer, the mean of all streams, with all but the first projected and rescaled to its RMS.

    After any other layer, the first stream. Returns [num_tokens, hidden].
    """
    first = streams[:, 0]
    if not weights.narrow:
        return first.contiguous()
    length, total = _length(first), first.float()
    for number, linear in enumerate(weights.narrow, 1):
        total = total + _of_length(linear(streams[:, number].contiguous()), length)
    return total.div_(streams.shape[1]).to(streams.dtype)


def _widened(x: Tensor, weights: StreamWeights) -> Tensor:
    """The streams before the first layer: x, and projections of x with the same RMS."""
    if weights.widen is None:
        return x.unsqueeze(1).repeat(1, weights.count, 1)
    others = _of_length(weights.widen(x).unflatten(-1, (weights.count - 1, -1)), _length(x).unsqueeze(1))
    return torch.cat([x.unsqueeze(1), others.to(x.dtype)], 1)


def _coefficients(rms_norm: Callable[..., Tensor], x: Tensor, weights: StreamWeights, matrix: Tensor) -> Tensor:
    """float32 [num_tokens, N]: `matrix` [N, streams] times tanh(router(norm(x)) / hidden)."""
    modalities = weights.router(norm_rows(rms_norm, x, weights.router_norm)).float().mul(1 / x.shape[-1]).tanh_()
    return (modalities.unsqueeze(-1) * matrix.T).sum(-2)


def _of_length(x: Tensor, length: Tensor) -> Tensor:
    """Rows of x rescaled to the RMS `length`, float32."""
    return x.float() * (length / _length(x).clamp(min=SMALLEST**0.5))


def _length(x: Tensor) -> Tensor:
    """RMS of each row: float32 [..., 1]."""
    mean, spread = moments(x)
    return (mean.square() + spread.square()).sqrt_()


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each row: float32 [..., 1].

    Uses LayerNorm because it sums a row in the same order for any number of rows; `torch.mean` does not on a GPU.
    """
    _, mean, inverse = torch.native_layer_norm(x.float(), x.shape[-1:], None, None, 0.0)
    return mean, inverse.reciprocal()

"""Reference implementations of the recurrent ops, which carry per-sequence state between steps, in plain PyTorch.

The tokens of a step's sequences are concatenated. A sequence may have no tokens. If there are as many tokens as
sequences, each has exactly one, and sequence lengths are not read back from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

CHUNK = 64  # tokens per chunk in `delta_rule_chunked` and `state_space_chunked`


def parts(slots: Tensor, cu_query_lens: Tensor) -> Iterator[tuple[Tensor, slice]]:
    """Yield (slot, rows of its tokens) for each sequence."""
    ends = cu_query_lens.tolist()
    return ((slots[index], slice(*ends[index : index + 2])) for index in range(slots.shape[0]))


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), float32, bitwise independent of an element's position."""
    return torch.neg(x.float()).exp_().add_(1.0).reciprocal_()


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), float32."""
    return x.abs().neg_().exp_().add_(1.0).log_().add_(x.clamp(min=0.0))


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor,
    cu_query_lens: Tensor,
    silu: bool = False,
) -> Tensor:
    """Depthwise causal convolution: y[t] = b + sum over j of w[:, j] · x[t - width + 1 + j].

    Inputs before this step come from the sequence's slot in `state`.

    x              [num_tokens, channels]               any float type
    weight         float32 [channels, width]
    bias           float32 [channels] | None
    state          float32 [num_slots, channels, width - 1], modified: the last inputs of each sequence
    slots          int64 [num_seqs]
    cu_query_lens  int32 [num_seqs + 1]
    silu           return silu(y) = y · sigmoid(y)
    returns        float32 [num_tokens, channels]
    """
    out = torch.empty(x.shape, device=x.device)
    wide = x.float()
    if x.shape[0] == slots.shape[0]:
        seen = torch.cat([state[slots], wide.unsqueeze(-1)], -1)
        out[:] = _slid(seen, weight, bias).squeeze(-1)
        state[slots] = seen[..., 1:]
        return out.mul_(sigmoid(out)) if silu else out
    for slot, rows in parts(slots, cu_query_lens):
        seen = torch.cat([state[slot], wide[rows].T], -1)
        out[rows] = _slid(seen, weight, bias).T
        state[slot] = seen[..., seen.shape[-1] - state.shape[-1] :]
    return out.mul_(sigmoid(out)) if silu else out


def _slid(seen: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve [..., channels, width - 1 + n] -> [..., channels, n], summing taps in order."""
    width = weight.shape[1]
    count = seen.shape[-1] - width + 1
    total = seen[..., :count] * weight[:, :1]
    for j in range(1, width):
        total += seen[..., j : j + count] * weight[:, j : j + 1]
    return total if bias is None else total.add_(bias.unsqueeze(-1))


def unit(x: Tensor) -> Tensor:
    """L2-normalize rows, float32."""
    wide = x.float()
    return wide * (wide * wide).sum(-1, keepdim=True).add_(1e-6).sqrt_().reciprocal_()


def of_heads(x: Tensor, count: int, tiled: bool) -> Tensor:
    """[num_tokens, key heads, dim] -> [num_tokens, count, dim]: repeat key heads to match `count` value heads."""
    ratio = count // x.shape[1]
    if ratio == 1:
        return x
    return x.repeat(1, ratio, 1) if tiled else x.repeat_interleave(ratio, 1)


def _walk(
    advanced: Callable[[Tensor, int | slice], Tensor],
    num_tokens: int,
    state: Tensor,
    slots: Tensor,
    cu_query_lens: Tensor,
) -> None:
    """Advance every sequence's state through its tokens: `advanced(carried, at)` returns the state after row `at`.

    If each sequence has one token, all advance in one call.
    """
    if num_tokens == slots.shape[0]:
        state[slots] = advanced(state[slots], slice(None))
        return
    for slot, rows in parts(slots, cu_query_lens):
        carried = state[slot]
        for at in range(rows.start, rows.stop):
            carried = advanced(carried, at)
        state[slot] = carried


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    cu_query_lens: Tensor,
    tiled: bool = False,
) -> Tensor:
    """Gated delta rule, token by token: S = S exp(decay); S = S + beta (v - S k) kᵀ; y = S q.

    k and q are L2-normalized, q then scaled by 1 / sqrt(k_dim).

    q, k           [num_tokens, num_k_heads, k_dim]     any float type
    v              [num_tokens, num_v_heads, v_dim]
    decay          float32 [num_tokens, num_v_heads]    <= 0; or one per key channel (Kimi Delta Attention),
                   [num_tokens, num_v_heads, k_dim]
    beta           float32 [num_tokens, num_v_heads]
    state          float32 [num_slots, num_v_heads, v_dim, k_dim], modified
    slots          int64 [num_seqs]
    cu_query_lens  int32 [num_seqs + 1]
    tiled          value head j uses key head j % num_k_heads, otherwise j // (num_v_heads / num_k_heads)
    returns        float32 [num_tokens, num_v_heads, v_dim]
    """
    heads = v.shape[1]
    q = of_heads(unit(q).mul_(q.shape[-1] ** -0.5), heads, tiled).unsqueeze(-2)
    k = of_heads(unit(k), heads, tiled).unsqueeze(-2)
    factor, rate = decay.exp().view(*v.shape[:2], 1, -1), beta.unsqueeze(-1)
    v, out = v.float(), torch.empty(v.shape, device=v.device)

    def advanced(carried: Tensor, at: int | slice) -> Tensor:
        carried = carried * factor[at]
        missing = (v[at] - (carried * k[at]).sum(-1)).mul_(rate[at])
        carried += missing.unsqueeze(-1) * k[at]
        out[at] = (carried * q[at]).sum(-1)
        return carried

    _walk(advanced, v.shape[0], state, slots, cu_query_lens)
    return out


def delta_rule_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    cu_query_lens: Tensor,
    tiled: bool = False,
) -> Tensor:
    """`delta_rule` as matrix products over chunks of CHUNK tokens: faster for prompts, with different rounding.

    Within a chunk S_t = exp(G_t) S_0 + sum over i <= t of exp(G_t - G_i) u_i k_iᵀ, where G is the cumulative sum of
    the decays and u solves (I + A) u = beta (v - exp(G) S_0 k) with A strictly lower triangular,
    A[t, i] = beta_t exp(G_t - G_i) k_t·k_i. With a decay per channel, exp(G) multiplies the channels of k and q.
    """
    if v.shape[0] == slots.shape[0]:
        return delta_rule(q, k, v, decay, beta, state, slots, cu_query_lens, tiled)
    heads, out = v.shape[1], torch.empty(v.shape, device=v.device)
    q = of_heads(unit(q).mul_(q.shape[-1] ** -0.5), heads, tiled).transpose(0, 1)  # [heads, num_tokens, dim]
    k = of_heads(unit(k), heads, tiled).transpose(0, 1)
    products = _decayed_products if decay.ndim == 3 else _products
    decay = decay.view(*v.shape[:2], -1).transpose(0, 1)
    v, beta = v.float().transpose(0, 1), beta.T.unsqueeze(-1)
    for slot, rows in parts(slots, cu_query_lens):
        carried = state[slot]
        for start in range(rows.start, rows.stop, CHUNK):
            at = slice(start, min(start + CHUNK, rows.stop))
            queries, keys, rate, logs = q[:, at], k[:, at], beta[:, at], decay[:, at]
            summed = logs.cumsum(1)
            grown, rest = summed.exp(), (summed[:, -1:] - summed).exp()
            system, shares = products(queries, keys, logs)
            wanted = rate * (v[:, at] - (grown * keys) @ carried.mT)
            solved = torch.linalg.solve_triangular(system * rate, wanted, upper=False, unitriangular=True)
            out[at] = ((grown * queries) @ carried.mT + shares @ solved).transpose(0, 1)
            carried = carried * grown[:, -1:] + solved.mT @ (rest * keys)
        state[slot] = carried
    return out


def _products(q: Tensor, k: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """k_t·k_i and q_t·k_i times exp(decays of tokens i + 1 to t), 0 for i > t: each [heads, num_tokens, num_tokens].

    decay   [heads, num_tokens, 1]
    """
    summed = decay.cumsum(1)
    lower = (summed - summed.mT).tril_().exp_().tril_()
    return (k @ k.mT).mul_(lower), (q @ k.mT).mul_(lower)


def _decayed_products(q: Tensor, k: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """`_products` with a decay per channel, [heads, num_tokens, k_dim].

    exp(-G) overflows, so a pair of tokens meets at the end of a block of 2^n tokens that holds the earlier one and
    whose successor holds the later one: both are multiplied by a factor of at most 1.
    """
    count = q.shape[1]
    padded = 1 << (count - 1).bit_length()
    q, k, decay = (torch.nn.functional.pad(part, (0, 0, 0, padded - count)) for part in (q, k, decay))
    system = torch.zeros(q.shape[0], padded, padded, device=q.device)
    shares = torch.diag_embed((q * k).sum(-1))
    block = torch.arange(padded, device=q.device)
    for level in range(padded.bit_length() - 1):
        logs = decay.unflatten(1, (-1, 1 << level))
        since = logs.cumsum(2)
        left, right = since.exp().flatten(1, 2), k * (since[:, :, -1:] - since).exp().flatten(1, 2)
        number = block >> level
        meet = (number.unsqueeze(1) == number + 1) & (number % 2 == 0)
        system += ((k * left) @ right.mT).mul_(meet)
        shares += ((q * left) @ right.mT).mul_(meet)
    return system[:, :count, :count], shares[:, :count, :count]


def state_space(
    x: Tensor, b: Tensor, c: Tensor, steps: Tensor, decay: Tensor, state: Tensor, slots: Tensor, cu_query_lens: Tensor
) -> Tensor:
    """Mamba-2 state space, token by token: S = exp(step · decay) S + step · x bᵀ; y = S c.

    x              [num_tokens, num_heads, head_dim]     any float type
    b, c           [num_tokens, num_groups, size]        head j uses group j // (num_heads / num_groups)
    steps          float32 [num_tokens, num_heads]       >= 0
    decay          float32 [num_heads]                   <= 0
    state          float32 [num_slots, num_heads, head_dim, size], modified
    slots          int64 [num_seqs]
    cu_query_lens  int32 [num_seqs + 1]
    returns        float32 [num_tokens, num_heads, head_dim]
    """
    heads, out = x.shape[1], torch.empty(x.shape, device=x.device)
    b, c = (of_heads(part.float(), heads, tiled=False).unsqueeze(-2) for part in (b, c))
    scaled, factor = (x.float() * steps.unsqueeze(-1)).unsqueeze(-1), (steps * decay).exp()[..., None, None]

    def advanced(carried: Tensor, at: int | slice) -> Tensor:
        carried = (carried * factor[at]).add_(scaled[at] * b[at])
        out[at] = (carried * c[at]).sum(-1)
        return carried

    _walk(advanced, x.shape[0], state, slots, cu_query_lens)
    return out


def state_space_chunked(
    x: Tensor, b: Tensor, c: Tensor, steps: Tensor, decay: Tensor, state: Tensor, slots: Tensor, cu_query_lens: Tensor
) -> Tensor:
    """`state_space` as matrix products over chunks of CHUNK tokens: faster for prompts, with different rounding.

    Within a chunk y_t = exp(G_t) S_0 c_t + sum over i <= t of exp(G_t - G_i) (b_i·c_t) step_i x_i, where G is the
    cumulative sum of step · decay.
    """
    if x.shape[0] == slots.shape[0]:
        return state_space(x, b, c, steps, decay, state, slots, cu_query_lens)
    out, ratio = torch.empty(x.shape, device=x.device), x.shape[1] // b.shape[1]
    scaled = (x.float() * steps.unsqueeze(-1)).transpose(0, 1)  # [heads, num_tokens, dim]
    b, c = (part.float().transpose(0, 1) for part in (b, c))  # [groups, num_tokens, size]
    decays = (steps * decay).T
    for slot, rows in parts(slots, cu_query_lens):
        carried = state[slot]
        for start in range(rows.start, rows.stop, CHUNK):
            at = slice(start, min(start + CHUNK, rows.stop))
            summed = decays[:, at].cumsum(-1)
            lower = (summed.unsqueeze(-1) - summed.unsqueeze(-2)).tril_().exp_().tril_()
            shares = (c[:, at] @ b[:, at].mT).repeat_interleave(ratio, 0).mul_(lower)
            of_heads = [part[:, at].repeat_interleave(ratio, 0) for part in (b, c)]
            read = (of_heads[1] @ carried.mT).mul_(summed.exp().unsqueeze(-1))
            out[at] = read.baddbmm_(shares, scaled[:, at]).transpose(0, 1)
            rest = scaled[:, at] * (summed[:, -1:] - summed).exp().unsqueeze(-1)
            carried = torch.baddbmm(carried * summed[:, -1:, None].exp(), rest.mT, of_heads[0])
        state[slot] = carried
    return out

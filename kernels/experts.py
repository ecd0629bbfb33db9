"""Mixtures of experts in plain PyTorch: which experts a router chooses for a token, and the sum of what they give.

A token's result does not depend on the other tokens: its experts are summed in their own order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .layer_weights import ExpertsWeights
from .recurrent import sigmoid

SIGMOID_SLOPE = 1.702  # of swiglu_oai


def route(logits: Tensor, weights: ExpertsWeights) -> tuple[Tensor, Tensor]:
    """The experts of each token and what each counts; of equal ones the first.

    logits   float32 [num_tokens, num_experts]
    returns  int64 [num_tokens, top_k], float32 [num_tokens, top_k]
    """
    scores = logits
    if weights.router_kind == "softmax":
        scores = torch.softmax(logits, -1)
    elif weights.router_kind == "sigmoid":
        scores = sigmoid(logits)
    wanted = scores if weights.choice_bias is None else scores + weights.choice_bias
    if weights.groups > 1:
        wanted = _of_best_groups(wanted, weights)
    chosen = wanted.sort(dim=-1, descending=True, stable=True)[1][:, : weights.top_k]
    shares = scores.gather(1, chosen)
    if weights.router_kind == "softmax_topk":
        shares = torch.softmax(shares, -1)
    elif weights.renormalise:
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
    if weights.expert_scales is not None:
        shares = shares * weights.expert_scales[chosen]
    return chosen, shares if weights.scale == 1.0 else shares * weights.scale


def _of_best_groups(wanted: Tensor, weights: ExpertsWeights) -> Tensor:
    """-inf for experts outside of the best groups: by the best of each, or the sum of its best two (sigmoid)."""
    grouped = wanted.unflatten(-1, (weights.groups, -1))
    best = min(2 if weights.router_kind == "sigmoid" else 1, grouped.shape[-1])
    of_groups = grouped.topk(best, -1)[0].sum(-1)
    kept = of_groups.sort(dim=-1, descending=True, stable=True)[1][:, : weights.group_top_k]
    left_out = torch.ones_like(of_groups, dtype=torch.bool).scatter_(1, kept, False)
    return grouped.masked_fill(left_out.unsqueeze(-1), float("-inf")).flatten(1)


def swiglu_oai(gate_up: Tensor) -> Tensor:
    """gate · sigmoid(1.702 gate) · (up + 1): [num_tokens, 2 · intermediate], gate first, to its half."""
    gate, up = gate_up.float().chunk(2, -1)
    return (gate * sigmoid(SIGMOID_SLOPE * gate)).mul_(up + 1.0).to(gate_up.dtype)


def cut_off(gate_up: Tensor, limit: float) -> Tensor:
    """The gate half at most `limit`, the other between -limit and limit; in place."""
    gate, up = gate_up.chunk(2, -1)
    gate.clamp_(max=limit)
    up.clamp_(-limit, limit)
    return gate_up


def mixture(x: Tensor, asked: Tensor, weights: ExpertsWeights, activate: Callable[[Tensor], Tensor]) -> Tensor:
    """What the chosen experts give for normed rows: float32, x's shape.

    The host learns how many tokens each expert has: only weights of those with any are read.

    asked   the rows as the router sees them
    """
    chosen, shares = route(weights.router(asked).float(), weights)
    seen = x if weights.latent_in is None else weights.latent_in(x)
    total = torch.zeros(seen.shape, dtype=torch.float32, device=x.device)
    order = chosen.flatten().argsort(stable=True)  # places of `chosen` by expert, tokens ascending
    counts = torch.bincount(chosen.flatten(), minlength=len(weights.down)).tolist()
    rows, shares = order // weights.top_k, shares.flatten()[order].unsqueeze(-1)
    away = None if weights.host is None else weights.host.take(seen, rows, counts)
    start = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        end = start + count
        side = away if away is not None and expert in away else None
        if side is not None and not side.experts.streams(count):
            given = side.given(expert, start, end)
        else:
            gate_up, down = (weights.gate_up[expert], weights.down[expert]) if side is None else side.lent(expert)
            hidden = gate_up(seen[rows[start:end]])
            if weights.limit is not None:
                hidden = cut_off(hidden, weights.limit)
            given = down(activate(hidden)).float()
        total.index_add_(0, rows[start:end], given * shares[start:end])
        start = end
    return total if weights.latent_out is None else weights.latent_out(total.to(x.dtype)).float()


def shared(
    x: Tensor, weights: ExpertsWeights, activate: Callable[[Tensor], Tensor], total: Tensor | None = None
) -> Tensor:
    """What the expert gives that every token goes through, added to `total`: float32."""
    if weights.shared_gate_up is None or weights.shared_down is None:
        return torch.zeros(x.shape, device=x.device) if total is None else total
    given = weights.shared_down(activate(weights.shared_gate_up(x))).float()
    if weights.shared_gate is not None:
        given = given * sigmoid(weights.shared_gate(x))
    return given if total is None else total.add_(given)

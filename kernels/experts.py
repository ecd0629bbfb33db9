"""Mixture of experts in plain PyTorch: routing, and the weighted sum of the chosen experts' outputs.

Batch-invariant: a token's expert outputs are summed in ascending order of expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from .layer_weights import ExpertsWeights, Linear, LinearPart
from .recurrent import sigmoid, softplus
from .reference import relu2, silu_clamped

SIGMOID_SLOPE = 1.702  # alpha of swiglu_oai
FEW_PAIRS = 32  # up to this many (token, expert) pairs, a GPU multiplies each pair separately; not measured
TILES = (8, 16, 32, 64)  # tile sizes on a GPU: pairs of one expert that are multiplied together


def tile_size(num_pairs: int, num_experts: int) -> int:
    """Choose a size from TILES for this many pairs sorted by expert; 0 means one pair at a time."""
    if num_pairs <= FEW_PAIRS:
        return 0
    each = num_pairs / min(num_experts, num_pairs)
    return next((size for size in TILES if size >= each), TILES[-1])


def tokens_of_tiles(num_experts: int, top_k: int) -> tuple[int, ...]:
    """The smallest token count that selects each tile size, as each has its own kernels."""
    most = (FEW_PAIRS, *(max(FEW_PAIRS, size * num_experts) for size in TILES[:-1]))
    return tuple(sorted({pairs // top_k + 1 for pairs in most})) if top_k else ()


def route(logits: Tensor, weights: ExpertsWeights, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Select the experts of each token and their weights; ties go to the lower index.

    logits   float32 [num_tokens, num_experts]
    ids      int64 [num_tokens]: token ids, for `weights.table`
    returns  int64 [num_tokens, top_k], float32 [num_tokens, top_k]
    """
    scores = logits
    if weights.router_kind == "softmax":
        scores = torch.softmax(logits, -1)
    elif weights.router_kind == "sigmoid":
        scores = sigmoid(logits)
    elif weights.router_kind == "sqrt_softplus":
        scores = softplus(logits).sqrt_()
    wanted = scores if weights.choice_bias is None else scores + weights.choice_bias
    if weights.groups > 1:
        wanted = _of_best_groups(wanted, weights)
    if weights.table is None:
        chosen = wanted.sort(dim=-1, descending=True, stable=True)[1][:, : weights.top_k]
    else:
        assert ids is not None
        chosen = weights.table[ids]
    shares = scores.gather(1, chosen)
    if weights.router_kind == "softmax_topk":
        shares = torch.softmax(shares, -1)
    elif weights.router_kind == "sigmoid_topk":
        shares = sigmoid(shares)
    if weights.renormalise and weights.router_kind != "softmax_topk":
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
    if weights.expert_scales is not None:
        shares = shares * weights.expert_scales[chosen]
    return chosen, shares if weights.scale == 1.0 else shares * weights.scale


def _of_best_groups(wanted: Tensor, weights: ExpertsWeights) -> Tensor:
    """Set experts outside the best groups to -inf. A group's score is its best expert, or its best two (sigmoid)."""
    grouped = wanted.unflatten(-1, (weights.groups, -1))
    best = min(2 if weights.router_kind == "sigmoid" else 1, grouped.shape[-1])
    of_groups = grouped.topk(best, -1)[0].sum(-1)
    kept = of_groups.sort(dim=-1, descending=True, stable=True)[1][:, : weights.group_top_k]
    left_out = torch.ones_like(of_groups, dtype=torch.bool).scatter_(1, kept, False)
    return grouped.masked_fill(left_out.unsqueeze(-1), float("-inf")).flatten(1)


def swiglu_oai(gate_up: Tensor, limit: float | None = None) -> Tensor:
    """gate · sigmoid(1.702 gate) · (up + 1): [num_tokens, 2 · intermediate] (gate first) -> half the width.

    limit   clamps gate from above, and up on both sides, before that
    """
    gate, up = gate_up.float().chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * sigmoid(SIGMOID_SLOPE * gate)).mul_(up + 1.0).to(gate_up.dtype)


# activations besides the ops, by the names in `ExpertsWeights`
OTHER_ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "silu_clamped": silu_clamped,
    "swiglu_oai": swiglu_oai,
    "relu2": relu2,
}


def limited(activate: Callable[..., Tensor], limit: float | None) -> Callable[[Tensor], Tensor]:
    """`activate` with this limit."""
    return activate if limit is None else partial(activate, limit=limit)


def mixture(
    x: Tensor, router_input: Tensor, weights: ExpertsWeights, activate: Callable[..., Tensor], ids: Tensor | None = None
) -> Tensor:
    """Weighted sum of the chosen experts' outputs for normed rows x: float32, shape of x.

    Synchronizes with the host for the token count of each expert, so only experts with tokens are read.

    router_input   the router's input
    ids            as in `route`
    """
    chosen, shares = route(weights.router(router_input).float(), weights, ids)
    seen = x if weights.latent_in is None else weights.latent_in(x)
    total = torch.zeros(seen.shape, dtype=torch.float32, device=x.device)
    order = chosen.flatten().argsort(stable=True)  # entries of `chosen` by expert, tokens ascending
    counts = torch.bincount(chosen.flatten(), minlength=len(weights.down)).tolist()
    rows, shares = order // weights.top_k, shares.flatten()[order].unsqueeze(-1)
    places = rows  # rows of `seen` that the experts read
    if weights.share_inputs:
        seen, places = (seen[rows] * shares).to(seen.dtype), torch.arange(len(rows), device=x.device)
        shares = torch.ones_like(shares)
    activate = limited(activate, weights.limit)
    away = None if weights.host is None else weights.host.take(seen, places, counts)
    start = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        end = start + count
        side = away if away is not None and expert in away else None
        if side is not None and not side.experts.streams(count):
            output = side.given(expert, start, end)
        else:
            gate_up, down = (weights.gate_up[expert], weights.down[expert]) if side is None else side.lent(expert)
            output = down(activate(gate_up(seen[places[start:end]]))).float()
            del gate_up, down  # a streamed expert, before the next one is copied to the device
        total.index_add_(0, rows[start:end], output * shares[start:end])
        start = end
    return total if weights.latent_out is None else weights.latent_out(total.to(x.dtype)).float()


def shared(x: Tensor, weights: ExpertsWeights, activate: Callable[..., Tensor], total: Tensor | None = None) -> Tensor:
    """Output of the shared expert, which every token goes through, added to `total`: float32."""
    if weights.shared_gate_up is None or weights.shared_down is None:
        return torch.zeros(x.shape, device=x.device) if total is None else total
    output = weights.shared_down(limited(activate, weights.shared_limit)(weights.shared_gate_up(x))).float()
    if weights.shared_gate is not None:
        output = output * sigmoid(weights.shared_gate(x))
    output = output if weights.shared_scale == 1.0 else output * weights.shared_scale
    return output if total is None else total.add_(output)


class Stack:
    """Stacks the weights of a layer's experts in one contiguous tensor, if their layout allows it.

    Each expert is copied into place as it is loaded, so at most one is in memory twice.
    """

    def __init__(self, count: int) -> None:
        """count   number of experts; 0 disables stacking"""
        self._count = count
        self._linears: list[Linear] = []
        self._whole: dict[str, Tensor] = {}

    def add(self, linear: Linear) -> None:
        """Append the next expert's linear layer."""
        if self._count and not self._linears and _stacks(linear):
            self._whole = {
                name: part.new_empty((self._count * part.shape[0], *part.shape[1:]))
                for name, part in _tensors(linear).items()
            }
        parts = _tensors(linear) if self._whole and _stacks(linear) else {}
        if self._whole and not self._is_alike(linear, parts):  # layouts differ: give the stacked ones their own memory
            self._linears = [_with(one, {k: t.clone() for k, t in _tensors(one).items()}) for one in self._linears]
            self._whole = {}
        if self._whole:
            at = len(self._linears)
            places = {name: self._whole[name][at * len(part) : (at + 1) * len(part)] for name, part in parts.items()}
            for name, part in parts.items():
                places[name].copy_(part)
            linear = _with(linear, places)
        self._linears.append(linear)

    def _is_alike(self, linear: Linear, parts: Mapping[str, Tensor]) -> bool:
        if not self._linears:
            return True
        first, kinds = self._linears[0].parts[0], {k: (t.shape, t.dtype) for k, t in _tensors(self._linears[0]).items()}
        if {k: (t.shape, t.dtype) for k, t in parts.items()} != kinds or linear.parts[0].impl is not first.impl:
            return False
        others = zip(first.prepared, linear.parts[0].prepared, strict=True)
        return all(a == b for a, b in others if not isinstance(a, Tensor))

    def finished(self) -> tuple[tuple[Linear, ...], LinearPart | None]:
        """The linear layers, and all of them as one stacked part; None if they are not stacked."""
        if not self._whole:
            return tuple(self._linears), None
        part = self._linears[0].parts[0]
        shape = (self._count * part.shape[0], part.shape[1])
        whole = dict(self._whole)
        bias = whole.pop("bias", None)
        return tuple(self._linears), replace(
            part, prepared=part.prepared._replace(shape=shape, **whole), bias=bias, shape=shape
        )


def _stacks(linear: Linear) -> bool:
    return len(linear.parts) == 1 and linear.additions is None and getattr(linear.parts[0].prepared, "stacks", False)


def _tensors(linear: Linear) -> dict[str, Tensor]:
    """Tensors by name of a linear layer with one part."""
    part = linear.parts[0]
    found = {name: value for name, value in part.prepared._asdict().items() if isinstance(value, Tensor)}
    return found if part.bias is None else found | {"bias": part.bias}


def _with(linear: Linear, tensors: Mapping[str, Tensor]) -> Linear:
    """The same linear layer with other tensors."""
    (part,) = linear.parts
    prepared = part.prepared._replace(**{name: value for name, value in tensors.items() if name != "bias"})
    return replace(linear, parts=(replace(part, prepared=prepared, bias=tensors.get("bias")),))

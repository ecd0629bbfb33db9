"""Mixture of experts without host synchronization: routing, products of the chosen experts, and their weighted sum.

Every kernel has a fixed grid regardless of routing, so a CUDA graph can capture the step. The weights of a layer's
experts are one `Prepared`, stacked by expert; kernels compute row offsets from expert indices read on the device. A
pair is a (token, expert) combination. A few pairs are multiplied separately (`gemv`), each reading its expert's
weights. More pairs are sorted by expert and padded to whole tiles (`gemm`), so each expert is read once for all its
tokens. As in the reference, a pair's result is rounded to the dtype of x, and a token's results are summed in the order
of its experts. In a decode step the sum kernel also adds the residual and the shared expert, and the conversion of a
single row to fixed point includes its norm. Time per layer of Qwen3 30B-A3B: 55 us with 17 launches on an H100 (11 us
at full memory bandwidth), 40 us with 14 launches on an H200 (8 us at full bandwidth).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..experts import route, tile_size
from ..layer_weights import FUSED_EXPERTS, FUSED_HYPER, ExpertsWeights, LinearPart, Norm, has_only
from .launch import card_of, launch, power_of_2, wait_for_previous
from .product import Extras, Pairs, Tiles, expert_product, product
from .product_tiles import SMALL_TOKENS, is_fixed
from .rms_norm import add_normed, normed
from .segments import FUSED, centred, only_part

BLOCK = 1024
_GATES = ("silu", "silu_clamped", "gelu_tanh", "swiglu_oai")
_STEP_FIELDS = FUSED_EXPERTS | FUSED_HYPER | {"expert_scales", "stacked", "table"}


def experts(composed: Callable[..., Tensor], x: Tensor, weights: ExpertsWeights, ids: Tensor | None = None) -> Tensor:
    """x + post_norm(mixture of experts of norm(x)): [num_tokens, hidden], in place; `ids` as in `experts.route`."""
    if weights.stacked is None or weights.host is not None or not _supports_tiles(x, *weights.stacked):
        return composed(x, weights, ids=ids)
    if any(one.additions is not None for each in (weights.gate_up, weights.down) for one in each):
        return composed(x, weights, ids=ids)
    if x.shape[0] <= SMALL_TOKENS and x.is_contiguous() and weights.post_norm is None and _is_for_steps(x, weights):
        return _step(x, weights, ids)
    plain = weights.shared_gate is None and weights.shared_scale == 1.0
    feed = _normed_shared if weights.apart is not None and plain and _gates_fuse(x, weights) else None
    return composed(x, weights, mix=mixture, ids=ids, add=add_normed, feed=feed)


def _is_for_steps(x: Tensor, weights: ExpertsWeights) -> bool:
    """Whether `_step` supports all features of this layer."""
    if weights.shared_gate_up is not None and not _gates_fuse(x, weights):
        return False
    return weights.activation in _GATES and has_only(weights, _STEP_FIELDS, "norm")


def _step(x: Tensor, weights: ExpertsWeights, ids: Tensor | None = None) -> Tensor:
    """`experts` for few rows: norm, routing, products, and one sum that includes the residual and the shared expert.

    With hyper-connections there is no residual.
    """
    assert weights.stacked is not None
    many, router = weights.stacked[0].prepared, only_part(weights.router, x)
    # with one row the norm can be fused into the router's GEMV and into the fixed-point conversion of x
    one_by_one = x.shape[0] == 1 and not tile_size(weights.top_k, len(weights.down))
    folds = one_by_one and not weights.share_inputs and is_fixed(many.code, many.run, card_of(x.device))
    folds = folds and router is not None and weights.shared_gate_up is None
    norm = weights.norm if folds and weights.norm is not None and weights.norm.bias is None else None
    seen = x if norm is not None else normed(x, weights.norm)
    logits = weights.router(seen) if router is None else product(seen, router.prepared, Extras(router.bias, norm))
    chosen, shares = routed(logits, weights, ids)
    taken, shares = _weighted_inputs(seen, shares, weights)
    residual = x if weights.hyper is None else None
    outputs = _expert_outputs(taken, chosen, weights, norm=norm)
    summed(outputs, shares, x, residual, *_shared(seen, weights), weights.shared_scale)
    return x


def _gates_fuse(x: Tensor, weights: ExpertsWeights) -> bool:
    """Whether the activation of the shared expert can be part of its first product."""
    up = weights.shared_gate_up
    known = weights.activation in _GATES and weights.activation != "swiglu_oai"
    return known and up is not None and only_part(up, x) is not None


def _normed_shared(x: Tensor, weights: ExpertsWeights, norm: Norm) -> Tensor:
    """Output of a shared expert without a gate, whose own input norm is part of its first product."""
    output, _ = _shared(x, weights, norm)
    assert output is not None
    return output


def _shared(x: Tensor, weights: ExpertsWeights, norm: Norm | None = None) -> tuple[Tensor | None, Tensor | None]:
    """Output of the shared expert of norm(x) and the logit of its gate, in the dtype of x; None if absent."""
    if weights.shared_gate_up is None or weights.shared_down is None:
        return None, None
    part = only_part(weights.shared_gate_up, x)
    assert part is not None
    seen, inside = centred(x, norm)
    limit = weights.shared_limit or 0.0
    hidden = product(seen, part.prepared, Extras(part.bias, inside, gate=weights.activation, limit=limit))
    return weights.shared_down(hidden), None if weights.shared_gate is None else weights.shared_gate(x)


def _supports_tiles(x: Tensor, *parts: LinearPart) -> bool:
    """Whether this GPU and these weights also support the tiled products of many pairs."""
    return all(part.impl.name in FUSED for part in parts) and card_of(x.device).capability >= 80


def mixture(
    x: Tensor,
    router_input: Tensor,
    weights: ExpertsWeights,
    activate: Callable[[Tensor], Tensor],
    ids: Tensor | None = None,
) -> Tensor:
    """`experts.mixture` for `stacked` weights: float32 [num_tokens, hidden]."""
    chosen, shares = routed(weights.router(router_input), weights, ids)
    seen = x if weights.latent_in is None else weights.latent_in(x)
    total = torch.empty(seen.shape, dtype=torch.float32, device=x.device)
    taken, shares = _weighted_inputs(seen, shares, weights)
    summed(_expert_outputs(taken, chosen, weights, activate), shares, total)
    return total if weights.latent_out is None else weights.latent_out(total.to(x.dtype)).float()


def _weighted_inputs(x: Tensor, shares: Tensor, weights: ExpertsWeights) -> tuple[Tensor, Tensor]:
    """Inputs of the experts and weights of their sum; with `share_inputs` a weighted row per pair and weights of 1."""
    if not weights.share_inputs:
        return x, shares
    return (x.unsqueeze(1) * shares.unsqueeze(-1)).to(x.dtype).flatten(0, 1), torch.ones_like(shares)


def _expert_outputs(
    x: Tensor,
    chosen: Tensor,
    weights: ExpertsWeights,
    activate: Callable[[Tensor], Tensor] | None = None,
    norm: Norm | None = None,
) -> Tensor:
    """Expert output of each pair: [num_tokens * top_k, hidden], dtype of x. x has one row per token or per pair.

    activate   used if the activation cannot be fused into the product
    norm       of x; only for a single row converted to fixed point
    """
    assert weights.stacked is not None
    gate_up, down = weights.stacked
    count = len(weights.down)
    size = tile_size(chosen.numel(), count)
    pairs = Pairs(chosen, count, sorted_by_expert(chosen, count, size) if size else None)
    gate = weights.activation if weights.activation in _GATES else ""
    first = Extras(gate_up.bias, norm, gate=gate, limit=weights.limit or 0.0)
    hidden = expert_product(x, gate_up.prepared, first, pairs)
    if activate is not None and not gate:
        hidden = activate(hidden)
    return expert_product(hidden, down.prepared, Extras(down.bias), pairs)


@triton.jit(do_not_specialize=["num_pairs", "num_experts"])
def _count_kernel(
    chosen_ptr, count_ptr, rank_ptr, num_pairs, num_experts, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Count the pairs of each expert, and give each pair a rank within its expert; `count_ptr` must be zeroed."""
    wait_for_previous(PDL)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = pair < num_pairs
    expert = tl.minimum(tl.maximum(tl.load(chosen_ptr + pair, mask=ok, other=0), 0), num_experts - 1)
    rank = tl.atomic_add(count_ptr + expert, 1, mask=ok, sem="relaxed")
    tl.store(rank_ptr + pair, rank, mask=ok)


@triton.jit(do_not_specialize=["num_experts"])
def _start_kernel(
    count_ptr, end_ptr, num_experts, SIZE: tl.constexpr, EXPERTS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Compute where the tiles of each expert end; one program."""
    wait_for_previous(PDL)
    e = tl.arange(0, EXPERTS)
    count = tl.load(count_ptr + e, mask=e < num_experts, other=0)
    tl.store(end_ptr + e, tl.cumsum((count + SIZE - 1) // SIZE * SIZE, 0), mask=e < num_experts)


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "num_tiles"])
def _place_kernel(
    chosen_ptr, count_ptr, end_ptr, rank_ptr, place_ptr, expert_ptr, num_pairs, num_experts, num_tiles,
    SIZE: tl.constexpr, EXPERTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Assign experts to tiles and pairs to places.

    The first num_tiles programs each find the expert of a tile and mark its unused places; every other program puts
    SIZE pairs in their places.
    """
    wait_for_previous(PDL)
    tile = tl.program_id(0)
    lane = tl.arange(0, SIZE)
    if tile < num_tiles:
        e = tl.arange(0, EXPERTS)
        ends = tl.load(end_ptr + e, mask=e < num_experts, other=2147483647)
        expert = tl.sum(tl.where(ends <= tile * SIZE, 1, 0), 0)
        found = expert < num_experts
        known = tl.minimum(expert, num_experts - 1)
        count = tl.load(count_ptr + known)
        start = tl.load(end_ptr + known) - (count + SIZE - 1) // SIZE * SIZE
        place = tile * SIZE + lane
        tl.store(place_ptr + place, lane * 0 - 1, mask=place - start >= tl.where(found, count, 0))
        tl.store(expert_ptr + tile, tl.where(found, expert, -1))
    else:
        pair = (tile - num_tiles) * SIZE + lane
        ok = pair < num_pairs
        mine = tl.minimum(tl.maximum(tl.load(chosen_ptr + pair, mask=ok, other=0), 0), num_experts - 1)
        counts = tl.load(count_ptr + mine, mask=ok, other=0)
        starts = tl.load(end_ptr + mine, mask=ok, other=0) - (counts + SIZE - 1) // SIZE * SIZE
        tl.store(place_ptr + starts + tl.load(rank_ptr + pair, mask=ok, other=0), pair, mask=ok)


def sorted_by_expert(chosen: Tensor, num_experts: int, size: int) -> Tiles:
    """Group pairs into tiles of `size` with one expert each, on the device; allocates tiles for the worst case.

    A pair's place within its expert's tiles varies between runs, but rows of a tile do not affect each other.

    chosen   int32 [num_tokens, top_k]
    """
    chosen, count = chosen.contiguous(), chosen.numel()
    most = count // size + min(num_experts, count)
    counts = torch.zeros(num_experts, dtype=torch.int32, device=chosen.device)
    ends, ranks = torch.empty_like(counts), torch.empty_like(chosen)
    places = torch.empty(most * size, dtype=torch.int32, device=chosen.device)
    experts = torch.empty(most, dtype=torch.int32, device=chosen.device)
    sizes: dict[str, Any] = {"SIZE": size, "EXPERTS": power_of_2(num_experts)}
    launch(_count_kernel, (-(-count // BLOCK),), chosen, counts, ranks, count, num_experts, BLOCK=BLOCK)
    launch(_start_kernel, (1,), counts, ends, num_experts, **sizes)
    given = chosen, counts, ends, ranks, places, experts
    launch(_place_kernel, (most - (-count // size),), *given, count, num_experts, most, **sizes, num_warps=1)
    return Tiles(size, places, experts)


@triton.jit(do_not_specialize=["num_experts"])
def _route_kernel(
    logits_ptr, bias_ptr, scale_ptr, chosen_ptr, share_ptr, num_experts, factor,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
    SCALES: tl.constexpr, NORMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Select the experts of one token and their weights; ties go to the lower index."""
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS)
    ok = e < num_experts
    logits = tl.load(logits_ptr + token * num_experts + e, mask=ok, other=float("-inf")).to(tl.float32)
    broken = tl.max(tl.where(logits != logits, 1, 0), 0) > 0
    scores = logits
    if KIND == "softmax":
        scores = tl.exp(logits - tl.max(logits, 0))
        scores = scores / tl.sum(scores, 0)
    elif KIND == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(tl.minimum(-logits, 88.0)))
    elif KIND == "sqrt_softplus":
        scores = tl.sqrt(tl.maximum(logits, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(logits))))
    wanted = scores
    if BIAS:
        wanted += tl.load(bias_ptr + e, mask=ok, other=0.0)
    wanted = tl.where(ok & (wanted == wanted), wanted, float("-inf"))
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros((SLOTS,), tl.int32)
    shares = tl.zeros((SLOTS,), tl.float32)
    for i in tl.static_range(TOP_K):
        best = tl.minimum(tl.argmax(wanted, 0), num_experts - 1)
        chosen = tl.where(slot == i, best, chosen)
        shares = tl.where(slot == i, tl.sum(tl.where(e == best, scores, 0.0), 0), shares)
        wanted = tl.where(e == best, float("-inf"), wanted)
    there = slot < TOP_K
    if KIND == "softmax_topk":
        shares = tl.where(there, tl.exp(shares - tl.max(tl.where(there, shares, float("-inf")), 0)), 0.0)
        shares = shares / tl.sum(shares, 0)
    elif KIND == "sigmoid_topk":
        shares = tl.where(there, 1.0 / (1.0 + tl.exp(tl.minimum(-shares, 88.0))), 0.0)
    if NORMED:
        shares = shares / (tl.sum(shares, 0) + 1e-20)
    if SCALES:
        shares *= tl.load(scale_ptr + chosen, mask=there, other=0.0)
    shares = tl.where(broken, float("nan"), shares * factor)
    tl.store(chosen_ptr + token * TOP_K + slot, chosen, mask=there)
    tl.store(share_ptr + token * TOP_K + slot, shares, mask=there)


def routed(logits: Tensor, weights: ExpertsWeights, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`experts.route` with int32 expert indices: [num_tokens, top_k] both.

    logits   [num_tokens, num_experts]
    """
    if weights.groups > 1 or weights.table is not None:
        chosen, shares = route(logits.float(), weights, ids)
        return chosen.int(), shares
    tokens, count = logits.shape
    logits = logits.contiguous()
    chosen = torch.empty(tokens, weights.top_k, dtype=torch.int32, device=logits.device)
    shares = torch.empty(tokens, weights.top_k, dtype=torch.float32, device=logits.device)
    bias, scales = weights.choice_bias, weights.expert_scales
    launch(
        _route_kernel,
        (tokens,),
        *(logits, shares if bias is None else bias, shares if scales is None else scales, chosen, shares),
        *(count, float(weights.scale)),
        TOP_K=weights.top_k,
        SLOTS=power_of_2(weights.top_k),
        EXPERTS=power_of_2(count),
        KIND=weights.router_kind,
        BIAS=bias is not None,
        SCALES=scales is not None,
        NORMED=weights.renormalise and weights.router_kind != "softmax_topk",
        num_warps=1,
    )
    return chosen, shares


@triton.jit(do_not_specialize=["dim"])
def _sum_kernel(
    given_ptr, share_ptr, residual_ptr, more_ptr, gate_ptr, out_ptr, dim, factor,
    TOP_K: tl.constexpr, RESIDUAL: tl.constexpr, MORE: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Weighted sum of BLOCK elements of one token."""
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = d < dim
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TOP_K):
        pair = token * TOP_K + i
        total += tl.load(given_ptr + pair * dim + d, mask=ok, other=0.0).to(tl.float32) * tl.load(share_ptr + pair)
    if MORE:
        more = tl.load(more_ptr + token * dim + d, mask=ok, other=0.0).to(tl.float32)
        if SHARE:
            logit = tl.load(gate_ptr + token).to(tl.float32)
            more *= tl.where(logit == logit, 1.0 / (1.0 + tl.exp(tl.minimum(-logit, 88.0))), logit)
        total += more * factor
    if RESIDUAL:
        total += tl.load(residual_ptr + token * dim + d, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * dim + d, total.to(out_ptr.dtype.element_ty), mask=ok)


def summed(
    given: Tensor,
    shares: Tensor,
    out: Tensor,
    residual: Tensor | None = None,
    more: Tensor | None = None,
    gate: Tensor | None = None,
    factor: float = 1.0,
) -> None:
    """Sum each token's expert outputs, given [num_tokens * top_k, hidden], by `shares` into `out` [num_tokens, hidden].

    shares     float32 [num_tokens, top_k]
    residual   added; may be `out`
    more       [num_tokens, hidden], added; times `factor`, and sigmoid(gate) if there is a `gate` [num_tokens, 1]
    """
    tokens, top_k = shares.shape
    parts = [given if part is None else part.contiguous() for part in (residual, more, gate)]
    launch(
        _sum_kernel,
        (tokens, -(-out.shape[1] // BLOCK)),
        *(given, shares, *parts, out, out.shape[1], factor),
        TOP_K=top_k,
        RESIDUAL=residual is not None,
        MORE=more is not None,
        SHARE=gate is not None,
        BLOCK=BLOCK,
    )

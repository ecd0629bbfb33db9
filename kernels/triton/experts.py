"""Mixtures of experts without a word from the host: routing, products of the chosen experts, and their sum.

Every kernel has a fixed grid whatever the router chooses, so a CUDA graph can hold the step. The weights of a layer's
experts are one `Prepared`, expert after expert; a kernel finds its rows by the expert's number, which it reads on the
card. A pair is a token with one of its experts. Few pairs are multiplied one by one (`gemv`), each reading its
expert's weights. More are sorted by expert and padded to whole tiles (`gemm`), so that an expert is read once for all
its tokens. A pair's result is rounded to x's type, as the reference has it, and a token's are summed in the order of
its experts. A decoding step's sum takes the residual and the shared expert with it, and one row is normed where it is
prepared for its products: with 17 launches a layer of Qwen3 30B-A3B took an H100 55 us, its bytes alone 11; with 14 it
takes an H200 40, its bytes 8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..experts import cut_off, route, tile_size
from ..layer_weights import FUSED_EXPERTS, ExpertsWeights, LinearPart, Norm, has_only
from .launch import card_of, launch, power_of_2, wait_for_previous
from .product import Extras, Pairs, Tiles, expert_product, product
from .product_tiles import SMALL_TOKENS, is_fixed
from .rms_norm import rms_norm
from .segments import FUSED, only_part

BLOCK = 1024
_GATES = ("silu", "gelu_tanh", "swiglu_oai")
_OF_A_STEP = FUSED_EXPERTS | {"expert_scales", "stacked"}


def experts(composed: Callable[..., Tensor], x: Tensor, weights: ExpertsWeights) -> Tensor:
    """x + post_norm(sum of the chosen experts of the normed x): [num_tokens, hidden], in the place of x."""
    if weights.stacked is None or weights.host is not None or not _known(x, *weights.stacked):
        return composed(x, weights)
    if any(one.additions is not None for each in (weights.gate_up, weights.down) for one in each):
        return composed(x, weights)
    if x.shape[0] <= SMALL_TOKENS and x.is_contiguous() and weights.post_norm is None and _is_for_steps(x, weights):
        return _step(x, weights)
    return composed(x, weights, mix=mixture)


def _is_for_steps(x: Tensor, weights: ExpertsWeights) -> bool:
    """Whether `_step` knows all that there is."""
    up, down = weights.shared_gate_up, weights.shared_down
    if up is not None and down is not None and (weights.activation == "swiglu_oai" or not only_part(up, x)):
        return False
    return weights.activation in _GATES and has_only(weights, _OF_A_STEP)


def _step(x: Tensor, weights: ExpertsWeights) -> Tensor:
    """As `experts`, for few rows: norm, routing, products, and one sum with the residual and the shared expert."""
    assert weights.stacked is not None
    many, router = weights.stacked[0].prepared, only_part(weights.router, x)
    # one row whose products take the norm with them: each of few programs, or what prepares x for all of them
    one_by_one = x.shape[0] == 1 and not tile_size(weights.top_k, len(weights.down))
    folds = one_by_one and not weights.share_inputs and is_fixed(many.code, many.run, card_of(x.device))
    norm = weights.norm if folds and router is not None and weights.shared_gate_up is None else None
    seen = x if norm is not None or weights.norm is None else rms_norm(x, weights.norm.weight, weights.norm.eps)
    logits = weights.router(seen) if router is None else product(seen, router.prepared, Extras(router.bias, norm))
    chosen, shares = routed(logits, weights)
    taken, shares = _weighed(seen, shares, weights)
    summed(_given(taken, chosen, weights, norm=norm), shares, x, x, *_shared(seen, weights))
    return x


def _shared(x: Tensor, weights: ExpertsWeights) -> tuple[Tensor | None, Tensor | None]:
    """What the expert gives that every token goes through, and the logit of its share: dtype of x, None without."""
    if weights.shared_gate_up is None or weights.shared_down is None:
        return None, None
    part = only_part(weights.shared_gate_up, x)
    assert part is not None
    hidden = product(x, part.prepared, Extras(part.bias, gate=weights.activation))
    return weights.shared_down(hidden), None if weights.shared_gate is None else weights.shared_gate(x)


def _known(x: Tensor, *parts: LinearPart) -> bool:
    """Whether products of many pairs run here, too."""
    return all(part.impl.name in FUSED for part in parts) and card_of(x.device).capability >= 80


def mixture(x: Tensor, asked: Tensor, weights: ExpertsWeights, activate: Callable[[Tensor], Tensor]) -> Tensor:
    """As `experts.mixture`, for weights that are `stacked`: float32 [num_tokens, hidden]."""
    chosen, shares = routed(weights.router(asked), weights)
    seen = x if weights.latent_in is None else weights.latent_in(x)
    total = torch.empty(seen.shape, dtype=torch.float32, device=x.device)
    taken, shares = _weighed(seen, shares, weights)
    summed(_given(taken, chosen, weights, activate), shares, total)
    return total if weights.latent_out is None else weights.latent_out(total.to(x.dtype)).float()


def _weighed(x: Tensor, shares: Tensor, weights: ExpertsWeights) -> tuple[Tensor, Tensor]:
    """What experts take, and what counts in their sum: where shares are of inputs a row of each pair, and all alike."""
    if not weights.share_inputs:
        return x, shares
    return (x.unsqueeze(1) * shares.unsqueeze(-1)).to(x.dtype).flatten(0, 1), torch.ones_like(shares)


def _given(
    x: Tensor,
    chosen: Tensor,
    weights: ExpertsWeights,
    activate: Callable[[Tensor], Tensor] | None = None,
    norm: Norm | None = None,
) -> Tensor:
    """What each pair's expert gives: [num_tokens * top_k, hidden], dtype of x, of which tokens have a row, or pairs.

    activate   where no product takes the activation with it
    norm       of x, where it is one row that is prepared for the products
    """
    assert weights.stacked is not None
    gate_up, down = weights.stacked
    count = len(weights.down)
    size = tile_size(chosen.numel(), count)
    pairs = Pairs(chosen, count, sorted_by_expert(chosen, count, size) if size else None)
    gate = weights.activation if weights.activation in _GATES else ""
    first = Extras(gate_up.bias, norm, gate=gate)
    hidden = expert_product(x, gate_up.prepared, first, pairs, weights.limit or 0.0)
    if activate is not None and not gate:
        hidden = activate(hidden if weights.limit is None else cut_off(hidden, weights.limit))
    return expert_product(hidden, down.prepared, Extras(down.bias), pairs)


@triton.jit(do_not_specialize=["num_pairs", "num_experts"])
def _count_kernel(
    chosen_ptr, count_ptr, rank_ptr, num_pairs, num_experts, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """How many pairs each expert has, and how many of them came before each; `count_ptr` is zeros before."""
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
    """One program: where the tiles of each expert end."""
    wait_for_previous(PDL)
    e = tl.arange(0, EXPERTS)
    count = tl.load(count_ptr + e, mask=e < num_experts, other=0)
    tl.store(end_ptr + e, tl.cumsum((count + SIZE - 1) // SIZE * SIZE, 0), mask=e < num_experts)


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "num_tiles"])
def _place_kernel(
    chosen_ptr, count_ptr, end_ptr, rank_ptr, place_ptr, expert_ptr, num_pairs, num_experts, num_tiles,
    SIZE: tl.constexpr, EXPERTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program of each tile finds its expert, and marks places that no pair has; SIZE pairs of each other program go
    to their places.
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
    """Pairs in tiles of `size` of one expert, on the device alone: as many tiles as any choice could need.

    Where in the tiles of its expert a pair lies is by chance: each is multiplied by itself there.

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
    """One program: the experts of a token and what each counts; of equal ones the first."""
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
        shares = 1.0 / (1.0 + tl.exp(tl.minimum(-shares, 88.0)))
    elif NORMED:
        shares = shares / (tl.sum(shares, 0) + 1e-20)
    if SCALES:
        shares *= tl.load(scale_ptr + chosen, mask=there, other=0.0)
    shares = tl.where(broken, float("nan"), shares * factor)
    tl.store(chosen_ptr + token * TOP_K + slot, chosen, mask=there)
    tl.store(share_ptr + token * TOP_K + slot, shares, mask=there)


def routed(logits: Tensor, weights: ExpertsWeights) -> tuple[Tensor, Tensor]:
    """As `experts.route`, the experts as int32: [num_tokens, top_k] both.

    logits   [num_tokens, num_experts]
    """
    if weights.groups > 1:
        chosen, shares = route(logits.float(), weights)
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
        NORMED=weights.renormalise,
        num_warps=1,
    )
    return chosen, shares


@triton.jit(do_not_specialize=["dim"])
def _sum_kernel(
    given_ptr, share_ptr, residual_ptr, more_ptr, gate_ptr, out_ptr, dim,
    TOP_K: tl.constexpr, RESIDUAL: tl.constexpr, MORE: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK numbers of a token."""
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
        total += more
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
) -> None:
    """Each token's results, weighed, into `out` [num_tokens, hidden]; given [num_tokens * top_k, hidden].

    shares     float32 [num_tokens, top_k]
    residual   added; may be `out`
    more       added, times the sigmoid of `gate` [num_tokens, 1] where there is one: [num_tokens, hidden]
    """
    tokens, top_k = shares.shape
    parts = [given if part is None else part.contiguous() for part in (residual, more, gate)]
    launch(
        _sum_kernel,
        (tokens, -(-out.shape[1] // BLOCK)),
        *(given, shares, *parts, out, out.shape[1]),
        TOP_K=top_k,
        RESIDUAL=residual is not None,
        MORE=more is not None,
        SHARE=gate is not None,
        BLOCK=BLOCK,
    )

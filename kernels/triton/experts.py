"""Mixture of experts without host synchronization: routing, products of the chosen experts, and their weighted sum.

Every kernel has a fixed grid regardless of routing, so a CUDA graph can capture the step. The weights of a layer's
experts are one `Prepared`, stacked by expert; kernels compute row offsets from expert indices read on the device. A
pair is a (token, expert) combination. A few pairs are multiplied separately (`gemv`), each reading its expert's
weights. More pairs are sorted by expert and padded to whole tiles (`gemm`), so each expert is read once for all its
tokens. As in the reference, a pair's result is rounded to the dtype of x, and a token's results are summed in the order
of its experts. A decode step takes three launches for one row: the last program of the router's product routes the
row, others beside it norm and convert it for the experts; gate and up convert their results; and the last expert to
finish some outputs of a token sums them, with the residual and the shared expert. Time per layer of Qwen3 30B-A3B: 55
us with 17 launches on an H100 (11 us at full memory bandwidth), 40 us with 14 on an H200 (8 us). With today's eight it
has not been measured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..experts import route, tile_size
from ..layer_weights import FUSED_EXPERTS, FUSED_HYPER, ExpertsWeights, LinearPart, Norm, has_only
from .digits import convert, empty_digits
from .gemv import gemv_kernel
from .launch import card_of, counters, has_ptx, is_last, launch, power_of_2, wait_for_previous
from .layout import CODES
from .product import (
    COUNTERS,
    After,
    Extras,
    Pairs,
    Tiles,
    chained,
    expert_product,
    expert_tile,
    launch_gemv,
    product,
)
from .product_tiles import SMALL_TOKENS, gemv_tiles, is_fixed
from .rms_norm import add_normed, normed
from .segments import FUSED, centred, of_normed, only_part, through

BLOCK = 1024
CONVERTED = 64  # chunks of x that a program beside the router's product converts
_GATES = ("silu", "silu_clamped", "gelu_tanh", "swiglu_oai")
_STEP_FIELDS = FUSED_EXPERTS | FUSED_HYPER | {"expert_scales", "stacked", "table"}


def experts(
    composed: Callable[..., Tensor],
    x: Tensor,
    weights: ExpertsWeights,
    ids: Tensor | None = None,
    *,
    apart: bool = False,
) -> Tensor:
    """x + post_norm(mixture of experts of norm(x)): [num_tokens, hidden], in place; `ids` as in `experts.route`.

    apart   routing, conversions and sums have kernels of their own, here and below
    """
    if weights.stacked is None or weights.host is not None or not _supports_tiles(x, *weights.stacked):
        return composed(x, weights, ids=ids)
    if any(one.additions is not None for each in (weights.gate_up, weights.down) for one in each):
        return composed(x, weights, ids=ids)
    if x.shape[0] <= SMALL_TOKENS and x.is_contiguous() and weights.post_norm is None and _is_for_steps(x, weights):
        return _step(x, weights, ids, apart)
    plain = weights.shared_gate is None and weights.shared_scale == 1.0
    normed_inside = weights.apart is not None and plain and _gates_fuse(x, weights)
    feed = partial(_normed_shared, apart=apart) if normed_inside else None
    return composed(x, weights, mix=partial(mixture, apart=apart), ids=ids, add=add_normed, feed=feed)


def _is_for_steps(x: Tensor, weights: ExpertsWeights) -> bool:
    """Whether `_step` supports all features of this layer."""
    if weights.shared_gate_up is not None and not _gates_fuse(x, weights):
        return False
    return weights.activation in _GATES and has_only(weights, _STEP_FIELDS, "norm")


def _step(x: Tensor, weights: ExpertsWeights, ids: Tensor | None, apart: bool) -> Tensor:
    """`experts` for few rows: norm, routing, products, and one sum that includes the residual and the shared expert.

    A single row is normed by the kernels that read it, and the last programs of the router's product also route it.
    With hyper-connections there is no residual.
    """
    assert weights.stacked is not None
    router, tiles = only_part(weights.router, x), tile_size(weights.top_k, len(weights.down))
    single = router is not None and x.shape[0] == 1 and not weights.share_inputs and not tiles
    seen, norm = centred(x, weights.norm) if single else (normed(x, weights.norm), None)
    given = None
    if single and not apart and (made := _routed_by_product(seen, norm, weights)) is not None:
        chosen, shares, given = made
    else:
        logits = weights.router(seen) if router is None else product(seen, router.prepared, Extras(router.bias, norm))
        chosen, shares = routed(logits, weights, ids)
    more, gate = _shared(seen, weights, norm, given, apart=apart)
    taken, shares = _weighted_inputs(seen, shares, weights)
    residual = x if weights.hyper is None else None
    sums = Sums(shares, x, residual, more, gate, weights.shared_scale)
    _expert_outputs(taken, chosen, weights, sums, norm=norm, given=given, apart=apart)
    return x


def _gates_fuse(x: Tensor, weights: ExpertsWeights) -> bool:
    """Whether the activation of the shared expert can be part of its first product."""
    up = weights.shared_gate_up
    known = weights.activation in _GATES and weights.activation != "swiglu_oai"
    return known and up is not None and only_part(up, x) is not None


def _normed_shared(x: Tensor, weights: ExpertsWeights, norm: Norm, *, apart: bool) -> Tensor:
    """Output of a shared expert without a gate, whose own input norm is part of its first product."""
    output, _ = _shared(x, weights, norm, apart=apart)
    assert output is not None
    return output


def _shared(
    x: Tensor, weights: ExpertsWeights, norm: Norm | None = None, given: Tensor | None = None, *, apart: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Output of the shared expert of norm(x) and the logit of its gate, in the dtype of x; None if absent.

    given   norm(x) in fixed point, for the codes of the routed experts
    """
    if weights.shared_gate_up is None or weights.shared_down is None:
        return None, None
    part = only_part(weights.shared_gate_up, x)
    assert part is not None
    seen, inside = centred(x, norm)
    first = Extras(part.bias, inside, gate=weights.activation, limit=weights.shared_limit or 0.0)
    if given is not None and weights.stacked is not None:
        other = weights.stacked[0].prepared
        given = given if (part.prepared.code, part.prepared.run) == (other.code, other.run) else None
    gate = None if weights.shared_gate is None else of_normed(x, norm, weights.shared_gate)[0]
    return through(seen, part, first, weights.shared_down, given=given, apart=apart), gate


def _supports_tiles(x: Tensor, *parts: LinearPart) -> bool:
    """Whether this GPU and these weights also support the tiled products of many pairs."""
    return all(part.impl.name in FUSED for part in parts) and card_of(x.device).capability >= 80


def mixture(
    x: Tensor,
    router_input: Tensor,
    weights: ExpertsWeights,
    activate: Callable[[Tensor], Tensor],
    ids: Tensor | None = None,
    *,
    apart: bool = False,
) -> Tensor:
    """`experts.mixture` for `stacked` weights: float32 [num_tokens, hidden]."""
    chosen, shares = routed(weights.router(router_input), weights, ids)
    seen = x if weights.latent_in is None else weights.latent_in(x)
    total = torch.empty(seen.shape, dtype=torch.float32, device=x.device)
    taken, shares = _weighted_inputs(seen, shares, weights)
    _expert_outputs(taken, chosen, weights, Sums(shares, total), activate, apart=apart)
    return total if weights.latent_out is None else weights.latent_out(total.to(x.dtype)).float()


def _weighted_inputs(x: Tensor, shares: Tensor, weights: ExpertsWeights) -> tuple[Tensor, Tensor]:
    """Inputs of the experts and weights of their sum; with `share_inputs` a weighted row per pair and weights of 1."""
    if not weights.share_inputs:
        return x, shares
    return (x.unsqueeze(1) * shares.unsqueeze(-1)).to(x.dtype).flatten(0, 1), torch.ones_like(shares)


class Sums(NamedTuple):
    """Arguments of the sum of each token's expert outputs: `out` = shares · outputs + residual + more."""

    shares: Tensor  # float32 [num_tokens, top_k]
    out: Tensor  # [num_tokens, hidden]
    residual: Tensor | None = None  # may be `out`
    more: Tensor | None = None  # [num_tokens, hidden]; times `factor`, and sigmoid(gate) if there is a `gate`
    gate: Tensor | None = None  # [num_tokens, 1]
    factor: float = 1.0


def _expert_outputs(
    x: Tensor,
    chosen: Tensor,
    weights: ExpertsWeights,
    sums: Sums,
    activate: Callable[[Tensor], Tensor] | None = None,
    norm: Norm | None = None,
    given: Tensor | None = None,
    *,
    apart: bool,
) -> None:
    """Sum the expert outputs of all pairs. x has one row per token or per pair.

    activate   used if the activation cannot be fused into the product
    norm       of x; only for a single row
    given      that row in fixed point, normalized, if a kernel before converted it
    """
    assert weights.stacked is not None
    gate_up, down = weights.stacked
    count = len(weights.down)
    size = tile_size(chosen.numel(), count)
    pairs = Pairs(chosen, count, sorted_by_expert(chosen, count, size) if size else None)
    gate = weights.activation if weights.activation in _GATES else ""
    first, then = Extras(gate_up.bias, norm, gate=gate, limit=weights.limit or 0.0), Extras(down.bias)
    if activate is not None and not gate:
        hidden = activate(expert_product(x, gate_up.prepared, first, pairs))
        summed(expert_product(hidden, down.prepared, then, pairs), sums)
        return
    after = None if size or apart else _summing(sums)
    both = x, gate_up.prepared, first, down.prepared, then
    outputs = chained(*both, pairs=pairs, given=given, after=after, apart=apart)
    if after is None:
        summed(outputs, sums)


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


@triton.jit
def _route(
    logits_ptr, bias_ptr, scale_ptr, chosen_ptr, share_ptr, token, num_experts, factor,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr, KIND: tl.constexpr, OFFSETS: tl.constexpr,
    SCALES: tl.constexpr, NORMED: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Select the experts of one token and their weights; ties go to the lower index."""
    e = tl.arange(0, EXPERTS)
    ok = e < num_experts
    logits = tl.load(logits_ptr + token * num_experts + e, mask=ok, other=float("-inf"), cache_modifier=CACHE)
    logits = logits.to(tl.float32)
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
    if OFFSETS:
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


@triton.jit(do_not_specialize=["num_experts"])
def _route_kernel(
    logits_ptr, bias_ptr, scale_ptr, chosen_ptr, share_ptr, num_experts, factor,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr, KIND: tl.constexpr, OFFSETS: tl.constexpr,
    SCALES: tl.constexpr, NORMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`_route` of token `program_id(0)`."""
    wait_for_previous(PDL)
    _route(
        logits_ptr, bias_ptr, scale_ptr, chosen_ptr, share_ptr, tl.program_id(0).to(tl.int64), num_experts, factor,
        TOP_K, SLOTS, EXPERTS, KIND, OFFSETS, SCALES, NORMED, "",
    )  # fmt: skip


@triton.jit
def _gemv_route_kernel(
    x_ptr, low_ptr, high_ptr, scale_ptr, min_ptr, super_ptr, super_min_ptr, row_scale_ptr, bias_ptr, norm_ptr,
    residual_ptr, expert_ptr, out_ptr, n, eps, choice_ptr, factor_ptr, chosen_ptr, share_ptr, counter_ptr, digits_ptr,
    factor,
    K: tl.constexpr, CODE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SCALE: tl.constexpr, MIN: tl.constexpr,
    ZERO: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, SCALE_ROWS: tl.constexpr, ROW_SCALE: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr, LIMIT: tl.constexpr,
    SHARE: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, TOKENS: tl.constexpr, FIXED: tl.constexpr,
    LATE: tl.constexpr, BLOCKS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr,
    KIND: tl.constexpr, OFFSETS: tl.constexpr, SCALES: tl.constexpr, NORMED: tl.constexpr, NEXT_CODE: tl.constexpr,
    NEXT_RUN: tl.constexpr, PADDED: tl.constexpr, AT_ONCE: tl.constexpr, ASSEMBLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`gemv_kernel` of a router and one token in BLOCKS programs, the last of which routes the token.

    Further programs convert AT_ONCE chunks of the same normalized row for the experts (NEXT_CODE, NEXT_RUN), if they
    read fixed point.
    """
    if tl.program_id(0) < BLOCKS:
        gemv_kernel(
            x_ptr, low_ptr, high_ptr, scale_ptr, min_ptr, super_ptr, super_min_ptr, row_scale_ptr, bias_ptr, norm_ptr,
            residual_ptr, expert_ptr, out_ptr, n, eps,
            K, CODE, LOW, HIGH, SCALE, MIN, ZERO, GROUP, RUN, SCALE_ROWS, ROW_SCALE, BIAS, NORM, RESIDUAL, GATE, LIMIT,
            SHARE, ROWS, CHUNKS, TOKENS, FIXED, LATE, PDL,
        )  # fmt: skip
        if is_last(counter_ptr, BLOCKS):
            _route(
                out_ptr, choice_ptr, factor_ptr, chosen_ptr, share_ptr, 0, n, factor,
                TOP_K, SLOTS, EXPERTS, KIND, OFFSETS, SCALES, NORMED, ".cg",
            )  # fmt: skip
    elif NEXT_CODE != "":
        wait_for_previous(PDL)
        chunk = (tl.program_id(0) - BLOCKS) * AT_ONCE + tl.arange(0, AT_ONCE)
        convert(x_ptr, norm_ptr, digits_ptr, chunk, eps, K, NEXT_CODE, NEXT_RUN, NORM, PADDED, AT_ONCE, "", ASSEMBLY)


def routed(logits: Tensor, weights: ExpertsWeights, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`experts.route` with int32 expert indices: [num_tokens, top_k] both.

    logits   [num_tokens, num_experts]
    """
    if weights.groups > 1 or weights.table is not None:
        chosen, shares = route(logits.float(), weights, ids)
        return chosen.int(), shares
    tokens, count = logits.shape
    logits = logits.contiguous()
    chosen, shares = _empty_routes(tokens, weights, logits.device)
    given = *_choice_factors(weights, shares), chosen, shares
    launch(_route_kernel, (tokens,), logits, *given, count, float(weights.scale), **_kinds(weights, count), num_warps=1)
    return chosen, shares


def _empty_routes(tokens: int, weights: ExpertsWeights, device: torch.device) -> tuple[Tensor, Tensor]:
    chosen = torch.empty(tokens, weights.top_k, dtype=torch.int32, device=device)
    return chosen, torch.empty(tokens, weights.top_k, dtype=torch.float32, device=device)


def _choice_factors(weights: ExpertsWeights, instead: Tensor) -> list[Tensor]:
    """What is added to each expert's score, and what multiplies its weight; `instead` if absent."""
    return [instead if one is None else one for one in (weights.choice_bias, weights.expert_scales)]


def _kinds(weights: ExpertsWeights, count: int) -> dict[str, Any]:
    """Constants of `_route`."""
    return {
        "TOP_K": weights.top_k,
        "SLOTS": power_of_2(weights.top_k),
        "EXPERTS": power_of_2(count),
        "KIND": weights.router_kind,
        "OFFSETS": weights.choice_bias is not None,
        "SCALES": weights.expert_scales is not None,
        "NORMED": weights.renormalise and weights.router_kind != "softmax_topk",
    }


def _routed_by_product(
    x: Tensor, norm: Norm | None, weights: ExpertsWeights
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """`routed`, and norm(x) in fixed point if the experts read that, for one row in one launch; None if it cannot."""
    router, many = only_part(weights.router, x), None if weights.stacked is None else weights.stacked[0].prepared
    assert router is not None and many is not None
    p, card, (count, k) = router.prepared, card_of(x.device), router.prepared.shape
    choice = gemv_tiles(count, k, p.code, card, False, is_fixed(p.code, p.run, card))[0]
    if weights.groups > 1 or weights.table is not None or "fixed" in choice:
        return None
    x = x.contiguous()
    chosen, shares = _empty_routes(1, weights, x.device)
    logits = torch.empty(1, count, dtype=x.dtype, device=x.device)
    reading = expert_tile(many, Extras(gate=weights.activation), Pairs(chosen, len(weights.down), None), card)
    digits = empty_digits(1, k, many.run, x.device) if "fixed" in reading else None
    kinds: dict[str, Any] = {"BLOCKS": -(-count // choice["rows"]), "PADDED": power_of_2(k), "AT_ONCE": CONVERTED}
    kinds |= {"NEXT_CODE": "" if digits is None else many.code, "NEXT_RUN": many.run, "ASSEMBLY": has_ptx(x.device)}
    kinds |= _kinds(weights, count)
    more = counters(x.device, COUNTERS), logits if digits is None else digits, float(weights.scale)
    arguments = *_choice_factors(weights, shares), chosen, shares, *more
    programs = 0 if digits is None else -(-k // (CODES[many.code].chunk * CONVERTED))
    after = After(_gemv_route_kernel, programs, arguments, kinds, weights.router_kind != "sqrt_softplus")
    launch_gemv(x, p, logits, Extras(router.bias, norm), choice, after=after)
    return chosen, shares, digits


@triton.jit
def _sum(
    given_ptr, share_ptr, residual_ptr, more_ptr, gate_ptr, total_ptr, token, d, dim, factor,
    TOP_K: tl.constexpr, ADDS: tl.constexpr, MORE: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
    CACHE: tl.constexpr,
):  # fmt: skip
    """Weighted sum of elements d, [BLOCK], of one token."""
    ok = d < dim
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TOP_K):
        pair = token * TOP_K + i
        one = tl.load(given_ptr + pair * dim + d, mask=ok, other=0.0, cache_modifier=CACHE).to(tl.float32)
        total += one * tl.load(share_ptr + pair)
    if MORE:
        more = tl.load(more_ptr + token * dim + d, mask=ok, other=0.0).to(tl.float32)
        if GATED:
            logit = tl.load(gate_ptr + token).to(tl.float32)
            more *= tl.where(logit == logit, 1.0 / (1.0 + tl.exp(tl.minimum(-logit, 88.0))), logit)
        total += more * factor
    if ADDS:
        total += tl.load(residual_ptr + token * dim + d, mask=ok, other=0.0).to(tl.float32)
    tl.store(total_ptr + token * dim + d, total.to(total_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["dim"])
def _sum_kernel(
    given_ptr, share_ptr, residual_ptr, more_ptr, gate_ptr, total_ptr, dim, factor,
    TOP_K: tl.constexpr, ADDS: tl.constexpr, MORE: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`_sum` of BLOCK elements of token `program_id(0)`."""
    wait_for_previous(PDL)
    token, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    _sum(
        given_ptr, share_ptr, residual_ptr, more_ptr, gate_ptr, total_ptr, token, d, dim, factor,
        TOP_K, ADDS, MORE, GATED, BLOCK, "",
    )  # fmt: skip


@triton.jit
def _gemv_sum_kernel(
    x_ptr, low_ptr, high_ptr, scale_ptr, min_ptr, super_ptr, super_min_ptr, row_scale_ptr, bias_ptr, norm_ptr,
    residual_ptr, expert_ptr, out_ptr, n, eps, share_ptr, onto_ptr, more_ptr, gate_ptr, total_ptr, counter_ptr, factor,
    K: tl.constexpr, CODE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SCALE: tl.constexpr, MIN: tl.constexpr,
    ZERO: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, SCALE_ROWS: tl.constexpr, ROW_SCALE: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr, LIMIT: tl.constexpr,
    SHARE: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, TOKENS: tl.constexpr, FIXED: tl.constexpr,
    LATE: tl.constexpr, TOP_K: tl.constexpr, ADDS: tl.constexpr, MORE: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`gemv_kernel` of pairs; the last program of a token to finish ROWS outputs also sums them."""
    gemv_kernel(
        x_ptr, low_ptr, high_ptr, scale_ptr, min_ptr, super_ptr, super_min_ptr, row_scale_ptr, bias_ptr, norm_ptr,
        residual_ptr, expert_ptr, out_ptr, n, eps,
        K, CODE, LOW, HIGH, SCALE, MIN, ZERO, GROUP, RUN, SCALE_ROWS, ROW_SCALE, BIAS, NORM, RESIDUAL, GATE, LIMIT,
        SHARE, ROWS, CHUNKS, TOKENS, FIXED, LATE, PDL,
    )  # fmt: skip
    token = tl.program_id(1) // TOP_K
    if is_last(counter_ptr + token * tl.num_programs(0) + tl.program_id(0), TOP_K):
        _sum(
            out_ptr, share_ptr, onto_ptr, more_ptr, gate_ptr, total_ptr, token.to(tl.int64),
            tl.program_id(0) * ROWS + tl.arange(0, ROWS), n, factor, TOP_K, ADDS, MORE, GATED, ROWS, ".cg",
        )  # fmt: skip


def summed(given: Tensor, sums: Sums) -> None:
    """Sum each token's expert outputs, given [num_tokens * top_k, hidden]."""
    (tokens, _), dim = sums.shares.shape, sums.out.shape[1]
    arguments, kinds = _sum_arguments(sums)
    launch(_sum_kernel, (tokens, -(-dim // BLOCK)), given, *arguments, dim, sums.factor, BLOCK=BLOCK, **kinds)


def _summing(sums: Sums) -> After | None:
    """The product whose last programs sum; None if there are not enough counters."""
    arguments, kinds = _sum_arguments(sums)
    if sums.out.numel() > COUNTERS:
        return None
    counter = counters(sums.out.device, COUNTERS)
    return After(_gemv_sum_kernel, 0, (*arguments, counter, sums.factor), kinds)


def _sum_arguments(sums: Sums) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    parts = [sums.out if part is None else part.contiguous() for part in (sums.residual, sums.more, sums.gate)]
    more = {"ADDS": sums.residual is not None, "MORE": sums.more is not None, "GATED": sums.gate is not None}
    return (sums.shares, *parts, sums.out), {"TOP_K": sums.shares.shape[1]} | more

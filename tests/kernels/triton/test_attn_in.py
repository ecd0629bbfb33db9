"""The fused first segment of a layer against the composed one: one row, several, QK-norm and gates; gated attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from localllm.kernels import Weight, mixers, reference
from localllm.kernels.kv_pages import KVPages
from localllm.kernels.layer_weights import AttentionWeights, Linear, LinearPart, Norm
from localllm.kernels.segments import REFERENCES
from localllm.kernels.table import implementations
from localllm.kernels.triton import heads
from localllm.kernels.triton import product as products
from localllm.kernels.triton.attention import paged_attention
from localllm.kernels.triton.launch import counters
from localllm.kernels.triton.segments import attention, attn_in, attn_out
from localllm.kernels.verify.cases import copied, numbers

HEADS, KV_HEADS, DIM, HIDDEN = 3, 1, 64, 96


def weights_of(
    norm: bool, bias: bool, parts: int, device: torch.device, gate: str = "", values: int = DIM
) -> AttentionWeights:
    """A layer whose QKV weight lies in one part or in three."""
    queries = HEADS * DIM + {"": 0, "heads": HEADS, "queries": HEADS * DIM}[gate]
    rows = [queries, KV_HEADS * DIM, KV_HEADS * values]
    rows = [sum(rows)] if parts == 1 else rows
    impl = next(impl for impl in implementations("linear") if impl.name == "triton")
    made = []
    for n in rows:
        dense = (torch.randn(n, HIDDEN) / 8).half().to(device)
        given = torch.randn(n).to(device) if bias else None
        made.append(LinearPart(impl, impl.prepare(Weight("dense", (n, HIDDEN), dense)), given, (n, HIDDEN)))
    qkv = Linear(tuple(made))
    norms = [Norm(torch.rand(DIM).to(device) + 0.5, 1e-6) if norm else None for _ in range(2)]
    first = Norm(torch.rand(HIDDEN).to(device) + 0.5, 1e-5)
    gates = {"gate": bool(gate), "head_gates": gate == "heads"}
    return AttentionWeights(first, qkv, qkv, HEADS, KV_HEADS, DIM, 0.125, *norms, **gates, value_dim=values % DIM)


def never(*args: object) -> torch.Tensor:
    raise AssertionError("the composed segment was called")


@pytest.mark.parametrize(
    ("num_tokens", "norm", "bias", "parts"),
    [
        (3, False, True, 3),
        pytest.param(1, True, False, 1, marks=pytest.mark.slow),
        pytest.param(1, False, True, 3, marks=pytest.mark.slow),
        pytest.param(3, True, False, 1, marks=pytest.mark.slow),
    ],
)
def test_attn_in(num_tokens: int, norm: bool, bias: bool, parts: int, device: torch.device) -> None:
    weights = weights_of(norm, bias, parts, device)
    if bias:  # as in Command R
        assert weights.norm is not None
        first = replace(weights.norm, bias=torch.randn(HIDDEN).to(device))
        weights = replace(weights, norm=first, parallel=True)
    x = torch.randn(num_tokens, HIDDEN).half().to(device)
    turns = torch.randn(num_tokens, DIM // 2)
    cos, sin = turns.cos().to(device), turns.sin().to(device)
    slots = torch.arange(5, 5 + num_tokens).to(device)
    found, expected = (KVPages.empty("fp16", 2, KV_HEADS, 16, DIM) for _ in range(2))
    found, expected = (KVPages(p.k.to(device), p.v.to(device)) for p in (found, expected))

    q = attn_in(never, x, weights, cos, sin, found, slots)
    wanted = REFERENCES["attn_in"](x, weights, cos, sin, expected, slots)
    assert q.dtype is torch.float16 and q.shape == (num_tokens, HEADS, DIM)
    for ours, theirs in ((q, wanted), (found.k, expected.k), (found.v, expected.v)):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-2, atol=1e-2)
    assert torch.equal(found.v != 0, expected.v != 0)


@pytest.mark.parametrize(
    ("gate", "parts"), [("", 3), *(pytest.param(gate, 1, marks=pytest.mark.slow) for gate in ("", "queries"))]
)
def test_the_products_of_a_row_finish_its_heads(
    gate: str, parts: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch per part, the same bits as the kernel of several rows; counters are zero afterwards."""
    weights, x = weights_of(True, False, parts, device, gate), torch.randn(1, HIDDEN).half().to(device)
    cos, sin = (torch.randn(1, DIM // 2).to(device) for _ in range(2))
    launched: list[str] = []
    for module in (heads, products):

        def launch(kernel: Any, *given: Any, own: Any = module.launch, **how: Any) -> None:
            launched.append(kernel.fn.__name__.strip("_"))
            own(kernel, *given, **how)

        monkeypatch.setattr(module, "launch", launch)
    results = []
    for slot in (7, -1):  # a row without a slot, as buckets of graphs have them, is not stored
        pages = KVPages.empty("fp16", 2, KV_HEADS, 16, DIM)
        pages = KVPages(pages.k.to(device).zero_(), pages.v.to(device).zero_())
        slots = torch.tensor([slot], device=device)
        q = attn_in(never, x, weights, cos, sin, pages, slots)
        assert launched == ["gemv_heads_kernel"] * parts and not counters(device, products.COUNTERS).any()
        wanted = KVPages(torch.zeros_like(pages.k), torch.zeros_like(pages.v))
        assert torch.equal(q, attn_in(never, x, weights, cos, sin, wanted, slots, apart=True))
        assert pages.k.equal(wanted.k) and pages.v.equal(wanted.v)
        assert launched[parts:] == ["gemv_kernel"] * parts + ["heads"]
        launched.clear()
        results.append(bool(pages.v.any()))
    assert results == [True, False]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("num_tokens", "kind", "kv_format"),
    [
        (3, "v_norm", "fp16"),
        (1, "k_is_v", "fp16"),
        (3, "reads_only", "fp16"),
        pytest.param(3, "k_is_v", "int8", marks=pytest.mark.slow),
        pytest.param(1, "v_norm", "fp8", marks=pytest.mark.slow),
    ],
)
def test_heads_of_gemma4(num_tokens: int, kind: str, kv_format: str, device: torch.device) -> None:
    """Values with a norm, values that are the keys before theirs, and queries alone."""
    weights = weights_of(True, False, 3, device)
    if kind != "reads_only":
        weights = replace(weights, v_norm=Norm(torch.rand(DIM).to(device) + 0.5, 1e-6))
    if kind != "v_norm":
        kept = {"k_is_v": 2, "reads_only": 1}[kind]
        weights = replace(weights, qkv=Linear(weights.qkv.parts[:kept]), **{kind: True})
    if kind == "reads_only":
        weights = replace(weights, k_norm=None)
    x = torch.randn(num_tokens, HIDDEN).half().to(device)
    turns = torch.randn(num_tokens, DIM // 2)
    view = turns.cos().to(device), turns.sin().to(device)
    slots = torch.arange(5, 5 + num_tokens).to(device)
    found, expected = (KVPages.empty(kv_format, 2, KV_HEADS, 16, DIM) for _ in range(2))
    found, expected = (
        KVPages(*(None if part is None else part.to(device) for part in one)) for one in (found, expected)
    )
    q = attn_in(never, x, weights, *view, found, slots)
    torch.testing.assert_close(q, REFERENCES["attn_in"](x, weights, *view, expected, slots), rtol=1e-2, atol=1e-2)
    step = {"fp16": 0.01, "int8": 0.05, "fp8": 0.07}[kv_format]
    for ours, theirs in zip(numbers(found), numbers(expected), strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=step, atol=0.05)
    assert bool(found.v.float().any()) == (kind != "reads_only")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kv_format", ["fp16", "int8", "fp8"])
def test_values_shorter_than_keys(kv_format: str, device: torch.device) -> None:
    """The pages hold zeros after them, which attention's result does not have."""
    weights = replace(weights_of(False, False, 1, device, values=40), value_scale=0.7)
    x, slots = torch.randn(3, HIDDEN).half().to(device), torch.tensor([5, 6, 7]).to(device)
    turns = torch.randn(3, DIM // 2)
    view = turns.cos().to(device), turns.sin().to(device)
    found, expected = (KVPages.empty(kv_format, 2, KV_HEADS, 16, DIM) for _ in range(2))
    found, expected = (
        KVPages(*(None if part is None else part.to(device) for part in one)) for one in (found, expected)
    )
    q = attn_in(never, x, weights, *view, found, slots)
    torch.testing.assert_close(q, REFERENCES["attn_in"](x, weights, *view, expected, slots), rtol=1e-2, atol=1e-2)
    step = {"fp16": 0.01, "int8": 0.05, "fp8": 0.07}[kv_format]  # of codes whose numbers round to either side
    for ours, theirs in zip(numbers(found), numbers(expected), strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=step, atol=0.05)
    assert not found.v[..., 40:].float().any() and found.v[0, 0, 5:8, :40].float().any(-1).all()
    lists = [torch.tensor(one, dtype=torch.int32, device=device) for one in ([[0, 1]], [0, 3], [8])]
    mixed = attention(REFERENCES["attention"], q, weights, found, *lists)
    whole = paged_attention(q, found, *lists, 0.125)
    assert mixed.shape == (3, HEADS * 40) and mixed.is_contiguous()
    torch.testing.assert_close(mixed.unflatten(1, (HEADS, 40)), whole[..., :40], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_keys_and_values_alone(num_tokens: int, device: torch.device) -> None:
    """As a drafter stores them for tokens that the larger model computed: no queries, and normed already."""
    whole = weights_of(True, False, 3, device)
    weights = replace(whole, norm=None, qkv=Linear(whole.qkv.parts[1:]), num_heads=0)
    x = torch.randn(num_tokens, HIDDEN).half().to(device)
    turns = torch.randn(num_tokens, DIM // 2)
    cos, sin = turns.cos().to(device), turns.sin().to(device)
    slots = torch.arange(5, 5 + num_tokens).to(device)
    found, expected = (KVPages.empty("fp16", 2, KV_HEADS, 16, DIM) for _ in range(2))
    found, expected = (KVPages(p.k.to(device), p.v.to(device)) for p in (found, expected))

    assert attn_in(never, x, weights, cos, sin, found, slots).shape == (num_tokens, 0, DIM)
    REFERENCES["attn_in"](x, weights, cos, sin, expected, slots)
    for ours, theirs in ((found.k, expected.k), (found.v, expected.v)):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-2, atol=1e-2)
    assert torch.equal(found.v != 0, expected.v != 0) and int(found.v.ne(0).any(-1).sum()) == num_tokens


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("num_tokens", "gate", "softplus", "norm", "half", "interleaved", "kv_format"),
    [
        (1, "queries", False, True, 16, False, "int8"),
        (3, "heads", True, True, 32, False, "fp16"),
        pytest.param(1, "heads", False, False, 32, False, "fp16", marks=pytest.mark.slow),
        pytest.param(1, "queries", True, True, 8, True, "fp16", marks=pytest.mark.slow),
        pytest.param(3, "queries", False, False, 24, True, "int8", marks=pytest.mark.slow),
        pytest.param(3, "queries", False, True, 16, False, "fp16", marks=pytest.mark.slow),
    ],
)
def test_gates(
    num_tokens: int, gate: str, softplus: bool, norm: bool, half: int, interleaved: bool, kv_format: str,
    device: torch.device,
) -> None:  # fmt: skip
    """Of each element, or of each head: `attn_in`, then `attention` with keys of earlier tokens."""
    weights = replace(
        weights_of(norm, False, 1, device, gate), softplus_gate=softplus, interleaved=interleaved, window=20
    )
    length = 20 + num_tokens
    expected = KVPages.empty(kv_format, 2, KV_HEADS, 16, DIM)
    expected = KVPages(*(None if part is None else part.to(device) for part in expected))
    k, v = (torch.randn(32, KV_HEADS, DIM).to(device) for _ in range(2))
    reference.kv_write(k, v, expected, torch.arange(32, device=device))
    found, x = copied(expected), torch.randn(num_tokens, HIDDEN).half().to(device)
    turns = torch.randn(num_tokens, half).to(device)
    view = turns.cos(), turns.sin()
    slots = torch.arange(20, length).to(device)
    q = attn_in(never, x, weights, *view, found, slots)
    wanted = REFERENCES["attn_in"](x, weights, *view, expected, slots)
    assert q.dtype is torch.float16 and q.shape == (num_tokens, HEADS, 2 * DIM)
    torch.testing.assert_close(q, wanted, rtol=1e-2, atol=1e-2)
    assert gate == "queries" or torch.equal(q[..., DIM:], q[..., DIM : DIM + 1].expand(-1, -1, DIM))
    for ours, theirs in zip(numbers(found), numbers(expected), strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-2, atol=0.05 if kv_format == "int8" else 1e-2)

    def plain(q: torch.Tensor, weights: AttentionWeights, *args: torch.Tensor) -> torch.Tensor:
        assert not (weights.gate or weights.head_gates or weights.softplus_gate)
        return mixers.attention(spaced, q, weights, *args)

    def spaced(q: torch.Tensor, *args: object) -> torch.Tensor:
        assert q.stride() == (2 * HEADS * DIM, 2 * DIM, 1), "the queries were copied"
        return paged_attention(q, *args)  # type: ignore[arg-type]

    lists = [torch.tensor(one, dtype=torch.int32, device=device) for one in ([[0, 1]], [0, num_tokens], [length])]
    out = attention(plain, wanted, weights, expected, *lists)
    right = REFERENCES["attention"](wanted, weights, expected, *lists)
    assert out.dtype is torch.float16 and out.shape == (num_tokens, HEADS * DIM) and out.is_contiguous()
    torch.testing.assert_close(out, right, rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_blocks_with_hyper_connections(device: torch.device) -> None:
    """Whose input is normed already, with an index of what to see or not."""
    weights = replace(weights_of(True, False, 1, device, "queries"), norm=None, hyper=object(), index=object())
    x, turns = torch.randn(1, HIDDEN).half().to(device), torch.randn(1, DIM // 2)
    view = turns.cos().to(device), turns.sin().to(device)
    slots, (found, expected) = torch.tensor([5], device=device), (KVPages.empty("fp16", 1, KV_HEADS, 16, DIM),) * 2
    found, expected = (KVPages(p.k.to(device).clone(), p.v.to(device).clone()) for p in (found, expected))
    q = attn_in(never, x, weights, *view, found, slots)
    wanted = REFERENCES["attn_in"](x, weights, *view, expected, slots)
    lists = [torch.tensor(one, dtype=torch.int32, device=device) for one in ([[0]], [0, 1], [6])]
    seen: list[AttentionWeights] = []

    def plain(q: torch.Tensor, weights: AttentionWeights, *args: torch.Tensor) -> torch.Tensor:
        seen.append(weights)
        return mixers.attention(paged_attention, q, weights, *args)

    out, right = attention(plain, q, weights, found, *lists), REFERENCES["attention"](wanted, weights, expected, *lists)
    assert not seen[0].gate
    for ours, theirs in ((q, wanted), (found.k, expected.k), (found.v, expected.v), (out, right)):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


def test_what_attention_leaves_to_the_composed_segment(device: torch.device) -> None:
    """No gates, and what it does not know."""
    plain, gated = weights_of(False, False, 1, device), weights_of(False, False, 1, device, "queries")
    for weights in (plain, replace(gated, temperature=(0.1, 8192)), replace(gated, causal=False)):
        seen: list[AttentionWeights] = []
        attention(lambda q, given, *args, seen=seen: seen.append(given), torch.empty(1), weights, *(None,) * 4)  # type: ignore[arg-type]
        assert seen == [weights]


@pytest.mark.slow
def test_the_output_of_gated_attention_is_added_in_the_product(device: torch.device) -> None:
    weights = weights_of(False, False, 1, device, "queries")
    x = torch.randn(1, weights.out.out_features).half().to(device)
    attended = torch.randn(1, HIDDEN).half().to(device)
    found = attn_out(never, attended, x.clone(), weights)
    torch.testing.assert_close(found, REFERENCES["attn_out"](attended, x.clone(), weights), rtol=1e-2, atol=1e-2)

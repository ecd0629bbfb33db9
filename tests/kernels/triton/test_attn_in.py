"""The fused first segment of a layer against the composed one: one row, several, with and without QK-norm."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from localllm.kernels import Weight
from localllm.kernels.kv_pages import KVPages
from localllm.kernels.layer_weights import AttentionWeights, Linear, LinearPart, Norm
from localllm.kernels.segments import REFERENCES
from localllm.kernels.table import implementations
from localllm.kernels.triton.segments import attn_in

HEADS, KV_HEADS, DIM, HIDDEN = 3, 1, 64, 96


def weights_of(norm: bool, bias: bool, parts: int, device: torch.device) -> AttentionWeights:
    """A layer whose QKV weight lies in one part or in three."""
    rows = [(HEADS + 2 * KV_HEADS) * DIM] if parts == 1 else [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]
    impl = next(impl for impl in implementations("linear") if impl.name == "triton")
    made = []
    for n in rows:
        dense = (torch.randn(n, HIDDEN) / 8).half().to(device)
        given = torch.randn(n).to(device) if bias else None
        made.append(LinearPart(impl, impl.prepare(Weight("dense", (n, HIDDEN), dense)), given, (n, HIDDEN)))
    qkv = Linear(tuple(made))
    norms = [Norm(torch.rand(DIM).to(device) + 0.5, 1e-6) if norm else None for _ in range(2)]
    first = Norm(torch.rand(HIDDEN).to(device) + 0.5, 1e-5)
    return AttentionWeights(first, qkv, qkv, HEADS, KV_HEADS, DIM, 0.125, *norms)


@pytest.mark.parametrize(
    ("num_tokens", "norm", "bias", "parts"),
    [
        (1, True, False, 1),
        (3, False, True, 3),
        pytest.param(1, False, True, 3, marks=pytest.mark.slow),
        pytest.param(3, True, False, 1, marks=pytest.mark.slow),
    ],
)
def test_attn_in(num_tokens: int, norm: bool, bias: bool, parts: int, device: torch.device) -> None:
    weights = weights_of(norm, bias, parts, device)
    x = torch.randn(num_tokens, HIDDEN).half().to(device)
    turns = torch.randn(num_tokens, DIM // 2)
    cos, sin = turns.cos().to(device), turns.sin().to(device)
    slots = torch.arange(5, 5 + num_tokens).to(device)
    found, expected = (KVPages.empty("fp16", 2, KV_HEADS, 16, DIM) for _ in range(2))
    found, expected = (KVPages(p.k.to(device), p.v.to(device)) for p in (found, expected))

    def composed(*args: object) -> torch.Tensor:
        raise AssertionError("the composed segment was called")

    q = attn_in(composed, x, weights, cos, sin, found, slots)
    wanted = REFERENCES["attn_in"](x, weights, cos, sin, expected, slots)
    assert q.dtype is torch.float16 and q.shape == (num_tokens, HEADS, DIM)
    for ours, theirs in ((q, wanted), (found.k, expected.k), (found.v, expected.v)):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-2, atol=1e-2)
    assert torch.equal(found.v != 0, expected.v != 0)


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

    def composed(*args: object) -> torch.Tensor:
        raise AssertionError("the composed segment was called")

    assert attn_in(composed, x, weights, cos, sin, found, slots).shape == (num_tokens, 0, DIM)
    REFERENCES["attn_in"](x, weights, cos, sin, expected, slots)
    for ours, theirs in ((found.k, expected.k), (found.v, expected.v)):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-2, atol=1e-2)
    assert torch.equal(found.v != 0, expected.v != 0) and int(found.v.ne(0).any(-1).sum()) == num_tokens

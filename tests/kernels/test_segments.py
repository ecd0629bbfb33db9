"""The kernel table: which implementation is taken, and that fused segments may fall back on composed ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.kernels import reference
from localllm.kernels.cpu import ops as cpu_ops
from localllm.kernels.ops import OPS, OpFacts, OpImpl, choose_op
from localllm.kernels.segments import HeadWeights, Linear, LinearPart, Norm, kernel_table


class Doubling:
    """A linear implementation: prepared is a factor."""

    name = "doubling"

    @staticmethod
    def run(x: Tensor, prepared: float, bias: Tensor | None) -> Tensor:
        return x * prepared if bias is None else x * prepared + bias


def part(factor: float, bias: Tensor | None = None) -> LinearPart:
    return LinearPart(Doubling, factor, bias, (4, 4))  # type: ignore[arg-type]


def test_parts_lie_end_to_end() -> None:
    x = torch.randn(3, 4)
    bias = torch.randn(4)
    linear = Linear((part(2.0), part(3.0, bias)))
    assert torch.equal(linear(x), torch.cat([x * 2, x * 3 + bias], -1))
    assert linear.out_features == 8 and linear.impl_names == ("doubling",)


def test_head_norms_multiplies_and_caps() -> None:
    x, weight = torch.randn(3, 4) * 50, torch.randn(4)
    table = kernel_table(OpFacts())
    plain = HeadWeights(Norm(weight, 1e-6), Linear((part(7.0),)))
    capped = HeadWeights(Norm(weight, 1e-6), Linear((part(7.0),)), softcap=5.0)
    logits = reference.rms_norm(x, weight, 1e-6) * 7
    torch.testing.assert_close(table.head(x, plain), logits)
    torch.testing.assert_close(table.head(x, capped), 5 * torch.tanh(logits / 5))


def test_the_table_names_every_op_and_the_twin_always_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ops, "IMPLS", {})
    facts = OpFacts(device="cuda", capability=70, dtype="float16", head_dim=96)
    assert dict(kernel_table(facts).ops) == dict.fromkeys(OPS, "torch")


def test_a_card_gets_its_own_ops() -> None:
    facts = OpFacts("cuda", 90, "bfloat16", "bf16", num_heads=32, num_kv_heads=8, head_dim=128, deterministic=False)
    expected = dict.fromkeys((*OPS, "attn_in"), "triton")
    chosen = dict(kernel_table(facts).ops)
    assert {name: chosen[name] for name in expected} == expected
    invariant = dict(kernel_table(replace(facts, deterministic=True)).ops)
    assert invariant["paged_attention"] == "triton_invariant" and invariant["rms_norm"] == "triton"
    assert dict(kernel_table(replace(facts, head_dim=512)).ops)["paged_attention"] == "torch"
    assert dict(kernel_table(replace(facts, capability=75)).ops)["rms_norm"] == "torch"
    assert "triton" not in dict(kernel_table(OpFacts()).ops).values()


def test_registered_ops_are_preferred_until_they_do_not_fit_or_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = OpImpl("fast", lambda facts: None if facts.head_dim == 64 else "head_dim", reference.rms_norm)
    monkeypatch.setattr(cpu_ops, "IMPLS", {"rms_norm": (fast,)})
    assert choose_op("rms_norm", OpFacts()).name == "fast"
    assert choose_op("rms_norm", OpFacts(head_dim=80)).name == "torch"
    assert choose_op("rms_norm", OpFacts(), frozenset({"rms_norm:fast"})).name == "torch"
    assert choose_op("rms_norm", OpFacts(), frozenset({"rope:fast"})).name == "fast"
    assert dict(kernel_table(OpFacts()).ops)["rms_norm"] == "fast"


def test_a_fused_segment_gets_the_composed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def fused(composed: Any, x: Tensor, weights: HeadWeights) -> Tensor:
        calls.append(x.shape[0])
        return composed(x, weights)

    monkeypatch.setattr(cpu_ops, "IMPLS", {"head": (OpImpl("fused", lambda facts: None, fused),)})
    weights = HeadWeights(Norm(torch.ones(4), 1e-6), Linear((part(1.0),)))
    table = kernel_table(OpFacts())
    x = torch.randn(2, 4)
    assert torch.equal(table.head(x, weights), reference.rms_norm(x, torch.ones(4), 1e-6))
    assert calls == [2] and dict(table.ops)["head"] == "fused"
    assert "head" not in dict(kernel_table(OpFacts(), frozenset({"head:fused"})).ops)

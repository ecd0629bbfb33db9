"""The kernel table: which implementation is taken, and that fused segments may fall back on composed ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.kernels import Impl, OpFacts, choose, reference, table
from localllm.kernels.layer_weights import HeadWeights, Linear, LinearPart, Norm
from localllm.kernels.registry import OPS, fits_always
from localllm.kernels.table import implementations, kernel_table


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
    assert linear.out_features == 8


def test_head_norms_multiplies_and_caps() -> None:
    x, weight = torch.randn(3, 4) * 50, torch.randn(4)
    made = kernel_table(OpFacts())
    plain = HeadWeights(Norm(weight, 1e-6), Linear((part(7.0),)))
    capped = HeadWeights(Norm(weight, 1e-6), Linear((part(7.0),)), softcap=5.0)
    logits = reference.rms_norm(x, weight, 1e-6) * 7
    torch.testing.assert_close(made.head(x, plain), logits)
    torch.testing.assert_close(made.head(x, capped), 5 * torch.tanh(logits / 5))


def test_the_table_names_every_op_and_the_reference_always_fits() -> None:
    facts = OpFacts(device="cuda", capability=70, dtype="float16", head_dim=96)
    assert dict(kernel_table(facts).ops) == dict.fromkeys(OPS, "torch")


def test_a_card_gets_its_own_ops() -> None:
    facts = OpFacts("bf16", 32, 8, 128, device="cuda", capability=90, dtype="bfloat16", deterministic=False)
    expected = dict.fromkeys({*OPS, "attn_in", "latent_attention", "compressed_attention"}, "triton")
    chosen = dict(kernel_table(facts).ops)
    assert {name: chosen[name] for name in expected} == expected
    invariant = dict(kernel_table(replace(facts, deterministic=True)).ops)
    by_token = {"paged_attention", "delta_rule", "state_space", "gated_delta", "mamba"}
    by_token |= {"latent_attention", "compressed_attention"}
    assert {op for op in invariant if invariant[op] == "triton_invariant"} == by_token
    assert invariant["rms_norm"] == "triton"
    assert "attention" not in chosen and "attention" not in invariant
    assert dict(kernel_table(replace(facts, gated=True, deterministic=True)).ops)["attention"] == "triton"
    assert dict(kernel_table(replace(facts, head_dim=520)).ops)["paged_attention"] == "torch"
    assert dict(kernel_table(replace(facts, capability=75)).ops)["rms_norm"] == "torch"
    assert "triton" not in dict(kernel_table(OpFacts()).ops).values()


def test_registered_ops_are_preferred_until_they_do_not_fit_or_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = Impl("rms_norm", "fast", lambda facts: None if facts.head_dim == 64 else "head_dim", reference.rms_norm)
    monkeypatch.setattr(table, "BACK_ENDS", ({"rms_norm": (fast,)}, table.PLAIN))
    impls = implementations("rms_norm")
    assert choose(impls, OpFacts()).impl.name == "fast"
    choice = choose(impls, OpFacts(head_dim=80))
    assert choice.impl.name == "torch" and choice.passed_over == (("fast", "head_dim"),)
    assert choose(impls, OpFacts(), frozenset({"rms_norm:fast"})).impl.name == "torch"
    assert choose(impls, OpFacts(), frozenset({"rope:fast"})).impl.name == "fast"
    assert dict(kernel_table(OpFacts()).ops)["rms_norm"] == "fast"


def test_a_fused_segment_gets_the_composed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def fused(composed: Any, x: Tensor, weights: HeadWeights) -> Tensor:
        calls.append(x.shape[0])
        return composed(x, weights)

    impl = Impl("head", "fused", fits_always, fused)
    monkeypatch.setattr(table, "BACK_ENDS", ({"head": (impl,)}, table.PLAIN))
    weights = HeadWeights(Norm(torch.ones(4), 1e-6), Linear((part(1.0),)))
    made = kernel_table(OpFacts())
    x = torch.randn(2, 4)
    assert torch.equal(made.head(x, weights), reference.rms_norm(x, torch.ones(4), 1e-6))
    assert calls == [2] and dict(made.ops)["head"] == "fused"
    assert "head" not in dict(kernel_table(OpFacts(), frozenset({"head:fused"})).ops)

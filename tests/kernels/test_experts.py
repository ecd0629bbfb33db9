"""Mixtures of experts: the C segment against the one composed of references, and what a router chooses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels.cpu import segments as cpu
from localllm.kernels.cpu.build import library
from localllm.kernels.cpu.layers import experts_layer
from localllm.kernels.experts import route
from localllm.kernels.layer_weights import ExpertsWeights, Linear, LinearPart, Norm
from localllm.kernels.registry import LinearFacts, choose
from localllm.kernels.segments import REFERENCES
from localllm.kernels.table import implementations
from localllm.kernels.weight import Weight

HIDDEN, INNER, EXPERTS = 70, 46, 9
SOFTMAX = {"router_kind": "softmax", "activation": "silu"}
KINDS: dict[str, dict[str, Any]] = {
    "softmax": SOFTMAX,
    "raw": SOFTMAX | {"renormalise": False, "scale": 2.5, "activation": "gelu_tanh"},
    "chosen": {"router_kind": "softmax_topk", "activation": "swiglu_oai", "limit": 0.5, "biases": True},
    "sigmoid": SOFTMAX | {"router_kind": "sigmoid", "choice_bias": True, "shared": 38},
    "grouped": SOFTMAX | {"router_kind": "sigmoid", "groups": 3, "group_top_k": 2, "shared": 54, "gated": True},
    "softmax with a bias": SOFTMAX | {"choice_bias": True, "shared": 38},
    "inputs": SOFTMAX | {"router_kind": "sigmoid_topk", "share_inputs": True, "shared": 38, "renormalise": False},
    "logits": SOFTMAX | {"router_kind": "sigmoid_topk", "choice_bias": True, "shared": 38, "shared_scale": 0.5},
    "best of groups": SOFTMAX | {"groups": 3, "group_top_k": 1, "limit": 0.5, "post_norm": True},
    "limits": SOFTMAX | {"limit": 0.3, "shared": 38, "shared_limit": 0.6, "gated": True},
    "root of softplus": SOFTMAX
    | {"router_kind": "sqrt_softplus", "choice_bias": True, "shared": 38, "scale": 1.5, "activation": "silu_clamped"}
    | {"limit": 0.3, "shared_limit": 0.3},
    "limits of gelu": SOFTMAX | {"activation": "gelu_tanh", "limit": 0.6, "shared": 38, "shared_limit": 0.3},
}

pytestmark = pytest.mark.skipif(bool(library().reason), reason="no C compiler")


def product(n: int, k: int, seed: int, *, bias: bool = False, codes: bool = False) -> Linear:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn((n, k), generator=generator) * k**-0.5
    weight = Weight("dense", (n, k), values)
    if codes:
        scales = values.abs().amax(1, keepdim=True) / 127
        weight = Weight("int8", (n, k), (values / scales).round().to(torch.int8), scales)
    impl = choose(implementations("linear"), LinearFacts(form=weight.form, shape=(n, k))).impl
    given = torch.randn(n, generator=generator) if bias else None
    return Linear((LinearPart(impl, impl.prepare(weight), given, (n, k)),))


def mixture(kind: str, *, codes: bool = False) -> ExpertsWeights:
    options = dict(KINDS[kind])
    bias, shared, gated = (options.pop(name, 0) for name in ("biases", "shared", "gated"))
    norm = Norm(torch.linspace(0.5, 1.5, HIDDEN), 1e-6)
    if options.pop("post_norm", False):
        options["post_norm"] = norm
    if options.get("choice_bias"):
        options["choice_bias"] = torch.linspace(-0.3, 0.3, EXPERTS)
    return ExpertsWeights(
        norm=norm,
        router=product(EXPERTS, HIDDEN, 1, bias=bool(bias)),
        gate_up=tuple(product(2 * INNER, HIDDEN, 10 + e, bias=bool(bias), codes=codes) for e in range(EXPERTS)),
        down=tuple(product(HIDDEN, INNER, 30 + e, bias=bool(bias), codes=codes) for e in range(EXPERTS)),
        top_k=3,
        shared_gate_up=product(2 * shared, HIDDEN, 50) if shared else None,
        shared_down=product(HIDDEN, shared, 51) if shared else None,
        shared_gate=product(1, HIDDEN, 52) if gated else None,
        **options,
    )


def composed(*_: object) -> Tensor:
    raise AssertionError("C must take this layer")


def in_c(x: Tensor, weights: ExpertsWeights) -> Tensor:
    return cpu.experts(composed, x.clone(), weights)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_c_computes_what_the_composed_segment_does(kind: str, codes: bool) -> None:
    weights = mixture(kind, codes=codes)
    for count in (1, 2, 33, 300):
        x = torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(count))
        wanted = REFERENCES["experts"](x.clone(), weights)
        assert torch.allclose(in_c(x, weights), wanted, rtol=1e-4, atol=1e-4 if codes else 2e-5), count


@pytest.mark.parametrize("run", [in_c, lambda x, weights: REFERENCES["experts"](x.clone(), weights)])
def test_a_token_does_not_depend_on_its_neighbours(run: Callable[[Tensor, ExpertsWeights], Tensor]) -> None:
    weights = mixture("grouped", codes=True)
    x = torch.randn((300, HIDDEN), generator=torch.Generator().manual_seed(3))
    whole = run(x, weights)
    for begin, end in ((0, 1), (299, 300), (7, 40), (250, 270)):
        assert torch.equal(run(x[begin:end], weights), whole[begin:end])


@pytest.mark.parametrize(
    ("kind", "act"),
    [("limits", functional.silu), ("limits of gelu", lambda gate: functional.gelu(gate, approximate="tanh"))],
)
def test_limits_clamp_ups_and_activated_gates(kind: str, act: Callable[[Tensor], Tensor]) -> None:
    weights, x = mixture(kind), torch.randn((5, HIDDEN), generator=torch.Generator().manual_seed(1))

    def output(rows: Tensor, gate_up: Linear, down: Linear, limit: float) -> Tensor:
        gate, up = gate_up(rows).chunk(2, -1)
        return down(act(gate).clamp(max=limit) * up.clamp(-limit, limit))

    def computed(**changes: Any) -> Tensor:
        return REFERENCES["experts"](x.clone(), replace(weights, **changes)) - x

    normed = functional.rms_norm(x, (HIDDEN,), weights.norm.weight, 1e-6)
    wanted = output(normed, weights.shared_gate_up, weights.shared_down, weights.shared_limit)
    if weights.shared_gate is not None:
        wanted *= weights.shared_gate(normed).sigmoid()
    for row, experts, shares in zip(range(len(x)), *route(weights.router(normed), weights), strict=True):
        for e, share in zip(experts.tolist(), shares, strict=True):
            wanted[row] += share * output(normed[row, None], weights.gate_up[e], weights.down[e], weights.limit)[0]
    torch.testing.assert_close(computed(), wanted, rtol=1e-4, atol=1e-5)
    for name in ("limit", "shared_limit"):
        assert ((computed(**{name: None}) - wanted).norm(dim=1) > 0.1 * wanted.norm(dim=1)).all(), name


@pytest.mark.parametrize("kind", ["grouped", "limits", "chosen"])
def test_c_chooses_valid_experts_from_numbers_that_are_none(kind: str) -> None:
    weights = mixture(kind)
    assert in_c(torch.full((5, HIDDEN), float("nan")), weights).isnan().all()


@pytest.mark.parametrize("option", [{"activation": "relu2"}, {"router_kind": "sinkhorn"}, {"norm": None}])
def test_c_declines_what_it_does_not_know(option: dict[str, Any]) -> None:
    assert experts_layer(mixture("softmax")) is not None
    assert experts_layer(replace(mixture("softmax"), **option)) is None

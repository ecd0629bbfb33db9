"""Mixtures of experts whose routing stays on the card, against the segment composed of references."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from localllm.kernels import experts as reference
from localllm.kernels.dense_linear import REFERENCE
from localllm.kernels.dequant import dequantize
from localllm.kernels.layer_weights import ApartNorms, ExpertsWeights, Linear, LinearPart, Norm
from localllm.kernels.segments import REFERENCES
from localllm.kernels.table import implementations
from localllm.kernels.triton import digits, rms_norm
from localllm.kernels.triton import experts as triton_experts
from localllm.kernels.triton import product as products
from localllm.kernels.triton.launch import counters
from localllm.kernels.triton.product_tiles import SMALL_TOKENS
from localllm.kernels.weight import Weight

from .weights import make, on

HIDDEN, INNER, EXPERTS, TOP_K = 64, 32, 9, 3
SOFTMAX = {"router_kind": "softmax", "activation": "silu"}
KINDS: dict[str, dict[str, Any]] = {
    "softmax": SOFTMAX,
    "raw": SOFTMAX | {"renormalise": False, "scale": 2.5, "activation": "gelu_tanh"},
    "chosen": {"router_kind": "softmax_topk", "activation": "swiglu_oai", "limit": 0.5, "biases": True},
    "sigmoid": SOFTMAX | {"router_kind": "sigmoid", "choice_bias": True, "shared": 38, "expert_scales": True},
    "grouped": SOFTMAX | {"router_kind": "sigmoid", "groups": 3, "group_top_k": 2},
    "softmax with a bias": SOFTMAX | {"choice_bias": True, "shared": 38},
    "inputs": SOFTMAX | {"router_kind": "sigmoid_topk", "share_inputs": True, "renormalise": False, "in_kernels": True},
    "logits": SOFTMAX
    | {"router_kind": "sigmoid_topk", "choice_bias": True, "shared": 32, "shared_scale": 0.5, "in_kernels": True},
    "root of softplus": SOFTMAX
    | {"router_kind": "sqrt_softplus", "choice_bias": True, "shared": 32, "scale": 1.5, "in_kernels": True},
    "without a gate": SOFTMAX | {"activation": "relu2"},
    "in kernels": SOFTMAX | {"shared": 32, "shared_gate": True, "in_kernels": True},
    "routed by a kernel": SOFTMAX | {"in_kernels": True},
    "limits": SOFTMAX | {"limit": 0.3, "shared": 32, "shared_limit": 0.6, "in_kernels": True},
}


def linear(weight: Weight, device: torch.device, name: str = "triton", bias: Tensor | None = None) -> Linear:
    impl = next(one for one in implementations("linear") if one.name == name)
    given = None if bias is None else bias.to(device)
    return Linear((LinearPart(impl, impl.prepare(on(device, weight)), given, weight.shape),))


class Both(NamedTuple):
    """A mixture in Triton, and the same in PyTorch."""

    ours: ExpertsWeights
    plain: ExpertsWeights


def mixture(kind: str, device: torch.device, form: str = "dense-f16", hidden: int = HIDDEN) -> Both:
    options = dict(KINDS[kind])
    biased, shared = options.pop("biases", False), options.pop("shared", 0)
    plain_form, impl = ("dense-f16", "triton") if options.pop("in_kernels", False) else ("dense-f32", REFERENCE.name)
    gates = 1 if options["activation"] == "relu2" else 2
    for name in ("choice_bias", "expert_scales"):
        if options.get(name):
            options[name] = torch.linspace(0.4, 1.3, EXPERTS).to(device)
    inner = hidden if form.startswith("gguf") else INNER
    stacks, plain = (reference.Stack(EXPERTS), reference.Stack(EXPERTS)), ([], [])
    for _ in range(EXPERTS):
        for stack, same, (n, k) in zip(stacks, plain, ((gates * inner, hidden), (hidden, inner)), strict=True):
            weight, bias = make(form, n, k), torch.randn(n) if biased else None
            stack.add(linear(weight, device, bias=bias))
            same.append(linear(Weight("dense", (n, k), dequantize(weight).float()), device, REFERENCE.name, bias))
    (gate_up, all_gate_up), (down, all_down) = (stack.finished() for stack in stacks)
    assert all_gate_up is not None and all_down is not None
    router = make(plain_form, EXPERTS, hidden)
    if shared:
        options["shared_gate_up"] = linear(make(plain_form, 2 * shared, hidden), device, impl)
        options["shared_down"] = linear(make(plain_form, hidden, shared), device, impl)
    if options.get("shared_gate"):
        options["shared_gate"] = linear(make(plain_form, 1, hidden), device, impl)
    made = ExpertsWeights(
        norm=Norm(torch.linspace(0.5, 1.5, hidden).to(device), 1e-6),
        router=linear(router, device, impl, torch.randn(EXPERTS) if biased else None),
        gate_up=gate_up,
        down=down,
        top_k=TOP_K,
        stacked=(all_gate_up, all_down),
        **options,
    )
    return Both(made, replace(made, gate_up=tuple(plain[0]), down=tuple(plain[1]), stacked=None))


def composed(x: Tensor, weights: ExpertsWeights, **how: Any) -> Tensor:
    assert "mix" in how, "this mixture must stay on the card"
    unlike = weights.activation == "relu2" or weights.choice_bias is not None  # with a shared expert in PyTorch
    assert unlike or len(x) > SMALL_TOKENS, "few rows need no other launches"
    return REFERENCES["experts"](x, weights, **how)


def check(made: Both, tokens: int, device: torch.device, *wrong: Any, **how: Any) -> None:
    """Compare with the reference; references with `wrong` weights must differ."""
    hidden = made.ours.down[0].out_features
    # small beside what is added: the sum is rounded once by ours, twice by the reference
    x = (torch.randn(tokens, hidden) * 2e-3).half().to(device)
    found = triton_experts.experts(composed, x.clone(), made.ours, **how) - x
    how.pop("apart", None)

    def apart(weights: Any) -> float:
        wanted = REFERENCES["experts"](x.clone(), weights, **how) - x
        return float((found - wanted).double().norm() / wanted.double().norm())

    assert apart(made.plain) < 4e-3
    assert all(apart(weights) > 0.1 for weights in wrong)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.slow
def test_the_first_norm_may_be_a_layer_norm(device: torch.device) -> None:
    made = mixture("in kernels", device)
    norm = replace(made.ours.norm, bias=torch.linspace(-1.0, 1.0, HIDDEN).to(device))
    check(Both(replace(made.ours, norm=norm), replace(made.plain, norm=norm)), 1, device, made.plain)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tokens", [1, slow(2), slow(20)])
@pytest.mark.parametrize("kind", [kind if kind in ("in kernels", "inputs") else slow(kind) for kind in KINDS])
def test_what_is_chosen_on_the_card_is_what_the_reference_chooses(kind: str, tokens: int, device: torch.device) -> None:
    check(mixture(kind, device), tokens, device)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, slow(2), 20])
def test_experts_chosen_by_token_id_stay_on_the_card(tokens: int, device: torch.device) -> None:
    table = torch.rand(30, EXPERTS).argsort(1)[:, :TOP_K].to(device)
    made = mixture("root of softplus", device)
    hashed = Both(*(replace(one, table=table) for one in made))
    ids = torch.arange(5, 5 + tokens).to(device)
    check(hashed, tokens, device, made.plain, replace(hashed.plain, table=table.flip(0)), ids=ids)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, slow(20)])
def test_routed_and_shared_experts_have_limits_of_their_own(tokens: int, device: torch.device) -> None:
    made = mixture("limits", device)
    check(made, tokens, device, replace(made.plain, limit=None), replace(made.plain, shared_limit=None))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, slow(2), slow(20)])
@pytest.mark.parametrize("activation", ["gelu_tanh", slow("swiglu_oai")])
def test_each_may_have_norms_of_its_own(
    activation: str, tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Gemma 4: for the router, for the shared expert and behind both; the second is part of a product."""
    norms = [Norm(torch.linspace(low, 1.5, HIDDEN).to(device), 1e-6) for low in (0.1, 0.3, 0.6, 0.8)]
    given = {"apart": ApartNorms(*norms), "activation": activation, "post_norm": norms[0]}
    made = Both(*(replace(one, **given) for one in mixture("logits", device)))
    made = Both(*(replace(one, shared_scale=1.0) for one in made))
    fused: list[int] = []
    own = triton_experts._normed_shared
    monkeypatch.setattr(triton_experts, "_normed_shared", lambda *given, **how: fused.append(1) or own(*given, **how))
    turned = replace(norms[0], weight=norms[0].weight.flip(0))
    names = ("shared", "after_shared", "after_experts")
    wrong = [replace(made.plain, apart=replace(made.plain.apart, **{name: turned})) for name in names]
    check(made, tokens, device, *wrong)
    assert bool(fused) is (activation == "gelu_tanh" and tokens < 20)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, slow(2), slow(20)])
def test_with_hyper_connections_nothing_is_added(tokens: int, device: torch.device) -> None:
    made = Both(*(replace(one, norm=None, hyper=object()) for one in mixture("in kernels", device)))
    check(made, tokens, device, replace(made.plain, hyper=None))


@pytest.mark.parametrize("form", ["int4g-32", slow("fp4g16"), slow("fp8-row"), slow("gguf-Q6_K")])
def test_a_row_takes_three_launches(form: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is normed, routed, converted and summed by the kernels of the products, whose counters are zero afterwards."""
    made = mixture("routed by a kernel", device, form, 256 if form.startswith("gguf") else HIDDEN)
    launched: list[str] = []
    for module in (triton_experts, products, digits, rms_norm):

        def launch(kernel: Any, *given: Any, own: Any = module.launch, **how: Any) -> None:
            launched.append(kernel.fn.__name__.strip("_"))
            own(kernel, *given, **how)

        monkeypatch.setattr(module, "launch", launch)
    check(made, 1, device, replace(made.plain, norm=replace(made.plain.norm, eps=10.0)))
    converts = form in ("int4g-32", "fp4g16")
    first, *of_references = "gemv_digits_kernel" if converts else "gemv_kernel", "gemv_kernel", "gemv_kernel"
    assert launched == ["gemv_route_kernel", first, "gemv_sum_kernel", *of_references], "references only run the router"
    assert not counters(device, products.COUNTERS).any()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int4g-32", "dense-f16"])
def test_a_shared_expert_reads_what_was_converted_for_the_others(form: str, device: torch.device) -> None:
    made = mixture("in kernels", device, "int4g-32")
    shared = make(form, 64, HIDDEN)
    ours = replace(made.ours, shared_gate_up=linear(shared, device))
    dense = Weight("dense", shared.shape, dequantize(shared).float())
    plain = replace(made.plain, shared_gate_up=linear(dense, device, REFERENCE.name))
    check(Both(ours, plain), 1, device, made.plain, replace(plain, shared_gate=None))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 3])
def test_the_kernels_may_be_apart(tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a self-test that a fused kernel failed."""
    launched: list[str] = []
    for module in (triton_experts, products, digits):

        def launch(kernel: Any, *given: Any, own: Any = module.launch, **how: Any) -> None:
            launched.append(kernel.fn.__name__.strip("_"))
            own(kernel, *given, **how)

        monkeypatch.setattr(module, "launch", launch)
    made = mixture("in kernels", device, "int4g-32")
    check(made, tokens, device, replace(made.plain, shared_gate=None), apart=True)
    assert {"route_kernel", "digits_kernel", "sum_kernel"} <= set(launched)
    assert not any(name.startswith("gemv_") and name != "gemv_kernel" for name in launched)


@pytest.mark.slow
def test_without_enough_counters_sums_and_conversions_are_launches(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_experts, "COUNTERS", HIDDEN - 1)
    monkeypatch.setattr(products, "COUNTERS", 0)
    check(mixture("routed by a kernel", device, "int4g-32"), 1, device)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
def test_the_sum_takes_residual_and_shared_expert_and_loses_no_nan(device: torch.device) -> None:
    given, shares, x = torch.randn(2 * TOP_K, 40), torch.rand(2, TOP_K), torch.randn(2, 40)
    more, gate = torch.randn(2, 40), torch.tensor([[0.7], [torch.nan]])
    wanted = x + (given.view(2, TOP_K, 40) * shares[..., None]).sum(1) + more * gate.sigmoid()
    out = x.clone().to(device)
    sums = triton_experts.Sums(shares.to(device), out, out, more.to(device), gate.to(device))
    triton_experts.summed(given.to(device), sums)
    torch.testing.assert_close(out.cpu(), wanted, equal_nan=True)


FORMS = ("int4g-32", "fp4g16", "fp4g32", "fp8-row", "gguf-Q4_K", "gguf-Q6_K")


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 14])
@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str, tokens: int, device: torch.device) -> None:
    check(mixture("softmax", device, form, 256 if form.startswith("gguf") else HIDDEN), tokens, device)


@pytest.mark.slow
def test_many_pairs_go_in_tiles(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "FEW_PAIRS", 4)
    check(mixture("softmax", device), 3, device)


@pytest.mark.parametrize("count", [1, 7, 500])
def test_every_pair_has_one_place_in_a_tile_of_its_expert(count: int) -> None:
    chosen = torch.randint(0, EXPERTS, (count, TOP_K), dtype=torch.int32)
    chosen[:, 0] = 4
    tiles = triton_experts.sorted_by_expert(chosen, EXPERTS, reference.tile_size(count * TOP_K, EXPERTS) or 8)
    places = tiles.places.view(-1, tiles.size)
    assert places[places >= 0].sort()[0].tolist() == list(range(count * TOP_K))
    for tile, expert in zip(places, tiles.experts.tolist(), strict=True):
        inside = tile[tile >= 0]
        assert (expert >= 0) is bool(inside.numel()), "tiles without an expert are empty, others are not"
        assert (chosen.flatten()[inside] == expert).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
def test_the_router_takes_the_first_of_equals_and_loses_no_nan(device: torch.device) -> None:
    weights = mixture("softmax", device).ours
    logits = torch.zeros(4, EXPERTS)
    logits[1, 7], logits[2, 3], logits[3] = 2.0, torch.nan, torch.nan
    chosen, shares = triton_experts.routed(logits.to(device), weights)
    assert chosen[0].tolist() == [0, 1, 2] and chosen[1].tolist() == [7, 0, 1]
    assert shares[:2].sum(1).tolist() == pytest.approx([1, 1]) and shares[2:].isnan().all()
    assert bool(((chosen >= 0) & (chosen < EXPERTS)).all())


@pytest.mark.slow
def test_experts_that_are_stored_unlike_stay_apart(device: torch.device) -> None:
    weights = [make("fp8mx", 6, 64) for _ in range(4)]
    weights[2].qweight.view(torch.uint8)[1, 1] = 0x7F  # NaN: this one alone gets a factor of its own
    for given in (weights, [make("int4g-32", 6, 64), make("dense-f16", 6, 64)], [make("fp8-block", 6, 256)] * 2):
        stack = reference.Stack(len(given))
        for weight in given:
            stack.add(linear(weight, device))
        linears, whole = stack.finished()
        x = torch.randn(3, given[0].shape[1]).half().to(device)
        for one, weight in zip(linears, given, strict=True):
            assert torch.equal(one(x).isnan(), linear(weight, device)(x).isnan())
            assert torch.allclose(one(x), linear(weight, device)(x), equal_nan=True)
        assert whole is None

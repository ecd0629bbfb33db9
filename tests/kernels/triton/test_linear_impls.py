"""`linear`'s implementations for cards: which is chosen and why not, rounding of activations, and fused segments."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.kernels import Impl, LinearFacts, OpFacts, choose
from localllm.kernels.dequant import dequantize
from localllm.kernels.layer_weights import (
    AttentionWeights,
    HeadWeights,
    InputWeights,
    Linear,
    LinearPart,
    MlpWeights,
    Norm,
)
from localllm.kernels.segments import REFERENCES as COMPOSED
from localllm.kernels.table import implementations
from localllm.kernels.triton import narrow, ops, quantize, segments
from localllm.kernels.triton.aot_cases import all_specs
from localllm.kernels.triton.cards import Card
from localllm.kernels.triton.launch import launch, recording
from localllm.kernels.verify.trial import LINEAR_TOKENS, compare, linear_error, unjudged
from localllm.kernels.verify.tuning import AGREEMENT, Tuner
from localllm.kernels.weight import Weight

import triton  # isort: skip
import triton.language as tl  # isort: skip

from .weights import FORMS, error, exact_product, make, on

IMPLS = {impl.name: impl for impl in ops.IMPLS["linear"]}
CLOSE = 1e-2
"""of `error`: some roundings to bfloat16, which the interpreter cuts off"""


def facts(**more: Any) -> LinearFacts:
    usual = {
        "form": "int4g", "shape": (64, 256), "group_size": 128, "device": "cuda", "capability": 90,
        "dtype": "bfloat16", "deterministic": False,
    }  # fmt: skip
    return LinearFacts(**(usual | more))


@pytest.mark.parametrize("form", ["dense-bf16", "int4g-128"])
def test_all_that_a_self_test_launches_is_compiled_ahead(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded kernels leave no results: what the first case made of them ended the test, and the others were compiled
    one by one."""
    monkeypatch.setitem(LINEAR_TOKENS, "cpu", LINEAR_TOKENS["cuda"])
    weight = make(form, 64, 256)
    prepared, run = IMPLS["triton"].prepare(weight), IMPLS["triton"].run

    def keys(call: Callable[[], object]) -> set[str]:
        with recording(Card(90, 132)) as launches:
            call()
        return {one.key for one in launches}

    each = [partial(run, torch.randn(count, 256).bfloat16(), prepared, None) for count in LINEAR_TOKENS["cuda"]]
    wanted = set().union(*(keys(one) for one in each))
    error = partial(linear_error, IMPLS["triton"], facts(device="cpu", shape=(64, 256)), weight, prepared)
    with unjudged():
        assert keys(error) == wanted and len(wanted) > 3
    assert keys(error) < wanted


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({}, "triton"),
        ({"deterministic": True}, "triton_invariant"),
        ({"capability": 75, "dtype": "float16"}, "triton"),
        ({"form": "gguf", "block_type": "Q5_K", "group_size": 256}, "triton"),
        ({"form": "fp8", "activations": "fp8", "capability": 89}, "triton_fp8_w8a8"),
        ({"form": "fp8", "activations": "fp8", "capability": 86}, "triton"),
        ({"form": "fp8", "activations": "fp8", "deterministic": True}, "triton_invariant"),
        ({"form": "fp4g16", "group_size": 16, "activations": "nvfp4"}, "triton"),
        ({"form": "fp4g16", "group_size": 16, "activations": "nvfp4", "capability": 120}, "triton_nvfp4_w4a4"),
    ],
)
def test_choice(more: dict[str, Any], name: str) -> None:
    assert choose(implementations("linear"), facts(**more)).impl.name == name


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"device": "cpu"}, "runs on NVIDIA GPUs, not on cpu"),
        ({"capability": 70}, "needs compute capability 7.5 or higher, this GPU has 7.0"),
        ({"dtype": "float32"}, "activations are float32"),
        ({"capability": 75}, "no bfloat16 below compute capability 8.0"),
        ({"group_size": 48}, "group size must be a multiple of 32, not 48"),
        ({"form": "gguf", "block_type": "TQ1_0"}, "no layout for TQ1_0 blocks"),
        ({"form": "odd"}, "no layout for weights of form odd"),
        ({"deterministic": True}, "sums one row in a different order than several"),
    ],
)
def test_reasons(more: dict[str, Any], reason: str) -> None:
    assert IMPLS["triton"].fits(facts(**more)) == reason


def test_one_order_of_sums_needs_tensor_cores() -> None:
    old = facts(capability=75, dtype="float16", deterministic=True)
    assert IMPLS["triton_invariant"].fits(old) == "Triton cannot use tensor cores below compute capability 8.0"


COMPARED = [name for name in FORMS if not name.startswith("gguf-Q3")][::3]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "form", [name if i % 4 == 0 else pytest.param(name, marks=pytest.mark.slow) for i, name in enumerate(COMPARED)]
)
def test_implementations_agree_with_the_reference(form: str, device: torch.device) -> None:
    weight, bias = make(form, 17, 256), torch.randn(17)
    x = torch.randn(3, 256).bfloat16().to(device)
    for name in ("triton", "triton_invariant"):
        prepared = IMPLS[name].prepare(on(device, weight))
        assert torch.equal(IMPLS[name].rows(prepared)(torch.arange(17).to(device)).cpu(), dequantize(weight))
        assert prepared.nbytes >= 17 * 256 // 4
        y = IMPLS[name].run(x, prepared, bias.to(device))
        assert y.dtype is torch.bfloat16 and error(y, exact_product(x, weight) + bias) < CLOSE


@pytest.mark.slow
def test_triton_is_loaded_by_a_card_alone() -> None:
    code = """if True:
        import sys
        from localllm.kernels import LinearFacts, OpFacts, choose
        from localllm.kernels.table import implementations
        facts = LinearFacts("int4g", (64, 256), 128, device="cuda", capability=90, dtype="bfloat16")
        assert choose(implementations("linear"), facts).impl.name == "triton_invariant"
        facts = OpFacts(device="cuda", capability=90, dtype="bfloat16")
        assert choose(implementations("mlp"), facts).impl.name == "triton"
        assert "triton" not in sys.modules
    """
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


# ---- activations rounded by permission


@triton.jit
def _encode(x_ptr, e4m3_ptr, e2m1_ptr, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    x = tl.load(x_ptr + i)
    tl.store(e4m3_ptr + i, quantize.e4m3_bits(x).to(tl.uint8))
    tl.store(e2m1_ptr + i, quantize.e2m1_bits(x).to(tl.uint8))


def test_encoders_round_as_torch_does(device: torch.device) -> None:
    """All E4M3 numbers, the ties between them, and what lies just beside the ties; the same for E2M1."""
    bits = torch.arange(0, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (bits[1:] + bits[:-1]) / 2
    near = torch.cat([bits, ties, ties * (1 + 2**-20), ties * (1 - 2**-20), torch.tensor([500.0, 1e9, 0.26, 5.1])])
    x = torch.cat([near, -near])
    x = torch.cat([x, torch.zeros(2048 - x.numel())]).to(device)
    e4m3, e2m1 = (torch.empty(2048, dtype=torch.uint8, device=device) for _ in range(2))
    launch(_encode, (1,), x, e4m3, e2m1, COUNT=2048)
    assert torch.equal(e4m3.cpu(), x.cpu().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
    a = x.cpu().abs().clamp(max=6)
    step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))
    v = torch.round(a / step) * step
    code = torch.where(v <= 2, 2 * v, torch.where(v <= 4, v + 2, v / 2 + 4)).to(torch.uint8)
    assert torch.equal(e2m1.cpu(), code | (torch.signbit(x.cpu()).to(torch.uint8) << 3))


def rounded_fp8(x: Tensor, group: int) -> Tensor:
    """x as E4M3 with a scale per `group` elements of a row."""
    parts = torch.nn.functional.pad(x, (0, -x.shape[1] % group)).unflatten(1, (-1, group))
    scale = parts.abs().amax(-1, keepdim=True) / 448
    return ((parts / scale).to(torch.float8_e4m3fn).float() * scale).flatten(1)[:, : x.shape[1]]


def rounded_nvfp4(x: Tensor) -> Tensor:
    """x as E2M1 with an E4M3 scale per 16 elements and a float32 scale per row."""
    over_all = x.abs().amax(1, keepdim=True) / 2688
    parts = x.unflatten(1, (-1, 16))
    scale = (parts.abs().amax(-1) / (6 * over_all)).clamp(2**-9, 448).to(torch.float8_e4m3fn).float() * over_all
    a = (parts / scale.unsqueeze(-1)).abs().clamp(max=6)
    step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))
    return (torch.round(a / step) * step * parts.sign() * scale.unsqueeze(-1)).flatten(1)


@pytest.mark.parametrize(
    ("form", "k"),
    [
        ("fp8-row", 160),
        ("fp8-tensor", 64),
        ("fp8-block", 192),
        pytest.param("fp4g16", 96, marks=pytest.mark.slow),  # 20 s in the interpreter
    ],
)
def test_rounded_activations(form: str, k: int, device: torch.device) -> None:
    weight, bias = make(form, 70, k), torch.randn(70)
    name = "triton_nvfp4_w4a4" if form == "fp4g16" else "triton_fp8_w8a8"
    prepared = IMPLS[name].prepare(on(device, weight))
    x = torch.randn(18, k).bfloat16()
    y = IMPLS[name].run(x.to(device), prepared, bias.to(device))
    round_x = rounded_nvfp4 if form == "fp4g16" else partial(rounded_fp8, group=128 if form == "fp8-block" else k)
    expected = round_x(x.float()).double() @ dequantize(weight).double().t() + bias
    assert error(y, expected) < CLOSE
    assert error(y, exact_product(x, weight) + bias) > 1.5 * error(y, expected), "x was not rounded"
    few = IMPLS[name].run(x[:2].to(device), prepared, bias.to(device))
    assert error(few, exact_product(x[:2], weight) + bias) < CLOSE, "few rows stay exact"


def test_torch_multiplies_rounded_activations_the_same(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tuner compares both, on values of its own, and only where torch's applies."""
    weight, bias = make("fp8-row", 64, 160), torch.randn(64).to(device)
    prepared = IMPLS["triton_fp8_w8a8"].prepare(on(device, weight))
    x = torch.randn(18, 160).bfloat16().to(device)
    own, other = (narrow.narrow_product(x, prepared, bias, choice) for choice in (narrow.OWN, narrow.LIBRARY))
    assert error(other, own.double()) < CLOSE
    trial = narrow._trial(32, x, prepared)
    first, second = (trial(choice)() for choice in (narrow.OWN, narrow.LIBRARY))
    assert first.shape == (32, 64) and first.isfinite().all() and compare(second, first, AGREEMENT) == ""
    own_tuner = Tuner()
    monkeypatch.setattr(narrow, "tuner", lambda device: own_tuner)
    monkeypatch.setattr(narrow, "card_of", lambda device: Card(90, 132))
    on_card: Any = SimpleNamespace(shape=x.shape, device=torch.device("cuda"), dtype=torch.bfloat16)
    assert narrow._picked(on_card, prepared) == narrow.OWN
    assert [shape.key for shape in own_tuner.waiting] == [(64, 160, 32)]
    half: Any = SimpleNamespace(shape=x.shape, device=torch.device("cuda"), dtype=torch.float16)
    for given, kept in ((half, prepared), (on_card, IMPLS["triton_fp8_w8a8"].prepare(make("fp8-block", 64, 192)))):
        assert narrow._picked(given, kept) == narrow.OWN and len(own_tuner.waiting) == 1


def test_columns_that_end_within_32_are_not_rounded(device: torch.device) -> None:
    """Codes of such a weight are padded and its scales are not."""
    weight, impl = make("fp4g16", 70, 48), IMPLS["triton_nvfp4_w4a4"]
    x = torch.randn(18, 48).bfloat16()
    y = impl.run(x.to(device), impl.prepare(on(device, weight)))
    assert error(y, exact_product(x, weight)) < CLOSE


# ---- segments


def part_of(device: torch.device, weight: Weight, impl: Impl, bias: Tensor | None = None) -> Linear:
    bias = None if bias is None else bias.to(device)
    return Linear((LinearPart(impl, impl.prepare(on(device, weight)), bias, weight.shape),))


def attention_weights(device: torch.device, impl: Impl, **more: Any) -> AttentionWeights:
    out = part_of(device, make("int4g-32", 32, 64), impl, torch.randn(32))
    return AttentionWeights(Norm(torch.rand(32).to(device), 1e-5), out, out, 2, 1, 32, 1.0, **more)


def never(*args: object) -> Tensor:
    raise AssertionError("the composed segment was called")


@pytest.mark.parametrize("tokens", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_fused_segments(tokens: int, device: torch.device) -> None:
    impl, post = IMPLS["triton"], Norm(torch.rand(32).to(device), 1e-5)
    x, attended = (torch.randn(tokens, width).bfloat16().to(device) for width in (32, 64))
    gate_up = part_of(device, make("fp4g16", 32, 32), impl)
    down = part_of(device, make("fp8-row", 32, 16), impl, torch.randn(32))
    vocab = part_of(device, make("int8-row", 10, 32), impl)
    first = Norm(torch.rand(32).to(device), 1e-5, torch.randn(32).to(device))  # a LayerNorm, as Command R has
    grouped = Norm(torch.rand(32).to(device), 1e-5, groups=4)
    for extra, activation, softcap, norm in (
        (None, "silu", None, first), (post, "gelu_tanh", 2.0, post), (None, "silu", None, grouped)
    ):  # fmt: skip
        weights = attention_weights(device, impl, post_norm=extra)
        found = segments.attn_out(never, attended, x.clone(), weights)
        assert error(found, COMPOSED["attn_out"](attended, x.clone(), weights).double().cpu()) < CLOSE
        mlp, into = MlpWeights(norm, gate_up, down, activation, extra, scale=0.7 if extra else 1.0), x.clone()
        found = segments.mlp(never, into, mlp)
        assert found.data_ptr() == into.data_ptr()
        assert error(found, COMPOSED["mlp"](x.clone(), mlp).double().cpu()) < CLOSE
        logits = segments.head(COMPOSED["head"], x, HeadWeights(norm, vocab, softcap))
        assert logits.dtype is torch.float32
        assert error(logits, COMPOSED["head"](x, HeadWeights(norm, vocab, softcap)).double().cpu()) < CLOSE


@pytest.mark.parametrize(("activation", "scale", "tokens"), [("gelu_tanh", 0.7, 3), ("silu", 1.0, 1)])
def test_per_layer_inputs(activation: str, scale: float, tokens: int, device: torch.device) -> None:
    impl = IMPLS["triton"]
    gate = part_of(device, make("int8-row", 16, 32), impl, torch.randn(16))
    weights = InputWeights(
        gate, part_of(device, make("fp8-row", 32, 16), impl), activation, Norm(torch.rand(32).to(device), 1e-5), scale
    )
    x, given = (torch.randn(*shape).bfloat16().to(device) for shape in ((tokens, 32), (tokens, 4, 16)))
    into = x.clone()
    found = segments.layer_input(never, into, weights, given[:, 2])
    assert found.data_ptr() == into.data_ptr()
    assert error(found, COMPOSED["layer_input"](x.clone(), weights, given[:, 2]).double().cpu()) < CLOSE
    centred = replace(weights, norm=replace(weights.norm, bias=weights.norm.weight))
    assert segments.layer_input(lambda *_: "composed", x, centred, given[:, 2]) == "composed"


def test_what_does_not_fit_is_composed(device: torch.device) -> None:
    """Many rows, two parts, an implementation that keeps one order of sums: the composed segment is called."""
    called: list[str] = []

    def note(*args: Any) -> str:
        called.append("composed")
        return "composed"

    x = torch.randn(3, 64).bfloat16().to(device)
    norm = Norm(torch.rand(64).to(device), 1e-5)
    fused, fixed = IMPLS["triton"], IMPLS["triton_invariant"]
    single = part_of(device, make("int4g-32", 64, 64), fused)
    double = Linear(single.parts * 2)
    assert segments.mlp(note, x.repeat(6, 1), MlpWeights(norm, single, single, "silu")) == "composed"
    assert segments.mlp(note, x, MlpWeights(norm, double, single, "silu")) == "composed"
    assert segments.head(note, x, HeadWeights(norm, part_of(device, make("int4g-32", 64, 64), fixed))) == "composed"
    attended = torch.randn(3, 64).bfloat16().to(device)
    assert segments.attn_out(note, attended, x[:, :32].contiguous(), attention_weights(device, fixed)) == "composed"
    assert len(called) == 4


def test_segments_are_registered() -> None:
    for name in ("attn_in", "attn_out", "mlp", "head"):
        facts = OpFacts(device="cuda", capability=90, dtype="bfloat16", head_dim=128)
        assert choose(implementations(name), facts).impl.name == "triton"


def test_narrow_kernels_are_described_for_cards_that_have_the_instructions() -> None:
    cards = (86, 89, 90, 100, 120)
    counts = {
        card: [spec.impl for spec in all_specs(card) if spec.impl != "triton" and not spec.reason] for card in cards
    }
    assert counts[86] == []
    assert "triton_fp8_w8a8" in counts[89] and "triton_nvfp4_w4a4" not in counts[90]
    assert "triton_nvfp4_w4a4" in counts[100] and "triton_nvfp4_w4a4" in counts[120]

"""Products of every weight form, for one row and for several, against the canonical weight's own decoder."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from localllm.kernels.dequant import dequantize
from localllm.kernels.layer_weights import Norm
from localllm.kernels.triton import aot_cases, product_tiles
from localllm.kernels.triton import product as products
from localllm.kernels.triton.cards import AMD, CLASSES, Card
from localllm.kernels.triton.launch import recording
from localllm.kernels.triton.layout import prepare
from localllm.kernels.triton.product import Extras, dequantized, fusable, launch_gemm, product
from localllm.kernels.verify.trial import SEGMENT_STEPS, compare
from localllm.kernels.verify.tuning import AGREEMENT, Tuner
from localllm.kernels.weight import Weight
from localllm.plan import memory

from .weights import FORMS, SMALLEST_K, error, exact_product, make, on

ROUNDING = {torch.float16: 1.5e-3, torch.bfloat16: 8e-3}
"""of `error`: outputs and group-scaled weights rounded to the type; the interpreter cuts bfloat16 off"""
EPS = 1e-5


def smallest_k(form: str) -> int:
    return SMALLEST_K.get(form, SMALLEST_K.get(form.partition("-")[0], 64))


QUICK = (
    "dense-bf16",
    "int4g-zeros-64",
    "fp4g16",
    "gguf-Q6_K",
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("form", [*QUICK, *(pytest.param(f, marks=pytest.mark.slow) for f in FORMS if f not in QUICK)])
def test_one_row(form: str, device: torch.device) -> None:
    """Also into float32, where nothing but the order of the sum is left, or what 16-bit fixed point cuts off of x."""
    weight = make(form, 5, smallest_k(form))
    prepared = prepare(on(device, weight))
    x = torch.randn(1, weight.shape[1]).half().to(device)
    exact = exact_product(x, weight)
    assert error(product(x, prepared), exact) < ROUNDING[torch.float16]
    wide = product(x, prepared, out=torch.empty(1, 5, device=device))
    assert wide.dtype is torch.float32 and error(wide, exact) < 5e-5
    choice = {"rows": 2, "chunks": 32, "warps": 1}
    products.launch_gemv(x, prepared, wide, products.PLAIN, choice)
    assert error(wide, exact) < 1e-6


@pytest.mark.parametrize(
    ("form", "k"),
    [("dense-bf16", 600), ("int4g-whole", 2088)]
    + [pytest.param(*each, marks=pytest.mark.slow) for each in (("fp4g16", 2080), ("int8-row", 1100))],
)
def test_rows_longer_than_a_program_holds(form: str, k: int, device: torch.device) -> None:
    """Three rounds of the loop or more, the last one part empty, for one row and for several."""
    weight = make(form, 3, k)
    prepared = prepare(on(device, weight))
    for tokens in (1, 2):
        x = torch.randn(tokens, k).half().to(device)
        if tokens == 1:
            choice = {"rows": 2, "chunks": 32, "warps": 1}
            out = torch.empty(1, 3, dtype=torch.float16, device=device)
            products.launch_gemv(x, prepared, out, products.PLAIN, choice)
        else:
            out = product(x, prepared)
        assert error(out, exact_product(x, weight)) < ROUNDING[torch.float16]


FEW = ["int4g-32", "fp4g16", "int4g-zeros-64", "gguf-Q4_K", "fp4g32", "int4g-whole", "dense-bf16"]


@pytest.mark.parametrize("form", [FEW[0], *(pytest.param(form, marks=pytest.mark.slow) for form in FEW[1:])])
@pytest.mark.parametrize("tokens", [3, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 4))])
def test_few_rows_share_the_codes(form: str, tokens: int, device: torch.device) -> None:
    """By both kernels that are candidates, with and without a norm and a gate; 1,152 columns: several rounds."""
    weight = make(form, 10, 1280 if form == "gguf-Q4_K" else 1152)
    prepared, gain = prepare(on(device, weight)), torch.rand(weight.shape[1])
    fixed = product_tiles.is_fixed(prepared.code, prepared.run, Card(90, 8))
    assert product_tiles.few_rows(prepared.code, fixed) == (2 if form == "dense-bf16" else 4)
    tiles = product_tiles.few_tiles(*prepared.shape, prepared.code, Card(90, 8), True, fixed, prepared.group)
    x = (torch.randn(tokens, weight.shape[1]) * 3).half()
    wide = x.double()
    normed = exact_product(wide / (wide.square().mean(1, keepdim=True) + EPS).sqrt() * gain, weight)
    gate, up = normed.chunk(2, 1)
    for extras, exact in (
        (products.PLAIN, exact_product(x, weight)),
        (Extras(None, Norm(gain.to(device), EPS), None, "silu"), F.silu(gate) * up),
    ):
        for tile in (tiles[0], next(tile for tile in tiles if "chunks" not in tile)):
            out = torch.empty(exact.shape, dtype=torch.float16, device=device)
            products._run(x.to(device), prepared, out, extras, tile)
            assert error(out, exact) < ROUNDING[torch.float16], tile


def test_which_kernel_multiplies_few_rows() -> None:
    """The one that was faster on an H200 there; elsewhere it is for the tuner to find out."""
    forms = {form.name: form for form in aot_cases.FORMS}
    for name, tokens, card, kernels in (
        ("int4 g128", 4, Card(90, 132), ["digits_kernel", "gemv_kernel"]),
        ("int4 g128", 5, Card(90, 132), ["gemm_kernel"]),
        ("int4 g128", 3, Card(120, 170), ["gemm_kernel"]),
        ("bf16", 2, Card(90, 132), ["gemv_kernel"]),
        ("bf16", 3, Card(90, 132), ["gemm_kernel"]),
        ("int8 g32", 2, Card(90, 132), ["gemm_kernel"]),
    ):
        x = torch.empty(tokens, 4096, dtype=torch.bfloat16, device="meta")
        with recording(card) as launches:
            product(x, aot_cases.described(forms[name], 4096, 4096))
        assert [one.kernel.__name__ for one in launches] == kernels, (name, tokens)
        assert kernels[-1] == "gemm_kernel" or launches[-1].constexprs["TOKENS"] == tokens
    for card in (Card(90, 132), Card(120, 170)):
        tiles = product_tiles.few_tiles(4096, 4096, "int4", card, False, True, 128)
        assert len(tiles) <= product_tiles.MOST and {"chunks" in tile for tile in tiles} == {True, False}


@pytest.mark.parametrize("form", FORMS)
def test_several_rows(form: str, device: torch.device) -> None:
    weight = make(form, 17, smallest_k(form))
    prepared = prepare(on(device, weight))
    x = torch.randn(5, weight.shape[1]).half().to(device)
    assert error(product(x, prepared), exact_product(x, weight)) < ROUNDING[torch.float16]


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(
    ("n", "k"), [(1, 64), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((21, 96), (130, 320)))]
)
def test_shapes(n: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    for form in ("int4g-32", "dense-bf16"):
        weight, bias = make(form, n, k), torch.randn(n)
        prepared = prepare(on(device, weight))
        for tokens in (1, 2, 17):
            x = torch.randn(tokens, k).to(device, dtype)
            y = product(x, prepared, Extras(bias.to(device)))
            assert y.shape == (tokens, n) and y.dtype is dtype
            assert error(y, exact_product(x, weight) + bias) < ROUNDING[dtype]
        assert product(x[:0], prepared).shape == (0, n)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("form", ["dense-bf16", "dense-f16", "int4g-whole", "int8-row"])
def test_columns_that_end_within_a_chunk(form: str, device: torch.device) -> None:
    weight = make(form, 6, 88)
    prepared = prepare(on(device, weight))
    for tokens in (1, 3):
        x = torch.randn(tokens, 88).half().to(device)
        assert error(product(x, prepared), exact_product(x, weight)) < ROUNDING[torch.float16]


def test_long_prompts_go_slab_by_slab(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "SLAB_BYTES", 256 * 64 * 2)
    heights, asked = products.slab_rows, []
    monkeypatch.setattr(products, "slab_rows", lambda *given: asked.append(given) or heights(*given))
    for form in ("int4g-32", "dense-bf16"):
        weight, bias = make(form, 259, 64), torch.randn(259)
        x = torch.randn(products.SLAB_TOKENS, 64).bfloat16().to(device)
        y = product(x, prepare(on(device, weight)), Extras(bias.to(device)))
        assert error(y, exact_product(x, weight) + bias) < ROUNDING[torch.bfloat16]
    assert [given[:3] for given in asked] == [(259, products.SLAB_TOKENS, 128)], "bfloat16 weights need no slab"


@pytest.mark.parametrize(
    ("n", "k", "tokens", "num_sms", "rows"),
    [
        (
            4096,
            12288,
            2048,
            132,
            2048,
        ),  # 128 tiles on 132 multiprocessors, twice
        (24576, 4096, 2048, 132, 4096),
        (24576, 4096, 2048, 170, 2560),
        (4096, 12288, 300, 132, 2048),
        (100, 4096, 2048, 132, 256),
        (1, 1 << 20, 2048, 132, 256),
    ],
)
def test_slabs_are_few_and_fill_waves(n: int, k: int, tokens: int, num_sms: int, rows: int) -> None:
    assert products.slab_rows(n, tokens, 2 * k, num_sms) == rows
    assert rows == 256 or rows * 2 * k <= products.SLAB_BYTES
    tiles = [-(-tokens // 128) * -(-min(rows, n - first) // 256) for first in range(0, n, rows)]
    ideal = -(-tokens // 128) * -(-n // 256) / num_sms
    assert sum(-(-count // num_sms) for count in tiles) < 1.1 * ideal + len(tiles)


def test_a_slab_is_no_larger_than_what_the_plan_reserves() -> None:
    assert products.SLAB_BYTES <= memory.SPLIT_PART_BYTES


@pytest.mark.parametrize("form", FORMS)
def test_dense_rows(form: str, device: torch.device) -> None:
    """The slab's values are those of the weight, bit for bit."""
    weight = make(form, 10, smallest_k(form))
    prepared = prepare(on(device, weight))
    slab = dequantized(prepared, slice(3, 9), torch.float32)
    assert torch.equal(slab.cpu(), dequantize(weight)[3:9])


@pytest.mark.parametrize("tokens", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "form",
    ["dense-bf16", *(pytest.param(f, marks=pytest.mark.slow) for f in ("int4g-zeros-64", "fp4g16", "gguf-Q6_K"))],
)
def test_norm_gate_and_residual(form: str, tokens: int, device: torch.device) -> None:
    n, k = 12, smallest_k(form)
    weight, gain = make(form, n, k), torch.rand(k)
    prepared = prepare(on(device, weight))
    x = (torch.randn(tokens, k) * 3).bfloat16().to(device)
    assert fusable(x, prepared)
    norm = Norm(gain.to(device), EPS)
    wide = x.double().cpu()
    normed = wide / (wide.square().mean(1, keepdim=True) + EPS).sqrt() * gain
    exact = normed @ dequantize(weight).double().t()
    residual = torch.randn(tokens, n).bfloat16().to(device)
    expected = exact + residual.double().cpu()
    assert error(product(x, prepared, Extras(None, norm, residual)), expected) < ROUNDING[torch.bfloat16]
    product(x, prepared, Extras(None, norm, residual), out=residual)
    assert error(residual, expected) < ROUNDING[torch.bfloat16]
    gate, up = exact.chunk(2, 1)
    for name, act in (("silu", F.silu(gate)), ("gelu_tanh", F.gelu(gate, approximate="tanh"))):
        y = product(x, prepared, Extras(None, norm, gate=name))
        assert y.shape == (tokens, n // 2) and error(y, act * up) < 2 * ROUNDING[torch.bfloat16]


@pytest.mark.slow
def test_input_order_and_scale(device: torch.device) -> None:
    weight = make("int4g-32", 9, 64)._replace(perm=torch.randperm(64).int(), pre_scale=torch.rand(64) + 0.5)
    prepared = prepare(on(device, weight))
    for tokens in (1, 4):
        x = torch.randn(tokens, 64).half().to(device)
        assert not fusable(x, prepared)
        assert error(product(x, prepared), exact_product(x, weight)) < ROUNDING[torch.float16]


def test_float32_weights_keep_their_bits(device: torch.device) -> None:
    weight = make("dense-f32", 9, 64)
    x = torch.randn(3, 64).bfloat16().to(device)
    y = product(x, prepare(on(device, weight)))
    assert torch.equal(y.cpu(), F.linear(x.float(), weight.qweight.to(device)).bfloat16().cpu())


def test_float32_weights_of_bfloat16_models_are_stored_as_those(device: torch.device) -> None:
    """As routers in GGUF files: `gemv` multiplies them."""
    rounded = make("dense-f32", 9, 60).qweight.bfloat16().float()
    weight = Weight("dense", (9, 60), rounded)
    prepared = prepare(on(device, weight))
    x = torch.randn(1, 60).half().to(device)
    assert prepared.low.dtype is torch.int16 and fusable(x, prepared)
    assert torch.equal(dequantized(prepared, slice(0, 9), torch.float32).cpu(), rounded)
    assert error(product(x, prepared), exact_product(x, weight)) < ROUNDING[torch.float16]
    assert torch.equal(prepare(Weight("dense", (9, 60), rounded / 3)).low, rounded / 3)


@pytest.mark.parametrize(
    ("first", "second", "tokens"),
    [
        ("int4g-32", "int4g-32", 1),
        *(pytest.param("int4g-32", second, 3, marks=pytest.mark.slow) for second in ("int4g-32", "fp4g16")),
        *(pytest.param("dense-f16", "fp4g32", tokens, marks=pytest.mark.slow) for tokens in (1, 3)),
        pytest.param("fp4g16", "int4g-128", 1, marks=pytest.mark.slow),
    ],
)
def test_a_product_converts_its_outputs_for_the_next(
    first: str, second: str, tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits as two products and a conversion between them; counters are zero afterwards."""
    width = 128 if second.endswith("128") else 64
    up, down = (prepare(on(device, make(form, n, k))) for form, n, k in ((first, 2 * width, 64), (second, 12, width)))
    x, residual = torch.randn(tokens, 64).half().to(device), torch.randn(tokens, 12).half().to(device)
    extras, then = (
        Extras(norm=Norm(torch.linspace(0.5, 1.5, 64).to(device), 1e-6), gate="silu"),
        Extras(residual=residual),
    )

    def kernels(**how: Any) -> list[str]:
        return [name for name, _ in launches_of(lambda: products.chained(x, up, extras, down, then, **how))]

    fuses = tokens == 1 or first != "dense-f16"  # three rows of 16-bit weights are no GEMV
    assert ("gemv_digits_kernel" in kernels()) is fuses and "gemv_digits_kernel" not in kernels(apart=True)
    found, hidden, wanted = products.chained(x, up, extras, down, then), product(x, up, extras), residual.clone()
    choice = next(t for t in product_tiles.gemv_tiles(12, width, down.code, Card(90, 8), False, True) if "fixed" in t)
    products.launch_gemv(hidden, down, wanted, then, choice)
    assert torch.equal(found, wanted)
    assert not products.counters(device, products.COUNTERS).any()
    monkeypatch.setattr(products, "COUNTERS", 1)  # too few for two chunks
    assert "gemv_digits_kernel" not in kernels()


@pytest.mark.parametrize("form", ["int4g-128", "fp4g16", "gguf-Q4_K", "dense-bf16"])
def test_a_row_does_not_see_the_others(form: str, device: torch.device) -> None:
    weight = make(form, 20, smallest_k(form))
    prepared = prepare(on(device, weight))
    x = torch.randn(18, weight.shape[1]).half().to(device)
    alone = torch.cat([product(x[i : i + 1], prepared, fixed_order=True) for i in (0, 7, 17)])
    together = product(x, prepared, fixed_order=True)
    assert torch.equal(alone, together[[0, 7, 17]])
    assert torch.equal(together[:5], product(x[:5], prepared, fixed_order=True))


def test_parts_of_k_are_added_by_the_last(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split products give the whole sum, and leave their counters at zero for the next launch."""
    weight = make("int4g-32", 33, 512)
    prepared = prepare(on(device, weight))
    x = torch.randn(3, 512).half().to(device)
    for split in (2, 4):
        out = torch.empty(3, 33, dtype=torch.float16, device=device)
        choice = {"rows": 16, "tokens": 8, "halves": 32, "split": split, "stages": 2, "warps": 1}
        launch_gemm(x, prepared, out, products.PLAIN, choice)
        assert error(out, exact_product(x, weight)) < ROUNDING[torch.float16]
        assert not products.counters(device, products.COUNTERS).any()
    monkeypatch.setattr(products, "COUNTERS", 2)
    with pytest.raises(ValueError, match="a split product has 3 tiles; at most 2"):
        launch_gemm(x, prepared, out, products.PLAIN, choice)


@pytest.mark.parametrize("fixed_order", [False, True])
@pytest.mark.parametrize("form", ["dense-bf16", "int4g-zeros-64"])
def test_rows_of_float32_go_through_a_slab(
    form: str, fixed_order: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A DoRA adapter measures a weight by the identity, 256 rows at a time: of 576 inputs 64 are left."""
    weight = make(form, 20, 64)
    prepared, unit = prepare(on(device, weight)), torch.eye(64, device=device)
    monkeypatch.setattr(products, "interpreting", lambda: False)  # where it is, kernels multiply float32, too
    found = product(unit, prepared, fixed_order=fixed_order)
    assert found.dtype is torch.float32 and error(found, exact_product(unit, weight)) < 1e-6


def test_cublas_is_a_candidate_of_dense_weights(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is fused into the product; it gives what the kernel gives."""
    weight = make("dense-bf16", 20, 64)
    prepared, x = prepare(on(device, weight)), torch.randn(3, 64).bfloat16().to(device)
    offered: list[tuple[Any, ...]] = []

    def last(shape: Any, candidates: Any, trial: Any = None) -> Any:
        offered.append(tuple(candidates))
        return candidates[-1]

    monkeypatch.setattr(products, "tuner", lambda device: SimpleNamespace(pick=last, picked=lambda shape: None))
    assert error(product(x, prepared), exact_product(x, weight)) < ROUNDING[torch.bfloat16]
    product(x, prepared, Extras(residual=torch.zeros(3, 20, dtype=torch.bfloat16, device=device)))
    assert products.CUBLAS in offered[0] and products.CUBLAS not in offered[1]
    assert len(offered[0]) <= product_tiles.MOST
    wide = product(x, prepared, out=torch.empty(3, 20, device=device))  # logits, which cuBLAS would have to round
    assert wide.dtype is torch.float32 and error(wide, exact_product(x, weight)) < 5e-5


@pytest.mark.parametrize(
    "form",
    ["dense-bf16"]
    + [
        pytest.param(form, marks=pytest.mark.slow)
        for form in ("int8-row", "int4g-32", "fp8-row", "gguf-Q4_K", "fp4g16", "fp4g32")
    ],
)
def test_candidates_agree_on_made_up_weights(form: str, device: torch.device) -> None:
    """What the tuner compares is finite, not zero, and the same by every way to compute it."""
    prepared = prepare(on(device, make(form, 16, smallest_k(form))))
    x = torch.zeros(1, prepared.shape[1], dtype=torch.bfloat16, device=device)
    norm = Norm(torch.ones(prepared.shape[1], device=device), EPS)
    for extras in (products.PLAIN, Extras(norm=norm, gate="silu")):
        trial = products._trial(x, prepared, extras)
        fixed = product_tiles.is_fixed(prepared.code, prepared.run, Card(90, 8))
        candidates = product_tiles.gemv_tiles(*prepared.shape, prepared.code, Card(90, 8), bool(extras.gate), fixed)
        ways = (*candidates[:2], {"rows": 2, "chunks": 32, "warps": 1})
        found = [trial(choice)().clone() for choice in (*ways, *[products.CUBLAS][: extras == products.PLAIN])]  # type: ignore[attr-defined]
        assert found[0].isfinite().all() and found[0].abs().max() > 0.1
        assert all(compare(other, found[0], AGREEMENT) == "" for other in found[1:])


def test_wrong_columns_are_refused(device: torch.device) -> None:
    prepared = prepare(on(device, make("int4g-32", 4, 64)))
    with pytest.raises(ValueError, match="takes 64 inputs"):
        product(torch.zeros(1, 32, dtype=torch.float16, device=device), prepared)


def test_candidates_fit_their_cards() -> None:
    """At most eight for every card and shape, all within its shared memory; one that keeps the order of sums."""
    for capability, limit in ((number, card.shared_bytes) for number, card in CLASSES.items() if number < AMD):
        card = Card(capability, 100)
        for n, k in ((1024, 2048), (4096, 4096), (28672, 4096), (151936, 1024), (1, 64)):
            for code in product_tiles.CODES:
                for gated in (False, True):
                    rows = product_tiles.gemv_tiles(n, k, code, card, gated, product_tiles.is_fixed(code, 8, card))
                    assert 0 < len(rows) <= product_tiles.MOST and all(tile["rows"] > gated for tile in rows)
                for tokens in (8, 16, 64, 128) if capability >= 80 else ():
                    tiles = product_tiles.gemm_tiles(n, k, code, tokens, card)
                    assert 0 < len(tiles) < product_tiles.MOST, (code, n, k, tokens)
                    assert {tile["split"] for tile in product_tiles.gemm_tiles(n, k, code, tokens, card, True)} == {1}
                    sizes = [product_tiles._shared(t["rows"], tokens, t["halves"], t["stages"], code) for t in tiles]
                    assert max(sizes) <= limit


def test_gpus_of_one_family_get_the_same_tiles() -> None:
    """A B300 has the tensor memory of a B200, which limits tiles."""
    for code in product_tiles.CODES:
        first, *others = (product_tiles.gemm_tiles(4096, 4096, code, 128, Card(cap, 148)) for cap in (100, 103, 110))
        assert others == [first, first]
    assert [Card(cap, 1).family for cap in (90, 103, 120, 121)] == [90, 100, 120, 121]


def test_codes_of_four_bits_are_multiplied_in_whole_numbers_where_there_are_such_instructions() -> None:
    for code, fixed in (("int4", True), ("e2m1", True), ("int5", False), ("bf16", False)):
        assert product_tiles.is_fixed(code, 8, Card(90, 132)) is fixed
        assert not product_tiles.is_fixed(code, 2, Card(90, 132)) and not product_tiles.is_fixed(code, 8, Card(75, 40))


def test_x_is_prepared_once_where_memory_is_fast() -> None:
    """With its norm, for all programs of the product; elsewhere the product itself reads x, and is one launch."""
    x = torch.empty(1, 4096, dtype=torch.bfloat16, device="meta")
    norm = Norm(torch.empty(4096, device="meta"), EPS)
    form = next(form for form in aot_cases.FORMS if form.name == "int4 g128")
    weight = aot_cases.described(form, 8192, 4096)
    for card, kernels in ((Card(90, 132), ["digits_kernel", "gemv_kernel"]), (Card(120, 170), ["gemv_kernel"])):
        with recording(card) as launches:
            product(x, weight, Extras(norm=norm, gate="silu"))
        assert [one.kernel.__name__ for one in launches] == kernels
        assert [one.constexprs["NORM"] for one in launches] == [True, False][: len(kernels)]
        tiles = product_tiles.gemv_tiles(8192, 4096, "int4", card, True, True)
        assert [tile.get("fixed", 0) for tile in tiles] == (
            [1] * 6 + [0] * 2 if len(kernels) > 1 else [0] * 6 + [1] * 2
        )


def launches_of(call: Any) -> list[tuple[str, dict[str, Any]]]:
    """Kernels that it would start on an H100, with their constants."""
    with recording(Card(90, 132)) as launches:
        call()
    return [(one.kernel.__name__, dict(one.constexprs)) for one in launches]


def test_a_norm_of_several_rows_is_a_launch_of_its_own() -> None:
    """Each program of the product sees all of every row: the norm in there costs more than a launch."""
    form = next(form for form in aot_cases.FORMS if form.name == "e4m3 row")
    weight = aot_cases.described(form, 8192, 4096)
    extras = Extras(norm=Norm(torch.empty(4096, device="meta"), EPS), gate="silu")
    for tokens, kernels in (
        (1, ["gemv_kernel"]),
        (2, ["_norm_rows", "gemm_kernel"]),
        (16, ["_norm_rows", "gemm_kernel"]),
    ):
        x = torch.empty(tokens, 4096, dtype=torch.bfloat16, device="meta")
        assert [name for name, _ in launches_of(lambda x=x: product(x, weight, extras))] == kernels


def test_a_trial_launches_what_will_run() -> None:
    """With the norm, the gate and the residual of the product that asks, by the same candidate."""
    weight = prepare(make("int4g-32", 16, 64))
    x, norm = torch.zeros(1, 64, dtype=torch.bfloat16), Norm(torch.ones(64), EPS)
    choice = {"rows": 2, "chunks": 32, "warps": 1}
    for extras in (Extras(norm=norm, gate="silu"), Extras(residual=torch.zeros(1, 16, dtype=torch.bfloat16))):
        call = products._trial(x, weight, extras)(choice)
        ((_, run),) = launches_of(call)
        wanted = (extras.norm is not None, extras.gate, extras.residual is not None, 2)
        assert (run["NORM"], run["GATE"], run["RESIDUAL"], run["ROWS"]) == wanted
    fixed = choice | {"rows": 4, "fixed": 1}
    for given, kernels in ((False, ["digits_kernel", "gemv_kernel"]), (True, ["gemv_kernel"])):
        assert [name for name, _ in launches_of(products._trial(x, weight, products.PLAIN, given)(fixed))] == kernels


def test_a_card_times_what_it_will_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial gets what the caller adds to the product, and whether x is in fixed point by then."""
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(products, "_trial", lambda *given: asked.append(given))
    weight = prepare(make("int4g-32", 16, 64))
    x: Any = SimpleNamespace(shape=(1, 64), is_meta=False, device=torch.device("cuda"), dtype=torch.bfloat16)
    extras = Extras(norm=Norm(torch.ones(64), EPS), gate="silu")
    for given in (False, True):
        monkeypatch.setattr(products, "tuner", lambda device: Tuner())
        products._picked(x, weight, torch.empty(1, 8), extras, Card(90, 132), given)
        assert asked[-1][1:] == (weight, extras, given)


def test_the_norm_before_a_byte_per_weight_may_be_a_launch_of_its_own(device: torch.device) -> None:
    """The tuner finds out which is faster; the result is that of several rows."""
    tiles = [product_tiles.gemv_tiles(4096, 4096, code, Card(90, 132)) for code in ("e4m3", "int8", "bf16")]
    assert ["apart" in one[1] for one in tiles] == [True, True, False] and not any("apart" in one[0] for one in tiles)
    assert not any("apart" in one for one in product_tiles.gemv_tiles(4096, 4096, "e4m3", Card(90, 132), plain=True))
    weight = prepare(on(device, make("fp8-row", 16, 64)))
    x, norm = torch.randn(1, 64).bfloat16().to(device), Norm(torch.rand(64).to(device), EPS)
    choice = {"rows": 2, "chunks": 32, "warps": 1, "apart": 1}
    call = products._trial(x, weight, Extras(norm=norm))(choice)
    assert [name for name, _ in launches_of(call)] == ["_norm_rows", "gemv_kernel"]
    found = [torch.empty(1, 16, dtype=x.dtype, device=device) for _ in range(2)]
    for out, more in zip(found, ({}, {"apart": 1}), strict=True):
        products._run(x, weight, out, Extras(norm=norm), {"rows": 2, "chunks": 32, "warps": 1} | more)
    assert compare(found[1].float(), found[0].float(), AGREEMENT) == ""


def test_small_int4_weights_are_read_without_converting_x() -> None:
    """On fast memory, unless x has a norm or is converted by the product before."""
    card = Card(90, 132)
    for n, k, code, plain, converts in (
        *((4096, 4096, "int4", True, False), (4096, 4096, "int4", False, True)),
        *((4096, 12288, "int4", True, True), (4096, 4096, "e2m1", True, True)),
    ):
        first, *others = product_tiles.gemv_tiles(n, k, code, card, False, True, plain)
        assert ("fixed" in first) is converts and any(("fixed" in one) is not converts for one in others)


LAUNCHED = """
import torch
from localllm.kernels.triton import aot_cases
from localllm.kernels.triton.cards import Card
from localllm.kernels.triton.launch import recording
from localllm.kernels.triton.narrow import narrow_product
from localllm.kernels.triton.product import product
from localllm.kernels.verify.trial import LINEAR_TOKENS

def kernels(count, form, run):
    with recording(Card(100, 148)) as launches:
        run(torch.empty(count, 4096, dtype=torch.bfloat16, device="meta"), aot_cases.described(form, 4096, 4096))
    return {one.key for one in launches}

for form in aot_cases.FORMS:
    runs = {"e4m3 row": (product, narrow_product), "e2m1 e4m3": (product, narrow_product)}.get(form.name, (product,))
    for run in runs:
        tried = set().union(*(kernels(count, form, run) for count in LINEAR_TOKENS["cuda"]))
        for count in (*range(1, 258), 512, 1000, 2048):
            print(form.name, run.__name__, count, len(kernels(count, form, run) - tried))
"""


@pytest.mark.slow
def test_no_prompt_meets_a_kernel_that_the_self_test_did_not() -> None:
    """Compiling takes seconds: whatever a number of rows needs was launched when the weight was tried."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-P", "-c", LAUNCHED], env=env, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) > 6000 and [line for line in lines if not line.endswith(" 0")] == []


def test_fused_products_are_tried_in_every_class_of_rows() -> None:
    counts = [sum(new for new, _ in step) for step in SEGMENT_STEPS["cuda"]]
    classes = (1, product_tiles.few_rows("int4", True), *product_tiles.TOKEN_CLASSES)
    tried = {next(size for size in classes if count <= size) for count in counts}
    assert tried == {size for size in classes if size <= product_tiles.SMALL_TOKENS}

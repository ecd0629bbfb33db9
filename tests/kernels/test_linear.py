"""Every weight form through every PyTorch implementation of `linear`, against its own numbers in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.kernels import Impl, LinearFacts, Weight, choose
from localllm.kernels.dense_linear import REFERENCE, DenseWeight, _next_tile
from localllm.kernels.dequant import dequantize, dequantize_rows
from localllm.kernels.gguf_blocks import BLOCK_TYPES
from localllm.kernels.int4pack import Int4Pack, _product
from localllm.kernels.table import PLAIN, implementations

IMPLS = PLAIN["linear"]

FORMS = [
    *("dense-f32", "dense-bf16", "dense-f16"),
    *("int4g", "int4g-zeros", "int4g-mins", "int8-row", "int8-group"),
    *("fp4g16", "fp4g32", "fp8-tensor", "fp8-row", "fp8-block", "fp8mx"),
    *("gguf-Q4_K", "gguf-Q6_K", "gguf-Q5_0"),
]
TOLERANCE = {"torch_int4pack": 2e-3, "torch_dense_bf16": 4e-3}
"""Of `error`, for float32 activations; 1e-6 for the others."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _gguf(block_type: str, n: int, k: int) -> Weight:
    layout = BLOCK_TYPES[block_type]
    blocks = torch.randint(0, 256, (n, k // layout.elems, layout.nbytes), dtype=torch.uint8)
    for offset in layout.scale_offsets:
        scale = (torch.rand(n, k // layout.elems, 1) * 0.01).half()
        blocks[:, :, offset : offset + 2] = scale.view(torch.uint8)
    return Weight("gguf", (n, k), blocks.flatten(1), group_size=layout.elems, block_type=block_type)


def make(form: str, n: int, k: int, group: int = 32) -> Weight:
    """A random weight of a form; numbers of size 0.1."""
    kind, _, variant = form.partition("-")
    nibbles = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scales = torch.rand(n, k // group) * 0.02 + 0.001
    e4m3 = (torch.randn(n, k) * 20).clamp(-448, 448).to(torch.float8_e4m3fn)
    e8m0 = torch.randint(118, 124, (n, k // 32), dtype=torch.uint8)
    if kind == "dense":
        dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[variant]
        return Weight("dense", (n, k), (torch.randn(n, k) * 0.1).to(dtype))
    if kind == "int4g":
        zeros = torch.randint(0, 17, (n, k // group), dtype=torch.uint8) if variant == "zeros" else None
        mins = (scales * -7.5).half() if variant == "mins" else None
        return Weight("int4g", (n, k), nibbles, scales.half(), zeros=zeros, mins=mins, group_size=group)
    if kind == "int8":
        size = k if variant == "row" else group
        codes = torch.randint(-128, 128, (n, k), dtype=torch.int8)
        return Weight("int8", (n, k), codes, scales[:, : k // size].contiguous() / 16, group_size=size)
    if kind == "fp4g16":
        e4 = (torch.rand(n, k // 16) * 4 + 0.1).to(torch.float8_e4m3fn)
        return Weight("fp4g16", (n, k), nibbles, e4, global_scale=torch.rand(n) * 0.01, group_size=16)
    if kind == "fp4g32":
        return Weight("fp4g32", (n, k), nibbles, e8m0, group_size=32)
    if kind == "fp8mx":
        return Weight("fp8mx", (n, k), e4m3, e8m0 - 5, group_size=32)
    if kind == "fp8":
        shape = {"tensor": (1,), "row": (n, 1), "block": (-(-n // 128), -(-k // 128))}[variant]
        return Weight("fp8", (n, k), e4m3, torch.rand(shape) * 0.01 + 0.001)
    return _gguf(variant, n, k)


def facts(weight: Weight, **more: object) -> LinearFacts:
    return LinearFacts(weight.form, weight.shape, weight.group_size, weight.block_type, **more)  # type: ignore[arg-type]


def fitting(weight: Weight) -> list[Impl]:
    """Whatever takes this weight under some facts."""
    settings = [
        facts(weight, dtype=dtype, deterministic=deterministic)
        for dtype in ("float32", "bfloat16")
        for deterministic in (True, False)
    ]
    return [impl for impl in IMPLS if any(impl.fits(f) is None for f in settings)]


def unpacked(prepared: Weight | DenseWeight | Int4Pack, weight: Weight) -> Tensor:
    """float32 [N, K]: the stored numbers that a prepared weight still holds."""
    if isinstance(prepared, Int4Pack):
        n, k = weight.shape
        plain = torch.tensor([1.0, 0.0]).expand(k // prepared.group_size, n, 2).contiguous().bfloat16()
        codes = (_product(torch.eye(k).bfloat16(), prepared, plain).t() + 8).to(torch.uint8)
        return dequantize(weight._replace(qweight=codes[:, 0::2] | (codes[:, 1::2] << 4)))
    if isinstance(prepared, DenseWeight):
        matrix = prepared.matrix.to_dense() if prepared.packed else prepared.matrix
        return dequantize(Weight("dense", weight.shape, matrix, perm=prepared.perm, pre_scale=prepared.pre_scale))
    return dequantize(prepared)


def error(y: Tensor, x: Tensor, weight: Weight, bias: Tensor | None = None) -> float:
    """How far y is from the float64 product, relative to the size of what was summed."""
    w = dequantize(weight).double()
    reference = x.double() @ w.t() + (0 if bias is None else bias.double())
    return float((y.double() - reference).norm() / (x.double().norm(dim=1, keepdim=True) * w.norm(dim=1)).norm())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "k"), [(64, 256), (1, 256), (130, 512)])
def test_every_form_through_every_implementation(form: str, n: int, k: int) -> None:
    weight, bias = make(form, n, k), torch.randn(n)
    impls = fitting(weight)
    assert REFERENCE in impls
    for impl in impls:
        prepared = impl.prepare(weight)
        assert torch.equal(unpacked(prepared, weight), dequantize(weight)), impl.name
        assert prepared.nbytes > 0
        for rows in (1, 3, 17):
            x = torch.randn(rows, k)
            tolerance = TOLERANCE.get(impl.name, 1e-6)
            assert error(impl.run(x, prepared, None), x, weight) < tolerance, impl.name
            assert error(impl.run(x, prepared, bias), x, weight, bias) < tolerance, impl.name


@pytest.mark.parametrize(("n", "k"), [(1, 32), (5, 96), (33, 160), (577, 32), (64, 2048)])
def test_odd_shapes(n: int, k: int) -> None:
    for form in ("dense-f32", "dense-bf16", "int4g-mins", "int8-group", "fp4g16", "fp8-block"):
        weight = make(form, n, k)
        x = torch.randn(7, k)
        for impl in fitting(weight):
            assert error(impl.run(x, impl.prepare(weight), None), x, weight) < TOLERANCE.get(impl.name, 1e-6)


def test_columns_are_scaled_then_gathered() -> None:
    for form in ("dense-f32", "int4g-zeros", "int8-group"):
        plain = make(form, 64, 128)
        perm, factor = torch.randperm(128).int(), torch.rand(128) + 0.5
        weight = plain._replace(perm=perm, pre_scale=factor)
        x = torch.randn(5, 128)
        gathered = (x * factor)[:, perm]
        for impl in fitting(weight):
            prepared = impl.prepare(weight)
            assert error(impl.run(x, prepared, None), gathered, plain) < TOLERANCE.get(impl.name, 1e-6)
            assert torch.equal(unpacked(prepared, weight), dequantize(weight))
        assert error(x @ dequantize(weight).t(), gathered, plain) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_result_has_the_dtype_of_x(dtype: torch.dtype) -> None:
    for form in ("dense-f32", "dense-bf16", "int4g-mins", "gguf-Q4_K"):
        weight, bias = make(form, 64, 256), torch.randn(64).to(dtype)
        x = torch.randn(3, 256).to(dtype)
        for impl in fitting(weight):
            y = impl.run(x, impl.prepare(weight), bias)
            assert y.dtype == dtype
            assert error(y, x, weight, bias) < 1e-2


BATCH_INVARIANT = ["torch_int4pack", "torch_dense_bf16", "torch_dense_tiled", "torch_dequant"]
SHAPES = [(576, 576), (192, 576), (1536, 576), (576, 1536), (640, 2048), (64, 32)]


def invariant(name: str, n: int, k: int, counts: tuple[int, ...]) -> None:
    """A row's result is the same bits in every batch, at every place of it."""
    impl = next(impl for impl in IMPLS if impl.name == name)
    weight = make("dense-bf16" if name == "torch_dense_bf16" else "int4g-mins", n, k)
    prepared, bias = impl.prepare(weight), torch.randn(n)
    x = torch.randn(300, k).to(torch.bfloat16 if name == "torch_dense_bf16" else torch.float32)
    whole = impl.run(x, prepared, bias)
    for rows in counts:
        assert torch.equal(impl.run(x[:rows], prepared, bias), whole[:rows]), rows
    for start, stop in [(299, 300), (7, 60), (100, 257)]:
        assert torch.equal(impl.run(x[start:stop], prepared, bias), whole[start:stop]), (start, stop)
    order = torch.randperm(300)
    assert torch.equal(impl.run(x[order], prepared, bias), whole[order])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", BATCH_INVARIANT)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_does_not_depend_on_its_company(name: str, n: int, k: int) -> None:
    invariant(name, n, k, (1, 2, 3, 5, 8, 16, 17, 33, 64))


@pytest.mark.parametrize("name", BATCH_INVARIANT)
def test_a_row_does_not_depend_on_its_company_with_two_threads(name: str) -> None:
    torch.set_num_threads(2)
    invariant(name, 192, 1536, (1, 2, 7, 20))


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", BATCH_INVARIANT)
@pytest.mark.parametrize(("n", "k"), [*SHAPES, (8192, 576), (4096, 4096), (2048, 6144)])
def test_a_row_does_not_depend_on_any_company(name: str, n: int, k: int, threads: int) -> None:
    torch.set_num_threads(threads)
    # The reference decodes the weight on every call: fewer batches say as much.
    invariant(name, n, k, (1, 2, 15, 17, 64) if name == REFERENCE.name else tuple(range(1, 65)))


def test_no_rows() -> None:
    for form in ("dense-f32", "int4g", "gguf-Q4_K"):
        weight = make(form, 64, 256)
        for impl in fitting(weight):
            assert impl.run(torch.empty(0, 256), impl.prepare(weight), None).shape == (0, 64)


@pytest.mark.parametrize(
    ("form", "more", "name"),
    [
        ("int4g", {}, "torch_int4pack"),
        ("int4g", {"exact": True}, "torch_dense_tiled"),
        ("int4g", {"exact": True, "deterministic": False}, "torch_dense"),
        ("dense-bf16", {}, "torch_dense_tiled"),
        ("dense-bf16", {"dtype": "bfloat16"}, "torch_dense_bf16"),
        ("gguf-Q4_K", {"dtype": "bfloat16"}, "torch_dense_tiled"),
    ],
)
def test_preference(form: str, more: dict[str, object], name: str) -> None:
    assert choose(IMPLS, facts(make(form, 64, 256), **more)).impl.name == name


def test_the_last_one_fits_everything_and_reasons_are_given() -> None:
    weight = make("int4g", 30, 64)
    every = frozenset(impl.key for impl in IMPLS[:-1])
    choice = choose(IMPLS, facts(weight), every)
    assert choice.impl is REFERENCE
    assert all(reason == "failed its self-test" for _, reason in choice.passed_over)
    passed = dict(choose(IMPLS, facts(weight)).passed_over)
    assert passed["torch_int4pack"] == "shape 30x64 is not a multiple of 64x32"
    assert passed["torch_dense"] == "sums in an order that depends on the batch"


@pytest.mark.parametrize("tiles", [(1,), (16,), (2, 16, 64), (1, 2, 4, 8, 16, 64, 256)])
def test_tiles_cover_all_rows(tiles: tuple[int, ...]) -> None:
    for rows in (*range(1, 70), *range(240, 280), 511, 699):
        left, padding = rows, 0
        while left > 0:
            size = _next_tile(left, tiles)
            assert size in tiles
            padding += max(0, size - left)
            left -= size
        assert padding < max(rows, tiles[0])


@pytest.mark.parametrize("form", FORMS)
def test_rows_can_be_gathered(form: str) -> None:
    weight = make(form, 300, 256)
    rows = torch.tensor([299, 0, 128, 127, 0])
    whole = dequantize(weight)
    assert torch.equal(dequantize_rows(weight, rows), whole[rows])
    assert torch.equal(dequantize_rows(weight, slice(5, 260)), whole[5:260])


def test_a_weight_of_zeros_proves_nothing() -> None:
    impl = next(impl for impl in IMPLS if impl.name == "torch_dense_tiled")
    assert impl.prepare(Weight("dense", (24, 40), torch.zeros(24, 40))).tiles == (16,)
    tiles = impl.prepare(Weight("dense", (24, 40), torch.randn(24, 40))).tiles
    assert len(tiles) > 1


def test_unknown_forms_and_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown weight form 'int5'"):
        dequantize(Weight("int5", (2, 2), torch.zeros(2, 2)))
    with pytest.raises(ValueError, match="no decoder for GGUF block type Q9"):
        dequantize(Weight("gguf", (2, 2), torch.zeros(2, 2, dtype=torch.uint8), block_type="Q9"))


@pytest.mark.parametrize("form", ["int4g", "int8", "fp8", "fp4g16", "gguf"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_on_a_card_what_stands_in_for_a_kernel_keeps_the_stored_bits(form: str, deterministic: bool) -> None:
    """The plan counts them; a float32 copy would be eight times as large."""
    card: Any = {"device": "cuda", "capability": 90, "dtype": "bfloat16", "deterministic": deterministic}
    facts = LinearFacts(form, (64, 64), 32, "Q4_K", **card)
    impls = implementations("linear")
    chosen = choose(impls, facts, frozenset(impl.key for impl in impls if "triton" in impl.name))
    assert chosen.impl.name == "torch_dequant"
    dense = LinearFacts("dense", (64, 64), **card)
    assert choose(impls, dense, frozenset({"linear:triton", "linear:triton_invariant"})).impl.name == "torch_dense_bf16"

"""Every weight form through the C products, for each instruction set of this machine, against float64."""

from __future__ import annotations

import ctypes
import math
import sys
import threading
from collections.abc import Iterator

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from localllm.kernels import LinearFacts, OpFacts, Weight, choose
from localllm.kernels.cpu import build
from localllm.kernels.cpu.interface import Take
from localllm.kernels.cpu.layout import Arena, Prepared, prepare
from localllm.kernels.cpu.linear import IMPLS, rows, run
from localllm.kernels.layer_weights import Linear, LinearPart, MlpWeights, Norm
from localllm.kernels.table import kernel_table

C_INT8, C_INT16, C_FLOAT32 = IMPLS


def unpack(prepared: Prepared) -> torch.Tensor:
    """All values, float32 [N, K]."""
    return rows(prepared, torch.arange(prepared.n))


TOLERANCE = {"c_int8": 1e-2, "c_int16": 4e-5, "c_float32": 5e-7}
"""Of `error`. Activations of 16 bits per 32 leave 2e-5, of 8 bits 5e-3."""
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
BLOCKS = {  # type: bytes, elements, offsets of float16 numbers
    "Q5_0": (22, 32, (0,)),
    "Q5_1": (24, 32, (0, 2)),
    "Q2_K": (84, 256, (80, 82)),
    "Q3_K": (110, 256, (108,)),
    "Q4_K": (144, 256, (0, 2)),
    "Q5_K": (176, 256, (0, 2)),
    "Q6_K": (210, 256, (208,)),
    "IQ4_NL": (18, 32, (0,)),
    "IQ4_XS": (136, 256, (0,)),
}
FORMS = [
    *(
        "dense-f32",
        "dense-f16",
        "dense-bf16",
        "int4g",
        "int4g-zeros",
        "int4g-mins",
        "int4g-f32",
        "int8-row",
        "int8-group",
    ),
    *(
        "fp4g16",
        "fp4g16-nan",
        "fp4g32",
        "fp4g32-nan",
        "fp8-tensor",
        "fp8-row",
        "fp8-block",
        "fp8-nan",
        "fp8mx",
        "fp8mx-nan",
    ),
    *(f"gguf-{name}" for name in BLOCKS),
]


def make(form: str, n: int, k: int, group: int = 32) -> tuple[Weight, Tensor]:
    """A random weight and its values, computed here."""
    kind, _, variant = form.partition("-")
    if kind == "dense":
        dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[variant]
        matrix = torch.randn(n, k).to(dtype)
        return Weight(kind, (n, k), matrix), matrix.float()
    if kind == "gguf":
        return gguf_weight(variant, n, k)
    if kind == "fp8":
        return fp8_weight(variant, n, k)
    groups = -(-k // group)
    scales = torch.rand(n, groups) * 0.01 + 0.001
    wide = scales.half().float().repeat_interleave(group, 1)[:, :k]
    if kind == "int8":
        codes = torch.randint(-128, 128, (n, k), dtype=torch.int8)
        if variant == "row":
            return Weight(kind, (n, k), codes, scales[:, :1], group_size=k), codes.float() * scales[:, :1]
        return Weight(kind, (n, k), codes, scales.half(), group_size=group), wide * codes.float()
    nibbles = torch.randint(0, 16, (n, k))
    packed = (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).to(torch.uint8)
    if kind == "int4g":
        zeros = torch.randint(0, 17, (n, groups), dtype=torch.uint8) if variant == "zeros" else None
        mins = (torch.randn(n, groups) * 0.05).bfloat16() if variant == "mins" else None
        kept = scales if variant == "f32" else scales.half()
        wide = kept.float().repeat_interleave(group, 1)[:, :k]
        zero = 8 if zeros is None else zeros.int().repeat_interleave(group, 1)[:, :k]
        values = wide * (nibbles - zero).float()
        if mins is not None:
            values = wide * nibbles.float() + mins.float().repeat_interleave(group, 1)[:, :k]
        return Weight(kind, (n, k), packed, kept, zeros=zeros, mins=mins, group_size=group), values
    if kind == "fp4g16":
        e4m3 = (torch.rand(n, k // 16) * 4).to(torch.float8_e4m3fn)
        e4m3.view(torch.uint8)[-1, -1] = 1  # below the normal numbers
        if variant == "nan":
            e4m3.view(torch.uint8)[n // 2, 0] = 0x7F
        alpha = torch.rand(n) * 0.01 + 0.001
        values = E2M1[nibbles] * e4m3.float().repeat_interleave(16, 1) * alpha[:, None]
        return Weight(kind, (n, k), packed, e4m3, global_scale=alpha, group_size=16), values
    e8m0 = torch.randint(118, 124, (n, k // 32), dtype=torch.uint8)
    e8m0[-1, -1], e8m0[0, 0] = 1, 0  # 2^-126 and 2^-127, which is below the normal numbers
    if variant == "nan":
        e8m0[n // 2, 0] = 255
    power = torch.ldexp(torch.where(e8m0 == 255, torch.nan, 1.0), e8m0.int() - 127).repeat_interleave(32, 1)
    if kind == "fp4g32":
        return Weight(kind, (n, k), packed, e8m0, group_size=32), E2M1[nibbles] * power
    codes = e4m3_codes(n, k)
    return Weight("fp8mx", (n, k), codes, e8m0, group_size=32), codes.float() * power


def e4m3_codes(n: int, k: int) -> Tensor:
    codes = torch.randint(0, 256, (n, k), dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x38
    return codes.view(torch.float8_e4m3fn)


def fp8_weight(variant: str, n: int, k: int) -> tuple[Weight, Tensor]:
    codes = e4m3_codes(n, k)
    if variant == "block":
        scales = torch.rand(-(-n // 128), -(-k // 128)) + 0.1
        wide = scales.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        return Weight("fp8", (n, k), codes, scales, group_size=128), codes.float() * wide
    scales = torch.rand(1) + 0.1 if variant == "tensor" else torch.rand(n, 1) + 0.1
    if variant == "nan":
        codes.view(torch.uint8)[n // 2, k // 2] = 0xFF
    return Weight("fp8", (n, k), codes, scales), codes.float() * scales


def gguf_weight(block_type: str, n: int, k: int) -> tuple[Weight, Tensor]:
    size, elements, floats = BLOCKS[block_type]
    data = torch.randint(0, 256, (n, k // elements, size), dtype=torch.uint8)
    for offset in floats:
        data[:, :, offset : offset + 2] = (torch.randn(n, k // elements, 1) * 0.01).half().view(torch.uint8)
    data = data.flatten(1)
    values = gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[block_type])
    return Weight("gguf", (n, k), data, block_type=block_type), torch.from_numpy(np.ascontiguousarray(values))


def error(y: Tensor, x: Tensor, values: Tensor) -> float:
    """Of the products, as a share of the products of the norms (what random signs would give)."""
    wide, exact = x.double(), values.double()
    return float((y - wide @ exact.T).norm() / torch.outer(wide.norm(dim=1), exact.norm(dim=1)).norm())


@pytest.mark.parametrize("form", FORMS)
def test_values_and_products(isa: str, form: str) -> None:
    kind, _, variant = form.partition("-")
    step = BLOCKS[variant][1] if kind == "gguf" else 32
    for n, k in ((1, step), (17, 3 * step), (33, 5 * step)):
        weight, values = make(form, n, k)
        prepared = prepare(weight)
        unpacked = unpack(prepared)
        assert torch.equal(unpacked.nan_to_num(7.0), values.nan_to_num(7.0)), (n, k)
        picked = torch.tensor([n - 1, 0, n // 2])
        assert torch.equal(rows(prepared, picked).nan_to_num(7.0), values[picked].nan_to_num(7.0))
        if variant == "nan":
            assert run(torch.randn(2, k), prepared, takes=Take.FLOATS)[:, n // 2].isnan().all()
            continue
        x = torch.randn(5, k) * torch.rand(5, 1) * 10
        bias = torch.randn(n)
        for impl in IMPLS:
            facts = LinearFacts(weight.form, (n, k), weight.group_size, weight.block_type, activations="int8")
            if impl.fits(facts) is None:
                y = impl.run(x, prepared, None)
                assert error(y, x, values) < TOLERANCE[impl.name], (impl.name, n, k)
                torch.testing.assert_close(impl.run(x, prepared, bias), y + bias)


SUPER = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
"""one float scale for 256 inputs, over integers"""


@pytest.fixture(params=[0, 1], ids=["not AMD", "AMD"])
def vendor(request: pytest.FixtureRequest, isa: str) -> Iterator[None]:
    """What the kernels take this CPU for: some do the same another way on AMD's."""
    flag = ctypes.c_int.in_dll(build.lib(), "ll_amd")
    before, flag.value = flag.value, request.param
    yield
    flag.value = before


@pytest.mark.parametrize(
    "form", ["int4g-mins", "int8-group", "fp4g16", "dense-bf16", *(f"gguf-{block_type}" for block_type in SUPER)]
)
def test_a_row_does_not_depend_on_the_batch_or_the_threads(isa: str, vendor: None, form: str) -> None:
    weight, _ = make(form, 50, 512)
    prepared = prepare(weight)
    x = torch.randn(133, 512)
    try:
        facts = LinearFacts(weight.form, (50, 512), weight.group_size, weight.block_type, activations="int8")
        for impl in (impl for impl in IMPLS if impl.fits(facts) is None):
            build.lib().ll_threads(1)
            whole = impl.run(x, prepared)
            for m in (*range(1, 34), 127, 128, 129):
                build.lib().ll_threads(1 + m % 3)
                assert torch.equal(impl.run(x[:m], prepared), whole[:m]), m
            assert torch.equal(impl.run(x[77:78], prepared), whole[77:78])
    finally:
        build.lib().ll_threads(build.usable_cores())


@pytest.mark.parametrize("block_type", SUPER)
def test_the_largest_codes_and_scales_with_the_largest_inputs(isa: str, vendor: None, block_type: str) -> None:
    """Sums of integers stay within 32 bits."""
    size, _, floats = BLOCKS[block_type]
    n, k = 33, 768
    for codes, scales in ((0, 0), (0xFF, 0xFF), (0, 0x80), (None, 0x80)):  # None: the least and the most
        data = torch.full((n, k // 256, size), codes or 0, dtype=torch.uint8)
        if codes is None:
            data[:] = torch.randint(0, 2, data.shape) * 0xFF
        if block_type == "Q6_K":
            data[:, :, 192:208] = scales
        for offset in floats:
            data[:, :, offset : offset + 2] = torch.tensor([0.01 * (1 + offset)]).half().view(torch.uint8)
        data = data.flatten(1)
        values = torch.from_numpy(gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[block_type]))
        prepared = prepare(Weight("gguf", (n, k), data, block_type=block_type))
        for sign in (1.0, -1.0):
            x = torch.full((133, k), sign)
            x[:, 1] = -sign / 8191  # beside the largest, the smallest that has a code
            x[16:] *= torch.randint(0, 2, (117, k)) * 2 - 1
            exact = x.double() @ values.double().T
            for m in (1, 2, 4, 7, 133):
                y = run(x[:m], prepared)
                torch.testing.assert_close(y[:16].double(), exact[: min(m, 16)], rtol=2e-4, atol=1e-4)
                if values.any():
                    assert error(y, x[:m], values) < 2e-5, m


@pytest.mark.parametrize("code", [-128, 127])
def test_the_widest_codes_with_the_largest_inputs(isa: str, vendor: None, code: int) -> None:
    """Sums of a code and an input stay within 16 bits."""
    n, k = 33, 192
    weight = Weight(
        "int8", (n, k), torch.full((n, k), code, dtype=torch.int8), torch.ones(n, k // 32).half(), group_size=32
    )
    prepared = prepare(weight)
    for sign in (1.0, -1.0):
        x = torch.full((133, k), sign)
        x[:, 1] = -sign
        exact = torch.full((133, n), sign * code * (k - 2), dtype=torch.double)
        for m in (1, 6, 37, 133):
            torch.testing.assert_close(run(x[:m], prepared).double(), exact[:m], rtol=1e-6, atol=0)


@pytest.mark.parametrize("block_type", SUPER)
def test_a_few_large_inputs_cost_little(isa: str, block_type: str) -> None:
    weight, values = gguf_weight(block_type, 40, 2560)
    prepared, x = prepare(weight), torch.randn(5, 2560)
    for most in (3e-4, 1e-3):
        exact = x.double() @ values.double().T
        assert float((run(x, prepared).double() - exact).norm() / exact.norm()) < most
        x[:, ::256] *= 100


@pytest.mark.parametrize("group", [32, 64, 96, 128])
def test_groups_and_inputs_that_end_within_one(isa: str, group: int) -> None:
    for form in ("int4g", "int4g-zeros", "int4g-mins", "int8-group"):
        weight, values = make(form, 19, 224, group)
        prepared = prepare(weight)
        assert torch.equal(unpack(prepared), values)
        x = torch.randn(4, 224)
        assert error(run(x, prepared), x, values) < TOLERANCE["c_int16"]


@pytest.mark.parametrize("form", ["dense-f32", "int8-row", "fp8-row", "fp8-block", "fp4g16"])
def test_inputs_that_are_no_multiple_of_a_block(isa: str, form: str) -> None:
    k = 48 if form == "fp4g16" else 45
    weight, values = make(form, 5, k)
    prepared = prepare(weight)
    assert torch.equal(unpack(prepared), values)
    x = torch.randn(3, k)
    assert error(run(x, prepared), x, values) < TOLERANCE["c_int16"]


def test_order_and_factor_of_inputs(isa: str) -> None:
    weight, values = make("int4g", 20, 128)
    perm, factor = torch.randperm(128), torch.rand(128) + 0.5
    prepared = prepare(weight._replace(perm=perm.int(), pre_scale=factor))
    natural = values[:, torch.argsort(perm)] * factor
    torch.testing.assert_close(unpack(prepared), natural, rtol=1e-6, atol=0)
    x = torch.randn(6, 128)
    for impl in IMPLS:
        if impl.fits(LinearFacts("int4g", (20, 128), 32, activations="int8")) is None:
            assert error(impl.run(x, prepared), x, natural) < TOLERANCE[impl.name]


def test_outliers_zeros_and_numbers_that_are_none(isa: str) -> None:
    weight, values = make("int4g", 16, 96)
    prepared = prepare(weight)
    x = torch.randn(5, 96)
    x[0] = 0.0
    x[1, 40] = 1e4
    x[2] = 1e-35
    x[3, 3] = float("nan")
    x[4, 70] = float("inf")
    y = run(x, prepared)
    assert y[0].abs().max() == 0 and y[2].abs().max() < 1e-30
    assert error(y[1:2], x[1:2], values) < TOLERANCE["c_int16"]
    assert y[3].isnan().all() and not y[4].isfinite().any()


def test_other_layouts_of_x(isa: str) -> None:
    weight, values = make("int8-group", 16, 64)
    prepared = prepare(weight)
    x = torch.randn(64, 7).t()
    assert error(run(x, prepared), x, values) < TOLERANCE["c_int16"]
    half = run(x.bfloat16(), prepared)
    assert half.dtype is torch.bfloat16 and torch.equal(half, run(x.bfloat16().float(), prepared).bfloat16())
    assert run(torch.empty(0, 64), prepared).shape == (0, 16)
    for outside in (-1, 16):
        with pytest.raises(IndexError, match="table of 16"):
            rows(prepared, torch.tensor([0, outside]))
    with pytest.raises(ValueError, match="takes 64 inputs"):
        run(torch.randn(2, 65), prepared)


def test_which_one_is_chosen() -> None:
    names = [
        choose(IMPLS, facts).impl.name
        for facts in (
            LinearFacts("int4g", (16, 64), 32),
            LinearFacts("int4g", (16, 64), 32, exact=True),
            LinearFacts("int4g", (16, 64), 32, exact=True, activations="int8"),
            LinearFacts("gguf", (16, 256), 256, "Q4_K"),
            LinearFacts("dense", (16, 64)),
            LinearFacts("fp8", (16, 64), 128),
        )
    ]
    assert names == ["c_int16", "c_float32", "c_float32", "c_int16", "c_float32", "c_float32"]
    for facts, reason in (
        (LinearFacts("int4g", (16, 64), 32, device="cuda"), "runs on the CPU"),
        (LinearFacts("gguf", (16, 256), 256, "IQ2_XS"), "no CPU layout for IQ2_XS"),
        (LinearFacts("int4g", (16, 64), 16), "a multiple of 32, not 16"),
        (LinearFacts("nf4", (16, 64), 64, activations="int8"), "form nf4"),
    ):
        assert all(reason in (impl.fits(facts) or "") for impl in IMPLS), facts


def test_weights_share_large_pieces_of_memory_and_give_them_back() -> None:
    arena = Arena()
    first, second = arena.take(1000), arena.take(5000)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert first.data_ptr() % 64 == 0 and second.data_ptr() % 64 == 0
    first.fill_(1)
    second.fill_(2)
    assert int(first.sum()) == 1000
    large = arena.take(Arena.SIZE + 1)
    assert large.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    del first, second, large
    assert arena.take(10).untyped_storage().nbytes() == Arena.SIZE


def test_bytes_are_counted() -> None:
    prepared = prepare(make("gguf-Q4_K", 64, 512)[0])
    assert isinstance(prepared, Prepared)
    stored = 64 * 512 * 4.5 / 8
    assert stored <= prepared.nbytes <= stored * 1.05


def test_models_loaded_side_by_side_share_no_byte(isa: str) -> None:
    """Weights are cut from common pieces; the threads of two loads change between any two lines."""
    arena = Arena()
    found: list[list[tuple[int, int]]] = [[], [], []]
    kept = []

    def load(mine: list[tuple[int, int]]) -> None:
        for count in range(1, 400):
            data = arena.take(64 * count % 5000 + 1)
            kept.append(data)
            mine.append((data.data_ptr(), data.data_ptr() + data.numel()))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=load, args=(mine,)) for mine in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    places = sorted(place for mine in found for place in mine)
    assert len(places) == 3 * 399
    assert all(end <= start for (_, end), (start, _) in zip(places, places[1:], strict=False))


@pytest.mark.parametrize("n", [33, 64, 116])
@pytest.mark.parametrize("block_type", ["Q4_K", "Q6_K"])
def test_more_rows_than_one_slab_and_those_that_are_not_finite(isa: str, vendor: None, block_type: str, n: int) -> None:
    """Each row is what it is among a few; NaN and infinities spoil no other."""
    weight, _ = make(f"gguf-{block_type}", n, 512)
    prepared = prepare(weight)
    x = torch.randn(300, 512)
    expected = torch.cat([run(x[i : i + 50], prepared) for i in range(0, 300, 50)])
    assert torch.equal(run(x, prepared), expected)
    bad = torch.tensor([5, 130, 299])
    x[5, 3], x[130, 300], x[299, 0] = math.nan, math.inf, -math.inf
    y = run(x, prepared)
    assert y[bad].isnan().all()
    others = torch.ones(300, dtype=torch.bool).index_fill(0, bad, False)
    assert torch.equal(y[others], expected[others])


def test_gate_and_up_of_many_rows(isa: str, vendor: None) -> None:
    """A tile of each is one product: the same as a few rows at a time."""
    gate_up, down = make("gguf-Q4_K", 128, 256)[0], Weight("dense", (256, 64), torch.randn(256, 64))
    parts = [Linear((LinearPart(i, i.prepare(w), None, w.shape),)) for i, w in ((C_INT16, gate_up), (C_FLOAT32, down))]
    mlp = MlpWeights(Norm(torch.rand(256) + 0.5, 1e-5), *parts, "silu")
    table = kernel_table(OpFacts(num_heads=4, num_kv_heads=2, head_dim=8))
    x = torch.randn(300, 256)
    few = torch.cat([table.mlp(x[i : i + 50].clone(), mlp) for i in range(0, 300, 50)])
    assert torch.equal(table.mlp(x.clone(), mlp), few)

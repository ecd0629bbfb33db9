"""Float weights become quantized ones: as exact as the format allows, readable by us and by compressed-tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.quant import Weight, dequantize, export, multiplied, reordered
from localllm.quant.encode import GROUP_SIZES, Target, e2m1_codes, encode, relative_error

N, K = 136, 256
LINE = {"int4": 0.11, "int4-sym": 0.12, "int8": 0.012, "fp8": 0.03, "fp8-block": 0.03, "nvfp4": 0.11, "mxfp4": 0.13}
KIND = {"fp8": "fp8", "fp8-block": "fp8", "nvfp4": "nvfp4", "mxfp4": "mxfp4"}
CASES = [(name, size) for name, sizes in GROUP_SIZES.items() for size in sizes]
Load = Callable[..., Weight]


def gaussian() -> Tensor:
    return torch.randn(N, K) * torch.logspace(-1, 1, N).unsqueeze(1)


@pytest.mark.parametrize(("name", "size"), CASES)
def test_error_is_that_of_the_format(name: str, size: int) -> None:
    weight = torch.randn(N, K)
    assert relative_error(weight, dequantize(encode(weight, Target(name, size)))) < LINE[name]


@pytest.mark.parametrize("name", [name for name in dict(CASES) if name != "fp8-block"])
def test_rows_change_their_order_without_another_rounding(name: str) -> None:
    weight, order = encode(gaussian(), Target(name)), torch.randperm(N)
    found = reordered(weight, order)
    assert found is not None
    assert torch.equal(dequantize(found), dequantize(weight)[order])


@pytest.mark.parametrize("name", [*dict(CASES), "bf16"])
def test_rows_are_multiplied_where_they_have_scales_of_their_own(name: str) -> None:
    """Within the rounding of the scales, or of values without any."""
    plain = gaussian()
    weight = Weight("dense", (N, K), plain.bfloat16()) if name == "bf16" else encode(plain, Target(name))
    for factors in (torch.linspace(0.1, 3.0, N), torch.full((N,), 0.7)):
        found = multiplied(weight, factors)
        if name == "mxfp4" or (name == "fp8-block" and bool((factors != factors[0]).any())):
            assert found is None  # powers of two; scales that rows share
            continue
        assert found is not None
        wanted = dequantize(weight).float() * factors.unsqueeze(1)
        torch.testing.assert_close(dequantize(found).float(), wanted, rtol=2**-7 if name == "bf16" else 2**-10, atol=0)
    one = Weight("fp8", (N, K), plain.to(torch.float8_e4m3fn), torch.tensor([0.5]))
    for factors, shape in ((torch.linspace(0.1, 3.0, N), (N, 1)), (torch.full((N,), 0.7), (1,))):
        found = multiplied(one, factors)
        assert found is not None and found.scales is not None and found.scales.shape == shape
        torch.testing.assert_close(dequantize(found), dequantize(one) * factors.unsqueeze(1))


@pytest.mark.parametrize("name", [name for name, _ in CASES if name not in ("int8", "fp8", "fp8-block")])
def test_carrying_the_error_on_helps_on_the_inputs_it_was_made_for(name: str) -> None:
    inputs = torch.randn(600, 12) @ torch.randn(12, K) + 0.3 * torch.randn(600, K)
    weight, target = gaussian(), Target(name)

    def lost(encoded: Weight) -> float:
        return float((inputs @ (dequantize(encoded) - weight).T).norm() / (inputs @ weight.T).norm())

    plain, carried = lost(encode(weight, target)), lost(encode(weight, target, hessian=inputs.T @ inputs))
    assert carried < 0.8 * plain


def test_an_input_that_is_always_zero_and_one_hessian_of_zeros() -> None:
    hessian = torch.zeros(K, K)
    weight = gaussian()
    plain = encode(weight, Target("int4"))
    assert torch.equal(dequantize(encode(weight, Target("int4"), hessian=hessian)), dequantize(plain))


def test_e2m1_codes_are_the_nearest_with_ties_to_even() -> None:
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    x = torch.cat([torch.linspace(-7, 7, 2801), values])
    codes = e2m1_codes(x)
    distance = (x.abs().unsqueeze(1) - values).abs()
    assert torch.equal(distance.gather(1, (codes & 7).long().unsqueeze(1)).squeeze(1), distance.amin(1))
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert (e2m1_codes(ties) & 7).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert torch.equal(codes >> 3, ((x < 0) & ((codes & 7) > 0)).to(torch.uint8))


@pytest.mark.parametrize("weight", [torch.zeros(N, K), torch.full((N, K), 1e-30), torch.full((N, K), 3e30)])
@pytest.mark.parametrize("name", GROUP_SIZES)
def test_extremes_stay_finite(name: str, weight: Tensor) -> None:
    decoded = dequantize(encode(weight, Target(name)))
    assert bool(torch.isfinite(decoded).all())
    assert bool((decoded >= 0).all())


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["int4", "int4-sym", "int8"])
def test_groups_of_zeros_and_of_next_to_nothing(name: str, dtype: torch.dtype, carried: bool) -> None:
    """A checkpoint in half precision has its scales in half precision, where 1e-8 is zero."""
    weight = gaussian()
    weight[3, 64:128], weight[5], weight[7, :64] = 0.0, 0.0, 1e-7
    inputs = torch.randn(600, K)
    hessian = inputs.T @ inputs if carried and name != "int8" else None
    decoded = dequantize(encode(weight, Target(name, scale_dtype=dtype), hessian=hessian))
    assert bool(torch.isfinite(decoded).all())
    assert float((decoded[5]).abs().max()) < 1e-5 and relative_error(weight, decoded) < 0.2


def test_refusals() -> None:
    with pytest.raises(ValueError, match="finite"):
        encode(torch.full((N, K), float("nan")), Target("int4"))
    with pytest.raises(ValueError, match="int5"):
        Target("int5")
    with pytest.raises(ValueError, match="not 16"):
        Target("int4", 16)
    assert "multiple of 64" in str(Target("int4").fits(128, 96))
    assert "below 64" in str(Target("nvfp4").fits(32, 4096))
    assert Target("fp8").fits(128, 100) is None


@pytest.mark.parametrize(("name", "size"), CASES)
def test_written_and_read_again_it_is_the_same(load: Load, name: str, size: int) -> None:
    target = Target(name, size, torch.bfloat16)
    encoded = encode(gaussian(), target)
    stored = export.tensors(encoded)
    read = load(stored, (N, K), export.configuration(target, ["lm_head"]), KIND.get(name, "ct_pack"))
    assert read.form == encoded.form
    ours, theirs = dequantize(encoded), dequantize(read)
    if name == "nvfp4":  # the divisor is rounded to float32
        assert torch.allclose(ours, theirs, rtol=3e-7, atol=0)
    else:
        assert torch.equal(ours, theirs)


@pytest.fixture(scope="module")
def package() -> SimpleNamespace:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from compressed_tensors import compressors
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    return SimpleNamespace(compressors=compressors, args=QuantizationArgs, scheme=QuantizationScheme)


COMPRESSOR = {
    "pack-quantized": "PackedQuantizationCompressor",
    "float-quantized": "FloatQuantizationCompressor",
    "nvfp4-pack-quantized": "NVFP4PackedCompressor",
    "mxfp4-pack-quantized": "MXFP4PackedCompressor",
}


@pytest.mark.parametrize(("name", "size"), CASES)
def test_compressed_tensors_reads_what_is_written(package: SimpleNamespace, name: str, size: int) -> None:
    target = Target(name, size, torch.bfloat16)
    encoded = encode(gaussian(), target)
    config: dict[str, Any] = export.configuration(target, [])
    weights = config["config_groups"]["group_0"]["weights"]
    scheme = package.scheme(targets=["Linear"], weights=package.args(**weights))
    compressor = getattr(package.compressors, COMPRESSOR[config["format"]])
    theirs = compressor.decompress(export.tensors(encoded), scheme)["weight"].float()
    ours = dequantize(encoded)
    # the package computes in the type of the scales: bfloat16, half a unit of 2^-8 and for nvfp4 one more
    assert torch.allclose(theirs, ours, rtol=2.0**-7, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "said"),
    [("fp8", "fp8 has a fixed group size; it takes none, not 3"), ("int4", "int4 has group sizes 32, 64, 128, not 3")],
)
def test_a_wrong_group_size_is_said_in_words(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Target(name, 3)

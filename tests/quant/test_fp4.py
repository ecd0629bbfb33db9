"""NVFP4 and MXFP4, all the ways they are stored."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from localllm.errors import BadModelFile, UnsupportedFormat
from localllm.quant import Weight, dequantize, fuse

Load = Callable[..., Weight]
N, K = 24, 96
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def codes_and_bytes(n: int, k: int) -> tuple[Tensor, Tensor]:
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    return codes, codes[:, 0::2] | (codes[:, 1::2] << 4)


def block_scales(n: int, groups: int) -> Tensor:
    return (torch.rand(n, groups) * 4 + 0.1).to(torch.float8_e4m3fn)


def nvfp4(codes: Tensor, scales: Tensor, alpha: float) -> Tensor:
    group = (scales.float() * torch.tensor(alpha)).unsqueeze(-1)
    return (E2M1[codes.long()].unflatten(-1, (-1, 16)) * group).flatten(1)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_modelopt_multiplies(load: Load, shape: tuple[int, ...]) -> None:
    codes, packed = codes_and_bytes(N, K)
    scales = block_scales(N, K // 16)
    tensors = {"weight": packed, "weight_scale": scales, "weight_scale_2": torch.full(shape, 0.003)}
    weight = load(tensors, (N, K), {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4")
    assert torch.equal(dequantize(weight), nvfp4(codes, scales, 0.003))


def test_compressed_tensors_divides(load: Load) -> None:
    codes, packed = codes_and_bytes(N, K)
    scales = block_scales(N, K // 16)
    tensors = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": torch.tensor([300.0])}
    weight = load(tensors, (N, K), {"quant_method": "compressed-tensors"}, "nvfp4")
    assert torch.equal(dequantize(weight), nvfp4(codes, scales, 1 / 300.0))


@pytest.mark.parametrize(
    ("suffix", "name", "value", "kind"),
    [
        ("weight", "weight_scale_2", 0.5, "nvfp4"),
        ("weight_packed", "weight_global_scale", 2.0, "nvfp4"),
    ],
)
def test_golden_byte(load: Load, suffix: str, name: str, value: float, kind: str) -> None:
    packed = torch.full((1, 8), 0x21, dtype=torch.uint8)
    scale = torch.full((1, 1), 0x40, dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = load({suffix: packed, "weight_scale": scale, name: torch.tensor([value])}, (1, 16), {}, kind)
    assert dequantize(weight).tolist() == [[0.5, 1.0] * 8]


def test_pre_quant_scale_multiplies_the_inputs(load: Load) -> None:
    codes, packed = codes_and_bytes(N, K)
    scales, factor = block_scales(N, K // 16), torch.rand(K) + 0.5
    tensors = {
        "weight": packed,
        "weight_scale": scales,
        "weight_scale_2": torch.tensor(0.01),
        "pre_quant_scale": factor,
    }
    weight = load(tensors, (N, K), {}, "nvfp4")
    assert torch.equal(dequantize(weight), nvfp4(codes, scales, 0.01) * factor)


def test_shards_with_different_globals_fuse_exactly(load: Load) -> None:
    parts = []
    for alpha in (0.5, 0.001, 0.03):
        _, packed = codes_and_bytes(N, K)
        tensors = {"weight": packed, "weight_scale": block_scales(N, K // 16), "weight_scale_2": torch.tensor(alpha)}
        parts.append(load(tensors, (N, K), {}, "nvfp4"))
    whole = fuse(parts)
    assert whole is not None
    assert torch.equal(dequantize(whole), torch.cat([dequantize(p) for p in parts]))
    assert fuse([parts[0], parts[1]._replace(pre_scale=torch.ones(K))]) is None


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_nan_block_scales_are_refused(load: Load, byte: int) -> None:
    _, packed = codes_and_bytes(N, K)
    scales = block_scales(N, K // 16)
    scales.view(torch.uint8)[2, 3] = byte
    tensors = {"weight": packed, "weight_scale": scales, "weight_scale_2": torch.tensor(0.1)}
    with pytest.raises(BadModelFile, match=r"up_proj\.weight_scale holds 1 NaN bytes \(0x7F or 0xFF\) out of 144"):
        load(tensors, (N, K), {}, "nvfp4")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_global_scale_must_be_positive(load: Load, value: float) -> None:
    _, packed = codes_and_bytes(N, K)
    tensors = {
        "weight_packed": packed,
        "weight_scale": block_scales(N, K // 16),
        "weight_global_scale": torch.tensor([value]),
    }
    with pytest.raises(BadModelFile, match="expected a positive finite number"):
        load(tensors, (N, K), {}, "nvfp4")


@pytest.mark.parametrize("missing", ["weight_scale", "weight_scale_2"])
def test_a_missing_scale_is_never_1(load: Load, missing: str) -> None:
    _, packed = codes_and_bytes(N, K)
    tensors = {"weight": packed, "weight_scale": block_scales(N, K // 16), "weight_scale_2": torch.tensor(0.1)}
    del tensors[missing]
    with pytest.raises(BadModelFile, match=missing):
        load(tensors, (N, K), {}, "nvfp4")


def test_the_low_rank_variant_is_refused(load: Load) -> None:
    _, packed = codes_and_bytes(N, K)
    tensors = {"weight": packed, "weight_scale": block_scales(N, K // 16), "weight_scale_2": torch.tensor(0.1)}
    with pytest.raises(UnsupportedFormat, match="NVFP4_SVD"):
        load({**tensors, "svdquant_lora_a": torch.zeros(4, K)}, (N, K), {}, "nvfp4")


def mxfp4(codes: Tensor, e: Tensor) -> Tensor:
    groups = E2M1[codes.long()].double().unflatten(-1, (-1, 32))
    return (groups * torch.exp2(e.double() - 127).unsqueeze(-1)).flatten(-2).float()


@pytest.mark.parametrize("suffix", ["weight_packed", "weight"])
def test_mxfp4(load: Load, suffix: str) -> None:
    codes, packed = codes_and_bytes(N, K)
    e = torch.randint(0, 255, (N, K // 32), dtype=torch.uint8)
    e[0] = torch.tensor([0, 1, 254])
    weight = load({suffix: packed, "weight_scale": e}, (N, K), {}, "mxfp4")
    assert torch.equal(dequantize(weight), mxfp4(codes, e))
    e[1, 1] = 255
    with pytest.raises(BadModelFile, match="0xFF"):
        load({suffix: packed, "weight_scale": e}, (N, K), {}, "mxfp4")

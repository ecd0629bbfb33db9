"""Against the compressed-tensors package itself: what it compresses is read as it decompresses it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.errors import BadModelFile
from localllm.quant import Weight, dequantize

Load = Callable[..., Weight]
Pack = Callable[[Tensor, int], Tensor]
N, K, G = 24, 64, 32


@pytest.fixture(scope="module")
def package() -> SimpleNamespace:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from compressed_tensors import compressors
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    return SimpleNamespace(compressors=compressors, args=QuantizationArgs, scheme=QuantizationScheme)


def round_trip(
    package: SimpleNamespace, load: Load, name: str, kind: str, args: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """(ours, theirs): the decompressed weight, float32."""
    scheme = package.scheme(targets=["Linear"], weights=package.args(**args))
    compressor = getattr(package.compressors, name)
    stored = compressor.compress(dict(tensors), scheme)
    saved = {suffix: t.detach().clone() for suffix, t in stored.items() if t is not None}
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": args}},
    }
    weight = load(saved, (N, K), config, kind)
    theirs = compressor.decompress({suffix: t.clone() for suffix, t in saved.items()}, scheme)["weight"]
    return dequantize(weight), theirs.float()


def weights() -> Tensor:
    return torch.randn(N, K) * torch.logspace(-2, 1, N).unsqueeze(1)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", ["group", "channel"])
def test_pack_quantized(package: SimpleNamespace, load: Load, bits: int, symmetric: bool, strategy: str) -> None:
    size = G if strategy == "group" else K
    args: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy}
    if strategy == "group":
        args["group_size"] = G
    w = weights()
    half = 1 << (bits - 1)
    groups = w.unflatten(-1, (-1, size))
    tensors = {"weight": w, "weight_scale": groups.abs().amax(-1) / half}
    if not symmetric:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = (high - low) / (2 * half - 1)
        tensors["weight_scale"] = scale
        tensors["weight_zero_point"] = (torch.round(-low / scale) - half).clamp(-half, half - 1).to(torch.int8)
    ours, theirs = round_trip(package, load, "PackedQuantizationCompressor", "ct_pack", args, tensors)
    assert torch.equal(ours, theirs)
    assert (ours - w).abs().max() <= w.abs().max()


@pytest.mark.parametrize("zero", [None, "plain", "packed"])
@pytest.mark.parametrize("k", [704, 192])
def test_a_last_group_that_is_shorter(k: int, zero: str | None, load: Load, pack_stream: Pack) -> None:
    """5.5 groups of 128, which the package would not write; and 1.5, which could be two of 96."""
    of, groups = torch.arange(k) // 128, -(-k // 128)
    q, z = torch.randint(0, 16, (N, k)), torch.randint(0, 16, (N, groups))
    s = (torch.rand(N, groups) + 0.5).bfloat16()
    tensors = {"weight_packed": pack_stream(q, 4), "weight_scale": s, "weight_shape": torch.tensor([N, k])}
    if zero == "plain":
        tensors["weight_zero_point"] = (z - 8).to(torch.int8)
    elif zero == "packed":
        tensors["weight_zero_point"] = pack_stream(z.t().contiguous(), 4).t()
    args = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
    config: dict[str, Any] = {"config_groups": {"group_0": {"weights": args}}}
    weight = load(tensors, (N, k), config, "ct_pack")
    expected = (q - (8 if zero is None else z[:, of])).float() * s[:, of].float()
    assert weight.group_size == 64 and torch.equal(dequantize(weight), expected)
    config["config_groups"]["group_1"] = {"weights": args | {"group_size": 96 if k == 192 else 120}}
    with pytest.raises(BadModelFile, match=rf"has {groups} groups for {k} inputs, and the stated group sizes \[\d+, 1"):
        load(tensors, (N, k), config, "ct_pack")


def test_int_quantized(package: SimpleNamespace, load: Load) -> None:
    w = weights()
    args = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    tensors = {"weight": w, "weight_scale": w.abs().amax(-1, keepdim=True) / 127.5}
    ours, theirs = round_trip(package, load, "IntQuantizationCompressor", "int8", args, tensors)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("strategy", ["tensor", "channel"])
def test_float_quantized(package: SimpleNamespace, load: Load, strategy: str) -> None:
    w = weights()
    amax = w.abs().max().view(1) if strategy == "tensor" else w.abs().amax(-1, keepdim=True)
    args = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    tensors = {"weight": w, "weight_scale": amax / 448}
    ours, theirs = round_trip(package, load, "FloatQuantizationCompressor", "fp8", args, tensors)
    assert torch.equal(ours, theirs)


def test_nvfp4(package: SimpleNamespace, load: Load) -> None:
    w = weights()
    args = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    top = 2688 / w.abs().max()
    scale = (w.unflatten(-1, (-1, 16)).abs().amax(-1) / 6 * top).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    tensors = {"weight": w, "weight_scale": scale.float(), "weight_global_scale": top.view(1)}
    ours, theirs = round_trip(package, load, "NVFP4PackedCompressor", "nvfp4", args, tensors)
    # The package rounds scale / global to bfloat16 before it multiplies; ours does not.
    assert torch.equal(ours == 0, theirs == 0)
    assert ((ours - theirs).abs() <= 2**-8 * theirs.abs()).all()


def test_mxfp4(package: SimpleNamespace, load: Load) -> None:
    w = weights()
    args = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    scale = torch.exp2(torch.ceil(torch.log2(w.unflatten(-1, (-1, 32)).abs().amax(-1) / 6)))
    tensors = {"weight": w, "weight_scale": scale}
    ours, theirs = round_trip(package, load, "MXFP4PackedCompressor", "mxfp4", args, tensors)
    assert torch.equal(ours, theirs)


def test_mxfp8(package: SimpleNamespace, load: Load) -> None:
    w = weights()
    args = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    scale = torch.exp2(torch.ceil(torch.log2(w.unflatten(-1, (-1, 32)).abs().amax(-1) / 448)))
    tensors = {"weight": w, "weight_scale": scale}
    ours, theirs = round_trip(package, load, "MXFP8QuantizationCompressor", "mxfp8", args, tensors)
    assert torch.equal(ours, theirs)

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from localllm.errors import BadModelFile
from localllm.quant import Weight, dequantize, dequantize_rows, fuse, reordered

Load = Callable[..., Weight]
N, K = 200, 320  # no multiples of 128
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def e4m3(*shape: int) -> Tensor:
    return (torch.randn(shape) * 50).clamp(-448, 448).to(torch.float8_e4m3fn)


def blocks(q: Tensor, s: Tensor) -> Tensor:
    n, k = q.shape
    return q.float() * s.float().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]


def test_golden_bytes() -> None:
    codes = torch.tensor([0x38, 0x7E, 0x01, 0x08, 0xB8, 0x7F], dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert codes[:5].tolist() == [1, 448, 2**-9, 2**-6, -1]
    assert codes[5].isnan()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_per_tensor(load: Load, shape: tuple[int, ...]) -> None:
    q = e4m3(N, K)
    weight = load({"weight": q, "weight_scale": torch.full(shape, 0.03)}, (N, K), {}, "fp8")
    assert weight.scales is not None
    assert weight.scales.shape == (1,)
    assert torch.equal(dequantize(weight), q.float() * torch.tensor(0.03))


@pytest.mark.parametrize("shape", [(N,), (N, 1)])
def test_per_row(load: Load, shape: tuple[int, ...]) -> None:
    q, s = e4m3(N, K), torch.rand(N) + 0.01
    weight = load({"weight": q, "weight_scale": s.view(shape)}, (N, K), {}, "fp8")
    assert torch.equal(dequantize(weight), q.float() * s.view(N, 1))
    rows = torch.tensor([150, 3])
    assert torch.equal(dequantize_rows(weight, rows), (q.float() * s.view(N, 1))[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_multiply_in_spite_of_their_name(load: Load, dtype: torch.dtype) -> None:
    q, s = e4m3(N, K), (torch.rand(2, 3) + 0.01).to(dtype)
    weight = load({"weight": q, "weight_scale_inv": s}, (N, K), FP8, "fp8")
    assert weight.scales is not None
    assert weight.scales.dtype == torch.float32
    assert torch.equal(dequantize(weight), blocks(q, s))
    rows = torch.tensor([150, 3, 127, 128])
    assert torch.equal(dequantize_rows(weight, rows), blocks(q, s)[rows])


def test_blocks_as_modelopt_writes_them(load: Load) -> None:
    q, s = e4m3(N, K), torch.rand(2, 3) + 0.01
    weight = load({"weight": q, "weight_scale": s.view(2, 1, 3, 1)}, (N, K), {}, "fp8")
    assert torch.equal(dequantize(weight), blocks(q, s))


def test_blocks_with_powers_of_two(load: Load) -> None:
    q, e = e4m3(N, K), torch.randint(100, 140, (2, 3), dtype=torch.uint8)
    weight = load({"weight": q, "weight_scale_inv": e}, (N, K), FP8, "fp8")
    assert torch.equal(dequantize(weight), blocks(q, torch.exp2(e.float() - 127)))


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv"])
def test_mxfp8(load: Load, suffix: str) -> None:
    q, e = e4m3(N, K), torch.randint(0, 255, (N, K // 32), dtype=torch.uint8)
    e[0] = torch.arange(K // 32)  # subnormal scales
    weight = load({"weight": q, suffix: e}, (N, K), {"quant_method": "mxfp8"}, "mxfp8")
    expected = (q.double().unflatten(-1, (-1, 32)) * torch.exp2(e.double() - 127).unsqueeze(-1)).flatten(1).float()
    assert torch.equal(dequantize(weight), expected)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_nan_bytes_are_refused(load: Load, byte: int) -> None:
    q = e4m3(N, K)
    q.view(torch.uint8)[7, 9] = byte
    with pytest.raises(BadModelFile, match=r"up_proj\.weight holds 1 NaN bytes \(0x7F or 0xFF\) out of 64000"):
        load({"weight": q, "weight_scale": torch.ones(1)}, (N, K), {}, "fp8")


def test_bad_scales_are_refused(load: Load) -> None:
    with pytest.raises(BadModelFile, match=r"weight_scale has non-finite values \(1 of 1\)"):
        load({"weight": e4m3(N, K), "weight_scale": torch.tensor(float("nan"))}, (N, K), {}, "fp8")
    with pytest.raises(BadModelFile, match="0xFF"):
        e = torch.full((N, K // 32), 255, dtype=torch.uint8)
        load({"weight": e4m3(N, K), "weight_scale": e}, (N, K), {}, "mxfp8")
    with pytest.raises(BadModelFile, match="weight_scale"):
        load({"weight": e4m3(N, K)}, (N, K), {}, "fp8")


def test_fusing(load: Load) -> None:
    def part(n: int, scale: Tensor) -> Weight:
        suffix = "weight_scale_inv" if scale.dim() == 2 and scale.shape[1] == 3 else "weight_scale"
        return load({"weight": e4m3(n, K), suffix: scale}, (n, K), FP8 if suffix.endswith("inv") else {}, "fp8")

    tensor, other = part(130, torch.tensor(0.5)), part(7, torch.tensor(0.25))
    row = part(9, torch.rand(9, 1))
    whole = fuse([tensor, other, row])
    assert whole is not None
    assert whole.scales is not None
    assert whole.scales.shape == (146, 1)
    assert torch.equal(dequantize(whole), torch.cat([dequantize(w) for w in (tensor, other, row)]))
    even, odd = part(256, torch.rand(2, 3)), part(130, torch.rand(2, 3))
    both = fuse([even, odd])
    assert both is not None
    assert torch.equal(dequantize(both), torch.cat([dequantize(even), dequantize(odd)]))
    assert fuse([odd, even]) is None  # 130 rows end inside a block
    assert fuse([even, row]) is None


def test_rows_in_another_order_where_blocks_stay_whole(load: Load) -> None:
    q, s = e4m3(N + 184, K), torch.rand(3, 3) + 0.01
    weight = load({"weight": q, "weight_scale_inv": s}, (N + 184, K), FP8, "fp8")
    order = torch.cat([torch.arange(256, 384).flip(0), torch.arange(128), torch.arange(128, 256)])
    found = reordered(weight, order)
    assert found is not None
    assert torch.equal(dequantize(found), dequantize(weight)[order])
    assert reordered(weight, order.roll(1)) is None

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from localllm.errors import BadModelFile
from localllm.quant import Weight, dequantize, fuse
from localllm.quant.awq import unpack_gemm

N, K, G = 24, 128, 32
Load = Callable[..., Weight]
Pack = Callable[[Tensor, int], Tensor]
CONFIG = {"quant_method": "awq", "bits": 4, "group_size": G, "zero_point": True, "version": "gemm"}


def layer(k: int = K, size: int = G) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [N, K], zeros [N, groups], scales [N, groups] and what they stand for."""
    of = torch.arange(k) // size
    q, z = torch.randint(0, 16, (N, k)), torch.randint(0, 16, (N, -(-k // size)))
    s = (torch.rand(N, -(-k // size)) * 0.02 + 0.001).half()
    return q, z, s, (q - z[:, of]).float() * s[:, of].float()


def pack_gemm(values: Tensor) -> Tensor:
    """AutoAWQ's order: nibble i of a word holds logical column (0, 2, 4, 6, 1, 3, 5, 7)[i]."""
    words = values.long().unflatten(-1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]]
    return (words << torch.arange(0, 32, 4)).sum(-1).to(torch.int32)


def pack_gemv_fast(values: Tensor) -> Tensor:
    """Element by element: four rows share a row of 16-bit words; see the index arithmetic."""
    words = torch.zeros(values.shape[0] // 4, values.shape[1], dtype=torch.int64)
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            run = column % 32
            place = column % 64 // 32 * 32 + run % 8 // 2 * 8 + run % 2 * 4 + run // 8
            flat = row % 4 * 64 + place
            words[row // 4, column // 64 * 64 + flat // 4] |= int(values[row, column]) << (4 * (flat % 4))
    return words.to(torch.int16)


def padded(values: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, width - values.shape[1]))


def test_golden_word() -> None:
    assert unpack_gemm(torch.tensor([[0x76543210]], dtype=torch.int32)).tolist() == [[0, 4, 1, 5, 2, 6, 3, 7]]


def test_gemm(load: Load) -> None:
    q, z, s, expected = layer()
    tensors = {"qweight": pack_gemm(q.t()), "qzeros": pack_gemm(z.t()), "scales": s.t()}
    weight = load(tensors, (N, K), CONFIG, "awq_gemm")
    assert (weight.form, weight.group_size) == ("int4g", G)
    assert weight.scales is not None
    assert weight.scales.dtype == torch.float16
    assert torch.equal(dequantize(weight), expected)
    fused = fuse([weight, weight])
    assert fused is not None
    assert torch.equal(dequantize(fused), torch.cat([expected, expected]))


def test_gemm_without_zeros_is_centred_on_8(load: Load) -> None:
    q, _, s, _ = layer()
    weight = load({"qweight": pack_gemm(q.t()), "scales": s.t()}, (N, K), {**CONFIG, "zero_point": False}, "awq_gemm")
    expected = (q.view(N, -1, G) - 8).float() * s.float().unsqueeze(-1)
    assert torch.equal(dequantize(weight), expected.flatten(1))


def test_gemv(load: Load, pack_stream: Pack) -> None:
    q, z, s, expected = layer()
    tensors = {
        "qweight": pack_stream(q, 4),
        "qzeros": pack_stream(padded(z, 32), 4),
        "scales": padded(s, 32),
    }
    weight = load(tensors, (N, K), {**CONFIG, "version": "gemv"}, "awq_gemv")
    assert torch.equal(dequantize(weight), expected)


def test_gemv_fast(load: Load) -> None:
    q, z, s, _ = layer()
    scaled_zeros = -(s * z)  # float16, as the tool stores it
    tensors = {
        "qweight": pack_gemv_fast(q),
        "scales": padded(s, 32).t(),
        "qzeros": padded(scaled_zeros, 32).t(),
    }
    weight = load(tensors, (N, K), {**CONFIG, "version": "gemv_fast"}, "awq_gemv_fast")
    q = q.view(N, -1, G).float()
    expected = q * s.float().unsqueeze(-1) + scaled_zeros.float().unsqueeze(-1)
    assert torch.equal(dequantize(weight), expected.flatten(1))


@pytest.mark.parametrize("k", [704, 192])  # 5.5 groups of 128; and 1.5, which could be two of 96
def test_a_last_group_that_is_shorter(k: int, load: Load, pack_stream: Pack) -> None:
    config = {**CONFIG, "group_size": 128}
    q, z, s, expected = layer(k, 128)
    gemm = {"qweight": pack_gemm(q.t()), "qzeros": pack_gemm(z.t()), "scales": s.t()}
    weight = load(gemm, (N, k), config, "awq_gemm")
    assert weight.group_size == 64 and torch.equal(dequantize(weight), expected)
    gemv = {"qweight": pack_stream(q, 4), "qzeros": pack_stream(padded(z, 8), 4), "scales": padded(s, 8)}
    assert torch.equal(dequantize(load(gemv, (N, k), config, "awq_gemv")), expected)
    if k == 704:
        return  # packing it takes long
    scaled_zeros, of = -(s * z), torch.arange(k) // 128
    fast = {"qweight": pack_gemv_fast(q), "scales": padded(s, 8).t(), "qzeros": padded(scaled_zeros, 8).t()}
    expected = q.float() * s[:, of].float() + scaled_zeros[:, of].float()
    assert torch.equal(dequantize(load(fast, (N, k), config, "awq_gemv_fast")), expected)


def test_groups_that_no_size_explains(load: Load) -> None:
    q, z, s, _ = layer(704, 128)
    tensors = {"qweight": pack_gemm(q.t()), "qzeros": pack_gemm(z.t()), "scales": s.t()}
    for size, said in ((64, r"the stated group sizes \[64\]"), (None, "no group size is stated")):
        with pytest.raises(BadModelFile, match=rf"up_proj\.scales: has 6 groups for 704 inputs, and {said}"):
            load(tensors, (N, 704), {**CONFIG, "group_size": size}, "awq_gemm")


def test_scales_that_are_no_numbers(load: Load) -> None:
    q, z, s, _ = layer()
    s[3, 1] = float("inf")
    tensors = {"qweight": pack_gemm(q.t()), "qzeros": pack_gemm(z.t()), "scales": s.t()}
    with pytest.raises(BadModelFile, match=r"up_proj\.scales has non-finite values \(1 of 96\)"):
        load(tensors, (N, K), CONFIG, "awq_gemm")


def test_the_wrong_layer(load: Load) -> None:
    q, z, s, _ = layer()
    tensors = {"qweight": pack_gemm(q.t()), "qzeros": pack_gemm(z.t()), "scales": s.t()}
    with pytest.raises(BadModelFile, match=r"shape \[128, 3\].*needs \[128, 6\]"):
        load(tensors, (48, K), CONFIG, "awq_gemm")


def test_a_packed_weight_without_scales(load: Load) -> None:
    q, z, _, _ = layer()
    with pytest.raises(BadModelFile, match="scales"):
        load({"qweight": pack_gemm(q.t()), "qzeros": pack_gemm(z.t())}, (N, K), CONFIG, "awq_gemm")

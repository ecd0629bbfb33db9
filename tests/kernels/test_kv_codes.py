"""8-bit KV codes: E4M3 by its bits, scales per vector, and the rotation of int8 keys."""

from __future__ import annotations

import pytest
import torch

from localllm.kernels import reference
from localllm.kernels.kv_codes import decode, decode_e4m3, encode, encode_e4m3, hadamard
from localllm.kernels.kv_pages import KVPages


def test_e4m3_is_torchs() -> None:
    codes = torch.arange(256).to(torch.uint8)
    numbers = decode_e4m3(codes)
    assert torch.equal(numbers.nan_to_num(999.0), codes.view(torch.float8_e4m3fn).float().nan_to_num(999.0))
    finite = numbers[numbers.isfinite()]
    halves = (finite[:, None] + finite[None, :]).flatten() / 2  # every number, every midpoint, and their neighbours
    near = torch.cat([halves, halves.nextafter(torch.tensor(1e9)), halves.nextafter(torch.tensor(-1e9))])
    x = torch.cat([near, torch.randn(10_000) * torch.logspace(-6, 2, 10_000)]).clamp(-448, 448)
    assert torch.equal(encode_e4m3(x), x.to(torch.float8_e4m3fn).view(torch.uint8))
    assert encode_e4m3(torch.tensor([464.0, 1e30, -torch.inf, torch.nan])).tolist() == [0x7E, 0x7E, 0xFE, 0x7F]


@pytest.mark.parametrize(("kv_format", "error"), [("int8", 0.5 / 127), ("fp8", 0.5 / 14)])
def test_a_vector_of_any_size_keeps_its_digits(kv_format: str, error: float) -> None:
    x = torch.randn(50, 3, 64) * torch.logspace(-25, 25, 50)[:, None, None]
    codes, scales = encode(x, kv_format)
    peaks = x.abs().amax(-1, keepdim=True)
    assert float(((decode(codes, scales) - x).abs() / peaks).max()) < error * 1.001
    assert torch.equal(encode(x[7:8], kv_format)[0], codes[7:8])


@pytest.mark.parametrize("kv_format", ["int8", "fp8"])
def test_what_is_not_finite_stays_visible(kv_format: str) -> None:
    x = torch.tensor([[1.0, torch.nan], [torch.inf, 1.0], [0.0, 0.0], [1e-38, 0.0]])
    decoded = decode(*encode(x, kv_format))
    assert decoded[:2].isnan().all() and not decoded[2:].any()
    fixed = decode(*encode(torch.tensor([[1000.0, -4.0]]), kv_format, torch.tensor([2.0])))
    assert fixed.tolist() == [[254.0 if kv_format == "int8" else 896.0, -4.0]]


@pytest.mark.parametrize(("dim", "run"), [(64, 64), (80, 16), (96, 32), (7, 1), (256, 256)])
def test_the_rotation_is_orthonormal_and_its_own_inverse(dim: int, run: int) -> None:
    matrix = hadamard(torch.eye(dim))
    torch.testing.assert_close(matrix @ matrix, torch.eye(dim), rtol=0, atol=1e-6)
    assert (matrix != 0).sum() == dim * run
    q, k = torch.randn(5, dim), torch.randn(5, dim)
    torch.testing.assert_close((hadamard(q) * hadamard(k)).sum(-1), (q * k).sum(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kv_format", "most"), [("bf16", 0.003), ("int8", 0.012), ("fp8", 0.04)])
def test_attention_over_codes_is_near_that_over_floats(kv_format: str, most: float) -> None:
    k, v, q = torch.randn(40, 2, 64), torch.randn(40, 2, 64), torch.randn(40, 6, 64)
    k[..., 3] *= 20  # an outlier dimension, as models with biases have it
    results = []
    for name in ("f32", kv_format):
        pages = KVPages.empty(name, 3, 2, 16, 64)
        reference.kv_write(k, v, pages, torch.arange(40))
        where = torch.tensor([[0, 1, 2]]).int(), torch.tensor([0, 40]).int(), torch.tensor([40]).int()
        results.append(reference.paged_attention(q, pages, *where, 0.05))
    exact, coded = results
    assert float((coded - exact).norm() / exact.norm()) < most

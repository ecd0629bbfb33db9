"""Norms, rotary positions, activations, embeddings and the writing of pages, each against its reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from localllm.kernels import mixers, recurrent, reference, segments
from localllm.kernels.kv_codes import decode_e4m3, encode_e4m3
from localllm.kernels.kv_pages import KVPages
from localllm.kernels.layer_weights import AttentionWeights, Norm
from localllm.kernels.triton import activation, e4m3, heads, rms_norm
from localllm.kernels.triton.launch import interpreting, launch

import triton  # isort: skip
import triton.language as tl  # isort: skip

ULPS = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}
"""one unit in the last place and a half, relative: the interpreter cuts bfloat16 off where it should round"""


def close(found: Tensor, expected: Tensor, factor: float = 1.0) -> None:
    """Within `factor` units of the type, of elements near zero within those of the tensor's size."""
    assert found.dtype is expected.dtype and found.shape == expected.shape
    limit = factor * ULPS[found.dtype]
    torch.testing.assert_close(found.float(), expected.float(), rtol=limit, atol=limit * 0.1)


@pytest.mark.parametrize("dtype", ULPS, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (3, 576), (5, 100), (2, 4096)], ids=str)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    x, weight = torch.randn(shape).to(device, dtype), torch.randn(shape[-1]).to(device)
    close(rms_norm.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("factor", [1.0, 0.6])
def test_normed_rows_are_added_in_place(factor: float, device: torch.device) -> None:
    """In one launch, which rounds once; LayerNorms and rows without a norm are added by themselves."""
    x, rows, weight, bias = (torch.randn(*shape).to(device) for shape in ((3, 40), (3, 40), (40,), (40,)))
    for norm in (Norm(weight, 1e-5), Norm(weight, 1e-5, bias), Norm(weight, 1e-5, groups=4), None):
        into = x.half()
        expected = (into.float() + mixers.norm_rows(reference.rms_norm, rows, norm)) * factor
        found = rms_norm.add_normed(into, rows.half(), norm, factor)
        assert found.data_ptr() == into.data_ptr()
        torch.testing.assert_close(found.float(), expected, rtol=2e-3, atol=2e-3)


def test_rms_norm_of_strided_heads_and_wide_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight = torch.randn(3, 7, 96).to(device), torch.randn(96).to(device)
    close(rms_norm.rms_norm(rows[:, 2:5], weight, 1e-6), reference.rms_norm(rows[:, 2:5], weight, 1e-6))
    wide, weight = torch.randn(2, 20_000).to(device), torch.randn(20_000).to(device)
    close(rms_norm.rms_norm(wide, weight, 1e-6), reference.rms_norm(wide, weight, 1e-6))
    assert rms_norm.rms_norm(wide[:0], weight, 1e-6).shape == (0, 20_000)


@pytest.mark.parametrize("shape", [(1, 1), (3, 40), (2, 1000), (1, 8192)])
def test_layer_norm(shape: tuple[int, ...], device: torch.device) -> None:
    """Far from 0, where a variance from squares would be off by much."""
    norm = Norm(torch.randn(shape[-1]).to(device), 1e-5, torch.randn(shape[-1]).to(device))
    for x in (torch.randn(shape), torch.randn(shape) + 100, torch.randn(shape).half()):
        x = x.to(device)
        found, wanted = rms_norm.normed(x, norm), reference.layer_norm(x, norm.weight, norm.bias, 1e-5)
        assert found.dtype is x.dtype
        torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("shape", "groups"), [((1, 40), 4), ((3, 1000), 5), ((2, 4096), 8)])
def test_norm_over_groups(shape: tuple[int, int], groups: int, device: torch.device) -> None:
    norm = Norm(torch.randn(shape[-1]).to(device), 1e-5, groups=groups)
    for x in (torch.randn(shape), torch.randn(shape).half()):
        x = x.to(device)
        found = rms_norm.normed(x, norm)
        assert found.dtype is x.dtype
        close(found, reference.group_norm(x, norm.weight, 1e-5, groups))


def angles(num_tokens: int, half: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of some positions."""
    turns = torch.randn(num_tokens, half) * 3
    return turns.cos().to(device), turns.sin().to(device)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("count", "dim", "half"), [(3, 64, 32), (1, 96, 48), (9, 80, 20), (2, 256, 128)])
def test_rope(count: int, dim: int, half: int, interleaved: bool, device: torch.device) -> None:
    x = torch.randn(3, count + 2, dim).to(device)
    cos, sin = angles(3, half, device)
    close(heads.rope(x[:, :count], cos, sin, interleaved), reference.rope(x[:, :count], cos, sin, interleaved), 2)


@pytest.mark.parametrize("limit", [None, 1.5])
@pytest.mark.parametrize("dtype", ULPS, ids=str)
@pytest.mark.parametrize("width", [1, 34, 1500])
def test_activations(width: int, dtype: torch.dtype, limit: float | None, device: torch.device) -> None:
    x = (torch.randn(3, 2 * width) * 3).to(device, dtype)
    close(activation.silu_mul(x, limit), reference.silu_mul(x, limit), 2)
    close(
        activation.gelu_tanh_mul(x, limit), reference.gelu_tanh_mul(x, limit), 20
    )  # where 1 + tanh cancels, the reference is the worse


@pytest.mark.parametrize("extreme", [-1e6, -100.0, 0.0, 100.0, 1e6])
def test_activations_stay_finite(extreme: float, device: torch.device) -> None:
    x = torch.full((1, 8), extreme, device=device)
    torch.testing.assert_close(activation.silu_mul(x), reference.silu_mul(x), rtol=1e-6, atol=1e-20)
    assert activation.gelu_tanh_mul(x).isfinite().all()


@pytest.mark.parametrize("softplus", [False, True])
def test_gates_of_attention(softplus: bool, device: torch.device) -> None:
    q = torch.randn(2, 30, 80).to(device)
    q[0, 0, 40:46] = torch.tensor([float("nan"), float("inf"), float("-inf"), 200.0, -200.0, -20.0])
    mixed, gates = torch.randn(2, 30 * 40).to(device), q[..., 40:].flatten(1)
    expected = mixed * (recurrent.softplus(gates) if softplus else recurrent.sigmoid(gates))
    found = activation.times_gates(mixed, q, softplus)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-7, equal_nan=True)


@triton.jit
def _encode(x, codes, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(codes + i, e4m3.e4m3_bits(tl.load(x + i)).to(tl.uint8))


@triton.jit
def _pairs(e4m3_pairs, int8_pairs, out, N: tl.constexpr, PTX: tl.constexpr):
    i = tl.arange(0, N)
    even, odd = e4m3.widen_e4m3(tl.load(e4m3_pairs + i), tl.float16, PTX)
    tl.store(out + 2 * i, even.to(tl.float32) * 256.0)
    tl.store(out + 2 * i + 1, odd.to(tl.float32) * 256.0)
    even, odd = e4m3.widen_int8(tl.load(int8_pairs + i), tl.float16, PTX)
    tl.store(out + 2 * N + 2 * i, even.to(tl.float32))
    tl.store(out + 2 * N + 2 * i + 1, odd.to(tl.float32))


def test_e4m3_is_that_of_the_reference(device: torch.device) -> None:
    """Every number of E4M3, everything halfway between two of them, and what is next to that."""
    numbers = decode_e4m3(torch.arange(127, dtype=torch.uint8))
    halves = (numbers[1:] + numbers[:-1]) / 2
    near = torch.cat([halves.nextafter(halves * 0), halves.nextafter(halves * 2)])
    x = torch.cat([numbers, halves, near, torch.tensor([448.1, 1e9, torch.inf, torch.nan, 1e-9, 1e-40])])
    x = torch.nn.functional.pad(torch.cat([x, -x]), (0, 2048 - 2 * x.numel()))
    codes = torch.empty(2048, dtype=torch.uint8, device=device)
    launch(_encode, (1,), x.to(device), codes, N=2048)
    assert torch.equal(codes.cpu(), encode_e4m3(x))


def test_pairs_of_codes_widen_exactly(device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    codes = torch.stack([codes, codes.flip(0)], 1).flatten()
    out = torch.empty(1024, device=device)
    pairs = codes.view(torch.int16).to(device)
    launch(_pairs, (1,), pairs, pairs, out, N=256, PTX=not interpreting())
    expected = decode_e4m3(codes)
    real = ~expected.isnan()
    assert torch.equal(out[:512].cpu()[real], expected[real])
    assert torch.equal(out[512:].cpu(), codes.view(torch.int8).float())


def pages_of(kv_format: str, kv_heads: int, dim: int, page: int, device: torch.device, layer: bool = False) -> KVPages:
    """Five empty pages."""
    pages = KVPages.empty(kv_format, 5, kv_heads, page, dim)
    if layer:
        pages = pages._replace(k_scales=torch.tensor([0.013]), v_scales=torch.tensor([0.009]))
    return KVPages(*(None if part is None else part.to(device) for part in pages))


def same_pages(found: KVPages, expected: KVPages, steps: int = 0) -> None:
    """Codes at most `steps` apart, scales equal to float32."""
    for ours, theirs in zip(found, expected, strict=True):
        if ours is None or theirs is None:
            assert ours is theirs
        elif ours.is_floating_point():
            close(ours, theirs, 2)
        else:
            apart = (ours.int() - theirs.int()).abs()
            assert int(apart.max()) <= steps and float((apart > 0).float().mean()) < 0.01


SLOW = pytest.mark.slow
FORMATS = ["bf16", "int8", "fp8", pytest.param("f32", marks=SLOW), pytest.param("fp16", marks=SLOW)]


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize(
    ("kv_heads", "dim", "page"),
    [
        (2, 64, 64),
        (5, 96, 32),
        pytest.param(1, 256, 16, marks=SLOW),
        pytest.param(1, 384, 16, marks=SLOW),
        pytest.param(2, 512, 16, marks=SLOW),
        pytest.param(3, 80, 16, marks=SLOW),
    ],
)
def test_kv_write(kv_format: str, kv_heads: int, dim: int, page: int, device: torch.device) -> None:
    kv = torch.randn(4, 2 * kv_heads + 1, dim).to(device) * 3
    kv[1, 1] = 0.0
    slots = torch.tensor([3, 4 * page + 7, page, 17], device=device)
    k, v = kv[:, 1 : 1 + kv_heads], kv[:, 1 + kv_heads :]
    found, expected = (pages_of(kv_format, kv_heads, dim, page, device) for _ in range(2))
    heads.kv_write(k, v, found, slots)
    reference.kv_write(k, v, expected, slots)
    same_pages(found, expected)


def test_kv_write_with_a_scale_of_the_layer(device: torch.device) -> None:
    k, v = torch.randn(3, 2, 64).to(device) * 3, torch.randn(3, 2, 64).to(device)
    slots = torch.tensor([3, 70, 17], device=device)
    found, expected = (pages_of("fp8", 2, 64, 16, device, layer=True) for _ in range(2))
    heads.kv_write(k, v, found, slots)
    reference.kv_write(k, v, expected, slots)
    same_pages(found, expected)


def test_kv_write_passes_over_negative_slots_and_marks_what_is_no_number(device: torch.device) -> None:
    k, v = torch.randn(3, 2, 64).to(device), torch.randn(3, 2, 64).to(device)
    k[2, 1, 7], v[2, 0, 3] = torch.nan, torch.inf
    pages = pages_of("int8", 2, 64, 16, device)
    heads.kv_write(k, v, pages, torch.tensor([-1, -1, 20], device=device))
    assert pages.k_scales is not None and pages.v_scales is not None
    assert int(pages.k.ne(0).any(-1).sum()) == 1 and int(pages.v.ne(0).any(-1).sum()) == 1
    assert bool(pages.k_scales[1, 1, 4].isnan()) and bool(pages.v_scales[1, 0, 4].isnan())
    assert int(pages.k_scales.isnan().sum()) == 1


class Plain:
    """A product that gives what it is given."""

    def __init__(self, out_features: int) -> None:
        self.out_features = out_features

    def __call__(self, x: Tensor) -> Tensor:
        return x


def attention_weights(
    heads: int, kv_heads: int, dim: int, norm: str, interleaved: bool, device: torch.device
) -> AttentionWeights:
    """Of a layer whose first norm does nothing and whose product is the identity."""
    q_norm, k_norm = (Norm(torch.randn(dim).to(device), eps) for eps in (1e-6, 1e-3))
    return AttentionWeights(
        Norm(torch.ones(1), 0.0),
        Plain(heads + 2 * kv_heads),  # type: ignore[arg-type]
        Plain(1),  # type: ignore[arg-type]
        heads,
        kv_heads,
        dim,
        1.0,
        q_norm if norm else None,
        k_norm if norm else None,
        interleaved=interleaved,
        late_norms=norm == "late",
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize(
    ("count", "kv_heads", "dim", "half", "norm", "interleaved"),
    [
        (9, 3, 64, 32, "", False),
        (0, 2, 64, 32, "early", False),  # keys and values alone
        (4, 1, 256, 128, "early", False),
        (8, 2, 96, 20, "early", True),
        (3, 1, 72, 24, "late", False),
        pytest.param(2, 2, 80, 40, "late", True, marks=SLOW),
    ],
)
def test_qk_norm_rope_kv(
    count: int, kv_heads: int, dim: int, half: int, norm: str, interleaved: bool, kv_format: str, device: torch.device
) -> None:
    weights = attention_weights(count, kv_heads, dim, norm, interleaved, device)
    qkv = torch.randn(3, (count + 2 * kv_heads) * dim).to(device)
    cos, sin = angles(3, half, device)
    slots = torch.tensor([3, 70, 17], device=device)
    found, expected = (pages_of(kv_format, kv_heads, dim, 16, device) for _ in range(2))
    norms = (weights.q_norm, weights.k_norm) if norm else None
    sizes = count, kv_heads, dim, dim
    q = heads.qk_norm_rope_kv(qkv, sizes, (cos, sin), (found, slots), norms, interleaved, weights.late_norms)

    def first_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x if weight.numel() == 1 else reference.rms_norm(x, weight, eps)

    expected_q = segments.attn_in(
        first_norm, reference.rope, reference.kv_write, qkv, weights, cos, sin, expected, slots
    )
    close(q, expected_q, 4)
    same_pages(found, expected, steps=1)

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from localllm.errors import BadModelFile
from localllm.quant import Weight, dequantize, fuse
from localllm.quant.packing import unpack_stream

N, K = 32, 128
Load = Callable[..., Weight]
Pack = Callable[[Tensor, int], Tensor]


def stored(
    pack: Pack, q: Tensor, z: Tensor, s: Tensor, bits: int, *, v2: bool, g_idx: Tensor | None
) -> dict[str, Tensor]:
    """q [N, K], z and s [N, G] as GPTQ writes them."""
    zeros = z if v2 else (z - 1) & ((1 << bits) - 1)
    tensors = {
        "qweight": pack(q, bits).t(),
        "qzeros": pack(zeros.t().contiguous(), bits),
        "scales": s.t(),
    }
    return tensors if g_idx is None else {**tensors, "g_idx": g_idx.to(torch.int32)}


def layer(bits: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    q, z = torch.randint(0, 1 << bits, (N, K)), torch.randint(0, 1 << bits, (N, groups))
    return q, z, (torch.rand(N, groups) * 0.02 + 0.001).half()


def value(q: Tensor, z: Tensor, s: Tensor, g_idx: Tensor) -> Tensor:
    return (q - z[:, g_idx]).float() * s.float()[:, g_idx]


def config(bits: int, size: int, **more: object) -> dict[str, object]:
    return {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": False, **more}


def test_golden_words() -> None:
    assert unpack_stream(torch.tensor([0x76543210], dtype=torch.int32), 4).tolist() == list(range(8))
    stream = torch.tensor([0b10 << 30 | 1, 0b1, 0], dtype=torch.int64).to(torch.int32)
    three = unpack_stream(stream, 3)
    assert three.tolist() == [1, *[0] * 9, 0b110, *[0] * 21]  # value 10: two bits of word 0, one of word 1


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("size", [32, K])
@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("named", [False, True], ids=["no-g_idx", "g_idx"])
def test_asymmetric(load: Load, pack_stream: Pack, bits: int, size: int, v2: bool, named: bool) -> None:
    q, z, s = layer(bits, K // size)
    g_idx = torch.arange(K) // size
    tensors = stored(pack_stream, q, z, s, bits, v2=v2, g_idx=g_idx if named else None)
    label = "gptq_v2" if v2 else "gptq"
    weight = load(tensors, (N, K), config(bits, size, checkpoint_format=label), "gptq")
    assert weight.perm is None
    assert torch.equal(dequantize(weight), value(q, z, s, g_idx))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_symmetric_never_reads_zeros(load: Load, pack_stream: Pack, bits: int) -> None:
    q, z, s = layer(bits, 4)
    g_idx = torch.arange(K) // 32
    tensors = stored(pack_stream, q, z, s, bits, v2=False, g_idx=g_idx)
    weight = load(tensors, (N, K), config(bits, 32, sym=True), "gptq")
    assert weight.form == ("int8" if bits == 8 else "int4g")
    assert weight.zeros is None
    assert torch.equal(dequantize(weight), value(q, torch.full_like(z, 1 << (bits - 1)), s, g_idx))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("stored_zero", ["v1", "v2"])
@pytest.mark.parametrize("label", ["gptq", "gptq_v2"])
def test_symmetric_words_win_over_a_wrong_label(
    load: Load, pack_stream: Pack, bits: int, stored_zero: str, label: str
) -> None:
    q, z, s = layer(bits, 4)
    middle = torch.full_like(z, 1 << (bits - 1))
    tensors = stored(pack_stream, q, middle, s, bits, v2=stored_zero == "v2", g_idx=None)
    weight = load(tensors, (N, K), config(bits, 32, sym=False, checkpoint_format=label), "gptq")
    assert torch.equal(dequantize(weight), value(q, middle, s, torch.arange(K) // 32))


def test_v1_zero_word_is_8(load: Load, pack_stream: Pack) -> None:
    q, z, s = layer(4, 4)
    tensors = stored(pack_stream, q, z, s, 4, v2=True, g_idx=None)
    tensors["qzeros"] = torch.full((4, N // 8), 0x77777777, dtype=torch.int32)
    weight = load(tensors, (N, K), config(4, 32), "gptq")
    assert torch.equal(dequantize(weight), value(q, torch.full_like(z, 8), s, torch.arange(K) // 32))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("sym", [False, True])
def test_activation_order(load: Load, pack_stream: Pack, bits: int, sym: bool) -> None:
    q, z, s = layer(bits, 4)
    g_idx = (torch.arange(K) // 32)[torch.randperm(K)]
    tensors = stored(pack_stream, q, z, s, bits, v2=False, g_idx=g_idx)
    weight = load(tensors, (N, K), config(bits, 32, sym=sym, desc_act=True), "gptq")
    expected = value(q, torch.full_like(z, 1 << (bits - 1)) if sym else z, s, g_idx)
    assert torch.equal(dequantize(weight), expected)
    if weight.form != "dense":
        assert weight.perm is not None
        assert weight.perm.dtype == torch.int32
    other = load(tensors, (N, K), config(bits, 32, sym=sym, desc_act=True), "gptq")
    assert fuse([weight, other._replace(perm=torch.arange(K, dtype=torch.int32))]) is None


def test_a_last_group_that_is_shorter(load: Load, pack_stream: Pack) -> None:
    q, z, s = layer(4, 3)  # 128 columns in groups of 48: 48, 48, 32
    g_idx = torch.arange(K) // 48
    tensors = stored(pack_stream, q, z, s, 4, v2=True, g_idx=g_idx)
    weight = load(tensors, (N, K), config(4, 48, checkpoint_format="gptq_v2"), "gptq")
    assert weight.group_size == 16
    assert torch.equal(dequantize(weight), value(q, z, s, g_idx))


@pytest.mark.parametrize("k", [704, 192])
def test_a_shorter_group_without_an_order(k: int, load: Load, pack_stream: Pack) -> None:
    of, groups = torch.arange(k) // 128, -(-k // 128)
    q, z = torch.randint(0, 16, (N, k)), torch.randint(0, 16, (N, groups))
    s = (torch.rand(N, groups) * 0.02 + 0.001).half()
    tensors = stored(pack_stream, q, z, s, 4, v2=True, g_idx=None)
    weight = load(tensors, (N, k), config(4, 128, checkpoint_format="gptq_v2"), "gptq")
    assert torch.equal(dequantize(weight), value(q, z, s, of))
    if k == 704:
        with pytest.raises(BadModelFile, match=r"scales: has 6 groups for 704 inputs, and no group size is stated"):
            load(tensors, (N, k), config(4, -1, checkpoint_format="gptq_v2"), "gptq")


def test_eight_bits_with_far_zeros_stay_exact(load: Load, pack_stream: Pack, caplog: pytest.LogCaptureFixture) -> None:
    q, z, s = layer(8, 4)
    z[:, 0] = 0
    q[:, 0] = 255
    tensors = stored(pack_stream, q, z, s, 8, v2=True, g_idx=None)
    with caplog.at_level(logging.WARNING):
        weight = load(tensors, (N, K), config(8, 32, checkpoint_format="gptq_v2"), "gptq")
    assert weight.form == "dense"
    assert "float32" in caplog.text
    assert torch.equal(dequantize(weight), value(q, z, s, torch.arange(K) // 32))


@pytest.mark.parametrize("wrong", [-1, 4, 99])
def test_a_group_that_does_not_exist(load: Load, pack_stream: Pack, wrong: int) -> None:
    q, z, s = layer(4, 4)
    g_idx = torch.arange(K) // 32
    g_idx[5] = wrong
    with pytest.raises(BadModelFile, match="scales only for 0 to 3"):
        load(stored(pack_stream, q, z, s, 4, v2=True, g_idx=g_idx), (N, K), config(4, 32), "gptq")


def test_groups_that_cannot_be_aligned(load: Load, pack_stream: Pack) -> None:
    q, z, s = layer(4, 4)
    g_idx = torch.arange(K) // 32
    g_idx[5] = 3
    with pytest.raises(BadModelFile, match="groups of 31 to 33 columns"):
        load(stored(pack_stream, q, z, s, 4, v2=True, g_idx=g_idx), (N, K), config(4, 32), "gptq")

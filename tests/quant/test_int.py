"""INT8, ModelOpt INT4, compressed-tensors packed integers, dense; packers of our own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from localllm.checkpoint.opening import open_checkpoint
from localllm.errors import BadModelFile, UnsupportedFormat
from localllm.quant import Weight, dequantize, fuse, read_dense

Load = Callable[..., Weight]
Pack = Callable[[Tensor, int], Tensor]
N, K, G = 16, 96, 32


@pytest.mark.parametrize("shape", [(N, 1), (N,), (1,), ()])
def test_int8(load: Load, shape: tuple[int, ...]) -> None:
    q, s = torch.randint(-128, 128, (N, K), dtype=torch.int8), torch.rand(shape) + 0.01
    weight = load({"weight": q, "weight_scale": s}, (N, K), {"quant_method": "compressed-tensors"}, "int8")
    assert weight.scales is not None
    assert weight.scales.shape == (N, 1)
    assert torch.equal(dequantize(weight), q.float() * s.view(-1, 1))
    fused = fuse([weight, weight])
    assert fused is not None
    assert torch.equal(dequantize(fused), torch.cat([dequantize(weight)] * 2))


def test_int8_smoothquant_keeps_its_input_factor(load: Load) -> None:
    q, s, factor = torch.randint(-128, 128, (N, K), dtype=torch.int8), torch.rand(N), torch.rand(K)
    weight = load({"weight": q, "weight_scale": s, "pre_quant_scale": factor}, (N, K), {}, "int8")
    assert torch.equal(dequantize(weight), q.float() * s.view(N, 1) * factor)


def test_int8_with_zero_points_is_refused(load: Load) -> None:
    tensors = {"weight": torch.zeros(N, K, dtype=torch.int8), "weight_scale": torch.ones(N, 1)}
    zero = torch.zeros(N, 1, dtype=torch.int8)
    assert load({**tensors, "weight_zero_point": zero}, (N, K), {}, "int8").form == "int8"
    with pytest.raises(UnsupportedFormat, match="zero points"):
        load({**tensors, "weight_zero_point": zero + 1}, (N, K), {}, "int8")


def test_modelopt_int4(load: Load) -> None:
    q, s = torch.randint(-8, 8, (N, K)), torch.rand(N, K // G) + 0.01
    low, high = (q[0::2] & 15).to(torch.uint8), (q[1::2] & 15).to(torch.uint8)
    tensors = {"weight": low | (high << 4), "weight_scale": s, "pre_quant_scale": torch.full((K,), 2.0)}
    # W4A8 has a second scale for its FP8 activations, which does not take part here.
    tensors["weight_scale_2"] = torch.tensor(0.01)
    weight = load(tensors, (N, K), {"quant_method": "modelopt"}, "modelopt_int4")
    expected = (q.view(N, -1, G).float() * s.unsqueeze(-1)).flatten(1)
    assert weight.zeros is None
    assert torch.equal(dequantize(weight), expected * 2)


def test_modelopt_int4_with_a_shorter_last_group(load: Load) -> None:
    q, s = torch.randint(-8, 8, (N, 704)), torch.rand(N, 6) + 0.01
    low, high = (q[0::2] & 15).to(torch.uint8), (q[1::2] & 15).to(torch.uint8)
    tensors = {"weight": low | (high << 4), "weight_scale": s}
    weight = load(tensors, (N, 704), {"quant_method": "modelopt", "group_size": 128}, "modelopt_int4")
    assert torch.equal(dequantize(weight), q.float() * s[:, torch.arange(704) // 128])


def config(bits: int) -> dict[str, object]:
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": G}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("zero", [None, "packed", "plain"])
def test_packed_integers(load: Load, pack_stream: Pack, bits: int, zero: str | None) -> None:
    q, z = torch.randint(0, 1 << bits, (N, K)), torch.randint(0, 1 << bits, (N, K // G))
    s = (torch.rand(N, K // G) + 0.01).bfloat16()
    tensors = {
        "weight_packed": pack_stream(q, bits),
        "weight_scale": s,
        "weight_shape": torch.tensor([N, K]),
    }
    if zero == "packed":
        tensors["weight_zero_point"] = pack_stream(z.t().contiguous(), bits).t()
    elif zero == "plain":
        tensors["weight_zero_point"] = (z - (1 << (bits - 1))).to(torch.int8)
    else:
        z = torch.full_like(z, 1 << (bits - 1))
    weight = load(tensors, (N, K), config(bits), "ct_pack")
    expected = (q.view(N, -1, G) - z.unsqueeze(-1)).float() * s.float().unsqueeze(-1)
    assert torch.equal(dequantize(weight), expected.flatten(1))


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_words_with_unused_bits(load: Load, bits: int) -> None:
    per_word, q = 32 // bits, torch.randint(0, 1 << bits, (N, K))
    runs = torch.nn.functional.pad(q, (0, -K % per_word)).unflatten(-1, (-1, per_word))
    words = (runs << (torch.arange(per_word) * bits)).sum(-1).to(torch.int32)
    s = torch.rand(N, 1) + 0.01
    tensors = {"weight_packed": words, "weight_scale": s, "weight_shape": torch.tensor([N, K])}
    weight = load(tensors, (N, K), config(bits), "ct_pack")
    assert torch.equal(dequantize(weight), (q - (1 << (bits - 1))).float() * s)


def test_activation_order(load: Load, pack_stream: Pack) -> None:
    q, s = torch.randint(0, 16, (N, K)), torch.rand(N, K // G) + 0.01
    g_idx = (torch.arange(K) // G)[torch.randperm(K)]
    tensors = {
        "weight_packed": pack_stream(q, 4),
        "weight_scale": s,
        "weight_shape": torch.tensor([N, K]),
        "weight_g_idx": g_idx.to(torch.int32),
    }
    weight = load(tensors, (N, K), config(4), "ct_pack")
    assert torch.equal(dequantize(weight), (q - 8).float() * s[:, g_idx])
    tensors["weight_g_idx"] = torch.full((K,), -1, dtype=torch.int32)
    weight = load(tensors, (N, K), config(4), "ct_pack")
    assert weight.perm is None
    assert torch.equal(dequantize(weight), (q - 8).float() * s[:, torch.arange(K) // G])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dense(load: Load, dtype: torch.dtype, tmp_path: Path) -> None:
    w = torch.randn(N, K).to(dtype)
    weight = load({"weight": w}, (N, K), {}, "dense")
    kept = torch.float32 if dtype == torch.float64 else dtype
    assert weight.qweight.dtype == kept
    assert torch.equal(weight.qweight, w.to(kept))
    with pytest.raises(BadModelFile, match=r"shape \[16, 96\].*needs \[16, 64\]"):
        load({"weight": w}, (N, 64), {}, "dense")


def test_read_dense(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(7), "b": torch.randn(3, 5).bfloat16(), "c": torch.ones(2, dtype=torch.int32)}
    tensors["d"] = torch.randn(3).double()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    checkpoint = open_checkpoint(tmp_path)
    for name in ("a", "b"):
        assert torch.equal(read_dense(checkpoint, name), tensors[name])
    assert torch.equal(read_dense(checkpoint, "d"), tensors["d"].float())
    read_dense(checkpoint, "a").add_(1)  # small ones are the caller's own
    assert torch.equal(read_dense(checkpoint, "a"), tensors["a"])
    with pytest.raises(BadModelFile, match="tensor c is stored as I32"):
        read_dense(checkpoint, "c")
    with pytest.raises(BadModelFile, match="tensor nothing is missing"):
        read_dense(checkpoint, "nothing")


def test_mixed_zero_points_fuse(load: Load, pack_stream: Pack) -> None:
    q, s = torch.randint(0, 16, (N, K)), torch.rand(N, K // G) + 0.01
    z = torch.randint(0, 16, (N, K // G))
    tensors = {"weight_packed": pack_stream(q, 4), "weight_scale": s, "weight_shape": torch.tensor([N, K])}
    plain = load(tensors, (N, K), config(4), "ct_pack")
    tensors["weight_zero_point"] = pack_stream(z.t().contiguous(), 4).t()
    moved = load({**tensors, "weight_scale": s.bfloat16()}, (N, K), config(4), "ct_pack")
    whole = fuse([plain, moved])
    assert whole is not None
    assert torch.equal(dequantize(whole), torch.cat([dequantize(plain), dequantize(moved)]))
    assert fuse([plain]) is plain

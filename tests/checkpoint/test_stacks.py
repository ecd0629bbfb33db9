"""Tensors of all experts of a layer, taken apart without a byte moved."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from localllm.checkpoint.checkpoint import Checkpoint
from localllm.checkpoint.mapped_file import MappedFile, TensorInfo
from localllm.checkpoint.stacks import unstacked
from localllm.errors import BadModelFile

HF = "model.layers.0.mlp.experts."


def checkpoint(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> Checkpoint:
    """A file of the tensors one after another, behind a byte that leaves them unaligned."""
    data, infos = b"x", {}
    for name, (dtype, values) in tensors.items():
        infos[name] = TensorInfo(name, dtype, values.shape, values.nbytes, path, len(data))
        data += values.tobytes()
    path.write_bytes(data)
    return Checkpoint(path, "safetensors", unstacked(infos), {path: MappedFile(path)})


def numbers(*shape: int, dtype: str = "f4") -> np.ndarray:
    return np.random.default_rng(math.prod(shape)).integers(0, 255, shape).astype(dtype)


def read(found: Checkpoint, name: str, dtype: str = "f4") -> np.ndarray:
    return found.read(name).view(dtype).reshape(found.tensors[name].shape)


def test_gguf_experts_are_slices_of_the_file(tmp_path: Path) -> None:
    gate, bias, both = numbers(3, 4, 5), numbers(3, 4), numbers(3, 8, 6)
    stored = {"gate_exps.weight": gate, "gate_exps.bias": bias, "down_exps.scale": numbers(3)}
    tensors = {f"blk.7.ffn_{name}": ("F32", values) for name, values in stored.items()}
    tensors["blk.8.ffn_gate_up_exps.weight"] = ("F32", both)
    found = checkpoint(tmp_path / "f", tensors)
    assert len(found.tensors) == 9 + 6
    for expert in range(3):
        for name, values in stored.items():
            kind, _, suffix = name.partition(".")
            assert np.array_equal(read(found, f"blk.7.ffn_{kind}.{expert}.{suffix}"), values[expert])
        assert np.array_equal(read(found, f"blk.8.ffn_gate_exps.{expert}.weight"), both[expert, :4])
        assert np.array_equal(read(found, f"blk.8.ffn_up_exps.{expert}.weight"), both[expert, 4:])
    (file,) = found.files.values()
    assert all(file.holds(found.read(name).ctypes.data) for name in found.tensors)


def test_old_gguf_files_keep_experts_apart(tmp_path: Path) -> None:
    found = checkpoint(tmp_path / "f", {"blk.0.ffn_down.1.weight": ("F32", numbers(2, 3))})
    assert list(found.tensors) == ["blk.0.ffn_down_exps.1.weight"]


def test_experts_of_transformers_5(tmp_path: Path) -> None:
    gate_up, down = numbers(2, 6, 5), numbers(2, 5, 3)
    tensors = {f"{HF}gate_up_proj": ("F32", gate_up), f"{HF}down_proj": ("F32", down)}
    found = checkpoint(tmp_path / "f", tensors)
    assert np.array_equal(read(found, f"{HF}1.gate_proj.weight"), gate_up[1, :3])
    assert np.array_equal(read(found, f"{HF}1.up_proj.weight"), gate_up[1, 3:])
    assert np.array_equal(read(found, f"{HF}1.down_proj.weight"), down[1])
    assert found.nbytes == gate_up.nbytes + down.nbytes


def test_gpt_oss_keeps_gate_and_up_rows_in_turns(tmp_path: Path) -> None:
    gate_up, down, bias = numbers(2, 5, 6), numbers(2, 3, 5), numbers(2, 6)
    tensors = {
        f"{HF}{name}": ("F32", values)
        for name, values in {
            "gate_up_proj": gate_up, "gate_up_proj_bias": bias, "down_proj": down, "down_proj_bias": numbers(2, 5),
        }.items()
    }  # fmt: skip
    found = checkpoint(tmp_path / "f", tensors)
    assert np.array_equal(read(found, f"{HF}1.gate_proj.weight"), gate_up[1, :, 0::2].T)
    assert np.array_equal(read(found, f"{HF}1.up_proj.weight"), gate_up[1, :, 1::2].T)
    assert np.array_equal(read(found, f"{HF}0.down_proj.weight"), down[0].T)
    assert np.array_equal(read(found, f"{HF}1.up_proj.bias"), bias[1, 1::2])
    assert read(found, f"{HF}1.down_proj.bias").shape == (5,)


def test_mxfp4_blocks_of_gpt_oss(tmp_path: Path) -> None:
    blocks, scales = numbers(2, 6, 3, 16, dtype="u1"), numbers(2, 6, 3, dtype="u1")
    tensors = {f"{HF}gate_up_proj_blocks": ("U8", blocks), f"{HF}gate_up_proj_scales": ("U8", scales)}
    found = checkpoint(tmp_path / "f", tensors)
    assert np.array_equal(read(found, f"{HF}1.gate_proj.weight_packed", "u1"), blocks[1, 0::2].reshape(3, 48))
    assert np.array_equal(read(found, f"{HF}1.up_proj.weight_scale", "u1"), scales[1, 1::2])


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({f"{HF}gate_up_proj": numbers(2, 5, 4)}, "5 rows an expert"),
        ({f"{HF}down_proj": numbers(1, 5, 4), f"{HF}0.down_proj.weight": numbers(5, 4)}, "stored twice"),
    ],
)
def test_what_cannot_be_taken_apart_is_named(tensors: dict[str, np.ndarray], words: str, tmp_path: Path) -> None:
    with pytest.raises(BadModelFile, match=words):
        checkpoint(tmp_path / "f", {name: ("F32", values) for name, values in tensors.items()})


def test_other_shapes_stay_as_they_are(tmp_path: Path) -> None:
    tensors = {f"{HF}gate_up_proj": numbers(4, 6), f"{HF}down_proj_blocks": numbers(2, 2), "a.weight": numbers(1)}
    assert list(checkpoint(tmp_path / "f", {k: ("F32", v) for k, v in tensors.items()}).tensors) == list(tensors)

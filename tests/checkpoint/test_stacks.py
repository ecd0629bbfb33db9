"""Tensors of all experts of a layer, taken apart without a byte moved."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from localllm.checkpoint import stored_formats
from localllm.checkpoint.checkpoint import Checkpoint
from localllm.checkpoint.mapped_file import MappedFile, TensorInfo
from localllm.checkpoint.stacks import unstacked
from localllm.errors import BadModelFile, UnsupportedFormat

HF = "model.layers.0.mlp.experts."
ENDS = ("weight", "input")


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


def test_the_gate_of_a_shared_expert_is_a_row(tmp_path: Path) -> None:
    """llama-quantize writes it as a vector, the converter itself as a matrix of one row."""
    name = "blk.3.ffn_gate_inp_shexp.weight"
    for values in (numbers(5000), numbers(1, 5000)):
        found = checkpoint(tmp_path / "f", {name: ("F32", values)})
        assert np.array_equal(read(found, name), values.reshape(1, 5000))


def test_experts_of_transformers_5(tmp_path: Path) -> None:
    gate_up, down = numbers(2, 6, 5), numbers(2, 5, 3)
    tensors = {f"{HF}gate_up_proj": ("F32", gate_up), f"{HF}down_proj": ("F32", down)}
    found = checkpoint(tmp_path / "f", tensors)
    assert np.array_equal(read(found, f"{HF}1.gate_proj.weight"), gate_up[1, :3])
    assert np.array_equal(read(found, f"{HF}1.up_proj.weight"), gate_up[1, 3:])
    assert np.array_equal(read(found, f"{HF}1.down_proj.weight"), down[1])
    assert found.nbytes == gate_up.nbytes + down.nbytes


def test_fp8_experts_of_granite_have_their_scales(tmp_path: Path) -> None:
    start = "model.layers.0.block_sparse_moe."
    both, down = numbers(2, 6, 1), numbers(2, 5, 1)
    tensors = {
        f"{start}input_linear.weight": ("F8_E4M3", numbers(2, 6, 5, dtype="u1")),
        f"{start}input_linear.weight_scale": ("F32", both),
        f"{start}output_linear.weight": ("F8_E4M3", numbers(2, 5, 3, dtype="u1")),
        f"{start}output_linear.weight_scale": ("F32", down),
    }
    found = checkpoint(tmp_path / "f", tensors)
    assert np.array_equal(read(found, f"{start}experts.1.gate_proj.weight_scale"), both[1, :3])
    assert np.array_equal(read(found, f"{start}experts.1.up_proj.weight_scale"), both[1, 3:])
    assert np.array_equal(read(found, f"{start}experts.1.down_proj.weight_scale"), down[1])
    assert {stored.kind for stored in stored_formats(found).values()} == {"fp8"}


def test_packed_experts_of_gemma_4(tmp_path: Path) -> None:
    packed, scale = numbers(2, 6, 8, dtype="i4"), numbers(2, 6, 2)
    tensors = {
        f"{HF}gate_up_proj_packed": ("I32", packed),
        f"{HF}gate_up_proj_scale": ("F32", scale),
        f"{HF}down_proj_packed": ("I32", numbers(2, 5, 4, dtype="i4")),
        f"{HF}down_proj_scale": ("F32", numbers(2, 5, 1)),
    }
    found = checkpoint(tmp_path / "f", tensors)
    found.quantization_config = {"config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}}}
    assert np.array_equal(read(found, f"{HF}1.up_proj.weight_packed", "i4"), packed[1, 3:])
    assert np.array_equal(read(found, f"{HF}1.gate_proj.weight_scale"), scale[1, :3])
    formats = stored_formats(found)
    assert {stored.label for stored in formats.values()} == {"w4a16"}
    assert formats[f"{HF}0.gate_proj"].shape == (3, 64)
    assert formats[f"{HF}1.down_proj"].shape == (5, 32)


def test_fp8_blocks_of_stacked_experts(tmp_path: Path) -> None:
    both = numbers(2, 4, 1)
    tensors = {
        f"{HF}gate_up_proj": ("F8_E4M3", numbers(2, 512, 128, dtype="u1")),
        f"{HF}gate_up_proj_scale_inv": ("F32", both),
        f"{HF}down_proj": ("F8_E4M3", numbers(2, 128, 256, dtype="u1")),
        f"{HF}down_proj_scale_inv": ("F32", numbers(2, 1, 2)),
    }
    found = checkpoint(tmp_path / "f", tensors)
    assert np.array_equal(read(found, f"{HF}1.gate_proj.weight_scale_inv"), both[1, :2])
    assert np.array_equal(read(found, f"{HF}1.up_proj.weight_scale_inv"), both[1, 2:])
    assert {stored.kind for stored in stored_formats(found).values()} == {"fp8"}
    tensors[f"{HF}gate_up_proj"] = ("F8_E4M3", numbers(2, 448, 128, dtype="u1"))  # the second block has 32 up rows
    with pytest.raises(UnsupportedFormat, match="448 gate and up rows"):
        checkpoint(tmp_path / "f", tensors)


def test_fp8_blocks_of_experts_in_columns(tmp_path: Path) -> None:
    both, down = numbers(2, 1, 4), numbers(2, 2, 1)
    tensors = {
        f"{HF}gate_up_proj": ("F8_E4M3", numbers(2, 128, 512, dtype="u1")),
        f"{HF}gate_up_proj_scale_inv": ("F32", both),
        f"{HF}down_proj": ("F8_E4M3", numbers(2, 256, 128, dtype="u1")),
        f"{HF}down_proj_scale_inv": ("F32", down),
    }
    found = checkpoint(tmp_path / "f", tensors)
    assert np.array_equal(read(found, f"{HF}1.up_proj.weight_scale_inv"), both[1, :, 2:].T)
    assert np.array_equal(read(found, f"{HF}1.down_proj.weight_scale_inv"), down[1].T)
    assert stored_formats(found)[f"{HF}0.gate_proj"].shape == (256, 128)


@pytest.mark.parametrize("world", [(2,), (2, 2)])
def test_nvfp4_of_stacked_experts(world: tuple[int, ...], tmp_path: Path) -> None:
    scale, whole = numbers(2, 6, 2, dtype="u1"), np.arange(math.prod(world), dtype="f4").reshape(world)
    tensors = {
        f"{HF}gate_up_proj": ("U8", numbers(2, 6, 16, dtype="u1")),
        f"{HF}gate_up_proj_weight_scale": ("F8_E4M3", scale),
        f"{HF}gate_up_proj_weight_scale_2": ("F32", whole),
        f"{HF}gate_up_proj_input_scale": ("F32", whole),
    }
    found = checkpoint(tmp_path / "f", tensors)
    assert np.array_equal(read(found, f"{HF}1.up_proj.weight_scale", "u1"), scale[1, 3:])
    assert read(found, f"{HF}1.up_proj.weight_scale_2") == whole[1, ...].reshape(-1)[-1]
    assert {stored.kind for stored in stored_formats(found).values()} == {"nvfp4"}


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale_of_all_experts(shape: tuple[int, ...], tmp_path: Path) -> None:
    scale = np.full(shape, 0.25, "f4")
    tensors = {f"{HF}gate_up_proj": ("F8_E4M3", numbers(3, 5, 8, dtype="u1"))}
    tensors |= {f"{HF}down_proj": ("F8_E4M3", numbers(3, 4, 5, dtype="u1"))}
    tensors |= {f"{HF}{name}_proj_{end}_scale": ("F32", scale) for name in ("gate_up", "down") for end in ENDS}
    found = checkpoint(tmp_path / "f", tensors)
    assert all(read(found, f"{HF}{expert}.up_proj.weight_scale") == 0.25 for expert in range(3))
    assert {name.rpartition(".")[2] for name in found.tensors} == {"weight", *(f"{end}_scale" for end in ENDS)}
    assert {stored.kind for stored in stored_formats(found).values()} == {"fp8"} and len(found.tensors) == 27


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
        ({f"{HF}gate_up_proj": numbers(2, 5, 4)}, "5 rows per expert"),
        ({f"{HF}down_proj": numbers(1, 5, 4), f"{HF}0.down_proj.weight": numbers(5, 4)}, "stored twice"),
    ],
)
def test_what_cannot_be_taken_apart_is_named(tensors: dict[str, np.ndarray], words: str, tmp_path: Path) -> None:
    with pytest.raises(BadModelFile, match=words):
        checkpoint(tmp_path / "f", {name: ("F32", values) for name, values in tensors.items()})


def test_other_shapes_stay_as_they_are(tmp_path: Path) -> None:
    tensors = {f"{HF}gate_up_proj": numbers(4, 6), f"{HF}down_proj_blocks": numbers(2, 2), "a.weight": numbers(1)}
    assert list(checkpoint(tmp_path / "f", {k: ("F32", v) for k, v in tensors.items()}).tensors) == list(tensors)

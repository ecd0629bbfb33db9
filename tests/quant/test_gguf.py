from __future__ import annotations

import logging
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize as reference
from torch import Tensor

from localllm.checkpoint import stored_formats
from localllm.checkpoint.formats.gguf import CODEBOOK_TYPES
from localllm.checkpoint.opening import open_checkpoint
from localllm.errors import BadModelFile, UnsupportedFormat
from localllm.kernels.gguf_blocks import BLOCK_TYPES, dequantize_blocks
from localllm.quant import dequantize, dequantize_rows, fuse, load_weight

BLOCKS = sorted(name for name, layout in BLOCK_TYPES.items() if layout.elems > 1)
FORMS = {"Q4_0": "int4g", "Q4_1": "int4g", "Q8_0": "int8", "MXFP4": "fp4g32", "NVFP4": "fp4g16"}


def random_rows(block_type: str, rows: int, blocks: int, *, sound: bool) -> np.ndarray:
    """u8 [rows, blocks * nbytes] of random bytes; `sound`: with scales that are finite numbers."""
    layout = BLOCK_TYPES[block_type]
    data = np.random.default_rng(7).integers(0, 256, (rows, blocks, layout.nbytes), dtype=np.uint8)
    if sound:
        for offset in layout.scale_offsets:
            scale = np.random.default_rng(offset).uniform(-0.1, 0.1, (rows, blocks, 1)).astype(np.float16)
            data[:, :, offset : offset + 2] = scale.view(np.uint8)
        if block_type == "MXFP4":
            data[:, :, 0] %= 255
        if block_type == "NVFP4":
            data[:, :, :4] &= 0x7F
    return data.reshape(rows, -1)


def bits(values: np.ndarray) -> np.ndarray:
    """float32 as integers, every NaN the same."""
    return np.where(np.isnan(values), np.int32(-1), values.view(np.int32))


class OneTensor:
    """A checkpoint of GGUF tensors in memory."""

    def __init__(self, **tensors: tuple[str, tuple[int, ...], np.ndarray]) -> None:
        self.kind = "gguf"
        named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
        self.tensors = {name: SimpleNamespace(dtype=d, shape=s) for name, (d, s, _) in named.items()}
        self._data = {name: data for name, (_, _, data) in named.items()}

    def read(self, name: str) -> np.ndarray:
        data = np.ascontiguousarray(self._data[name]).view(np.uint8).reshape(-1)
        data.flags.writeable = False
        return data


def load(data: np.ndarray, block_type: str, shape: tuple[int, int], **more):
    checkpoint = OneTensor(blk__0__up__weight=(block_type, shape, data), **more)
    return load_weight(checkpoint, "blk.0.up", SimpleNamespace(kind="gguf", params={}), shape)


@pytest.mark.parametrize("block_type", BLOCKS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's reference on random bytes: inf * 0
def test_random_bytes_decode_bit_for_bit(block_type: str) -> None:
    data = random_rows(block_type, 33, 3, sound=False)
    ours = dequantize_blocks(torch.from_numpy(data), block_type).numpy()
    assert np.array_equal(bits(ours), bits(reference(data, gguf.GGMLQuantizationType[block_type])))


@pytest.mark.parametrize("block_type", BLOCKS)
def test_a_tensor_loads_to_the_same_numbers(block_type: str) -> None:
    data = random_rows(block_type, 5, 2, sound=True)
    shape = (5, 2 * BLOCK_TYPES[block_type].elems)
    weight = load(data, block_type, shape)
    expected = reference(data, gguf.GGMLQuantizationType[block_type])
    assert weight.form == FORMS.get(block_type, "gguf")
    assert np.array_equal(dequantize(weight).numpy(), expected)
    assert np.array_equal(dequantize_rows(weight, torch.tensor([4, 0, 4])).numpy(), expected[[4, 0, 4]])


@pytest.mark.parametrize("block_type", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_what_gguf_packs_reads_back(block_type: str) -> None:
    values = np.random.default_rng(3).normal(size=(6, 96)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[block_type]
    packed = gguf.quants.quantize(values, kind)
    assert np.array_equal(dequantize(load(packed, block_type, (6, 96))).numpy(), reference(packed, kind))


@pytest.mark.parametrize(("block_type", "dtype"), [("F32", np.float32), ("F16", np.float16)])
def test_dense_types_keep_their_dtype(block_type: str, dtype: type) -> None:
    values = np.random.default_rng(3).normal(size=(3, 7)).astype(dtype)
    weight = load(values, block_type, (3, 7))
    assert weight.form == "dense"
    assert weight.qweight.element_size() == values.itemsize
    assert np.array_equal(dequantize(weight).numpy(), values.astype(np.float32))


def test_bf16() -> None:
    values = torch.randn(3, 8).bfloat16()
    assert torch.equal(dequantize(load(values.view(torch.uint8).numpy(), "BF16", (3, 8))), values.float())


def golden(data: bytes, block_type: str, elements: int) -> Tensor:
    return dequantize_blocks(torch.tensor([list(data)], dtype=torch.uint8), block_type)[0, :elements]


def test_golden_blocks() -> None:
    assert golden(b"\x00\x3c" + b"\x98" * 16, "Q4_0", 32).tolist() == [0.0] * 16 + [1.0] * 16
    block = bytearray(144)
    block[0:4] = b"\x00\x3c\x00\x3c"
    block[4], block[8], block[16] = 2, 1, 0x31
    assert golden(bytes(block), "Q4_K", 256).tolist() == [1.0] + [-1.0] * 31 + [0.0] * 224


def test_nvfp4_multiplies_by_its_sidecar() -> None:
    data = random_rows("NVFP4", 4, 1, sound=True)
    half = load(data, "NVFP4", (4, 64), blk__0__up__scale=("F32", (1,), np.array([0.5], np.float32)))
    assert torch.equal(dequantize(half), dequantize(load(data, "NVFP4", (4, 64))) * 0.5)


@pytest.mark.parametrize("block_type", ["IQ2_XXS", "IQ3_S", "TQ1_0", "TQ2_0"])
def test_codebook_types_become_bf16_with_a_warning(block_type: str, caplog: pytest.LogCaptureFixture) -> None:
    from localllm.quant import gguf as module

    module._warn_once.cache_clear()
    kind = gguf.GGMLQuantizationType[block_type]
    data = np.random.default_rng(1).integers(0, 60, (3, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    with caplog.at_level(logging.WARNING):
        weight = load(data, block_type, (3, 256))
    assert weight.qweight.dtype == torch.bfloat16
    assert torch.equal(weight.qweight, torch.from_numpy(reference(data, kind)).bfloat16())
    assert block_type in caplog.text


def test_every_codebook_type_is_known_to_the_gguf_package() -> None:
    assert {gguf.GGMLQuantizationType[name] for name in CODEBOOK_TYPES} <= set(gguf.quants._type_traits)


def test_unknown_block_types_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedFormat, match=r"blk\.0\.up\.weight has block type Q1_0"):
        load(np.zeros((2, 18), np.uint8), "Q1_0", (2, 128))


@pytest.mark.parametrize("block_type", [name for name in BLOCKS if BLOCK_TYPES[name].scale_offsets])
def test_scales_that_are_no_numbers_are_refused(block_type: str) -> None:
    data = random_rows(block_type, 2, 1, sound=True)
    offset = BLOCK_TYPES[block_type].scale_offsets[-1]
    data[1, offset : offset + 2] = (0x00, 0x7E)
    with pytest.raises(BadModelFile, match="non-finite"):
        load(data, block_type, (2, BLOCK_TYPES[block_type].elems))


def test_nan_scale_bytes_are_refused() -> None:
    for block_type in ("MXFP4", "NVFP4"):
        data = random_rows(block_type, 2, 1, sound=True)
        data[1, 0] = 0xFF
        with pytest.raises(BadModelFile, match="NaN"):
            load(data, block_type, (2, BLOCK_TYPES[block_type].elems))


@pytest.mark.parametrize(("which", "types"), [("smollm2_path", 1), ("gemma_path", 3)])
def test_real_tensors_bit_for_bit(which: str, types: int, request: pytest.FixtureRequest) -> None:
    checkpoint = open_checkpoint(request.getfixturevalue(which))
    formats = stored_formats(checkpoint)
    seen: set[str] = set()
    for name, stored in formats.items():
        info = checkpoint.tensors[f"{name}.weight"]
        if info.dtype in seen or info.dtype == "F32" or info.shape[0] > 4096:
            continue
        seen.add(info.dtype)
        rows = checkpoint.read(f"{name}.weight").reshape(info.shape[0], -1)
        weight = load_weight(checkpoint, name, stored, info.shape)
        expected = reference(rows, gguf.GGMLQuantizationType[info.dtype])
        assert np.array_equal(dequantize(weight).numpy(), expected), name
    assert len(seen) >= types


@pytest.mark.slow
@pytest.mark.parametrize("which", ["smollm2_path", "gemma_path"])
def test_every_real_tensor_bit_for_bit(which: str, request: pytest.FixtureRequest) -> None:
    checkpoint = open_checkpoint(request.getfixturevalue(which))
    for name, stored in stored_formats(checkpoint).items():
        info = checkpoint.tensors[f"{name}.weight"]
        rows = checkpoint.read(f"{name}.weight").reshape(info.shape[0], -1)
        weight = load_weight(checkpoint, name, stored, info.shape)
        expected = reference(rows, gguf.GGMLQuantizationType[info.dtype])
        assert np.array_equal(dequantize(weight).numpy(), expected), name


def test_fusing_keeps_every_row() -> None:
    for block_type in BLOCKS:
        k = 2 * BLOCK_TYPES[block_type].elems
        parts = [load(random_rows(block_type, n, 2, sound=True), block_type, (n, k)) for n in (3, 1, 4)]
        whole = fuse(parts)
        assert whole is not None
        assert whole.shape == (8, k)
        assert torch.equal(dequantize(whole), torch.cat([dequantize(p) for p in parts]))
    other = load(random_rows("Q4_0", 3, 2, sound=True), "Q4_0", (3, 64))
    assert fuse([other, load(random_rows("Q8_0", 3, 2, sound=True), "Q8_0", (3, 64))]) is None


def test_a_table_with_minus_zero_is_another_table() -> None:
    """Both are kept between calls; 0.0 == -0.0 once made one of them the other."""
    from localllm.kernels.gguf_blocks import constant

    cpu = torch.device("cpu")
    plus, minus = (constant((zero, 1.0), torch.float32, cpu) for zero in (0.0, -0.0))
    assert [bool(torch.signbit(table[0])) for table in (plus, minus)] == [False, True]

"""Checked access to the tensors of one stored linear layer: names, dtypes, shapes and valid scales."""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from localllm.errors import BadModelFile

if TYPE_CHECKING:
    from localllm.checkpoint.checkpoint import Checkpoint

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.uint8, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
FLOATS = ("F32", "BF16", "F16")


def stored_bytes(ckpt: Checkpoint, name: str) -> Tensor:
    """u8 [nbytes], a read-only view of the mapped file that keeps the mapping alive."""
    data = ckpt.read(name)
    # torch.from_numpy warns about read-only memory on every call; a ctypes array is the same memory without the flag.
    memory = (ctypes.c_uint8 * data.nbytes).from_address(data.ctypes.data)
    memory.owner = data  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.uint8)


def read_tensor(ckpt: Checkpoint, name: str, dtypes: Collection[str] = ()) -> Tensor:
    """Read a tensor in its stored dtype and shape, as a view of the file if its alignment allows.

    Raises BadModelFile if it is missing or its dtype is not in `dtypes`.
    """
    info = ckpt.tensors.get(name)
    if info is None:
        raise BadModelFile(f"tensor {name} is missing")
    dtype = DTYPES.get(info.dtype)
    if dtype is None or (dtypes and info.dtype not in dtypes):
        raise BadModelFile(f"tensor {name} is stored as {info.dtype}, expected {' or '.join(dtypes or DTYPES)}")
    data = stored_bytes(ckpt, name)
    if data.data_ptr() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).view(info.shape)


@dataclass(frozen=True)
class WeightReader:
    """The tensors under one prefix; format modules read them with `get`."""

    ckpt: Checkpoint
    prefix: str
    shape: tuple[int, int]  # (N, K) of the layer, from the model's configuration

    def name(self, suffix: str) -> str:
        """The full tensor name; a suffix that starts with `_` is appended without a dot."""
        return self.prefix + (suffix if suffix.startswith("_") else f".{suffix}")

    def has(self, suffix: str) -> bool:
        return self.name(suffix) in self.ckpt.tensors

    def bad(self, suffix: str, what: str) -> BadModelFile:
        return BadModelFile(f"tensor {self.name(suffix)} {what}")

    def get(self, suffix: str, dtypes: Collection[str], shape: tuple[int, ...] | None = None) -> Tensor:
        """Read a tensor and check its dtype and shape. Raises BadModelFile."""
        tensor = read_tensor(self.ckpt, self.name(suffix), dtypes)
        if shape is not None and tuple(tensor.shape) != shape:
            layer = f"a layer of {self.shape[0]} outputs and {self.shape[1]} inputs"
            raise self.bad(suffix, f"has shape {list(tensor.shape)}, but {layer} needs {list(shape)}")
        return tensor

    def finite(self, suffix: str, scales: Tensor) -> Tensor:
        """Return `scales` unchanged. Raises BadModelFile if one is infinite or NaN."""
        if not bool(torch.isfinite(scales).all()):
            wrong = int((~torch.isfinite(scales)).sum())
            raise self.bad(suffix, f"has non-finite values ({wrong} of {scales.numel()})")
        return scales

    def scales(self, suffix: str, shape: tuple[int, ...] | None = None) -> Tensor:
        return self.finite(suffix, self.get(suffix, FLOATS, shape))

    def scalar(self, suffix: str) -> float:
        """Read one positive finite number, stored as [] or [1]."""
        tensor = self.get(suffix, FLOATS)
        if tensor.numel() != 1:
            raise self.bad(suffix, f"has {tensor.numel()} values, expected 1")
        value = tensor.item()
        if not 0 < value < float("inf"):
            raise self.bad(suffix, f"is {value}, expected a positive finite number")
        return value

    def e4m3(self, suffix: str, shape: tuple[int, ...]) -> Tensor:
        """Read E4M3 numbers. Raises BadModelFile for NaN bytes (0x7F, 0xFF), since one such scale makes a row NaN."""
        tensor = self.get(suffix, ("F8_E4M3",), shape)
        wrong = sum(int(((part & 0x7F) == 0x7F).sum()) for part in tensor.view(torch.uint8).flatten().split(1 << 22))
        if wrong:
            raise self.bad(suffix, f"holds {wrong} NaN bytes (0x7F or 0xFF) out of {tensor.numel()}")
        return tensor

    def e8m0(self, suffix: str, shape: tuple[int, ...]) -> Tensor:
        """Read power-of-two scales as u8. Raises BadModelFile for NaN bytes (0xFF)."""
        tensor = self.get(suffix, ("U8", "F8_E8M0"), shape)
        wrong = int((tensor == 0xFF).sum())
        if wrong:
            raise self.bad(suffix, f"holds {wrong} NaN bytes (0xFF) out of {tensor.numel()}")
        return tensor

    def pre_scale(self) -> Tensor | None:
        """Read the scale [K] that multiplies x before the product (ModelOpt's AWQ exports), or None."""
        if not self.has("pre_quant_scale"):
            return None
        return self.scales("pre_quant_scale").flatten().expand(self.shape[1]).clone()

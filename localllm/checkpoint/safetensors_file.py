"""Reads a safetensors file: a little-endian u64 header length, a JSON header, the data.

The header's size is limited before parsing, so an untrusted file cannot create too many objects. Checks that names are
unique, spans lie inside the file without gaps or overlaps, and sizes match dtype and shape.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from localllm.errors import UnsupportedFormat

from .json_file import parse_json_object
from .mapped_file import MappedFile, TensorInfo, bad, pickle_error, shown

MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 1 << 16
MAX_VALUES = 24 * MAX_TENSORS  # a tensor has up to 19, plus metadata
MAX_NAME_CHARS = 512
MAX_DIMS = 8
MAX_METADATA_ENTRIES = 1 << 12

DTYPE_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


def read_safetensors(file: MappedFile) -> dict[str, TensorInfo]:
    """Return the position of each tensor, without touching the data. Raises BadModelFile or UnsupportedFormat."""
    path, data_start = file.path, 8 + _header_bytes(file)
    header = file.read(8, data_start - 8)
    if not header.startswith(b"{"):
        raise bad(path, "the header does not start with '{'", offset=8)
    entries = parse_json_object(path, header, MAX_VALUES, unique=True, offset=8)
    _check_metadata(path, entries.pop("__metadata__", {}))
    if len(entries) > MAX_TENSORS:
        raise bad(path, f"holds more than {MAX_TENSORS:,} tensors", offset=8)
    tensors = {name: _tensor(path, name, entry, data_start) for name, entry in entries.items()}
    _check_spans(file, tensors, data_start)
    return tensors


def _header_bytes(file: MappedFile) -> int:
    path, begin = file.path, file.read(0, min(file.size, 8))
    if begin[:2] in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        raise pickle_error(path, 0)
    if begin[:4] == b"GGUF":
        raise bad(path, "is a GGUF file named .safetensors", offset=0, hint="rename it to end in .gguf")
    if file.size < 10:
        raise bad(path, f"is {file.size} bytes long; a header needs at least 10", offset=0)
    length = int.from_bytes(begin, "little")
    if length > MAX_HEADER_BYTES:
        raise bad(path, f"the header length is {length:,}; the limit is {MAX_HEADER_BYTES:,}", offset=0)
    if length > file.size - 8:
        what = f"the header length is {length:,}, but {file.size - 8:,} bytes remain: truncated or damaged"
        raise bad(path, what, offset=0)
    return length


def _check_metadata(path: Path, metadata: Any) -> None:
    """Check that the metadata maps strings to strings; it is not used."""
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise bad(path, "must be an object of strings", key="__metadata__")
    if len(metadata) > MAX_METADATA_ENTRIES:
        raise bad(path, f"holds more than {MAX_METADATA_ENTRIES:,} entries", key="__metadata__")


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    if not name or not name.isprintable() or "/" in name or "\\" in name or ".." in name:
        raise bad(path, "a tensor name is empty or contains control characters, slashes or '..'", key=name)
    if len(name) > MAX_NAME_CHARS:
        raise bad(path, f"a tensor name has {len(name):,} characters; the limit is {MAX_NAME_CHARS}", key=name)
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        found = ", ".join(shown(key, 30) for key in list(entry)[:6]) if isinstance(entry, dict) else shown(entry)
        raise bad(path, f"must have dtype, shape and data_offsets; it has {found or 'nothing'}", key=name)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    for field, values, limit in (("shape", shape, MAX_DIMS), ("data_offsets", offsets, 2)):
        fits = isinstance(values, list) and len(values) <= limit
        if not fits or not all(type(item) is int and 0 <= item < 1 << 64 for item in values):
            raise bad(path, f"{field} is {shown(values)}, expected at most {limit} whole numbers", key=name)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise bad(path, f"data_offsets are {offsets}, expected a rising pair", key=name)
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        what = f"has the unknown dtype {shown(dtype)}; known dtypes: {', '.join(DTYPE_BITS)}"
        hint = "download a BF16, FP8, AWQ or GGUF version of this model"
        raise bad(path, what, key=name, hint=hint, error=UnsupportedFormat)
    nbytes, rest = divmod(DTYPE_BITS[dtype] * math.prod(shape), 8)
    if rest:
        raise bad(path, f"{dtype} {shape} does not end on a whole byte", key=name)
    if nbytes != offsets[1] - offsets[0]:
        what = f"{dtype} {shape} takes {nbytes:,} bytes, but its data_offsets span {offsets[1] - offsets[0]:,}"
        raise bad(path, what, key=name)
    return TensorInfo(name, dtype, tuple(shape), nbytes, path, data_start + offsets[0])


def _check_spans(file: MappedFile, tensors: dict[str, TensorInfo], data_start: int) -> None:
    """Check that the tensors cover the data from its first to its last byte, without gaps or overlaps."""
    path, at, before = file.path, data_start, "the header"
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.nbytes)):
        if info.offset != at:
            kind = "there is a gap before its data" if info.offset > at else "its data overlaps the previous tensor"
            what = f"{kind}: {shown(before)} ends at {at:,}, and it starts at {info.offset:,}"
            raise bad(path, what, offset=info.offset, key=info.name)
        at, before = info.offset + info.nbytes, info.name
        if at > file.size:
            what = f"its data ends at byte {at:,}, the file at {file.size:,}: truncated or damaged"
            raise bad(path, what, offset=info.offset, key=info.name)
    if at != file.size:
        raise bad(path, f"{file.size - at:,} bytes at the end belong to no tensor", offset=at)

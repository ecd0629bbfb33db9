"""Reads GGUF containers (versions 2 and 3), treating every byte as hostile.

Every length and count is checked against the bytes that remain before anything is allocated; sizes are Python
integers, so nothing wraps. The result is plain: metadata as a dict, tensors as name -> place in the file. What a model
means by its metadata is `gguf_facts.py`'s business. One pass over a header of 150,000 tokens and 150,000 merges takes
about 0.1 s: string arrays are only scanned for their lengths, and cut into `bytes` when somebody asks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from localllm.errors import UnsupportedFormat

from .gguf_types import ACTIVATION_TYPES, ARRAY, BOOL, RETIRED_TYPES, SCALARS, STRING, TENSOR_TYPES
from .mapped_file import MappedFile, bad, pickle_error, shown
from .tensor_info import ModelFile, TensorInfo

MAX_HEADER_BYTES = 64 << 20  # a 262,144-token vocabulary with its merges is under 20 MiB
MAX_ENTRIES = 1 << 17  # tensors, and separately keys; the largest models with one tensor per expert have 50,000
MAX_STRINGS = 1 << 21  # in all arrays together: 0.4 s of scanning, 100 MB
MAX_STRING_BYTES = 16 << 20
MAX_KEY_BYTES = 256
MAX_TENSOR_NAME_BYTES = 64
MAX_ALIGNMENT = 1 << 16
MAX_DIMS = 4

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class StringArray(Sequence[bytes]):
    """A GGUF array of strings: raw bytes, cut out of one blob on demand."""

    def __init__(self, blob: bytes, ends: np.ndarray) -> None:
        """`blob` is the array as stored (u64 length, bytes, ...); `ends[i]` is where string i ends in it."""
        self.blob = blob
        self.ends = ends  # [count] int64

    @property
    def starts(self) -> np.ndarray:
        """Where each string begins in `blob`, int64 [count]."""
        return np.concatenate(([0], self.ends[:-1])) + 8 if len(self.ends) else self.ends

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        begin = int(self.ends[at - 1]) if at else 0
        return self.blob[begin + 8 : int(self.ends[at])]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.tolist())

    def tolist(self) -> list[bytes]:
        """All strings, at the speed of one list comprehension."""
        blob, ends = self.blob, self.ends.tolist()
        return [blob[begin + 8 : end] for begin, end in zip([0, *ends], ends, strict=False)]

    def __eq__(self, other: object) -> bool:
        return self.tolist() == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


class _Cursor:
    """A position in the header; every read is checked against the end of the file."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.path = file.path
        self.at = 0
        self.end = file.size
        self.strings = 0

    def need(self, nbytes: int, what: str) -> int:
        """Reserve `nbytes` and return where they begin."""
        begin = self.at
        if nbytes > self.end - begin:
            raise bad(
                self.path, f"{what} needs {nbytes:,} bytes, {self.end - begin:,} remain in the file", offset=begin
            )
        if begin + nbytes > MAX_HEADER_BYTES:
            raise bad(self.path, f"{what} reaches past the header limit of {MAX_HEADER_BYTES:,} bytes", offset=begin)
        self.at = begin + nbytes
        return begin

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.file.buffer, self.need(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.file.buffer, self.need(8, what))[0])

    def count(self, what: str, entry_bytes: int, limit: int) -> int:
        """A u64 count of entries that take at least `entry_bytes` each."""
        begin = self.at
        value = self.u64(what)
        if value * entry_bytes > self.end - self.at:
            room = (self.end - self.at) // entry_bytes
            raise bad(self.path, f"{what} is {value:,}, the rest of the file holds at most {room:,}", offset=begin)
        if value > limit:
            raise bad(self.path, f"{what} is {value:,}, the limit is {limit:,}", offset=begin)
        return value

    def string(self, what: str, limit: int) -> bytes:
        begin = self.at
        length = self.u64(f"the length of {what}")
        if length > limit:
            raise bad(self.path, f"{what} is {length:,} bytes long, the limit is {limit:,}", offset=begin)
        start = self.need(length, what)
        return self.file.buffer[start : start + length]

    def name(self, what: str, limit: int) -> str:
        """A string that must be printable UTF-8: a key or a tensor name."""
        begin = self.at
        raw = self.string(what, limit)
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise bad(self.path, f"{what} is not UTF-8: {shown(raw)}", offset=begin) from error
        if not text or not text.isprintable():
            raise bad(self.path, f"{what} is empty or holds control characters: '{shown(text)}'", offset=begin)
        return text


def read_gguf(path: Path) -> ModelFile:
    """Read one GGUF file. Raises ModelNotFound, BadModelFile or UnsupportedFormat; the data itself is not touched."""
    file = MappedFile(path)
    try:
        return _read(file)
    except BaseException:
        file.close()
        raise


def _read(file: MappedFile) -> ModelFile:
    cursor = _Cursor(file)
    _check_magic(cursor)
    # Smallest entries: a tensor is name length 8, dims count 4, one dim 8, type 4, offset 8;
    # a key is length 8, type 4, value 1.
    num_tensors = cursor.count("the number of tensors", 32, MAX_ENTRIES)
    num_keys = cursor.count("the number of metadata keys", 13, MAX_ENTRIES)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        begin = cursor.at
        key = cursor.name("a metadata key", MAX_KEY_BYTES)
        if key in metadata:
            raise bad(cursor.path, "the key appears twice", offset=begin, key=key)
        metadata[key] = _value(cursor, key)
    alignment = _alignment(file.path, metadata)
    entries = [_tensor_entry(cursor) for _ in range(num_tensors)]
    data_start = -(-cursor.at // alignment) * alignment
    return ModelFile(file, _place(file, entries, data_start, alignment), metadata)


def _check_magic(cursor: _Cursor) -> None:
    path = cursor.path
    magic = cursor.file.buffer[:4]
    if magic != b"GGUF":
        known = {b"ggml": "GGML", b"lmgg": "GGML", b"tjgg": "GGJT", b"fmgg": "GGMF", b"FUGG": "byte-swapped GGUF"}
        if magic in known:
            what = f"is a {known[magic]} file, a format from before GGUF"
            hint = "convert it to GGUF, or fetch a GGUF or safetensors copy"
            raise bad(path, what, offset=0, hint=hint, error=UnsupportedFormat)
        if magic.startswith((b"\x80", b"PK")):
            raise pickle_error(path)
        raise bad(path, f"is not a GGUF file: it begins with {shown(magic)!r} instead of 'GGUF'", offset=0)
    cursor.at = 4
    version = cursor.u32("the version")
    if version in (2, 3):
        return
    if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, 2, 3):
        what = "is a big-endian GGUF file; only little-endian ones are read"
    elif version == 1:
        what = "is GGUF version 1; versions 2 and 3 are read"
    else:
        raise bad(path, f"the version is {version:,}; versions 2 and 3 are read", offset=4)
    hint = "fetch a current little-endian GGUF of this model"
    raise bad(path, what, offset=4, hint=hint, error=UnsupportedFormat)


def _value(cursor: _Cursor, key: str) -> Any:
    begin = cursor.at
    kind = cursor.u32("a value type")
    if kind == STRING:
        raw = cursor.string("a string value", MAX_STRING_BYTES)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            if key.startswith("general."):
                return raw.decode("utf-8", "replace")  # for display only
            raise bad(cursor.path, f"the value is not UTF-8: {error.reason}", offset=begin, key=key) from error
    if kind == ARRAY:
        return _array(cursor, key)
    if kind not in SCALARS:
        raise bad(cursor.path, f"value type {kind:,} is unknown, types 0 to 12 exist", offset=begin, key=key)
    name, code, dtype = SCALARS[kind]
    value = struct.unpack_from(code, cursor.file.buffer, cursor.need(dtype.itemsize, f"a {name}"))[0]
    if kind != BOOL:
        return value
    if value > 1:
        raise bad(cursor.path, f"a bool is {value}, it must be 0 or 1", offset=cursor.at - 1, key=key)
    return bool(value)


def _array(cursor: _Cursor, key: str) -> Any:
    begin = cursor.at
    kind = cursor.u32("an array's element type")
    if kind == ARRAY:
        raise bad(cursor.path, "arrays of arrays are not read", offset=begin, key=key)
    if kind == STRING:
        return _string_array(cursor, key)
    if kind not in SCALARS:
        raise bad(cursor.path, f"array element type {kind:,} is unknown", offset=begin, key=key)
    dtype = SCALARS[kind][2]
    count = cursor.count(f"the length of array {shown(key)}", dtype.itemsize, MAX_HEADER_BYTES)
    start = cursor.need(count * dtype.itemsize, f"array {shown(key)}")
    if kind == BOOL:
        flags = np.frombuffer(cursor.file.buffer, np.uint8, count, start)
        if count and flags.max() > 1:
            at = start + int(np.argmax(flags > 1))
            raise bad(cursor.path, "a bool is neither 0 nor 1", offset=at, key=key)
        return flags.astype(bool)
    # A copy: it outlives the map, and the header limit bounds it.
    return np.frombuffer(cursor.file.buffer, dtype, count, start).copy()


def _string_array(cursor: _Cursor, key: str) -> StringArray:
    count = cursor.count(f"the length of array {shown(key)}", 8, MAX_STRINGS)
    cursor.strings += count
    if cursor.strings > MAX_STRINGS:
        raise bad(cursor.path, f"arrays hold over {MAX_STRINGS:,} strings in all", offset=cursor.at, key=key)
    start = at = cursor.at
    buffer, limit = cursor.file.buffer, min(cursor.end, MAX_HEADER_BYTES)
    ends: list[int] = []
    unpack, append = _U64.unpack_from, ends.append
    for index in range(count):
        if at + 8 > limit:
            raise bad(cursor.path, f"string {index:,} of {count:,} is cut off", offset=at, key=key)
        stop: int = at + 8 + unpack(buffer, at)[0]
        if stop > limit:
            length = stop - at - 8
            what = f"string {index:,} of {count:,} is {length:,} bytes long, {limit - at - 8:,} remain"
            raise bad(cursor.path, what, offset=at, key=key)
        append(stop)
        at = stop
    cursor.at = at
    return StringArray(buffer[start:at], np.array(ends, dtype=np.int64) - start)


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    if type(value) is not int or value < 1 or value > MAX_ALIGNMENT or value & (value - 1):
        what = f"is {shown(repr(value))}, it must be a power of two up to {MAX_ALIGNMENT:,}"
        raise bad(path, what, key="general.alignment")
    return value


@dataclass(frozen=True)
class _Entry:
    name: str
    at: int
    dims: tuple[int, ...]
    kind: str
    nbytes: int
    offset: int


def _tensor_entry(cursor: _Cursor) -> _Entry:
    path, at = cursor.path, cursor.at
    name = cursor.name("a tensor name", MAX_TENSOR_NAME_BYTES)
    num_dims = cursor.u32("the number of dimensions")
    if not 1 <= num_dims <= MAX_DIMS:
        raise bad(path, f"has {num_dims:,} dimensions, 1 to {MAX_DIMS} are possible", offset=at, key=name)
    dims = tuple(cursor.u64("a dimension") for _ in range(num_dims))
    type_id = cursor.u32("a tensor type")
    offset = cursor.u64("a tensor offset")
    if 0 in dims:
        raise bad(path, f"a dimension is 0: {dims}", offset=at, key=name)
    if type_id not in TENSOR_TYPES:
        raise _unknown_type(path, name, type_id, at)
    kind, block, block_bytes = TENSOR_TYPES[type_id]
    if dims[0] % block:
        what = f"has rows of {dims[0]:,} elements, not a multiple of {kind}'s block of {block}"
        raise bad(path, what, offset=at, key=name)
    elements = 1
    for dim in dims:
        elements *= dim
    return _Entry(name, at, dims, kind, elements // block * block_bytes, offset)


def _unknown_type(path: Path, name: str, type_id: int, at: int) -> UnsupportedFormat:
    if type_id in RETIRED_TYPES:
        what = f"is stored as type {type_id} ({RETIRED_TYPES[type_id]}), which is retired"
    elif type_id in ACTIVATION_TYPES:
        what = f"is stored as type {type_id} ({ACTIVATION_TYPES[type_id]}), which is for activations, not for weights"
    else:
        what = f"is stored as type {type_id:,}, which is unknown (types of llama.cpp forks begin at 130)"
    hint = "fetch a Q4_K_M, Q8_0 or safetensors version of this model"
    return bad(path, what, offset=at, key=name, hint=hint, error=UnsupportedFormat)


def _place(file: MappedFile, entries: list[_Entry], data_start: int, alignment: int) -> dict[str, TensorInfo]:
    """Check that the tensors lie inside the file, aligned and apart, and turn their dims to torch's order."""
    path, room = file.path, file.size - data_start
    tensors: dict[str, TensorInfo] = {}
    for entry in entries:
        if entry.name in tensors:
            raise bad(path, "the tensor appears twice", offset=entry.at, key=entry.name)
        if entry.offset % alignment:
            what = f"its data offset {entry.offset:,} is not a multiple of the alignment {alignment:,}"
            raise bad(path, what, offset=entry.at, key=entry.name)
        if entry.offset + entry.nbytes > room:
            end = data_start + entry.offset + entry.nbytes
            what = f"its data ends at byte {end:,}, the file at {file.size:,}: truncated, or damaged"
            raise bad(path, what, offset=entry.at, key=entry.name)
        place = data_start + entry.offset
        tensors[entry.name] = TensorInfo(entry.name, entry.kind, entry.dims[::-1], entry.nbytes, path, place)
    ordered = sorted(entries, key=lambda entry: entry.offset)
    for before, after in zip(ordered, ordered[1:], strict=False):
        if before.offset + before.nbytes > after.offset:
            what = f"its data overlaps that of {shown(before.name)}"
            raise bad(path, what, offset=after.at, key=after.name)
    return tensors

"""Reads GGUF containers (versions 2 and 3), treating every byte as untrusted.

Every length and count is checked against the remaining bytes before anything is allocated; sizes are Python integers,
so nothing overflows. Returns plain data: metadata as a dict, tensors as name -> position in the file.
`models/architectures/gguf.py` interprets the metadata.
"""

from __future__ import annotations

import math
import reprlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from localllm.errors import BadModelFile, UnsupportedFormat

from .gguf_types import ACTIVATION_TYPES, ARRAY, BOOL, RETIRED_TYPES, SCALARS, STRING, TENSOR_TYPES
from .mapped_file import MappedFile, TensorInfo, bad, pickle_error, shown

MAX_HEADER_BYTES = 64 << 20  # a 262,144-token vocabulary with its merges is under 20 MiB
MAX_ENTRIES = 1 << 17  # limit for tensors and for keys; the largest models with one tensor per expert have 50,000
MAX_STRINGS = 1 << 21  # in all arrays together: 0.1 s of scanning, 1 s where all are empty, 100 MB
MAX_STRING_BYTES = 16 << 20
READ_BYTES = 1 << 20  # first read of the header
LARGE = 1024  # strings of an array from which on it is a `StringArray`
STRETCH = 16  # fewest strings that are read one by one between two runs
WINDOW = 1 << 20  # bytes that are looked through at once
MAX_KEY_BYTES = 256
MAX_TENSOR_NAME_BYTES = 64
MAX_ALIGNMENT = 1 << 16
MAX_DIMS = 4

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class _Cursor:
    """A position in the header; every read is checked against the end of the file.

    `buffer` holds the start of the file, as far as it has been needed.
    """

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.path = file.path
        self.at = 0
        self.end = file.size
        self.strings = 0
        self.buffer = file.read(0, min(file.size, READ_BYTES))

    def reach(self, end: int) -> bytes:
        """Extend the buffer to the first `end` bytes, at least doubling it, and return it."""
        have = len(self.buffer)
        if have < end:
            self.buffer += self.file.read(have, min(max(end, 2 * have), self.end) - have)
        return self.buffer

    def bad(self, what: str, offset: int, key: str | None = None) -> BadModelFile:
        return bad(self.path, what, offset=offset, key=key)

    def need(self, nbytes: int, what: str) -> int:
        """Advance past `nbytes` and return their start."""
        begin = self.at
        if nbytes > self.end - begin:
            raise self.bad(f"{what} needs {nbytes:,} bytes; {self.end - begin:,} remain in the file", begin)
        if begin + nbytes > MAX_HEADER_BYTES:
            raise self.bad(f"{what} reaches past the header limit of {MAX_HEADER_BYTES:,} bytes", begin)
        self.at = begin + nbytes
        self.reach(self.at)
        return begin

    def u32(self, what: str) -> int:
        begin = self.need(4, what)
        return int(_U32.unpack_from(self.buffer, begin)[0])

    def u64(self, what: str) -> int:
        begin = self.need(8, what)
        return int(_U64.unpack_from(self.buffer, begin)[0])

    def count(self, what: str, entry_bytes: int, limit: int) -> int:
        """Read a u64 count of entries that take at least `entry_bytes` each."""
        begin = self.at
        value = self.u64(what)
        if value * entry_bytes > self.end - self.at:
            room = (self.end - self.at) // entry_bytes
            raise self.bad(f"{what} is {value:,}; the rest of the file holds at most {room:,}", begin)
        if value > limit:
            raise self.bad(f"{what} is {value:,}; the limit is {limit:,}", begin)
        return value

    def string(self, what: str, limit: int) -> bytes:
        begin = self.at
        length = self.u64(f"the length of {what}")
        if length > limit:
            raise self.bad(f"{what} is {length:,} bytes long; the limit is {limit:,}", begin)
        start = self.need(length, what)
        return self.buffer[start : start + length]

    def name(self, what: str, limit: int) -> str:
        """Read a string that must be printable UTF-8: a key or a tensor name."""
        begin = self.at
        raw = self.string(what, limit)
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise self.bad(f"{what} is not UTF-8: {shown(raw)}", begin) from error
        if not text or not text.isprintable():
            raise self.bad(f"{what} is empty or contains control characters: '{shown(text)}'", begin)
        return text


def read_gguf(file: MappedFile) -> tuple[dict[str, TensorInfo], dict[str, Any]]:
    """Return the position of each tensor, and the metadata (see `Checkpoint`); does not touch the tensor data.

    Raises BadModelFile or UnsupportedFormat.
    """
    cursor = _Cursor(file)
    _check_magic(cursor)
    # smallest entries: a tensor has name length 8, dims count 4, one dim 8, type 4, offset 8;
    # a key has length 8, type 4, value 1
    num_tensors = cursor.count("the number of tensors", 32, MAX_ENTRIES)
    num_keys = cursor.count("the number of metadata keys", 13, MAX_ENTRIES)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        begin = cursor.at
        key = cursor.name("a metadata key", MAX_KEY_BYTES)
        if key in metadata:
            raise cursor.bad("the key appears twice", begin, key)
        metadata[key] = _value(cursor, key)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        what = f"must be a power of two up to {MAX_ALIGNMENT:,}, not {shown(reprlib.repr(alignment))}"
        raise bad(file.path, what, key="general.alignment")
    entries: dict[str, TensorInfo] = {}
    for _ in range(num_tensors):
        begin = cursor.at
        entry = _tensor_entry(cursor)
        if entry.name in entries:
            raise cursor.bad("the tensor appears twice", begin, entry.name)
        entries[entry.name] = entry
    return _placed(file, entries, -(-cursor.at // alignment) * alignment, alignment), metadata


def _check_magic(cursor: _Cursor) -> None:
    path = cursor.path
    magic = cursor.buffer[:4]
    if magic != b"GGUF":
        known = {b"ggml": "GGML", b"lmgg": "GGML", b"tjgg": "GGJT", b"fmgg": "GGMF", b"FUGG": "byte-swapped GGUF"}
        if magic in known:
            what = f"is a {known[magic]} file, a format from before GGUF"
            hint = "convert it to GGUF, or download a GGUF or safetensors copy"
            raise bad(path, what, offset=0, hint=hint, error=UnsupportedFormat)
        if magic.startswith((b"\x80", b"PK")):
            raise pickle_error(path, 0)
        raise bad(path, f"is not a GGUF file: it starts with '{shown(magic)}' instead of 'GGUF'", offset=0)
    cursor.at = 4
    version = cursor.u32("the version")
    if version in (2, 3):
        return
    if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, 2, 3):
        what = "is a big-endian GGUF file; only little-endian ones are supported"
    elif version == 1:
        what = "is GGUF version 1; versions 2 and 3 are supported"
    else:
        raise bad(path, f"the version is {version:,}; versions 2 and 3 are supported", offset=4)
    hint = "download a current little-endian GGUF of this model"
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
            raise cursor.bad(f"the value is not UTF-8: {error.reason}", begin, key) from error
    if kind == ARRAY:
        return _array(cursor, key)
    if kind not in SCALARS:
        raise cursor.bad(f"value type {kind:,} is unknown; types 0 to 12 exist", begin, key)
    name, code = SCALARS[kind]
    start = cursor.need(struct.calcsize(code), f"a {name}")
    value = struct.unpack_from(code, cursor.buffer, start)[0]
    if kind != BOOL:
        return value
    if value > 1:
        raise cursor.bad(f"a bool must be 0 or 1, not {value}", cursor.at - 1, key)
    return bool(value)


def _array(cursor: _Cursor, key: str) -> Any:
    begin = cursor.at
    kind = cursor.u32("an array's element type")
    if kind == ARRAY:
        raise cursor.bad("arrays of arrays are not supported", begin, key)
    if kind == STRING:
        return _string_array(cursor, key)
    if kind not in SCALARS:
        raise cursor.bad(f"array element type {kind:,} is unknown", begin, key)
    dtype = np.dtype(SCALARS[kind][1])
    count = cursor.count(f"the length of array {shown(key)}", dtype.itemsize, MAX_HEADER_BYTES)
    start = cursor.need(count * dtype.itemsize, f"array {shown(key)}")
    values = np.frombuffer(cursor.buffer, dtype, count, start).copy()  # a copy, which outlives the buffer
    if kind == BOOL:
        if (values > 1).any():
            raise cursor.bad("a bool is neither 0 nor 1", start + int(np.argmax(values > 1)), key)
        return values.astype(bool)
    return values


class StringArray(Sequence[bytes]):
    """The strings of a large array, such as a vocabulary, which are cut out when the first of them is needed: many
    commands need only their number. Cutting a million out takes 0.2 s.
    """

    def __init__(self, data: bytes, starts: np.ndarray, ends: np.ndarray) -> None:
        """String n is data[starts[n] : ends[n]]."""
        self._data, self._starts, self._ends = data, starts, ends

    @cached_property
    def _strings(self) -> list[bytes]:
        data = self._data
        return [data[a:b] for a, b in zip(self._starts.tolist(), self._ends.tolist(), strict=True)]

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._strings)

    def __getitem__(self, index: Any) -> Any:
        return self._strings[index]

    def first_undivided(self, byte: int) -> int | None:
        """Number of the first string without this byte between its first and last one; None if all have it."""
        count = np.zeros(len(self._data) + 1, np.int32)
        np.cumsum(np.frombuffer(self._data, np.uint8) == byte, out=count[1:])
        inner = count[np.maximum(self._ends - 1, self._starts)] - count[np.minimum(self._starts + 1, self._ends)]
        undivided = np.flatnonzero(inner <= 0)
        return int(undivided[0]) if len(undivided) else None


def _string_array(cursor: _Cursor, key: str) -> Sequence[bytes]:
    count = cursor.count(f"the length of array {shown(key)}", 8, MAX_STRINGS)
    cursor.strings += count
    if cursor.strings > MAX_STRINGS:
        raise cursor.bad(f"the arrays hold more than {MAX_STRINGS:,} strings in total", cursor.at, key)
    begin, limit, short, stretch = cursor.at, min(cursor.end, MAX_HEADER_BYTES), _ShortStrings(), STRETCH
    pieces: list[tuple[Any, Any]] = []  # starts and ends of consecutive strings
    index = 0
    while index < count:
        if count >= LARGE:
            run = short.run(cursor.buffer, cursor.at, count - index, limit)
            found = len(run[0])
            stretch = STRETCH if found >= STRETCH else min(2 * stretch, LARGE)
            if found:
                pieces.append(run)
                index, cursor.at = index + found, int(run[1][-1])
        one_by_one = _one_by_one(cursor, key, index, min(count, index + stretch), count, limit)
        pieces.append(one_by_one)
        index += len(one_by_one[0])
    starts, ends = (np.concatenate([part[which] for part in pieces] or [[]]).astype(np.int64) for which in (0, 1))
    strings = StringArray(cursor.buffer[begin : cursor.at], starts - begin, ends - begin)
    return strings if count >= LARGE else list(strings)


def _one_by_one(
    cursor: _Cursor, key: str, first: int, last: int, count: int, limit: int
) -> tuple[list[int], list[int]]:
    """Starts and ends of strings `first` to `last` - 1 of an array."""
    at, buffer = cursor.at, cursor.buffer
    have, unpack = len(buffer), _U64.unpack_from
    starts: list[int] = []
    ends: list[int] = []
    for index in range(first, last):
        if at + 8 > limit:
            raise cursor.bad(f"string {index:,} of {count:,} is truncated", at, key)
        if at + 8 > have:
            buffer = cursor.reach(at + 8)
            have = len(buffer)
        stop: int = at + 8 + unpack(buffer, at)[0]
        if stop > limit:
            length = stop - at - 8
            what = f"string {index:,} of {count:,} is {length:,} bytes long; {limit - at - 8:,} remain"
            raise cursor.bad(what, at, key)
        starts.append(at + 8)
        ends.append(stop)
        if stop > have:
            buffer = cursor.reach(stop)
            have = len(buffer)
        at = stop
    cursor.at = at
    return starts, ends


class _ShortStrings:
    """Finds runs of strings that are shorter than 256 bytes, each behind its length in 8 bytes, without a loop.

    Where a length can be, seven zero bytes follow another one. A run goes on as long as the next such place is where
    the string ends. For a vocabulary this takes a tenth of a loop's time.
    """

    def __init__(self) -> None:
        self._until = 0  # places before this have been looked for
        self._starts = self._ends = self._last = np.empty(0, np.int64)

    def run(self, buffer: bytes, at: int, most: int, limit: int) -> tuple[np.ndarray, np.ndarray]:
        """Starts and ends of at most `most` strings that follow each other, from the length at `at` on."""
        if at >= self._until:
            self._look(buffer, at)
        first = int(np.searchsorted(self._starts, at + 8))
        if first == len(self._starts) or self._starts[first] != at + 8:
            return self._starts[:0], self._ends[:0]
        stop = min(int(self._last[np.searchsorted(self._last, first)]) + 1, first + most)
        stop = min(stop, int(np.searchsorted(self._ends[first:stop], min(len(buffer), limit), "right")) + first)
        return self._starts[first:stop], self._ends[first:stop]

    def _look(self, buffer: bytes, begin: int) -> None:
        data = np.frombuffer(buffer, np.uint8, min(len(buffer) - begin, WINDOW), begin)
        zero = data == 0
        pairs = zero[:-1] & zero[1:]
        fours = pairs[:-2] & pairs[2:]
        places = np.flatnonzero(fours[1:-3] & fours[4:])  # zeros in the seven bytes behind
        self._until, self._starts = begin + max(len(data) - 7, 0), places + (begin + 8)
        self._ends = self._starts + data[places]
        self._last = np.flatnonzero(np.append(self._ends[:-1] + 8 != self._starts[1:], [True] * bool(len(places))))


def _tensor_entry(cursor: _Cursor) -> TensorInfo:
    """Read one tensor entry; its offset is still relative to the start of the data."""
    at = cursor.at
    name = cursor.name("a tensor name", MAX_TENSOR_NAME_BYTES)
    num_dims = cursor.u32("the number of dimensions")
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.bad(f"has {num_dims:,} dimensions; it must have 1 to {MAX_DIMS}", at, name)
    dims = tuple(cursor.u64("a dimension") for _ in range(num_dims))
    type_id = cursor.u32("a tensor type")
    offset = cursor.u64("a tensor offset")
    if 0 in dims:
        raise cursor.bad(f"a dimension is 0: {dims}", at, name)
    if type_id not in TENSOR_TYPES:
        raise _unknown_type(cursor.path, name, type_id, at)
    kind, block, block_bytes = TENSOR_TYPES[type_id]
    if dims[0] % block:
        what = f"has rows of {dims[0]:,} elements, not a multiple of {kind}'s block of {block}"
        raise cursor.bad(what, at, name)
    nbytes = math.prod(dims) // block * block_bytes
    return TensorInfo(name, kind, dims[::-1], nbytes, cursor.path, offset)


def _unknown_type(path: Path, name: str, type_id: int, at: int) -> UnsupportedFormat:
    if type_id in RETIRED_TYPES:
        what = f"is stored as type {type_id} ({RETIRED_TYPES[type_id]}), which is retired"
    elif type_id in ACTIVATION_TYPES:
        what = f"is stored as type {type_id} ({ACTIVATION_TYPES[type_id]}), which is for activations, not for weights"
    else:
        what = f"is stored as type {type_id:,}, which is unknown (types of llama.cpp forks start at 130)"
    hint = "download a Q4_K_M, Q8_0 or safetensors version of this model"
    return bad(path, what, offset=at, key=name, hint=hint, error=UnsupportedFormat)


def _placed(file: MappedFile, entries: dict[str, TensorInfo], data_start: int, alignment: int) -> dict[str, TensorInfo]:
    """Check that the tensors lie inside the file, aligned and without overlap, and make their offsets absolute."""
    path = file.path
    end, before = 0, ""
    for entry in sorted(entries.values(), key=lambda entry: entry.offset):
        if entry.offset % alignment:
            what = f"its data offset {entry.offset:,} is not a multiple of the alignment {alignment:,}"
            raise bad(path, what, key=entry.name)
        if entry.offset < end:
            raise bad(path, f"its data overlaps that of {shown(before)}", key=entry.name)
        end, before = entry.offset + entry.nbytes, entry.name
        if data_start + end > file.size:
            what = f"its data ends at byte {data_start + end:,}, the file at {file.size:,}: truncated or damaged"
            raise bad(path, what, key=entry.name)
    return {name: replace(entry, offset=data_start + entry.offset) for name, entry in entries.items()}

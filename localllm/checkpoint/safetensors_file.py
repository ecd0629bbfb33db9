"""Reads one safetensors file: a little-endian u64 header length, a JSON header, the data.

The header is scanned in place with bounded patterns, never parsed as a whole: a hostile one cannot make many objects.
Names appear once, spans lie inside the file without holes or overlaps, sizes follow from dtype and shape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from localllm.errors import UnsupportedFormat

from .mapped_file import MappedFile, bad, pickle_error, shown
from .tensor_info import ModelFile, TensorInfo

MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 1 << 16
MAX_NAME_BYTES = 512
MAX_DIMS = 8
MAX_METADATA_ENTRIES = 1 << 12
_MAX_ENTRY_BYTES = 1024

DTYPE_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip

# Possessive: no backtracking, so the time is linear in the header whatever it holds.
_STRING = re.compile(rb'"((?:[^"\\\x00-\x1f]++|\\.)*+)"', re.DOTALL)
_ENTRY = re.compile(rb"\{[^{}]{0,%d}+\}" % _MAX_ENTRY_BYTES)
_SPACE = re.compile(rb"[ \t\r\n]*+")


def read_safetensors(path: Path) -> ModelFile:
    """Read one safetensors file's header. Raises ModelNotFound, BadModelFile or UnsupportedFormat."""
    file = MappedFile(path)
    try:
        return ModelFile(file, _Header(file).tensors())
    except BaseException:
        file.close()
        raise


class _Header:
    """A position in the header."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.path = file.path
        self.buffer = file.buffer
        if file.buffer[:2] in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
            raise pickle_error(self.path)
        if file.buffer[:4] == b"GGUF":
            raise bad(self.path, "is a GGUF file named .safetensors", offset=0, hint="rename it to end in .gguf")
        if file.size < 10:
            raise bad(self.path, f"is {file.size} bytes long, a header needs at least 10", offset=0)
        length = int.from_bytes(file.buffer[:8], "little")
        if length > MAX_HEADER_BYTES:
            raise bad(self.path, f"the header length is {length:,}, the limit is {MAX_HEADER_BYTES:,}", offset=0)
        if length > file.size - 8:
            what = f"the header length is {length:,}, {file.size - 8:,} bytes remain: truncated, or damaged"
            raise bad(self.path, what, offset=0)
        if length < 2:
            raise bad(self.path, f"the header length is {length}, an empty header has 2 bytes", offset=0)
        self.at = 8
        self.end = 8 + length

    def tensors(self) -> dict[str, TensorInfo]:
        """All entries, checked one by one and against each other."""
        if self.buffer[8:9] != b"{":
            raise bad(self.path, "the header does not begin with '{'", offset=8)
        self.at = 9
        found: dict[str, TensorInfo] = {}
        metadata = False
        for _ in self._items(b"}"):
            begin = self.at
            name = self._name()
            self._expect(b":")
            if name == "__metadata__":
                if metadata:
                    raise bad(self.path, "appears twice", offset=begin, key=name)
                metadata = True
                self._skip_metadata()
                continue
            if name in found:
                raise bad(self.path, "the tensor appears twice", offset=begin, key=name)
            if len(found) == MAX_TENSORS:
                raise bad(self.path, f"holds more than {MAX_TENSORS:,} tensors", offset=begin)
            found[name] = self._tensor(name, begin)
        self._space()
        if self.at != self.end:
            raise bad(self.path, "data follows the header's closing brace", offset=self.at)
        self._check_spans(found)
        return found

    def _space(self) -> None:
        match = _SPACE.match(self.buffer, self.at, self.end)
        assert match is not None  # it matches the empty string
        self.at = match.end()

    def _byte(self) -> bytes:
        """The next byte that is not white space, not consumed; empty at the end."""
        self._space()
        return self.buffer[self.at : min(self.at + 1, self.end)]

    def _expect(self, wanted: bytes) -> None:
        found = self._byte()
        if found != wanted:
            what = f"'{wanted.decode()}' is expected, found '{shown(found)}'" if found else "the header ends too early"
            raise bad(self.path, what, offset=self.at)
        self.at += 1

    def _string(self) -> tuple[int, int]:
        """Where the inside of a JSON string begins and ends, escapes not resolved."""
        self._space()
        match = _STRING.match(self.buffer, self.at, self.end)
        if match is None:
            raise bad(self.path, "a string in quotes is expected", offset=self.at)
        self.at = match.end()
        return match.span(1)

    def _items(self, close: bytes) -> Iterator[None]:
        """Step through `item, item, ... close`; the caller consumes each item."""
        if self._byte() == close:
            self.at += 1
            return
        while True:
            yield
            if self._byte() == close:
                self.at += 1
                return
            self._expect(b",")

    def _name(self) -> str:
        start, stop = self._string()
        begin = start - 1
        if stop - start > MAX_NAME_BYTES:
            what = f"a tensor name is {stop - start:,} bytes long, the limit is {MAX_NAME_BYTES}"
            raise bad(self.path, what, offset=begin)
        raw = self.buffer[start:stop]
        try:
            name = json.loads(b'"' + raw + b'"')
        except ValueError as error:
            raise bad(self.path, f"a tensor name is not valid JSON text: {shown(raw)}", offset=begin) from error
        if not name or not name.isprintable() or "/" in name or "\\" in name or ".." in name:
            what = f"the tensor name '{shown(name)}' is empty, or holds control characters, slashes or '..'"
            raise bad(self.path, what, offset=begin)
        assert isinstance(name, str)
        return name

    def _skip_metadata(self) -> None:
        """`__metadata__` maps text to text; nothing of it is needed."""
        self._expect(b"{")
        for count, _ in enumerate(self._items(b"}")):
            if count >= MAX_METADATA_ENTRIES:
                raise bad(self.path, f"holds over {MAX_METADATA_ENTRIES:,} entries", offset=self.at, key="__metadata__")
            self._string()
            self._expect(b":")
            self._string()

    def _tensor(self, name: str, begin: int) -> TensorInfo:
        self._space()
        match = _ENTRY.match(self.buffer, self.at, self.end)
        if match is None:
            what = f"an object of at most {_MAX_ENTRY_BYTES:,} bytes with dtype, shape and data_offsets is expected"
            raise bad(self.path, what, offset=self.at, key=name)
        self.at = match.end()
        try:
            pairs = json.loads(match.group(), object_pairs_hook=list)
        except (ValueError, RecursionError) as error:
            raise bad(self.path, f"is not valid JSON: {error}", offset=begin, key=name) from error
        entry: dict[str, Any] = dict(pairs)
        if len(entry) != len(pairs) or set(entry) != {"dtype", "shape", "data_offsets"}:
            names = ", ".join(shown(key, 30) for key, _ in pairs[:6])
            what = f"must have dtype, shape and data_offsets once each, it has {names or 'nothing'}"
            raise bad(self.path, what, offset=begin, key=name)
        shape, offsets = entry["shape"], entry["data_offsets"]
        self._check_integers(name, begin, "shape", shape, MAX_DIMS)
        self._check_integers(name, begin, "data_offsets", offsets, 2)
        if len(offsets) != 2 or offsets[0] > offsets[1]:
            raise bad(self.path, f"data_offsets are {offsets}, a rising pair is expected", offset=begin, key=name)
        nbytes = self._nbytes(name, begin, entry["dtype"], shape)
        if nbytes != offsets[1] - offsets[0]:
            what = f"{entry['dtype']} {shape} takes {nbytes:,} bytes, its data_offsets span {offsets[1] - offsets[0]:,}"
            raise bad(self.path, what, offset=begin, key=name)
        if self.end + offsets[1] > self.file.size:
            what = f"its data ends at byte {self.end + offsets[1]:,}, the file at {self.file.size:,}"
            raise bad(self.path, what + ": truncated, or damaged", offset=begin, key=name)
        return TensorInfo(name, entry["dtype"], tuple(shape), nbytes, self.path, self.end + offsets[0])

    def _check_integers(self, name: str, begin: int, field: str, values: object, limit: int) -> None:
        fits = isinstance(values, list) and len(values) <= limit
        if not fits or not all(type(item) is int and item >= 0 for item in values):  # type: ignore[attr-defined]
            what = f"{field} is {shown(values)}, at most {limit} whole numbers are expected"
            raise bad(self.path, what, offset=begin, key=name)

    def _nbytes(self, name: str, begin: int, dtype: object, shape: list[int]) -> int:
        if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
            what = f"has the dtype {shown(dtype)}, which is unknown; known are {', '.join(DTYPE_BITS)}"
            hint = "fetch a BF16, FP8, AWQ or GGUF version of this model"
            raise bad(self.path, what, offset=begin, key=name, hint=hint, error=UnsupportedFormat)
        bits = DTYPE_BITS[dtype]
        for dim in shape:
            bits *= dim
        if bits == 0:
            raise bad(self.path, f"is empty: its shape is {shape}", offset=begin, key=name)
        if bits % 8:
            raise bad(self.path, f"{dtype} {shape} does not end on a whole byte", offset=begin, key=name)
        return bits // 8

    def _check_spans(self, tensors: dict[str, TensorInfo]) -> None:
        """The data is covered from its first to its last byte, without holes and overlaps."""
        at, before = self.end, "the header"
        for info in sorted(tensors.values(), key=lambda info: info.offset):
            if info.offset != at:
                kind = "a hole lies before its data" if info.offset > at else "its data overlaps the one before"
                what = f"{kind}: {shown(before)} ends at {at:,}, it begins at {info.offset:,}"
                raise bad(self.path, what, offset=info.offset, key=info.name)
            at, before = info.offset + info.nbytes, info.name
        if at != self.file.size:
            raise bad(self.path, f"{self.file.size - at:,} bytes at the end belong to no tensor", offset=at)

"""A read-only memory-mapped file, the position of a tensor in it, and the error for a defect in it.

Everything in `checkpoint/` reads through a `MappedFile`, which rejects anything but a regular file (a FIFO, a device)
without blocking on it. `bad` makes the error that every reader raises: file name, place, value found and limit.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from localllm.errors import REPAIR, BadModelFile, ModelNotFound, UnsupportedFormat
from localllm.terminal import escaped

E = TypeVar("E", bound=BadModelFile)


def shown(value: object, limit: int = 80) -> str:
    """Make text from a file safe to print: escape control characters and shorten long values."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    safe = escaped(text[:limit])
    return safe if len(text) <= limit else f"{safe}... ({len(text):,} characters)"


def label(path: Path) -> str:
    """A file's name in errors; for a snapshot of the hub cache, whose name is a hash, the repository."""
    if path.parent.name == "snapshots":
        return shown(path.parent.parent.name.removeprefix("models--").replace("--", "/"), 200)
    return shown(path.name, 200)


def bad(
    path: Path,
    what: str,
    *,
    offset: int | None = None,
    key: str | None = None,
    hint: str = REPAIR,
    error: type[E] = BadModelFile,  # type: ignore[assignment]
) -> E:
    """The error for a defect in a file; `offset` is a byte position, `key` a metadata key, tensor or JSON field."""
    place = [f"at byte {offset:,}"] if offset is not None else []
    place += [f"{shown(key)}"] if key is not None else []
    message = f"{label(path)}: " + (", ".join(place) + ": " if place else "") + what
    context: dict[str, Any] = {"file": str(path)}
    if offset is not None:
        context["offset"] = offset
    if key is not None:
        context["key"] = shown(key)
    return error(message, hint, context=context)


def pickle_error(path: Path, offset: int | None = None) -> UnsupportedFormat:
    """The error for a pickle or an archive: such files can run code when loaded."""
    what = "is a pickle or an archive; only safetensors and GGUF are loaded, because pickles can run code"
    hint = "download the safetensors or GGUF version of this model"
    return bad(path, what, offset=offset, hint=hint, error=UnsupportedFormat)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint, as stored; holds no data."""

    name: str
    dtype: str  # safetensors: BF16, F16, F32, F8_E4M3, U8, I8, I32, ...; GGUF: F32, F16, BF16, Q4_1, Q4_K, ...
    shape: tuple[int, ...]  # in torch's order, [N, K] for a linear layer; the stored shape for packed safetensors
    nbytes: int
    file: Path
    offset: int  # bytes from the start of `file`
    # bytes between elements along each dimension; None: contiguous
    strides: tuple[int, ...] | None = None
    pieces: tuple[tuple[int, int], ...] = ()  # offset and bytes of pieces that follow each other; (): one


class MappedFile:
    """A regular file mapped for reading: `data` is a uint8 view of the whole file.

    Headers are parsed from `read`, which survives a file that is truncated meanwhile. Accessing bytes from `view` can
    still kill the process with SIGBUS if the file is truncated after the check in `view`.
    """

    def __init__(self, path: Path) -> None:
        """Map `path`. Raises ModelNotFound when it does not exist, BadModelFile when it cannot be read as a file."""
        self.path = path
        descriptor = _open_regular(path)
        try:
            self.size = os.fstat(descriptor).st_size
            if self.size == 0:
                raise bad(path, "the file is empty", offset=0)
            self.buffer = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise bad(path, f"cannot be memory-mapped: {error.strerror}") from error
        finally:
            os.close(descriptor)
        self.data: np.ndarray | None = np.frombuffer(self.buffer, dtype=np.uint8)

    def view(self, offset: int, nbytes: int) -> np.ndarray:
        """Bytes [offset, offset + nbytes) as a read-only uint8 view, without a copy. Raises ValueError after `close`.

        Raises BadModelFile if the file was truncated: reading past its end would kill the process with SIGBUS.
        """
        if self.data is None:
            raise ValueError(f"{self.path.name} is closed")
        size = self.buffer.size()
        if size < offset + nbytes:
            raise self._truncated(size)
        return self.data[offset : offset + nbytes]

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read bytes [offset, offset + nbytes) without the mapping. Raises BadModelFile if the file was truncated."""
        with os.fdopen(_open_regular(self.path), "rb") as file:
            try:
                file.seek(offset)
                data = file.read(nbytes)
            except OSError as error:
                raise bad(self.path, f"cannot be read: {error.strerror}", offset=offset) from error
        if len(data) < nbytes:
            raise self._truncated(offset + len(data))
        return data

    def _truncated(self, size: int) -> BadModelFile:
        return bad(self.path, f"was truncated from {self.size:,} to {size:,} bytes while it was read", offset=size)

    def forget(self, offset: int, nbytes: int, *, cached: bool = True) -> None:
        """Drop the whole pages in a range from this mapping and, if `cached`, from the page cache. Only a hint."""
        first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length <= 0 or self.data is None or not hasattr(os, "posix_fadvise"):
            return
        self.buffer.madvise(mmap.MADV_DONTNEED, first, length)
        if not cached:
            return
        with contextlib.suppress(OSError):
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, first, length, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)

    def holds(self, address: int) -> bool:
        return self.data is not None and 0 <= address - self.data.ctypes.data < self.size

    def close(self) -> None:
        """Unmap the file once the last view of it is gone."""
        self.data = None
        try:
            self.buffer.close()
        except BufferError:
            # a view is still in use: the mapping ends with it
            return


def _open_regular(path: Path) -> int:
    try:
        # O_NONBLOCK: opening a FIFO would wait for a writer indefinitely
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise ModelNotFound(
                f"{shown(path, 200)}: no such file", "`localllm ls` lists the models on this machine"
            ) from error
        hint = REPAIR if error.errno == errno.ELOOP else f"check the file's owner and permissions, or {REPAIR}"
        raise bad(path, f"cannot be opened: {error.strerror}", hint=hint) from error
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise bad(path, "is a folder, expected a file")
    hint = "give a .gguf file or a folder with safetensors"
    raise bad(path, "is not a regular file (a pipe, socket or device)", hint=hint)


def read_small(path: Path, limit: int) -> bytes:
    """Read a small file. Raises BadModelFile above `limit` bytes, before reading anything."""
    descriptor = _open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise bad(path, f"is {size:,} bytes long; the limit is {limit:,}")
        try:
            data = file.read(min(size, limit) + 1)  # the file may have grown meanwhile
        except OSError as error:
            raise bad(path, f"cannot be read: {error.strerror}") from error
    if len(data) > limit:
        raise bad(path, f"is longer than the limit of {limit:,} bytes")
    return data

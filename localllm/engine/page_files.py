"""Files of pages and states, for the prefix trees of later processes. Bytes only: no torch, no threads.

A file is named after the digests of its prefix and of its tokens, `PARENT-DIGEST.page`, in a folder per model and
formats. So finding a prefix takes one lookup per page, and processes share a folder without locks. Files are written to
a temporary name and renamed, so they are always complete.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from localllm.paths import cache_dir, replace_file

log = logging.getLogger(__name__)

LAYOUT = 1  # version of the file layout; increment it with every change
PAGE, STATE = "page", "state"
RETRY_S = 60.0  # pause after a failed write
STALE_S = 3600.0  # age at which an unfinished file of a killed process is removed
RESCAN_PART = 16  # recount all files after writing 1/16 of the limit
_HEADER = struct.Struct("<8sII16s16sQI")  # magic, layout, mask, folder, digest, bytes, checksum of the rest
_MAGIC = b"LLMPAGE\0"


class Name(NamedTuple):
    """The digests of a page's prefix and of the page itself."""

    parent: bytes
    digest: bytes


@dataclass(frozen=True, slots=True)
class Found:
    """The bytes of a page per cache group, None for groups it had lost; or the single part of a state."""

    parts: tuple[bytearray | None, ...]

    @property
    def num_bytes(self) -> int:
        return sum(len(part) for part in self.parts if part is not None)


class PageFiles:
    """The files of one model in a folder shared by all models, within the folder's size limit.

    identity   16 bytes: a digest of everything that a page's bytes depend on besides its tokens
    limit      bytes of all models' files; least recently used ones are removed first, conversations from their end
    """

    def __init__(self, root: Path, identity: bytes, limit: int) -> None:
        self.root, self.folder = root, root / identity.hex()
        self.limit = limit
        self.num_bytes = 0  # bytes of all models' files at the last count
        self.note = ""  # the last problem
        self._identity = identity
        self._warned: set[str] = set()
        self._retry_at = 0.0
        self._written = -1  # bytes written since the last count; -1 before the first one

    def path(self, name: Name, kind: str) -> Path:
        return self.folder / f"{name.parent.hex()}-{name.digest.hex()}.{kind}"

    def has(self, name: Name, kind: str = PAGE) -> bool:
        return os.path.exists(self.path(name, kind))

    def read(self, name: Name, kind: str, sizes: Sequence[int]) -> Found | None:
        """Read a file with parts of these sizes; None if it is missing or invalid. Invalid files are removed."""
        path = self.path(name, kind)
        try:
            with open(path, "rb", buffering=0) as file:
                header = file.read(_HEADER.size)
                size = os.fstat(file.fileno()).st_size
                mask, wrong = self._check_header(header, name, size, sizes)
                if not wrong:
                    parts = [bytearray(n) if mask >> at & 1 else None for at, n in enumerate(sizes)]
                    whole = all(_fill(file, part) for part in parts if part is not None)
                    wrong = "" if whole and _checksum(header, parts) == _HEADER.unpack(header)[-1] else "damaged"
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn_once("read", f"stored conversations cannot be read: {error.strerror}")
            return None
        if wrong:
            with contextlib.suppress(OSError):
                path.unlink()
            self._warn_once("wrong", f"a stored page is {wrong}: it was removed, and its tokens are computed again")
            return None
        return Found(tuple(parts))

    def _check_header(self, header: bytes, name: Name, size: int, sizes: Sequence[int]) -> tuple[int, str]:
        """(mask of the parts in the file, what is wrong with it or "")"""
        if len(header) < _HEADER.size:
            return 0, "truncated"
        magic, layout, mask, identity, digest, num_bytes, _ = _HEADER.unpack(header)
        if magic != _MAGIC:
            return 0, "not a page file"
        if layout != LAYOUT:
            return 0, "from another version"
        if (identity, digest) != (self._identity, name.digest) or mask >> len(sizes):
            return 0, "not the expected page"
        if num_bytes != sum(n for at, n in enumerate(sizes) if mask >> at & 1):
            return 0, "not the expected page"
        return mask, "" if size == _HEADER.size + num_bytes else "truncated"

    def write(self, name: Name, kind: str, parts: Sequence[bytes | bytearray | memoryview | None]) -> bool:
        """Write a file with these parts. False if the disk fails, which is logged once and retried after RETRY_S."""
        if self.has(name, kind):
            return True
        if time.monotonic() < self._retry_at:
            return False
        mask = sum(1 << at for at, part in enumerate(parts) if part is not None)
        size = sum(memoryview(part).nbytes for part in parts if part is not None)
        fields = _MAGIC, LAYOUT, mask, self._identity, name.digest, size
        header = _HEADER.pack(*fields, _checksum(_HEADER.pack(*fields, 0), parts))
        if not self._make_room(len(header) + size):
            return False
        data = b"".join([header, *(part for part in parts if part is not None)])
        try:
            self._make_folder()
            try:
                replace_file(self.path(name, kind), data, mode=0o600)
            except FileNotFoundError:  # another process is clearing the store right now
                self._make_folder()
                replace_file(self.path(name, kind), data, mode=0o600)
        except OSError as error:
            self._retry_at = time.monotonic() + RETRY_S
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            why = "the disk is full" if full else error.strerror
            self._warn_once("write", f"conversations cannot be stored in {self.root}: {why}")
            return False
        self.num_bytes += len(header) + size
        self._written += len(header) + size
        return True

    def _make_folder(self) -> None:
        for folder in (self.root, self.folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def touch(self, name: Name) -> None:
        """Mark a prefix as just used: the page it ends with, and implicitly all pages before it."""
        with contextlib.suppress(OSError):
            os.utime(self.path(name, PAGE))

    def count(self) -> None:
        """Count the files of all processes."""
        files = list(_scan(self.root))
        self.num_bytes, self._written = sum(file.num_bytes for file in files), 0

    def _make_room(self, num_bytes: int) -> bool:
        """Remove least recently used files until `num_bytes` more fit in the limit; False if the limit is too small."""
        if num_bytes > self.limit:
            self._warn_once("small", f"a page has {num_bytes:,} bytes, more than the limit of {self.limit:,} bytes")
            return False
        if self._written < 0 or self._written > self.limit // RESCAN_PART:
            self.count()
        if self.num_bytes + num_bytes <= self.limit:
            return True
        files = list(_scan(self.root))
        left = sum(file.num_bytes for file in files)
        for file in _longest_unused(files):
            if left + num_bytes <= self.limit - self.limit // RESCAN_PART:
                break
            with contextlib.suppress(OSError):  # another process removed it
                os.unlink(file.path)
            left -= file.num_bytes
        self.num_bytes, self._written = left, 0
        return True

    def _warn_once(self, kind: str, text: str) -> None:
        self.note = text
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("%s", text)


class StoredFile(NamedTuple):
    """A file in the store."""

    path: str
    used: float  # time of last use, on the wall clock
    num_bytes: int
    place: tuple[str, str]  # (folder, digest of its tokens)
    follows: tuple[str, str]  # (folder, digest of its prefix)


def _scan(root: Path) -> Iterator[StoredFile]:
    """All files below a folder. Removes unfinished files of killed processes."""
    with contextlib.suppress(OSError):
        for folder in [one for one in os.scandir(root) if one.is_dir(follow_symlinks=False)]:
            yield from _scan_folder(folder)


def _scan_folder(folder: os.DirEntry[str]) -> Iterator[StoredFile]:
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder.path):
            with contextlib.suppress(OSError):
                stat = entry.stat(follow_symlinks=False)
                if entry.name.endswith(".part"):
                    if time.time() - stat.st_mtime > STALE_S:
                        os.unlink(entry.path)
                    continue
                parent, _, digest = entry.name.partition(".")[0].partition("-")
                place, follows = (folder.name, digest), (folder.name, parent)
                yield StoredFile(entry.path, stat.st_mtime, stat.st_size, place, follows)


def _longest_unused(files: Sequence[StoredFile]) -> Iterator[StoredFile]:
    """Files in removal order: a page counts as used when a page after it is, and is removed after those."""
    by_place: dict[tuple[str, str], list[StoredFile]] = {}
    for file in files:
        by_place.setdefault(file.place, []).append(file)
    kept: list[tuple[str, str]] = []  # most recently used first, each after its prefix
    seen: set[tuple[str, str]] = set()
    for file in sorted(files, key=lambda file: -file.used):
        path, place = [], file.place
        while place in by_place and place not in seen:
            seen.add(place)
            path.append(place)
            place = by_place[place][0].follows
        kept += reversed(path)
    return (file for place in reversed(kept) for file in by_place[place])


def _fill(file: object, part: bytearray) -> bool:
    view, at = memoryview(part), 0
    while at < len(view):
        count = file.readinto(view[at:])  # type: ignore[attr-defined]
        if not count:
            return False
        at += count
    return True


def _checksum(header: bytes, parts: Sequence[bytes | bytearray | memoryview | None]) -> int:
    value = zlib.crc32(header[:-4])
    for part in parts:
        value = value if part is None else zlib.crc32(part, value)
    return value


def store_dir() -> Path:
    """The folder of the store. Other users cannot read it, but it is not encrypted."""
    return cache_dir() / "kv"


def stored_files() -> list[StoredFile]:
    """All files in the store, of every model."""
    return list(_scan(store_dir()))


def clear_stored() -> None:
    """Remove all files in the store. Running processes continue and store new ones."""
    shutil.rmtree(store_dir(), ignore_errors=True)

"""Pages and states in files, for the prefix tree of a later process. Bytes only: no torch, no thread.

A file's name says what its tokens follow and what they are: `PARENT-DIGEST.page`, in a folder that says which model, in
which formats, computed them. So what a prefix has on the disk is found with one look per page, processes share a folder
without a lock, and a file is whole or it is not there: it is written beside its place and moved.
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

LAYOUT = 1  # of a file: counts up with every change of what its bytes mean
PAGE, STATE = "page", "state"
RETRY_S = 60.0  # without a write after the disk refused one
STALE_S = 3600.0  # age of what a killed process was still writing
RESCAN_PART = 16  # a process counts all files again when it has written such a part of the limit
_HEADER = struct.Struct("<8sII16s16sQI")  # magic, layout, mask, folder, digest, bytes, checksum of the rest
_MAGIC = b"LLMPAGE\0"


class Name(NamedTuple):
    """What tokens are, and what they follow."""

    parent: bytes
    digest: bytes


@dataclass(frozen=True, slots=True)
class Found:
    """The bytes of a page in each of its cache groups, None in those it had lost; or the one piece of a state."""

    parts: tuple[bytearray | None, ...]

    @property
    def num_bytes(self) -> int:
        return sum(len(part) for part in self.parts if part is not None)


class PageFiles:
    """The files of one model below a folder that all models share, and the bound of that folder.

    identity   16 bytes: everything that the bytes of a page depend on, but its tokens
    limit      bytes of all models' files together; the longest unused go first, of a conversation its end
    """

    def __init__(self, root: Path, identity: bytes, limit: int) -> None:
        self.root, self.folder = root, root / identity.hex()
        self.limit = limit
        self.num_bytes = 0  # of all models' files, as last counted
        self.note = ""  # what went wrong last
        self._identity = identity
        self._said: set[str] = set()
        self._retry_at = 0.0
        self._written = -1  # bytes since the files were counted; -1: they never were

    def path(self, name: Name, kind: str) -> Path:
        return self.folder / f"{name.parent.hex()}-{name.digest.hex()}.{kind}"

    def has(self, name: Name, kind: str = PAGE) -> bool:
        return os.path.exists(self.path(name, kind))

    def read(self, name: Name, kind: str, sizes: Sequence[int]) -> Found | None:
        """What a file holds, of parts that have these sizes; None where it is missing, or was wrong and is gone now."""
        path = self.path(name, kind)
        try:
            with open(path, "rb", buffering=0) as file:
                header = file.read(_HEADER.size)
                size = os.fstat(file.fileno()).st_size
                mask, wrong = self._fault(header, name, size, sizes)
                if not wrong:
                    parts = [bytearray(n) if mask >> at & 1 else None for at, n in enumerate(sizes)]
                    whole = all(_fill(file, part) for part in parts if part is not None)
                    wrong = "" if whole and _checksum(header, parts) == _HEADER.unpack(header)[-1] else "damaged"
        except FileNotFoundError:
            return None
        except OSError as error:
            self._say("read", f"what was kept of conversations cannot be read: {error.strerror}")
            return None
        if wrong:
            with contextlib.suppress(OSError):
                path.unlink()
            self._say("wrong", f"a file of kept conversations is {wrong}: it was removed, its tokens are read again")
            return None
        return Found(tuple(parts))

    def _fault(self, header: bytes, name: Name, size: int, sizes: Sequence[int]) -> tuple[int, str]:
        """(which parts the file has, what is wrong with it)"""
        if len(header) < _HEADER.size:
            return 0, "cut off"
        magic, layout, mask, identity, digest, num_bytes, _ = _HEADER.unpack(header)
        if magic != _MAGIC:
            return 0, "not one of ours"
        if layout != LAYOUT:
            return 0, "from another version"
        if (identity, digest) != (self._identity, name.digest) or mask >> len(sizes):
            return 0, "of something else"
        if num_bytes != sum(n for at, n in enumerate(sizes) if mask >> at & 1):
            return 0, "of something else"
        return mask, "" if size == _HEADER.size + num_bytes else "cut off"

    def write(self, name: Name, kind: str, parts: Sequence[bytes | bytearray | memoryview | None]) -> bool:
        """Keep these parts; False where the disk refused, which is said once and tried again a minute later."""
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
            except FileNotFoundError:  # somebody removes all that is kept, just now
                self._make_folder()
                replace_file(self.path(name, kind), data, mode=0o600)
        except OSError as error:
            self._retry_at = time.monotonic() + RETRY_S
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            why = "the disk is full" if full else error.strerror
            self._say("write", f"conversations are not kept in {self.root}: {why}")
            return False
        self.num_bytes += len(header) + size
        self._written += len(header) + size
        return True

    def _make_folder(self) -> None:
        for folder in (self.root, self.folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def touch(self, name: Name) -> None:
        """What ends here was used just now, and all that it follows."""
        with contextlib.suppress(OSError):
            os.utime(self.path(name, PAGE))

    def count(self) -> None:
        """Count the files of all processes."""
        files = list(_scan(self.root))
        self.num_bytes, self._written = sum(file.num_bytes for file in files), 0

    def _make_room(self, num_bytes: int) -> bool:
        """Remove the longest unused files until so many bytes more are within the limit; False when it is too small."""
        if num_bytes > self.limit:
            self._say("small", f"a page has {num_bytes:,} bytes, more than the {self.limit:,} that may be kept")
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
            with contextlib.suppress(OSError):  # another process did it
                os.unlink(file.path)
            left -= file.num_bytes
        self.num_bytes, self._written = left, 0
        return True

    def _say(self, kind: str, text: str) -> None:
        self.note = text
        if kind not in self._said:
            self._said.add(kind)
            log.warning("%s", text)


class StoredFile(NamedTuple):
    """A file as the folder shows it."""

    path: str
    used: float  # when, on the wall clock
    num_bytes: int
    place: tuple[str, str]  # the folder, and what it holds the page or state of
    follows: tuple[str, str]


def _scan(root: Path) -> Iterator[StoredFile]:
    """Every file below a folder; what a killed process left half written is removed."""
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
    """In the order in which they may go: a page is as recent as what follows it, and goes after that."""
    by_place: dict[tuple[str, str], list[StoredFile]] = {}
    for file in files:
        by_place.setdefault(file.place, []).append(file)
    kept: list[tuple[str, str]] = []  # the most recently used first, each after what it follows
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
    """Where kept conversations lie: other users cannot read it, and whoever reads the disk can."""
    return cache_dir() / "kv"


def stored_files() -> list[StoredFile]:
    """All that is kept of conversations, of every model."""
    return list(_scan(store_dir()))


def clear_stored() -> None:
    """Remove all of it. A process that runs goes on, and keeps new ones."""
    shutil.rmtree(store_dir(), ignore_errors=True)

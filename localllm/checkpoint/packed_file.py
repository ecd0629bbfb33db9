"""Repacked weights in a file of the cache folder: the next start reads it and repacks nothing. Bytes and names only.

A file is data, a header in JSON, and a tail that says where the header begins. It is written under another name, by the
one process that holds its lock, and moved into place when it is whole; nothing is ever written to a file in its place,
so a process may read it while another replaces or removes it. The header has checksums of the data, too: after a power
cut a name can stand for bytes that were never written.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import re
import shutil
import stat
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from localllm.paths import cache_dir

VERSION = 4  # counts up with every change of what the bytes mean
ALIGN = 4096
PART = 256 << 20  # bytes with one checksum, read by one thread: few parts, since each waits for the interpreter's lock
HUGE = 2 << 20  # bytes of a huge page
ENOUGH_HUGE = 0.9  # of a file in huge pages, to use them as they are
WRITTEN = 16 * HUGE  # bytes that are written at once, so that the system keeps them in huge pages
SETTLED = 16 * HUGE  # bytes that are moved at once: 20 ms for a request to wait
MREMAP_FIXED = 3  # and MREMAP_MAYMOVE
SPARE_BYTES = 2 << 30  # that stay free on the disk
_MAGIC = b"LLMPACK\0"
_TAIL = struct.Struct("<8sIQQ16s")  # magic, version, header at, its bytes, its digest


class Unusable(Exception):
    """Why a file is passed over, in words that end a sentence; `is_damaged`: it is of no use to anybody."""

    def __init__(self, reason: str, *, is_damaged: bool = True) -> None:
        super().__init__(reason)
        self.is_damaged = is_damaged


class Stored(NamedTuple):
    """A file of the folder."""

    path: Path
    num_bytes: int
    used: float  # when, on the wall clock
    files: tuple[Path, ...]  # of the model; () where the file cannot be read


def packed_dir() -> Path:
    """Where they lie."""
    return cache_dir() / "packed"


class PackedFile:
    """A file on its way into memory, which threads of its own read from the start on; `check` waits for them."""

    def __init__(self, path: Path) -> None:
        """Raises Unusable, and FileNotFoundError where there is none."""
        self._path = path
        try:
            descriptor = _open(path)
            try:
                self.header, self.size = _header(descriptor)
                self._reading = _Reading(descriptor, self.size, self.header["sums"])
            except BaseException:
                os.close(descriptor)
                raise
        except FileNotFoundError:
            raise
        except OSError as error:
            raise Unusable(f"cannot be read: {error.strerror}", is_damaged=False) from error

    def check(self, layout: str) -> np.ndarray:
        """uint8 [size], what was written. Raises Unusable.

        layout     what the bytes are laid out for: another one is another CPU's, or another version's
        """
        if self.header.get("layout") != layout:
            self.close()
            raise Unusable("is of another CPU or version")
        data = self._reading.data()
        with contextlib.suppress(OSError):
            os.utime(self._path)
        return data

    @property
    def copied(self) -> int:
        """Bytes in memory of this process; the others lie in the file's own pages. After `check`."""
        return self._reading.copied

    def settle(self, must_stop: Callable[[], bool]) -> bool:
        """An idle job: have all bytes in memory of this process, where they are. After `check`. Raises OSError."""
        return self._reading.settle(must_stop)

    def close(self) -> None:
        """Read no more of it. Safe to call twice, and after `check`."""
        self._reading.close()

    @property
    def entries(self) -> dict[str, Any]:
        return dict(self.header["entries"])


def read_ahead(path: Path) -> PackedFile | None:
    """The file, while its reader is not ready for it yet; None where there is none that can be read: who is ready then
    will find out why.
    """
    try:
        return PackedFile(path)
    except (FileNotFoundError, Unusable):
        return None


class PackedWriter:
    """A file on its way into the folder."""

    def __init__(self, path: Path, num_bytes: int, limit: int, spared_s: float = 0.0) -> None:
        """Raises Unusable where the folder or the disk has no room for about `num_bytes`, or another process writes.

        limit      bytes that all files may have together
        spared_s   files that were used within so many seconds do not go for this one
        """
        self._path, self._part = path, path.with_suffix(".part")
        self._at, self._next = 0, 0  # bytes so far, and with the pieces that are still to come
        self._file, self._waiting = -1, bytearray()
        self._sums = list[Any]()  # of parts: `xxhash`'s objects
        if num_bytes > limit:
            raise Unusable(f"would take {num_bytes:,} bytes, the limit is {limit:,}")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if make_room(path.parent, limit - num_bytes, path, spared_s) > limit - num_bytes:
                raise Unusable("has no room beside files that were used lately", is_damaged=False)
            if shutil.disk_usage(path.parent).free < num_bytes + SPARE_BYTES:
                raise Unusable("has no room: the disk is nearly full")
            self._file = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise Unusable(_why(error)) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(self._part).st_ino != os.fstat(self._file).st_ino:
                raise BlockingIOError  # it was moved into its place meanwhile
            os.ftruncate(self._file, 0)
        except OSError as error:
            os.close(self._file)
            raise Unusable("is written by another process", is_damaged=False) from error

    def pieces(self, data: np.ndarray) -> tuple[int, list[memoryview]]:
        """(where these bytes will lie, what to append for that), each piece at most `WRITTEN`; uint8, contiguous."""
        whole = data.data
        pieces = [whole[begin : begin + WRITTEN] for begin in range(0, data.nbytes, WRITTEN)]
        at, self._next = self._next, self._next + padded(data.nbytes)
        return at, [*pieces, memoryview(bytes(padded(data.nbytes) - data.nbytes))]

    def append(self, rest: memoryview) -> None:
        """The next of the pieces. Raises Unusable."""
        from xxhash import xxh3_64

        while rest:
            if self._at % PART == 0:
                self._sums.append(xxh3_64())
            room = WRITTEN - self._at % WRITTEN
            part, rest = rest[:room], rest[room:]
            self._sums[-1].update(part)
            self._waiting += part
            self._at += len(part)
            if len(part) == room:
                self._write_waiting()

    def _write_waiting(self) -> None:
        waiting, self._waiting = self._waiting, bytearray()
        self._write(memoryview(waiting), self._at - len(waiting))

    def _write(self, data: memoryview, at: int) -> None:
        done = 0
        try:
            while done < data.nbytes:
                done += os.pwrite(self._file, data[done:], at + done)
        except OSError as error:
            raise Unusable(_why(error)) from error

    def finish(self, header: dict[str, Any]) -> None:
        """Move the file into its place. Raises Unusable."""
        header = header | {"sums": [part.intdigest() for part in self._sums]}
        text = json.dumps(header, separators=(",", ":")).encode()
        tail = _TAIL.pack(_MAGIC, VERSION, self._at, len(text), blake2b(text, digest_size=16).digest())
        try:
            self._write_waiting()
            self._write(memoryview(text + tail), self._at)
            os.replace(self._part, self._path)
        except OSError as error:
            raise Unusable(_why(error)) from error
        self.close()

    def close(self) -> None:
        """Remove what is not finished."""
        file, self._file = self._file, -1
        if file < 0:
            return
        with contextlib.suppress(OSError):
            if os.stat(self._part).st_ino == os.fstat(file).st_ino:
                self._part.unlink()
        os.close(file)


def stored_packs(folder: Path | None = None) -> list[Stored]:
    """All files, and what killed processes left, the longest unused first."""
    return sorted(_scan(folder or packed_dir()), key=lambda one: one.used)


def of_models(paths: Iterable[Path]) -> list[Stored]:
    """The files that were made from one of these."""
    real = {os.path.realpath(path) for path in paths}
    return [one for one in stored_packs() if real & set(map(os.path.realpath, one.files))]


def padded(num_bytes: int) -> int:
    """Bytes that so many take in a file."""
    return -(-num_bytes // ALIGN) * ALIGN


def make_room(folder: Path, num_bytes: int, keep: Path | None = None, spared_s: float = 0.0) -> int:
    """Remove files until the others have so many bytes, and say how many they have: those whose model is gone or that
    nobody finished, and then the longest unused, but not what was used within `spared_s` seconds.
    """
    now = time.time()
    found = [one for one in stored_packs(folder) if one.path != keep]
    left = sum(one.num_bytes for one in found)
    for one in sorted(found, key=_is_wanted):
        if _is_wanted(one) and (left <= num_bytes or now - one.used < spared_s):
            break
        if remove(one.path):
            left -= one.num_bytes
    return left


def _is_wanted(one: Stored) -> bool:
    return one.path.suffix != ".part" and all(path.exists() for path in one.files)


def remove(path: Path) -> bool:
    """Whether it is gone; what another process writes right now stays."""
    try:
        if path.suffix == ".part":
            with open(path, "r+b") as file:  # NFS locks only what may be written
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _scan(folder: Path) -> Iterator[Stored]:
    for path in [*folder.glob("*.packed"), *folder.glob("*.part")]:
        try:
            found = path.lstat()
            files: tuple[Path, ...] = ()
            with contextlib.suppress(Unusable), contextlib.closing(_Descriptor(path)) as file:
                files = tuple(map(Path, _header(file.number)[0].get("files", ())))
            yield Stored(path, found.st_size, found.st_mtime, files)
        except OSError:
            continue  # another process removed it


class _Descriptor:
    def __init__(self, path: Path) -> None:
        self.number = _open(path)

    def close(self) -> None:
        os.close(self.number)


def _open(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return descriptor


def _header(descriptor: int) -> tuple[dict[str, Any], int]:
    """(the header, bytes of data). Raises Unusable."""
    size = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, _TAIL.size, max(0, size - _TAIL.size))
    if len(tail) < _TAIL.size or not tail.startswith(_MAGIC):
        raise Unusable("is cut off")
    _, version, at, length, digest = _TAIL.unpack(tail)
    if version != VERSION:
        raise Unusable("is of another version")
    text = os.pread(descriptor, length, at) if at + length + _TAIL.size == size else b""
    if blake2b(text, digest_size=16).digest() != digest:
        raise Unusable("is damaged")
    return dict(json.loads(text)), at


class _Reading:
    """A file's first bytes on their way into huge pages, by threads of its own.

    Where the system keeps the file itself in huge pages, these are mapped: nothing is copied before `settle`. Elsewhere
    they are read, as decoding from small pages takes 14 % longer.
    """

    def __init__(self, descriptor: int, size: int, sums: Sequence[int]) -> None:
        """Closes the descriptor when it is done with it. Raises Unusable."""
        if not size:
            raise Unusable("is empty")
        self._descriptor, self._size, self._sums, self._ends = descriptor, size, sums, False
        self._mapped = 0  # from here on the bytes lie in the file's pages; `size` where none do
        # a CPU is left to the imports beside it: a 4B's first token on two Cascade Lake cores in 3.1 s instead of 3.4
        self._pool = ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 1) - 1)))
        self._memory = self._pool.submit(self._find_memory)
        self._parts = [self._pool.submit(self._read, at) for at in range(0, size, PART)]
        weakref.finalize(self, os.close, descriptor)

    def _find_memory(self) -> mmap.mmap:
        """Huge pages of the file, or memory to read it into."""
        with contextlib.suppress(OSError, ValueError):
            memory = mmap.mmap(self._descriptor, self._size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
            before = _huge_file_bytes()
            with contextlib.suppress(OSError, AttributeError):
                memory.madvise(mmap.MADV_HUGEPAGE)
            np.frombuffer(memory, dtype=np.uint8)[::HUGE].max()  # maps what is touched
            if _huge_file_bytes() - before >= ENOUGH_HUGE * self._size:
                return memory
        self._mapped = self._size
        memory = mmap.mmap(-1, self._size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    @property
    def copied(self) -> int:
        """So many of the bytes are in memory of this process."""
        return self._mapped

    def _read(self, begin: int) -> None:
        from xxhash import xxh3_64_intdigest

        at, end = begin, min(begin + PART, self._size)
        memory = self._memory.result()
        with memoryview(memory) as whole:
            if begin < self._mapped:
                # The system takes the lock of all our memory for a page that it has to find itself, as it would while
                # reading: imports in another thread would take 1.4 s instead of 1.25.
                np.frombuffer(memory, dtype=np.uint8)[begin:end:ALIGN] = 0
                while at < end and not self._ends:
                    done = os.preadv(self._descriptor, [whole[at:end]], at)
                    if not done:
                        raise Unusable("is cut off")
                    at += done
            if not self._ends and xxh3_64_intdigest(whole[begin:end]) != self._sums[begin // PART]:
                raise Unusable("is damaged")

    def data(self) -> np.ndarray:
        """uint8 [size], read-only. Raises Unusable."""
        try:
            for number, part in reversed([*enumerate(self._parts)]):
                if part.cancel():  # nobody has begun with it: who would wait reads it
                    self._read(number * PART)
            for part in self._parts:
                if not part.cancelled():
                    part.result()
        except OSError as error:
            raise Unusable(f"cannot be read: {error.strerror}", is_damaged=False) from error
        finally:
            self.close()
        data = np.frombuffer(self._memory.result(), dtype=np.uint8)
        data.setflags(write=False)
        return data

    def settle(self, must_stop: Callable[[], bool]) -> bool:
        """Have the bytes in memory of this process, where they are: the system may take a file's pages away at any time
        and read them again from the disk. Whether nothing is left to do. Raises OSError.
        """
        first = np.frombuffer(self._memory.result(), dtype=np.uint8).ctypes.data
        while self._mapped < self._size:
            if must_stop():
                return False
            num_bytes = min(SETTLED, self._size - self._mapped)
            _copy_in_place(first + self._mapped, num_bytes)
            self._mapped += num_bytes
        return True

    def close(self) -> None:
        self._ends = True
        self._pool.shutdown(cancel_futures=True)


def _copy_in_place(at: int, num_bytes: int) -> None:
    """Put huge pages of this process that hold the same in the place of mapped pages. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    pages, room = ctypes.c_size_t(num_bytes), ctypes.c_size_t(num_bytes + HUGE)
    kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, ctypes.c_size_t(0)
    begin = libc.mmap(None, room, *kind)
    if begin in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "no memory for repacked weights")
    before = (at - begin) % HUGE
    libc.munmap(ctypes.c_void_p(begin + before + num_bytes), ctypes.c_size_t(HUGE - before))
    if before:
        libc.munmap(ctypes.c_void_p(begin), ctypes.c_size_t(before))
    begin += before
    libc.madvise(ctypes.c_void_p(begin), pages, mmap.MADV_HUGEPAGE)
    ctypes.memmove(begin, at, num_bytes)
    if libc.mremap(ctypes.c_void_p(begin), pages, pages, MREMAP_FIXED, ctypes.c_void_p(at)) != at:
        code = ctypes.get_errno()
        libc.munmap(ctypes.c_void_p(begin), pages)
        raise OSError(code, "repacked weights cannot be moved")


def _huge_file_bytes() -> int:
    """Of files that this process has mapped, what it has in huge pages."""
    try:
        text = Path("/proc/self/smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(r"^FilePmdMapped: *(\d+) kB", text, re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def _why(error: OSError) -> str:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "has no room: the disk is full" if full else f"cannot be written: {error.strerror}"

"""Cache files for repacked weights: the next start reads the file instead of repacking. Handles only bytes and names.

A file is data, a JSON header, and a tail with the header's position. It is written under a temporary name by the one
process that holds its lock, and renamed when complete; a file in place is never modified, so a process may read it
while another replaces or removes it. The header holds checksums of the data, because after a power failure a file can
contain bytes that were never written.
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

VERSION = 4  # increases with every change of the layout
ALIGN = 4096
PART = 256 << 20  # bytes per checksum and read by one thread; few parts, because each waits for the GIL
HUGE = 2 << 20  # bytes of a huge page
ENOUGH_HUGE = 0.9  # share of a file in huge pages from which these are used directly
WRITTEN = 16 * HUGE  # bytes per write, which makes the system keep them in huge pages
SETTLED = 16 * HUGE  # bytes copied at a time: a request waits 20 ms at most
MREMAP_FIXED = 3  # with MREMAP_MAYMOVE
SPARE_BYTES = 2 << 30  # disk space to keep free
_MAGIC = b"LLMPACK\0"
_TAIL = struct.Struct("<8sIQQ16s")  # magic, version, header's offset, size and digest


class Unusable(Exception):
    """Why a file cannot be used, as a predicate without its subject; `is_damaged`: no process can use it."""

    def __init__(self, reason: str, *, is_damaged: bool = True) -> None:
        super().__init__(reason)
        self.is_damaged = is_damaged


class Stored(NamedTuple):
    """A file in the cache folder."""

    path: Path
    num_bytes: int
    used: float  # last use, in seconds since the epoch
    files: tuple[Path, ...]  # the model's files; () if the file cannot be read


def packed_dir() -> Path:
    """The folder of packed files."""
    return cache_dir() / "packed"


class PackedFile:
    """A packed file being read by background threads from the start on; `check` waits for them."""

    def __init__(self, path: Path) -> None:
        """Open the file and start reading. Raises Unusable, or FileNotFoundError if it does not exist."""
        self._path = path
        try:
            descriptor = _open(path)
            try:
                self.header, self.size = _header(descriptor)
                self._reading = _Reader(descriptor, self.size, self.header["sums"])
            except BaseException:
                os.close(descriptor)
                raise
        except FileNotFoundError:
            raise
        except OSError as error:
            raise Unusable(f"cannot be read: {error.strerror}", is_damaged=False) from error

    def check(self, layout: str) -> np.ndarray:
        """Wait for the data, uint8 [size]. Raises Unusable.

        layout     the expected layout; a different one belongs to another CPU or version
        """
        if self.header.get("layout") != layout:
            self.close()
            raise Unusable("is from another CPU or version")
        data = self._reading.data()
        with contextlib.suppress(OSError):
            os.utime(self._path)
        return data

    @property
    def copied(self) -> int:
        """Bytes copied to this process's memory; the others are in the file's own pages. Valid after `check`."""
        return self._reading.copied

    def settle(self, must_stop: Callable[[], bool]) -> bool:
        """Idle job that copies all bytes to this process's memory, in place. Valid after `check`. Raises OSError."""
        return self._reading.settle(must_stop)

    def close(self) -> None:
        """Stop reading. Safe to call twice, and after `check`."""
        self._reading.close()

    @property
    def entries(self) -> dict[str, Any]:
        return dict(self.header["entries"])


def read_ahead(path: Path) -> PackedFile | None:
    """Start reading a file early. None if it is missing or unusable; the later open reports why."""
    try:
        return PackedFile(path)
    except (FileNotFoundError, Unusable):
        return None


class PackedWriter:
    """Writes a packed file to the folder."""

    def __init__(self, path: Path, num_bytes: int, limit: int, spared_s: float = 0.0) -> None:
        """Make room and lock the file. Raises Unusable if about `num_bytes` do not fit or another process writes it.

        limit      maximum size of all files together
        spared_s   files used within this many seconds are not removed to make room
        """
        self._path, self._part = path, path.with_suffix(".part")
        self._at, self._next = 0, 0  # bytes so far, without and with the pieces still to come
        self._file, self._waiting = -1, bytearray()
        self._sums = list[Any]()  # one `xxhash` object per part
        if num_bytes > limit:
            raise Unusable(f"would take {num_bytes:,} bytes; the limit is {limit:,}")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if make_room(path.parent, limit - num_bytes, path, spared_s) > limit - num_bytes:
                raise Unusable("does not fit without removing recently used files", is_damaged=False)
            if shutil.disk_usage(path.parent).free < num_bytes + SPARE_BYTES:
                raise Unusable("does not fit: the disk is nearly full")
            self._file = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise Unusable(_write_error(error)) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(self._part).st_ino != os.fstat(self._file).st_ino:
                raise BlockingIOError  # the file was renamed into place meanwhile
            os.ftruncate(self._file, 0)
        except OSError as error:
            os.close(self._file)
            raise Unusable("is being written by another process", is_damaged=False) from error

    def pieces(self, data: np.ndarray) -> tuple[int, list[memoryview]]:
        """Return (offset of this data, pieces to append), each piece at most `WRITTEN`. `data` is contiguous uint8."""
        whole = data.data
        pieces = [whole[begin : begin + WRITTEN] for begin in range(0, data.nbytes, WRITTEN)]
        at, self._next = self._next, self._next + padded(data.nbytes)
        return at, [*pieces, memoryview(bytes(padded(data.nbytes) - data.nbytes))]

    def append(self, rest: memoryview) -> None:
        """Append the next piece. Raises Unusable."""
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
            raise Unusable(_write_error(error)) from error

    def finish(self, header: dict[str, Any]) -> None:
        """Write the header and rename the file into place. Raises Unusable."""
        header = header | {"sums": [part.intdigest() for part in self._sums]}
        text = json.dumps(header, separators=(",", ":")).encode()
        tail = _TAIL.pack(_MAGIC, VERSION, self._at, len(text), blake2b(text, digest_size=16).digest())
        try:
            self._write_waiting()
            self._write(memoryview(text + tail), self._at)
            os.replace(self._part, self._path)
        except OSError as error:
            raise Unusable(_write_error(error)) from error
        self.close()

    def close(self) -> None:
        """Remove an unfinished file."""
        file, self._file = self._file, -1
        if file < 0:
            return
        with contextlib.suppress(OSError):
            if os.stat(self._part).st_ino == os.fstat(file).st_ino:
                self._part.unlink()
        os.close(file)


def stored_packs(folder: Path | None = None) -> list[Stored]:
    """List all files, including leftovers of killed processes, least recently used first."""
    return sorted(_scan(folder or packed_dir()), key=lambda one: one.used)


def of_models(paths: Iterable[Path]) -> list[Stored]:
    """List the files that were made from one of these model files."""
    real = {os.path.realpath(path) for path in paths}
    return [one for one in stored_packs() if real & set(map(os.path.realpath, one.files))]


def padded(num_bytes: int) -> int:
    """`num_bytes` rounded up to `ALIGN`."""
    return -(-num_bytes // ALIGN) * ALIGN


def make_room(folder: Path, num_bytes: int, keep: Path | None = None, spared_s: float = 0.0) -> int:
    """Remove files until the others take at most `num_bytes`; returns the bytes left.

    Removes files of deleted models and unfinished files first, then the least recently used, except those used within
    `spared_s` seconds.
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
    """Remove a file unless another process is writing it. Returns True if it is gone."""
    try:
        if path.suffix == ".part":
            with open(path, "r+b") as file:  # NFS locks only writable files
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
    """Return (header, bytes of data). Raises Unusable."""
    size = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, _TAIL.size, max(0, size - _TAIL.size))
    if len(tail) < _TAIL.size or not tail.startswith(_MAGIC):
        raise Unusable("is truncated")
    _, version, at, length, digest = _TAIL.unpack(tail)
    if version != VERSION:
        raise Unusable("is from another version")
    text = os.pread(descriptor, length, at) if at + length + _TAIL.size == size else b""
    if blake2b(text, digest_size=16).digest() != digest:
        raise Unusable("is damaged")
    return dict(json.loads(text)), at


class _Reader:
    """Reads a file's data into huge pages with background threads.

    If the system keeps the file itself in huge pages, they are mapped and nothing is copied before `settle`. Otherwise
    the data is read, because decoding from small pages takes 14 % longer.
    """

    def __init__(self, descriptor: int, size: int, sums: Sequence[int]) -> None:
        """Start reading; takes ownership of the descriptor. Raises Unusable."""
        if not size:
            raise Unusable("is empty")
        self._descriptor, self._size, self._sums, self._stopped = descriptor, size, sums, False
        self._mapped = 0  # bytes from here on are in the file's own pages; equals `size` if none are
        # one CPU is left for imports: a 4B model's first token on two Cascade Lake cores takes 3.1 s instead of 3.4
        self._pool = ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 1) - 1)))
        self._memory = self._pool.submit(self._find_memory)
        self._parts = [self._pool.submit(self._read, at) for at in range(0, size, PART)]
        weakref.finalize(self, os.close, descriptor)

    def _find_memory(self) -> mmap.mmap:
        """Map the file's huge pages, or memory to read it into."""
        with contextlib.suppress(OSError, ValueError):
            memory = mmap.mmap(self._descriptor, self._size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
            before = _huge_file_bytes()
            with contextlib.suppress(OSError, AttributeError):
                memory.madvise(mmap.MADV_HUGEPAGE)
            np.frombuffer(memory, dtype=np.uint8)[::HUGE].max()  # touching pages maps them
            if _huge_file_bytes() - before >= ENOUGH_HUGE * self._size:
                return memory
        self._mapped = self._size
        memory = mmap.mmap(-1, self._size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    @property
    def copied(self) -> int:
        """Bytes copied to this process's memory."""
        return self._mapped

    def _read(self, begin: int) -> None:
        from xxhash import xxh3_64_intdigest

        at, end = begin, min(begin + PART, self._size)
        memory = self._memory.result()
        with memoryview(memory) as whole:
            if begin < self._mapped:
                # fault the pages in first: page faults inside preadv hold the lock of the whole address space, and
                # imports in another thread would take 1.4 s instead of 1.25
                np.frombuffer(memory, dtype=np.uint8)[begin:end:ALIGN] = 0
                while at < end and not self._stopped:
                    done = os.preadv(self._descriptor, [whole[at:end]], at)
                    if not done:
                        raise Unusable("is truncated")
                    at += done
            if not self._stopped and xxh3_64_intdigest(whole[begin:end]) != self._sums[begin // PART]:
                raise Unusable("is damaged")

    def data(self) -> np.ndarray:
        """uint8 [size], read-only. Raises Unusable."""
        try:
            for number, part in reversed([*enumerate(self._parts)]):
                if part.cancel():  # not started yet: read it here instead of waiting
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
        """Copy the bytes to this process's memory in place, because the system may evict a file's pages at any time.

        Returns True when nothing is left to do. Raises OSError.
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
        self._stopped = True
        self._pool.shutdown(cancel_futures=True)


def _copy_in_place(at: int, num_bytes: int) -> None:
    """Replace mapped pages by anonymous huge pages with the same contents. Raises OSError."""
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
    """Bytes of mapped files that this process has in huge pages."""
    try:
        text = Path("/proc/self/smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(r"^FilePmdMapped: *(\d+) kB", text, re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def _write_error(error: OSError) -> str:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "does not fit: the disk is full" if full else f"cannot be written: {error.strerror}"

"""Downloads files of a hub repository into the cache: in parallel, resumable after a kill, verified before use.

A file is written to `<digest>.localllm-partial` under huggingface_hub's lock for that blob and renamed only when its
hash matches the listing. The snapshot is linked only when all files of the model are complete, so no tool sees half a
model. Worker threads download; the caller's thread reports progress.
"""

from __future__ import annotations

import errno
import re
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.errors import Aborted, DoesNotFit, DownloadError, LocalLLMError
from localllm.request import LoadProgress, OnProgress
from localllm.terminal import gib

from . import cache
from .client import HubClient, TransientError, shut, with_retries
from .listing import RepoFile
from .meter import Meter
from .names import shown
from .partial_file import PartialFile

if TYPE_CHECKING:
    import httpx

WORKERS = 4
SPARE = 1.1  # required free disk, as a multiple of the remaining bytes
_MIN_RATE = 1024  # bytes per second below which a connection counts as stalled


@dataclass(frozen=True, slots=True)
class Job:
    """Files of one repository at one commit."""

    repo: str
    revision: str
    files: tuple[RepoFile, ...]
    ref: str | None = None  # the branch or tag that points to this commit
    workers: int = WORKERS  # files downloaded in parallel


def fetch(job: Job, client: HubClient, progress: OnProgress, cancel: threading.Event) -> Path:
    """Download all files of a job into the cache; returns the snapshot folder.

    Raises Aborted when `cancel` is set or Ctrl+C is pressed, DoesNotFit when the disk is full, DownloadError for other
    failures. Downloaded data is kept for the next call, except files that failed their checksum.
    """
    for note in cache.prepare(job.repo):
        progress(LoadProgress("resolve", detail=note))
    for _ in range(3):
        need = int(missing_bytes(job.repo, job.files) * SPARE)
        cache.check_disk(
            cache.hub_dir(), need, job.repo, "`localllm rm NAME` frees space, or set HF_HOME to another disk"
        )
        _Transfer(job, client, progress, cancel).run()
        with cache.repo_lock(job.repo), cache.writing(cache.repo_dir(job.repo)):
            if all(is_stored(job.repo, f) for f in job.files):  # else another process removed one meanwhile
                for file in job.files:  # left over if a process was killed between the last byte and the cleanup
                    cache.partial_of(job.repo, file.digest).facts.unlink(missing_ok=True)
                return cache.link_snapshot(job.repo, job.revision, {f.name: f.digest for f in job.files}, job.ref)
    raise DownloadError(
        f"another process removed files of {job.repo} during the download",
        "wait for any other `localllm rm` to finish, then run the same command again",
    )


def is_stored(repo: str, file: RepoFile) -> bool:
    """True when the verified blob exists with the size the hub lists."""
    return cache.has_size(cache.blob_path(repo, file.digest), file.size)


def missing_bytes(repo: str, files: Sequence[RepoFile]) -> int:
    """Bytes left to download, after subtracting partial files."""
    return sum(f.size - _partial_size(repo, f) for f in files if not is_stored(repo, f))


def _partial_size(repo: str, file: RepoFile) -> int:
    try:
        size = cache.partial_of(repo, file.digest).data.stat().st_size
    except OSError:
        return 0
    return size if size <= file.size else 0


class _Transfer:
    """One pass over the files of a job."""

    def __init__(self, job: Job, client: HubClient, progress: OnProgress, cancel: threading.Event) -> None:
        self.job, self.client, self.progress, self.cancel = job, client, progress, cancel
        self.stop = threading.Event()
        self.meter = Meter(sum(f.size for f in job.files))
        self._queue: deque[RepoFile] = deque()
        self._failure: BaseException | None = None
        self._open: set[httpx.Response] = set()
        self._guard = threading.Lock()

    def run(self) -> None:
        """Start the workers, report progress until they finish, and raise the first failure."""
        for file in self.job.files:
            here = file.size if is_stored(self.job.repo, file) else _partial_size(self.job.repo, file)
            self.meter.at(file.name, here, arrived=False)
        unique = {f.digest: f for f in self.job.files if not is_stored(self.job.repo, f)}
        self._queue.extend(sorted(unique.values(), key=lambda f: -f.size))
        width = min(max(1, self.job.workers), len(self._queue))
        workers = [threading.Thread(target=self._work, daemon=True) for _ in range(width)]
        try:
            for worker in workers:
                worker.start()
            while any(w.is_alive() for w in workers) and not self.cancel.is_set():
                self.progress(self.meter.phase())
                next((w for w in workers if w.is_alive()), workers[0]).join(0.2)
        except KeyboardInterrupt:
            self.cancel.set()
        finally:
            self._halt(workers)
        if self._failure is not None and not self.cancel.is_set():
            raise self._failure
        state = self.meter.phase()
        if self.cancel.is_set():
            percent = 100 * state.done // max(1, state.total)
            raise Aborted(f"paused at {percent} %; run the same command to resume")
        self.progress(state)

    def _halt(self, workers: list[threading.Thread]) -> None:
        """Stop all workers; shutting down the sockets ends blocked reads."""
        self.stop.set()
        with self._guard:
            for response in self._open:
                shut(response)
        for worker in workers:
            if worker.ident is not None:
                worker.join(2.0)

    def _work(self) -> None:
        while not self.stop.is_set():
            try:
                file = self._queue.popleft()
            except IndexError:
                return
            try:
                self._store(file)
            except Aborted:
                return
            except BaseException as error:  # handed to the caller's thread, which raises it
                with self._guard:
                    self._failure = self._failure or error
                self.stop.set()
                return

    def _store(self, file: RepoFile) -> None:
        """Download one file, or wait until another process has done so."""
        blob = cache.blob_path(self.job.repo, file.digest)
        with cache.writing(blob.parent), self._blob_lock(file):
            if is_stored(self.job.repo, file):
                self.meter.at(file.name, file.size)
                return
            try:
                blob.parent.mkdir(parents=True, exist_ok=True)
                cache.clear(blob)
                with PartialFile(self.job.repo, file) as partial:
                    self._receive_all(file, partial)
                    if partial.resumed and not partial.is_right():  # bytes from an earlier run are corrupt on disk
                        partial.restart()
                        self._receive_all(file, partial)
                    partial.finish(blob)
            except OSError as error:
                raise self._disk_error(error) or error from error

    def _blob_lock(self, file: RepoFile) -> AbstractContextManager[None]:
        """huggingface_hub's lock for this blob. While another process holds it, report that process's progress."""
        seen = 0

        def wait() -> None:
            nonlocal seen
            if self.stop.is_set():
                raise Aborted("stopped")
            here = _partial_size(self.job.repo, file)
            self.meter.at(file.name, here, arrived=here != seen)
            seen = here
            self.meter.notice(f"waiting for another process to download {file.name}")

        return cache.file_lock(cache.blob_lock_path(self.job.repo, file.digest), wait)

    def _receive_all(self, file: RepoFile, partial: PartialFile) -> None:
        """Request the file until it is complete. Each MiB of progress resets the retry count."""
        if partial.size < file.size:
            with_retries(
                lambda: self._receive(file, partial),
                self.client.patience,
                file.name,
                hint="run the same command to resume; downloaded data is kept",
                stop=self.stop,
                notice=self.meter.notice,
                arrived=lambda: partial.size,
            )

    def _receive(self, file: RepoFile, partial: PartialFile) -> None:
        """Send one request, starting at the end of the partial file."""
        with self.client.file(self.job.repo, self.job.revision, file.name, partial.size) as response:
            with self._guard:
                self._open.add(response)
            try:
                _check_answer(response, file, partial)
                self._copy_body(response, file, partial)
            finally:
                with self._guard:
                    self._open.discard(response)
        if partial.size < file.size:
            raise TransientError(f"the connection closed at {gib(partial.size)} of {gib(file.size)}")

    def _copy_body(self, response: httpx.Response, file: RepoFile, partial: PartialFile) -> None:
        window, since = time.monotonic(), partial.size
        for chunk in response.iter_raw():
            if self.stop.is_set():
                raise Aborted("stopped")
            if partial.size + len(chunk) > file.size:
                raise TransientError(f"checksum mismatch: received more than the {file.size:,} bytes the hub listed")
            partial.write(chunk)
            self.meter.at(file.name, partial.size)
            now = time.monotonic()
            if now - window > self.client.patience.stall_s:
                if partial.size - since < _MIN_RATE * (now - window):
                    raise TransientError("the hub sent less than 1 KiB/s")
                window, since = now, partial.size

    def _disk_error(self, error: OSError) -> LocalLLMError | None:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return None
        state, folder = self.meter.phase(), cache.hub_dir()
        what = "the file size limit is reached" if error.errno == errno.EFBIG else "no space left"
        return DoesNotFit(
            f"{what} on {folder} after {gib(state.done)} of {gib(state.total)} of {self.job.repo}",
            "free some space and run the same command to resume; `localllm rm --partial` deletes the partial download",
            context={"need_bytes": state.total, "done_bytes": state.done},
        )


def _check_answer(response: httpx.Response, file: RepoFile, partial: PartialFile) -> None:
    """Check that the response is the listed file from the end of the partial file on; otherwise restart the partial."""
    stated = _stated_digest(response, len(file.digest))
    if stated and stated != file.digest:
        partial.restart()
        raise TransientError(
            f"checksum mismatch: {shown(file.name)} changed on the hub ({stated[:12]}…) after it was listed"
        )
    if response.headers.get("content-encoding", "identity") != "identity":
        raise TransientError("the hub sent the file compressed")
    total: str | None = None
    if response.status_code == 206:
        first, _, total = response.headers.get("content-range", "").removeprefix("bytes ").partition("/")
        if first.split("-")[0] != str(partial.size):
            partial.restart()
            raise TransientError("the hub sent a different range than requested")
    else:
        partial.restart()  # the hub ignored Range
    length = response.headers.get("content-length", "")
    announced = int(length) + partial.size if re.fullmatch(r"[0-9]{1,18}", length) else file.size
    if announced > file.size or (total not in (None, "*", str(file.size))):
        raise TransientError(f"checksum mismatch: the hub announced {announced:,} bytes but listed {file.size:,}")


def _stated_digest(response: httpx.Response, hex_digits: int) -> str:
    """The digest in the hub's own response, or "". A storage host behind a redirect uses a different kind of ETag."""
    headers: Any = response.extensions.get("first_headers") or response.headers
    own = headers is response.headers
    tag = headers.get("x-linked-etag") or (headers.get("etag", "") if own else "")
    tag = tag.removeprefix("W/").strip('"')
    return tag if len(tag) == hex_digits and all(c in "0123456789abcdef" for c in tag) else ""

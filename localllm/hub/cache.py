"""The Hugging Face cache on disk: where it is, what is in it, how a verified file enters it and leaves it.

The layout is huggingface_hub's and shared with other tools: `models--org--name/{blobs,refs,snapshots}`, locks in
`.locks`. Ours alone are partial files, `blobs/<digest>.localllm-partial` with a `.json` beside them.
No network here. Called by the other modules of this folder.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from localllm import paths
from localllm.errors import ConfigError, DoesNotFit, LocalLLMError
from localllm.terminal import gib

from .names import check_digest

PARTIAL = ".localllm-partial"
_SCRAP = ".localllm-tmp"  # ends the names of files that are about to be renamed
_REPO_LOCK = "localllm-snapshot.lock"
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENOTDIR, errno.EEXIST, errno.EISDIR,
            errno.ENOENT)  # fmt: skip


def hub_dir() -> Path:
    """The folder of cached repositories: HF_HUB_CACHE, or HF_HOME/hub, or the default below the home folder."""
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return (_home(os.path.expandvars(cache)) if cache else hf_home() / "hub").absolute()


def hf_home() -> Path:
    """HF_HOME, or the folder huggingface_hub takes without it."""
    named = os.environ.get("HF_HOME")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return _home(os.path.expandvars(named or os.path.join(base, "huggingface")))


def _home(text: str) -> Path:
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise ConfigError(
            f"there is no home folder for {text!r}: HOME is not set and the user is unknown",
            "set HF_HOME to a folder for models, for example HF_HOME=/data/hf",
        )
    return Path(expanded)


def models_dir() -> Path:
    """The folder of models from a package index. Raises ConfigError when there is no home folder."""
    try:
        return paths.models_dir()
    except RuntimeError as error:  # platformdirs: no HOME, and the user is unknown
        raise ConfigError(
            "there is no home folder: HOME is not set and the user is unknown",
            "set HOME, or LOCALLLM_HOME to a folder for models",
        ) from error


def repo_dir(repo: str) -> Path:
    """The folder of one repository in the cache."""
    return hub_dir() / ("models--" + repo.replace("/", "--"))


class Partial(NamedTuple):
    """Where a blob grows before it is verified."""

    data: Path
    facts: Path


def partial_of(repo: str, digest: str) -> Partial:
    """The partial file of a blob and the JSON beside it."""
    data = repo_dir(repo) / "blobs" / (digest + PARTIAL)
    return Partial(data, data.with_name(data.name + ".json"))


def blob_path(repo: str, digest: str) -> Path:
    """Where the verified file with that digest lives."""
    return repo_dir(repo) / "blobs" / digest


def blob_lock_path(repo: str, digest: str) -> Path:
    """huggingface_hub's lock for one blob."""
    return hub_dir() / ".locks" / repo_dir(repo).name / f"{digest}.lock"


@contextmanager
def file_lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold a lock file, huggingface_hub's for a blob, say. `on_wait` is called four times a second while others do."""
    from filelock import FileLock, Timeout

    lock = FileLock(path, mode=0o664)
    while not lock.is_locked:
        try:
            lock.acquire(timeout=0.25, poll_interval=0.05)
        except Timeout:
            on_wait()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def repo_lock(repo: str) -> Iterator[None]:
    """Held while snapshots of a repository gain or lose files: pulling and removing never interleave there."""
    from filelock import FileLock

    path = hub_dir() / ".locks" / repo_dir(repo).name / _REPO_LOCK
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path, mode=0o664)
        lock.acquire(timeout=600)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn the ways a folder can refuse to be written into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DoesNotFit(
                f"no space left for {folder}", "`localllm rm NAME` frees space, or set HF_HOME elsewhere"
            ) from error
        if error.errno in _REFUSED:
            why = (error.strerror or "refused").lower()
            raise ConfigError(
                f"cannot write to the model folder {folder}: {why}",
                "set HF_HOME to a folder you can write, for example HF_HOME=/data/hf",
            ) from error
        raise


def write_json(path: Path, value: Any) -> None:
    """Replace a small file of ours in the cache; what a killed process leaves of it is a scrap."""
    paths.replace_file(path, json.dumps(value), mode=0o600, suffix=_SCRAP)


def has_size(path: Path, size: int) -> bool:
    """A file is there, with that size."""
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def num_bytes(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; those that are removed meanwhile count for nothing."""
    below = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    total = 0
    for file in below if path.is_dir() else [path]:
        with suppress(OSError):
            total += os.lstat(file).st_size
    return total


def check_disk(folder: Path, need_bytes: int, what: str, hint: str) -> None:
    """Raise DoesNotFit, with both numbers, unless the disk of a folder, which may not exist yet, has that much free."""
    place = next(p for p in [folder, *folder.parents] if p.exists())
    free = shutil.disk_usage(place).free
    if need_bytes > free:
        raise DoesNotFit(
            f"{what} needs {gib(need_bytes)} of free disk, {place} has {gib(free)}",
            hint,
            context={"need_bytes": need_bytes, "free_bytes": free},
        )


def file_digest(path: Path, hex_digits: int) -> str:
    """SHA-256 (64 digits) or git blob SHA-1 (40 digits) of a file."""
    with open(path, "rb") as file:
        hasher = new_hasher(hex_digits, os.fstat(file.fileno()).st_size)
        while block := file.read(1 << 20):
            hasher.update(block)
    return str(hasher.hexdigest())


def new_hasher(hex_digits: int, size: int) -> Any:
    """The hash a digest of that length stands for, ready for the file's bytes."""
    import hashlib

    if hex_digits == 64:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)


def prepare(repo: str) -> list[str]:
    """Make the folders of a repository; returns notes worth showing. Raises ConfigError where that is refused."""
    root = hub_dir()
    with writing(root):
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        (repo_dir(repo) / "blobs").mkdir(parents=True, exist_ok=True)
        (root / ".locks" / repo_dir(repo).name).mkdir(parents=True, exist_ok=True)
        mode = root.stat().st_mode
        with tempfile.TemporaryFile(dir=repo_dir(repo) / "blobs"):  # folders that exist may still refuse a file
            pass
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        return [f"{root} can be written by every user of this machine: chmod o-w {root}"]
    return []


def link_snapshot(repo: str, revision: str, names: dict[str, str], ref: str | None) -> Path:
    """Give verified blobs their names in a snapshot, weights last, then point the ref at it.

    names maps file name -> digest. The caller holds `repo_lock` and has seen every blob there.
    """
    folder = repo_dir(repo) / "snapshots" / check_digest(revision, 40)
    if folder.is_symlink() or not folder.is_dir():
        clear(folder)
    for scrap in folder.rglob(f".*{_SCRAP}"):  # left by a process that was killed; the lock is ours
        clear(scrap)
    for name in sorted(names, key=lambda n: (n.endswith((".safetensors", ".gguf")), n)):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        blob = blob_path(repo, names[name])
        _link(os.path.relpath(blob, target.parent), target, blob)
    if ref:
        path = repo_dir(repo) / "refs" / ref
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            clear(path)
        for scrap in path.parent.glob(f"*{_SCRAP}"):
            clear(scrap)
        paths.replace_file(path, revision, suffix=_SCRAP)
    return folder


def clear(path: Path) -> None:
    """Remove whatever goes by that name: a file, a link, a folder, or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _link(source: str, target: Path, blob: Path) -> None:
    if target.is_symlink() and os.readlink(target) == source:
        return
    if target.is_dir() and not target.is_symlink():
        clear(target)
    temporary = target.with_name(f".{target.name}.{os.getpid()}{_SCRAP}")
    try:
        temporary.unlink(missing_ok=True)
        os.symlink(source, temporary)
    except OSError:  # a file system without symbolic links: the file itself, as huggingface_hub does
        shutil.copyfile(blob, temporary)
    os.replace(temporary, target)


def read_ref(repo: str, revision: str) -> str | None:
    """The commit a branch, tag or commit stands for in this cache, or None."""
    folder = repo_dir(repo)
    if len(revision) == 40 and (folder / "snapshots" / revision).is_dir():
        return revision
    try:
        text = (folder / "refs" / revision).read_text(encoding="utf-8").strip()
        return check_digest(text, 40) if (folder / "snapshots" / text).is_dir() else None
    except (OSError, ValueError, LocalLLMError):  # an unreadable or damaged ref: as if it were not there
        return None


def files_in(folder: Path) -> list[str]:
    """File names below a snapshot folder, `/`-separated, broken links included. Two levels are enough for models."""
    found: list[str] = []
    with suppress(OSError):
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                inner = os.scandir(entry.path)
                found += [f"{entry.name}/{e.name}" for e in inner if not e.is_dir(follow_symlinks=False)]
            else:
                found.append(entry.name)
    return sorted(name for name in found if not name.endswith(_SCRAP))


def cached_repos() -> list[tuple[str, list[str]]]:
    """(repository, snapshot commits, newest first) of everything in the cache."""
    try:
        folders = sorted(p for p in hub_dir().iterdir() if p.name.startswith("models--") and p.is_dir())
    except (OSError, ConfigError):
        return []
    return [(p.name.removeprefix("models--").replace("--", "/"), snapshots(p)) for p in folders]


def snapshots(folder: Path) -> list[str]:
    """The commits of a cached repository's folder, newest first."""
    try:
        found = [p for p in (folder / "snapshots").iterdir() if p.is_dir()]
        return [p.name for p in sorted(found, key=lambda p: p.stat().st_mtime, reverse=True)]
    except OSError:
        return []


def drop_scraps(partial: Partial) -> None:
    """Remove what a killed process left beside a partial file. The caller holds the blob's lock."""
    for scrap in partial.facts.parent.glob(f".{partial.facts.name}*{_SCRAP}"):
        clear(scrap)


def partials() -> list[Path]:
    """Partial downloads of ours in the whole cache, and what belongs to them."""
    try:
        return sorted(hub_dir().glob(f"models--*/blobs/*{PARTIAL}*"))
    except (OSError, ConfigError):
        return []


def blobs_of(folder: Path) -> list[Path]:
    """The whole files that a cached repository's folder keeps under their digests."""
    try:
        return sorted(p for p in (folder / "blobs").iterdir() if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", p.name))
    except OSError:
        return []


def unlinked_blobs() -> list[Path]:
    """Whole files of the cache that no snapshot leads to: a pull ended before all files of the model were here."""
    try:
        folders = sorted(hub_dir().glob("models--*"))
    except (OSError, ConfigError):
        return []
    found = []
    for folder in folders:
        names = [os.path.join(place, n) for place, _, files in os.walk(folder / "snapshots") for n in files]
        links = [os.readlink(n) if os.path.islink(n) else "" for n in names]
        if "" not in links:  # without links, snapshots hold copies and say nothing of blobs
            linked = {os.path.basename(link) for link in links}
            found += [blob for blob in blobs_of(folder) if blob.name not in linked]
    return found

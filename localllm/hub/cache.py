"""The Hugging Face cache on disk: its location and contents, and how verified files are added and removed.

The layout is huggingface_hub's and shared with other tools: `models--org--name/{blobs,refs,snapshots}`, locks in
`.locks`. Only the partial files are specific to localllm: `blobs/<digest>.localllm-partial`, each with a `.json`.
Uses no network. Used by the other modules of this package.
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
_SCRAP = ".localllm-tmp"  # suffix of temporary files that are renamed when complete
_REPO_LOCK = "localllm-snapshot.lock"
REPO_WAIT_S = 600.0  # linking and removing files takes seconds, copying them on a file system without links minutes
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENOTDIR, errno.EEXIST, errno.EISDIR,
            errno.ENOENT)  # fmt: skip


def hub_dir() -> Path:
    """The folder of cached repositories: HF_HUB_CACHE, else HF_HOME/hub, else the default in the home folder."""
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return (_home(os.path.expandvars(cache)) if cache else hf_home() / "hub").absolute()


def hf_home() -> Path:
    """HF_HOME, or huggingface_hub's default."""
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
    """The models folder: starters, quantized models and copies. Raises ConfigError when there is no home folder."""
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
    """Paths of a blob that is being downloaded and not verified yet."""

    data: Path
    facts: Path


def partial_of(repo: str, digest: str) -> Partial:
    """The paths of a blob's partial file and its JSON."""
    data = repo_dir(repo) / "blobs" / (digest + PARTIAL)
    return Partial(data, data.with_name(data.name + ".json"))


def blob_path(repo: str, digest: str) -> Path:
    """The path of the verified blob with that digest."""
    return repo_dir(repo) / "blobs" / digest


def blob_lock_path(repo: str, digest: str) -> Path:
    """The path of huggingface_hub's lock for a blob."""
    return hub_dir() / ".locks" / repo_dir(repo).name / f"{digest}.lock"


@contextmanager
def file_lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold a lock file. While another process holds it, `on_wait` is called four times per second."""
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
    """Hold the lock for changes to a repository's snapshots, to keep pull and rm from interleaving.

    Raises ConfigError when another process holds it for longer than `REPO_WAIT_S`.
    """
    from filelock import FileLock, Timeout

    path = hub_dir() / ".locks" / repo_dir(repo).name / _REPO_LOCK
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path, mode=0o664)
        try:
            lock.acquire(timeout=REPO_WAIT_S)
        except Timeout as error:
            what = f"another process has been changing {repo} for {REPO_WAIT_S:g} s"
            raise ConfigError(what, "wait for other pull and rm commands, then run the same command again") from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn write errors in a folder into DoesNotFit (disk full) or ConfigError (not writable)."""
    try:
        yield
    except OSError as error:
        home = "LOCALLLM_HOME" if folder.is_relative_to(paths.models_dir()) else "HF_HOME"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DoesNotFit(
                f"no space left for {folder}", f"`localllm rm NAME` frees space, or set {home} to another disk"
            ) from error
        if error.errno in _NOT_WRITABLE:
            why = (error.strerror or "refused").lower()
            raise ConfigError(
                f"cannot write to the model folder {folder}: {why}",
                f"make it writable, or set {home} to a folder you can write",
            ) from error
        raise


def write_json(path: Path, value: Any) -> None:
    """Atomically replace a small file of ours in the cache; a killed process leaves at most a `_SCRAP` file."""
    paths.replace_file(path, json.dumps(value), mode=0o600, suffix=_SCRAP)


def has_size(path: Path, size: int) -> bool:
    """True when the file exists and has that size."""
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def num_bytes(path: Path) -> int:
    """Size of a file, or of all files below a folder; files removed meanwhile count as 0."""
    below = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    total = 0
    for file in below if path.is_dir() else [path]:
        with suppress(OSError):
            total += os.lstat(file).st_size
    return total


def check_disk(folder: Path, need_bytes: int, what: str, hint: str) -> None:
    """Raise DoesNotFit unless the disk of a folder, which may not exist yet, has `need_bytes` free."""
    place = next(p for p in [folder, *folder.parents] if p.exists())
    free = shutil.disk_usage(place).free
    if need_bytes > free:
        raise DoesNotFit(
            f"{what} needs {gib(need_bytes)} of free disk; {place} has {gib(free)}",
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
    """A new hasher for digests of that length: SHA-256 for 64 digits, else the git blob SHA-1."""
    import hashlib

    if hex_digits == 64:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)


def prepare(repo: str) -> list[str]:
    """Create the folders of a repository; returns warnings to show. Raises ConfigError when they are not writable."""
    root = hub_dir()
    with writing(root):
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        (repo_dir(repo) / "blobs").mkdir(parents=True, exist_ok=True)
        (root / ".locks" / repo_dir(repo).name).mkdir(parents=True, exist_ok=True)
        mode = root.stat().st_mode
        with tempfile.TemporaryFile(dir=repo_dir(repo) / "blobs"):  # an existing folder may still be read-only
            pass
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        return [f"every user of this machine can write to {root}: chmod o-w {root}"]
    return []


def link_snapshot(repo: str, revision: str, names: dict[str, str], ref: str | None) -> Path:
    """Link verified blobs into a snapshot, weights last, then point the ref at it.

    `names` maps file name -> digest. The caller holds `repo_lock` and has checked that every blob exists.
    """
    folder = repo_dir(repo) / "snapshots" / check_digest(revision, 40)
    if folder.is_symlink() or not folder.is_dir():
        clear(folder)
    for scrap in folder.rglob(f".*{_SCRAP}"):  # left by a killed process: we hold the lock
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
    """Remove a file, link or folder if it exists."""
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
    except OSError:  # a file system without symbolic links: copy, as huggingface_hub does
        shutil.copyfile(blob, temporary)
    os.replace(temporary, target)


def read_ref(repo: str, revision: str) -> str | None:
    """Return the cached commit for a branch, tag or commit, or None."""
    folder = repo_dir(repo)
    if len(revision) == 40 and (folder / "snapshots" / revision).is_dir():
        return revision
    try:
        text = (folder / "refs" / revision).read_text(encoding="utf-8").strip()
        return check_digest(text, 40) if (folder / "snapshots" / text).is_dir() else None
    except (OSError, ValueError, LocalLLMError):  # an unreadable or damaged ref counts as missing
        return None


def files_in(folder: Path) -> list[str]:
    """File names in a snapshot folder and its direct subfolders, `/`-separated, broken links included."""
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
    """(repository, snapshot commits newest first) for every repository in the cache."""
    try:
        folders = sorted(p for p in hub_dir().iterdir() if p.name.startswith("models--") and p.is_dir())
    except (OSError, ConfigError):
        return []
    return [(p.name.removeprefix("models--").replace("--", "/"), snapshots(p)) for p in folders]


def snapshots(folder: Path) -> list[str]:
    """The snapshot commits in a cached repository's folder, newest first."""
    try:
        found = [p for p in (folder / "snapshots").iterdir() if p.is_dir()]
        return [p.name for p in sorted(found, key=lambda p: p.stat().st_mtime, reverse=True)]
    except OSError:
        return []


def drop_scraps(partial: Partial) -> None:
    """Remove temporary files that a killed process left next to a partial file. The caller holds the blob's lock."""
    for scrap in partial.facts.parent.glob(f".{partial.facts.name}*{_SCRAP}"):
        clear(scrap)


def partials() -> list[Path]:
    """All partial downloads of localllm in the cache, with their JSON files."""
    try:
        return sorted(hub_dir().glob(f"models--*/blobs/*{PARTIAL}*"))
    except (OSError, ConfigError):
        return []


def blobs_of(folder: Path) -> list[Path]:
    """The complete blobs in a cached repository's folder."""
    try:
        return sorted(p for p in (folder / "blobs").iterdir() if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", p.name))
    except OSError:
        return []


def unlinked_blobs() -> list[Path]:
    """Complete blobs that no snapshot links to: a pull ended before all files of the model had arrived."""
    try:
        folders = sorted(hub_dir().glob("models--*"))
    except (OSError, ConfigError):
        return []
    found = []
    for folder in folders:
        names = [os.path.join(place, n) for place, _, files in os.walk(folder / "snapshots") for n in files]
        links = [os.readlink(n) if os.path.islink(n) else "" for n in names]
        if "" not in links:  # snapshots with copies instead of links do not show which blobs are in use
            linked = {os.path.basename(link) for link in links}
            found += [blob for blob in blobs_of(folder) if blob.name not in linked]
    return found

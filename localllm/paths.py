"""File locations (XDG), reading and atomically replacing small files, and what a file's name tells.

`LOCALLLM_HOME`, when set, puts data, cache, config and state in one folder, for tests and portable installs.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

if os.environ.get("HOME") == "":
    del os.environ["HOME"]  # an empty HOME would make `/.cache` ours; without it, the user database is asked


def _below(kind: str, name: str = "") -> Path:
    home = os.environ.get("LOCALLLM_HOME")
    if home:
        return Path(home) / kind
    import platformdirs  # not installed where only `benchmarks/gpu.py` runs

    return Path(getattr(platformdirs, f"user_{name or kind}_dir")("localllm"))  # this default needs a HOME


def data_dir() -> Path:
    """Chats, saved benchmarks and models from a package index."""
    return _below("data")


def models_dir() -> Path:
    """Models from a package index: `<name>/<file>.gguf`."""
    return data_dir() / "models"


def cache_dir() -> Path:
    """Derived files that can be recreated: compiled kernels, rebuilt tokenizers, memory profiles."""
    return _below("cache")


def config_file() -> Path:
    """The user's settings."""
    return _below("config") / "config.toml"


def state_dir() -> Path:
    """Logs, prompt history, the last model used."""
    return _below("state")


def runtime_dir() -> Path:
    """Files that live as long as a process: which process serves where."""
    return _below("run", "runtime")


def log_dir() -> Path:
    """Log files."""
    return state_dir() / "log"


def is_projector(name: str) -> bool:
    """Whether a GGUF file's name marks it as an image tower (mmproj), not a model."""
    return "mmproj" in name.lower()


def is_drafter(name: str) -> bool:
    """Whether a GGUF file's name marks it as one that drafts for the model next to it, not a model."""
    folder, _, file = name.lower().rpartition("/")
    return file.startswith(("mtp-", "dflash-", "dspark-", "eagle3-")) or folder.rpartition("/")[2] == "mtp"


def are_models(names: Iterable[str]) -> list[str]:
    """The GGUF files that are models: without image towers, and without drafters unless there is nothing else."""
    files = [name for name in names if name.lower().endswith(".gguf") and not is_projector(name.rpartition("/")[2])]
    return [name for name in files if not is_drafter(name)] or files


def folders_near(path: Path) -> tuple[Path, ...]:
    """Where files that belong to a GGUF model are: its own folder, then the top of its repository."""
    top = path.parent.parent if path.parent.parent.parent.name == "snapshots" else path.parent
    return tuple(dict.fromkeys((path.parent, top)))


def projector_rank(name: str) -> int:
    """Rank of an mmproj file among several: the lowest is used, by stored format."""
    kinds = ("bf16", "f16", "q8_0", "f32")  # the first two are as exact as the tower was trained
    return next((rank for rank, kind in enumerate(kinds) if kind in name.lower()), len(kinds))


def existing(path: Path) -> Path:
    """The path itself, or its nearest existing parent."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def home_short(path: Path) -> str:
    """A path with ~ for the home folder, so that output can be pasted into an issue."""
    home = os.path.expanduser("~")
    text = str(path)
    return "~" + text[len(home) :] if home != "/" and text.startswith(home + "/") else text


def replace_file(
    path: Path, content: str | bytes, *, mode: int | None = None, sync: bool = False, suffix: str = ".part"
) -> None:
    """Write a file atomically, creating its folder: readers and a kill see either the old content or the new.

    mode     permissions; None: as set by the umask
    sync     wait until the data is on disk
    suffix   end of the temporary file's name

    Raises OSError and removes the temporary file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name[:200]}.{os.urandom(4).hex()}{suffix}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        with os.fdopen(os.open(partial, flags, 0o666 if mode is None else 0o600), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_small(path: Path, max_bytes: int) -> bytes:
    """Read a whole regular file.

    Raises OSError for a longer file, and for a pipe or a device, which might never end.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes:,} bytes", str(path))
    return content


def read_json(path: Path, max_bytes: int = 1 << 20) -> dict[str, Any]:
    """Read a small JSON object; {} when it is missing, longer than `max_bytes`, unreadable or no object."""
    try:
        value = json.loads(read_small(path, max_bytes))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def toml_beside(module: str, name: str) -> dict[str, Any]:
    """Read one of the program's own TOML files, next to the module whose `__file__` is given."""
    import tomllib

    return tomllib.loads(Path(module).with_name(name).read_text(encoding="utf-8"))

"""Where things live on this machine (XDG), how a small file there is read and replaced; what a file's name says.

`LOCALLLM_HOME`, when set, puts data, cache, config and state below one folder: used by tests and portable installs.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

if os.environ.get("HOME") == "":
    del os.environ["HOME"]  # it names no folder, and `/.cache` is not ours: the user's record in the system does


def _below(kind: str, name: str = "") -> Path:
    home = os.environ.get("LOCALLLM_HOME")
    if home:
        return Path(home) / kind
    import platformdirs  # a bare machine that runs `benchmarks/gpu.py` has none

    return Path(getattr(platformdirs, f"user_{name or kind}_dir")("localllm"))  # this default needs a HOME


def data_dir() -> Path:
    """Chats, saved benches and models that came from a package index."""
    return _below("data")


def models_dir() -> Path:
    """Models that came from a package index: `<name>/<file>.gguf`."""
    return data_dir() / "models"


def cache_dir() -> Path:
    """Derived files that can be made again: compiled kernels, rebuilt tokenizers, memory profiles."""
    return _below("cache")


def config_file() -> Path:
    """The user's settings."""
    return _below("config") / "config.toml"


def state_dir() -> Path:
    """Logs, prompt history, the model used last."""
    return _below("state")


def runtime_dir() -> Path:
    """What lives as long as a process does: who serves where."""
    return _below("run", "runtime")


def log_dir() -> Path:
    """Log files."""
    return state_dir() / "log"


def is_projector(name: str) -> bool:
    """Whether a GGUF file's name says that it holds an image tower (mmproj), not a model."""
    return "mmproj" in name.lower()


def projector_rank(name: str) -> int:
    """Which of several such files is taken: the lowest, by what they are stored as."""
    kinds = ("bf16", "f16", "q8_0", "f32")  # the first two are as exact as the tower was trained
    return next((rank for rank, kind in enumerate(kinds) if kind in name.lower()), len(kinds))


def existing(path: Path) -> Path:
    """The path itself, or the nearest folder above it that is there."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def home_short(path: Path) -> str:
    """A path with ~ for the home folder: what is shown may be pasted into an issue."""
    home = os.path.expanduser("~")
    text = str(path)
    return "~" + text[len(home) :] if home != "/" and text.startswith(home + "/") else text


def replace_file(
    path: Path, content: str | bytes, *, mode: int | None = None, sync: bool = False, suffix: str = ".part"
) -> None:
    """Write a file and its folder in one step: readers see the old content or the new, and a kill leaves either.

    mode     permissions; None: as the user's umask says
    sync     wait until it is on the disk
    suffix   ends the name of the file while it is being written

    Raises OSError; nothing is left beside the old file then.
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
    """The whole of a regular file.

    Raises OSError for a longer one, and for a pipe or a device, which might never end.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", str(path))
    return content


def read_json(path: Path, max_bytes: int = 1 << 20) -> dict[str, Any]:
    """A small JSON object; {} when it is missing, longer than `max_bytes`, unreadable or something else."""
    try:
        value = json.loads(read_small(path, max_bytes))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def toml_beside(module: str, name: str) -> dict[str, Any]:
    """A TOML file of the program's own data, beside the module whose `__file__` is given."""
    import tomllib

    return tomllib.loads(Path(module).with_name(name).read_text(encoding="utf-8"))

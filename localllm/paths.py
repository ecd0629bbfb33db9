"""Where things live on this machine (XDG), and nothing else.

`LOCALLLM_HOME`, when set, puts data, cache, config and state below one folder: used by tests and portable installs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import platformdirs


def _below(kind: str, default: Callable[[str], str]) -> Path:
    home = os.environ.get("LOCALLLM_HOME")
    return Path(home) / kind if home else Path(default("localllm"))  # the default needs a HOME


def data_dir() -> Path:
    """Chats, saved benches and models that came from a package index."""
    return _below("data", platformdirs.user_data_dir)


def models_dir() -> Path:
    """Models that came from a package index: `<name>/<file>.gguf`."""
    return data_dir() / "models"


def cache_dir() -> Path:
    """Derived files that can be made again: compiled kernels, rebuilt tokenizers, proofs."""
    return _below("cache", platformdirs.user_cache_dir)


def config_file() -> Path:
    """The user's settings."""
    return _below("config", platformdirs.user_config_dir) / "config.toml"


def state_dir() -> Path:
    """Logs, prompt history, the model used last."""
    return _below("state", platformdirs.user_state_dir)


def runtime_dir() -> Path:
    """What lives as long as a process does: who serves where."""
    return _below("run", platformdirs.user_runtime_dir)


def log_dir() -> Path:
    """Log files."""
    return state_dir() / "log"

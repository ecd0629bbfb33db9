"""Disks, the Hugging Face cache, and the models that are here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localllm import hub, paths
from localllm.device import MachineFacts
from localllm.hub.cache import hf_home, hub_dir
from localllm.hub.local import scan
from localllm.request import Check

from .finding import GIB, STORAGE, CheckFunction, found, size

LITTLE_DISK = 10 * GIB
NO_DISK = GIB // 2


def existing(path: Path) -> Path:
    """The path itself, or the nearest folder above it that is there."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def disk_free(machine: MachineFacts) -> Check:
    """Room where models are downloaded to."""
    place = hub_dir()
    free = shutil.disk_usage(existing(place)).free
    title = f"{size(free)} free for models in {_short(place)}"
    data: dict[str, Any] = {"path": str(place), "free_bytes": free}
    if free < NO_DISK:
        return found("disk.free", STORAGE, "fail", title, fix="export HF_HOME=/a/larger/disk/hf", **data)
    if free < LITTLE_DISK:
        return found("disk.free", STORAGE, "warn", title, fix="localllm rm --partial", **data)
    return found("disk.free", STORAGE, "ok", title, **data)


def hf_cache(machine: MachineFacts) -> Check:
    """Whether the cache shared with other tools can be read and written."""
    place = hub_dir()
    parent = existing(place)
    data: dict[str, Any] = {"path": str(place), "exists": place.exists()}
    if not parent.is_dir():
        return found("hf.cache", STORAGE, "fail", f"{parent} is not a folder", fix="export HF_HOME=~/hf", **data)
    if not os.access(parent, os.W_OK | os.X_OK):
        title = f"{_short(place)} cannot be written: models that are there run, downloads do not"
        return found("hf.cache", STORAGE, "warn", title, fix="export HF_HOME=~/hf", **data)
    repos = sum(1 for _ in place.glob("models--*")) if place.is_dir() else 0
    return found(
        "hf.cache",
        STORAGE,
        "ok",
        f"{_short(place)}, {_count(repos, 'repository', 'repositories')}",
        repos=repos,
        **data,
    )


def hf_token(machine: MachineFacts) -> Check:
    """Whether a hub token is there. Its value is never read further than that."""
    named = next((n for n in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if os.environ.get(n)), "")
    stored = Path(os.environ.get("HF_TOKEN_PATH") or hf_home() / "token")
    if named or (stored.is_file() and stored.stat().st_size):
        return found("hf.token", STORAGE, "ok", f"set ({named or _short(stored)})", present=True)
    return found("hf.token", STORAGE, "warn", "not set; gated models will ask", fix="hf auth login", present=False)


def hf_endpoint(machine: MachineFacts) -> Check:
    """Which hub is asked, and whether the network may be used at all. Nothing is sent."""
    if hub.is_offline():
        return found("hf.endpoint", STORAGE, "warn", "offline: only models that are here", fix="unset HF_HUB_OFFLINE")
    where = hub.endpoint()
    own = bool(os.environ.get("HF_ENDPOINT"))
    return found("hf.endpoint", STORAGE, "ok", where + (" (HF_ENDPOINT)" if own else ""), endpoint=where)


def models(machine: MachineFacts) -> Check:
    """The models on this machine."""
    rows = scan()  # no file is opened: `localllm ls` does that
    broken = [m for m in rows if m.problem]
    data: dict[str, Any] = {"models": [m.name for m in rows], "broken": [m.name for m in broken]}
    if broken:
        title = (
            f"{_count(len(broken), 'model', 'models')} of {len(rows)} damaged: {broken[0].name}: {broken[0].problem}"
        )
        return found("models", STORAGE, "warn", title, fix=f"localllm pull --repair {broken[0].name}", **data)
    if not rows:
        return found("models", STORAGE, "warn", "no model on this machine yet", fix="localllm pull smollm2", **data)
    total = sum(m.size_bytes for m in rows)
    return found("models", STORAGE, "ok", f"{_count(len(rows), 'model', 'models')}, {size(total)}", **data)


def folders(machine: MachineFacts) -> Check:
    """Whether our own folders (data, cache, state) can be written."""
    for place in (paths.data_dir(), paths.cache_dir(), paths.state_dir()):
        parent = existing(place)
        if not os.access(parent, os.W_OK | os.X_OK):
            title = f"{_short(parent)} cannot be written"
            return found("folders", STORAGE, "fail", title, fix="export LOCALLLM_HOME=~/localllm", path=str(parent))
    return found("folders", STORAGE, "ok", f"{_short(paths.data_dir())} and its like are writable")


def _short(path: Path) -> str:
    """With ~ for the home folder: what is shown may be pasted into an issue."""
    home = os.path.expanduser("~")
    text = str(path)
    return "~" + text[len(home) :] if home != "/" and text.startswith(home + "/") else text


def _count(number: int, one: str, more: str) -> str:
    return f"{number} {one if number == 1 else more}"


CHECKS: Mapping[str, CheckFunction] = {
    "disk.free": disk_free,
    "hf.cache": hf_cache,
    "hf.token": hf_token,
    "hf.endpoint": hf_endpoint,
    "models": models,
    "folders": folders,
}

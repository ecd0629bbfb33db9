"""Disks, the Hugging Face cache, the hub, the server's port, and the models that are here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from localllm import hub
from localllm.device.disk import existing
from localllm.hub.cache import hf_home, hub_dir
from localllm.hub.local import scan
from localllm.interface import Check
from localllm.processes import running
from localllm.terminal import GIB, gib

from .finding import STORAGE, CheckFunction, Survey, found, proxy
from .settings import short

LITTLE_DISK = 10 * GIB
NO_DISK = GIB // 2
HDD_BYTES_S = 180e6  # what a hard disk reads in one go
# file systems where the cache's symbolic links fail or need a mount option
WITHOUT_LINKS = ("9p", "drvfs", "cifs", "smb3", "vfat", "exfat", "ntfs", "ntfs3", "fuseblk")
KINDS = {
    "nvme": "NVMe",
    "ssd": "SSD",
    "hdd": "hard disk",
    "network": "over a network or a VM's border",
    "memory": "RAM",
}


def disk_free(survey: Survey) -> Check:
    """Room where models are downloaded to."""
    disk = survey.host.disk
    title = f"{gib(disk.free_bytes)} free for models in {_tilde(disk.path)}"
    data: dict[str, Any] = {"path": disk.path, "free_bytes": disk.free_bytes}
    if disk.free_bytes < NO_DISK:
        return found("disk.free", STORAGE, "fail", title, fix="export HF_HOME=/a/larger/disk/hf", **data)
    if disk.free_bytes < LITTLE_DISK:
        return found("disk.free", STORAGE, "warn", title, fix="localllm rm --partial", **data)
    return found("disk.free", STORAGE, "ok", title, **data)


def disk_speed(survey: Survey) -> Check:
    """What kind of disk holds the models; `--deep` reads from it."""
    disk = survey.host.disk
    data: dict[str, Any] = {"kind": disk.kind, "filesystem": disk.filesystem}
    title = f"{KINDS.get(disk.kind, 'kind not known')}, {disk.filesystem or 'file system not known'}"
    if disk.kind == "hdd":
        seconds = 9e9 / HDD_BYTES_S
        title += f": about 180 MB/s, so a 14B model in 4 bits takes {seconds:.0f} s to load"
        return found("disk.speed", STORAGE, "warn", title, "", "export HF_HOME=/an/nvme/disk/hf", **data)
    if disk.kind == "network" and survey.machine.wsl:
        title = "Windows' own disk, read through the border of WSL: several times slower than WSL's"
        return found("disk.speed", STORAGE, "warn", title, "", "export HF_HOME=~/.cache/huggingface", **data)
    if disk.kind == "network":
        title += ": loading a model takes as long as the network does"
        return found("disk.speed", STORAGE, "warn", title, "", "export HF_HOME=/a/local/disk/hf", **data)
    if disk.kind == "memory":
        title += ": models take memory twice and are gone after a restart"
        return found("disk.speed", STORAGE, "warn", title, "", "export HF_HOME=/a/real/disk/hf", **data)
    if disk.filesystem == "overlay" and survey.machine.container:
        title = "a layer of the container: models are gone with it"
        fix = "docker run -v ~/.cache/huggingface:/root/.cache/huggingface ..."
        return found("disk.speed", STORAGE, "warn", title, "", fix, **data)
    return found("disk.speed", STORAGE, "ok", title, **data)


def disk_links(survey: Survey) -> Check:
    """Whether the cache's symbolic links work there."""
    disk = survey.host.disk
    if disk.filesystem in WITHOUT_LINKS:
        title = f"{disk.filesystem}: symbolic links may fail, then files are stored twice"
        return found("disk.cache_fs", STORAGE, "warn", title, "", "export HF_HOME=~/hf", filesystem=disk.filesystem)
    return found("disk.cache_fs", STORAGE, "ok", "symbolic links work", filesystem=disk.filesystem)


def hf_cache(survey: Survey) -> Check:
    """Whether the cache shared with other tools can be read and written."""
    place = hub_dir()
    parent = existing(place)
    data: dict[str, Any] = {"path": str(place), "exists": place.exists()}
    if not parent.is_dir():
        return found("hf.cache", STORAGE, "fail", f"{parent} is not a folder", fix="export HF_HOME=~/hf", **data)
    if not os.access(parent, os.W_OK | os.X_OK):
        title = f"{short(place)} cannot be written: models that are there run, downloads do not"
        return found("hf.cache", STORAGE, "warn", title, fix="export HF_HOME=~/hf", **data)
    repos = sum(1 for _ in place.glob("models--*")) if place.is_dir() else 0
    title = f"{short(place)}, {_count(repos, 'repository', 'repositories')}"
    return found("hf.cache", STORAGE, "ok", title, repos=repos, **data)


def hf_token(survey: Survey) -> Check:
    """Whether a hub token is there. Its value is never read further than that."""
    named = next((n for n in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if os.environ.get(n)), "")
    stored = Path(os.environ.get("HF_TOKEN_PATH") or hf_home() / "token")
    if named or (stored.is_file() and stored.stat().st_size):
        return found("hf.token", STORAGE, "ok", f"set ({named or short(stored)})", present=True)
    title = "not set; models behind a licence (llama, gemma) will ask for one"
    return found("hf.token", STORAGE, "warn", title, fix="hf auth login", present=False)


def hf_endpoint(survey: Survey) -> Check:
    """Which hub is asked, and whether the network may be used at all. Nothing is sent."""
    if hub.is_offline():
        return found("hf.endpoint", STORAGE, "warn", "offline: only models that are here", fix="unset HF_HUB_OFFLINE")
    where = hub.endpoint()
    own = bool(os.environ.get("HF_ENDPOINT"))
    return found("hf.endpoint", STORAGE, "ok", where + (" (HF_ENDPOINT)" if own else ""), endpoint=where)


def net_hub(survey: Survey) -> Check:
    """Whether a connection to the hub, or to the proxy before it, opens. Nothing is sent through it."""
    host = survey.host
    if not host.hub_ms and not host.hub_error:
        return found("net.hub", STORAGE, "skip", "offline")
    name = urlsplit(proxy() or hub.endpoint()).hostname or ""
    if host.hub_error:
        title = f"{name} does not answer: {host.hub_error}; models that are here run"
        return found("net.hub", STORAGE, "warn", title, "", "localllm config set offline true", error=host.hub_error)
    return found("net.hub", STORAGE, "ok", f"{name} {host.hub_ms:.0f} ms", ms=round(host.hub_ms))


def net_proxy(survey: Survey) -> Check:
    """Whether requests go through a proxy."""
    where = proxy()
    if not where:
        return found("net.proxy", STORAGE, "skip", "none")
    return found("net.proxy", STORAGE, "ok", where, proxy=where)


def server_port(survey: Survey) -> Check:
    """Whether the server's port is free."""
    holder = survey.host.port_holder
    if not holder:
        return found("server.port", STORAGE, "ok", "the server's port is free")
    ours = next((one for one in running() if one.url and f"(pid {one.pid})" in holder), None)
    if ours is not None:
        title = f"localllm serves {', '.join(ours.models) or 'no model yet'} at {ours.url}"
        return found("server.port", STORAGE, "ok", title, holder=holder, url=ours.url)
    if "localllm" in holder:
        return found("server.port", STORAGE, "ok", f"{holder} serves", holder=holder)
    title = f"the server's port is taken by {holder}"
    return found("server.port", STORAGE, "warn", title, "", "localllm config set server.port 8001", holder=holder)


def models(survey: Survey) -> Check:
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
    return found("models", STORAGE, "ok", f"{_count(len(rows), 'model', 'models')}, {gib(total)}", **data)


def _tilde(path: str) -> str:
    return short(Path(path)) if path else "the cache"


def _count(number: int, one: str, more: str) -> str:
    return f"{number} {one if number == 1 else more}"


CHECKS: Mapping[str, CheckFunction] = {
    "disk.free": disk_free,
    "disk.speed": disk_speed,
    "disk.cache_fs": disk_links,
    "hf.cache": hf_cache,
    "hf.token": hf_token,
    "hf.endpoint": hf_endpoint,
    "net.hub": net_hub,
    "net.proxy": net_proxy,
    "server.port": server_port,
    "models": models,
}

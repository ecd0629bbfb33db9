"""Checks of disks, the Hugging Face cache and hub, the server's port, and local models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from localllm import hub
from localllm.device.processes import running
from localllm.hub.cache import hf_home, hub_dir
from localllm.hub.local import scan
from localllm.interface import Check
from localllm.paths import existing, home_short
from localllm.terminal import GIB, counted, gib

from .finding import STORAGE, Checks, Survey, fail, ok, proxy, skip, warn

CHECKS = Checks(STORAGE)

LITTLE_DISK = 10 * GIB
NO_DISK = GIB // 2
# file systems on which the cache's symbolic links fail or need a mount option
WITHOUT_LINKS = ("9p", "drvfs", "cifs", "smb3", "vfat", "exfat", "ntfs", "ntfs3", "fuseblk")
KINDS = {
    "nvme": "NVMe",
    "ssd": "SSD",
    "hdd": "hard disk",
    "network": "network or VM share",
    "memory": "RAM",
}
# kind -> (its problem, a better place)
SLOW = {
    "hdd": ("about 180 MB/s, so a 14B model in 4 bits takes 50 s to load", "/an/nvme/disk/hf"),
    "network": ("models load only as fast as the network", "/a/local/disk/hf"),
    "memory": ("models take up memory twice and are lost after a restart", "/a/real/disk/hf"),
}


@CHECKS.add("disk.free")
def disk_free(survey: Survey) -> Check:
    """Free disk space for model downloads."""
    disk = survey.host.disk
    title = f"{gib(disk.free_bytes)} free for models in {home_short(Path(disk.path)) if disk.path else 'the cache'}"
    data: dict[str, Any] = {"path": disk.path, "free_bytes": disk.free_bytes}
    if disk.free_bytes < NO_DISK:
        return fail(title, fix="export HF_HOME=/a/larger/disk/hf", **data)
    if disk.free_bytes < LITTLE_DISK:
        return warn(title, fix="localllm rm --partial", **data)
    return ok(title, **data)


@CHECKS.add("disk.speed")
def disk_speed(survey: Survey) -> Check:
    """Kind of disk that holds the models; `--deep` measures it."""
    disk = survey.host.disk
    data: dict[str, Any] = {"kind": disk.kind, "filesystem": disk.filesystem}
    title = f"{KINDS.get(disk.kind, 'unknown kind')}, {disk.filesystem or 'unknown file system'}"
    if disk.kind == "network" and survey.machine.wsl:
        title = "a Windows disk, which is several times slower from WSL than WSL's own disk"
        return warn(title, "", "export HF_HOME=~/.cache/huggingface", **data)
    if disk.kind in SLOW:
        trouble, better = SLOW[disk.kind]
        return warn(f"{title}: {trouble}", "", f"export HF_HOME={better}", **data)
    if disk.filesystem == "overlay" and survey.machine.container:
        title = "a container layer: models are lost with the container"
        return warn(title, "", "docker run -v ~/.cache/huggingface:/root/.cache/huggingface ...", **data)
    return ok(title, **data)


@CHECKS.add("disk.cache_fs")
def disk_links(survey: Survey) -> Check:
    """Symbolic links in the cache: do they work there?"""
    disk = survey.host.disk
    if disk.filesystem in WITHOUT_LINKS:
        title = f"{disk.filesystem}: symbolic links may fail, and files are then stored twice"
        return warn(title, "", "export HF_HOME=~/hf", filesystem=disk.filesystem)
    return ok("symbolic links work", filesystem=disk.filesystem)


@CHECKS.add("hf.cache")
def hf_cache(survey: Survey) -> Check:
    """Hugging Face cache, shared with other tools: is it readable and writable?"""
    place = hub_dir()
    parent = existing(place)
    data: dict[str, Any] = {"path": str(place), "exists": place.exists()}
    if not parent.is_dir():
        return fail(f"{parent} is not a folder", fix="export HF_HOME=~/hf", **data)
    if not os.access(parent, os.W_OK | os.X_OK):
        title = f"{home_short(place)} is not writable: local models run, but downloads fail"
        return warn(title, fix="export HF_HOME=~/hf", **data)
    repos = sum(1 for _ in place.glob("models--*")) if place.is_dir() else 0
    title = f"{home_short(place)}, {repos} {'repository' if repos == 1 else 'repositories'}"
    return ok(title, repos=repos, **data)


@CHECKS.add("hf.token")
def hf_token(survey: Survey) -> Check:
    """Presence of a hub token; its value is never used here."""
    named = next((n for n in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if os.environ.get(n)), "")
    stored = Path(os.environ.get("HF_TOKEN_PATH") or hf_home() / "token")
    if named or (stored.is_file() and stored.stat().st_size):
        return ok(f"set ({named or home_short(stored)})", present=True)
    title = "not set; gated models (llama, gemma) need one"
    return warn(title, fix="hf auth login", present=False)


@CHECKS.add("hf.endpoint")
def hf_endpoint(survey: Survey) -> Check:
    """Hub address, or offline mode. Nothing is sent."""
    if hub.is_offline():
        return warn("offline: only local models are available", fix="unset HF_HUB_OFFLINE")
    where = hub.endpoint()
    return ok(where + (" (HF_ENDPOINT)" if os.environ.get("HF_ENDPOINT") else ""), endpoint=where)


@CHECKS.add("net.hub")
def net_hub(survey: Survey) -> Check:
    """Connection to the hub or its proxy. Nothing is sent through it."""
    host = survey.host
    if not host.hub_ms and not host.hub_error:
        return skip("offline")
    name = urlsplit(proxy() or hub.endpoint()).hostname or ""
    if host.hub_error:
        title = f"{name} does not respond: {host.hub_error}; local models still run"
        return warn(title, "", "localllm config set offline true", error=host.hub_error)
    return ok(f"{name} {host.hub_ms:.0f} ms", ms=round(host.hub_ms))


@CHECKS.add("net.proxy")
def net_proxy(survey: Survey) -> Check:
    """Proxy for requests to the hub."""
    where = proxy()
    return ok(where, proxy=where) if where else skip("none")


@CHECKS.add("server.port")
def server_port(survey: Survey) -> Check:
    """The server's port: is it free?"""
    holder = survey.host.port_holder
    if not holder:
        return ok("the server's port is free")
    ours = next((one for one in running() if one.url and f"(pid {one.pid})" in holder), None)
    if ours is not None:
        title = f"localllm is serving {', '.join(ours.models) or 'no model yet'} at {ours.url}"
        return ok(title, holder=holder, url=ours.url)
    if "localllm" in holder:
        return ok(f"{holder} is serving", holder=holder)
    title = f"the server's port is in use by {holder}"
    return warn(title, "", "localllm config set server.port 8001", holder=holder)


@CHECKS.add("models")
def models(survey: Survey) -> Check:
    """Models on this machine."""
    rows = scan()  # no file is opened: `localllm ls` does that
    broken = [m for m in rows if m.problem and not m.is_foreign]
    data: dict[str, Any] = {"models": [m.name for m in rows], "broken": [m.name for m in broken]}
    if broken:
        title = f"{counted(len(broken), 'model')} of {len(rows)} damaged: {broken[0].name}: {broken[0].problem}"
        return warn(title, fix=f"localllm pull --repair {broken[0].name}", **data)
    if not rows:
        return warn("no model on this machine yet", fix="localllm pull smollm2", **data)
    total = sum(m.size_bytes for m in rows)
    return ok(f"{counted(len(rows), 'model')}, {gib(total)}", **data)

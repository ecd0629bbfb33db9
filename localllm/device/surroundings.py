"""The environment of this process: WSL, container, C compiler, and the installed torch (read without importing it)."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

from .procfs import read

CONTAINERS = {"docker": "docker", "podman": "podman", "oci": "container", "lxc": "lxc", "systemd-nspawn": "nspawn"}


def wsl_version(root: Path = Path("/")) -> int:
    """1 or 2 inside the Windows Subsystem for Linux, else 0."""
    release = read(root / "proc/sys/kernel/osrelease").lower()
    if "microsoft" not in release:
        return 0
    return 2 if "wsl2" in release or "microsoft-standard" in release else 1


def container(root: Path = Path("/")) -> str:
    """The kind of container around this process; "" if there is none."""
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if (root / ".dockerenv").exists():
        return "docker"
    if (root / "run/.containerenv").exists():
        return "podman"
    named = read(root / "run/systemd/container") or os.environ.get("container", "")  # noqa: SIM112
    if named and named != "wsl":
        return CONTAINERS.get(named, named)
    groups = read(root / "proc/1/cgroup")
    found = re.search(r"/(docker|kubepods|lxc|libpod)", groups)
    return {"kubepods": "kubernetes", "libpod": "podman"}.get(found[1], found[1]) if found else ""


def compiler() -> str:
    """The C compiler command: $CC, else the system's, else the one of the ziglang package; "" if there is none."""
    named = shlex.split(os.environ.get("CC", ""))
    if named:
        return " ".join(named) if shutil.which(named[0]) else ""
    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), "")
    if not found and importlib.util.find_spec("ziglang") is not None:
        return f"{sys.executable} -m ziglang cc"
    return found


def torch_build() -> tuple[str, str]:
    """(version, CUDA version) of the installed torch, read from its version.py; ("", "") without one."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return "", ""
    text = read(Path(found.submodule_search_locations[0]) / "version.py")
    version = re.search(r"^__version__ *= *['\"]([^'\"]+)", text, re.MULTILINE)
    cuda = re.search(r"^cuda[^=\n]*= *['\"]([\d.]+)", text, re.MULTILINE)
    return (version[1] if version else ""), (cuda[1] if cuda else "")

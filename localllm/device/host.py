"""Host facts for doctor: packages, CUDA toolkit, disk, network, environment variables.

Reading them takes tens of milliseconds and starts at most one short subprocess, so `machine()` leaves them out.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from localllm.testing import only_in_tests

from .assembler import Assembler, assembler
from .disk import disk_facts
from .facts import HostFacts
from .procfs import read

PACKAGES = (
    "torch", "triton", "vllm", "sglang", "sgl-kernel", "flashinfer-python", "flashinfer-jit-cache", "flash-attn",
    "tensorrt-llm", "llama-cpp-python", "lmdeploy", "ktransformers", "transformers", "kernels", "bitsandbytes",
    "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "huggingface-hub", "textual",
)  # fmt: skip
PROGRAMS = ("nvidia-smi", "nvcc", "llama-server", "ollama", "vllm", "trtllm-serve", "docker", "tmux", "hf")
VARIABLES = re.compile(
    r"(CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|CUDA_HOME|NCCL_\w+|TRITON_\w+|PYTORCH_\w*ALLOC_CONF|TORCH_CUDA_ARCH_LIST|"
    r"VLLM_\w+|SGLANG_\w+|FLASHINFER_\w+|OLLAMA_\w+|TIKTOKEN_\w+|LD_LIBRARY_PATH|LLAMA_\w+|GGML_\w+)"
)
KERNEL_ARGUMENTS = re.compile(r"(intel_|amd_)?iommu|pcie_aspm|pcie_port_pm|pci=|nvidia")
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")
CPUFREQ = "sys/devices/system/cpu/cpu0/cpufreq"
CONNECT_S = 1.2  # a hub that takes longer than this counts as unreachable


def host(
    models: Path, hub_url: str = "", port: int = 8000, *, capability: int = 0, root: Path = Path("/")
) -> HostFacts:
    """Read the host facts.

    models   the folder of downloaded models; need not exist yet
    hub_url  address to try a connection to; "" for none
    port     the server's port
    capability  compute capability of the newest GPU, for the version of its ptxas; 0 without a GPU

    Never raises for unreadable facts; they stay empty.
    """
    name = only_in_tests("LOCALLLM_FAKE_HW")
    if name:
        from .fake import fake_host

        return fake_host(name)
    tried: list[tuple[float, str]] = []
    trying = threading.Thread(target=lambda: tried.append(connect(hub_url)), daemon=True) if hub_url else None
    if trying:
        trying.start()
    ptxas = assembler(capability) if capability else Assembler()
    release = read(root / "proc/sys/kernel/osrelease")
    installed = {name: one for name in PACKAGES for one in [*metadata.distributions(name=name)][:1]}
    facts = {
        "packages": {name: distribution.version for name, distribution in installed.items()},
        "programs": {name: path for name in PROGRAMS if (path := shutil.which(name))},
        "conflicts": _conflicts(installed),
        "toolkit": _toolkit(),
        "ptxas": ptxas.version,
        "ptxas_variable": ptxas.variable,
        "python": sys.version.split()[0],
        "prefix": sys.prefix,
        "headers": str(headers) if (headers := Path(sysconfig.get_path("include")) / "Python.h").exists() else "",
        "governor": read(root / CPUFREQ / "scaling_governor"),
        "governor_driver": read(root / CPUFREQ / "scaling_driver"),
        "numa_nodes": max(1, len(list(root.glob("sys/devices/system/node/node[0-9]*")))),
        "kernel_arguments": tuple(filter(KERNEL_ARGUMENTS.match, read(root / "proc/cmdline").split())),
        "iommu": any(root.glob("sys/class/iommu/*")),
        "on_battery": _on_battery(root),
        "wsl_release": release if "microsoft" in release.lower() else "",
        "wsl_mirrored": (root / "sys/class/net/loopback0").exists(),
        "disk": disk_facts(models, root),
        "port_holder": port_holder(port),
        "variables": {n: v for n, v in os.environ.items() if VARIABLES.fullmatch(n) and not SECRET.search(n)},
    }
    if trying:
        trying.join(CONNECT_S + 0.3)
    hub_ms, hub_error = (tried[0] if tried else (0.0, f"no answer within {CONNECT_S:g} s")) if hub_url else (0.0, "")
    return HostFacts(**facts, hub_ms=hub_ms, hub_error=hub_error)  # type: ignore[arg-type]


def connect(url: str) -> tuple[float, str]:
    """Open a connection: (milliseconds, "") or (0, reason of the failure). Nothing is sent."""
    parts = urlsplit(url)
    if not parts.hostname:
        return 0.0, f"{url} is not an address"
    start = time.perf_counter()
    try:
        port = parts.port or (80 if parts.scheme == "http" else 443)
        with socket.create_connection((parts.hostname, port), timeout=CONNECT_S):
            return (time.perf_counter() - start) * 1000, ""
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or "no answer"
        return 0.0, reason.lower()


def _conflicts(installed: Mapping[str, metadata.Distribution]) -> tuple[str, ...]:
    """Unmet requirements between torch, other engines and their dependencies."""
    from packaging.requirements import InvalidRequirement, Requirement

    found = []
    for name, distribution in installed.items():
        for text in distribution.requires or ():
            try:
                need = Requirement(text)
            except InvalidRequirement:
                continue
            other = installed.get(need.name.lower())
            if other is None or (need.marker and not need.marker.evaluate({"extra": ""})):
                continue
            if not need.specifier.contains(other.version, prereleases=True):
                found.append(f"{name} requires {need.name}{need.specifier}, but {other.version} is installed")
    return tuple(found)


def _toolkit() -> str:
    """Version of the CUDA toolkit, from its files, because running nvcc takes 50 ms."""
    nvcc = shutil.which("nvcc")
    for folder in [Path(nvcc).resolve().parents[1]] if nvcc else [Path("/usr/local/cuda")]:
        found = re.search(r'"cuda"\s*:\s*{[^}]*"version"\s*:\s*"(\d+\.\d+)', read(folder / "version.json"))
        if found:
            return found[1]
        named = re.search(r"cuda-(\d+\.\d+)", str(folder.resolve()))
        if named and folder.exists():
            return named[1]
    return ""


def version_key(text: str) -> tuple[int, ...]:
    """Sort key of a version: "12.10" above "12.9". Ignores suffixes after the numbers; "" sorts lowest."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]", text, maxsplit=1)[0]))


def _on_battery(root: Path) -> bool:
    """True if there is a mains adapter and none is plugged in."""
    online = [read(p / "online") for p in root.glob("sys/class/power_supply/*") if read(p / "type") == "Mains"]
    return bool(online) and "1" not in online


def port_holder(port: int) -> str:
    """The process that listens on a local port; "" if there is none."""
    with socket.socket() as probe:
        probe.settimeout(0.2)
        if probe.connect_ex(("127.0.0.1", port)):
            return ""
    import psutil

    try:
        for found in psutil.net_connections("tcp"):
            if found.status == psutil.CONN_LISTEN and found.laddr and found.laddr.port == port and found.pid:
                return f"{psutil.Process(found.pid).name()} (pid {found.pid})"
    except (psutil.Error, OSError):
        return "another program"
    return "another program"

"""Python, torch, the compiler, and what this process runs inside."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from localllm.device import MachineFacts
from localllm.request import Check

from .finding import GIB, SOFTWARE, CheckFunction, found, install, size

LEAST_TORCH = (2, 11)


def python_version(machine: MachineFacts) -> Check:
    """The interpreter."""
    version = sys.version.split()[0]
    return found("py.version", SOFTWARE, "ok", f"{version}, {sys.prefix}", version=version)


def torch_version(machine: MachineFacts) -> Check:
    """Which torch is installed; it is not imported."""
    version = machine.torch_version
    if not version:
        return found("torch.version", SOFTWARE, "fail", "torch is not installed", fix="pip install torch")
    parts = tuple(int(p) for p in version.split("+")[0].split(".")[:2] if p.isdigit())
    if parts < LEAST_TORCH:
        title = f"{version}: {'.'.join(map(str, LEAST_TORCH))} is needed"
        return found("torch.version", SOFTWARE, "fail", title, fix="pip install --upgrade torch", version=version)
    build = f"built for CUDA {machine.torch_cuda}" if machine.torch_cuda else "CPU build"
    return found("torch.version", SOFTWARE, "ok", f"{version}, {build}", version=version, cuda=machine.torch_cuda)


def torch_cuda(machine: MachineFacts) -> Check:
    """Whether the installed torch can use the GPUs."""
    if not machine.gpus:
        return found("torch.cuda", SOFTWARE, "skip", "no GPU")
    if not machine.torch_cuda:
        title = f"torch {machine.torch_version} is a CPU build: the GPU stays unused"
        return found("torch.cuda", SOFTWARE, "warn", title, fix="pip install --force-reinstall torch")
    return found("torch.cuda", SOFTWARE, "ok", f"CUDA {machine.torch_cuda}", cuda=machine.torch_cuda)


def triton_version(machine: MachineFacts) -> Check:
    """Which Triton is installed, for GPUs."""
    if not machine.gpus:
        return found("triton.version", SOFTWARE, "skip", "no GPU")
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return found("triton.version", SOFTWARE, "fail", "triton is not installed", fix="pip install triton")
    return found("triton.version", SOFTWARE, "ok", version, version=version)


def compiler(machine: MachineFacts) -> Check:
    """A C compiler, for the CPU kernels; on a GPU also Python's headers, for Triton's launcher."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    data: dict[str, Any] = {"compiler": machine.compiler, "headers": headers.exists()}
    if not machine.compiler:
        title = "no C compiler: the CPU kernels cannot be built, PyTorch's own products are used"
        return found("compiler", SOFTWARE, "warn", title, "slower and larger in memory", install("gcc"), **data)
    if not headers.exists():
        title = f"{machine.compiler}; Python's headers are missing ({headers})"
        fix = install("python3-dev", "python3-devel", "python")
        return found("compiler", SOFTWARE, "fail" if machine.gpus else "ok", title, "needed on a GPU only", fix, **data)
    return found("compiler", SOFTWARE, "ok", f"{machine.compiler}, Python headers", **data)


def wsl(machine: MachineFacts) -> Check:
    """Which WSL, if any."""
    if not machine.wsl:
        return found("wsl", SOFTWARE, "skip", "not inside WSL")
    if machine.wsl == 1:
        return found("wsl", SOFTWARE, "fail", "WSL 1 has no GPU and slow files", fix="wsl.exe --set-version Debian 2")
    detail = f"it sees {size(machine.ram_total_bytes)} of RAM; memory= in .wslconfig changes that"
    return found("wsl", SOFTWARE, "ok", "WSL 2", detail, version=2)


def container(machine: MachineFacts) -> Check:
    """Which container, if any."""
    if not machine.container:
        return found("container", SOFTWARE, "skip", "not inside a container")
    return found("container", SOFTWARE, "ok", machine.container, kind=machine.container)


def cgroup_memory(machine: MachineFacts) -> Check:
    """Whether a control group or `ulimit -v` makes memory smaller than it looks."""
    if not machine.ram_limit:
        return found("cgroup.mem", SOFTWARE, "skip", "no limit below the installed RAM")
    title = f"a {machine.ram_limit} limits memory to {size(machine.ram_total_bytes)}"
    data: dict[str, Any] = {"limit": machine.ram_limit, "limit_bytes": machine.ram_total_bytes}
    if machine.ram_total_bytes < 2 * GIB:
        fix = "ulimit -v unlimited" if machine.ram_limit == "ulimit" else "docker update --memory 8g CONTAINER"
        return found("cgroup.mem", SOFTWARE, "warn", title, fix=fix, **data)
    return found("cgroup.mem", SOFTWARE, "ok", title, **data)


CHECKS: Mapping[str, CheckFunction] = {
    "py.version": python_version,
    "torch.version": torch_version,
    "torch.cuda": torch_cuda,
    "triton.version": triton_version,
    "compiler": compiler,
    "wsl": wsl,
    "container": container,
    "cgroup.mem": cgroup_memory,
}

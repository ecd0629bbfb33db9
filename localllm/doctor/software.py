"""Checks of Python, torch, compilers, and containers around this process."""

from __future__ import annotations

from typing import Any

from localllm.device.gpu_table import generation, min_torch_cuda
from localllm.device.host import version_key
from localllm.interface import Check
from localllm.terminal import GIB, gib

from .finding import SOFTWARE, Checks, Status, Survey, fail, found, install, ok, skip, sm, warn
from .gpu import torch_for

CHECKS = Checks(SOFTWARE)

MIN_TORCH = (2, 11)


def _no_gpu(survey: Survey) -> str:
    return "" if survey.machine.gpus else "no GPU"


@CHECKS.add("py.version")
def python_version(survey: Survey) -> Check:
    """The Python interpreter."""
    return ok(f"{survey.host.python}, {survey.host.prefix}", version=survey.host.python)


@CHECKS.add("torch.version")
def torch_version(survey: Survey) -> Check:
    """The installed torch, without importing it."""
    machine = survey.machine
    version = machine.torch_version
    if not version:
        return fail("torch is not installed", fix="pip install torch")
    if version_key(version)[:2] < MIN_TORCH:
        title = f"{version} is too old: {'.'.join(map(str, MIN_TORCH))} or newer is required"
        return fail(title, fix="pip install --upgrade torch", version=version)
    build = f"built for CUDA {machine.torch_cuda}" if machine.torch_cuda else "CPU build"
    return ok(f"{version}, {build}", version=version, cuda=machine.torch_cuda)


@CHECKS.add("torch.cuda", _no_gpu)
def torch_cuda(survey: Survey) -> Check:
    """CUDA build of torch: does it have code for the GPUs?"""
    machine = survey.machine
    if not machine.torch_cuda:
        title = f"torch {machine.torch_version} is a CPU build and cannot use the GPU"
        return warn(title, fix=torch_for(survey))
    runnable = [gpu.capability for gpu in machine.gpus if gpu.capability >= 75]
    newest = max(runnable, default=max(gpu.capability for gpu in machine.gpus))
    least = min_torch_cuda(newest)
    if version_key(machine.torch_cuda) < version_key(least):
        title = f"torch {machine.torch_version} has no code for {sm(newest)}, which needs CUDA {least} or newer"
        held = [n for n in runnable if version_key(machine.torch_cuda) >= version_key(min_torch_cuda(n))]
        status: Status = "warn" if held else "fail"  # a warning if another GPU works
        detail = f"{sm(max(held))} works" if held else ""
        return found(status, title, detail, torch_for(survey), cuda=machine.torch_cuda)
    return ok(f"CUDA {machine.torch_cuda}, {sm(newest)}", cuda=machine.torch_cuda)


@CHECKS.add("triton.version", _no_gpu)
def triton_version(survey: Survey) -> Check:
    """The installed Triton, for GPUs."""
    version = survey.host.packages.get("triton", "")
    return ok(version, version=version) if version else fail("triton is not installed", fix="pip install triton")


@CHECKS.add("triton.ptxas")
def triton_ptxas(survey: Survey) -> Check:
    """Triton's assembler: does it know the GPUs?"""
    newest = max((gpu.capability for gpu in survey.machine.gpus), default=0)
    has = survey.host.ptxas
    if newest < 75 or not has:
        return skip("no GPU" if newest < 75 else "its version is not known")
    least = generation(newest).min_cuda
    variable = survey.host.ptxas_variable
    named = survey.host.variables.get(variable, "") if variable else ""
    data: dict[str, Any] = {"version": has, "least": least, "path": named or None}
    where = f" ({variable})" if variable else ""
    if version_key(has) < version_key(least):
        title = f"{has}{where} does not know {sm(newest)}, which needs {least}"
        fix = f"unset {variable}" if variable else "pip install --upgrade triton"
        detail = "Triton then uses its bundled ptxas" if variable else "newer versions bundle a newer ptxas"
        return fail(title, detail, fix, **data)
    driver = survey.machine.driver_cuda
    if driver and version_key(has)[:1] > version_key(driver)[:1]:  # code of a later minor version runs, PTX would not
        title = f"{has}{where} makes code that a driver for CUDA {driver} may reject"
        detail = f"update the driver to one for CUDA {has.partition('.')[0]} if kernels are reported as invalid"
        return warn(title, detail, "nvidia-smi", **data)
    return ok(f"{has}{where} knows {sm(newest)}", **data)


@CHECKS.add("compiler")
def compiler(survey: Survey) -> Check:
    """C compiler for the CPU kernels, and Python headers for Triton's launcher."""
    machine, headers = survey.machine, survey.host.headers
    data: dict[str, Any] = {"compiler": machine.compiler, "headers": bool(headers)}
    if not machine.compiler and machine.gpus:
        title = "no C compiler: neither GPU nor CPU kernels can be built"
        detail = "the package ziglang includes one: pip install ziglang"
        return fail(title, detail, install("gcc"), **data)
    if not machine.compiler:
        title = "no C compiler: the CPU kernels cannot be built, so PyTorch's own matmuls are used"
        return warn(title, "which are slower and need more memory", install("gcc"), **data)
    if not headers:
        title = f"{machine.compiler}; Python's headers (Python.h) are missing"
        fix = install("python3-dev", "python3-devel", "python") if machine.gpus else ""
        detail = "Triton's launcher needs them" if machine.gpus else "only needed for GPUs"
        return found("fail" if machine.gpus else "ok", title, detail, fix, **data)
    return ok(f"{machine.compiler}, Python headers", **data)


@CHECKS.add("libs.conflict")
def conflicts(survey: Survey) -> Check:
    """Installed packages whose requirements conflict."""
    wrong = list(survey.host.conflicts)
    both = [n for n in ("nccl", "cudnn") if {f"nvidia-{n}-cu12", f"nvidia-{n}-cu13"} <= set(survey.host.packages)]
    wrong += [f"{name} is installed for CUDA 12 and for CUDA 13" for name in both]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return warn(wrong[0] + more, "", "pip check", conflicts=wrong)
    return ok("none between the relevant packages")


@CHECKS.add("wsl", lambda survey: "" if survey.machine.wsl else "not inside WSL")
def wsl(survey: Survey) -> Check:
    """WSL version, if any."""
    machine = survey.machine
    if machine.wsl == 1:
        return fail("WSL 1 has no GPU access and slow file access", fix="wsl.exe --set-version Debian 2")
    title = f"WSL 2 with {gib(machine.ram_total_bytes)} of memory (by default half of Windows' memory)"
    detail = "for more, set [wsl2] memory=24GB in %UserProfile%\\.wslconfig, then run wsl --shutdown"
    if survey.host.wsl_mirrored:
        detail += "; mirrored networking may hide a server from Windows"
    return ok(title, detail, version=2, release=survey.host.wsl_release)


@CHECKS.add("container", lambda survey: "" if survey.machine.container else "not inside a container")
def container(survey: Survey) -> Check:
    """Container around this process, if any."""
    return ok(survey.machine.container, kind=survey.machine.container)


@CHECKS.add("cgroup.mem", lambda survey: "" if survey.machine.ram_limit else "no limit below the installed RAM")
def cgroup_memory(survey: Survey) -> Check:
    """Memory limit by a control group or `ulimit -v`."""
    machine = survey.machine
    title = f"a {machine.ram_limit} limits memory to {gib(machine.ram_total_bytes)}"
    data: dict[str, Any] = {"limit": machine.ram_limit, "limit_bytes": machine.ram_total_bytes}
    if machine.ram_total_bytes < 2 * GIB:
        fix = "ulimit -v unlimited" if machine.ram_limit == "ulimit" else "docker update --memory 8g CONTAINER"
        return warn(title, fix=fix, **data)
    return ok(title, **data)

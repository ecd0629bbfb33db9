"""CPU, memory, GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from localllm.device import GpuFacts, MachineFacts
from localllm.device.gpu_table import min_driver
from localllm.request import Check

from .finding import GIB, HARDWARE, CheckFunction, found, size

LITTLE_RAM = 2 * GIB
NO_GPU = "no NVIDIA driver: the CPU computes"


def gpu_present(machine: MachineFacts) -> Check:
    """Whether a GPU can be seen."""
    if machine.gpu_error:
        title = f"an NVIDIA driver is installed but does not work: {machine.gpu_error}"
        return found("gpu.present", HARDWARE, "fail", title, fix="nvidia-smi", error=machine.gpu_error)
    if not machine.gpus and machine.driver:
        setting = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        title = f"CUDA_VISIBLE_DEVICES={setting!r} hides every GPU"
        return found("gpu.present", HARDWARE, "warn", title, fix="unset CUDA_VISIBLE_DEVICES")
    if not machine.gpus:
        return found("gpu.present", HARDWARE, "skip", NO_GPU)
    title = "; ".join(_describe(gpu) for gpu in machine.gpus)
    return found("gpu.present", HARDWARE, "ok", title, gpus=[gpu.name for gpu in machine.gpus])


def _describe(gpu: GpuFacts) -> str:
    speed = f", {gpu.bandwidth / 1e9:,.0f} GB/s" if gpu.bandwidth else ""
    memory = f"{size(gpu.total_bytes)} ({size(gpu.free_bytes)} free){', shared with the CPU' if gpu.unified else ''}"
    return f"{gpu.name}, sm_{gpu.capability}, {memory}{speed}"


def gpu_driver(machine: MachineFacts) -> Check:
    """Whether the driver knows the card and the CUDA that torch was built with."""
    if not machine.driver:
        return found("gpu.driver", HARDWARE, "skip", NO_GPU)
    title = f"{machine.driver} (CUDA up to {machine.driver_cuda or '?'})"
    least = max((min_driver(gpu.capability) for gpu in machine.gpus), default=0)
    branch = int(machine.driver.split(".")[0]) if machine.driver.split(".")[0].isdigit() else 0
    data: dict[str, Any] = {"driver": machine.driver, "cuda": machine.driver_cuda, "least_branch": least}
    if branch and branch < least:
        return found(
            "gpu.driver", HARDWARE, "fail", f"{title}: this card needs {least} or newer", fix="nvidia-smi", **data
        )
    if machine.torch_cuda and _newer(machine.torch_cuda, machine.driver_cuda):
        title += f": torch was built for CUDA {machine.torch_cuda}, which this driver does not know"
        return found("gpu.driver", HARDWARE, "fail", title, fix="nvidia-smi", **data)
    return found("gpu.driver", HARDWARE, "ok", title, **data)


def _newer(wanted: str, has: str) -> bool:
    """CUDA runs on drivers of the same major version (minor-version compatibility) and on newer ones."""
    first = [text.split(".")[0] for text in (wanted, has)]
    return all(part.isdigit() for part in first) and int(first[0]) > int(first[1])


def gpu_arch(machine: MachineFacts) -> Check:
    """Whether the cards can run our kernels, and which number formats they compute in."""
    if not machine.gpus:
        return found("gpu.arch", HARDWARE, "skip", NO_GPU)
    worst = min(machine.gpus, key=lambda gpu: gpu.capability)
    if worst.capability < 75:
        title = f"{worst.name} has compute capability {worst.capability / 10:.1f}, 7.5 is needed"
        return found("gpu.arch", HARDWARE, "fail", title, fix="localllm chat --device cpu")
    formats = [
        "fp16",
        *(n for n, has in (("bf16", worst.has_bf16), ("fp8", worst.has_fp8), ("fp4", worst.has_fp4)) if has),
    ]
    return found(
        "gpu.arch", HARDWARE, "ok", f"sm_{worst.capability}: {', '.join(formats)}", capability=worst.capability
    )


def gpu_memory(machine: MachineFacts) -> Check:
    """Who else holds GPU memory."""
    if not machine.gpus:
        return found("gpu.mem", HARDWARE, "skip", NO_GPU)
    others = [p for gpu in machine.gpus for p in gpu.processes if p.pid != os.getpid()]
    held = sum(gpu.total_bytes - gpu.free_bytes for gpu in machine.gpus if not gpu.unified)
    total = sum(gpu.total_bytes for gpu in machine.gpus)
    names = ", ".join(f"{p.name or 'process'} {p.pid} ({size(p.used_bytes)})" for p in others[:3] if p.used_bytes)
    if held > total // 5:
        return found(
            "gpu.mem",
            HARDWARE,
            "warn",
            f"{size(held)} of {size(total)} are taken",
            names,
            "nvidia-smi",
            held_bytes=held,
        )
    return found("gpu.mem", HARDWARE, "ok", f"{size(total - held)} of {size(total)} free", names, held_bytes=held)


def cpu_isa(machine: MachineFacts) -> Check:
    """Which vector instructions the CPU kernels can use."""
    cpu = machine.cpu
    title = f"{cpu.name}, {cpu.isa.replace('_', '-')}"
    data: dict[str, Any] = {"name": cpu.name, "isa": cpu.isa, "flags": list(cpu.flags)}
    if cpu.isa == "generic":
        title += ": without AVX2 or NEON a few tokens per second are to be expected"
        return found("cpu.isa", HARDWARE, "warn", title, fix="localllm bench smollm2", **data)
    return found("cpu.isa", HARDWARE, "ok", title, **data)


def cpu_cores(machine: MachineFacts) -> Check:
    """How many cores this process may keep busy."""
    cpu = machine.cpu
    limit = f", a control group allows {cpu.quota:g}" if cpu.quota else ""
    data: dict[str, Any] = {"cores_usable": cpu.cores_usable, "cpus_total": cpu.cpus_total, "quota": cpu.quota}
    if cpu.quota and cpu.quota < 1:
        title = f"a control group allows {cpu.quota:g} of a CPU: expect long pauses"
        return found("cpu.cores", HARDWARE, "warn", title, fix="docker update --cpus 4 CONTAINER", **data)
    title = f"{cpu.cores_usable} cores usable of {cpu.cpus_total} logical CPUs{limit}"
    return found("cpu.cores", HARDWARE, "ok", title, **data)


def ram(machine: MachineFacts) -> Check:
    """Memory that may still be taken."""
    title = f"{size(machine.ram_available_bytes)} of {size(machine.ram_total_bytes)} free"
    data: dict[str, Any] = {"total_bytes": machine.ram_total_bytes, "available_bytes": machine.ram_available_bytes}
    if machine.ram_available_bytes < LITTLE_RAM:
        title += f": below {size(LITTLE_RAM)} only the smallest models run"
        return found("ram", HARDWARE, "warn", title, fix="localllm plan smollm2", **data)
    return found("ram", HARDWARE, "ok", title, **data)


def swap(machine: MachineFacts) -> Check:
    """Whether the machine already lives on swap."""
    used = machine.swap_total_bytes - machine.swap_free_bytes
    if not machine.swap_total_bytes:
        return found("swap", HARDWARE, "ok", "none")
    title = f"{size(used)} of {size(machine.swap_total_bytes)} used"
    if used > machine.swap_total_bytes // 2 and machine.ram_available_bytes < 4 * GIB:
        return found("swap", HARDWARE, "warn", f"{title}: a model would swap", fix="free -h", used_bytes=used)
    return found("swap", HARDWARE, "ok", title, used_bytes=used)


CHECKS: Mapping[str, CheckFunction] = {
    "gpu.present": gpu_present,
    "gpu.driver": gpu_driver,
    "gpu.arch": gpu_arch,
    "gpu.mem": gpu_memory,
    "cpu.isa": cpu_isa,
    "cpu.cores": cpu_cores,
    "ram": ram,
    "swap": swap,
}

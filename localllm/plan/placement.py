"""Device selection: which GPU (or the CPU) runs a model, why others cannot, and how much memory may be used."""

from __future__ import annotations

from typing import NamedTuple

from localllm.device import GpuFacts, MachineFacts
from localllm.device.gpu_table import generation, min_torch_cuda
from localllm.errors import DeviceError
from localllm.terminal import GIB, counted, gib

# address space that libraries and thread stacks reserve without touching: counts against `ulimit -v` only
ADDRESS_BYTES = GIB
UNIFIED_SHARE = 0.85  # most of a unified memory that may be used: the system and other programs share it


class Placement(NamedTuple):
    """The chosen device, and why."""

    device: str  # cpu | cuda:N
    gpu: GpuFacts | None
    reasons: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """cpu | cuda"""
        return "cuda" if self.gpu else "cpu"


def chosen_device(machine: MachineFacts, name: str) -> Placement:
    """The device for auto, cpu, cuda or cuda:N. Raises DeviceError if it does not exist or cannot be used."""
    if name == "cpu":
        return Placement("cpu", None)
    if name == "auto":
        usable = [g for g in machine.gpus if not unusable(machine, g)]
        if usable:
            best = max(usable, key=lambda g: g.free_bytes)
            why = "the GPU with the most free memory" if len(usable) > 1 else "the only usable GPU"
            return Placement(f"cuda:{machine.gpus.index(best)}", best, (f"{best.name}: {why}", *_failed(machine)))
        why = unusable(machine, machine.gpus[0]) if machine.gpus else _without(machine) or "no NVIDIA GPU found"
        return Placement("cpu", None, (f"CPU: {why}", *(_failed(machine) if machine.gpus else ())))
    index = int(name.partition(":")[2] or 0)
    fix = "use --device cpu; `localllm doctor` shows details"
    if index >= len(machine.gpus):
        seen = "; ".join((f"{counted(len(machine.gpus), 'GPU')} visible", *_failed(machine)))
        if not machine.gpus:
            seen = _without(machine) or "no NVIDIA GPU is visible"
        raise DeviceError(f"{name} not found: {seen}", fix)
    gpu = machine.gpus[index]
    if reason := unusable(machine, gpu):
        raise DeviceError(f"{name} cannot be used: {reason}", fix)
    return Placement(f"cuda:{index}", gpu)


def _failed(machine: MachineFacts) -> tuple[str, ...]:
    """What is known about GPUs that have failed beside others."""
    return (machine.gpu_error,) if machine.gpu_error else ()


def _without(machine: MachineFacts) -> str:
    """Why this machine has no usable GPU, if known."""
    return machine.gpu_error or "; ".join(machine.foreign_gpus)


def unusable(machine: MachineFacts, gpu: GpuFacts) -> str:
    """Why a GPU cannot be used with this driver and this torch; "" if it can."""
    if gpu.capability < 75:
        return f"{gpu.name} has compute capability {gpu.capability / 10:.1f}, but at least 7.5 is required"
    if not machine.torch_cuda:
        return f"torch {machine.torch_version} was built without CUDA, so {gpu.name} stays unused"
    if _version(machine.torch_cuda) < _version(min_torch_cuda(gpu.capability)):
        return (
            f"torch {machine.torch_version} is built with CUDA {machine.torch_cuda}, which has no code for {gpu.name}"
            f" (sm_{gpu.capability}): it needs CUDA {min_torch_cuda(gpu.capability)} or later"
        )
    least = generation(gpu.capability).min_driver
    if machine.driver and _version(machine.driver)[0] < least:
        return f"driver {machine.driver} is too old for {gpu.name}, which needs {least} or later"
    if machine.driver_cuda and _version(machine.torch_cuda)[0] > _version(machine.driver_cuda)[0]:
        return (
            f"driver {machine.driver} supports CUDA up to {machine.driver_cuda}, but torch is built with CUDA"
            f" {machine.torch_cuda}: update the driver, or install torch for CUDA {machine.driver_cuda}"
        )
    return ""


def _version(text: str) -> tuple[int, ...]:
    """12.8 -> (12, 8); (0,) for an empty string."""
    return tuple(int(part) for part in text.split(".") if part.isdigit()) or (0,)


def idle_card(machine: MachineFacts, device: str) -> str:
    """A sentence about the best usable GPU that the plan leaves idle; "" if there is none."""
    others = {f"cuda:{i}": g for i, g in enumerate(machine.gpus) if not unusable(machine, g)}
    others.pop(device, None)
    if device == "cpu" or not others:
        return ""
    place, other = max(others.items(), key=lambda one: one[1].free_bytes)
    return (
        f"{other.name} ({place}, {gib(other.free_bytes, 1)} free) is idle: it could run a second model"
        f" (--device {place}) or half of this one (--tensor-parallel 2)"
    )


def room_of(machine: MachineFacts, gpu: GpuFacts | None, share: float) -> tuple[int, int]:
    """(bytes that may be used, bytes of these to keep free as a margin)."""
    if gpu is None:
        reserved = ADDRESS_BYTES if machine.ram_limit == "ulimit" else 0
        return max(0, machine.ram_available_bytes - reserved), min(GIB, machine.ram_total_bytes // 20)
    if gpu.unified:  # free_bytes is MemAvailable here: pages of mapped files are reclaimed when needed
        return int(gpu.free_bytes * min(share, UNIFIED_SHARE)), min(GIB, gpu.total_bytes // 20)
    ours = min(gpu.free_bytes, int(gpu.total_bytes * share))
    # Windows moves memory of the GPU to the host where it runs out, and nothing fails: everything becomes slow
    return ours, GIB // 2 if machine.wsl else min(GIB // 2, gpu.total_bytes // 40)

"""Where a model runs: the card that is taken, why others cannot be, and how much of its memory may be used."""

from __future__ import annotations

from typing import NamedTuple

from localllm.device import GpuFacts, MachineFacts
from localllm.device.gpu_table import generation, min_torch_cuda
from localllm.errors import DeviceError
from localllm.terminal import GIB, gib

# what libraries and thread stacks reserve of the address space without touching it: counts under `ulimit -v` only
ADDRESS_BYTES = GIB
UNIFIED_SHARE = 0.85  # of the machine's memory on a card without its own: the system and other programs live there, too


class Placement(NamedTuple):
    """A device that is taken, and why."""

    device: str  # cpu | cuda:N
    gpu: GpuFacts | None
    reasons: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """cpu | cuda"""
        return "cuda" if self.gpu else "cpu"


def chosen_device(machine: MachineFacts, name: str) -> Placement:
    """The device for the wish auto, cpu, cuda or cuda:N. Raises DeviceError where it is not there or cannot be used."""
    if name == "cpu":
        return Placement("cpu", None)
    if name == "auto":
        usable = [g for g in machine.gpus if not unusable(machine, g)]
        if usable:
            best = max(usable, key=lambda g: g.free_bytes)
            why = "the GPU with most free memory" if len(usable) > 1 else "the GPU"
            return Placement(f"cuda:{machine.gpus.index(best)}", best, (f"{best.name}: {why}",))
        why = unusable(machine, machine.gpus[0]) if machine.gpus else _without(machine) or "no NVIDIA GPU here"
        return Placement("cpu", None, (f"CPU: {why}",))
    index = int(name.partition(":")[2] or 0)
    fix = "use --device cpu; `localllm doctor` tells more"
    if index >= len(machine.gpus):
        seen = (
            f"{len(machine.gpus)} GPUs are visible" if machine.gpus else _without(machine) or "no NVIDIA GPU is visible"
        )
        raise DeviceError(f"there is no {name} here: {seen}", fix)
    gpu = machine.gpus[index]
    if reason := unusable(machine, gpu):
        raise DeviceError(f"{name} cannot be used: {reason}", fix)
    return Placement(f"cuda:{index}", gpu)


def _without(machine: MachineFacts) -> str:
    """Why there is no card to use, where that is known."""
    return machine.gpu_error or "; ".join(machine.foreign_gpus)


def unusable(machine: MachineFacts, gpu: GpuFacts) -> str:
    """Why a card cannot be used with this driver and this torch; nothing when it can."""
    if gpu.capability < 75:
        return f"{gpu.name} has compute capability {gpu.capability / 10:.1f}, 7.5 is needed"
    if not machine.torch_cuda:
        return f"torch {machine.torch_version} was built without CUDA, so {gpu.name} stays unused"
    if _version(machine.torch_cuda) < _version(min_torch_cuda(gpu.capability)):
        return (
            f"torch {machine.torch_version} is built with CUDA {machine.torch_cuda}, which has no code for {gpu.name}"
            f" (sm_{gpu.capability}): CUDA {min_torch_cuda(gpu.capability)} or later is needed"
        )
    least = generation(gpu.capability).min_driver
    if machine.driver and _version(machine.driver)[0] < least:
        return f"driver {machine.driver} is too old for {gpu.name}: {least} or later is needed"
    if machine.driver_cuda and _version(machine.torch_cuda)[0] > _version(machine.driver_cuda)[0]:
        return (
            f"driver {machine.driver} supports CUDA up to {machine.driver_cuda}, torch is built with"
            f" {machine.torch_cuda}: update the driver, or install torch for CUDA {machine.driver_cuda}"
        )
    return ""


def _version(text: str) -> tuple[int, ...]:
    """12.8 -> (12, 8); (0,) for nothing."""
    return tuple(int(part) for part in text.split(".") if part.isdigit()) or (0,)


def idle_card(machine: MachineFacts, device: str) -> str:
    """What the best of the other usable cards could do."""
    others = {f"cuda:{i}": g for i, g in enumerate(machine.gpus) if not unusable(machine, g)}
    others.pop(device, None)
    if device == "cpu" or not others:
        return ""
    place, other = max(others.items(), key=lambda one: one[1].free_bytes)
    return (
        f"{other.name} ({place}, {gib(other.free_bytes, 1)} free) stays unused: it could run a second model"
        f" (--device {place}), or share one (--tensor-parallel 2)"
    )


def room_of(machine: MachineFacts, gpu: GpuFacts | None, share: float) -> tuple[int, int]:
    """(bytes that may be taken, bytes of them kept free for others)."""
    if gpu is None:
        reserved = ADDRESS_BYTES if machine.ram_limit == "ulimit" else 0
        return max(0, machine.ram_available_bytes - reserved), min(GIB, machine.ram_total_bytes // 20)
    if gpu.unified:  # free is the machine's MemAvailable: what mapped files hold of it comes back when it is needed
        return int(gpu.free_bytes * min(share, UNIFIED_SHARE)), min(GIB, gpu.total_bytes // 20)
    ours = min(gpu.free_bytes, int(gpu.total_bytes * share))
    return ours, min(GIB // 2, gpu.total_bytes // 40)

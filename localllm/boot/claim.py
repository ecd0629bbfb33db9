"""Claims the planned device: checks that torch can use the GPU, with cause and fix, and sets threads and affinity."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

import torch

from localllm.device import GpuFacts, MachineFacts, machine
from localllm.device.assembler import BLACKWELL, assembler
from localllm.device.gpu_table import generation
from localllm.device.host import version_key
from localllm.errors import DeviceError, OutOfMemory
from localllm.kernels.cpu.build import library, name_compiler
from localllm.plan.plan import Plan
from localllm.terminal import counted, gib

HEAVY = ("qkv", "o", "gate_up", "down", "lm_head", "paged_attention")  # layer classes that need several threads
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # system call numbers, because libnuma is not always installed
MPOL_DEFAULT, MPOL_INTERLEAVE = 0, 3
LOADING_THREADS = 8  # host threads that convert weights while a model is loaded onto a GPU


def check_card(device: str, card: GpuFacts) -> None:
    """Raise DeviceError if torch finds no GPU or a different one, or has no code for it."""
    fix = "use --device cpu; `localllm doctor` shows details"
    if not torch.cuda.is_available():
        raise DeviceError(
            f"torch {torch.__version__} finds no CUDA device, but the driver finds {card.name}: "
            "torch does not match the driver, or the GPU is hidden from this process",
            fix,
        )
    index = int(device.removeprefix("cuda:") or 0)
    if index >= torch.cuda.device_count():
        raise DeviceError(
            f"{device} is {card.name}, but torch finds only {counted(torch.cuda.device_count(), 'GPU')}", fix
        )
    major, minor = torch.cuda.get_device_capability(index)
    seen = torch.cuda.get_device_name(index)
    if major * 10 + minor != card.capability or _is_another(index, card):
        raise DeviceError(
            f"{device} is {seen} (sm_{major}{minor}) for torch, but {card.name} (sm_{card.capability}) for the driver: "
            "they number the GPUs differently",
            "export CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )
    built = torch.cuda.get_arch_list()
    if not runs_code_of(built, card.capability):
        raise DeviceError(
            f"torch {torch.__version__} has no code for {card.name} (sm_{card.capability}), "
            f"only for {', '.join(built)}",
            f"install a torch build for it (pip install -U torch), or {fix}",
        )


def _is_another(index: int, card: GpuFacts) -> bool:
    """True if torch and the driver number several GPUs differently, judged by the UUID."""
    if torch.cuda.device_count() == 1 or card.mig:
        return False
    uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
    return bool(uuid and card.uuid) and not card.uuid.endswith(uuid)


def check_assembler(capability: int) -> None:
    """Raise DeviceError if Triton's assembler does not know the GPU: compiling would kill the process, uncatchably."""
    if capability < BLACKWELL:
        return
    found, least = assembler(capability), generation(capability).min_cuda
    if not found.version or version_key(found.version) >= version_key(least):
        return
    raise DeviceError(
        f"Triton's assembler {found.path} is from CUDA {found.version}, "
        f"which does not support sm_{capability}: it needs {least} or later",
        f"unset {found.variable}" if found.variable else "pip install --upgrade triton",
    )


def runs_code_of(built: Iterable[str], capability: int) -> bool:
    """True if a GPU can run any of the code that torch was built with.

    Machine code (sm_NN) runs on GPUs of the same major and an equal or higher minor version; PTX (compute_NN) on all
    later GPUs.
    """
    for name in built:
        found = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", name)
        if found is None:
            continue
        kind, version, special = found[1], int(found[2]), found[3]
        if special == "a" and version != capability:
            continue
        if kind == "compute" and version <= capability:
            return True
        if version // 10 == capability // 10 and version <= capability:
            return True
    return False


def claim_card(device: str, machine: MachineFacts) -> None:
    """Check the GPU, make it the current device of this thread, and set the C compiler for Triton's launchers.

    torch gets several threads to convert weights, because nothing else needs the cores during loading. Raises
    DeviceError if the GPU cannot be used.
    """
    card = machine.gpus[int(device.removeprefix("cuda:") or 0)]
    check_card(device, card)
    check_assembler(card.capability)
    torch.cuda.set_device(device)
    name_compiler()
    if folder := os.environ.get("LOCALLLM_CACHE"):  # set where the home folder cannot be written
        os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(folder, "triton"))
    torch.set_num_threads(max(1, min(LOADING_THREADS, machine.cpu.cores_usable)))


def check_room(plan: Plan, planned: MachineFacts, now: MachineFacts) -> None:
    """Raise OutOfMemory if others took planned memory since the plan was made, DeviceError if the GPU is gone.

    planned   the machine as it was when the plan was made
    """
    index = int(plan.device.removeprefix("cuda:") or 0)
    before = planned.gpus[index]
    card = next((card for card in now.gpus if card.uuid == before.uuid), None)
    if card is None:
        why = now.gpu_error or "the driver no longer lists it"
        raise DeviceError(f"{before.name} is gone since the model was planned: {why}", "localllm doctor")
    ours = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)  # cached by torch, free for the model
    need = plan.need_bytes - plan.margin_bytes
    if card.unified or need <= card.free_bytes + ours:
        return
    raise OutOfMemory(
        f"the model needs {gib(need, 1)}, but {card.name} has {gib(card.free_bytes, 1)} free, down from"
        f" {gib(before.free_bytes, 1)} when the model was planned{_holders(card, before)}",
        "start again to plan for the free memory, or stop the programs that use the GPU",
    )


def _holders(card: GpuFacts, before: GpuFacts) -> str:
    """Up to three processes that hold memory of the GPU, as the end of a sentence: new ones, or else all."""
    others = [one for one in card.processes if one.pid != os.getpid()]
    known = {one.pid for one in before.processes}
    shown = [one for one in others if one.pid not in known] or others
    words = [f"{one.name or 'process'} {one.pid} holds {gib(one.used_bytes, 1)}" for one in shown[:3]]
    return f": {', '.join(words)}" if words else ""


def out_of_memory(error: Exception, device: str, planned: MachineFacts) -> OutOfMemory:
    """The error for memory that ran out while a model was loaded or woken, although the plan had room for it."""
    if device == "cpu" or not (isinstance(error, torch.OutOfMemoryError) or "cuda" in str(error).lower()):
        what = (
            f"the machine ran out of memory while loading the model: {gib(machine().ram_available_bytes, 1)} are left"
        )
        return OutOfMemory(what, "stop other programs, or use a smaller --ctx")
    before = planned.gpus[int(device.removeprefix("cuda:") or 0)]
    card = next((card for card in machine().gpus if card.uuid == before.uuid), before)
    return OutOfMemory(
        f"{card.name} ran out of memory while loading the model{_holders(card, before)}",
        "start again to plan for the free memory, stop the programs that use the GPU, or use a smaller --ctx",
    )


def set_threads(count: int) -> None:
    """Give our kernels `count` threads, and torch one.

    torch's pool synchronizes after every small op: next to another busy process on two cores, loading smollm2 took 13
    to 32 s with two torch threads, but 0.4 s with one. `serve_torch` gives torch more if it runs the heavy ops itself.
    """
    torch.set_num_threads(1)
    lib = library().lib
    if lib is not None:
        lib.ll_threads(count)


@contextmanager
def confined(plan: Plan) -> Iterator[None]:
    """Context in which this thread, and threads it starts, use the plan's CPUs and interleave memory over its nodes.

    This thread's affinity is restored at the end. If the system refuses, all CPUs and the nearest memory are used.
    """
    if plan.ranks or not (plan.cpus or plan.nodes):
        yield
        return
    before = os.sched_getaffinity(0)
    with suppress(OSError):  # the cpuset may have shrunk since the plan was made
        os.sched_setaffinity(0, plan.cpus or before)
    is_spread = bool(plan.nodes) and spread_memory(plan.nodes)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)
        if is_spread:
            spread_memory(())


def spread_memory(nodes: Iterable[int]) -> bool:
    """Interleave memory that this thread touches first over these NUMA nodes; () restores the default policy.

    Returns False if the system refuses.
    """
    numbers = tuple(nodes)
    if (call := SET_MEMPOLICY.get(platform.machine())) is None:
        return False
    mask = (ctypes.c_ulong * 16)()
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    for number in numbers:
        mask[number // bits] |= 1 << number % bits
    mode = MPOL_INTERLEAVE if numbers else MPOL_DEFAULT
    given = (ctypes.byref(mask), ctypes.c_ulong(16 * bits)) if numbers else (None, ctypes.c_ulong(0))
    return ctypes.CDLL(None).syscall(ctypes.c_long(call), ctypes.c_int(mode), *given) == 0


def serve_torch(kernels: Mapping[str, str], count: int) -> None:
    """Give torch `count` threads if it runs a heavy layer class of the loaded model (class -> implementation)."""
    if any(kernels.get(name, "").startswith("torch") for name in HEAVY):
        torch.set_num_threads(count)

"""The device that the plan took: whether torch can use the card, with cause and cure, and how many threads compute."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

import torch

from localllm.device import GpuFacts, MachineFacts
from localllm.device.assembler import BLACKWELL, assembler
from localllm.device.gpu_table import generation
from localllm.device.host import version_key
from localllm.errors import DeviceError, OutOfMemory
from localllm.kernels.cpu.build import library, name_compiler
from localllm.plan.plan import Plan
from localllm.terminal import gib

HEAVY = ("qkv", "o", "gate_up", "down", "lm_head", "paged_attention")  # the layer classes that need several threads
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # the system call's number; libnuma is not everywhere
MPOL_DEFAULT, MPOL_INTERLEAVE = 0, 3
LOADING_THREADS = 8  # threads that turn stored formats into ours on the host while a model goes to a card


def check_card(device: str, card: GpuFacts) -> None:
    """Raise DeviceError where torch sees no card, sees another one there, or has no code for it."""
    fix = "use --device cpu; `localllm doctor` tells more"
    if not torch.cuda.is_available():
        raise DeviceError(
            f"torch {torch.__version__} sees no CUDA device, the driver sees {card.name}: "
            "driver and torch do not go together, or the card is hidden from this process",
            fix,
        )
    index = int(device.removeprefix("cuda:") or 0)
    if index >= torch.cuda.device_count():
        raise DeviceError(f"{device} is {card.name}, but torch sees {torch.cuda.device_count()} cards only", fix)
    major, minor = torch.cuda.get_device_capability(index)
    seen = torch.cuda.get_device_name(index)
    if major * 10 + minor != card.capability or _is_another(index, card):
        raise DeviceError(
            f"{device} is {seen} (sm_{major}{minor}) for torch and {card.name} (sm_{card.capability}) for the driver: "
            "they number the cards differently",
            "export CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )
    built = torch.cuda.get_arch_list()
    if not runs_code_of(built, card.capability):
        raise DeviceError(
            f"torch {torch.__version__} has no code for {card.name} (sm_{card.capability}), "
            f"only for {', '.join(built)}",
            f"install a torch built for it: pip install -U torch; or {fix}",
        )


def _is_another(index: int, card: GpuFacts) -> bool:
    """Whether torch's card of this number, of several, is not the driver's: of one class they differ in memory."""
    if torch.cuda.device_count() == 1 or card.mig:
        return False
    uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
    return bool(uuid and card.uuid) and not card.uuid.endswith(uuid)


def check_assembler(capability: int) -> None:
    """Raise DeviceError where Triton's assembler does not know the card: the process would end, past all handlers."""
    if capability < BLACKWELL:
        return
    found, least = assembler(capability), generation(capability).min_cuda
    if not found.version or version_key(found.version) >= version_key(least):
        return
    raise DeviceError(
        f"Triton's assembler {found.path} is of CUDA {found.version}, "
        f"which has no code for sm_{capability}: {least} has",
        f"unset {found.variable}" if found.variable else "pip install --upgrade triton",
    )


def runs_code_of(built: Iterable[str], capability: int) -> bool:
    """Whether a card runs one of the codes that torch was built with.

    Machine code serves cards of its major version from its minor on; intermediate code (compute_NN) every later card.
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
    """Check the card; streams and kernels of this thread go to it, and Triton finds a compiler for its launchers.

    torch turns stored formats into ours with several threads meanwhile: nothing else needs the cores then. Raises
    DeviceError where the card cannot be used.
    """
    card = machine.gpus[int(device.removeprefix("cuda:") or 0)]
    check_card(device, card)
    check_assembler(card.capability)
    torch.cuda.set_device(device)
    name_compiler()
    torch.set_num_threads(max(1, min(LOADING_THREADS, machine.cpu.cores_usable)))


def check_room(plan: Plan, planned: MachineFacts, now: MachineFacts) -> None:
    """Raise OutOfMemory where others took what the plan counts on since it was made, DeviceError where the card went.

    planned   the machine that the plan was made for
    """
    index = int(plan.device.removeprefix("cuda:") or 0)
    before = planned.gpus[index]
    card = next((card for card in now.gpus if card.uuid == before.uuid), None)
    if card is None:
        why = now.gpu_error or "the driver does not show it"
        raise DeviceError(f"{before.name} was there when the model was planned: now {why}", "localllm doctor")
    ours = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)  # kept by torch for the next model
    need = plan.need_bytes - plan.margin_bytes
    if card.unified or need <= card.free_bytes + ours:
        return
    known = {one.pid for one in before.processes}
    others = [f"{one.name or 'process'} {one.pid} has {gib(one.used_bytes, 1)}" for one in card.processes]
    new = [said for said, one in zip(others, card.processes, strict=True) if one.pid not in known] or others
    raise OutOfMemory(
        f"{gib(need, 1)} are needed, {card.name} had {gib(before.free_bytes, 1)} free when the model was planned and"
        f" has {gib(card.free_bytes, 1)} now{': ' if new else ''}{', '.join(new[:3])}",
        "start again, which plans for what is free, or end what uses the card",
    )


def set_threads(count: int) -> None:
    """Give our kernels `count` threads, and torch one.

    torch's pool waits at a barrier after every small operation: beside another busy process on two cores, loading
    smollm2 took 13 to 32 s with two torch threads, and 0.4 s with one. `serve_torch` gives it more where it does the
    heavy work itself.
    """
    torch.set_num_threads(1)
    lib = library().lib
    if lib is not None:
        lib.ll_threads(count)


@contextmanager
def confined(plan: Plan) -> Iterator[None]:
    """This thread and those that it starts use the plan's CPUs and spread their memory over its nodes.

    This thread has its CPUs back at the end. Where the system refuses, all CPUs and the nearest memory are used.
    """
    if plan.ranks or not (plan.cpus or plan.nodes):
        yield
        return
    before = os.sched_getaffinity(0)
    with suppress(OSError):  # a CPU set was made smaller meanwhile
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
    """Have pages that this thread writes first lie on these nodes in turn; () for the nearest. False where refused."""
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
    """Give torch `count` threads when a heavy layer class of the loaded model (class -> implementation) runs on it."""
    if any(kernels.get(name, "").startswith("torch") for name in HEAVY):
        torch.set_num_threads(count)

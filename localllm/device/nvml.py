"""GPU facts from NVML, the NVIDIA driver's own library, through ctypes: no torch, no subprocess.

Any call may fail on some GPU or driver; that fact then stays unknown. The whole query runs in a thread with a deadline,
because a broken driver can hang.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from ctypes import Structure, byref, c_char, c_char_p, c_int, c_uint, c_ulonglong, c_void_p
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from .facts import GpuFacts, GpuLink, GpuProcess
from .gpu_table import table_row
from .procfs import read

LIBRARIES = ("libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1")
NONE = "the driver is installed, but finds no GPU"
DEADLINE_S = 5.0
NO_PERMISSION, LOST, RESET_REQUIRED = 4, 15, 16  # NVML return codes
GONE = (LOST, RESET_REQUIRED)
MEMORY_CLOCK = 2
CELSIUS_OF_GPU = 0
MAX_PROCESSES = 64
# NVML throttle reasons that indicate a problem, plus the power limit, which is normal under load
THROTTLE = ((0x8, "hardware slowdown"), (0x20, "heat"), (0x40, "heat"), (0x80, "power brake"), (0x4, "power limit"))
PATHS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
P2P = {
    0: "ok",
    1: "the chipset does not support it",
    2: "these GPUs do not support it",
    3: "the PCIe topology does not support it",
    4: "disabled in the driver",
    5: "not supported",
}


class Answer(NamedTuple):
    """The driver's answer, as fields of `MachineFacts`."""

    gpus: tuple[GpuFacts, ...] = ()
    driver: str = ""
    driver_cuda: str = ""
    gpu_error: str = ""
    gpu_links: tuple[GpuLink, ...] = ()


class _Memory(Structure):
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class _Process(Structure):
    _fields_ = (("pid", c_uint), ("used", c_ulonglong), ("instance", c_uint), ("compute_instance", c_uint))


def gpu_facts(ram_available: int, root: Path = Path("/"), library: Any = None) -> Answer:
    """All GPUs visible under CUDA_VISIBLE_DEVICES; none, without an error, if there is no NVIDIA driver.

    library   replaces NVML in tests
    """
    library = library or load_library()
    if library is None:
        loaded = (root / "proc/driver/nvidia/version").exists()
        error = "the kernel module is loaded, but libnvidia-ml.so.1 is not installed or not in this container"
        return Answer(gpu_error=error if loaded else "")
    answers: list[Answer] = []

    def ask() -> None:
        answers.append(_ask(Nvml(library), ram_available, root))

    thread = threading.Thread(target=ask, daemon=True, name="nvml")
    thread.start()
    thread.join(DEADLINE_S)
    if not answers:
        return Answer(gpu_error=f"the driver did not answer within {DEADLINE_S:g} s")
    answer = answers[0]
    shown = visible(answer.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    place = {answer.gpus.index(gpu): number for number, gpu in enumerate(shown)}  # links refer to the visible GPUs
    links = [k for k in answer.gpu_links if k.first in place and k.second in place]
    links = [replace(link, first=place[link.first], second=place[link.second]) for link in links]
    return answer._replace(gpus=shown, gpu_links=tuple(links))


def visible(gpus: tuple[GpuFacts, ...], setting: str | None) -> tuple[GpuFacts, ...]:
    """The GPUs selected by CUDA_VISIBLE_DEVICES, in its order: indices or UUID prefixes, up to the first invalid entry.

    CUDA shows a process at most one MIG instance, and no whole GPU next to it.
    """
    chosen = list(gpus) if setting is None else []
    for part in (p.strip() for p in (setting or "").split(",")):
        if part.isdigit():
            found = [g for g in gpus if g.index == int(part)][:1]
        else:
            found = [g for g in gpus if part.startswith(("GPU-", "MIG-")) and g.uuid.startswith(part)]
        if len(found) != 1 or found[0] in chosen:
            break
        chosen += found
    return tuple([gpu for gpu in chosen if gpu.mig][:1] or chosen)


def _is_hidden(index: int, setting: str | None) -> bool:
    """Whether CUDA_VISIBLE_DEVICES surely leaves out a GPU whose UUID is unknown, because it has failed."""
    parts = [] if not setting else [part.strip() for part in setting.split(",")]
    return setting is not None and all(map(str.isdigit, parts)) and str(index) not in parts


def load_library() -> Any:
    """Load NVML; None without an NVIDIA driver."""
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _ask(nvml: Nvml, ram_available: int, root: Path) -> Answer:
    code = nvml.call("nvmlInit_v2")
    if code:
        return Answer(gpu_error=nvml.reason(code))
    try:
        cuda = nvml.ask("nvmlSystemGetCudaDriverVersion_v2") or 0
        count = nvml.ask("nvmlDeviceGetCount_v2") or 0
        asked = {index: nvml.card(index) for index in range(min(count, 64))}
        handles = {index: handle for index, (code, handle) in asked.items() if not code}
        cards = [_gpu(nvml, index, handle, ram_available, root) for index, handle in handles.items()]
        cut = [
            list(_instances(nvml, handle, card)) if card.mig else [card]
            for handle, card in zip(handles.values(), cards, strict=True)
        ]
        # the driver also counts GPUs that a container may not use
        failed = {i: code for i, (code, _) in asked.items() if code and not (handles and code == NO_PERMISSION)}
        failed = {i: code for i, code in failed.items() if not _is_hidden(i, os.environ.get("CUDA_VISIBLE_DEVICES"))}
        errors = [nvml.failure(code, index) for index, code in failed.items()]
        if not any(cut):
            empty = [card.name for card, parts in zip(cards, cut, strict=True) if not parts][:1]
            errors = errors + [f"{name} is in MIG mode but has no instances" for name in empty] or [NONE]
        return Answer(
            gpus=tuple(one for parts in cut for one in parts),
            driver=nvml.text("nvmlSystemGetDriverVersion"),
            driver_cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
            gpu_error="; ".join(errors),
            gpu_links=() if any(card.mig for card in cards) else _links(nvml, handles),
        )
    finally:
        nvml.call("nvmlShutdown")


def _gpu(nvml: Nvml, index: int, handle: c_void_p, ram_available: int, root: Path) -> GpuFacts:
    def number(what: str, *arguments: c_uint) -> int:
        return nvml.ask(f"nvmlDeviceGet{what}", handle, *arguments) or 0

    def switch(what: str, *then: Any) -> bool | None:
        value = nvml.ask(f"nvmlDeviceGet{what}", handle, then=then)
        return None if value is None else bool(value)

    name = nvml.text("nvmlDeviceGetName", handle)
    minor, after_restart = c_int(), byref(c_uint())
    major = nvml.ask("nvmlDeviceGetCudaComputeCapability", handle, then=(byref(minor),)) or 0
    memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle, kind=_Memory)
    # a GPU that shares RAM with the CPU answers "not supported"
    unified = memory is None or not memory.total
    bits = nvml.ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle, kind=c_ulonglong) or 0
    # memory clock x two transfers per cycle x bus width in bits
    speed = number("MaxClockInfo", c_uint(MEMORY_CLOCK)) * 1e6 * 2 * number("MemoryBusWidth") / 8
    row = table_row(name)
    known = row.bandwidth_gbs * 1e9 if row else 0.0
    basis = "driver"
    if not speed or (known and not 0.5 < speed / known < 1.5):
        speed, basis = known, "table" if known else "unknown"
    return GpuFacts(
        name=name,
        capability=major * 10 + minor.value,
        total_bytes=ram_available if unified else memory.total,
        free_bytes=ram_available if unified else memory.free,
        bandwidth=speed,
        bandwidth_basis=basis,
        index=index,
        uuid=nvml.text("nvmlDeviceGetUUID", handle),
        unified=unified,
        power_limit_w=number("EnforcedPowerLimit") / 1000,
        power_max_w=number("PowerManagementDefaultLimit") / 1000,
        power_draw_w=number("PowerUsage") / 1000,
        pcie_width=number("CurrPcieLinkWidth"),
        pcie_width_max=number("MaxPcieLinkWidth"),
        pcie_gen_max=number("MaxPcieLinkGeneration"),
        temperature_c=number("Temperature", c_uint(CELSIUS_OF_GPU)),
        throttle=tuple(dict.fromkeys(word for bit, word in THROTTLE if bits & bit)),
        ecc=switch("EccMode", after_restart),
        mig=bool(switch("MigMode", after_restart)),
        display=switch("DisplayActive"),
        processes=_processes(nvml, handle, root),
    )


def _instances(nvml: Nvml, handle: c_void_p, card: GpuFacts) -> Iterator[GpuFacts]:
    """The MIG instances of a GPU that this process may use."""
    for number in range(nvml.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        part = c_void_p()
        if nvml.call("nvmlDeviceGetMigDeviceHandleByIndex", handle, c_uint(number), byref(part)):
            continue
        if memory := nvml.ask("nvmlDeviceGetMemoryInfo", part, kind=_Memory):
            # an instance's share of the memory has the same share of its channels
            share = 0.0 if card.unified else min(1.0, memory.total / card.total_bytes)
            yield replace(
                card,
                name=nvml.text("nvmlDeviceGetName", part) or card.name,
                uuid=nvml.text("nvmlDeviceGetUUID", part),
                total_bytes=memory.total,
                free_bytes=memory.free,
                unified=False,
                bandwidth=card.bandwidth * share,
                bandwidth_basis=card.bandwidth_basis if share else "unknown",
                processes=(),
            )


def _links(nvml: Nvml, handles: dict[int, c_void_p]) -> tuple[GpuLink, ...]:
    """The link between each pair of GPUs, with their indices, path and peer-to-peer access."""
    found = []
    for first, second in combinations(handles, 2):
        pair = handles[first], handles[second]
        path = PATHS.get(nvml.ask("nvmlDeviceGetTopologyCommonAncestor", *pair), "unknown")
        found.append(
            GpuLink(first, second, path, P2P.get(nvml.ask("nvmlDeviceGetP2PStatus", *pair, c_uint(0)), "unknown"))
        )
    return tuple(found)


def _processes(nvml: Nvml, handle: c_void_p, root: Path) -> tuple[GpuProcess, ...]:
    found: dict[int, GpuProcess] = {}
    for kind in ("Compute", "Graphics"):
        count, held = c_uint(MAX_PROCESSES), (_Process * MAX_PROCESSES)()
        if nvml.call(f"nvmlDeviceGet{kind}RunningProcesses_v3", handle, byref(count), held):
            continue
        for entry in held[: min(count.value, MAX_PROCESSES)]:
            used = 0 if entry.used == 2**64 - 1 else int(entry.used)
            name = read(root / f"proc/{entry.pid}/comm")  # "" if it has exited or runs in another container
            found[int(entry.pid)] = GpuProcess(int(entry.pid), used, name)
    return tuple(sorted(found.values(), key=lambda p: -p.used_bytes))


class Nvml:
    """NVML calls by name. A function that the library lacks fails like an unsupported one."""

    NOT_FOUND = 13

    def __init__(self, library: Any) -> None:
        self.library = library

    def call(self, name: str, *arguments: Any) -> int:
        """Call a function; returns its code, 0 for success."""
        function = getattr(self.library, name, None)
        return int(function(*arguments)) if function is not None else self.NOT_FOUND

    def ask(self, name: str, *arguments: Any, kind: Any = c_uint, then: tuple[Any, ...] = ()) -> Any:
        """Call a function with an output argument of `kind`, followed by `then`; returns its value, None on failure."""
        value = kind()
        return None if self.call(name, *arguments, byref(value), *then) else getattr(value, "value", value)

    def text(self, name: str, *handle: c_void_p) -> str:
        """Call a function that fills a text buffer."""
        return (self.ask(name, *handle, kind=c_char * 96, then=(c_uint(96),)) or b"").decode(errors="replace")

    def card(self, index: int) -> tuple[int, c_void_p]:
        """(return code, handle of the GPU with this index)

        While NVML stays open, as for a `PowerMeter`, it still returns the handle of a GPU that is lost meanwhile.
        """
        found = c_void_p()
        code = self.call("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(found))
        state = code or self.call("nvmlDeviceGetMemoryInfo", found, byref(_Memory()))
        return code or (state if state in GONE else 0), found

    def handle(self, index: int) -> c_void_p | None:
        """Handle of the GPU with this index; None if it is lost."""
        code, found = self.card(index)
        return None if code else found

    def reason(self, code: int) -> str:
        """NVML's description of an error code."""
        function = getattr(self.library, "nvmlErrorString", None)
        if function is None:
            return f"NVML returned code {code}"
        function.restype = c_char_p
        words = function(code)
        return f"{words.decode(errors='replace')} (code {code})" if words else f"code {code}"

    def failure(self, code: int, index: int) -> str:
        """Why the GPU with this index cannot be used, as a clause."""
        if code == LOST:
            return f"GPU {index} has fallen off the bus: `dmesg | grep Xid` shows the cause (79: power, heat, the slot)"
        if code == RESET_REQUIRED:
            return f"GPU {index} needs a reset: run `nvidia-smi --gpu-reset -i {index}`, or restart the machine"
        return f"GPU {index} cannot be used: {self.reason(code)}"


class PowerMeter:
    """Reads the power draw of one GPU through a handle that it keeps open."""

    def __init__(self, index: int) -> None:
        found = load_library()
        self._nvml = Nvml(found) if found is not None else None
        ready = self._nvml is not None and not self._nvml.call("nvmlInit_v2")
        self._handle = self._nvml.handle(index) if self._nvml is not None and ready else None

    def watts(self) -> float:
        """Current power draw in watts; 0 if the GPU does not report it."""
        if self._nvml is None or self._handle is None:
            return 0.0
        return (self._nvml.ask("nvmlDeviceGetPowerUsage", self._handle) or 0) / 1000

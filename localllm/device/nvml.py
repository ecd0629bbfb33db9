"""GPUs as the NVIDIA driver's own library tells them, through ctypes: no torch, no subprocess.

Every call may fail on some card or driver; then that fact stays unknown. The whole query runs in a thread with a
deadline, because a driver in trouble can hang.
"""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import Structure, byref, c_char, c_int, c_uint, c_ulonglong, c_void_p
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from .facts import GpuFacts, GpuLink, GpuProcess
from .gpu_table import table_row
from .procfs import read

LIBRARIES = ("libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1")
DEADLINE_S = 5.0
MEMORY_CLOCK = 2
CELSIUS_OF_GPU = 0
MAX_PROCESSES = 64
# bits of the clocks' limits that mean trouble, and the power limit, which does so only at rest
THROTTLE = ((0x8, "hardware slowdown"), (0x20, "heat"), (0x40, "heat"), (0x80, "power brake"), (0x4, "power limit"))
PATHS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
P2P = {
    0: "ok",
    1: "the chipset does not support it",
    2: "these cards do not support it",
    3: "the PCIe topology does not support it",
    4: "switched off in the driver",
    5: "not supported",
}


class Answer(NamedTuple):
    """What the driver says."""

    gpus: tuple[GpuFacts, ...] = ()
    driver: str = ""
    cuda: str = ""  # the newest CUDA the driver knows
    error: str = ""  # why it failed
    links: tuple[GpuLink, ...] = ()


class _Memory(Structure):
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class _Process(Structure):
    _fields_ = (("pid", c_uint), ("used", c_ulonglong), ("instance", c_uint), ("compute_instance", c_uint))


def gpu_facts(ram_available: int, root: Path = Path("/"), library: Any = None) -> Answer:
    """All GPUs that CUDA_VISIBLE_DEVICES leaves; nothing, without an error, where there is no NVIDIA driver.

    library   what answers instead of the driver's own, in tests
    """
    library = library or load_library()
    if library is None:
        loaded = (root / "proc/driver/nvidia/version").exists()
        error = "the kernel module is loaded, but libnvidia-ml.so.1 is not installed or not in this container"
        return Answer(error=error if loaded else "")
    answers: list[Answer] = []

    def ask() -> None:
        answers.append(_ask(Nvml(library), ram_available, root))

    thread = threading.Thread(target=ask, daemon=True, name="nvml")
    thread.start()
    thread.join(DEADLINE_S)
    if not answers:
        return Answer(error=f"the driver did not answer within {DEADLINE_S:g} s")
    answer = answers[0]
    shown = visible(answer.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return answer._replace(gpus=shown, links=_renumbered(answer, shown))


def _renumbered(answer: Answer, shown: tuple[GpuFacts, ...]) -> tuple[GpuLink, ...]:
    """The links between the GPUs that are left, by their places among them."""
    place = {answer.gpus.index(gpu): number for number, gpu in enumerate(shown)}
    return tuple(
        replace(link, first=place[link.first], second=place[link.second])
        for link in answer.links
        if link.first in place and link.second in place
    )


def visible(gpus: tuple[GpuFacts, ...], setting: str | None) -> tuple[GpuFacts, ...]:
    """What CUDA_VISIBLE_DEVICES leaves, in its order: indices or UUID prefixes, up to the first that is neither."""
    if setting is None:
        return gpus
    chosen: list[GpuFacts] = []
    for part in (p.strip() for p in setting.split(",")):
        if part.isdigit():
            found = [g for g in gpus if g.index == int(part)]
        else:
            found = [g for g in gpus if part.startswith(("GPU-", "MIG-")) and g.uuid.startswith(part)]
        if len(found) != 1 or found[0] in chosen:
            break
        chosen += found
    return tuple(chosen)


def load_library() -> Any:
    """The driver's library; None without one."""
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _ask(nvml: Nvml, ram_available: int, root: Path) -> Answer:
    code = nvml.call("nvmlInit_v2")
    if code:
        return Answer(error=nvml.reason(code))
    try:
        driver = nvml.text("nvmlSystemGetDriverVersion")
        cuda = nvml.integer("nvmlSystemGetCudaDriverVersion_v2")
        count = nvml.integer("nvmlDeviceGetCount_v2")
        gpus = tuple(g for index in range(min(count, 64)) if (g := _gpu(nvml, index, ram_available, root)))
        error = "" if count else "the driver is there, but sees no GPU"
        known = f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else ""
        return Answer(gpus, driver, known, error, _links(nvml, gpus))
    finally:
        nvml.call("nvmlShutdown")


def _gpu(nvml: Nvml, index: int, ram_available: int, root: Path) -> GpuFacts | None:
    handle = c_void_p()
    if nvml.call("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(handle)):
        return None
    name = nvml.text("nvmlDeviceGetName", handle)
    major, minor = c_int(), c_int()
    nvml.call("nvmlDeviceGetCudaComputeCapability", handle, byref(major), byref(minor))
    memory = _Memory()
    unified = bool(nvml.call("nvmlDeviceGetMemoryInfo", handle, byref(memory))) or not memory.total
    speed, basis = _bandwidth(nvml, handle, name)
    return GpuFacts(
        name=name,
        capability=major.value * 10 + minor.value,
        # a card without memory of its own answers "not supported": it lives in the machine's RAM
        total_bytes=ram_available if unified else memory.total,
        free_bytes=ram_available if unified else memory.free,
        bandwidth=speed,
        bandwidth_basis=basis,
        index=index,
        uuid=nvml.text("nvmlDeviceGetUUID", handle),
        unified=unified,
        power_limit_w=nvml.integer("nvmlDeviceGetEnforcedPowerLimit", handle) / 1000,
        power_max_w=nvml.integer("nvmlDeviceGetPowerManagementDefaultLimit", handle) / 1000,
        power_draw_w=nvml.integer("nvmlDeviceGetPowerUsage", handle) / 1000,
        pcie_width=nvml.integer("nvmlDeviceGetCurrPcieLinkWidth", handle),
        pcie_width_max=nvml.integer("nvmlDeviceGetMaxPcieLinkWidth", handle),
        pcie_gen_max=nvml.integer("nvmlDeviceGetMaxPcieLinkGeneration", handle),
        temperature_c=nvml.integer("nvmlDeviceGetTemperature", handle, c_uint(CELSIUS_OF_GPU)),
        throttle=_throttle(nvml, handle),
        ecc=nvml.switch("nvmlDeviceGetEccMode", handle, pair=True),
        mig=bool(nvml.switch("nvmlDeviceGetMigMode", handle, pair=True)),
        display=nvml.switch("nvmlDeviceGetDisplayActive", handle),
        processes=_processes(nvml, handle, root),
    )


def _bandwidth(nvml: Nvml, handle: c_void_p, name: str) -> tuple[float, str]:
    """Clock x bus width x 2 transfers; the table where the driver does not tell, or is off by more than a half."""
    clock, width = c_uint(), c_uint()
    nvml.call("nvmlDeviceGetMaxClockInfo", handle, c_uint(MEMORY_CLOCK), byref(clock))
    nvml.call("nvmlDeviceGetMemoryBusWidth", handle, byref(width))
    speed = clock.value * 1e6 * 2 * width.value / 8
    row = table_row(name)
    known = row.bandwidth_gbs * 1e9 if row else 0.0
    if speed and (not known or 0.5 < speed / known < 1.5):
        return speed, "driver"
    return (known, "table") if known else (0.0, "unknown")


def _throttle(nvml: Nvml, handle: c_void_p) -> tuple[str, ...]:
    """Why the clocks are held down, in words."""
    bits = c_ulonglong()
    if nvml.call("nvmlDeviceGetCurrentClocksThrottleReasons", handle, byref(bits)):
        return ()
    return tuple(dict.fromkeys(word for bit, word in THROTTLE if bits.value & bit))


def _links(nvml: Nvml, gpus: tuple[GpuFacts, ...]) -> tuple[GpuLink, ...]:
    """How each pair of GPUs is connected, and whether one may read the other's memory."""
    handles = [c_void_p() for _ in gpus]
    for gpu, handle in zip(gpus, handles, strict=True):
        nvml.call("nvmlDeviceGetHandleByIndex_v2", c_uint(gpu.index), byref(handle))
    found = []
    for first, second in combinations(range(len(gpus)), 2):
        path, status = c_uint(), c_uint()
        near = nvml.call("nvmlDeviceGetTopologyCommonAncestor", handles[first], handles[second], byref(path))
        p2p = nvml.call("nvmlDeviceGetP2PStatus", handles[first], handles[second], c_uint(0), byref(status))
        word = "unknown" if p2p else P2P.get(status.value, "unknown")
        found.append(GpuLink(first, second, "unknown" if near else PATHS.get(path.value, "unknown"), word))
    return tuple(found)


def _processes(nvml: Nvml, handle: c_void_p, root: Path) -> tuple[GpuProcess, ...]:
    found: dict[int, GpuProcess] = {}
    for kind in ("Compute", "Graphics"):
        count, held = c_uint(MAX_PROCESSES), (_Process * MAX_PROCESSES)()
        if nvml.call(f"nvmlDeviceGet{kind}RunningProcesses_v3", handle, byref(count), held):
            continue
        for entry in held[: min(count.value, MAX_PROCESSES)]:
            used = 0 if entry.used == 2**64 - 1 else int(entry.used)
            name = read(root / f"proc/{entry.pid}/comm")  # "" where it is gone, or another container's
            found[int(entry.pid)] = GpuProcess(int(entry.pid), used, name)
    return tuple(sorted(found.values(), key=lambda p: -p.used_bytes))


class Nvml:
    """Calls by name; a function the library lacks answers like one that is not supported."""

    NOT_FOUND = 13

    def __init__(self, library: Any) -> None:
        self.library = library

    def call(self, name: str, *arguments: Any) -> int:
        """The driver's code, 0 for success."""
        function = getattr(self.library, name, None)
        return int(function(*arguments)) if function is not None else self.NOT_FOUND

    def text(self, name: str, *handle: c_void_p) -> str:
        """A function that fills a buffer."""
        buffer = (c_char * 96)()
        return buffer.value.decode(errors="replace") if not self.call(name, *handle, buffer, c_uint(96)) else ""

    def integer(self, name: str, *arguments: Any) -> int:
        """A function that fills an unsigned integer."""
        value = c_uint()
        return value.value if not self.call(name, *arguments, byref(value)) else 0

    def switch(self, name: str, handle: c_void_p, pair: bool = False) -> bool | None:
        """A function that fills an on/off value, or a pair of them (now, and after a restart); None where unknown."""
        now, later = c_uint(), c_uint()
        more = (byref(later),) if pair else ()
        return None if self.call(name, handle, byref(now), *more) else bool(now.value)

    def reason(self, code: int) -> str:
        """The library's own words for a code."""
        function = getattr(self.library, "nvmlErrorString", None)
        if function is None:
            return f"the driver's library answered with code {code}"
        function.restype = ctypes.c_char_p
        words = function(code)
        return f"{words.decode(errors='replace')} (code {code})" if words else f"code {code}"


class PowerMeter:
    """Watts of one card, through one handle kept open. `library` answers instead of the driver's own, in tests."""

    def __init__(self, index: int, library: Any = None) -> None:
        found = library or load_library()
        self._nvml = Nvml(found) if found is not None else None
        self._handle = c_void_p()
        if self._nvml is not None and (
            self._nvml.call("nvmlInit_v2")
            or self._nvml.call("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(self._handle))
        ):
            self._nvml = None

    def watts(self) -> float:
        """Now; 0 where the card does not say."""
        return self._nvml.integer("nvmlDeviceGetPowerUsage", self._handle) / 1000 if self._nvml is not None else 0.0

"""The physical cores that this process may use, with their hardware threads, speeds and NUMA nodes, from /sys."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from .facts import EFFICIENT, Core, MemoryNode
from .procfs import read

SAME_SOCKET = 20  # NUMA distances: 10 to itself, 11 to 16 within a socket, 20 or more to another socket


def cores(allowed: Iterable[int], root: Path = Path("/")) -> tuple[Core, ...]:
    """Cores with a hardware thread among `allowed`, in numerical order.

    Defaults where /sys lacks the information: each logical CPU is a core, all are equally fast, and there is one node.
    """
    threads: dict[tuple[str, ...], list[int]] = {}
    for cpu in sorted(allowed):
        threads.setdefault(_core_of(root, cpu), []).append(cpu)
    cpus = list(threads.values())
    efficient = cpu_list(read(root / "sys/devices/cpu_atom/cpus"))
    node_of = {cpu: index for index in _node_numbers(root) for cpu in cpu_list(read(_node(root, index) / "cpulist"))}
    speeds = _speeds(root, [siblings[0] for siblings in cpus])
    return tuple(
        Core(tuple(siblings), speed, siblings[0] in efficient or speed < EFFICIENT, node_of.get(siblings[0], 0))
        for siblings, speed in zip(cpus, speeds, strict=True)
    )


def memory_nodes(root: Path = Path("/")) -> tuple[MemoryNode, ...]:
    """The NUMA nodes with memory; () if there is only one or /sys does not list them."""
    numbers = _node_numbers(root)
    found = []
    for index in numbers if len(numbers) > 1 else ():
        distances = [int(one) for one in read(_node(root, index) / "distance").split() if one.isdigit()]
        known = len(distances) == len(numbers)
        near = [n for n, far in zip(numbers, distances, strict=True) if far < SAME_SOCKET] if known else [index]
        lines = re.findall(r"(\S+): +(\d+) kB", read(_node(root, index) / "meminfo"))
        sizes = {name: int(kib) << 10 for name, kib in lines}
        if total := sizes.get("MemTotal", 0):
            free = sum(sizes.get(name, 0) for name in ("MemFree", "Inactive(file)", "Active(file)"))
            found.append(MemoryNode(index, total, min(free, total), tuple(near)))
    return tuple(found) if len(found) > 1 else ()


def cpu_list(text: str) -> frozenset[int]:
    """Parse a CPU list: 0-3,8 -> {0, 1, 2, 3, 8}; empty for anything else."""
    if not re.fullmatch(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", text):
        return frozenset()
    ends = [part.partition("-") for part in text.split(",")]
    return frozenset(cpu for first, _, last in ends for cpu in range(int(first), int(last or first) + 1))


def _core_of(root: Path, cpu: int) -> tuple[str, ...]:
    """A key for the physical core of a logical CPU; the CPU itself if /sys does not say.

    Prefers the list of the core's logical CPUs, because core ids are unique only within a die or cluster, and since
    Linux 6.0 all clusters of a device tree are one package.
    """
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    for name in ("core_cpus_list", "thread_siblings_list"):  # the second one before Linux 5.3
        if siblings := read(topology / name):
            return (siblings,)
    package, core = read(topology / "physical_package_id"), read(topology / "core_id")
    return (package, core) if package and core else (f"cpu{cpu}",)


def _speeds(root: Path, cpus: Sequence[int]) -> list[float]:
    """Speed of each CPU relative to the fastest, by scheduler capacity, else by maximum clock; all 1 if not known."""
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        rated = [read(root / f"sys/devices/system/cpu/cpu{cpu}" / name) for cpu in cpus]
        numbers = [int(one) for one in rated if one.isdigit()]
        if (
            len(numbers) == len(cpus)
            and min(numbers, default=0) > 0
            and (name != "cpu_capacity" or len(set(numbers)) > 1)
        ):
            return [number / max(numbers) for number in numbers]
    return [1.0] * len(cpus)


def _node(root: Path, index: int) -> Path:
    return root / f"sys/devices/system/node/node{index}"


def _node_numbers(root: Path) -> list[int]:
    return sorted(
        int(path.name[4:]) for path in root.glob("sys/devices/system/node/node[0-9]*") if path.name[4:].isdigit()
    )

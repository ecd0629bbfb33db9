"""The physical cores that this process may use: their hardware threads, speeds and memory nodes, as /sys tells them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from .facts import EFFICIENT, Core, MemoryNode
from .procfs import read

SAME_SOCKET = 20  # a node's distance to itself is 10, to others of its socket 11 to 16, to those of another socket more


def cores(allowed: Iterable[int], root: Path = Path("/")) -> tuple[Core, ...]:
    """Cores that have a hardware thread among `allowed`, in the order of their numbers.

    What /sys does not say keeps its default: each logical CPU is then a core of its own, all are equally fast, and
    there is one memory node.
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
    """The nodes that have memory; () where there is one, or /sys does not say."""
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
    """0-3,8 -> {0, 1, 2, 3, 8}; empty for what is no such list."""
    if not re.fullmatch(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", text):
        return frozenset()
    ends = [part.partition("-") for part in text.split(",")]
    return frozenset(cpu for first, _, last in ends for cpu in range(int(first), int(last or first) + 1))


def _core_of(root: Path, cpu: int) -> tuple[str, ...]:
    """Names the physical core of a logical CPU; the CPU itself where /sys does not say.

    By the core's logical CPUs where they are listed: a core's number is unique within its die or cluster only, and
    since Linux 6.0 a device tree's clusters are one package.
    """
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    for name in ("core_cpus_list", "thread_siblings_list"):  # the second before Linux 5.3
        if siblings := read(topology / name):
            return (siblings,)
    package, core = read(topology / "physical_package_id"), read(topology / "core_id")
    return (package, core) if package and core else (f"cpu{cpu}",)


def _speeds(root: Path, cpus: Sequence[int]) -> list[float]:
    """Of each CPU, of the fastest: by the scheduler's rating, else by the highest clock; 1 where one is not known."""
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

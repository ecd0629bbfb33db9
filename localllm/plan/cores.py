"""CPU thread count, core affinity and NUMA placement, each with its reason.

One thread per core, because the hardware threads of a core share its vector units. The pool hands out work in small
pieces (kernels/cpu/pool.h), so a somewhat slower core simply takes fewer of them; a much slower one would delay the end
of every call and is left idle. Threads are not pinned to single CPUs, which would keep them from moving away when
another process takes theirs. They get an affinity mask, and only when some cores must stay idle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from localllm.device.facts import Core, CpuFacts, MemoryNode
from localllm.terminal import counted, gib

EACH_CORE = "one per core"
SLOWEST = 0.5  # cores below this fraction of the fastest core's speed stay idle
FREE_SHARE = 0.9  # a model larger than this fraction of a socket's free memory is spread over all sockets


@dataclass(frozen=True, slots=True)
class Threads:
    """The compute threads on the CPU."""

    count: int
    why: str
    placement: str = ""  # why these cores and nodes, on a machine with several NUMA nodes
    cpus: tuple[int, ...] = ()  # affinity mask; () for every CPU this process may use
    nodes: tuple[int, ...] = ()  # NUMA nodes to interleave memory over; () for first-touch

    @property
    def reasons(self) -> tuple[str, ...]:
        said = "; ".join(filter(None, (self.why, self.placement)))
        return (f"threads {self.count}: {said}",) if said else ()


def chosen_threads(cpu: CpuFacts, asked: int | str = "auto", need_bytes: int = 0) -> Threads:
    """Choose the compute threads for this CPU.

    asked       `engine.threads`; a number is used as given, whatever the cores
    need_bytes  bytes of the model held in host memory
    """
    fast = [core for core in cpu.cores if core.speed >= SLOWEST]
    used, nodes, placement = _placed(fast, cpu.nodes, need_bytes)
    count = min(len(used), whole_quota(cpu)) if used else cpu.cores_usable
    if not isinstance(asked, int):
        asked, why = max(1, count), _why(cpu, used, count)
    elif asked > len(used):
        return Threads(asked, "as requested", nodes=_indices(cpu.nodes, cpu.cores))
    else:
        why = "as requested"
    confined = used if len(used) < len(cpu.cores) else ()
    cpus = tuple(sorted(number for core in confined for number in core.cpus))
    return Threads(asked, why, placement, cpus, nodes)


def whole_quota(cpu: CpuFacts) -> int:
    """CPUs that the control group allows, rounded down, at least 1: one more thread would be throttled each period."""
    return max(1, math.floor(cpu.quota)) if cpu.quota else max(1, len(cpu.cores), cpu.cores_usable)


def over_quota(cpu: CpuFacts, threads: int) -> str:
    """Warning text for more threads than the control group's CPU quota; "" while the quota holds them all."""
    if not cpu.quota or threads <= cpu.quota or threads == 1:
        return ""
    return (
        f"{counted(threads, 'thread')}, but the control group allows {cpu.quota:g} CPUs:"
        " all of them are throttled in every period"
    )


def _placed(
    cores: Sequence[Core], nodes: Sequence[MemoryNode], need_bytes: int
) -> tuple[Sequence[Core], tuple[int, ...], str]:
    """(cores, NUMA nodes to interleave over, why). One socket if its free memory holds the model, else all of them."""
    sockets = {node.near: [other for other in nodes if other.index in node.near] for node in nodes}
    local = {near: [core for core in cores if core.node in near] for near in sockets}
    local = {near: own for near, own in local.items() if own}
    if len(local) < 2:
        spread = _indices(nodes, cores)
        return cores, spread, f"memory interleaved over the {len(spread)} NUMA nodes of one socket" if spread else ""
    free = {near: sum(node.free_bytes for node in sockets[near]) for near in local}
    roomy = [near for near in local if need_bytes <= FREE_SHARE * free[near]]
    if not roomy:
        said = f"{gib(need_bytes, 1)} exceeds one socket's free memory, so all {len(local)} sockets are used"
        return cores, _indices(nodes, cores), said
    best = max(roomy, key=lambda near: (len(local[near]), free[near]))
    own = local[best]
    said = f"{counted(len(cores) - len(own), 'core')} on other sockets stay idle: the model fits in one socket's memory"
    return own, _indices(sockets[best], own), said


def _indices(nodes: Sequence[MemoryNode], cores: Sequence[Core]) -> tuple[int, ...]:
    """Indices of the nodes local to `cores`; () if there is only one."""
    beside = {core.node for core in cores}
    found = tuple(node.index for node in nodes if node.index in beside)
    return found if len(found) > 1 else ()


def _why(cpu: CpuFacts, used: Sequence[Core], count: int) -> str:
    if used and count < len(used) or not used and cpu.quota:
        return f"the control group allows {cpu.quota:g} CPUs"
    slow = [core for core in cpu.cores if core.speed < SLOWEST]
    efficient = sum(core.efficient for core in used)
    kinds = [
        f"{number} {name}" for number, name in ((count - efficient, "performance"), (efficient, "efficient")) if number
    ]
    is_mixed = efficient or slow
    said = f"{' and '.join(kinds)} cores" if is_mixed else EACH_CORE
    if slow:
        said += f"; {counted(len(slow), 'slower core')} left idle, below {SLOWEST:.0%} of the fastest core's speed"
    return said

"""How many threads compute on the CPU, on which cores they may run, and where their memory lies, with the reason.

One thread a core: the hardware threads of a core share its vector units. The pool hands out work in pieces, so a slower
core does less of it (kernels/cpu/pool.h); one that is slower by far would hold up the others at the end of each call.
No thread is bound to one CPU: where another process takes that, the thread could not go elsewhere. The kernel is told a
set of CPUs, and only where some cores shall stay without work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from localllm.device.facts import Core, CpuFacts, MemoryNode
from localllm.terminal import counted, gib

EACH_CORE = "one for each core"
SLOWEST = 0.5  # of the fastest core's speed: cores below it are left alone
FREE_SHARE = 0.9  # of a node's free memory, what a model may take before it is laid over all of them


@dataclass(frozen=True, slots=True)
class Threads:
    """What computes on the CPU."""

    count: int
    why: str
    placement: str = ""  # why these cores and nodes, where there are several nodes
    cpus: tuple[int, ...] = ()  # which the threads may use; () for all that this process may
    nodes: tuple[int, ...] = ()  # over which memory is spread page by page; () for the node of who writes it first

    @property
    def reasons(self) -> tuple[str, ...]:
        said = "; ".join(filter(None, (self.why, self.placement)))
        return (f"threads {self.count}: {said}",) if said else ()


def chosen_threads(cpu: CpuFacts, asked: int | str = "auto", need_bytes: int = 0) -> Threads:
    """What computes on this CPU.

    asked       `engine.threads`: a number holds, whatever the cores
    need_bytes  what the CPU keeps in memory of the model
    """
    fast = [core for core in cpu.cores if core.speed >= SLOWEST]
    used, nodes, placement = _placed(fast, cpu.nodes, need_bytes)
    count = min(len(used), whole_quota(cpu)) if used else cpu.cores_usable
    if not isinstance(asked, int):
        asked, why = max(1, count), _why(cpu, used, count)
    elif asked > len(used):
        return Threads(asked, "as asked for", nodes=_indices(cpu.nodes, cpu.cores))
    else:
        why = "as asked for"
    confined = used if len(used) < len(cpu.cores) else ()
    cpus = tuple(sorted(number for core in confined for number in core.cpus))
    return Threads(asked, why, placement, cpus, nodes)


def whole_quota(cpu: CpuFacts) -> int:
    """CPUs that a control group allows, rounded down to at least 1: one more thread would be stopped in each period."""
    return max(1, math.floor(cpu.quota)) if cpu.quota else max(1, len(cpu.cores), cpu.cores_usable)


def over_quota(cpu: CpuFacts, threads: int) -> str:
    """What a control group's limit does to so many threads; "" where it does nothing."""
    if not cpu.quota or threads <= cpu.quota or threads == 1:
        return ""
    return (
        f"{counted(threads, 'thread')}, but a control group allows {cpu.quota:g} CPUs:"
        " all of them are stopped for a part of each period"
    )


def _placed(
    cores: Sequence[Core], nodes: Sequence[MemoryNode], need_bytes: int
) -> tuple[Sequence[Core], tuple[int, ...], str]:
    """(the cores of one socket, or all where the model is larger than its free memory; nodes to spread over; why)"""
    sockets = {node.near: [other for other in nodes if other.index in node.near] for node in nodes}
    local = {near: [core for core in cores if core.node in near] for near in sockets}
    local = {near: own for near, own in local.items() if own}
    if len(local) < 2:
        spread = _indices(nodes, cores)
        return cores, spread, f"memory spread over {len(spread)} nodes of one socket" if spread else ""
    free = {near: sum(node.free_bytes for node in sockets[near]) for near in local}
    roomy = [near for near in local if need_bytes <= FREE_SHARE * free[near]]
    if not roomy:
        said = f"{gib(need_bytes, 1)} are more than a socket has free, so the cores and memory of {len(local)} are used"
        return cores, _indices(nodes, cores), said
    best = max(roomy, key=lambda near: (len(local[near]), free[near]))
    own = local[best]
    said = f"{counted(len(cores) - len(own), 'core')} of other sockets left alone: this one's memory has room"
    return own, _indices(sockets[best], own), said


def _indices(nodes: Sequence[MemoryNode], cores: Sequence[Core]) -> tuple[int, ...]:
    """The nodes to spread memory over: those beside the cores, where these are several."""
    beside = {core.node for core in cores}
    found = tuple(node.index for node in nodes if node.index in beside)
    return found if len(found) > 1 else ()


def _why(cpu: CpuFacts, used: Sequence[Core], count: int) -> str:
    if used and count < len(used) or not used and cpu.quota:
        return f"a control group allows {cpu.quota:g} CPUs"
    slow = [core for core in cpu.cores if core.speed < SLOWEST]
    efficient = sum(core.efficient for core in used)
    kinds = [
        f"{number} {name}" for number, name in ((count - efficient, "performance"), (efficient, "efficient")) if number
    ]
    is_mixed = efficient or slow
    said = f"{' and '.join(kinds)} cores" if is_mixed else EACH_CORE
    if slow:
        said += f"; {counted(len(slow), 'slower core')} left alone, below {SLOWEST:g} of the fastest's speed"
    return said

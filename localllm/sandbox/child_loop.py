"""The inside of a child process (`child.py`): its limits, and the loop that answers requests until input ends."""

from __future__ import annotations

import resource
import signal
import struct
import sys
from collections.abc import Callable

HEADER = struct.Struct("<I")


def confine(memory_bytes: int, stack_bytes: int | None = None) -> None:
    """Limit this process from now on: it can write no files, start no processes, and allocate only so much memory.

    memory_bytes  address space beyond what is in use now
    stack_bytes   stack of the main thread; None leaves it unchanged
    """
    with open("/proc/self/statm", "rb") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + memory_bytes, size + memory_bytes))
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(limit, (0, 0))  # no core files, no file writes, no processes
    if stack_bytes is not None:
        resource.setrlimit(resource.RLIMIT_STACK, (stack_bytes, stack_bytes))


def serve(answer: Callable[[bytes], bytes], *, alarm_s: float = 0.0, cpu_s: float = 0.0) -> None:
    """Signal readiness (an empty message), then answer requests until input ends.

    alarm_s  wall time per answer, after which a stuck child whose parent is gone ends; 0: no limit
    cpu_s    CPU time per answer, enforced by the default action of SIGPROF; 0: no limit
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl+C
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    answers.write(HEADER.pack(0))
    answers.flush()
    while True:
        header = requests.read(HEADER.size)
        if len(header) < HEADER.size:
            return
        signal.setitimer(signal.ITIMER_REAL, alarm_s)  # both signals end the process by default
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        said = answer(requests.read(HEADER.unpack(header)[0]))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(HEADER.pack(len(said)) + said)
        answers.flush()

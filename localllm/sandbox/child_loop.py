"""The inside of a child process (`child.py`): its limits, and the loop that answers requests until the input ends."""

from __future__ import annotations

import resource
import signal
import struct
import sys
from collections.abc import Callable

HEADER = struct.Struct("<I")


def confine(memory_bytes: int, stack_bytes: int | None = None) -> None:
    """Limits that hold from now on: no files written, no processes, so much memory beyond what is in use already.

    memory_bytes  address space beyond the present one
    stack_bytes   of the main thread; None leaves it
    """
    with open("/proc/self/statm", "rb") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + memory_bytes, size + memory_bytes))
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(limit, (0, 0))  # no core files, no bytes into any file, no processes
    if stack_bytes is not None:
        resource.setrlimit(resource.RLIMIT_STACK, (stack_bytes, stack_bytes))


def serve(answer: Callable[[bytes], bytes], *, alarm_s: float = 0.0, cpu_s: float = 0.0) -> None:
    """Say that all is ready (an empty answer), then answer until the input ends.

    alarm_s  ends a wedged child whose parent is gone; the parent gives up sooner; 0: never
    cpu_s    processor time that one answer may take, by the default action of SIGPROF; 0: any
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    answers.write(HEADER.pack(0))
    answers.flush()
    while True:
        header = requests.read(HEADER.size)
        if len(header) < HEADER.size:
            return
        signal.setitimer(signal.ITIMER_REAL, alarm_s)  # the default action of the signals ends the process
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        said = answer(requests.read(HEADER.unpack(header)[0]))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(HEADER.pack(len(said)) + said)
        answers.flush()

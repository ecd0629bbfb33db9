"""`doctor --deep`: what can only be known by measuring. About twenty seconds; torch runs in a child process.

Each probe yields one finding as soon as it has it, so that Ctrl-C keeps what was measured. A child that does not answer
in time is ended: a copy between two cards may hang although the driver grants it.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from localllm.device import GpuFacts, read_bandwidth
from localllm.device.facts import MachineFacts
from localllm.hub.local import scan
from localllm.interface import Check

from .finding import HARDWARE, SOFTWARE, STORAGE, Survey, found

START_S = 120.0  # importing torch on a cold disk, and the first CUDA call
ANSWER_S = 60.0
READ_BYTES = 1 << 30
READ_S = 3.0
PIECE = 8 << 20
PCIE_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}  # bytes per second of one lane
GOOD_SHARE = {"bw.vram": 0.75, "bw.h2d": 0.55}  # of what is on the box; a copy never reaches all of it

Tell = Callable[[str], None]


class Child:
    """The process that measures with torch. Ended with its whole group at the end, also by Ctrl-C."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._limit = START_S

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Kill it, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe:
                    pipe.close()
        self._process = None
        self._limit = START_S

    def ask(self, name: str, *arguments: Any, limit_s: float = ANSWER_S) -> Any:
        """One job's result. Raises ProbeError when it fails, hangs or takes the process with it."""
        process = self._process or self._start()
        assert process.stdin and process.stdout
        limit = max(limit_s, self._limit)
        try:
            process.stdin.write(json.dumps([name, *arguments]).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            self.end()
            raise ProbeError("the measuring process has ended") from None
        deadline, line = time.monotonic() + limit, b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.end()
                raise ProbeError(f"no answer within {limit:.0f} s: it hangs")
            piece = os.read(process.stdout.fileno(), 65536)
            if not piece:
                code = process.wait()
                self.end()
                raise ProbeError(f"the measuring process ended with code {code}")
            line += piece
        self._limit = 0.0
        answer = json.loads(line)
        if "error" in answer:
            raise ProbeError(str(answer["error"]))
        return answer["ok"]

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "localllm.doctor.probe_child"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        return self._process


class ProbeError(Exception):
    """Why a measurement failed."""


class Probe(NamedTuple):
    """One measurement."""

    id: str
    what: str  # what is measured, in words
    run: Callable[[Child], Check]


def deep_checks(survey: Survey, tell: Tell, only: Collection[str] = ()) -> Iterator[Check]:
    """Measure one thing after the other. `tell` hears what comes next, before it starts.

    only   ids of probes; all without one
    """
    with Child() as child:
        for probe in probes(survey, only):
            tell(probe.what)
            yield probe.run(child)


def probes(survey: Survey, only: Collection[str] = ()) -> list[Probe]:
    """What would be measured here, in order."""
    return [probe for probe in _probes(survey.machine) if not only or probe.id in only]


def _probes(machine: MachineFacts) -> Iterator[Probe]:
    yield Probe("bw.ram", "memory bandwidth of the CPU", lambda child: _ram(machine))
    yield Probe("disk.read", "disk", lambda child: disk_read())
    if not machine.torch_version:
        return
    yield Probe(
        "gemm.cpu",
        "matrix product on the CPU",
        lambda child: _judged("gemm.cpu", HARDWARE, lambda: _gemm(child, "cpu", [("float32", 1024)])),
    )
    if machine.torch_cuda:
        for number, gpu in enumerate(machine.gpus):
            yield from _gpu_probes(number, gpu, len(machine.gpus))
        for link in machine.gpu_links:
            between = f"copy between GPU {link.first} and GPU {link.second}"
            yield Probe("p2p.copy", between, functools.partial(_peer, first=link.first, second=link.second))
    yield Probe("kernel.selftest", "kernels against their plain twins", lambda child: _selftest(child, machine))


def _gpu_probes(number: int, gpu: GpuFacts, count: int) -> Iterator[Probe]:
    where, device = (f"GPU {number}: " if count > 1 else ""), f"cuda:{number}"
    kinds = [("bfloat16" if gpu.has_bf16 else "float16", 8192)]
    measured: tuple[tuple[str, str, Callable[[Child], Check]], ...] = (
        ("bw.vram", "copy inside the card's memory", lambda child: _vram(child, device, gpu, where)),
        ("gemm.tflops", "matrix product", lambda child: _gemm(child, device, kinds, where)),
        ("bw.h2d", "copies over PCIe", lambda child: _h2d(child, device, gpu, where)),
    )
    for check_id, what, measure in measured:
        yield Probe(check_id, where + what, functools.partial(_measured, check_id, measure))


def _measured(check_id: str, measure: Callable[[Child], Check], child: Child) -> Check:
    return _judged(check_id, HARDWARE, lambda: measure(child))


# --- with torch -------------------------------------------------------------------------------------------------------


def _judged(check_id: str, group: str, measure: Callable[[], Check]) -> Check:
    try:
        return measure()
    except ProbeError as error:
        fix = "nvidia-smi" if check_id != "gemm.cpu" else "localllm doctor --only torch"
        return found(check_id, group, "fail", f"could not be measured: {error}", fix=fix)


def _vram(child: Child, device: str, gpu: GpuFacts, where: str) -> Check:
    speed = child.ask("copy", device)
    data = {"bytes_s": speed, "spec_bytes_s": gpu.bandwidth or None}
    title = f"{where}{speed / 1e9:,.0f} GB/s"
    if not gpu.bandwidth:
        return found("bw.vram", HARDWARE, "ok", title, **data)
    share = speed / gpu.bandwidth
    title += f", {share:.0%} of {gpu.bandwidth / 1e9:,.0f} GB/s"
    if share < GOOD_SHARE["bw.vram"]:
        detail = "another program on the card, a low memory clock, or a power limit"
        fix = "nvidia-smi -q -d PERFORMANCE,CLOCK"
        return found("bw.vram", HARDWARE, "warn", title, detail, fix, **data)
    return found("bw.vram", HARDWARE, "ok", title, **data)


def _gemm(child: Child, device: str, kinds: list[tuple[str, int]], where: str = "") -> Check:
    check_id = "gemm.cpu" if device == "cpu" else "gemm.tflops"
    speeds = {dtype: child.ask("matmul", device, dtype, size) for dtype, size in kinds}
    text = ", ".join(f"{_operations(speed)} in {dtype}" for dtype, speed in speeds.items())
    return found(check_id, HARDWARE, "ok", f"{where}{text}", **speeds)


def _operations(speed: float) -> str:
    return f"{speed / 1e12:,.1f} TFLOPS" if speed >= 1e12 else f"{speed / 1e9:,.0f} GFLOPS"


def _h2d(child: Child, device: str, gpu: GpuFacts, where: str) -> Check:
    rates = child.ask("transfer", device)
    speed, back, plain = rates.get("h2d", 0.0), rates.get("d2h", 0.0), rates["h2d_pageable"]
    title = f"{where}{speed / 1e9:.1f} GB/s to the card, {back / 1e9:.1f} back, {plain / 1e9:.1f} from ordinary memory"
    most = PCIE_LANE.get(gpu.pcie_gen_max, 0.0) * gpu.pcie_width_max
    data = {**rates, "link_bytes_s": most or None}
    if most and not gpu.unified and speed < GOOD_SHARE["bw.h2d"] * most:
        title += f": PCIe {gpu.pcie_gen_max}.0 ×{gpu.pcie_width_max} would carry {most / 1e9:.0f}"
        detail = "a riser, a slot with fewer lanes, or a BIOS that holds the link down"
        return found("bw.h2d", HARDWARE, "warn", title, detail, "nvidia-smi -q -d PCI", **data)
    return found("bw.h2d", HARDWARE, "ok", title, **data)


def _peer(child: Child, first: int, second: int) -> Check:
    name = f"GPU {first} to GPU {second}"
    fix = "export NCCL_P2P_DISABLE=1"
    try:
        told = child.ask("peer", f"cuda:{first}", f"cuda:{second}", limit_s=20.0)
    except ProbeError as error:
        return found("p2p.copy", HARDWARE, "fail", f"{name}: {error}", "see rule R5", fix)
    if not told["whole"]:
        title = f"{name}: what arrived is not what was sent"
        return found("p2p.copy", HARDWARE, "fail", title, "iommu=off on the kernel's command line", fix, **told)
    return found("p2p.copy", HARDWARE, "ok", f"{name}: {told['bytes_s'] / 1e9:.1f} GB/s, arrived whole", **told)


def _selftest(child: Child, machine: MachineFacts) -> Check:
    usable = machine.gpus if machine.torch_cuda else ()
    card = max(usable, key=lambda gpu: gpu.free_bytes, default=None)
    arguments: tuple[Any, ...] = ("cpu", 0, "float32")
    if card is not None:
        dtype = "bfloat16" if card.has_bf16 else "float16"
        arguments = (f"cuda:{machine.gpus.index(card)}", card.capability, dtype)
    try:
        told = child.ask("selftest", *arguments, limit_s=300.0)
    except ProbeError as error:
        return found("kernel.selftest", SOFTWARE, "fail", f"could not be run: {error}", fix="localllm doctor -vv")
    if told["failures"]:
        title = f"{len(told['failures'])} of {told['run']} kernels are wrong here; the next ones take over"
        fix = "localllm doctor --report"
        return found("kernel.selftest", SOFTWARE, "warn", title, told["failures"][0], fix, **told)
    title = f"{told['run']} kernels agree with their plain twins"
    return found("kernel.selftest", SOFTWARE, "ok", title, **told)


# --- without ----------------------------------------------------------------------------------------------------------


def _ram(machine: MachineFacts) -> Check:
    speed = read_bandwidth(machine.cpu.cores_usable, machine.cpu.cache_bytes)
    title = f"{speed / 1e9:.1f} GB/s read by {machine.cpu.cores_usable} cores"
    return found("bw.ram", HARDWARE, "ok", title, bytes_s=speed)


def disk_read() -> Check:
    """Read the largest model on this machine past the page cache; nothing is written."""
    models = [f for f in scan() if not f.problem]
    files = [p for m in models for p in ([m.path] if m.path.is_file() else sorted(m.path.glob("*.safetensors")))]
    largest = max(files, key=lambda p: p.stat().st_size, default=None)
    if largest is None:
        return found("disk.read", STORAGE, "skip", "no model here to read")
    try:
        count, seconds = read_file(largest)
    except OSError as error:
        return found("disk.read", STORAGE, "fail", f"{largest.name}: {error.strerror}", fix="localllm ls --all")
    speed = count / seconds
    data: dict[str, Any] = {"bytes_s": speed, "bytes": count, "file": largest.name}
    title = f"{speed / 1e6:,.0f} MB/s: 10 GB of weights take {10e9 / speed:.0f} s from the disk"
    if speed < 300e6:
        return found("disk.read", STORAGE, "warn", title, "", "export HF_HOME=/an/nvme/disk/hf", **data)
    return found("disk.read", STORAGE, "ok", title, **data)


def read_file(path: Path, most: int = READ_BYTES, seconds: float = READ_S) -> tuple[int, float]:
    """(bytes read, seconds) of a file from its disk: around the page cache where the file system can, else dropped
    from it first.
    """
    flags = os.O_RDONLY | getattr(os, "O_DIRECT", 0)
    try:
        handle = os.open(path, flags)
    except OSError:
        handle = os.open(path, os.O_RDONLY)
    buffer = mmap.mmap(-1, PIECE)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        total, start = 0, time.perf_counter()
        while total < most and time.perf_counter() - start < seconds:
            got = os.readv(handle, [buffer])
            total += got
            if got < PIECE:
                break
        return total, max(time.perf_counter() - start, 1e-9)
    finally:
        buffer.close()
        os.close(handle)

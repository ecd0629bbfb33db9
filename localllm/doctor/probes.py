"""`doctor --deep`: measurements of bandwidth, compute and kernels. About 20 s; torch runs in a child process.

Each probe yields its finding at once, so Ctrl+C keeps what was measured. A child that does not answer in time is
killed: a copy between two GPUs can hang even though the driver allows it.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from localllm.device import GpuFacts, read_bandwidth
from localllm.device.facts import PCIE_LANE, MachineFacts
from localllm.errors import InternalError
from localllm.hub.local import scan
from localllm.interface import Check
from localllm.plan import speeds
from localllm.sandbox.child import Child, ChildDied, ChildLate

from .finding import HARDWARE, SOFTWARE, STORAGE, Survey, fail, ok, skip, warn

START_S = 120.0  # includes importing torch from a cold disk and the first CUDA call
ANSWER_S = 60.0
READ_BYTES = 1 << 30
READ_S = 3.0
PIECE = 8 << 20
GOOD_SHARE = {"bw.vram": 0.75, "bw.h2d": 0.55}  # fraction of the specified rate that is acceptable; no copy reaches all

Tell = Callable[[str], None]


class Measurements(Child):
    """The process that measures with torch."""

    def __init__(self) -> None:
        super().__init__("localllm.doctor.probe_child", "the measuring process", trusted=True)
        self._warm: int | None = None  # the child's process id once it has answered

    def ask(self, name: str, *arguments: Any, limit_s: float = ANSWER_S) -> Any:
        """Run one job and return its result. Raises ProbeError if it fails, hangs or kills the process."""
        limit = limit_s if self._warm is not None and self._warm == self.pid else max(limit_s, START_S)
        try:
            answer = json.loads(self.exchange(json.dumps([name, *arguments]).encode(), limit))
        except ChildLate:
            raise ProbeError(f"no answer within {limit:.0f} s") from None
        except ChildDied as died:
            raise ProbeError(f"the measuring process exited with code {died.code}") from None
        except InternalError as error:  # the process did not start
            raise ProbeError(error.message) from None
        self._warm = self.pid
        if "error" in answer:
            raise ProbeError(str(answer["error"]))
        return answer["ok"]


class ProbeError(Exception):
    """A failed measurement, with the reason."""


class Probe(NamedTuple):
    """One measurement."""

    id: str
    what: str  # shown while it runs
    run: Callable[[Measurements], Check]
    group: str = HARDWARE
    fix: str = "nvidia-smi"  # shown if it fails


def deep_checks(survey: Survey, tell: Tell, only: Collection[str] = ()) -> Iterator[Check]:
    """Run the probes one by one. `tell` is called with a description before each of them.

    only   ids of probes to run; all if empty
    """
    with closing(Measurements()) as child:
        for probe in probes(survey, only):
            tell(probe.what)
            try:
                check = probe.run(child)
            except ProbeError as error:
                check = fail(f"{'not run' if probe.group == SOFTWARE else 'not measured'}: {error}", fix=probe.fix)
            yield replace(check, id=probe.id, group=probe.group)


def probes(survey: Survey, only: Collection[str] = ()) -> list[Probe]:
    """The probes for this machine, in order."""
    return [probe for probe in _probes(survey.machine) if not only or probe.id in only]


def _probes(machine: MachineFacts) -> Iterator[Probe]:
    yield Probe("bw.ram", "memory bandwidth of the CPU", lambda child: _ram(machine))
    yield Probe("disk.read", "disk read speed", lambda child: disk_read(), STORAGE)
    if not machine.torch_version:
        return
    product = partial(_gemm, device="cpu", dtype="float32", size=1024)
    yield Probe("gemm.cpu", "matrix multiplication on the CPU", product, fix="localllm doctor --only torch")
    for number, gpu in enumerate(machine.gpus if machine.torch_cuda else ()):
        where, device = (f"GPU {number}: " if len(machine.gpus) > 1 else ""), f"cuda:{number}"
        dtype = "bfloat16" if gpu.has_bf16 else "float16"
        copy = partial(_vram, device=device, gpu=gpu, where=where)
        product = partial(_gemm, device=device, dtype=dtype, size=8192, where=where)
        yield Probe("bw.vram", f"{where}copy within GPU memory", copy)
        yield Probe("gemm.tflops", f"{where}matrix multiplication", product)
        yield Probe("bw.h2d", f"{where}copies over PCIe", partial(_h2d, device=device, gpu=gpu, where=where))
    for link in machine.gpu_links if machine.torch_cuda else ():
        between = f"copy between GPU {link.first} and GPU {link.second}"
        yield Probe("p2p.copy", between, partial(_peer, first=link.first, second=link.second))
    devices = [f"cuda:{n}" for n in range(len(machine.gpus))] if machine.torch_cuda and len(machine.gpus) > 1 else []
    between = "all-reduce over all GPUs" if devices else "all-reduce over two processes on the CPU"
    yield Probe("ranks.link", between, partial(_link, machine=machine, devices=devices or ["cpu", "cpu"]))
    against = partial(_selftest, machine=machine)
    yield Probe("kernel.selftest", "kernels against their references", against, SOFTWARE, "localllm doctor -vv")


# --- with torch -------------------------------------------------------------------------------------------------------


def _vram(child: Measurements, device: str, gpu: GpuFacts, where: str) -> Check:
    speed = child.ask("copy", device)
    data = {"bytes_s": speed, "spec_bytes_s": gpu.bandwidth or None}
    title = f"{where}{speed / 1e9:,.0f} GB/s"
    if not gpu.bandwidth:
        return ok(title, **data)
    share = speed / gpu.bandwidth
    title += f", {share:.0%} of {gpu.bandwidth / 1e9:,.0f} GB/s"
    if share < GOOD_SHARE["bw.vram"]:
        detail = "possible causes: another program on the GPU, a low memory clock, or a power limit"
        return warn(title, detail, "nvidia-smi -q -d PERFORMANCE,CLOCK", **data)
    return ok(title, **data)


def _gemm(child: Measurements, device: str, dtype: str, size: int, where: str = "") -> Check:
    speed = child.ask("matmul", device, dtype, size)
    operations = f"{speed / 1e12:,.1f} TFLOPS" if speed >= 1e12 else f"{speed / 1e9:,.0f} GFLOPS"
    return ok(f"{where}{operations} in {dtype}", **{dtype: speed})


def _h2d(child: Measurements, device: str, gpu: GpuFacts, where: str) -> Check:
    rates = child.ask("transfer", device)
    speed, back, plain = rates.get("h2d", 0.0), rates.get("d2h", 0.0), rates["h2d_pageable"]
    title = f"{where}{speed / 1e9:.1f} GB/s to the GPU, {back / 1e9:.1f} back, {plain / 1e9:.1f} from pageable memory"
    most = PCIE_LANE.get(gpu.pcie_gen_max, 0.0) * gpu.pcie_width_max
    data = {**rates, "link_bytes_s": most or None}
    if most and not gpu.unified and speed < GOOD_SHARE["bw.h2d"] * most:
        title += f", but PCIe {gpu.pcie_gen_max}.0 ×{gpu.pcie_width_max} allows {most / 1e9:.0f}"
        detail = "possible causes: a riser, a slot with fewer lanes, or a BIOS setting that limits the link"
        return warn(title, detail, "nvidia-smi -q -d PCI", **data)
    return ok(title, **data)


def _peer(child: Measurements, first: int, second: int) -> Check:
    name = f"GPU {first} to GPU {second}"
    fix = "export NCCL_P2P_DISABLE=1"
    try:
        told = child.ask("peer", f"cuda:{first}", f"cuda:{second}", limit_s=20.0)
    except ProbeError as error:
        return fail(f"{name}: {error}", "see rule R5", fix)
    if not told["whole"]:
        title = f"{name}: the copied data is corrupt"
        return fail(title, "iommu=off on the kernel's command line", fix, **told)
    return ok(f"{name}: {told['bytes_s'] / 1e9:.1f} GB/s, data intact", **told)


def _link(child: Measurements, machine: MachineFacts, devices: list[str]) -> Check:
    """Measure the all-reduce of `--tensor-parallel` and save it for later plans."""
    told = child.ask("link", devices, limit_s=180.0)
    link = speeds.Link(told["sum_s"], told["bytes_s"])
    cards = machine.gpus if devices[0] != "cpu" else ()
    speeds.remember_link(speeds.link_name(machine, cards), link)
    where = f"{len(devices)} {'GPUs' if cards else 'processes on the CPU'}"
    return ok(
        f"{where}: {1e6 * link.sum_s:.0f} µs per all-reduce, {link.bytes_s / 1e9:.1f} GB/s for large ones", **told
    )


def _selftest(child: Measurements, machine: MachineFacts) -> Check:
    arguments: tuple[Any, ...] = ("cpu", 0, "float32")
    if machine.torch_cuda and machine.gpus:
        card = max(machine.gpus, key=lambda gpu: gpu.free_bytes)
        dtype = "bfloat16" if card.has_bf16 else "float16"
        arguments = (f"cuda:{machine.gpus.index(card)}", card.capability, dtype)
    told = child.ask("selftest", *arguments, limit_s=300.0)
    if told["failures"] and not told["run"]:
        return warn("the kernels could not be tested", told["failures"][0], "localllm doctor --report", **told)
    if told["failures"]:
        title = f"{len(told['failures'])} of {told['run']} kernels return wrong results here; fallbacks replace them"
        return warn(title, told["failures"][0], "localllm doctor --report", **told)
    return ok(f"{told['run']} kernels match their references", **told)


# --- without ----------------------------------------------------------------------------------------------------------


def _ram(machine: MachineFacts) -> Check:
    cores = machine.cpu.cores_usable
    speed = read_bandwidth(cores, machine.cpu.cache_bytes)
    return ok(f"{speed / 1e9:.1f} GB/s read by {cores} cores", bytes_s=speed)


def disk_read() -> Check:
    """Read the largest local model, bypassing the page cache; nothing is written."""
    models = [f for f in scan() if not f.problem]
    files = [p for m in models for p in ([m.path] if m.path.is_file() else sorted(m.path.glob("*.safetensors")))]
    largest = max(files, key=lambda p: p.stat().st_size, default=None)
    if largest is None:
        return skip("no local model to read")
    try:
        count, seconds = read_file(largest)
    except OSError as error:
        return fail(f"{largest.name}: {error.strerror}", fix="localllm ls --all")
    speed = count / seconds
    data: dict[str, Any] = {"bytes_s": speed, "bytes": count, "file": largest.name}
    title = f"{speed / 1e6:,.0f} MB/s: loading 10 GB of weights takes {10e9 / speed:.0f} s"
    if speed < 300e6:
        return warn(title, "", "export HF_HOME=/an/nvme/disk/hf", **data)
    return ok(title, **data)


def read_file(path: Path, most: int = READ_BYTES, seconds: float = READ_S) -> tuple[int, float]:
    """Time reading a file from disk: (bytes read, seconds). Uses O_DIRECT if possible, else drops its cached pages."""
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

"""`doctor --deep`: what can only be known by measuring. About twenty seconds; torch runs in a child process.

Each probe yields one finding as soon as it has it, so that Ctrl-C keeps what was measured. A child that does not answer
in time is ended: a copy between two cards may hang although the driver grants it.
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

START_S = 120.0  # importing torch on a cold disk, and the first CUDA call
ANSWER_S = 60.0
READ_BYTES = 1 << 30
READ_S = 3.0
PIECE = 8 << 20
GOOD_SHARE = {"bw.vram": 0.75, "bw.h2d": 0.55}  # of what is on the box; a copy never reaches all of it

Tell = Callable[[str], None]


class Measurements(Child):
    """The process that measures with torch."""

    def __init__(self) -> None:
        super().__init__("localllm.doctor.probe_child", "the process that measures", trusted=True)
        self._warm: int | None = None  # its process id once it has answered

    def ask(self, name: str, *arguments: Any, limit_s: float = ANSWER_S) -> Any:
        """One job's result. Raises ProbeError when it fails, hangs or takes the process with it."""
        limit = limit_s if self._warm is not None and self._warm == self.pid else max(limit_s, START_S)
        try:
            answer = json.loads(self.exchange(json.dumps([name, *arguments]).encode(), limit))
        except ChildLate:
            raise ProbeError(f"no answer within {limit:.0f} s: it hangs") from None
        except ChildDied as died:
            raise ProbeError(f"the measuring process ended with code {died.code}") from None
        except InternalError as error:  # it did not even start
            raise ProbeError(error.message) from None
        self._warm = self.pid
        if "error" in answer:
            raise ProbeError(str(answer["error"]))
        return answer["ok"]


class ProbeError(Exception):
    """Why a measurement failed."""


class Probe(NamedTuple):
    """One measurement."""

    id: str
    what: str  # what is measured, in words
    run: Callable[[Measurements], Check]
    group: str = HARDWARE
    fix: str = "nvidia-smi"  # when it fails


def deep_checks(survey: Survey, tell: Tell, only: Collection[str] = ()) -> Iterator[Check]:
    """Measure one thing after the other. `tell` hears what comes next, before it starts.

    only   ids of probes; all without one
    """
    with closing(Measurements()) as child:
        for probe in probes(survey, only):
            tell(probe.what)
            try:
                check = probe.run(child)
            except ProbeError as error:
                check = fail(f"could not be {'run' if probe.group == SOFTWARE else 'measured'}: {error}", fix=probe.fix)
            yield replace(check, id=probe.id, group=probe.group)


def probes(survey: Survey, only: Collection[str] = ()) -> list[Probe]:
    """What would be measured here, in order."""
    return [probe for probe in _probes(survey.machine) if not only or probe.id in only]


def _probes(machine: MachineFacts) -> Iterator[Probe]:
    yield Probe("bw.ram", "memory bandwidth of the CPU", lambda child: _ram(machine))
    yield Probe("disk.read", "disk", lambda child: disk_read(), STORAGE)
    if not machine.torch_version:
        return
    product = partial(_gemm, device="cpu", dtype="float32", size=1024)
    yield Probe("gemm.cpu", "matrix product on the CPU", product, fix="localllm doctor --only torch")
    for number, gpu in enumerate(machine.gpus if machine.torch_cuda else ()):
        where, device = (f"GPU {number}: " if len(machine.gpus) > 1 else ""), f"cuda:{number}"
        dtype = "bfloat16" if gpu.has_bf16 else "float16"
        copy = partial(_vram, device=device, gpu=gpu, where=where)
        product = partial(_gemm, device=device, dtype=dtype, size=8192, where=where)
        yield Probe("bw.vram", f"{where}copy inside the card's memory", copy)
        yield Probe("gemm.tflops", f"{where}matrix product", product)
        yield Probe("bw.h2d", f"{where}copies over PCIe", partial(_h2d, device=device, gpu=gpu, where=where))
    for link in machine.gpu_links if machine.torch_cuda else ():
        between = f"copy between GPU {link.first} and GPU {link.second}"
        yield Probe("p2p.copy", between, partial(_peer, first=link.first, second=link.second))
    devices = [f"cuda:{n}" for n in range(len(machine.gpus))] if machine.torch_cuda and len(machine.gpus) > 1 else []
    between = "sums over all cards" if devices else "sums over two processes on the CPU"
    yield Probe("ranks.link", between, partial(_link, machine=machine, devices=devices or ["cpu", "cpu"]))
    against = partial(_selftest, machine=machine)
    yield Probe("kernel.selftest", "kernels against their reference", against, SOFTWARE, "localllm doctor -vv")


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
        detail = "another program on the card, a low memory clock, or a power limit"
        return warn(title, detail, "nvidia-smi -q -d PERFORMANCE,CLOCK", **data)
    return ok(title, **data)


def _gemm(child: Measurements, device: str, dtype: str, size: int, where: str = "") -> Check:
    speed = child.ask("matmul", device, dtype, size)
    operations = f"{speed / 1e12:,.1f} TFLOPS" if speed >= 1e12 else f"{speed / 1e9:,.0f} GFLOPS"
    return ok(f"{where}{operations} in {dtype}", **{dtype: speed})


def _h2d(child: Measurements, device: str, gpu: GpuFacts, where: str) -> Check:
    rates = child.ask("transfer", device)
    speed, back, plain = rates.get("h2d", 0.0), rates.get("d2h", 0.0), rates["h2d_pageable"]
    title = f"{where}{speed / 1e9:.1f} GB/s to the card, {back / 1e9:.1f} back, {plain / 1e9:.1f} from ordinary memory"
    most = PCIE_LANE.get(gpu.pcie_gen_max, 0.0) * gpu.pcie_width_max
    data = {**rates, "link_bytes_s": most or None}
    if most and not gpu.unified and speed < GOOD_SHARE["bw.h2d"] * most:
        title += f": PCIe {gpu.pcie_gen_max}.0 ×{gpu.pcie_width_max} would carry {most / 1e9:.0f}"
        detail = "a riser, a slot with fewer lanes, or a BIOS that holds the link down"
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
        title = f"{name}: what arrived is not what was sent"
        return fail(title, "iommu=off on the kernel's command line", fix, **told)
    return ok(f"{name}: {told['bytes_s'] / 1e9:.1f} GB/s, arrived whole", **told)


def _link(child: Measurements, machine: MachineFacts, devices: list[str]) -> Check:
    """What `--tensor-parallel` waits for; the next plan takes it."""
    told = child.ask("link", devices, limit_s=180.0)
    link = speeds.Link(told["sum_s"], told["bytes_s"])
    cards = machine.gpus if devices[0] != "cpu" else ()
    speeds.remember_link(speeds.link_name(machine, cards), link)
    where = f"{len(devices)} {'cards' if cards else 'processes on the CPU'}"
    return ok(f"{where}: a sum takes {1e6 * link.sum_s:.0f} µs, {link.bytes_s / 1e9:.1f} GB/s of large ones", **told)


def _selftest(child: Measurements, machine: MachineFacts) -> Check:
    arguments: tuple[Any, ...] = ("cpu", 0, "float32")
    if machine.torch_cuda and machine.gpus:
        card = max(machine.gpus, key=lambda gpu: gpu.free_bytes)
        dtype = "bfloat16" if card.has_bf16 else "float16"
        arguments = (f"cuda:{machine.gpus.index(card)}", card.capability, dtype)
    told = child.ask("selftest", *arguments, limit_s=300.0)
    if told["failures"]:
        title = f"{len(told['failures'])} of {told['run']} kernels are wrong here; the next ones take over"
        return warn(title, told["failures"][0], "localllm doctor --report", **told)
    return ok(f"{told['run']} kernels agree with their reference", **told)


# --- without ----------------------------------------------------------------------------------------------------------


def _ram(machine: MachineFacts) -> Check:
    cores = machine.cpu.cores_usable
    speed = read_bandwidth(cores, machine.cpu.cache_bytes)
    return ok(f"{speed / 1e9:.1f} GB/s read by {cores} cores", bytes_s=speed)


def disk_read() -> Check:
    """Read the largest model on this machine past the page cache; nothing is written."""
    models = [f for f in scan() if not f.problem]
    files = [p for m in models for p in ([m.path] if m.path.is_file() else sorted(m.path.glob("*.safetensors")))]
    largest = max(files, key=lambda p: p.stat().st_size, default=None)
    if largest is None:
        return skip("no model here to read")
    try:
        count, seconds = read_file(largest)
    except OSError as error:
        return fail(f"{largest.name}: {error.strerror}", fix="localllm ls --all")
    speed = count / seconds
    data: dict[str, Any] = {"bytes_s": speed, "bytes": count, "file": largest.name}
    title = f"{speed / 1e6:,.0f} MB/s: 10 GB of weights take {10e9 / speed:.0f} s from the disk"
    if speed < 300e6:
        return warn(title, "", "export HF_HOME=/an/nvme/disk/hf", **data)
    return ok(title, **data)


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

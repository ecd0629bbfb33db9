"""The child process of `doctor --deep` that measures with torch; `probes.py` starts it and talks to it in JSON.

If a GPU hangs or a driver aborts, only this process dies. Sizes are in bytes, times in seconds, rates in bytes or
operations per second.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.sandbox.child_loop import serve

if TYPE_CHECKING:
    import torch

COPY_BYTES = 512 << 20
HOST_BYTES = 256 << 20
HIDDEN, ROWS = 4096, 512  # hidden size of an 8B model, and tokens of a prefill step
LINK_S = 170.0  # limit for all ranks together; each of them imports torch
MEASURE_S = 0.4  # minimum duration of each measurement, which runs at least three times


def rate(work: Callable[[], object], amount: float, finish: Callable[[], None], seconds: float = MEASURE_S) -> float:
    """Run `work` at least three times after a warm-up, and return `amount` per second of the fastest run."""
    work()
    finish()
    best, start, runs = 0.0, time.perf_counter(), 0
    while runs < 3 or time.perf_counter() - start < seconds:
        began = time.perf_counter()
        work()
        finish()
        best = max(best, amount / (time.perf_counter() - began))
        runs += 1
    return best


def copy_rate(device: str, size: int = COPY_BYTES) -> float:
    """Bytes per second read and written by a copy within the device's memory."""
    import torch

    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return rate(lambda: target.copy_(source), 2 * size, finisher(device))


def transfer_rates(device: str, size: int = HOST_BYTES) -> dict[str, float]:
    """Bytes per second to and from the device, from pinned and pageable memory."""
    import torch

    there = torch.empty(size, dtype=torch.uint8, device=device)
    plain = torch.ones(size, dtype=torch.uint8)
    finish = finisher(device)
    found = {"h2d_pageable": rate(lambda: there.copy_(plain), size, finish)}
    if device.startswith("cuda"):
        pinned = plain.pin_memory()
        found["h2d"] = rate(lambda: there.copy_(pinned, non_blocking=True), size, finish)
        found["d2h"] = rate(lambda: pinned.copy_(there, non_blocking=True), size, finish)
    return found


def matmul_rate(device: str, dtype: str, size: int) -> float:
    """Operations per second of a square matrix multiplication."""
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    one = torch.randn(size, size, device=device, dtype=torch.float32).to(kind)
    out = torch.empty_like(one)
    return rate(lambda: torch.matmul(one, one, out=out), 2.0 * size**3, finisher(device))


def peer_copy(first: str, second: str, size: int = HOST_BYTES) -> dict[str, Any]:
    """Copy between two GPUs; return the speed and whether the data arrived intact."""
    import torch

    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=first)
    target = torch.zeros(size, dtype=torch.uint8, device=second)
    finish = finisher(second)
    speed = rate(lambda: target.copy_(source), size, finish)
    return {"bytes_s": speed, "whole": bool(torch.equal(target.cpu(), source.cpu()))}


def link_rates(devices: list[str]) -> dict[str, float]:
    """Measure an all-reduce over these devices, with one process per device."""
    with tempfile.TemporaryDirectory(prefix="localllm-link-") as folder:
        command = [sys.executable, "-P", "-m", __spec__.name, str(Path(folder) / "store"), *devices]
        ranks = [
            subprocess.Popen(
                [*command, str(rank)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            for rank in range(len(devices))
        ]
        try:
            said, errors = ranks[0].communicate(timeout=LINK_S)
            if ranks[0].returncode:
                raise RuntimeError((errors.decode(errors="replace").strip().splitlines() or ["a rank exited"])[-1])
            found: dict[str, float] = json.loads(said)
            return found
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()


def link_rank(store: str, devices: list[str], number: int) -> dict[str, float]:
    """Run one rank: all-gather and add up, as `models.ranks` does."""
    import torch
    import torch.distributed as dist

    device, world = devices[number], len(devices)
    on_cpu = device == "cpu"
    if on_cpu:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform.startswith("linux") else "lo0")
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
    places, limit = dist.FileStore(store, world), timedelta(seconds=LINK_S)
    dist.init_process_group("gloo" if on_cpu else "nccl", store=places, rank=number, world_size=world, timeout=limit)
    finish = finisher(device)

    def seconds(rows: int, times: int) -> float:
        given = torch.ones(rows, HIDDEN, device=device, dtype=torch.float32 if on_cpu else torch.bfloat16)
        parts, taken = [torch.empty_like(given) for _ in range(world)], []
        for _ in range(times + 3):
            began = time.perf_counter()
            dist.all_gather(parts, given)
            sum(parts[1:], parts[0].float())
            finish()
            taken.append(time.perf_counter() - began)
        return min(taken[3:])  # interference only makes a run slower

    one, many = seconds(1, 300), seconds(ROWS, 20)
    nbytes = (ROWS - 1) * HIDDEN * (4 if on_cpu else 2)
    dist.destroy_process_group()
    return {"sum_s": one, "bytes_s": nbytes / max(many - one, 1e-9)}


def selftest(device: str, capability: int, dtype: str) -> dict[str, Any]:
    """Compare every kernel that a typical model uses with its reference: an 8B on a GPU, a 0.6B on a CPU."""
    import torch

    from localllm.kernels import OpFacts
    from localllm.kernels.verify.cases import ModelShapes
    from localllm.kernels.verify.selftest import COMPILING_THREADS, SelfTest, compiler

    kv = {"float32": "bf16", "bfloat16": "bf16", "float16": "fp16"}[dtype]
    hidden, inner, heads = (1024, 3072, 16) if device == "cpu" else (4096, 12288, 32)
    facts = OpFacts(kv, heads, 8, 128, device=device.split(":")[0], capability=capability, dtype=dtype)
    if device != "cpu":
        torch.cuda.set_device(device)  # "cuda" without an index refers to it from here on
    test = SelfTest(compile_ahead=compiler(device, COMPILING_THREADS))
    test.table(ModelShapes(hidden, inner, facts))
    return {"run": test.num_run, "failures": [str(failure) for failure in test.failures], "seconds": test.seconds}


def finisher(device: str) -> Callable[[], None]:
    """A function that waits for the device to finish its work."""
    import torch

    return partial(torch.cuda.synchronize, device) if device.startswith("cuda") else lambda: None


JOBS: dict[str, Callable[..., Any]] = {
    "copy": copy_rate,
    "transfer": transfer_rates,
    "matmul": matmul_rate,
    "peer": peer_copy,
    "link": link_rates,
    "selftest": selftest,
}


def _answer(request: bytes) -> bytes:
    """Run one job, `[name, argument, ...]`."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the order of `machine`; must be set before torch loads
    name, *arguments = json.loads(request)
    try:
        answer: dict[str, Any] = {"ok": JOBS[name](*arguments)}
    except Exception as error:  # the error, of whatever kind, is the finding
        answer = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"}
    return json.dumps(answer).encode()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(link_rank(sys.argv[1], sys.argv[2:-1], int(sys.argv[-1]))))
    else:
        serve(_answer)

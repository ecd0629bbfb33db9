"""What `doctor --deep` measures with torch, in a process of its own: started by `probes.py`; messages are JSON.

A card that hangs or a driver that aborts takes this process with it and nothing else. Sizes are bytes, times seconds,
rates bytes or operations per second.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from localllm.sandbox.child_loop import serve

if TYPE_CHECKING:
    import torch

COPY_BYTES = 512 << 20
HOST_BYTES = 256 << 20
MEASURE_S = 0.4  # how long each rate is measured, at least three times


def rate(work: Callable[[], object], amount: float, finish: Callable[[], None], seconds: float = MEASURE_S) -> float:
    """`amount` per second of the fastest of at least three runs, after one that does not count."""
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
    """Bytes per second that a copy inside the device's memory reads and writes."""
    import torch

    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return rate(lambda: target.copy_(source), 2 * size, finisher(device))


def transfer_rates(device: str, size: int = HOST_BYTES) -> dict[str, float]:
    """Bytes per second to and from the device, from pinned and from ordinary memory."""
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
    """Operations per second of a square product."""
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    one = torch.randn(size, size, device=device, dtype=torch.float32).to(kind)
    out = torch.empty_like(one)
    return rate(lambda: torch.matmul(one, one, out=out), 2.0 * size**3, finisher(device))


def peer_copy(first: str, second: str, size: int = HOST_BYTES) -> dict[str, Any]:
    """A copy between two cards: whether it arrived whole, and how fast it was."""
    import torch

    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=first)
    target = torch.zeros(size, dtype=torch.uint8, device=second)
    finish = finisher(second)
    speed = rate(lambda: target.copy_(source), size, finish)
    return {"bytes_s": speed, "whole": bool(torch.equal(target.cpu(), source.cpu()))}


def selftest(device: str, capability: int, dtype: str) -> dict[str, Any]:
    """Every kernel that a model of usual proportions would use, against its reference: 8B on a GPU, 0.6B on a CPU."""
    from localllm.kernels import OpFacts
    from localllm.kernels.verify.cases import ModelShapes
    from localllm.kernels.verify.selftest import SelfTest

    kv = {"float32": "bf16", "bfloat16": "bf16", "float16": "fp16"}[dtype]
    hidden, inner, heads = (1024, 3072, 16) if device == "cpu" else (4096, 12288, 32)
    facts = OpFacts(kv, heads, 8, 128, device=device.split(":")[0], capability=capability, dtype=dtype)
    test = SelfTest()
    test.table(ModelShapes(hidden, inner, facts))
    return {"run": test.num_run, "failures": [str(failure) for failure in test.failures], "seconds": test.seconds}


def finisher(device: str) -> Callable[[], None]:
    """Waits until the device has done what it was given."""
    import torch

    return torch.cuda.synchronize if device.startswith("cuda") else lambda: None


JOBS: dict[str, Callable[..., Any]] = {
    "copy": copy_rate,
    "transfer": transfer_rates,
    "matmul": matmul_rate,
    "peer": peer_copy,
    "selftest": selftest,
}


def _answer(request: bytes) -> bytes:
    """One job, `[name, argument, ...]`."""
    name, *arguments = json.loads(request)
    try:
        answer: dict[str, Any] = {"ok": JOBS[name](*arguments)}
    except Exception as error:  # whatever the driver raises is the finding
        answer = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"}
    return json.dumps(answer).encode()


if __name__ == "__main__":
    serve(_answer)

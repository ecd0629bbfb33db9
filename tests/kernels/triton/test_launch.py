"""Kernels compiled before they are launched, in threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch

from localllm.kernels.triton.launch import compile_ahead, launch


class Kernel:
    """Notes what it is asked to do, and in which thread."""

    arg_names = ("out", "count", "SIZE")

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.warmed: list[tuple[object, ...]] = []
        self.launched: list[tuple[object, ...]] = []

    def warmup(self, *args: object, grid: tuple[int, ...], **more: object) -> None:
        self.warmed.append((args[1:], more["SIZE"], more["num_warps"]))
        if self.fails:
            raise RuntimeError("ptxas")

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **more: self.launched.append(args[1:])


def test_compiling_ahead_launches_nothing_and_another_thread_goes_on_launching(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    kernel, broken, out = Kernel(), Kernel(fails=True), torch.empty(4)

    def run(kernel: Kernel, count: int, size: int) -> None:
        launch(kernel, (1,), out, count, SIZE=size, num_warps=2)

    def call() -> None:
        run(broken, 1, 8)
        run(kernel, 3, 8)
        run(kernel, 5, 8)  # the same kernel: neither number is a multiple of 16
        run(kernel, 3, 16)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(run, kernel, 7, 32).result()
        raise ValueError("what lay in memory meant nothing")

    compile_ahead(call, torch.device("cpu"), threads=2)
    assert kernel.launched == [(7,)] and not broken.launched and len(broken.warmed) == 1
    assert sorted(kernel.warmed) == [((3,), 16, 2), ((5,), 8, 2)]
    run(kernel, 9, 8)
    assert kernel.launched == [(7,), (9,)]

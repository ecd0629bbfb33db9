"""Kernels compiled before they are launched, in threads."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch

from localllm.kernels.triton.launch import compile_ahead, launch, recorded


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
    assert sorted(kernel.warmed) == [((3,), 8, 2), ((3,), 16, 2)]
    run(kernel, 9, 8)
    assert kernel.launched == [(7,), (9,)]


def test_recorded_launches_keep_no_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The activations of every layer of a prompt would not fit."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    kernel, made = Kernel(), []

    def call() -> None:
        for _ in range(3):
            out = torch.empty(4, dtype=torch.bfloat16)
            made.append(weakref.ref(out))
            launch(kernel, (1,), out, 1, SIZE=8)

    compiling = recorded(call, torch.device("cpu"))
    assert [one() for one in made] == [None] * 3
    compiling()
    assert len(kernel.warmed) == 1


class Handle:
    """What Triton gives back for a kernel that is compiled."""

    def __init__(self) -> None:
        self.started: list[tuple[object, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args: self.started.append((grid, *args[1:]))


class Compiled(Kernel):
    """Gives a handle for each launch that goes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.handles: list[Handle] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Handle]:  # type: ignore[override]
        def start(*args: object, **more: object) -> Handle:
            self.handles.append(Handle())
            return self.handles[-1]

        return start


def test_a_launch_like_one_before_goes_through_its_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.kernels.triton.launch.interpreting", lambda: False)
    kernel, out = Compiled(), torch.empty(64)
    launch(kernel, (2,), out, 3, SIZE=8)
    launch(kernel, (5, 7), out, 9, SIZE=8)
    (handle,) = kernel.handles
    assert handle.started == [((5, 7, 1), 9, 8)]
    # what Triton compiles anew for: constants, options, numbers that are 1 or multiples of 16, types and alignment
    others = [(out, 3, 16, {}), (out, 3, 8, {"num_warps": 8}), (out, 1, 8, {}), (out, 32, 8, {})]
    others += [(out[1:], 3, 8, {}), (out.half(), 3, 8, {}), (out, 1 << 40, 8, {}), (out, 3.0, 8, {})]
    for given, count, size, more in others:
        launch(kernel, (1,), given, count, SIZE=size, **more)
    assert len(kernel.handles) == 1 + len(others) and handle.started == [((5, 7, 1), 9, 8)]
    launch(kernel, (0,), out, 3, SIZE=8)
    assert len(handle.started) == 1

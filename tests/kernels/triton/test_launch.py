"""Kernels compiled before they are launched, in threads."""

from __future__ import annotations

import ast
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from threading import Barrier

import pytest
import torch

from localllm import kernels
from localllm.kernels.triton.launch import compile_ahead, launch, recorded

# arguments that differ from step to step: as constants of a kernel, each multiple of 16 would compile it again
BY_STEP = {
    *("m", "num_rows", "num_seqs", "num_places", "num_pairs", "num_tiles", "num_queries", "num_keys", "num_blocks"),
    *("first_row", "first_token", "first_head", "heads", "table_width", "table_stride", "entry_width", "window"),
}


def test_no_kernel_is_compiled_for_the_size_of_a_step() -> None:
    launched = 0
    for path in sorted(Path(kernels.__file__).parent.joinpath("triton").glob("*.py")):
        tree = ast.parse(path.read_text())
        functions = {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef) and _jit(one) is not None}
        calls = [node for one in functions.values() for node in ast.walk(one) if isinstance(node, ast.Call)]
        inlined = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
        for name in functions.keys() - inlined - {"query_of", "sequence_of", "oldest_key"}:  # inlined elsewhere
            own = {one.arg for one in functions[name].args.args} & BY_STEP
            assert own <= set(_jit(functions[name]) or ()), f"{path.name}: {name}"
            launched += bool(own)
    assert launched > 15


def _jit(function: ast.FunctionDef) -> list[str] | None:
    """The arguments that a kernel is not compiled for again; None if it is no kernel."""
    for one in function.decorator_list:
        if "triton.jit" in ast.unparse(one):
            plain = [key.value for key in getattr(one, "keywords", ()) if key.arg == "do_not_specialize"]
            return list(ast.literal_eval(plain[0])) if plain else []
    return None


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


def test_kernels_compile_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other to begin."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    both, met = Barrier(2), []

    class Meeting(Kernel):
        def warmup(self, *args: object, grid: tuple[int, ...], **more: object) -> None:
            met.append(both.wait(30))

    def call() -> None:
        for kernel in (Meeting(), Meeting()):
            launch(kernel, (1,), torch.empty(4), 1, SIZE=8, num_warps=2)

    compile_ahead(call, torch.device("cpu"), threads=2)
    assert sorted(met) == [0, 1]


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

"""Kernel launches: compile options, cached launch handles, interpreter support, and recording for AOT compilation.

With TRITON_INTERPRET=1 kernels run in NumPy on CPU tensors, for the tests. The interpreter computes bfloat16 wrongly
and lacks programmatic dependent launch (PDL), so kernels take `INTERPRET` and `PDL` as constants to avoid both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from ..verify.records import capability_of
from .cards import AMD, Card

PDL_CAPABILITY = 90  # first compute capability with programmatic dependent launch
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
}


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Let the next kernel start, and wait until the previous kernel's writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def is_last(counter, programs):
    """Whether this is the last of `programs` programs to call this; it sees what the others wrote if it reads past L1
    (".cg"). `counter` is zero before and after.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(counter, 0)
    return last


@cache
def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, as set when they were decorated."""
    return bool(triton.knobs.runtime.interpret)


@cache
def power_of_2(size: int) -> int:
    """The smallest power of two that is at least `size`; `triton.next_power_of_2` takes 20 us on the host."""
    return 1 << (size - 1).bit_length()


@cache
def counters(device: torch.device, size: int) -> torch.Tensor:
    """int32 zeros, reset to zero by every kernel: one buffer per GPU and size, whose kernels all run on one stream."""
    return torch.zeros(size, dtype=torch.int32, device=device)


def has_ptx(device: torch.device) -> bool:
    """Whether kernels on this device may contain inline PTX."""
    return not interpreting() and card_of(device).capability < AMD


@cache
def _card_of(device: torch.device) -> Card:
    if device.type != "cuda":
        return Card(90, 8)  # interpreter: an H100 with few SMs, so that tests exercise splits
    return Card(capability_of(device), torch.cuda.get_device_properties(device).multi_processor_count)


def card_of(device: torch.device) -> Card:
    """The GPU behind a device, or the one that launches are being recorded for."""
    return _card_of(device) if _recorder.card is None else _recorder.card


@dataclass(frozen=True, slots=True)
class Launch:
    """A recorded launch: a kernel and its arguments, for compiling it ahead of time.

    args        all non-constexpr arguments by name; tensors may be on the `meta` device
    options     compile options: num_warps, num_stages, enable_fp_fusion, launch_pdl, maxnreg
    subnormals  the kernel interprets bits as subnormal numbers, so instructions that flush subnormals would break it
    """

    kernel: Any
    args: Mapping[str, torch.Tensor | int | float]
    constexprs: Mapping[str, Any]
    options: Mapping[str, Any]
    subnormals: bool

    @property
    def signature(self) -> dict[str, str]:
        """name -> Triton type of every argument: `*bf16`, `*u8`, `i32`, `fp32`; suffix `:16` if divisible by 16.

        Pointers are assumed to be aligned as torch allocates them.
        """
        plain = {p.name for p in getattr(self.kernel, "params", ()) if p.do_not_specialize}
        return {name: _type(value, name not in plain) for name, value in self.args.items()}

    @property
    def key(self) -> str:
        """Everything that distinguishes compiled kernels."""
        return f"{self.kernel} {self.signature} {self.constexprs} {self.options}"

    @property
    def bare(self) -> Launch:
        """Without the tensors' data."""
        args = {name: one.to("meta") if isinstance(one, torch.Tensor) else one for name, one in self.args.items()}
        return replace(self, args=args)

    def compile(self, device: torch.device) -> None:
        """Compile for `device`, so that a later launch finds the kernel in the cache."""
        with torch.cuda.device(device):
            self.kernel.warmup(*self.args.values(), grid=(1,), **self.constexprs, **self.options)


def _type(value: torch.Tensor | int | float, is_specialized: bool) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype] + ":16"
    if isinstance(value, float):
        return "fp32"
    return "i32:16" if value % 16 == 0 and is_specialized else "i32"


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int = 4,
    num_stages: int = 3,
    registers: int = 0,
    fuses: bool = True,
    subnormals: bool = False,
    **constexprs: Any,
) -> None:
    """Launch `kernel` with `grid` programs, with PDL if the kernel and the GPU support it.

    registers   register limit per thread; 0 leaves it to the compiler
    fuses       allow fused multiply-adds
    subnormals  see `Launch`

    Does nothing for an empty grid; while launches are being recorded, it only records.
    """
    if _recorder.card is not None:
        constexprs, options = _complete(kernel, args[0], constexprs, (num_warps, num_stages, registers, fuses))
        named = dict(zip(kernel.arg_names, args, strict=False))
        _recorder.add(Launch(kernel, named, constexprs, options, subnormals))
        return
    if 0 in grid:
        return
    tensors = [one for one in args if isinstance(one, torch.Tensor)]
    key = (
        *(id(kernel), args[0].get_device(), num_warps, num_stages, registers, fuses, *constexprs, *constexprs.values()),
        *[one.dtype for one in tensors],
        *[i for i, one in enumerate(tensors) if one.data_ptr() & 15],
        *[_class_of(one) for one in args if not isinstance(one, torch.Tensor)],
    )
    known = _ready.get(key)
    if known is None:
        constexprs, options = _complete(kernel, args[0], constexprs, (num_warps, num_stages, registers, fuses))
        compiled = kernel[grid](*args, **constexprs, **options)
        if not interpreting():
            _ready[key] = kernel, compiled, tuple(constexprs[name] for name in kernel.arg_names[len(args) :])
    else:
        _, compiled, constants = known
        compiled[(*grid, 1, 1)[:3]](*args, *constants)


# Cache of launches: everything that distinguishes compiled kernels -> (kernel, Triton's compiled handle, its constants
# in order). With an H100 and Triton 3.6, a step of 396 launches without CUDA graphs takes 40 ms instead of 55
_ready: dict[tuple[Any, ...], tuple[Any, Any, tuple[Any, ...]]] = {}


def _class_of(value: float) -> Any:
    """The properties of a number that Triton specializes kernels on."""
    return float if isinstance(value, float) else (value == 1, value % 16 == 0, -(1 << 31) <= value < 1 << 31)


def _complete(
    kernel: Any, first: torch.Tensor, constexprs: dict[str, Any], chosen: tuple[int, int, int, bool]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Add device-dependent constants, and build the compile options."""
    num_warps, num_stages, registers, fuses = chosen
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": fuses}
    if registers:
        options["maxnreg"] = registers
    if "PDL" in kernel.arg_names:
        there = first.is_cuda or _recorder.card is not None
        pdl = there and not interpreting() and PDL_CAPABILITY <= card_of(first.device).capability < AMD
        constexprs = constexprs | {"PDL": pdl}
        if pdl:
            options["launch_pdl"] = True
    return constexprs, options


class _Recorder(threading.local):
    """Per-thread recording state: other threads keep launching."""

    card: Card | None = None
    add: Callable[[Launch], None]


_recorder = _Recorder()


@contextmanager
def recording(card: Card, add: Callable[[Launch], None] | None = None) -> Iterator[list[Launch]]:
    """Context that records this thread's launches as for `card` instead of running them, or passes each to `add`."""
    launches: list[Launch] = []
    _recorder.card, _recorder.add = card, add or launches.append
    try:
        yield launches
    finally:
        _recorder.card = None


def recorded(call: Callable[[], object], device: torch.device, threads: int = 1) -> Callable[[], None]:
    """Return a function that compiles every kernel `call` would launch, `threads` at a time, without launching any.

    Outputs are left uninitialized while recording, so `call` must not branch on them. Errors are ignored here; the
    actual launch reports them.
    """
    each: dict[str, Launch] = {}

    def add(one: Launch) -> None:
        if one.key not in each:
            each[one.key] = one.bare  # with its tensors, a prompt would keep the activations of all layers

    with suppress(Exception), recording(card_of(device), add):
        call()

    def compile_all() -> None:
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(one.compile, device) for one in each.values()]:
                done.exception()

    return compile_all


def compile_ahead(call: Callable[[], object], device: torch.device, threads: int = 1) -> None:
    """Record and compile immediately (see `recorded`)."""
    recorded(call, device, threads)()

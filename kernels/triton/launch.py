"""How every kernel of this package is started: compile options in one place, and what the interpreter cannot do.

Under TRITON_INTERPRET=1 kernels run in NumPy on CPU tensors, for the tests. That interpreter computes bfloat16 wrongly
and refuses programmatic dependent launch; kernels take `INTERPRET` and `PDL` as constants and leave those out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from ..verify.records import capability_of
from .cards import AMD, Card

PDL_CAPABILITY = 90  # From here on a kernel may be launched while the one before it still runs.
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
    """Let the next kernel begin, and wait for what the one before it has written."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@cache
def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter: what was set when they were decorated counts."""
    return bool(triton.knobs.runtime.interpret)


@cache
def power_of_2(size: int) -> int:
    """The next one from `size` on; Triton's own takes the host 20 us."""
    return 1 << (size - 1).bit_length()


def has_ptx(device: torch.device) -> bool:
    """Whether kernels may hold NVIDIA's assembly there."""
    return not interpreting() and card_of(device).capability < AMD


@cache
def _card_of(device: torch.device) -> Card:
    if device.type != "cuda":
        return Card(90, 8)  # an H100 for the interpreter, but so small that tests split work, too
    return Card(capability_of(device), torch.cuda.get_device_properties(device).multi_processor_count)


def card_of(device: torch.device) -> Card:
    """The card a device is, or the one that launches are recorded for."""
    return _card_of(device) if _recorder.card is None else _recorder.card


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with everything it would have been started with, to compile it ahead of time.

    args        every argument that is no constant, by name; tensors may be on the `meta` device
    options     compile options: num_warps, num_stages, enable_fp_fusion, launch_pdl, maxnreg
    subnormals  reads bits as subnormal numbers: instructions that flush those to zero would make it wrong
    """

    kernel: Any
    args: Mapping[str, torch.Tensor | int | float]
    constexprs: Mapping[str, Any]
    options: Mapping[str, Any]
    subnormals: bool

    @property
    def signature(self) -> dict[str, str]:
        """name -> type of every argument: `*bf16`, `*u8`, `i32`, `fp32`; `:16` after it says that the pointer, aligned
        as torch does it, or number is a multiple of 16.
        """
        plain = {p.name for p in getattr(self.kernel, "params", ()) if p.do_not_specialize}
        return {name: _type(value, name not in plain) for name, value in self.args.items()}

    @property
    def key(self) -> str:
        """What makes it another kernel to compile."""
        return f"{self.kernel} {self.signature} {self.constexprs} {self.options}"

    def compile(self, device: torch.device) -> None:
        """For the card that `device` is, so that a launch finds it."""
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
    """Start `kernel` on `grid` programs, overlapping the kernel before it where it knows how to.

    registers   most a thread may take; 0 leaves it to the compiler
    fuses       a product and a sum may be rounded once
    subnormals  see `Launch`

    Nothing runs for an empty grid, nor while launches are recorded.
    """
    if _recorder.card is not None:
        constexprs, options = _complete(kernel, args[0], constexprs, (num_warps, num_stages, registers, fuses))
        named = dict(zip(kernel.arg_names, args, strict=False))
        _recorder.launches.append(Launch(kernel, named, constexprs, options, subnormals))
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


# What was launched before: by all that makes it another kernel, that kernel, Triton's handle on it and its constants in
# their order. Beside an H100 (Triton 3.6) a step of 396 launches without graphs took 55 ms, and 40 with the handle.
_ready: dict[tuple[Any, ...], tuple[Any, Any, tuple[Any, ...]]] = {}


def _class_of(value: float) -> Any:
    """What of a number Triton may compile anew for."""
    return float if isinstance(value, float) else (value == 1, value % 16 == 0, -(1 << 31) <= value < 1 << 31)


def _complete(
    kernel: Any, first: torch.Tensor, constexprs: dict[str, Any], chosen: tuple[int, int, int, bool]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The constants with what the card says, and the compile options."""
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
    """Of one thread: others go on launching."""

    card: Card | None = None
    launches: list[Launch]


_recorder = _Recorder()


@contextmanager
def recording(card: Card) -> Iterator[list[Launch]]:
    """Collect this thread's launches as they would be on such a card, instead of starting them."""
    _recorder.card, _recorder.launches = card, []
    try:
        yield _recorder.launches
    finally:
        _recorder.card = None


def recorded(call: Callable[[], object], device: torch.device, threads: int = 1) -> Callable[[], None]:
    """What compiles every kernel that `call` would launch, several at once; none is launched.

    What kernels write keeps what lay in memory before: `call` must choose nothing by it. What fails here is left for
    the launch to tell.
    """
    with suppress(Exception), recording(card_of(device)) as launches:
        call()
    each = {one.key: one for one in launches}

    def compile_all() -> None:
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(one.compile, device) for one in each.values()]:
                done.exception()

    return compile_all


def compile_ahead(call: Callable[[], object], device: torch.device, threads: int = 1) -> None:
    """Compile them now (`recorded`)."""
    recorded(call, device, threads)()

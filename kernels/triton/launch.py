"""How every kernel of this package is started: compile options in one place, and what the interpreter cannot do.

Under TRITON_INTERPRET=1 kernels run in NumPy on CPU tensors, for the tests. That interpreter computes bfloat16 wrongly
and refuses programmatic dependent launch; kernels take `INTERPRET` and `PDL` as constants and leave those out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import triton

from .aot_spec import KernelSpec

PDL_CAPABILITY = 90
"""From here on a kernel may be launched while the one before it still runs."""


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter: what was set when they were decorated counts."""
    return bool(triton.knobs.runtime.interpret)


@cache
def capability(device: torch.device) -> int:
    """Compute capability as 90; that of an H100 for the interpreter."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


@cache
def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors; 8 for the interpreter, so that tests split work, too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def pdl(device: torch.device) -> bool:
    """Whether programmatic dependent launch is used there: pass it on as the constant PDL and to `launch`."""
    return device.type == "cuda" and capability(device) >= PDL_CAPABILITY and not interpreting()


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int = 4,
    num_stages: int = 3,
    launch_pdl: bool = False,
    **constexprs: Any,
) -> None:
    """Start `kernel` on `grid` programs. Nothing is started for an empty grid."""
    if 0 in grid:
        return
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    if launch_pdl:
        options["launch_pdl"] = True
    kernel[grid](*args, **constexprs, **options)


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


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with everything it is started with: run it, or describe it for compiling ahead of time.

    Tensors may be on the `meta` device when it is only described.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: Mapping[str, torch.Tensor | int | float]
    """every argument that is no constant, by name"""
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    launch_pdl: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    subnormals: bool = False
    """as in `KernelSpec`"""

    def start(self) -> None:
        """Run it on the current stream."""
        launch(
            self.kernel,
            self.grid,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
            launch_pdl=self.launch_pdl,
            **self.args,
            **self.constexprs,
            **self.options,
        )

    def spec(self, op: str, impl: str, shape_class: str, *, decode: bool = False, expect_mma: str = "") -> KernelSpec:
        """What Triton would compile for this launch, tensors being aligned to 16 bytes."""
        return KernelSpec(
            op,
            impl,
            shape_class,
            self.kernel,
            {name: _type(value) for name, value in self.args.items()},
            self.constexprs,
            self.num_warps,
            self.num_stages,
            {**self.options, **({"launch_pdl": True} if self.launch_pdl else {})},
            decode,
            expect_mma,
            subnormals=self.subnormals,
        )


def _type(value: torch.Tensor | int | float) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype] + ":16"
    if isinstance(value, float):
        return "fp32"
    return "i32:16" if value % 16 == 0 else "i32"

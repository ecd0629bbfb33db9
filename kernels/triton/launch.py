"""How every kernel of this package is started: compile options in one place, and what the interpreter cannot do.

Under TRITON_INTERPRET=1 kernels run in NumPy on CPU tensors, for the tests. That interpreter computes bfloat16 wrongly
and refuses programmatic dependent launch; kernels take `INTERPRET` and `PDL` as constants and leave those out.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton

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

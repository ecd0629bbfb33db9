"""Kernels: functions of tensors that know nothing about models, checkpoint formats or configuration.

Entry point: `table.py`, with every op's implementations in order of preference and the `KernelTable` of a model.
`Weight` is imported on first access, because it needs torch, which compiling the C sources does not.
"""

from typing import TYPE_CHECKING, Any

from .registry import Impl, LinearFacts, OpFacts, choose

if TYPE_CHECKING:
    from .weight import Weight

__all__ = ["Impl", "LinearFacts", "OpFacts", "Weight", "choose"]


def __getattr__(name: str) -> Any:
    if name != "Weight":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .weight import Weight

    return Weight

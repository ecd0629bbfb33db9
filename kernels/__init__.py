"""Kernels: functions of tensors that know nothing about models, checkpoint formats or configuration.

Entry point: `table.py`, with every op's implementations in order of preference and the `KernelTable` of a model.
"""

from .registry import Impl, LinearFacts, OpFacts, choose
from .weight import Weight

__all__ = ["Impl", "LinearFacts", "OpFacts", "Weight", "choose"]

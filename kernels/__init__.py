"""Functions of tensors: know no model, no stored format's name in a file, no config.

`table.py` is the way in: every op's implementations in order of preference, and the `KernelTable` of a model.
"""

from .registry import Impl, LinearFacts, OpFacts, choose
from .weight import Weight

__all__ = ["Impl", "LinearFacts", "OpFacts", "Weight", "choose"]

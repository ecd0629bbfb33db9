"""`StateSlots`: what a layer keeps of sequences whose tokens it does not keep one by one."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class StateSlots(NamedTuple):
    """The states of one layer, a slot a sequence; zeros before its first token. Slots need not lie side by side.

    conv   float32 [num_slots, channels, width - 1]   the last inputs of a causal convolution, the oldest first
    state  float32 [num_slots, ...]                   what a recurrence carries; None where there is only a convolution
    """

    conv: Tensor
    state: Tensor | None

"""`StateSlots`: the per-sequence state of a recurrent layer; `PagesAndSlots`: with pages of an attention beside it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .kv_pages import KVPages


class StateSlots(NamedTuple):
    """The states of one layer, one slot per sequence, zero before its first token. Slots need not be contiguous.

    conv   float32 [num_slots, channels, width - 1]   last inputs of the causal convolution, oldest first
    state  float32 [num_slots, ...]                   recurrent state; None if there is only a convolution
    ngrams  those of n-gram embeddings, if the layer has any: `state` holds the last tokens [num_slots, order - 1]
    """

    conv: Tensor
    state: Tensor | None
    ngrams: StateSlots | None = None


class PagesAndSlots(NamedTuple):
    """What a layer keeps that has attention and a recurrent mixer."""

    pages: KVPages
    slots: StateSlots

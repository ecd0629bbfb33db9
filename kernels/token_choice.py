"""Primitives of host-side sampling over a row of logits: argmax, top-k probabilities, and a random draw.

Runs in C if the CPU kernels are available, else in plain PyTorch. Rows are float32 on the CPU.
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from .cpu.build import library

NOT_A_NUMBER, NOTHING_LEFT, NO_MEMORY = -1, -2, -3


class NotANumber(ValueError):
    """A row contains NaN or infinity."""


class NothingLeft(ValueError):
    """Every logit of a row is minus infinity."""


def argmax(logits: Tensor) -> list[int]:
    """Argmax of each row [num_rows, vocab]; ties go to the lower index. Raises NotANumber for a NaN."""
    lib = _library_for(logits)
    if lib is None:
        if bool(logits.isnan().any()):
            raise NotANumber("NaN or infinity")
        return [int(place) for place in logits.argmax(-1)]
    out = (ctypes.c_int64 * logits.shape[0])()
    _check(lib.ll_argmax(logits.data_ptr(), *logits.shape, ctypes.addressof(out)))
    return list(out)


def top_probabilities(logits: Tensor, k: int, temperature: float) -> tuple[Tensor, Tensor]:
    """The k most likely tokens of a row [vocab]: (probabilities, token ids), best first, ties by lower id.

    Probabilities are normalized over the whole row. Raises NotANumber or NothingLeft.
    """
    lib = _library_for(logits)
    if lib is None:
        _refuse(logits)
        order = torch.argsort(logits, descending=True, stable=True)[:k]
        return torch.softmax(logits.double() / temperature, -1)[order].float(), order
    values, ids = torch.empty(k), torch.empty(k, dtype=torch.int64)
    _check(lib.ll_top(logits.data_ptr(), logits.shape[0], k, temperature, values.data_ptr(), ids.data_ptr()))
    return values, ids


def draw(logits: Tensor, temperature: float, chance: float) -> int:
    """Draw a token id from softmax(logits / temperature) of a row [vocab] by inverse CDF.

    Returns the first id whose cumulative probability exceeds `chance`, a uniform number in [0, 1). Raises NotANumber or
    NothingLeft.
    """
    lib = _library_for(logits)
    if lib is None:
        _refuse(logits)
        wide = logits.double()
        cumulative = torch.cumsum(((wide - wide.max()) / temperature).exp_(), -1)
        wanted = torch.tensor(chance * float(cumulative[-1]), dtype=torch.float64)
        return min(int(torch.searchsorted(cumulative, wanted, right=True)), logits.numel() - 1)
    return _check(lib.ll_draw(logits.data_ptr(), logits.shape[0], temperature, chance))


def _library_for(logits: Tensor) -> ctypes.CDLL | None:
    return library().lib if logits.is_contiguous() and logits.dtype is torch.float32 else None


def _refuse(logits: Tensor) -> None:
    largest = float(logits.max())
    if math.isnan(largest) or largest == math.inf:
        _check(NOT_A_NUMBER)
    if largest == -math.inf:
        _check(NOTHING_LEFT)


def _check(state: int) -> int:
    if state == NOT_A_NUMBER:
        raise NotANumber("NaN or infinity")
    if state == NOTHING_LEFT:
        raise NothingLeft("no logit is finite")
    if state == NO_MEMORY:
        raise MemoryError("out of memory while sampling from the logits")
    return state

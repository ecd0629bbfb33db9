"""`linear` in C for the CPU: every canonical form, repacked into tiles of 32 rows (`layout`).

Three implementations of the same layouts. `c_int16` rounds activations to 16 bits per 32 of them (K-quants: 14 bits per
256, except with Arm's products of bytes) and sums integers exactly; `c_float32` keeps them, for dense weights and for a
user who asked for the dtype by name; `c_int8` rounds them to 8 bits, for a user who asked for that, where the CPU has
products of bytes. In all of them a row's result does not depend on the other rows, nor on the number of threads.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..registry import Impl, LinearFacts
from .build import lib, library
from .interface import Take
from .layout import FLOAT_FORMS, GGUF, INTEGER_FORMS, Prepared, prepare


def run(x: Tensor, prepared: Prepared, bias: Tensor | None = None, *, takes: int = Take.INT16) -> Tensor:
    """y = x @ W.T + bias.

    x        [num_tokens, K]  float32 (others are widened first)
    bias     [N] or None
    returns  [num_tokens, N]  dtype of x

    Raises ValueError when x does not have K columns.
    """
    if x.dim() != 2 or x.shape[1] != prepared.k:
        raise ValueError(f"x has shape {tuple(x.shape)}, the weight takes {prepared.k} inputs")
    if x.dtype is not torch.float32:
        return run(x.float(), prepared, bias, takes=takes).to(x.dtype)
    if not x.is_contiguous():
        x = x.contiguous()
    if bias is not None and (bias.dtype is not torch.float32 or not bias.is_contiguous()):
        bias = bias.float().contiguous()
    out = torch.empty((x.shape[0], prepared.n))
    if lib().ll_linear(
        prepared.address, x.data_ptr(), x.shape[0], None if bias is None else bias.data_ptr(), out.data_ptr(), takes
    ):
        raise MemoryError(f"no memory for a product of {x.shape[0]} rows")
    return out


def rows(prepared: Prepared, ids: Tensor) -> Tensor:
    """Rows `ids` (int64 [n]) of the values, float32 [n, K]: an embedding's look-up.

    Raises IndexError for an id outside [0, N).
    """
    if ids.dtype is not torch.int64 or not ids.is_contiguous():
        ids = ids.to(torch.int64).contiguous()
    out = torch.empty((ids.shape[0], prepared.k))
    if lib().ll_unpack(prepared.address, ids.data_ptr(), ids.shape[0], out.data_ptr()):
        raise IndexError(f"rows {int(ids.min())} to {int(ids.max())} of a table of {prepared.n}")
    return out


def _fits(facts: LinearFacts, *, takes: int) -> str | None:
    if facts.device != "cpu":
        return f"runs on the CPU, not on {facts.device}"
    if takes != Take.FLOATS and (facts.exact or facts.form in FLOAT_FORMS):
        bits = 8 if takes == Take.INT8 else 16
        return f"rounds activations to {bits} bits" if facts.exact else f"{facts.form} weights have no integer codes"
    if facts.form not in FLOAT_FORMS | INTEGER_FORMS:
        return f"no CPU layout for weights of form {facts.form}"
    if facts.form == "gguf" and facts.block_type not in GGUF:
        return f"no CPU layout for {facts.block_type} blocks"
    if facts.form in ("int4g", "int8") and facts.group_size % 32 and 0 < facts.group_size < facts.shape[1]:
        return f"groups of {facts.group_size} are not a multiple of 32"
    if library().reason or takes != Take.INT8:
        return library().reason
    if facts.activations != "int8":
        return "rounds activations to 8 bits, which was not asked for"
    return None if lib().ll_abi() & 1 else f"{library().isa} has no products of bytes"


TAKES = {"c_int8": Take.INT8, "c_int16": Take.INT16, "c_float32": Take.FLOATS}
_READER = partial(partial, rows)  # prepared -> what reads its rows
IMPLS = (
    # its error: 0.008 of the numbers' size for normal activations, whose largest of 32 are 2.1 times their size
    Impl("linear", "c_int8", partial(_fits, takes=Take.INT8), partial(run, takes=Take.INT8), prepare, _READER, 0.008),
    Impl("linear", "c_int16", partial(_fits, takes=Take.INT16), run, prepare, _READER),
    Impl("linear", "c_float32", partial(_fits, takes=Take.FLOATS), partial(run, takes=Take.FLOATS), prepare, _READER),
)

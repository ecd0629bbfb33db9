"""`linear` in C for the CPU: every canonical form, repacked into tiles of 16 rows (`layout`).

Two implementations of the same layouts. `c_int16` rounds activations to 16 bits per 32 of them and sums integers
exactly; `c_float32` keeps them, for dense weights and for a user who asked for the dtype by name. In both a row's
result does not depend on the other rows, nor on the number of threads.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..registry import Impl, LinearFacts
from .build import lib, library
from .layout import FLOAT_FORMS, GGUF, INTEGER_FORMS, Prepared, prepare


def run(x: Tensor, prepared: Prepared, bias: Tensor | None = None, *, exact: bool = False) -> Tensor:
    """y = x @ W.T + bias.

    x        [num_tokens, K]  float32 (others are widened first)
    bias     [N] or None
    returns  [num_tokens, N]  dtype of x

    Raises ValueError when x does not have K columns.
    """
    if x.dim() != 2 or x.shape[1] != prepared.k:
        raise ValueError(f"x has shape {tuple(x.shape)}, the weight takes {prepared.k} inputs")
    if x.dtype is not torch.float32:
        return run(x.float(), prepared, bias, exact=exact).to(x.dtype)
    if not x.is_contiguous():
        x = x.contiguous()
    if bias is not None and (bias.dtype is not torch.float32 or not bias.is_contiguous()):
        bias = bias.float().contiguous()
    out = torch.empty((x.shape[0], prepared.n))
    if lib().ll_linear(
        prepared.address, x.data_ptr(), x.shape[0], None if bias is None else bias.data_ptr(), out.data_ptr(), exact
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


def _fits(facts: LinearFacts, *, exact: bool) -> str | None:
    if facts.device != "cpu":
        return f"runs on the CPU, not on {facts.device}"
    if not exact and (facts.exact or facts.form in FLOAT_FORMS):
        return "rounds activations to 16 bits" if facts.exact else f"{facts.form} weights have no integer codes"
    if facts.form not in FLOAT_FORMS | INTEGER_FORMS:
        return f"no CPU layout for weights of form {facts.form}"
    if facts.form == "gguf" and facts.block_type not in GGUF:
        return f"no CPU layout for {facts.block_type} blocks"
    if facts.form in ("int4g", "int8") and facts.group_size % 32 and 0 < facts.group_size < facts.shape[1]:
        return f"groups of {facts.group_size} are not a multiple of 32"
    return library().reason


_READER = partial(partial, rows)  # prepared -> what reads its rows
IMPLS = (
    Impl("linear", "c_int16", partial(_fits, exact=False), run, prepare, _READER),
    Impl("linear", "c_float32", partial(_fits, exact=True), partial(run, exact=True), prepare, _READER),
)

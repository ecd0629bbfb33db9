"""`linear` in C for the CPU: every canonical form, repacked into tiles of 32 rows (`layout`).

Three implementations share the layout. `c_int16` quantizes activations to 16 bits in blocks of 32 (K-quants: 14 bits in
blocks of 256, except with Arm's byte dot products) and sums integers exactly. `c_float32` keeps activations in float32,
for dense weights and when the user requested a dtype. `c_int8` quantizes activations to 8 bits, if the user allows it
and the CPU has byte dot products. All are batch-invariant and independent of the number of threads.
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

    Raises ValueError if x does not have K columns.
    """
    if x.dim() != 2 or x.shape[1] != prepared.k:
        raise ValueError(f"x has shape {tuple(x.shape)}, but the weight takes {prepared.k} inputs")
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
        raise MemoryError(f"out of memory for a product of {x.shape[0]} rows")
    return out


def rows(prepared: Prepared, ids: Tensor) -> Tensor:
    """Decode rows `ids` (int64 [n]) of the weight, float32 [n, K]: embedding lookup.

    Raises IndexError for an id outside [0, N).
    """
    if ids.dtype is not torch.int64 or not ids.is_contiguous():
        ids = ids.to(torch.int64).contiguous()
    out = torch.empty((ids.shape[0], prepared.k))
    if lib().ll_unpack(prepared.address, ids.data_ptr(), ids.shape[0], out.data_ptr()):
        raise IndexError(f"row ids {int(ids.min())} to {int(ids.max())} are outside a table of {prepared.n} rows")
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
        return f"group size must be a multiple of 32, not {facts.group_size}"
    if library().reason or takes != Take.INT8:
        return library().reason
    if facts.activations != "int8":
        return "rounds activations to 8 bits, which was not requested"
    return None if lib().ll_abi() & 1 else f"{library().isa} has no byte dot products"


TAKES = {"c_int8": Take.INT8, "c_int16": Take.INT16, "c_float32": Take.FLOATS}
_READER = partial(partial, rows)  # prepared -> row reader
IMPLS = (
    # relative RMS error 0.008 for normally distributed activations (the maximum of 32 averages 2.1 standard deviations)
    Impl("linear", "c_int8", partial(_fits, takes=Take.INT8), partial(run, takes=Take.INT8), prepare, _READER, 0.008),
    Impl("linear", "c_int16", partial(_fits, takes=Take.INT16), run, prepare, _READER),
    Impl("linear", "c_float32", partial(_fits, takes=Take.FLOATS), partial(run, takes=Take.FLOATS), prepare, _READER),
)

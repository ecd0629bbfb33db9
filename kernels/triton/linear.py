"""`linear` in Triton for NVIDIA cards: weights of every form stay as small as they are stored, x is not rounded.

`triton` takes the fastest kernel for the number of rows; `triton_invariant` sums every row in the same order. Importing
this module loads neither Triton nor a kernel.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from .. import Impl, LinearFacts
from .gguf_codes import GGUF_CODES
from .layout import Prepared, prepare, unpack
from .layout_codes import CODES

FORMS = frozenset({"dense", "int4g", "int8", "fp4g16", "fp4g32", "fp8", "fp8mx", "gguf"})
GROUPED = {"int4g": "int4", "int8": "int8"}


def on_card(facts: LinearFacts) -> str | None:
    """Why no kernel of this package runs there; None when one does."""
    if facts.device != "cuda":
        return f"runs on NVIDIA cards, not on {facts.device}"
    if facts.capability < 75:
        return f"needs compute capability 7.5, this is {facts.capability / 10}"
    if facts.dtype not in ("bfloat16", "float16"):
        return f"activations are {facts.dtype}"
    if facts.dtype == "bfloat16" and facts.capability < 80:
        return "no bfloat16 below compute capability 8.0"
    return None


def _fits(facts: LinearFacts, *, fixed_order: bool) -> str | None:
    reason = on_card(facts)
    if reason is not None:
        return reason
    if facts.form not in FORMS:
        return f"no layout for weights of form {facts.form}"
    if facts.form == "gguf" and facts.block_type not in GGUF_CODES:
        return f"no layout for {facts.block_type} blocks"
    if facts.form in GROUPED and 0 < facts.group_size < facts.shape[1]:
        chunk = CODES[GROUPED[facts.form]].chunk
        if facts.group_size % chunk:
            return f"groups of {facts.group_size} are not a multiple of {chunk}"
    if fixed_order:
        return "Triton has no tensor cores below compute capability 8.0" if facts.capability < 80 else None
    return "sums one row in another order than several" if facts.deterministic else None


def _run(x: Tensor, prepared: Prepared, bias: Tensor | None = None, *, fixed_order: bool) -> Tensor:
    from .product import Extras, product

    return product(x, prepared, Extras(bias), fixed_order=fixed_order)


def _nbytes(prepared: Any) -> int:
    return prepared.nbytes


IMPLS: tuple[Impl, ...] = tuple(
    Impl(
        name,
        partial(_fits, fixed_order=fixed_order),
        prepare,
        partial(_run, fixed_order=fixed_order),
        unpack,
        _nbytes,
    )
    for name, fixed_order in (("triton", False), ("triton_invariant", True))
)

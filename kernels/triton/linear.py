"""`linear` in Triton for NVIDIA cards: weights of every form stay as small as they are stored, x is not rounded.

`triton` takes the fastest kernel for the number of rows; `triton_invariant` sums every row in the same order. By
permission of the user (`LinearFacts.activations`) `triton_fp8_w8a8` and `triton_nvfp4_w4a4` round x for products of
many rows. Importing this module loads neither Triton nor a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from .. import Impl, LinearFacts
from .gguf_codes import GGUF_CODES
from .layout import Prepared, prepare
from .layout_codes import CODES
from .probe import FP8_CAPABILITY, nvfp4_reason
from .unpack import unpack

FORMS = frozenset({"dense", "int4g", "int8", "fp4g16", "fp4g32", "fp8", "fp8mx", "gguf"})
FUSED = frozenset({"triton", "triton_fp8_w8a8", "triton_nvfp4_w4a4"})
"""implementations whose products of few rows take norm, gate and residual with them"""
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


def _fits_narrow(facts: LinearFacts, *, activations: str, form: str) -> str | None:
    if facts.activations != activations:
        return f"rounds activations to {activations}, which was not asked for"
    if facts.form != form:
        return f"multiplies {form} weights, not {facts.form}"
    reason = _fits(facts, fixed_order=False)
    if reason is not None:
        return reason
    if activations == "nvfp4":
        return nvfp4_reason(facts.capability)
    return None if facts.capability >= FP8_CAPABILITY else "no FP8 instructions below compute capability 8.9"


def _run(x: Tensor, prepared: Prepared, bias: Tensor | None = None, *, fixed_order: bool) -> Tensor:
    from .product import Extras, product

    return product(x, prepared, Extras(bias), fixed_order=fixed_order)


def _run_fp8(x: Tensor, prepared: Prepared, bias: Tensor | None = None) -> Tensor:
    from .narrow_product import fp8_product

    return fp8_product(x, prepared, bias)


def _run_nvfp4(x: Tensor, prepared: Prepared, bias: Tensor | None = None) -> Tensor:
    from .narrow_product import nvfp4_product

    return nvfp4_product(x, prepared, bias)


def _nbytes(prepared: Any) -> int:
    return prepared.nbytes


def _impl(name: str, fits: Callable[[LinearFacts], str | None], run: Callable[..., Tensor]) -> Impl:
    return Impl(name, fits, prepare, run, unpack, _nbytes)


IMPLS: tuple[Impl, ...] = (
    _impl("triton_fp8_w8a8", partial(_fits_narrow, activations="fp8", form="fp8"), _run_fp8),
    _impl("triton_nvfp4_w4a4", partial(_fits_narrow, activations="nvfp4", form="fp4g16"), _run_nvfp4),
    _impl("triton", partial(_fits, fixed_order=False), partial(_run, fixed_order=False)),
    _impl("triton_invariant", partial(_fits, fixed_order=True), partial(_run, fixed_order=True)),
)

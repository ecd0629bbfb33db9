"""What the products launch on a card that need not be there: every weight form, the shapes of an 8B model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..layer_weights import Norm
from .aot_spec import KernelSpec
from .layout import SUPER, Prepared
from .layout_codes import CODES, HALVES
from .product import PLAIN, Extras, dequantise_launch, tile_launch, vector_launch
from .product_tiles import Card, may_be_fixed, tile_tiles, vector_tiles

NUM_SMS = {75: 40, 80: 108, 86: 82, 89: 128, 90: 132, 100: 148, 120: 170, 121: 48}
"""of a common card of each class, for the choice of tiles"""
HIDDEN, INTERMEDIATE = 4096, 14336
MAIN_FORMS = frozenset({"bf16", "f16", "int4 g128", "int4 sub", "e2m1 e4m3", "e4m3 row"})
"""compiled for more shapes, fused ones among them"""


class Form(NamedTuple):
    """One kind of `Prepared`."""

    name: str
    code: str
    scale_kind: str = "none"
    min_kind: str = "none"
    zero: int = 0
    group: int = 0
    scale_rows: int = 1
    row_scale: bool = False


FORMS = (
    Form("bf16", "bf16"),
    Form("f16", "f16"),
    Form("e4m3 row", "e4m3", row_scale=True),
    Form("e4m3 block128", "e4m3", "float", group=128, scale_rows=128),
    Form("e4m3 mx", "e4m3", "e8m0", group=32),
    Form("int8 row", "int8", zero=128, row_scale=True),
    Form("int8 g32", "int8", "float", zero=128, group=32),
    Form("int4 g128", "int4", "float", zero=8, group=128),
    Form("int4 g64", "int4", "float", zero=8, group=64),
    Form("int4 g32", "int4", "float", zero=8, group=32),
    Form("int4 zeros g128", "int4", "float", "zero", group=128),
    Form("int4 mins g32", "int4", "float", "float", group=32),
    Form("int4 sub", "int4", "sub", "sub", group=32),
    Form("e2m1 e4m3", "e2m1", "e4m3", group=16, row_scale=True),
    Form("e2m1 e8m0", "e2m1", "e8m0", group=32),
    Form("iq4 f16", "iq4", "float", group=32),
    Form("iq4 sub", "iq4", "sub", group=32),
    Form("int5 f16", "int5", "float", zero=16, group=32),
    Form("int5 mins", "int5", "float", "float", group=32),
    Form("int5 sub", "int5", "sub", "sub", group=32),
    Form("int6 sub", "int6", "sub", zero=32, group=16),
    Form("int2 nibble", "int2", "nibble", "nibble", group=16),
    Form("int3 sub", "int3", "sub", zero=4, group=16),
)


def described(form: Form, n: int, k: int) -> Prepared:
    """A weight of that form with the right types and sizes and no contents."""
    kind = CODES[form.code]
    chunks = -(-k // kind.chunk)
    groups = -(-k // form.group) if form.group else 0
    of_scales = {"e4m3": torch.uint8, "e8m0": torch.uint8, "nibble": torch.uint8, "sub": torch.int8}
    # block-scaled FP8 comes with float32 scales, the other stored floats with float16
    floats = torch.float32 if form.scale_rows > 1 else torch.float16
    scales = _meta(of_scales.get(form.scale_kind, floats), -(-n // form.scale_rows), groups)
    mins = _meta(torch.float16 if form.min_kind == "float" else torch.uint8, n, groups)
    has_super = form.scale_kind in ("sub", "nibble")
    return Prepared(
        (n, k),
        form.code,
        _meta(torch.int16, n, chunks * HALVES),
        _meta(torch.uint8, n, chunks * kind.high_bytes) if kind.high else None,
        form.scale_kind,
        scales if form.group else None,
        form.min_kind,
        mins if form.min_kind in ("float", "zero", "sub") else None,
        _meta(torch.float16, n, k // SUPER) if has_super else None,
        _meta(torch.float16, n, k // SUPER) if form.min_kind in ("sub", "nibble") else None,
        _meta(torch.float32, n) if form.row_scale else None,
        form.zero,
        form.group,
        form.scale_rows,
    )


def _meta(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def specs(capability: int) -> Iterator[KernelSpec]:
    """Every product kernel that would be launched on such a card, with its first candidate's constants."""
    card = Card(capability, NUM_SMS[capability])
    dtype = torch.float16 if capability < 80 else torch.bfloat16
    for form in FORMS:
        if form.code == "bf16" and capability < 80:
            continue
        yield from _decode_specs(form, dtype, card)
        yield from _batch_specs(form, dtype, card)
        if CODES[form.code].low < 16 or dtype != {"bf16": torch.bfloat16, "f16": torch.float16}[form.code]:
            slab = dequantise_launch(described(form, HIDDEN, HIDDEN), 0, _meta(dtype, HIDDEN, HIDDEN))
            yield slab.spec("linear", "triton", f"{form.name} slab")


def _decode_specs(form: Form, dtype: torch.dtype, card: Card) -> Iterator[KernelSpec]:
    pdl = card.capability >= 90
    p = described(form, HIDDEN, HIDDEN)
    wide = described(form, 2 * INTERMEDIATE, HIDDEN)
    x, out = _meta(dtype, 1, HIDDEN), _meta(dtype, 1, HIDDEN)
    for fixed in (False, True) if may_be_fixed(form.code, p.run, card) else (False,):
        label = f"{form.name} M=1" + " fixed" * fixed
        first = vector_tiles(HIDDEN, HIDDEN, form.code, card, fixed=fixed)[0]
        yield vector_launch(x, p, out, PLAIN, first, pdl).spec("linear", "triton", label, decode=True)
        if form.name in MAIN_FORMS:
            fused = Extras(_meta(torch.float32, HIDDEN), Norm(_meta(torch.float32, HIDDEN), 1e-6), out)
            launch = vector_launch(x, p, out, fused, first, pdl)
            yield launch.spec("linear", "triton", f"{label} norm residual", decode=True)
            first = vector_tiles(2 * INTERMEDIATE, HIDDEN, form.code, card, True, fixed)[0]
            fused = fused._replace(bias=None, residual=None, gate="silu")
            launch = vector_launch(x, wide, _meta(dtype, 1, INTERMEDIATE), fused, first, pdl)
            yield launch.spec("linear", "triton", f"{label} norm gated", decode=True)


def _batch_specs(form: Form, dtype: torch.dtype, card: Card) -> Iterator[KernelSpec]:
    if card.capability < 80:
        why = "Triton has no tensor cores there: up to 4 rows one by one, more through a slab and torch.matmul"
        yield KernelSpec("linear", "triton", f"{form.name} M=16", None, {}, reason=why)
        return
    pdl = card.capability >= 90
    wide = {90: "wgmma", 100: "tcgen05"}.get(card.capability, "mma.sync")
    for tokens in (8, 16, 64, 128) if form.name in MAIN_FORMS else (16, 64):
        p = described(form, HIDDEN, HIDDEN)
        x, out = _meta(dtype, tokens, HIDDEN), _meta(dtype, tokens, HIDDEN)
        first = tile_tiles(HIDDEN, HIDDEN, form.code, tokens, card)[0]
        launch = tile_launch(x, p, out, PLAIN, first, pdl)
        expected = wide if tokens >= 64 else ""
        yield launch.spec("linear", "triton", f"{form.name} M={tokens}", decode=tokens <= 16, expect_mma=expected)
    if form.name in MAIN_FORMS:
        p, out = described(form, 2 * INTERMEDIATE, HIDDEN), _meta(dtype, 16, INTERMEDIATE)
        first = tile_tiles(2 * INTERMEDIATE, HIDDEN, form.code, 16, card)[0]
        fused = Extras(None, Norm(_meta(torch.float32, HIDDEN), 1e-6), None, "silu")
        launch = tile_launch(_meta(dtype, 16, HIDDEN), p, out, fused, first, pdl)
        yield launch.spec("linear", "triton", f"{form.name} M=16 norm gated", decode=True)

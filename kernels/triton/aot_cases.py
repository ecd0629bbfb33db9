"""Every kernel as it is launched on a card that need not be there: all weight forms and KV formats, in the shapes of
common models. Ops are called on tensors of the `meta` device while their launches are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kv_pages import KVPages
from ..layer_weights import Norm
from ..sampling import SamplingInputs
from .activation import gelu_tanh_mul, silu_mul
from .aot_spec import KernelSpec
from .attention import paged_attention
from .cards import CLASSES, Card
from .embedding import embedding
from .kv_write import kv_write
from .launch import TYPES, recording
from .layout import SUPER, Prepared
from .layout_codes import CODES, HALVES
from .narrow_product import fp8_product, nvfp4_product
from .probe import FP4_CAPABILITY, FP8_CAPABILITY, NVFP4_INSTRUCTION, NVFP4_LABEL
from .product import PLAIN, Extras, dequantize_launch, gemm_launch, gemv_launch
from .product_tiles import gemm_tiles, gemv_tiles, may_be_fixed
from .qk_norm_rope_kv import qk_norm_rope_kv
from .rms_norm import rms_norm
from .rope import rope
from .sampling import sample

HIDDEN, INTERMEDIATE = 4096, 14336
# compiled for more shapes, fused ones among them
MAIN_FORMS = frozenset({"bf16", "f16", "int4 g128", "int4 sub", "e2m1 e4m3", "e4m3 row"})


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


def all_specs(capability: int) -> list[KernelSpec]:
    """Every kernel that would be launched on such a card."""
    dtype = torch.float16 if capability < 80 else torch.bfloat16
    card = Card(capability, CLASSES[capability].num_sms)
    found = list(_op_specs(dtype, card))
    with recording(card):  # what overlaps is decided where a launch is made
        for form in FORMS:
            if form.code == "bf16" and capability < 80:
                continue
            found += _decode_specs(form, dtype, card)
            found += _batch_specs(form, dtype, card)
            if CODES[form.code].low < 16 or dtype != {"bf16": torch.bfloat16, "f16": torch.float16}[form.code]:
                slab = dequantize_launch(described(form, HIDDEN, HIDDEN), 0, _meta(dtype, HIDDEN, HIDDEN))
                found.append(_linear(f"{form.name} slab", slab))
    return found + list(_rounding_specs(card))


# ---- ops


def _op_specs(dtype: torch.dtype, card: Card) -> Iterator[KernelSpec]:
    """One spec for every launch of an op; the splits of attention are merged alike in all of its cases."""
    labels = {"decode_split": "decode", "merge_splits": "merge", "prefill": "prefill"}
    expected = {
        "decode_split": "" if card.capability < 80 else "mma",
        "prefill": {90: "wgmma", 75: ""}.get(card.capability, "mma"),
    }
    for op, label, call in (*_row_calls(dtype), *_page_calls(dtype), *_attention_calls(dtype)):
        with recording(card) as launches:
            call()
        for launch in launches:
            kernel = launch.kernel.__name__
            if kernel == "merge_splits" and "sinks" not in label:
                continue
            name = f"{op}_{labels[kernel]}" if kernel in labels else op
            shape_class = label or f"{kernel.strip('_')} {launch.constexprs.get('PASS', '')}".rstrip()
            yield KernelSpec(name, "triton", shape_class, launch, kernel != "prefill", expected.get(kernel, ""))


Call = tuple[str, str, Callable[[], object]]  # op, shape class, the call


def _row_calls(dtype: torch.dtype) -> Iterator[Call]:
    """Hidden states of 4,096, heads of 128, a row in blocks; whole heads, and partly turned ones with neighbours as
    pairs; a vocabulary of 151,936.
    """
    for shape in ((1, HIDDEN), (32, 128), (1, 20480)):
        weight = _meta(torch.float32, shape[1])
        yield "rms_norm", str(shape[1]), partial(rms_norm, _meta(dtype, *shape), weight, 1e-6)
    for label, dim, half, interleaved in (("d128", 128, 64, False), ("d96 partial interleaved", 96, 16, True)):
        angles = _meta(torch.float32, 1, half)
        yield "rope", label, partial(rope, _meta(dtype, 1, 12, dim), angles, angles, interleaved)
    for op in (silu_mul, gelu_tanh_mul):
        yield op.__name__, "rows", partial(op, _meta(dtype, 1, 2 * INTERMEDIATE))
    yield "embedding", "rows", partial(embedding, _meta(torch.int64, 1), _meta(dtype, 99, HIDDEN), 1.0, dtype)
    logits = _meta(torch.float32, 1, 151_936)
    yield "sample", "", partial(sample, logits, SamplingInputs.empty(1, 1, 151_936, "meta"))


def _pages(kv_format: str, kv_heads: int, page: int, dim: int) -> KVPages:
    empty = KVPages.empty(kv_format, 1, kv_heads, page, dim)
    return KVPages(*(None if part is None else part.to("meta") for part in empty))


def _page_calls(dtype: torch.dtype) -> Iterator[Call]:
    """Every format, with and without QK-norm."""
    native, slots = TYPES[dtype].removeprefix("*"), _meta(torch.int64, 1)
    for kv_format, dim in ((native, 128), ("int8", 128), ("fp8", 128), ("int8", 96)):
        kv = _meta(dtype, 1, 8, dim)
        yield "kv_write", f"{kv_format} d{dim}", partial(kv_write, kv, kv, _pages(kv_format, 8, 16, dim), slots)
    for kv_format, dim, has_norm in ((native, 128, True), ("int8", 128, True), ("fp8", 96, False)):
        angles, norm = _meta(torch.float32, 1, dim // 2), Norm(_meta(torch.float32, dim), 1e-6) if has_norm else None
        given = (_meta(dtype, 1, 48, dim), angles, angles, _pages(kv_format, 8, 16, dim), slots, 32, norm, norm)
        label = f"{kv_format} d{dim}{' norm' if has_norm else ''}"
        yield "qk_norm_rope_kv", label, partial(qk_norm_rope_kv, *given)


def _attention_calls(dtype: torch.dtype) -> Iterator[Call]:
    """Head sizes of the models, and windows, soft-caps and sinks together: (tokens, format, head_dim, query heads a KV
    head, KV heads, page size, extras).
    """
    native = TYPES[dtype].removeprefix("*")
    for tokens, kv_format, dim, group, kv_heads, page, extras in (
        (1, native, 128, 4, 8, 16, False),
        (1, native, 64, 3, 3, 16, True),
        (1, native, 256, 4, 1, 32, False),
        (1, native, 256, 12, 2, 16, False),
        (1, "int8", 128, 8, 4, 16, False),
        (1, "fp8", 128, 4, 8, 16, False),
        (1, "fp8", 96, 12, 4, 64, True),
        (1, "int8", 64, 8, 8, 16, False),
        (512, native, 128, 4, 8, 16, False),
        (512, native, 256, 4, 1, 16, True),
        (512, "fp8", 128, 4, 8, 16, False),
        (512, "int8", 64, 3, 3, 64, False),
    ):
        q, table = _meta(dtype, tokens, group * kv_heads, dim), _meta(torch.int32, 1, 2048)
        bounds, lengths = _meta(torch.int32, 2), _meta(torch.int32, 1)
        given = (q, _pages(kv_format, kv_heads, page, dim), table, bounds, lengths, dim**-0.5)
        more = {"window": 1024, "softcap": 30.0, "sinks": _meta(torch.float32, group * kv_heads)} if extras else {}
        label = f"{kv_format} d{dim} g{group} p{page}{' window softcap sinks' * extras}"
        yield "paged_attention", label, partial(paged_attention, *given, **more, by_token=extras and tokens == 1)


# ---- products


def _linear(label: str, launch: Any, impl: str = "triton", **more: Any) -> KernelSpec:
    return KernelSpec("linear", impl, label, launch, **more)


def _decode_specs(form: Form, dtype: torch.dtype, card: Card) -> Iterator[KernelSpec]:
    p = described(form, HIDDEN, HIDDEN)
    wide = described(form, 2 * INTERMEDIATE, HIDDEN)
    x, out = _meta(dtype, 1, HIDDEN), _meta(dtype, 1, HIDDEN)
    for fixed in (False, True) if may_be_fixed(form.code, p.run, card) else (False,):
        label = f"{form.name} M=1" + " fixed" * fixed
        first = gemv_tiles(HIDDEN, HIDDEN, form.code, card, fixed=fixed)[0]
        yield _linear(label, gemv_launch(x, p, out, PLAIN, first), decode=True)
        if form.name in MAIN_FORMS:
            fused = Extras(_meta(torch.float32, HIDDEN), Norm(_meta(torch.float32, HIDDEN), 1e-6), out)
            yield _linear(f"{label} norm residual", gemv_launch(x, p, out, fused, first), decode=True)
            first = gemv_tiles(2 * INTERMEDIATE, HIDDEN, form.code, card, True, fixed)[0]
            fused = fused._replace(bias=None, residual=None, gate="silu")
            launch = gemv_launch(x, wide, _meta(dtype, 1, INTERMEDIATE), fused, first)
            yield _linear(f"{label} norm gated", launch, decode=True)


def _batch_specs(form: Form, dtype: torch.dtype, card: Card) -> Iterator[KernelSpec]:
    if card.capability < 80:
        why = "Triton has no tensor cores there: up to 4 rows one by one, more through a slab and torch.matmul"
        yield _linear(f"{form.name} M=16", None, reason=why)
        return
    wide = {90: "wgmma", 100: "tcgen05"}.get(card.capability, "mma.sync")
    for tokens in (8, 16, 64, 128) if form.name in MAIN_FORMS else (16, 64):
        p = described(form, HIDDEN, HIDDEN)
        x, out = _meta(dtype, tokens, HIDDEN), _meta(dtype, tokens, HIDDEN)
        first = gemm_tiles(HIDDEN, HIDDEN, form.code, tokens, card)[0]
        launch, expected = gemm_launch(x, p, out, PLAIN, first), wide if tokens >= 64 else ""
        yield _linear(f"{form.name} M={tokens}", launch, decode=tokens <= 16, expect_mma=expected)
    if form.name in MAIN_FORMS:
        p, out = described(form, 2 * INTERMEDIATE, HIDDEN), _meta(dtype, 16, INTERMEDIATE)
        first = gemm_tiles(2 * INTERMEDIATE, HIDDEN, form.code, 16, card)[0]
        fused = Extras(None, Norm(_meta(torch.float32, HIDDEN), 1e-6), None, "silu")
        launch = gemm_launch(_meta(dtype, 16, HIDDEN), p, out, fused, first)
        yield _linear(f"{form.name} M=16 norm gated", launch, decode=True)


def _rounding_specs(card: Card) -> Iterator[KernelSpec]:
    """Products of x rounded to FP8 and to NVFP4."""
    forms = {form.name: form for form in FORMS}
    if card.capability < FP8_CAPABILITY:
        why = "no FP8 instructions below compute capability 8.9"
        yield _linear("e4m3 w8a8 M=256", None, "triton_fp8_w8a8", reason=why)
    for name in ("e4m3 row", "e4m3 block128") if card.capability >= FP8_CAPABILITY else ():
        for tokens in (64, 256):
            with recording(card) as launches:
                fp8_product(_meta(torch.bfloat16, tokens, HIDDEN), described(forms[name], HIDDEN, HIDDEN))
            if tokens == 64:
                yield KernelSpec("quantize", "triton", name, launches[0])
            yield _linear(f"{name} w8a8 M={tokens}", launches[1], "triton_fp8_w8a8")
    if card.capability < FP4_CAPABILITY:
        why = "no FP4 instructions below compute capability 10.0"
        yield _linear(NVFP4_LABEL, None, "triton_nvfp4_w4a4", reason=why)
        return
    with recording(card) as launches:
        nvfp4_product(_meta(torch.bfloat16, 256, HIDDEN), described(forms["e2m1 e4m3"], HIDDEN, HIDDEN))
    yield KernelSpec("quantize", "triton", "nvfp4", launches[0])
    yield _linear(NVFP4_LABEL, launches[1], "triton_nvfp4_w4a4", expect_mma=NVFP4_INSTRUCTION)

"""Launches of every kernel for ahead-of-time compilation: all weight forms and KV formats, in shapes of common models.

Ops are called on `meta` tensors while their launches are recorded, so no GPU is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..experts import tile_size
from ..kv_pages import KVPages
from ..layer_weights import (
    AttentionWeights,
    CompressedWeights,
    EntryIndexWeights,
    ExpertsWeights,
    HyperWeights,
    LatentWeights,
    Linear,
    LinearPart,
    MixedWeights,
    Norm,
    PoolWeights,
)
from ..sampling import SamplingInputs
from .activation import gate_rows, gelu_tanh_mul, silu_mul, times_gates
from .attention import AttentionStep, paged_attention
from .attention_tiles import Tile, decode_tiles
from .cards import AMD, CLASSES, Card
from .compressed import attended, choose_entries, completed, turned
from .digits import gemv_digits_kernel
from .experts import Sums, experts, routed, sorted_by_expert, summed
from .heads import kv_write, qk_norm_rope_kv, rope
from .hyper import hyper_in, hyper_out
from .latent import attend, latent_step
from .launch import TYPES, Launch, recording
from .layout import CODES, HALVES, SUPER, Prepared
from .narrow import narrow_product
from .ops import FP4_CAPABILITY, FP8_CAPABILITY, IMPLS
from .product import (
    PLAIN,
    Extras,
    Pairs,
    Tiles,
    chained,
    dequantized,
    expert_product,
    launch_gemm,
    launch_gemv,
    product,
)
from .product_tiles import SMALL_TOKENS, few_rows, few_tiles, gemm_tiles, is_fixed
from .recurrent import (
    Raw,
    causal_conv,
    delta_rule,
    gated_conv,
    gated_delta_rule,
    gated_groups,
    gated_norm,
    gated_state_space,
    projected_conv,
    run,
    state_space,
)
from .rms_norm import add_normed, normed, rms_norm
from .sampling import sample
from .segments import attn_in
from .token_index import choose_blocks, index_pool, index_scores, index_write

HIDDEN, INTERMEDIATE = 4096, 14336
# also compiled for more shapes and with fused operations
MAIN_FORMS = frozenset({"bf16", "f16", "int4 g128", "int4 sub", "e2m1 e4m3", "e4m3 row"})


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One kernel launch to compile.

    op           the op it implements: linear, rms_norm, paged_attention_decode, ...
    impl         name of the implementation, as in the run summary
    shape_class  what distinguishes this launch: form, rows, head_dim, KV format, ...
    launch       None if this GPU does not have the kernel, see `reason`
    decode       runs in every decode step: no spills or local memory allowed from sm_80 on
    expect_mma   text that `mma` of the row must contain; empty: no requirement
    """

    op: str
    impl: str
    shape_class: str
    launch: Launch | None = None
    decode: bool = False
    expect_mma: str = ""
    reason: str = ""

    @property
    def label(self) -> str:
        """Op and shape class, as shown in the table."""
        return f"{self.op} {self.shape_class}"


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
    """A `meta` weight of that form: right dtypes and shapes, no data."""
    kind = CODES[form.code]
    chunks = -(-k // kind.chunk)
    groups = -(-k // form.group) if form.group else 0
    of_scales = {"e4m3": torch.uint8, "e8m0": torch.uint8, "nibble": torch.uint8, "sub": torch.int8}
    # block-scaled FP8 has float32 scales, other forms with float scales have float16
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
    """Return all kernels that can be launched on a GPU of this capability."""
    dtype = torch.float16 if capability < 80 else torch.bfloat16
    card = Card(capability, CLASSES[capability].num_sms)
    found = [*_op_specs(dtype, card), *_expert_specs(dtype, card)]
    for form in FORMS:
        if capability >= AMD and form.name not in MAIN_FORMS:
            continue
        if form.code == "bf16" and capability < 80:  # only routers, which GGUF files store in float32
            x, p = _meta(dtype, 1, HIDDEN), described(form, 128, HIDDEN)
            found.append(_linear(f"{form.name} M=1", card, partial(product, x, p), decode=True))
            continue
        found += [*_decode_specs(form, dtype, card), *_batch_specs(form, dtype, card)]
        if CODES[form.code].low < 16:
            slab = partial(dequantized, described(form, HIDDEN, HIDDEN), slice(0, HIDDEN), dtype)
            found.append(_linear(f"{form.name} slab", card, slab))
    return [*found, *_heads_specs(dtype, card), *_rounding_specs(card)]


# ---- ops


def _op_specs(dtype: torch.dtype, card: Card) -> Iterator[KernelSpec]:
    """One spec per launch of an op; few cases keep the merge kernel, which is nearly the same in all."""
    labels = {"decode_split": "decode", "merge_splits": "merge", "prefill": "prefill", "widen": "widen"}
    prompts = ("prefill", "widen", "_chunks")
    expected = {
        "decode_split": "" if card.capability < 80 else "v_" if card.capability >= AMD else "mma",
        "_chunks": "mma.sync",
        "split_entries": "mma",
        "prefill": "v_" if card.capability >= AMD else {90: "wgmma", 75: ""}.get(card.capability, "mma"),
    }
    calls = *_row_calls(dtype), *_page_calls(dtype), *_gate_calls(dtype), *_attention_calls(dtype, card)
    layers = *_state_calls(dtype, card), *_latent_calls(dtype, card), *_entry_calls(dtype, card), *_hyper_calls(dtype)
    for op, label, call in (*calls, *layers):
        for number, launch in enumerate(_recorded(card, call), 1):
            kernel = launch.kernel.__name__
            if kernel == "merge_splits" and not label.endswith(("sinks", "entries of 0")):
                continue
            name = f"{op}_{labels[kernel]}" if kernel in labels else op
            shape_class = label or f"{kernel.strip('_')} {launch.constexprs.get('PASS', '')}".rstrip()
            if label.endswith("step"):
                shape_class += f" {number}, {kernel.strip('_')}"
            mma = "mma" if "d512" in label and kernel == "prefill" else expected.get(kernel, "")
            yield KernelSpec(name, "triton", shape_class, launch, kernel not in prompts, mma)


def _latent_calls(dtype: torch.dtype, card: Card) -> Iterator[Call]:
    """Latent attention of GLM-4.7 Flash, DeepSeek V2 Lite and V3; of GLM-5.3 Flash, over chosen blocks of 4 tokens."""
    if not 80 <= card.capability < AMD:
        return
    table, bounds, lengths = (_meta(torch.int32, *shape) for shape in ((1, 2048), (2,), (1,)))
    native = TYPES[dtype].removeprefix("*")
    for kv_format, heads in ((native, 20), (native, 16), ("int8", 20), ("fp8", 128)):
        given = (_meta(dtype, 1, heads, 576), latent_pages(kv_format), table, bounds, lengths, 0.1)
        yield "latent_attention", f"{kv_format} {heads} x 512 + 64", partial(attend, *given)
    for kv_format in (native, "fp8"):
        given = (
            _meta(dtype, 1, 64, 512),
            latent_pages(kv_format, 4, 0),
            _meta(torch.int32, 1, 513),
            bounds,
            lengths,
            0.1,
        )
        yield "latent_attention", f"{kv_format} 64 x 512, sparse", partial(attend, *given)
    view = *(_meta(torch.float32, 1, 32) for _ in range(2)), table, _meta(torch.int64, 1)
    for kv_format, heads, query_rank, still in ((native, 20, 768, 192), ("int8", 16, 256, 128), ("fp8", 32, 0, 128)):
        weights = latent_weights(dtype, heads, query_rank, still, gated=heads == 16)
        call = partial(latent_step, _meta(dtype, 1, 2048), weights, latent_pages(kv_format), view, bounds, lengths)
        yield "latent_attention", f"{kv_format} {heads} heads of {still}, step", call


def _entry_calls(dtype: torch.dtype, card: Card) -> Iterator[Call]:
    """Compressed attention of DeepSeek V4 Flash: no entries, entries of 4 tokens and their index, entries of 128."""
    if not 80 <= card.capability < AMD:
        return
    table, slots, count = _meta(torch.int32, 1, 2048), _meta(torch.int64, 1), _meta(torch.int32, 1)
    where, angles = (_meta(torch.int32, 2), count), (_meta(torch.float32, 1, 32),) * 2
    native, op, heads = TYPES[dtype].removeprefix("*"), "compressed_attention", _meta(dtype, 1, 64, 512)
    for kv_format in (native, "int8", "fp8"):
        for ratio in (0, 4, 128):
            weights, window = entry_weights(dtype, ratio), _pages(kv_format, 1, 16, 512)
            window, entries = window._replace(v=window.v[..., :0]), None
            made = [_meta(dtype, 1, pool.rows.out_features) for pool in weights.pools]
            if ratio:
                window = window._replace(index_keys=_meta(torch.bfloat16, 1, 16, sum(one.shape[1] for one in made)))
                width = sum(pool.norm.weight.shape[0] for pool in weights.pools)
                entries = KVPages(window.v, window.v, block_keys=_meta(torch.bfloat16, 1, 16 // min(ratio, 16), width))
            label, chosen = f"{kv_format} entries of {ratio}", None
            if entries is not None and weights.index is not None:
                chosen = _meta(torch.int32, 1, weights.index.top + 1), count
            kept = _meta(dtype, 1, 512), weights.kv_norm, window, slots, made
            yield op, f"{label}, heads", partial(turned, heads, angles, weights.head_norm, kept)
            given = heads, weights, window, entries, (table, table), chosen, where, False
            yield op, f"{label}{', step' * (kv_format != native)}", partial(attended, *given)
            if kv_format == native and entries is not None:
                rest = weights, window, entries, angles, table, slots, where
                yield op, f"{label}, made, step", partial(completed, *rest)
                if weights.index is not None:
                    asked = _meta(dtype, 1, 64, 128), _meta(dtype, 1, 64)
                    call = partial(choose_entries, asked, weights.index.top, weights, entries, table, where)
                    yield op, f"{label}, chosen, step", call
    yield op, "rotated back", partial(turned, heads, angles, sign=-1.0)
    yield op, "index queries", partial(turned, _meta(dtype, 1, 64, 128), angles)


def entry_weights(dtype: torch.dtype, ratio: int) -> CompressedWeights:
    """Weights of a layer of compressed attention; entries of four tokens overlap and have an index."""
    part, linear, sets = partial(_dense_part, dtype), partial(_dense_linear, dtype), 1 + (ratio == 4)

    def norm(size: int) -> Norm:
        return Norm(_meta(torch.float32, size), 1e-6)

    def pool(width: int) -> PoolWeights:
        return PoolWeights(linear(2 * sets * width, 4096), _meta(torch.float32, ratio, sets * width), norm(width))

    return CompressedWeights(
        norm=norm(4096),
        inputs=linear(1024 + 512, 4096),
        q_norm=norm(1024),
        q_up=linear(64 * 512, 1024),
        head_norm=norm(512),
        kv_norm=norm(512),
        narrow=(linear(1024, 4096),) * 8,
        out=linear(4096, 8192),
        sinks=_meta(torch.float32, 64),
        num_heads=64,
        head_dim=512,
        scale=512**-0.5,
        window=128,
        interleaved=True,
        pools=(pool(512), pool(128))[: sets * bool(ratio)],
        ratio=ratio,
        overlaps=ratio == 4,
        back=_meta(torch.float32, 2, 32) if ratio else None,
        index=EntryIndexWeights(linear(64 * 128, 1024), linear(64, 4096), 64, 512) if ratio == 4 else None,
        stacked=part(8192, 4096),
    )


def latent_pages(kv_format: str, page: int = 16, turned: int = 64) -> KVPages:
    """One page of latents of 512 + `turned` elements."""
    empty = KVPages.empty(kv_format, 1, 1, page, 512, turned)
    return KVPages(*(None if part is None else part.to("meta") for part in empty))


def _hyper_calls(dtype: torch.dtype) -> Iterator[Call]:
    """Hyper-connections of Qwen3.8-Flash-Next."""
    count, hidden, rank = 4, 2560, 320
    wide, linear = count * hidden, partial(_dense_linear, dtype)
    norm, x = Norm(_meta(torch.float32, wide), 1e-6), _meta(dtype, 1, wide)
    weights = HyperWeights(count, norm, linear(rank + count, wide), linear(wide, rank), rank)
    yield "hyper_in", f"{count} x {hidden} step", partial(hyper_in, _declined, x, weights)
    given = x, _meta(dtype, 1, hidden), _meta(torch.float32, 1, count)
    yield "hyper_out", f"{count} x {hidden}", partial(hyper_out, _declined, *given)
    # GLM-5.3 Flash
    hidden, rows = 4096, (2 + count) * count
    fn, base, scale = (_meta(torch.float32, *shape) for shape in ((rows, count * hidden), (rows,), (3,)))
    mixed, x = MixedWeights(count, fn, base, scale, 20, 1e-6, 1e-5), _meta(dtype, 1, count * hidden)
    yield "hyper_in", f"{count} x {hidden} mixed step", partial(hyper_in, _declined, x, mixed)
    given = x, _meta(dtype, 1, hidden), _meta(torch.float32, 1, count + count**2)
    yield "hyper_out", f"{count} x {hidden} mixed", partial(hyper_out, _declined, *given)


def _declined(*_: object) -> Any:
    raise AssertionError("a fused segment declined its weights")


def _dense_part(dtype: torch.dtype, n: int, k: int) -> LinearPart:
    form = next(form for form in FORMS if form.code == ("f16" if dtype is torch.float16 else "bf16"))
    impl = next(impl for impl in IMPLS["linear"] if impl.name == "triton")
    return LinearPart(impl, described(form, n, k), None, (n, k))


def _dense_linear(dtype: torch.dtype, n: int, k: int) -> Linear:
    return Linear((_dense_part(dtype, n, k),))


def latent_weights(dtype: torch.dtype, heads: int, query_rank: int, still: int, *, gated: bool) -> LatentWeights:
    """Weights of a layer with a hidden size of 2,048, latents of 512 + 64, and values of 256."""
    norm, queries = Norm(_meta(torch.float32, 512), 1e-6), heads * (still + 64)
    part, linear = partial(_dense_part, dtype), partial(_dense_linear, dtype)
    return LatentWeights(
        norm=Norm(_meta(torch.float32, 2048), 1e-6),
        qkv=linear((query_rank or queries) + 576 + heads * gated, 2048),
        q_up=linear(queries, query_rank) if query_rank else None,
        q_norm=Norm(_meta(torch.float32, query_rank), 1e-6) if query_rank else None,
        kv_norm=norm,
        k_up=(linear(512, still),) * heads,
        v_up=(linear(256, 512),) * heads,
        out=linear(2048, heads * 256),
        rank=512,
        turned=64,
        scale=0.1,
        interleaved=bool(query_rank),
        gated=gated,
        stacked=(part(heads * 512, still), part(heads * 256, 512)),
    )


Call = tuple[str, str, Callable[[], object]]  # op, shape class, the call


def _row_calls(dtype: torch.dtype) -> Iterator[Call]:
    """Row-wise ops: hidden size 4,096, head_dim 128, full RoPE, partial interleaved RoPE, a vocabulary of 151,936."""
    for shape in ((1, HIDDEN), (32, 128)):
        weight = _meta(torch.float32, shape[1])
        yield "rms_norm", str(shape[1]), partial(rms_norm, _meta(dtype, *shape), weight, 1e-6)
        yield "layer_norm", str(shape[1]), partial(normed, _meta(dtype, *shape), Norm(weight, 1e-5, weight))
        yield "group_norm", str(shape[1]), partial(normed, _meta(dtype, *shape), Norm(weight, 1e-6, None, 4))
        added = partial(add_normed, _meta(dtype, *shape), _meta(dtype, *shape), Norm(weight, 1e-6))
        yield "rms_norm", f"{shape[1]} added", added
    for label, dim, half, interleaved in (("d128", 128, 64, False), ("d96 partial interleaved", 96, 16, True)):
        angles = _meta(torch.float32, 1, half)
        yield "rope", label, partial(rope, _meta(dtype, 1, 12, dim), angles, angles, interleaved)
    for op in (silu_mul, gelu_tanh_mul):
        for label, limit in (("rows", None), ("rows clamped", 7.0)):
            yield op.__name__, label, partial(op, _meta(dtype, 1, 2 * INTERMEDIATE), limit)
    given = _meta(dtype, 1, 35 * 256)[:, 256:512]  # Gemma 4 E2B
    yield "layer_input", "gates", partial(gate_rows, _meta(dtype, 1, 256), given, "gelu_tanh")
    # Qwen3.8-Flash-Next
    table, lens = _meta(torch.int32, 1, 700), _meta(torch.int32, 1)
    for label, kind in (("d128", torch.bfloat16), ("d128 wide", torch.float32)):
        q, keys = _meta(dtype, 1, 4, 128), _meta(kind, 700, 128)
        yield "index_scores", label, partial(index_scores, q, keys)
        yield "index_scores", f"{label} pages", partial(index_scores, q, _meta(kind, 700, 4, 128), table)
        kept = _meta(kind, 1, 16, 128), _meta(kind, 1, 4, 128)
        pages = _pages("bf16", 2, 16, 128)._replace(index_keys=kept[0], block_keys=kept[1])
        angles, norm = _meta(torch.float32, 1, 32), Norm(_meta(torch.float32, 128), 1e-6)
        where = _meta(torch.int64, 1), angles, angles, _meta(torch.float32, 2, 32)
        yield "index_write", label, partial(index_write, _meta(dtype, 1, 640)[:, 512:], norm, pages, *where)
        # GLM-5.3 Flash
        kept, q, shares = (_meta(kind, 1, 16, 256), kept[1]), _meta(dtype, 1, 32, 128), _meta(torch.float32, 1, 32)
        pages = pages._replace(index_keys=kept[0], block_keys=kept[1])
        given = _meta(dtype, 1, 256), _meta(torch.float32, 4, 128), pages, _meta(torch.int64, 1)
        yield "index_pool", label, partial(index_pool, *given)
        weighted = _meta(kind, 700, 4, 128), table, shares
        yield "index_scores", f"{label} pages, weighted", partial(index_scores, q, *weighted)
    scores = _meta(torch.float32, 1, 2800)
    yield "choose_blocks", "512 of 2800", partial(choose_blocks, scores, table, lens, 4, 512, 4, 2)
    logits = _meta(torch.float32, 1, 151_936)
    yield "sample", "", partial(sample, logits, SamplingInputs.empty(1, 1, 151_936, "meta"))


def _pages(kv_format: str, kv_heads: int, page: int, dim: int) -> KVPages:
    empty = KVPages.empty(kv_format, 1, kv_heads, page, dim)
    return KVPages(*(None if part is None else part.to("meta") for part in empty))


def _page_calls(dtype: torch.dtype) -> Iterator[Call]:
    """KV writes in every format, with QK-norm before RoPE, after RoPE, and without."""
    native, slots = TYPES[dtype].removeprefix("*"), _meta(torch.int64, 1)
    for kv_format, dim in ((native, 128), ("int8", 128), ("fp8", 128), ("int8", 96)):
        kv = _meta(dtype, 1, 8, dim)
        yield "kv_write", f"{kv_format} d{dim}", partial(kv_write, kv, kv, _pages(kv_format, 8, 16, dim), slots)
    for kv_format, dim, of in (
        (native, 128, "norm"),
        ("int8", 128, "norm"),
        (native, 128, "late norm"),
        ("fp8", 96, ""),
    ):
        angles, norm = _meta(torch.float32, 1, dim // 2), Norm(_meta(torch.float32, dim), 1e-6)
        kept, norms = (_pages(kv_format, 8, 16, dim), slots), (norm, norm) if of else None
        given = (_meta(dtype, 1, 48 * dim), (32, 8, dim, dim), (angles, angles), kept, norms)
        call = partial(qk_norm_rope_kv, *given, late_norms=of == "late norm")
        yield "qk_norm_rope_kv", f"{kv_format} d{dim} {of}".rstrip(), call
    angles = _meta(torch.float32, 1, 32)
    for kv_format in (native, "fp8", "int8"):  # MiMo-V2
        kept = _pages(kv_format, 8, 16, 192), slots
        given = (_meta(dtype, 1, 72 * 192 + 8 * 128), (64, 8, 192, 128), (angles, angles), kept, None)
        call = partial(qk_norm_rope_kv, *given, value_scale=0.707)
        yield "qk_norm_rope_kv", f"{kv_format} d192 values of 128", call
    angles, norm = _meta(torch.float32, 1, 64), Norm(_meta(torch.float32, 128), 1e-6)
    for kv_format in (native, "fp8"):
        kept = _pages(kv_format, 8, 16, 128), slots
        given = (_meta(dtype, 1, 16 * 128), (0, 8, 128, 128), (angles, angles), kept, (norm, norm))
        yield "qk_norm_rope_kv", f"{kv_format} d128 without queries", partial(qk_norm_rope_kv, *given)
    for dim, kv_heads, shared in ((256, 8, False), (512, 2, True)):  # Gemma 4 26B
        angles, norm = _meta(torch.float32, 1, dim // 2), Norm(_meta(torch.float32, dim), 1e-6)
        for kv_format in (native, "int8", "fp8"):
            kept, rows = (_pages(kv_format, kv_heads, 16, dim), slots), 16 + kv_heads * (1 if shared else 2)
            given = (_meta(dtype, 1, rows * dim), (16, kv_heads, dim, dim), (angles, angles), kept, (norm, norm))
            call = partial(qk_norm_rope_kv, *given, v_norm=norm, k_is_v=shared)
            yield "qk_norm_rope_kv", f"{kv_format} d{dim} values {'of keys' if shared else 'normed'}", call


def _gate_calls(dtype: torch.dtype) -> Iterator[Call]:
    """Gated attention of Qwen3.5 27B and Laguna: QK-norm and RoPE, attention over spaced queries, and the gates."""
    native, (slots, table) = TYPES[dtype].removeprefix("*"), (_meta(torch.int64, 1), _meta(torch.int32, 1, 2048))
    bounds, lengths = _meta(torch.int32, 2), _meta(torch.int32, 1)
    for dim, heads, kv_heads, half, gate in ((256, 24, 4, 32, "queries"), (128, 48, 8, 32, "heads")):
        angles, norm = _meta(torch.float32, 1, half), Norm(_meta(torch.float32, dim), 1e-6)
        rows = (heads + 2 * kv_heads) * dim + heads * (1 if gate == "heads" else dim)
        for kv_format in (native, "int8", "fp8"):
            kept = _pages(kv_format, kv_heads, 16, dim), slots
            given = (_meta(dtype, 1, rows), (heads, kv_heads, dim, dim), (angles, angles), kept, (norm, norm))
            call = partial(qk_norm_rope_kv, *given, gate=gate)
            yield "qk_norm_rope_kv", f"{kv_format} d{dim} gated {gate}", call
        gated = partial(times_gates, _meta(dtype, 1, heads * dim), _meta(dtype, 1, heads, 2 * dim), gate == "heads")
        yield "times_gates", f"d{dim} {'softplus' if gate == 'heads' else 'sigmoid'}", gated
        for tokens, kv_format in ((1, native), (1, "fp8"), (512, native)):
            q, pages = _meta(dtype, tokens, heads, 2 * dim)[..., :dim], _pages(kv_format, kv_heads, 16, dim)
            call = partial(paged_attention, q, pages, table, bounds, lengths, dim**-0.5)
            yield "paged_attention", f"{kv_format} d{dim} g{heads // kv_heads} p16 gated", call


def _attention_calls(dtype: torch.dtype, card: Card) -> Iterator[Call]:
    """Head sizes of the models, chunked attention, and window, soft-cap and sinks combined.

    (tokens, format, head_dim, query heads per KV head, KV heads, page size, extras)
    """
    native, has_mma = TYPES[dtype].removeprefix("*"), 80 <= card.capability < AMD
    for tokens, kv_format, dim, group, kv_heads, page, extras in (
        (1, native, 128, 4, 8, 16, ""),
        (1, native, 64, 3, 3, 16, "window softcap sinks"),
        (1, native, 256, 4, 1, 32, ""),
        (1, native, 256, 12, 2, 16, ""),
        *((1, kv, 256, 12, 1, 4, "") for kv in (native, "int8", "fp8") if has_mma),  # blocks of sparse attention
        *((tokens, kv, 512, 8, 2, 16, "") for tokens in (1, 512) for kv in (native, "fp8") if has_mma),
        (1, "int8", 128, 8, 4, 16, ""),
        (1, "fp8", 128, 4, 8, 16, ""),
        (1, "fp8", 96, 12, 4, 64, "window softcap sinks"),
        (1, "int8", 64, 8, 8, 16, ""),
        (512, native, 128, 4, 8, 16, ""),
        (512, native, 256, 4, 1, 16, "window softcap sinks"),
        (64, "fp8", 128, 4, 8, 16, ""),
        (512, "fp8", 128, 4, 8, 16, ""),
        (512, "int8", 64, 3, 3, 64, ""),
        *((1, kv, 128, 5, 8, 16, "chunks") for kv in (native, "int8", "fp8")),
        (512, native, 128, 5, 8, 16, "chunks"),
    ):
        q, table = _meta(dtype, tokens, group * kv_heads, dim), _meta(torch.int32, 1, 2048 if tokens == 1 else 256)
        bounds, lengths = _meta(torch.int32, 2), _meta(torch.int32, 1)
        given = (q, _pages(kv_format, kv_heads, page, dim), table, bounds, lengths, dim**-0.5)
        more: dict[str, Any] = {"window": 8192, "chunked": True} if extras == "chunks" else {}
        if extras.startswith("window"):
            more = {"window": 1024, "softcap": 30.0, "sinks": _meta(torch.float32, group * kv_heads)}
        label = f"{kv_format} d{dim} g{group} p{page} {extras}".rstrip() + " few" * (tokens == 64)
        by_token = "sinks" in more and tokens == 1
        yield "paged_attention", label, partial(paged_attention, *given, **more, by_token=by_token)
        if kv_format == "fp8" and tokens == 1 and (tile := decode_tiles(card.family, kv_format, dim, group)[-1]).native:
            how = more.get("window"), more.get("softcap"), more.get("sinks"), extras == "chunks"
            yield "paged_attention", f"{label} native", partial(_attend_with, tile, how, *given)


def _attend_with(tile: Tile, how: tuple[Any, ...], *given: Any) -> None:
    """Decode attention of one query with this tile; `how`: window, soft-cap, sinks, chunks."""
    q, pages, table, bounds, lengths, scale = given
    AttentionStep(q, pages, table, bounds, lengths, (scale, *how)).decode(0, 1, False, tile)  # type: ignore[arg-type]


def _state_calls(dtype: torch.dtype, card: Card) -> Iterator[Call]:
    """Recurrent ops of Qwen3.5 27B, Kimi Linear, Nemotron-H and LFM2, and odd sizes; one token, and a prompt."""
    slots, bounds = _meta(torch.int64, 1), _meta(torch.int32, 2)
    for tokens in (1, 512):
        name = "token" if tokens == 1 else "prompt"
        for channels, width, silu in ((10240, 4, True), (2048, 3, False)):
            weight, state = _meta(torch.float32, channels, width), _meta(torch.float32, 1, channels, width - 1)
            of_conv = (_meta(dtype, tokens, channels), weight, None, state, slots, bounds, silu)
            yield "causal_conv", f"{channels} x {width} {name}", partial(causal_conv, *of_conv)
            of_rows = (_meta(dtype, tokens, 3 * channels), weight, None, state, slots, bounds)
            yield "short_conv", f"{channels} x {width} {name}", partial(gated_conv, *of_rows)
        y, z = _meta(torch.float32, tokens, 48, 128), _meta(dtype, tokens, 48 * 128)
        norm = Norm(_meta(torch.float32, 128), 1e-6)
        yield "gated_delta", f"gates {name}", partial(gated_norm, y, z, norm, is_sigmoid=tokens > 1)
        for groups in (1, 8, 0):  # Granite 4, Nemotron 3, Falcon-H1, which has no norm
            y, vector = _meta(torch.float32, tokens, 128, 64), _meta(torch.float32, 128 * 64)
            z, norm = _meta(dtype, tokens, 128 * 64), Norm(_meta(torch.float32, 128 * 64 // max(groups, 1)), 1e-5)
            call = partial(gated_groups, y, y, z, vector, (norm, vector) if groups else None, groups)
            yield "mamba", f"gates, norm of {groups} groups, {name}", call
    # single tokens; chunked prompts only on GPUs with tensor cores
    for count, name in ((1, ""), (512, " prompt"))[: 1 + (80 <= card.capability < AMD)]:
        for k_heads, heads, k_dim, dim in ((16, 48, 128, 128), (2, 4, 20, 24)):
            q, v = _meta(torch.float32, count, k_heads, k_dim), _meta(torch.float32, count, heads, dim)
            rate, state = _meta(torch.float32, count, heads), _meta(torch.float32, 1, heads, dim, k_dim)
            for channels, by in ((1, ""), (k_dim, " by channel")):
                decay = rate if channels == 1 else _meta(torch.float32, count, heads, k_dim)
                given = (q, q, v, decay, rate, state, slots, bounds)
                yield "delta_rule", f"{k_dim} x {dim}{by}{name}", partial(delta_rule, *given)
                raw = Raw(_meta(torch.float32, heads * channels), _meta(torch.float32, heads), -5.0 * (channels > 1))
                a, b, tail = decay.to(dtype), rate.to(dtype), (True, False, False, raw)
                call = partial(run, (v, q, q), a, b, (state, slots, bounds), *tail)
                yield "delta_rule", f"{k_dim} x {dim}{by}{name} raw", call
                if count == 1:
                    ending = _meta(dtype, 1, heads * dim), Norm(_meta(torch.float32, dim), 1e-6), channels > 1
                    call = partial(gated_delta_rule, (v, q, q), a, b, (state, slots, bounds), *tail[1:], ending)
                    yield "delta_rule", f"{k_dim} x {dim}{by} raw gated", call
        for heads, groups, dim, size in ((128, 8, 64, 128), (4, 2, 10, 20)):
            x, b = _meta(torch.float32, count, heads, dim), _meta(torch.float32, count, groups, size)
            steps, decay = _meta(torch.float32, count, heads), _meta(torch.float32, heads)
            state = _meta(torch.float32, 1, heads, dim, size)
            given = (x, b, b, steps, decay, state, slots, bounds)
            yield "state_space", f"{dim} x {size}{name}", partial(state_space, *given)
            raw = Raw(decay, decay, steps=(0.001, 0.1))
            call = partial(run, (x, b, b), decay, steps.to(dtype), (state, slots, bounds), False, False, raw=raw)
            yield "state_space", f"{dim} x {size}{name} raw", call
            for normed_groups in (groups, 0) if count == 1 else ():
                vector = _meta(torch.float32, heads * dim)
                norms = (Norm(_meta(torch.float32, heads * dim // groups), 1e-5), vector) if normed_groups else None
                of_groups = _meta(dtype, 1, heads * dim), vector, norms, normed_groups
                states = state, slots, bounds
                call = partial(gated_state_space, (x, b, b), decay, steps.to(dtype), states, False, raw, of_groups)
                yield "state_space", f"{dim} x {size} raw gated, norm of {normed_groups} groups", call


# ---- products


def _recorded(card: Card, call: Callable[[], object]) -> list[Launch]:
    with recording(card) as launches:
        call()
    return launches


def _linear(label: str, card: Card, call: Callable[[], object], **more: Any) -> KernelSpec:
    return KernelSpec("linear", "triton", label, _recorded(card, call)[-1], **more)


def _decode_specs(form: Form, dtype: torch.dtype, card: Card) -> Iterator[KernelSpec]:
    p = described(form, HIDDEN, HIDDEN)
    wide = described(form, 2 * INTERMEDIATE, HIDDEN)
    x, out = _meta(dtype, 1, HIDDEN), _meta(dtype, 1, HIDDEN)
    fused = Extras(_meta(torch.float32, HIDDEN), Norm(_meta(torch.float32, HIDDEN), 1e-6), out)
    yield _linear(f"{form.name} M=1", card, partial(product, x, p), decode=True)
    before = _recorded(card, partial(product, x, p, fused))[:-1]  # the kernel that converts x
    yield from (KernelSpec("digits", "triton", form.name, one, decode=True) for one in before)
    if form.name in MAIN_FORMS:
        yield _linear(f"{form.name} M=1 norm residual", card, partial(product, x, p, fused), decode=True)
        fused = Extras(norm=fused.norm, gate="silu")
        yield _linear(f"{form.name} M=1 norm gated", card, partial(product, x, wide, fused), decode=True)
        call = partial(chained, x, wide, fused, described(form, HIDDEN, INTERMEDIATE), PLAIN)
        for one in _recorded(card, call):
            if one.kernel is gemv_digits_kernel:
                yield KernelSpec("linear", "triton", f"{form.name} M=1 norm gated converted", one, decode=True)


def _heads_specs(dtype: torch.dtype, card: Card) -> Iterator[KernelSpec]:
    """QKV products of one row that finish their heads: of an 8B model, and gated heads of 256."""
    native, impl = TYPES[dtype].removeprefix("*"), next(one for one in IMPLS["linear"] if one.name == "triton")
    cases = [(form.name, "fp8", 128) for form in FORMS if form.name in MAIN_FORMS]
    cases += [("int4 g128", kv_format, dim) for kv_format in (native, "int8", "fp8") for dim in (128, 256)]
    forms = {form.name: form for form in FORMS if form.code != "bf16" or card.capability >= 80}
    for name, kv_format, dim in dict.fromkeys(cases):
        if name not in forms:
            continue
        heads, kv_heads, gated = HIDDEN // dim, 8, dim == 256
        n, norm = (heads * (1 + gated) + 2 * kv_heads) * dim, Norm(_meta(torch.float32, dim), 1e-6)
        part = LinearPart(impl, described(forms[name], n, HIDDEN), None, (n, HIDDEN))
        first, pages = Norm(_meta(torch.float32, HIDDEN), 1e-6), _pages(kv_format, kv_heads, 16, dim)
        both = first, Linear((part,)), Linear((part,))
        weights = AttentionWeights(*both, heads, kv_heads, dim, 0.1, norm, norm, gate=gated)
        angles, slots = _meta(torch.float32, 1, 32 if gated else 64), _meta(torch.int64, 1)
        call = partial(attn_in, _declined, _meta(dtype, 1, HIDDEN), weights, angles, angles, pages, slots)
        label = f"{name} M=1 norm heads of {dim}{' gated' * gated} {kv_format}"
        yield _linear(label, card, call, decode=True)
        if kv_format == "fp8" and dim == 128:  # the first product of a recurrent layer
            kept = _meta(torch.float32, 1, n // 2, 3), slots, _meta(torch.int32, 2)
            for bias in (None, _meta(torch.float32, n // 2)):
                conv = _meta(torch.float32, n // 2, 4), bias
                call = partial(projected_conv, _meta(dtype, 1, HIDDEN), first, (part,), conv, kept, n // 4)
                label = f"{name} M=1 norm convolved{' bias' * (bias is not None)}"
                yield _linear(label, card, call, decode=True)


def _batch_specs(form: Form, dtype: torch.dtype, card: Card) -> Iterator[KernelSpec]:
    if card.capability < 80:
        why = "Triton cannot use its tensor cores: up to 4 rows run as GEMV, more through dequantized slabs"
        yield KernelSpec("linear", "triton", f"{form.name} M=16", reason=why)
        return
    mma = {90: "wgmma", 100: "tcgen05", 942: "v_mfma", 1100: "v_wmma", 1201: "v_wmma"}.get(card.capability, "mma.sync")
    p, wide = described(form, HIDDEN, HIDDEN), described(form, 2 * INTERMEDIATE, HIDDEN)
    fixed = is_fixed(form.code, p.run, card)
    for tokens in (2, 4) if form.name in MAIN_FORMS and card.capability < AMD else ():
        if tokens <= few_rows(form.code, fixed):
            x, out = _meta(dtype, tokens, HIDDEN), _meta(dtype, tokens, HIDDEN)
            tiles = few_tiles(HIDDEN, HIDDEN, form.code, card, False, fixed, form.group)
            call = partial(launch_gemv, x, p, out, PLAIN, next(tile for tile in tiles if "chunks" in tile))
            yield _linear(f"{form.name} M={tokens}", card, call, decode=True)
            call = partial(chained, x, wide, Extras(gate="silu"), described(form, HIDDEN, INTERMEDIATE), PLAIN)
            for one in _recorded(card, call):
                if one.kernel is gemv_digits_kernel:
                    label = f"{form.name} M={tokens} gated converted"
                    yield KernelSpec("linear", "triton", label, one, decode=True)
    for tokens in (8, 16, 64, 128) if form.name in MAIN_FORMS else (16, 64):
        x, out = _meta(dtype, tokens, HIDDEN), _meta(dtype, tokens, HIDDEN)
        call = partial(
            launch_gemm, x, p, out, PLAIN, gemm_tiles(HIDDEN, HIDDEN, form.code, tokens, card, group=form.group)[0]
        )
        expected = mma if tokens >= 64 else ""
        yield _linear(f"{form.name} M={tokens}", card, call, decode=tokens <= 16, expect_mma=expected)
    for tokens in () if form.name not in MAIN_FORMS else (16,) if form.code in ("bf16", "f16") else (16, 64):
        gated = partial(product, _meta(dtype, tokens, HIDDEN), wide, Extras(gate="silu"))
        expected = mma if tokens >= 64 else ""
        yield _linear(f"{form.name} M={tokens} gated", card, gated, decode=tokens <= 16, expect_mma=expected)


# Qwen3 30B-A3B, once with clamped experts as in Ling 3.0; gpt-oss 20B: number of experts, top-k, hidden, intermediate,
# form, router, gate, limit
MIXTURES = (
    (128, 8, 2048, 768, "int4 g128", "softmax", "silu", 0.0),
    (128, 8, 2048, 768, "int4 g128", "sigmoid", "silu", 7.0),
    (128, 8, 2048, 768, "int4 sub", "sigmoid", "silu", 0.0),
    (128, 8, 2048, 768, "e2m1 e4m3", "softmax", "silu", 0.0),
    (128, 8, 2048, 768, "bf16", "softmax", "silu", 0.0),
    (32, 4, 2880, 2880, "e2m1 e8m0", "softmax_topk", "swiglu_oai", 7.0),
    (256, 6, 4096, 2048, "e2m1 e8m0", "sqrt_softplus", "silu", 10.0),
)


def _expert_specs(dtype: torch.dtype, card: Card) -> Iterator[KernelSpec]:
    """Expert routing, and expert products of single tokens and in tiles."""
    forms = {form.name: form for form in FORMS}
    if not 80 <= card.capability < AMD:
        yield KernelSpec("experts", "triton", "token", reason="experts run one at a time on this GPU")
        return
    for count, top_k in ((128, 8), (32, 4)):
        chosen, size = _meta(torch.int32, 512, top_k), tile_size(512 * top_k, count)
        for launch in _recorded(card, partial(sorted_by_expert, chosen, count, size)):
            kernel = launch.kernel.__name__.strip("_")
            yield KernelSpec("experts", "triton", f"{count} {kernel}", launch, decode=True)
    impl = next(one for one in IMPLS["linear"] if one.name == "triton")

    def dense(n: int, k: int) -> Linear:
        return Linear((LinearPart(impl, described(forms["bf16"], n, k), None, (n, k)),))

    def unfused(*given: Any, **how: Any) -> Tensor:
        raise AssertionError("a step of few rows is fused")

    for count, top_k, hidden, inner, name, router, gate, limit in MIXTURES:
        up, down = described(forms[name], count * 2 * inner, hidden), described(forms[name], count * hidden, inner)
        bias = _meta(torch.float32, count) if router in ("sigmoid", "sqrt_softplus") else None
        biases = (_meta(torch.float32, len(up.low)), _meta(torch.float32, len(down.low)))
        both = biases if gate == "swiglu_oai" else (None, None)
        parts = [LinearPart(impl, p, one, p.shape) for p, one in zip((up, down), both, strict=True)]
        norm, more = Norm(_meta(torch.float32, hidden), 1e-6), dict[str, Any]()
        if router == "sigmoid":
            more = {"shared_gate_up": dense(2 * inner, hidden), "shared_down": dense(hidden, inner)}
            more["shared_gate"] = dense(1, hidden)
        weights = ExpertsWeights(
            norm, dense(count, hidden), (), (Linear((parts[1],)),) * count, top_k, router, gate,
            choice_bias=bias, limit=limit or None, stacked=(parts[0], parts[1]), **more,
        )  # fmt: skip
        label = f"{name} {count} x {inner}{' clamped' * bool(limit)}"
        for launch in _recorded(card, partial(experts, unfused, _meta(dtype, 1, hidden), weights)):
            kernel = launch.kernel.__name__.strip("_")
            if launch.constexprs.get("SHARE") or kernel == "gemv_route_kernel":
                place = " gated" * (launch.constexprs.get("GATE", "") != "")
                yield KernelSpec("experts", "triton", f"{label} token {kernel}{place}", launch, True)
        for tokens, size in ((8, 8), (512, 64)):
            for launch in _recorded(card, partial(_tiled_experts, weights, tokens, size)):
                kernel = launch.kernel.__name__.strip("_")
                if kernel == "gemm_kernel" or (size == 8 and kernel in ("route_kernel", "sum_kernel")):
                    place = " gated" * (launch.constexprs.get("GATE", "") != "")
                    yield KernelSpec("experts", "triton", f"{label} tiles of {size} {kernel}{place}", launch, size < 64)


def _tiled_experts(weights: ExpertsWeights, tokens: int, size: int) -> None:
    """Routing, products in tiles of `size` pairs, and sums."""
    assert weights.stacked is not None
    (up, down), count, dtype = weights.stacked, len(weights.down), torch.bfloat16
    chosen, shares = routed(_meta(dtype, tokens, count), weights)
    tiles = Tiles(size, _meta(torch.int32, 9 * size), _meta(torch.int32, 9))
    pairs, x = Pairs(chosen, count, tiles), _meta(dtype, tokens, up.shape[1])
    gated = Extras(up.bias, gate=weights.activation, limit=weights.limit or 0.0)
    made = expert_product(expert_product(x, up.prepared, gated, pairs), down.prepared, Extras(down.bias), pairs)
    shared = (x, x[:, :1]) if weights.shared_gate is not None else ()
    small = tokens <= SMALL_TOKENS
    summed(made, Sums(shares, x if small else _meta(torch.float32, *x.shape), *((x, *shared) if small else ())))


def _rounding_specs(card: Card) -> Iterator[KernelSpec]:
    """Products with activations quantized to FP8 and to NVFP4."""
    forms = {form.name: form for form in FORMS}
    fp8, nvfp4 = "triton_fp8_w8a8", "triton_nvfp4_w4a4"
    if card.capability >= AMD:
        yield KernelSpec("linear", fp8, "w8a8 and w4a4", reason="quantized activations need an NVIDIA GPU")
        return
    if card.capability < FP8_CAPABILITY:
        why = "no FP8 instructions below compute capability 8.9"
        yield KernelSpec("linear", fp8, "e4m3 w8a8 M=256", reason=why)
    for name in ("e4m3 row", "e4m3 block128") if card.capability >= FP8_CAPABILITY else ():
        for tokens in (64, 256):
            x = _meta(torch.bfloat16, tokens, HIDDEN)
            launches = _recorded(card, partial(narrow_product, x, described(forms[name], HIDDEN, HIDDEN)))
            if tokens == 64:
                yield KernelSpec("quantize", "triton", name, launches[0])
            yield KernelSpec("linear", fp8, f"{name} w8a8 M={tokens}", launches[1])
    label = "nvfp4 w4a4 dot_scaled"
    if card.capability < FP4_CAPABILITY:
        yield KernelSpec("linear", nvfp4, label, reason="no FP4 instructions below compute capability 10.0")
        return
    x, p = _meta(torch.bfloat16, 256, HIDDEN), described(forms["e2m1 e4m3"], HIDDEN, HIDDEN)
    launches = _recorded(card, partial(narrow_product, x, p))
    yield KernelSpec("quantize", "triton", "nvfp4", launches[0])
    yield KernelSpec("linear", nvfp4, label, launches[1], expect_mma="mxf4nvf4.block_scale")

"""Fused segments for the CPU: each is a single C call. Listed in `ops.IMPLS`.

Each function takes the composed segment first and falls back to it if another back end prepared the layer's weights.
The C struct of a layer is built once and cached on the first of its prepared weights, so it lives as long as they do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from .. import mixers
from ..embedding import Embedding
from ..kv_pages import SCALED_FORMATS, CompressedPages, KVPages
from ..layer_weights import (
    FUSED_ATTENTION,
    FUSED_HYPER,
    AttentionWeights,
    CompressedWeights,
    ConvWeights,
    DeltaWeights,
    ExpertsWeights,
    FeedForwardWeights,
    HeadWeights,
    HyperWeights,
    LatentWeights,
    LayerCache,
    LayerCall,
    Linear,
    MambaWeights,
    MixedWeights,
    MixerWeights,
    MlpWeights,
    Stepped,
    View,
    has_only,
    linears_of,
)
from ..state_slots import PagesAndSlots, StateSlots
from .adapters import CpuAdditions
from .build import lib
from .interface import (
    ATTENTION,
    ENTRIES,
    KV_TARGET,
    PASS,
    SEQUENCES,
    SLOTS,
    STEP,
    VIEW,
    VIEWS,
    CDecoderLayer,
    CKVPages,
    CStateSlots,
    kv_fields,
    pack_pages,
    slot_fields,
)
from .layers import (
    MOST_STREAMS,
    Layer,
    attention_layer,
    compressed_layer,
    conv_layer,
    delta_layer,
    experts_layer,
    head_layer,
    hyper_layer,
    latent_layer,
    mamba_layer,
    mixed_layer,
    mlp_layer,
)
from .layout import Prepared

_NO_SUCH_ROW = -3  # `ll_decoder`'s result for a token id outside the embedding
# part of `ll_pass`: no embedding and head, cos and sin given per token
_LAYERS_ONLY = (0, 0, 0, 1.0, 0, 0, 0)
_NO_ROWS = 1  # stands in for the null address of an empty tensor; never dereferenced


def attn_in(
    composed: Callable[..., Tensor],
    x: Tensor,
    weights: AttentionWeights,
    cos: Tensor,
    sin: Tensor,
    pages: KVPages,
    slot_mapping: Tensor,
) -> Tensor:
    """`mixers.attn_in`."""
    layer = _layer_of(weights.qkv, weights, attention_layer)
    if layer is None or x.dtype is not torch.float32 or not (x.is_contiguous() and cos.is_contiguous()):
        return composed(x, weights, cos, sin, pages, slot_mapping)
    num_tokens = x.shape[0]
    q = torch.empty((num_tokens, weights.num_heads, weights.head_dim * (1 + weights.gate)))
    step = STEP.pack(num_tokens, cos.shape[1], cos.data_ptr(), sin.data_ptr(), 0)
    step += pack_pages(pages) + KV_TARGET.pack(slot_mapping.data_ptr())
    _check(lib().ll_attn_in(layer.address, x.data_ptr(), step, q.data_ptr()))
    return q


def attention(
    composed: Callable[..., Tensor],
    q: Tensor,
    weights: AttentionWeights,
    pages: KVPages,
    block_table: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    """`mixers.attention`: [num_tokens, num_heads * values]."""
    known = has_only(weights, FUSED_ATTENTION | FUSED_HYPER, "norm")
    if not known or q.dtype is not torch.float32 or not (q.is_contiguous() and block_table.is_contiguous()):
        return composed(q, weights, pages, block_table, cu_query_lens, seq_lens)
    out = torch.empty((q.shape[0], weights.num_heads * weights.head_dim))
    how = (weights.scale, weights.window, weights.softcap, weights.sinks, weights.chunked)
    gate = weights.gate + weights.softplus_gate
    _check(run_attention(q, out, pages, block_table, cu_query_lens, seq_lens, how, gate))
    return (
        out if not weights.value_dim else out.unflatten(-1, (weights.num_heads, -1))[..., : weights.values].flatten(1)
    )


def run_attention(
    q: Tensor,
    out: Tensor,
    pages: KVPages,
    block_table: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    how: tuple[float, int | None, float | None, Tensor | None, bool],
    gate: int = 0,
) -> int:
    """Call `ll_attention` on contiguous tensors and return its status.

    how    scale, window, softcap, sinks, chunked
    gate   0 none, 1 sigmoid, 2 softplus
    """
    scale, window, softcap, sinks, chunked = how
    if q.shape[2] != pages.k.shape[3] * (1 + (gate > 0)):
        return -2
    places = (t.data_ptr() for t in (q, out, block_table, cu_query_lens, seq_lens))
    more = (0 if sinks is None else sinks.data_ptr(), *block_table.shape, q.shape[1], _window(window, chunked))
    arguments = ATTENTION.pack(*places, *more, scale, softcap or 0.0, 0, gate)
    failed: int = lib().ll_attention(pack_pages(pages) + arguments)
    return failed


def _window(window: int | None, chunked: bool) -> int:
    """The window as in `ll_attention_args`: 0 for none, negative if chunked."""
    return (-window if chunked else window) if window else 0


def attn_out(composed: Callable[..., Tensor], attended: Tensor, x: Tensor, weights: AttentionWeights) -> Tensor:
    """x + post_norm(attended Wᵀ): [num_tokens, hidden], in place."""
    layer = _layer_of(weights.qkv, weights, attention_layer)
    if layer is None or x.dtype is not torch.float32 or not (x.is_contiguous() and attended.is_contiguous()):
        return composed(attended, x, weights)
    _check(lib().ll_attn_out(layer.address, attended.data_ptr(), x.shape[0], x.data_ptr()))
    return x


def latent_attention(
    composed: Callable[..., Tensor],
    x: Tensor,
    weights: LatentWeights,
    pages: KVPages,
    view: View,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    """x + out(latent attention of norm(x)): [num_tokens, hidden], in place."""
    layer = _layer_of(weights.qkv, weights, latent_layer)
    if layer is None or x.dtype is not torch.float32 or not (x.is_contiguous() and _are_contiguous((view,))):
        return composed(x, weights, pages, view, cu_query_lens, seq_lens)
    cos, sin, block_table, slot_mapping = view
    kept = pack_pages(pages)
    step = STEP.pack(x.shape[0], cos.shape[1], cos.data_ptr(), sin.data_ptr(), 0) + kept
    places = 0, 0, block_table.data_ptr(), cu_query_lens.data_ptr(), seq_lens.data_ptr(), 0
    sizes = *block_table.shape, len(weights.k_up), 0, weights.scale, 0.0, weights.turned, 0
    step += KV_TARGET.pack(slot_mapping.data_ptr())
    grown = weights.temperature and mixers.growth(weights.temperature, x.shape[0], cu_query_lens, seq_lens)
    grows = 0 if grown is None else grown.data_ptr()
    _check(lib().ll_latent(layer.address, step, kept + ATTENTION.pack(*places, *sizes), grows, x.data_ptr()))
    return x


def compressed_attention(
    composed: Callable[..., Tensor],
    x: Tensor,
    weights: CompressedWeights,
    pages: CompressedPages | KVPages,
    view: View,
    of_entries: View | None,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    """`compressed.compressed_attention`."""
    window, entries = pages if isinstance(pages, CompressedPages) else (pages, None)
    layer = _layer_of(weights.inputs, weights, compressed_layer)
    views = (view,) if of_entries is None else (view, of_entries)
    if layer is None or x.dtype is not torch.float32 or not (x.is_contiguous() and _are_contiguous(views)):
        return composed(x, weights, pages, view, of_entries, cu_query_lens, seq_lens)
    cos, sin, block_table, slots = view
    step = STEP.pack(x.shape[0], cos.shape[1], cos.data_ptr(), sin.data_ptr(), 0) + pack_pages(window)
    step += KV_TARGET.pack(slots.data_ptr())
    size = window.k.shape[2]
    if entries is not None and of_entries is not None:
        made, kept = window.index_keys, entries.block_keys
        assert made is not None and kept is not None
        tables, own = (block_table.data_ptr(), of_entries[2].data_ptr()), of_entries[3].data_ptr()
        stored, widths = (made.data_ptr(), kept.data_ptr()), (of_entries[2].shape[1], made.shape[2], kept.shape[2])
        unit, wide = size // kept.shape[1], made.dtype is torch.float32
    else:
        tables, own, stored, widths, unit = (block_table.data_ptr(), 0), 0, (0, 0), (0, 0, 0), 1
        wide = window.format not in ("bf16", *SCALED_FORMATS)
    places = *tables, cu_query_lens.data_ptr(), seq_lens.data_ptr(), own, *stored
    kept_in = ENTRIES.pack(*places, *block_table.shape, *widths, size, unit, wide)
    _check(lib().ll_compressed(layer.address, step, kept_in, x.data_ptr()))
    return x


def gated_delta(composed: Callable[..., Tensor], x: Tensor, weights: DeltaWeights, *given: Any) -> Tensor:
    """`mixers.gated_delta`."""
    return _with_states(composed, lib().ll_gated_delta, x, weights, *given)


def short_conv(composed: Callable[..., Tensor], x: Tensor, weights: ConvWeights, *given: Any) -> Tensor:
    """`mixers.short_conv`."""
    return _with_states(composed, lib().ll_short_conv, x, weights, *given)


def mamba(composed: Callable[..., Tensor], x: Tensor, weights: MambaWeights, *given: Any) -> Tensor:
    """`mixers.mamba`."""
    return _with_states(composed, lib().ll_mamba, x, weights, *given)


def _with_states(
    composed: Callable[..., Tensor],
    call: Callable[..., int],
    x: Tensor,
    weights: DeltaWeights | ConvWeights | MambaWeights,
    kept: StateSlots,
    slots: Tensor,
    cu_query_lens: Tensor,
) -> Tensor:
    layer, places = _states_layer(weights)[1], slot_fields(kept)
    if layer is None or places is None or x.dtype is not torch.float32 or not x.is_contiguous():
        return composed(x, weights, kept, slots, cu_query_lens)
    sequences = SEQUENCES.pack(*_sequences(slots, cu_query_lens))
    _check(call(layer.address, SLOTS.pack(*places), sequences, x.shape[0], x.data_ptr()))
    return x


def _states_layer(weights: DeltaWeights | ConvWeights | MambaWeights) -> tuple[str, Layer | None]:
    """Name of the member of `ll_decoder_layer`, and the layer."""
    if isinstance(weights, DeltaWeights):
        return "delta", _layer_of(weights.qkvz, weights, delta_layer)
    if isinstance(weights, ConvWeights):
        return "conv", _layer_of(weights.inputs, weights, conv_layer)
    return "mamba", _layer_of(weights.inputs, weights, mamba_layer)


def _sequences(slots: Tensor | None, starts: Tensor) -> tuple[int, int, int]:
    """The members of `ll_sequences`."""
    return (0, 0, 0) if slots is None else (slots.data_ptr(), starts.data_ptr(), slots.shape[0])


def mlp(composed: Callable[..., Tensor], x: Tensor, weights: MlpWeights) -> Tensor:
    """x + post_norm(down(act(gate) · up)), gate and up of norm(x): [num_tokens, hidden], in place."""
    layer = _layer_of(weights.gate_up, weights, mlp_layer)
    if layer is None or x.dtype is not torch.float32 or not x.is_contiguous():
        return composed(x, weights)
    _check(lib().ll_mlp(layer.address, x.shape[0], x.data_ptr()))
    return x


def experts(composed: Callable[..., Tensor], x: Tensor, weights: ExpertsWeights, ids: Tensor | None = None) -> Tensor:
    """x + post_norm(mixture of experts of norm(x)): [num_tokens, hidden], in place."""
    if ids is not None:
        return composed(x, weights, ids=ids)
    layer = _layer_of(weights.router, weights, experts_layer)
    if layer is None or x.dtype is not torch.float32 or not x.is_contiguous():
        return composed(x, weights)
    _check(lib().ll_experts(layer.address, x.shape[0], x.data_ptr()))
    return x


def hyper_in(composed: Callable[..., Any], x: Tensor, weights: HyperWeights | MixedWeights) -> tuple[Tensor, Tensor]:
    """`hyper.hyper_in`."""
    if isinstance(weights, MixedWeights):
        layer, call, gains = mixed_layer(weights), lib().ll_mixed_in, weights.count * (1 + weights.count)
    else:
        layer, call, gains = _layer_of(weights.down, weights, hyper_layer), lib().ll_hyper_in, weights.count
    if layer is None or x.dtype is not torch.float32 or not x.is_contiguous():
        found: tuple[Tensor, Tensor] = composed(x, weights)
        return found
    count = x.shape[0]
    made = torch.empty((count, x.shape[1] // weights.count)), torch.empty((count, gains))
    _check(call(layer.address, x.data_ptr(), count, *(part.data_ptr() for part in made)))
    return made


def hyper_out(composed: Callable[..., Tensor], x: Tensor, output: Tensor, gains: Tensor) -> Tensor:
    """`hyper.hyper_out`."""
    given = (x, output, gains)
    if not all(part.dtype is torch.float32 and part.is_contiguous() for part in given):
        return composed(*given)
    count = x.shape[1] // output.shape[1]
    if count > MOST_STREAMS:
        return composed(*given)
    call = lib().ll_hyper_out if gains.shape[1] == count else lib().ll_mixed_out
    call(output.shape[1], count, x.shape[0], output.data_ptr(), gains.data_ptr(), x.data_ptr())
    return x


def head(composed: Callable[..., Tensor], x: Tensor, weights: HeadWeights) -> Tensor:
    """Logits, float32 [rows, vocab]."""
    layer = _layer_of(weights.linear, weights, head_layer)
    if layer is None or x.dtype is not torch.float32 or not x.is_contiguous():
        return composed(x, weights)
    logits = torch.empty((x.shape[0], weights.linear.out_features))
    _check(lib().ll_head(layer.address, x.data_ptr(), x.shape[0], logits.data_ptr()))
    return logits


def decoder(
    composed: Callable[..., Tensor],
    x: Tensor,
    layers: Sequence[LayerCall],
    pages: Sequence[LayerCache],
    views: Sequence[View],
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    wanted: Tensor | None = None,
    slots: Tensor | None = None,
    inputs: Tensor | None = None,
    state_starts: Tensor | None = None,
) -> Tensor:
    """Run all layers of a forward pass in one C call; arguments as in `segments.decoder`, contiguous pages."""
    plan = _decoder_plan(layers, pages) if len(views) <= VIEWS else None
    if plan is None or x.dtype is not torch.float32 or not (x.is_contiguous() and _are_contiguous(views)):
        return composed(x, layers, pages, views, cu_query_lens, seq_lens, wanted, slots, inputs, state_starts)
    num_rows, rows = (0, 0) if wanted is None else (wanted.shape[0], wanted.data_ptr() or _NO_ROWS)
    sizes = len(layers), x.shape[0], seq_lens.shape[0], num_rows
    sequences = _sequences(slots, cu_query_lens if state_starts is None else state_starts)
    head = PASS.pack(*sizes, cu_query_lens.data_ptr(), seq_lens.data_ptr(), rows, *_LAYERS_ONLY, *sequences)
    _check(lib().ll_decoder(plan.structs, head + _packed(views), x.data_ptr()))
    return x if wanted is None else x[:num_rows]


def step(
    composed: Callable[..., Stepped],
    token_ids: Tensor,
    positions: Tensor,
    embedding: Embedding,
    layers: Sequence[LayerCall],
    pages: Sequence[LayerCache],
    views: Sequence[View],
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    weights: HeadWeights,
    finds_best: bool = False,
    slots: Tensor | None = None,
) -> Stepped:
    """Run the whole forward pass in one C call, from token ids to logits; arguments as in `segments.step`.

    Python code between its parts would take as long as a layer, because reading the weights evicts it from the caches.
    """
    plan = _decoder_plan(layers, pages) if len(views) <= VIEWS else None
    last = _layer_of(weights.linear, weights, head_layer)
    rest = chain.from_iterable(views)
    arguments = (token_ids, positions, embedding, cu_query_lens, seq_lens, weights, last, finds_best, slots, *rest)
    call = plan.call if plan is not None else None
    if call is None or len(call.arguments) != len(arguments) or not all(map(is_, call.arguments, arguments)):
        if plan is None or last is None or embedding.dtype is not torch.float32 or not _are_contiguous(views):
            same = token_ids, positions, embedding, layers, pages, views, cu_query_lens, seq_lens, weights, finds_best
            return composed(*same, slots)
        call = None  # release its memory first, unless `_step_call` reuses it
        call = plan.call = _step_call(plan, arguments, views)
    if not isinstance(embedding.prepared, Prepared):
        call.results[0].copy_(embedding(token_ids))
    _check(lib().ll_decoder(call.structs, call.packed, call.hidden))
    return call.results


@dataclass(slots=True)
class _StepCall:
    """A step's packed arguments, cached because decode passes the same tensors with new contents."""

    arguments: tuple[Any, ...]  # kept alive as long as their addresses are in use
    structs: ctypes.Array[Any]
    packed: bytes
    hidden: int  # the address of the first result
    results: Stepped


@dataclass(slots=True)
class _Decoder:
    """C structs of a model's layers and pages, and the last step's call."""

    layers: Sequence[LayerCall]
    pages: Sequence[LayerCache]
    structs: ctypes.Array[Any]
    kept: list[Layer]
    call: _StepCall | None = None


def _step_call(plan: _Decoder, arguments: tuple[Any, ...], views: Sequence[View]) -> _StepCall:
    """Pack `ll_pass` of a whole step. Reuses the last step's result tensors if their shape is the same.

    Allocating a tensor releases the GIL, and the thread that reads the last token would then delay the next one.
    """
    token_ids, positions, embedding, cu_query_lens, seq_lens, weights, head, finds_best, slots = arguments[:9]
    count, vocab = token_ids.shape[0], weights.linear.out_features
    if plan.call is not None and plan.call.results[1].shape == (count, vocab):
        hidden, logits, best = plan.call.results
    else:
        plan.call = None
        hidden, logits, best = torch.empty(count, weights.norm.weight.shape[0]), torch.empty(count, vocab), None
    if finds_best and best is None:
        best = torch.empty(count, dtype=torch.int64)
    prepared = embedding.prepared
    table = prepared.address if isinstance(prepared, Prepared) else 0
    found = best.data_ptr() if finds_best and best is not None else 0
    packed = PASS.pack(
        *(len(plan.layers), count, seq_lens.shape[0], 0, cu_query_lens.data_ptr(), seq_lens.data_ptr(), 0),
        *(positions.data_ptr(), table, token_ids.data_ptr(), embedding.scale, head.address, logits.data_ptr(), found),
        *_sequences(slots, cu_query_lens),
    )
    results = hidden, logits, best if finds_best else None
    return _StepCall(arguments, plan.structs, packed + _packed(views), hidden.data_ptr(), results)


def _are_contiguous(views: Sequence[View]) -> bool:
    return all(tensor.is_contiguous() for view in views for tensor in view)


def _packed(views: Sequence[View]) -> bytes:
    """Pack `ll_view` of each view, padded with empty ones."""
    packed = [
        VIEW.pack(cos.data_ptr(), sin.data_ptr(), table.data_ptr(), slots.data_ptr(), cos.shape[1], table.shape[1])
        for cos, sin, table, slots in views
    ]
    return b"".join((*packed, bytes((VIEWS - len(views)) * VIEW.size)))


def _decoder_plan(layers: Sequence[LayerCall], pages: Sequence[LayerCache]) -> _Decoder | None:
    """C structs of the layers; None if C does not support one of them. The last result is cached for tuples."""
    first_of_all = next(linears_of(layers[0][0]), None)
    keeper = None if first_of_all is None else _keeper_of(first_of_all)
    if keeper is None:
        return None
    kept: _Decoder | None = keeper.decoder if isinstance(layers, tuple) and isinstance(pages, tuple) else None
    if kept is not None and kept.layers is layers and kept.pages is pages:
        return kept
    structs = (CDecoderLayer * len(layers))()
    parts: list[Layer] = []
    for struct, (mixer, ffn, view), of_layer in zip(structs, layers, pages, strict=True):
        if any(getattr(mixer, name, None) is not None for name in FUSED_HYPER):  # such layers run one by one
            return None
        mixers, feed = _fill_mixer(struct, mixer, of_layer), _fill_ffn(struct, ffn)
        if not mixers or feed is None:
            return None
        parts += (*mixers, feed)
        struct.view = view
    made = _Decoder(layers, pages, structs, parts)
    if isinstance(layers, tuple) and isinstance(pages, tuple):
        keeper.decoder = made
    return made


def _fill_mixer(struct: CDecoderLayer, weights: MixerWeights | None, of_layer: LayerCache) -> tuple[Layer, ...]:
    """Describe the mixer, or both, and what they keep; () if C does not support it."""
    if isinstance(weights, DeltaWeights | ConvWeights | MambaWeights) and isinstance(of_layer, StateSlots):
        (name, layer), places = _states_layer(weights), slot_fields(of_layer)
        if layer is None or places is None:
            return ()
        setattr(struct, name, layer.address)
        struct.kept = CStateSlots(*places)
        return (layer,)
    if not isinstance(weights, AttentionWeights):
        return ()
    second: tuple[Layer, ...] = ()
    if weights.second is not None and isinstance(of_layer, PagesAndSlots):
        second, of_layer = _fill_mixer(struct, weights.second, of_layer.slots), of_layer.pages
    layer = _layer_of(weights.qkv, weights, attention_layer)
    if layer is None or not isinstance(of_layer, KVPages) or bool(second) is (weights.second is None):
        return ()
    struct.attention = layer.address
    struct.pages = CKVPages(*kv_fields(of_layer))
    struct.sinks = 0 if weights.sinks is None else weights.sinks.data_ptr()
    struct.window = _window(weights.window, weights.chunked)
    struct.scale, struct.softcap = weights.scale, weights.softcap or 0.0
    return layer, *second


def _fill_ffn(struct: CDecoderLayer, weights: FeedForwardWeights | None) -> Layer | None:
    if weights is None:
        return None
    if isinstance(weights, ExpertsWeights):
        layer = _layer_of(weights.router, weights, experts_layer)
        struct.experts = None if layer is None else layer.address
    else:
        layer = _layer_of(weights.gate_up, weights, mlp_layer)
        struct.mlp = None if layer is None else layer.address
    return layer


def _layer_of(linear: Linear, weights: Any, build: Callable[[Any], Layer | None]) -> Layer | None:
    """The C struct of `weights`, cached on `linear`, one of its linear layers."""
    keeper = _keeper_of(linear)
    if keeper is None:
        return None
    if keeper.layer is None or keeper.layer[0] is not weights:
        keeper.layer = (weights, build(weights))
    return keeper.layer[1]


def _keeper_of(linear: Linear) -> Prepared | CpuAdditions | None:
    """The object that caches a layer's C struct (adapters have their own); None if another back end prepared it."""
    prepared, additions = linear.parts[0].prepared, linear.additions
    if not isinstance(prepared, Prepared):
        return None
    if additions is None:
        return prepared
    return additions if isinstance(additions, CpuAdditions) else None


def _check(failed: int) -> None:
    if failed == _NO_SUCH_ROW:
        raise IndexError("a token id is outside the embedding table")
    if failed:
        raise MemoryError("out of memory for a segment's intermediate results")

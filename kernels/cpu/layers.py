"""Builds the C struct of a layer and keeps its tensors alive. Returns None for layers that C does not support."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..layer_weights import (
    FUSED_ATTENTION,
    FUSED_COMPRESSED,
    FUSED_CONV,
    FUSED_DELTA,
    FUSED_EXPERTS,
    FUSED_HEAD,
    FUSED_HYPER,
    FUSED_LATENT,
    FUSED_MAMBA,
    FUSED_MLP,
    AttentionWeights,
    CompressedWeights,
    ConvWeights,
    DeltaWeights,
    ExpertsWeights,
    HeadWeights,
    HyperWeights,
    LatentWeights,
    Linear,
    MambaWeights,
    MixedWeights,
    MlpWeights,
    Norm,
    has_only,
)
from .adapters import CpuAdditions
from .interface import (
    PARTS,
    CAttentionLayer,
    CCompressedLayer,
    CConv,
    CConvLayer,
    CDeltaLayer,
    CExpertsLayer,
    CHeadLayer,
    CHyperLayer,
    CLatentLayer,
    CLinear,
    CMambaLayer,
    CMixedLayer,
    CMlpLayer,
    CNorm,
    CPool,
)
from .layout import Prepared
from .linear import TAKES

_GATED = ("silu", "gelu_tanh", "swiglu_oai", "silu_clamped")  # as activate.h numbers them
LARGEST_CONV = 8  # CONV_WIDTH_MAX of C
LARGEST_HEAD, LARGEST_TURN = 512, 128  # DIM_MAX and TURNED_MAX of C
MOST_STREAMS = 16  # MIXED_MOST of C
_ROUTERS = ("softmax", "softmax_topk", "sigmoid", "sigmoid_topk", "sqrt_softplus")


@dataclass(slots=True)
class Layer:
    """A C struct and the tensors it points to."""

    struct: ctypes.Structure
    kept: list[Any]
    address: int = field(init=False)

    def __post_init__(self) -> None:
        self.address = ctypes.addressof(self.struct)


def attention_layer(w: AttentionWeights) -> Layer | None:
    """`ll_attention_layer`."""
    kept: list[Any] = []
    qkv, out = _linear(w.qkv, kept), _linear(w.out, kept)
    if qkv is None or out is None or not _known(w, FUSED_ATTENTION):
        return None
    struct = CAttentionLayer(
        hidden=w.out.out_features,
        num_heads=w.num_heads,
        num_kv_heads=w.num_kv_heads,
        head_dim=w.head_dim,
        interleaved=w.interleaved,
        value_dim=w.values,
        gated=w.gate + w.head_gates,
        softplus=w.softplus_gate,
        late_norms=w.late_norms,
        alone=w.hyper is not None,
        parallel=w.parallel,
        value_scale=w.value_scale,
        norm=_norm(w.norm, kept),
        q_norm=_norm(w.q_norm, kept),
        k_norm=_norm(w.k_norm, kept),
        post_norm=_norm(w.post_norm, kept),
        qkv=qkv,
        out=out,
    )
    return Layer(struct, kept)


def delta_layer(w: DeltaWeights) -> Layer | None:
    """`ll_delta_layer`."""
    kept: list[Any] = []
    parts, wide = w.qkvz.parts + w.ba.parts, w.dt_bias.shape[0] > w.num_v_heads
    apart = len(parts) > PARTS or w.qkvz.additions is not None or w.ba.additions is not None
    apart = apart or wide or w.z_up is not None
    inputs = _linear(w.qkvz if apart else Linear(parts), kept)
    rates, out = _linear(w.ba, kept) if apart else CLinear(), _linear(w.out, kept)
    a_up, z_up = (CLinear() if one is None else _linear(one, kept) for one in (w.a_up, w.z_up))
    conv = _conv(w.conv, None, kept)
    known = _known(w, FUSED_DELTA) and conv is not None and (not wide or w.num_k_heads == w.num_v_heads)
    if inputs is None or rates is None or out is None or a_up is None or z_up is None or not known:
        return None
    struct = CDeltaLayer(
        hidden=w.out.out_features,
        k_heads=w.num_k_heads,
        v_heads=w.num_v_heads,
        k_dim=w.k_dim,
        v_dim=w.v_dim,
        tiled=w.tiled,
        wide=wide,
        sigmoid_gate=w.sigmoid_gate,
        alone=w.hyper is not None,
        floor=w.floor or 0.0,
        beta_scale=w.beta_scale,
        norm=_norm(w.norm, kept),
        out_norm=_norm(w.out_norm, kept),
        inputs=inputs,
        rates=rates,
        out=out,
        a_up=a_up,
        z_up=z_up,
        conv=conv,
        decay=_vector(w.decay, kept),
        dt_bias=_vector(w.dt_bias, kept),
    )
    return Layer(struct, kept)


def conv_layer(w: ConvWeights) -> Layer | None:
    """`ll_conv_layer`."""
    kept: list[Any] = []
    inputs, out, conv = _linear(w.inputs, kept), _linear(w.out, kept), _conv(w.conv, w.bias, kept)
    if inputs is None or out is None or conv is None or w.norm is None or not has_only(w, FUSED_CONV):
        return None
    return Layer(
        CConvLayer(w.norm.weight.shape[0], _norm(w.norm, kept), _norm(w.post_norm, kept), inputs, out, conv), kept
    )


def mamba_layer(w: MambaWeights) -> Layer | None:
    """`ll_mamba_layer`."""
    kept: list[Any] = []
    inputs, out, conv = _linear(w.inputs, kept), _linear(w.out, kept), _conv(w.conv, w.conv_bias, kept)
    if inputs is None or out is None or conv is None or w.norm is None or not has_only(w, FUSED_MAMBA):
        return None
    shortest, longest = w.steps or (0.0, math.inf)
    sizes = w.norm.weight.shape[0], w.num_heads, w.head_dim, w.num_groups, w.state_size
    vectors = [_vector(vector, kept) for vector in (w.decay, w.skip, w.dt_bias)]
    gain, eps = (None, 0.0) if w.gain is None or w.out_norm is None else (_vector(w.gain, kept), w.out_norm.eps)
    numbers = eps, shortest, longest
    return Layer(CMambaLayer(*sizes, *numbers, _norm(w.norm, kept), inputs, out, conv, *vectors, gain), kept)


def compressed_layer(w: CompressedWeights) -> Layer | None:
    """`ll_compressed_layer`."""
    kept: list[Any] = []
    linears = [w.inputs, w.q_up, w.out, *(pool.rows for pool in w.pools), *w.narrow]
    linears += [] if w.index is None else [w.index.q_up, w.index.shares]
    found = [one for linear in linears if (one := _linear(linear, kept)) is not None]
    plain = len(found) == len(linears) and all(one.additions is None for one in w.narrow)
    known = w.norm is not None and w.head_dim <= LARGEST_HEAD and has_only(w, FUSED_COMPRESSED)
    if not (plain and known and all(pool.norm.weight.shape[0] <= LARGEST_HEAD for pool in w.pools)):
        return None
    assert w.norm is not None
    inputs, q_up, out, *rest = found
    made, rest = rest[: len(w.pools)], rest[len(w.pools) :]
    narrow, index = rest[: len(w.narrow)], rest[len(w.narrow) :]
    pools = [
        CPool(pool.norm.weight.shape[0], _vector(pool.places, kept), _norm(pool.norm, kept), rows)
        for pool, rows in zip(w.pools, made, strict=True)
    ]
    groups = (CLinear * len(narrow))(*narrow)
    kept.append(groups)
    struct = CCompressedLayer(
        hidden=w.norm.weight.shape[0],
        num_heads=w.num_heads,
        dim=w.head_dim,
        window=w.window,
        interleaved=w.interleaved,
        alone=w.hyper is not None,
        groups=len(w.narrow),
        num_pools=len(w.pools),
        ratio=w.ratio,
        sets=1 + w.overlaps,
        index_heads=0 if w.index is None else w.index.num_heads,
        top=0 if w.index is None else w.index.top,
        scale=w.scale,
        norm=_norm(w.norm, kept),
        q_norm=_norm(w.q_norm, kept),
        head_norm=_norm(w.head_norm, kept),
        kv_norm=_norm(w.kv_norm, kept),
        inputs=inputs,
        q_up=q_up,
        out=out,
        index_q=index[0] if index else CLinear(),
        index_shares=index[1] if index else CLinear(),
        pools=(CPool * 2)(*pools),
        narrow=ctypes.addressof(groups),
        sinks=_vector(w.sinks, kept),
        back=None if w.back is None else _vector(w.back, kept),
    )
    return Layer(struct, kept)


def latent_layer(w: LatentWeights) -> Layer | None:
    """`ll_latent_layer`."""
    kept: list[Any] = []
    qkv, out = _linear(w.qkv, kept), _linear(w.out, kept)
    q_up = CLinear() if w.q_up is None else _linear(w.q_up, kept)
    plain = (one for one in (*w.k_up, *w.v_up) if one.additions is None)
    ups = [found for one in plain if (found := _linear(one, kept)) is not None]
    heads = len(w.k_up)
    known = len(ups) == 2 * heads and w.rank <= LARGEST_HEAD and w.turned <= LARGEST_TURN and has_only(w, FUSED_LATENT)
    if qkv is None or out is None or q_up is None or w.norm is None or not known:
        return None
    k_up, v_up = ((CLinear * heads)(*each) for each in (ups[:heads], ups[heads:]))
    kept += [k_up, v_up]
    queries = w.qkv if w.q_up is None else w.q_up
    rows = queries.out_features - (w.rank + w.turned + heads * w.gated if w.q_up is None else 0)
    struct = CLatentLayer(
        hidden=w.norm.weight.shape[0],
        num_heads=heads,
        rank=w.rank,
        turned=w.turned,
        still=rows // heads - w.turned,
        value=w.v_up[0].out_features,
        interleaved=w.interleaved,
        gated=w.gated,
        alone=w.hyper is not None,
        norm=_norm(w.norm, kept),
        q_norm=_norm(w.q_norm, kept),
        kv_norm=_norm(w.kv_norm, kept),
        post_norm=_norm(w.post_norm, kept),
        qkv=qkv,
        q_up=q_up,
        out=out,
        k_up=ctypes.addressof(k_up),
        v_up=ctypes.addressof(v_up),
    )
    return Layer(struct, kept)


def mlp_layer(w: MlpWeights) -> Layer | None:
    """`ll_mlp_layer`."""
    kept: list[Any] = []
    gate_up, down = _linear(w.gate_up, kept), _linear(w.down, kept)
    known = w.activation in _GATED and has_only(w, FUSED_MLP | {"sum_norm"}, "norm", True)
    if gate_up is None or down is None or w.norm is None or not known:
        return None
    struct = CMlpLayer(
        hidden=w.norm.weight.shape[0],
        intermediate=gate_up.n // 2,
        act=_GATED.index(w.activation),
        alone=w.hyper is not None,
        limit=w.limit or 0.0,
        norm=_norm(w.norm, kept),
        post_norm=_norm(w.post_norm, kept),
        sum_norm=_norm(w.sum_norm, kept),
        gate_up=gate_up,
        down=down,
    )
    return Layer(struct, kept)


def experts_layer(w: ExpertsWeights) -> Layer | None:
    """`ll_experts_layer`."""
    kept: list[Any] = []
    of_shared = (w.shared_gate_up, w.shared_down, w.shared_gate)
    given = [one for one in (w.router, *w.gate_up, *w.down, *of_shared) if one is not None]
    if any(one.additions is not None for one in given):
        return None
    found = {id(one): packed for one in given if (packed := _linear(one, kept)) is not None}
    known = w.activation in _GATED and w.router_kind in _ROUTERS and _known(w, FUSED_EXPERTS)
    if len(found) < len(given) or not known:
        return None
    count = len(w.down)
    gate_up, down = ((CLinear * count)(*(found[id(one)] for one in each)) for each in (w.gate_up, w.down))
    choice_bias = None if w.choice_bias is None else w.choice_bias.float().contiguous()
    kept += [gate_up, down, choice_bias]
    shared_gate_up, shared_down, shared_gate = (CLinear() if one is None else found[id(one)] for one in of_shared)
    struct = CExpertsLayer(
        hidden=w.down[0].out_features,
        intermediate=gate_up[0].n // 2,
        shared=shared_gate_up.n // 2,
        num_experts=count,
        top_k=w.top_k,
        router_kind=_ROUTERS.index(w.router_kind),
        renormalise=w.renormalise,
        act=_GATED.index(w.activation),
        groups=w.groups,
        group_top_k=w.group_top_k,
        share_inputs=w.share_inputs,
        alone=w.hyper is not None,
        scale=w.scale,
        limit=w.limit or 0.0,
        shared_limit=w.shared_limit or 0.0,
        shared_scale=w.shared_scale,
        choice_bias=None if choice_bias is None else choice_bias.data_ptr(),
        norm=_norm(w.norm, kept),
        post_norm=_norm(w.post_norm, kept),
        router=found[id(w.router)],
        shared_gate_up=shared_gate_up,
        shared_down=shared_down,
        shared_gate=shared_gate,
        gate_up=ctypes.addressof(gate_up),
        down=ctypes.addressof(down),
    )
    return Layer(struct, kept)


def hyper_layer(w: HyperWeights) -> Layer | None:
    """`ll_hyper_layer`."""
    kept: list[Any] = []
    down, up = _linear(w.down, kept), _linear(w.up, kept)
    if down is None or up is None:
        return None
    return Layer(CHyperLayer(up.n // w.count, w.count, w.rank, _norm(w.norm, kept), down, up), kept)


def mixed_layer(w: MixedWeights) -> Layer | None:
    """`ll_mixed_layer`."""
    if w.count > MOST_STREAMS:
        return None
    vectors = w.fn.data_ptr(), w.base.data_ptr(), w.scale.data_ptr()
    return Layer(CMixedLayer(w.wide // w.count, w.count, w.rounds, w.eps, w.norm_eps, *vectors), [])


def head_layer(w: HeadWeights) -> Layer | None:
    """`ll_head_layer`."""
    kept: list[Any] = []
    linear = _linear(w.linear, kept)
    if linear is None or w.norm is None or not has_only(w, FUSED_HEAD, "norm", True):
        return None
    hidden = w.norm.weight.shape[0]
    return Layer(CHeadLayer(hidden, _norm(w.norm, kept), linear, w.softcap or 0.0), kept)


def _known(weights: AttentionWeights | DeltaWeights | ExpertsWeights, fused: frozenset[str]) -> bool:
    """Whether C supports these weights: with an input norm, or with hyper-connections, some of which have none."""
    layer_norm = "" if isinstance(weights, DeltaWeights) else "norm"
    normed = weights.norm is not None or weights.hyper is not None
    return has_only(weights, fused | FUSED_HYPER, layer_norm, True) and normed


def _norm(norm: Norm | None, kept: list[Any]) -> CNorm:
    if norm is None:
        return CNorm()
    bias = None if norm.bias is None else _vector(norm.bias, kept)
    return CNorm(_vector(norm.weight, kept), bias, norm.eps, norm.groups)


def _vector(vector: Tensor, kept: list[Any]) -> int:
    kept.append(vector.float().contiguous())
    return int(kept[-1].data_ptr())


def _conv(weight: Tensor, bias: Tensor | None, kept: list[Any]) -> CConv | None:
    """`ll_conv`; None if it is too wide."""
    if weight.shape[1] > LARGEST_CONV:
        return None
    return CConv(_vector(weight.T, kept), None if bias is None else _vector(bias, kept), *weight.shape)


def _linear(linear: Linear, kept: list[Any]) -> CLinear | None:
    """`ll_linear_op`; None if another back end prepared one of its parts."""
    struct = CLinear(parts=len(linear.parts), n=linear.out_features)
    if len(linear.parts) > len(struct.weight):
        return None
    if linear.additions is not None:
        if not isinstance(linear.additions, CpuAdditions):
            return None
        kept.append(linear.additions)
        struct.adapters = linear.additions.address
    for index, part in enumerate(linear.parts):
        if not isinstance(part.prepared, Prepared):
            return None
        kept.append(part.prepared)
        struct.weight[index] = part.prepared.address
        struct.takes[index] = TAKES[part.impl.name]
        if part.bias is not None:
            bias = part.bias.float().contiguous()
            kept.append(bias)
            struct.bias[index] = bias.data_ptr()
    return struct

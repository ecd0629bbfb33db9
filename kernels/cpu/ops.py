"""The CPU back end: ops in C with the signatures of `reference.py`, and the list of its implementations.

Activations are float32; pages may have any KV format. Batch-invariant.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .. import recurrent
from ..kv_pages import KVPages
from ..registry import Impl, OpFacts
from . import linear, segments
from .build import lib, library
from .interface import DELTA, KV_TARGET, SPACE, pack_pages
from .layers import LARGEST_HEAD


def _fits(facts: OpFacts) -> str | None:
    if facts.device != "cpu":
        return f"runs on the CPU, not on {facts.device}"
    if facts.dtype != "float32":
        return f"computes with float32 activations, not {facts.dtype}"
    return library().reason


def attention_fits(facts: OpFacts) -> str | None:
    """Return None, or why this back end does not support these heads and pages."""
    if facts.head_dim > LARGEST_HEAD:
        return f"head_dim must be at most {LARGEST_HEAD}, not {facts.head_dim}"
    return _fits(facts)


def _rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """Return (x, outer, inner, stride of outer) with inner x dim contiguous; copies x if it is not."""
    if x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == x.shape[2]:
        return x, x.shape[0], x.shape[1], x.stride(0)
    x = x.contiguous()
    return x, x.numel() // x.shape[-1], 1, x.shape[-1]


def _checked(x: Tensor, name: str) -> Tensor:
    if x.dtype is not torch.float32:
        raise TypeError(f"{name} must be float32, not {x.dtype}")
    return x


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`reference.rms_norm`; if x has three dimensions, its tokens may be strided."""
    out = torch.empty(x.shape)
    x, outer, inner, stride = _rows(_checked(x, "x"))
    weight = weight.float().contiguous()
    lib().ll_rms_norm(x.data_ptr(), outer, inner, x.shape[-1], stride, weight.data_ptr(), eps, out.data_ptr())
    return out


def _activate(gate_up: Tensor, act: int, limit: float | None) -> Tensor:
    gate_up = _checked(gate_up, "gate_up").contiguous()
    dim = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], dim))
    lib().ll_activate(gate_up.data_ptr(), gate_up.numel() // (2 * dim), dim, act, limit or 0.0, out.data_ptr())
    return out


def silu_mul(gate_up: Tensor, limit: float | None = None) -> Tensor:
    """`reference.silu_mul`."""
    return _activate(gate_up, 0, limit)


def gelu_tanh_mul(gate_up: Tensor, limit: float | None = None) -> Tensor:
    """`reference.gelu_tanh_mul`."""
    return _activate(gate_up, 1, limit)


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """`reference.rope`; tokens of x may be strided, the result is contiguous."""
    out = torch.empty(x.shape)
    if x.stride(2) != 1 or x.stride(1) != x.shape[2]:
        x = x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    angles = (cos.data_ptr(), sin.data_ptr(), cos.shape[-1])
    lib().ll_rope(_checked(x, "x").data_ptr(), *x.shape, x.stride(0), *angles, interleaved, out.data_ptr())
    return out


def kv_write(k: Tensor, v: Tensor, pages: KVPages, slot_mapping: Tensor) -> None:
    """`reference.kv_write`; tokens of k and v may be strided, all slots must be valid.

    Raises ValueError if head_dim is larger than 512.
    """
    k, v = (x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous() for x in (k, v))
    _checked(k, "k")
    _checked(v, "v")
    if k.shape[2] > LARGEST_HEAD:
        raise ValueError(f"head_dim must be at most {LARGEST_HEAD}, not {k.shape[2]}")
    slots = slot_mapping.contiguous()
    target = pack_pages(pages) + KV_TARGET.pack(slots.data_ptr())
    lib().ll_kv_write(k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), k.shape[0], target)


def paged_attention(
    q: Tensor,
    pages: KVPages,
    block_table: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chunked: bool = False,
) -> Tensor:
    """`reference.paged_attention`.

    Raises ValueError if head_dim is larger than 512 or num_heads is not a multiple of num_kv_heads.
    """
    q = _checked(q, "q").contiguous()
    out = torch.empty(q.shape)
    failed = segments.run_attention(
        q, out, pages, block_table.contiguous(), cu_query_lens, seq_lens, (scale, window, softcap, sinks, chunked)
    )
    if failed == -1:
        raise MemoryError("out of memory for attention")
    if failed:
        raise ValueError(
            f"unsupported attention: {q.shape[1]} heads over {pages.k.shape[1]} KV heads, "
            f"head_dim {q.shape[2]} over pages of {pages.k.shape[3]}"
        )
    return out


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    cu_query_lens: Tensor,
    tiled: bool = False,
) -> Tensor:
    """`recurrent.delta_rule`; each slot's state must be contiguous."""
    heads = state[0]
    if not heads.is_contiguous():
        raise ValueError("the state of each slot must be contiguous")
    unit = recurrent.unit(q).mul_(q.shape[-1] ** -0.5), recurrent.unit(k)
    inputs = [part.contiguous() for part in (*unit, _checked(v, "v"), decay.exp(), beta)]
    # a decay per channel: what is read is the decayed state, so the keys are multiplied by the decays instead
    read = recurrent.of_heads(unit[1], v.shape[1], tiled) * inputs[3] if decay.ndim == 3 else None
    slots, starts = slots.contiguous(), cu_query_lens.contiguous()
    out = torch.empty(v.shape)
    after = (part.data_ptr() for part in (_checked(state, "state"), out, slots, starts))
    places = (*(part.data_ptr() for part in inputs), 0 if read is None else read.data_ptr(), *after)
    sizes = state.stride(0), k.shape[1], v.shape[1], k.shape[2], v.shape[2], int(tiled)
    lib().ll_delta_rule(DELTA.pack(*places, *sizes), slots.shape[0])
    return out


def state_space(
    x: Tensor, b: Tensor, c: Tensor, steps: Tensor, decay: Tensor, state: Tensor, slots: Tensor, cu_query_lens: Tensor
) -> Tensor:
    """`recurrent.state_space`; each slot's state must be contiguous."""
    if not state[0].is_contiguous():
        raise ValueError("the state of each slot must be contiguous")
    inputs = [_checked(part, "inputs").contiguous() for part in (x, b, c, steps, (steps * decay).exp())]
    slots, starts = slots.contiguous(), cu_query_lens.contiguous()
    out = torch.empty(x.shape)
    places = (part.data_ptr() for part in (*inputs, _checked(state, "state"), out, slots, starts))
    sizes = state.stride(0), x.shape[1], b.shape[1], x.shape[2], b.shape[2]
    lib().ll_state_space(SPACE.pack(*places, *sizes), slots.shape[0])
    return out


_RECURRENT = (delta_rule, state_space)
_ROW_WISE = (
    rms_norm, silu_mul, gelu_tanh_mul, rope, *_RECURRENT, segments.mlp, segments.experts, segments.head,
    segments.latent_attention, segments.compressed_attention, segments.gated_delta, segments.short_conv,
    segments.mamba, segments.hyper_in, segments.hyper_out,
)  # fmt: skip
_WITH_PAGES = (
    kv_write, paged_attention, segments.attn_in, segments.attention, segments.attn_out, segments.decoder, segments.step,
)  # fmt: skip
IMPLS: Mapping[str, tuple[Impl, ...]] = {
    "linear": linear.IMPLS,
    **{run.__name__: (Impl(run.__name__, "c", _fits, run),) for run in _ROW_WISE},
    **{run.__name__: (Impl(run.__name__, "c", attention_fits, run),) for run in _WITH_PAGES},
}

"""ctypes declarations of the C library: structs and function signatures."""

from __future__ import annotations

import ctypes
import struct
from ctypes import c_double, c_int64, c_uint8, c_void_p
from typing import Any

from ..kv_pages import KV_DTYPES, KVPages
from ..state_slots import StateSlots

PAGES = struct.Struct("@4P5q")  # `kv_pages`; packing bytes for every call is cheaper than a ctypes structure
DELTA = struct.Struct("@10P6q")  # `delta_job`
SPACE = struct.Struct("@9P5q")  # `space_job`
ATTENTION = struct.Struct("@6P4q2f2q")  # `ll_attention_args` is PAGES followed by this
KV_TARGET = struct.Struct("@P")  # `kv_target` is PAGES followed by this
ENTRIES = struct.Struct("@7P8q")  # `ll_entry_step`
STEP = struct.Struct("@2q3P")  # `ll_step` is this followed by a kv_target
PASS = struct.Struct("@4q6Pd3P2Pq")
SEQUENCES = struct.Struct("@2Pq")  # `ll_sequences`, the end of a PASS
SLOTS = struct.Struct("@2P2q")  # `ll_state_slots`
VIEW = struct.Struct("@4P2q")
VIEWS = 4  # `ll_pass` is a PASS followed by this many VIEWs
PARTS = 4
ADAPTERS = 8


class Code:
    """Code formats of a tile (weight.h)."""

    INT8, INT4, TABLE4, INT5, INT6, INT2, INT3, F32, F16, BF16, E4M3 = range(11)


class Number:
    """Storage formats of scales and mins (weight.h)."""

    NONE, F32, F16, BF16, SUB8, ZERO8, E8M0, E8M0_HALF, E4M3_HALF = range(9)


class Take:
    """Activation formats of a product (activations.h)."""

    INT16, FLOATS, INT8 = range(3)


class From:
    """Input formats of the packer (pack.h)."""

    NIBBLES, BYTES_SIGNED, FLOATS, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS = range(12)


def _each(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class CWeight(ctypes.Structure):
    """`ll_weight`."""

    _fields_ = [
        *_each(c_int64, "n k tiles blocks code scale_kind min_kind zero_offset group groups supers section"),
        *_each(c_int64, "tile_bytes section_bytes at_min at_super_scale at_super_min at_codes block_bytes"),
        *_each(c_void_p, "data row_scale perm pre_scale"),
        ("table", c_uint8 * 16),
    ]


class CSource(ctypes.Structure):
    """`ll_source`; the C member `from` is called `kind` here."""

    _fields_ = [*_each(c_int64, "kind row_bytes"), *_each(c_void_p, "q scales mins")]


class CNorm(ctypes.Structure):
    """`ll_norm`."""

    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("eps", c_double), ("groups", c_int64)]


class CLinear(ctypes.Structure):
    """`ll_linear_op`."""

    _fields_ = [
        *_each(c_int64, "parts n"),
        *_each(c_void_p * PARTS, "weight bias"),
        ("takes", c_int64 * PARTS),
        ("adapters", c_void_p),
    ]


class CLowRank(ctypes.Structure):
    """`ll_low_rank`."""

    _fields_ = [*_each(c_int64, "rank at first n"), *_each(c_void_p, "down up down_scale up_scale gain bias")]


class CAdapters(ctypes.Structure):
    """`ll_adapters`; `rows` points to a pointer."""

    _fields_ = [
        *_each(c_int64, "k n form most ranks uneven gains"),
        ("rows", c_void_p),
        ("count", c_int64 * ADAPTERS),
        ("pieces", c_void_p * ADAPTERS),
    ]


class CAttentionLayer(ctypes.Structure):
    """`ll_attention_layer`."""

    _fields_ = [
        *_each(c_int64, "hidden num_heads num_kv_heads head_dim interleaved value_dim"),
        *_each(c_int64, "gated softplus late_norms alone parallel"),
        ("value_scale", c_double),
        *_each(CNorm, "norm q_norm k_norm post_norm"),
        *_each(CLinear, "qkv out"),
    ]


class CMlpLayer(ctypes.Structure):
    """`ll_mlp_layer`."""

    _fields_ = [
        *_each(c_int64, "hidden intermediate act alone"),
        ("limit", c_double),
        *_each(CNorm, "norm post_norm sum_norm"),
        *_each(CLinear, "gate_up down"),
    ]


class CExpertsLayer(ctypes.Structure):
    """`ll_experts_layer`."""

    _fields_ = [
        *_each(c_int64, "hidden intermediate shared num_experts top_k router_kind renormalise act groups group_top_k"),
        *_each(c_int64, "share_inputs alone"),
        *_each(c_double, "scale limit shared_limit shared_scale"),
        ("choice_bias", c_void_p),
        *_each(CNorm, "norm post_norm"),
        *_each(CLinear, "router shared_gate_up shared_down shared_gate"),
        *_each(c_void_p, "gate_up down"),
    ]


class CLatentLayer(ctypes.Structure):
    """`ll_latent_layer`."""

    _fields_ = [
        *_each(c_int64, "hidden num_heads rank turned still value interleaved gated alone"),
        *_each(CNorm, "norm q_norm kv_norm post_norm"),
        *_each(CLinear, "qkv q_up out"),
        *_each(c_void_p, "k_up v_up"),
    ]


class CPool(ctypes.Structure):
    """`ll_pool`."""

    _fields_ = [("width", c_int64), ("places", c_void_p), ("norm", CNorm), ("rows", CLinear)]


class CCompressedLayer(ctypes.Structure):
    """`ll_compressed_layer`."""

    _fields_ = [
        *_each(c_int64, "hidden num_heads dim window interleaved alone"),
        *_each(c_int64, "groups num_pools ratio sets index_heads top"),
        ("scale", c_double),
        *_each(CNorm, "norm q_norm head_norm kv_norm"),
        *_each(CLinear, "inputs q_up out index_q index_shares"),
        ("pools", CPool * 2),
        *_each(c_void_p, "narrow sinks back"),
    ]


class CConv(ctypes.Structure):
    """`ll_conv`."""

    _fields_ = [*_each(c_void_p, "weight bias"), *_each(c_int64, "channels width")]


class CDeltaLayer(ctypes.Structure):
    """`ll_delta_layer`."""

    _fields_ = [
        *_each(c_int64, "hidden k_heads v_heads k_dim v_dim tiled wide sigmoid_gate alone"),
        *_each(c_double, "floor beta_scale"),
        *_each(CNorm, "norm out_norm"),
        *_each(CLinear, "inputs rates out a_up z_up"),
        ("conv", CConv),
        *_each(c_void_p, "decay dt_bias"),
    ]


class CConvLayer(ctypes.Structure):
    """`ll_conv_layer`."""

    _fields_ = [("hidden", c_int64), *_each(CNorm, "norm post_norm"), *_each(CLinear, "inputs out"), ("conv", CConv)]


class CMambaLayer(ctypes.Structure):
    """`ll_mamba_layer`."""

    _fields_ = [
        *_each(c_int64, "hidden heads dim groups size"),
        *_each(c_double, "eps shortest longest"),
        ("norm", CNorm),
        *_each(CLinear, "inputs out"),
        ("conv", CConv),
        *_each(c_void_p, "decay skip dt_bias gain"),
    ]


class CHyperLayer(ctypes.Structure):
    """`ll_hyper_layer`."""

    _fields_ = [*_each(c_int64, "hidden count rank"), ("norm", CNorm), *_each(CLinear, "down up")]


class CMixedLayer(ctypes.Structure):
    """`ll_mixed_layer`."""

    _fields_ = [
        *_each(c_int64, "hidden count rounds"),
        *_each(c_double, "eps norm_eps"),
        *_each(c_void_p, "fn base scale"),
    ]


class CHeadLayer(ctypes.Structure):
    """`ll_head_layer`."""

    _fields_ = [("hidden", c_int64), ("norm", CNorm), ("linear", CLinear), ("softcap", c_double)]


class CKVPages(ctypes.Structure):
    """`kv_pages`."""

    _fields_ = [
        *_each(c_void_p, "k v k_scales v_scales"),
        *_each(c_int64, "num_kv_heads page_size dim format one_scale"),
    ]


class CStateSlots(ctypes.Structure):
    """`ll_state_slots`."""

    _fields_ = [*_each(c_void_p, "conv state"), *_each(c_int64, "conv_stride state_stride")]


class CDecoderLayer(ctypes.Structure):
    """`ll_decoder_layer`."""

    _fields_ = [
        *_each(c_void_p, "attention delta conv mamba mlp experts sinks"),
        ("pages", CKVPages),
        ("kept", CStateSlots),
        *_each(c_int64, "view window"),
        *_each(c_double, "scale softcap"),
    ]


_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "ll_abi": (c_int64, ()),
    "ll_amx": (c_int64, ()),
    "ll_threads": (c_int64, (c_int64,)),
    "ll_advise": (None, (c_void_p, c_int64)),
    "ll_layout": (c_int64, (c_void_p,)),
    "ll_pack": (c_int64, (c_void_p, c_void_p)),
    "ll_unpack": (c_int64, (c_void_p, c_void_p, c_int64, c_void_p)),
    "ll_attention": (c_int64, (c_void_p,)),
    "ll_rms_norm": (None, (c_void_p, *[c_int64] * 4, c_void_p, c_double, c_void_p)),
    "ll_activate": (None, (c_void_p, c_int64, c_int64, c_int64, c_double, c_void_p)),
    "ll_rope": (None, (c_void_p, *[c_int64] * 4, c_void_p, c_void_p, c_int64, c_int64, c_void_p)),
    "ll_kv_write": (None, (c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p)),
    "ll_delta_rule": (None, (c_void_p, c_int64)),
    "ll_state_space": (None, (c_void_p, c_int64)),
    "ll_decoder": (c_int64, (c_void_p, c_void_p, c_void_p)),
    "ll_attn_in": (c_int64, (c_void_p, c_void_p, c_void_p, c_void_p)),
    "ll_attn_out": (c_int64, (c_void_p, c_void_p, c_int64, c_void_p)),
    "ll_head": (c_int64, (c_void_p, c_void_p, c_int64, c_void_p)),
    "ll_latent": (c_int64, (c_void_p,) * 5),
    "ll_compressed": (c_int64, (c_void_p,) * 4),
    **dict.fromkeys(
        ("ll_gated_delta", "ll_short_conv", "ll_mamba"), (c_int64, (c_void_p, c_void_p, c_void_p, c_int64, c_void_p))
    ),
    "ll_mlp": (c_int64, (c_void_p, c_int64, c_void_p)),
    "ll_experts": (c_int64, (c_void_p, c_int64, c_void_p)),
    "ll_hyper_in": (c_int64, (c_void_p, c_void_p, c_int64, c_void_p, c_void_p)),
    "ll_hyper_out": (None, (*[c_int64] * 3, *[c_void_p] * 3)),
    "ll_mixed_in": (c_int64, (c_void_p, c_void_p, c_int64, c_void_p, c_void_p)),
    "ll_mixed_out": (None, (*[c_int64] * 3, *[c_void_p] * 3)),
    "ll_adapt": (c_int64, (c_void_p, c_void_p, c_int64, c_void_p)),
    "ll_argmax": (c_int64, (c_void_p, c_int64, c_int64, c_void_p)),
    "ll_top": (c_int64, (c_void_p, c_int64, c_int64, c_double, c_void_p, c_void_p)),
    "ll_draw": (c_int64, (c_void_p, c_int64, c_double, c_double)),
    "ll_linear": (c_int64, (c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64)),
}


def pack_pages(pages: KVPages) -> bytes:
    """Pack `kv_pages` of a layer."""
    return PAGES.pack(*kv_fields(pages))


def slot_fields(kept: StateSlots) -> tuple[int, int, int, int] | None:
    """The members of `ll_state_slots`; None if a slot's state is not contiguous."""
    conv, state, _ = kept
    if not conv[0].is_contiguous() or not (state is None or state[0].is_contiguous()):
        return None
    if state is None:
        return conv.data_ptr(), 0, conv.stride(0), 0
    return conv.data_ptr(), state.data_ptr(), conv.stride(0), state.stride(0)


def kv_fields(pages: KVPages) -> tuple[int, ...]:
    """The members of `kv_pages`, in order. Raises ValueError for pages that are not contiguous."""
    if not all(part is None or part.is_contiguous() for part in pages):
        raise ValueError("pages must be contiguous")
    k, v, k_scales, v_scales = pages[:4]
    return (
        k.data_ptr(),
        v.data_ptr(),
        0 if k_scales is None else k_scales.data_ptr(),
        0 if v_scales is None else v_scales.data_ptr(),
        *k.shape[1:],
        list(KV_DTYPES).index(pages.format),  # numbered as in C
        k_scales is not None and k_scales.dim() == 1,
    )


def declare(lib: ctypes.CDLL) -> None:
    """Set argument and result types. Raises AttributeError or ValueError if the library does not match."""
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = arguments
    layers = (CAttentionLayer, CDeltaLayer, CConvLayer, CMambaLayer, CMlpLayer, CExpertsLayer, CHeadLayer, CLatentLayer)
    sizes = sum(
        map(ctypes.sizeof, (CWeight, *layers, CDecoderLayer, CAdapters, CLowRank, CHyperLayer, CCompressedLayer))
    )
    sizes += ENTRIES.size
    sizes += SLOTS.size + SEQUENCES.size + PAGES.size + ATTENTION.size + STEP.size + PAGES.size + KV_TARGET.size
    sizes += PASS.size + VIEWS * VIEW.size
    if lib.ll_abi() >> 32 != sizes:
        raise ValueError("the library's structs differ from interface.py")

"""What of attention is compiled ahead of time, for every card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..kv_pages import SCALED_FORMATS
from .aot_spec import KernelSpec
from .attention import AT_ONCE, constants
from .attention_decode import decode_split, merge_splits
from .attention_prefill import prefill
from .attention_tiles import columns_of, decode_registers, decode_tiles, prefill_tiles
from .launch import PDL_CAPABILITY


class _Case(NamedTuple):
    """What a compiled kernel differs by."""

    kv_format: str
    dim: int
    group: int = 4
    kv_heads: int = 8
    page: int = 16
    extras: bool = False
    """window, soft-cap and sinks"""

    @property
    def label(self) -> str:
        """The shape class."""
        return (
            f"{self.kv_format} d{self.dim} g{self.group} p{self.page}{' window softcap sinks' if self.extras else ''}"
        )


def specs(cap: int) -> Iterator[KernelSpec]:
    """What a card of sm_`cap` would run: every KV format, the head sizes of the models, windows, soft-caps, sinks."""
    native = "bf16" if cap >= 80 else "fp16"
    decode = [
        _Case(native, 128),
        _Case(native, 64, 3, 3, extras=True),
        _Case(native, 256, 4, 1, 32),
        _Case(native, 256, 12, 2),
        _Case("int8", 128, 8, 4),
        _Case("fp8", 128),
        _Case("fp8", 96, 12, 4, 64, True),
        _Case("int8", 64, 8, 8),
    ]
    yield from (_decode_spec(cap, case) for case in decode)
    yield _merge_spec(cap, decode[0])
    prefill = [
        _Case(native, 128),
        _Case(native, 256, 4, 1, extras=True),
        _Case("fp8", 128),
        _Case("int8", 64, 3, 3, 64),
    ]
    yield from (_prefill_spec(cap, case) for case in prefill)


def _signature(cap: int, case: _Case, pointers: str) -> dict[str, str]:
    activations = "*bf16:16" if cap >= 80 else "*fp16:16"
    pages = {"bf16": "*bf16:16", "fp16": "*fp16:16"}.get(case.kv_format, "*i16:16")
    known = {"q": activations, "out": activations, "k": pages, "v": pages}
    index = ("block_table", "cu_query_lens", "seq_lens")
    return {n: known.get(n, "*i32:16" if n in index else "*fp32:16") for n in pointers.split()}


def _case_constants(cap: int, case: _Case) -> dict[str, Any]:
    scales = "token" if case.kv_format in SCALED_FORMATS else "none"
    return {
        "DIM": case.dim,
        "GROUP": case.group,
        "KV_HEADS": case.kv_heads,
        "PAGE": case.page,
        "STEPS": 8,
        "PDL": cap >= PDL_CAPABILITY,
        "INTERPRET": False,
    } | constants(case.kv_format, case.dim, scales, case.extras, case.extras)


def _decode_spec(cap: int, case: _Case) -> KernelSpec:
    tile = decode_tiles(cap, case.kv_format, case.dim, case.group)[0]
    most = decode_registers(cap, case.kv_format, case.dim, case.group)
    pointers = "q k v k_scales v_scales block_table cu_query_lens seq_lens part_sum part_norm"
    numbers = {"scale": "fp32", "softcap": "fp32", "window": "i32", "table_width": "i32", "num_seqs": "i32"}
    more = {"COLUMNS": columns_of(case.group), "KEYS": tile.keys, "STAGES": tile.num_stages, "FIRST": 128, "SPLITS": 64}
    return KernelSpec(
        "paged_attention_decode",
        "triton",
        case.label,
        decode_split,
        _signature(cap, case, pointers) | numbers | {"first_token": "i32"},
        _case_constants(cap, case) | more | {"BY_TOKEN": case.extras},
        tile.num_warps,
        tile.num_stages,
        _options(cap) | ({"maxnreg": most} if most else {}),
        decode=True,
        expect_mma="" if cap < 80 else "mma",
    )


def _merge_spec(cap: int, case: _Case) -> KernelSpec:
    names = ("DIM", "FORMAT", "SCALES", "STEPS", "HAS_WINDOW", "PDL")
    numbers = dict.fromkeys(("window", "num_places", "num_seqs", "first_token"), "i32")
    more = {"PADDED": 128, "HEADS": 32, "PLACES": 128, "AT_ONCE": AT_ONCE, "FIRST": 128, "SPLITS": 64}
    return KernelSpec(
        "paged_attention_merge",
        "triton",
        case.label,
        merge_splits,
        _signature(cap, case, "part_sum part_norm sinks v_scales out cu_query_lens seq_lens") | numbers,
        {n: _case_constants(cap, case)[n] for n in names} | more | {"BY_TOKEN": False, "HAS_SINKS": True},
        options=_options(cap),
        decode=True,
    )


def _prefill_spec(cap: int, case: _Case) -> KernelSpec:
    tile = prefill_tiles(cap, case.kv_format, case.dim)[0]
    pointers = "q k v k_scales v_scales sinks block_table cu_query_lens seq_lens out"
    numbers = {"scale": "fp32", "softcap": "fp32", "window": "i32", "table_width": "i32", "num_seqs": "i32"}
    more = {"ROWS": tile.rows, "KEYS": tile.keys, "STAGES": tile.num_stages, "SINGLES": True, "HAS_SINKS": case.extras}
    return KernelSpec(
        "paged_attention_prefill",
        "triton",
        case.label,
        prefill,
        _signature(cap, case, pointers) | numbers,
        _case_constants(cap, case) | more,
        tile.num_warps,
        tile.num_stages,
        _options(cap),
        expect_mma={90: "wgmma", 75: ""}.get(cap, "mma"),
    )


def _options(cap: int) -> dict[str, Any]:
    return {"launch_pdl": True} if cap >= PDL_CAPABILITY else {}

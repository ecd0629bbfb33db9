"""Launches paged attention: single queries split over their keys, several queries of a sequence in tiles.

Nothing is read back from the device: which sequence a program serves it finds in `cu_query_lens` and `seq_lens`, and
how many programs there are follows from the shapes alone, so a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..kv_pages import SCALED_FORMATS, KVPages
from . import attention_decode, attention_prefill
from .hadamard import run_length
from .launch import capability, interpreting, launch, num_sms, pdl

LARGEST_HEAD = 256
PAGE_SIZES = (16, 32, 64)
PART_BYTES = 64 << 20
"""most bytes of split results held at once when queries of a long chunk are treated one by one"""
AT_ONCE = 16
"""splits a step of the merge adds up"""


class Tile(NamedTuple):
    """How a kernel cuts its work."""

    keys: int
    num_warps: int
    num_stages: int
    rows: int = 0
    """of queries; prefill only"""


class Splits(NamedTuple):
    """How many keys a split has: `first` while `most` splits suffice, then multiples of it."""

    first: int
    most: int

    def places(self, num_keys: int, window: int | None) -> int:
        """Most splits that a query among up to `num_keys` keys has."""
        if window is None or window >= num_keys:
            return max(1, min(self.most, -(-num_keys // self.first)))
        return min(self.most, -(-window // self.first)) + 1


def splits_of(num_kv_heads: int, sms: int) -> Splits:
    """Four programs an SM for one long sequence, one an SM from 4096 keys on; of one device always the same."""
    first = _floor_power(4096 * num_kv_heads // sms)
    return Splits(min(max(first, 128), 512), min(max(_floor_power(4 * sms // num_kv_heads), 8), 128))


def decode_tile(cap: int, kv_format: str, head_dim: int) -> Tile:
    """For sm_`cap`: what fits twice into an SM of 100 KB, on Hopper and sm_100 what wgmma takes."""
    width = triton.next_power_of_2(head_dim)
    if kv_format in SCALED_FORMATS:
        if width <= 64 or cap < 80:
            return Tile(64 if width <= 128 else 32, 2 if width <= 64 else 4, 3)
        return Tile(64, 4, 3) if width <= 128 else Tile(32, 2, 3)
    if kv_format == "f32":
        return Tile(16, 4, 2)
    if cap in (90, 100) and width <= 128:
        return Tile(64, 4, 3)
    return Tile(32, 2 if cap >= 80 or width <= 128 else 4, 3)


def prefill_tile(cap: int, kv_format: str, head_dim: int) -> Tile:
    """For sm_`cap`: as many rows as registers hold, and keys for three stages in its shared memory."""
    width = triton.next_power_of_2(head_dim)
    if cap < 80 or kv_format == "f32":  # no matrix instructions: small tiles, sums in registers
        return Tile(16, 4, 2, rows=16)
    if cap in (90, 100):
        return Tile(64, 8, 3, rows=128) if width <= 128 else Tile(32, 8, 2, rows=64)
    if width <= 64:
        return Tile(64, 8, 3, rows=128)
    return Tile(32, 8, 3, rows=128) if width <= 128 else Tile(32, 8, 2, rows=64)


def part_bytes(num_rows: int, num_heads: int, head_dim: int, places: int) -> int:
    """Bytes that the results of splits take between the two kernels of decoding."""
    return num_rows * num_heads * places * (head_dim + 2) * 4


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
) -> Tensor:
    """As `reference.paged_attention`; sequences of one query take the decode kernels, others the prefill kernel.

    A token's result does not depend on other sequences, nor on its chunk but for chunks of one token.
    Raises ValueError for what `fits` of this back end refuses, and for tensors that are not contiguous.
    """
    step = _Step(q, pages, block_table, cu_query_lens, seq_lens, scale, window, softcap, sinks)
    num_tokens, num_seqs = q.shape[0], block_table.shape[0]
    if num_tokens == num_seqs:
        step.decode(0, num_seqs, by_token=False)
    else:
        if num_seqs > 1:
            step.decode(0, num_seqs, by_token=False)
        step.prefill(singles=num_seqs == 1)
    return step.out


def paged_attention_by_token(
    q: Tensor,
    pages: KVPages,
    block_table: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `reference.paged_attention`, every query through the decode kernels: no chunk or batch changes a bit."""
    step = _Step(q, pages, block_table, cu_query_lens, seq_lens, scale, window, softcap, sinks)
    each = part_bytes(1, q.shape[1], q.shape[2], step.places)
    at_once = max(1, min(PART_BYTES // each, 65_535))
    for first in range(0, q.shape[0], at_once):
        step.decode(first, min(at_once, q.shape[0] - first), by_token=True)
    return step.out


class _Step:
    """One call: checked arguments, and what both kernels take."""

    def __init__(
        self,
        q: Tensor,
        pages: KVPages,
        block_table: Tensor,
        cu_query_lens: Tensor,
        seq_lens: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> None:
        self.num_tokens, self.heads, self.dim = q.shape
        self.kv_heads, self.page = pages.k.shape[1], pages.k.shape[2]
        self.format = pages.format
        _check(q, pages, block_table)
        self.q, self.pages, self.table = q.contiguous(), pages, block_table
        self.starts, self.lengths = cu_query_lens, seq_lens
        self.window, self.softcap, self.sinks = window, softcap, sinks
        self.scale = scale
        self.num_seqs = block_table.shape[0]
        self.out = torch.empty_like(self.q)
        self.cap = capability(q.device)
        self.splits = splits_of(self.kv_heads, num_sms(q.device))
        self.places = self.splits.places(block_table.shape[1] * self.page, window)
        self.shared = {
            "DIM": self.dim,
            "GROUP": self.heads // self.kv_heads,
            "KV_HEADS": self.kv_heads,
            "PAGE": self.page,
            "STEPS": _search_steps(self.num_seqs),
            "INTERPRET": interpreting(),
        } | constants(self.format, self.dim, self.scales_of(), window is not None, softcap is not None)
        k, v = (self._pairs(x) for x in (pages.k, pages.v))
        self.kv = (k, v, *(lengths if s is None else s for s, lengths in ((pages.k_scales, k), (pages.v_scales, v))))

    def scales_of(self) -> str:
        """token | layer | none"""
        if self.pages.k_scales is None:
            return "none"
        return "layer" if self.pages.k_scales.dim() == 1 else "token"

    def _pairs(self, x: Tensor) -> Tensor:
        return x.view(torch.int16) if self.format in SCALED_FORMATS else x

    def decode(self, first: int, count: int, by_token: bool) -> None:
        """Single queries: rows are tokens from `first` on, or sequences."""
        device = self.q.device
        tile = decode_tile(self.cap, self.format, self.dim)
        sums = torch.empty((count, self.heads, self.places, self.dim), dtype=torch.float32, device=device)
        norms = torch.empty((count, self.heads, self.places, 2), dtype=torch.float32, device=device)
        split = {"FIRST": self.splits.first, "SPLITS": self.splits.most, "BY_TOKEN": by_token}
        launch(
            attention_decode.decode_split,
            (self.places, self.kv_heads, count),
            self.q,
            *self.kv,
            self.table,
            self.starts,
            self.lengths,
            sums,
            norms,
            self.scale,
            self.softcap or 0.0,
            self.window or 0,
            self.table.shape[1],
            self.num_seqs,
            first,
            COLUMNS=columns_of(self.shared["GROUP"]),
            KEYS=tile.keys,
            STAGES=tile.num_stages,
            PDL=pdl(device),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            launch_pdl=pdl(device),
            **self.shared,
            **split,
        )
        launch(
            attention_decode.merge_splits,
            (self.heads, count),
            sums,
            norms,
            norms if self.sinks is None else self.sinks,
            self.kv[3],
            self.out,
            self.starts,
            self.lengths,
            self.window or 0,
            self.places,
            self.num_seqs,
            first,
            PADDED=triton.next_power_of_2(self.dim),
            HEADS=self.heads,
            PLACES=2 * triton.next_power_of_2(self.splits.most),
            AT_ONCE=AT_ONCE,
            HAS_SINKS=self.sinks is not None,
            PDL=pdl(device),
            num_warps=4,
            launch_pdl=pdl(device),
            **{name: self.shared[name] for name in ("DIM", "FORMAT", "SCALES", "STEPS", "HAS_WINDOW")},
            **split,
        )

    def prefill(self, singles: bool) -> None:
        """Sequences of several queries; with `singles` those of one as well."""
        device = self.q.device
        tile = prefill_tile(self.cap, self.format, self.dim)
        tokens = tile.rows // self.shared["GROUP"]
        launch(
            attention_prefill.prefill,
            (self.kv_heads, self.num_tokens // tokens + self.num_seqs),
            self.q,
            *self.kv,
            self.q if self.sinks is None else self.sinks,
            self.table,
            self.starts,
            self.lengths,
            self.out,
            self.scale,
            self.softcap or 0.0,
            self.window or 0,
            self.table.shape[1],
            self.num_seqs,
            ROWS=tile.rows,
            KEYS=tile.keys,
            SINGLES=singles,
            HAS_SINKS=self.sinks is not None,
            STAGES=tile.num_stages,
            PDL=pdl(device),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            launch_pdl=pdl(device),
            **self.shared,
        )


def constants(kv_format: str, dim: int, scales: str, window: bool, softcap: bool) -> dict[str, Any]:
    """What the format of the pages and the size of a head decide in both kernels."""
    width = dim // 2 if kv_format in SCALED_FORMATS else dim
    return {
        "HALF": triton.next_power_of_2(width),
        "FORMAT": kv_format,
        "SCALES": scales,
        "RUN": run_length(dim),
        "HAS_WINDOW": window,
        "HAS_SOFTCAP": softcap,
    }


def _check(q: Tensor, pages: KVPages, block_table: Tensor) -> None:
    num_heads, dim = q.shape[1], q.shape[2]
    kv_heads, page = pages.k.shape[1], pages.k.shape[2]
    if page not in PAGE_SIZES or num_heads % kv_heads:
        raise ValueError(f"page_size {page} must be one of {PAGE_SIZES}, {kv_heads} KV heads {num_heads} heads")
    if dim > LARGEST_HEAD or dim % 8:
        raise ValueError(f"heads of {dim}: at most {LARGEST_HEAD}, a multiple of 8")
    if not (pages.k.is_contiguous() and pages.v.is_contiguous() and block_table.stride(1) == 1):
        raise ValueError("pages and the rows of block tables must be contiguous")
    if block_table.stride(0) != block_table.shape[1]:
        raise ValueError("block tables must be contiguous")


def columns_of(group: int) -> int:
    """Columns of a decode tile: query heads of a KV head, at least what a matrix instruction has."""
    return max(8, triton.next_power_of_2(group))


def _search_steps(num_seqs: int) -> int:
    """Halvings that find one of `num_seqs` sequences; few values, since each is another compiled kernel."""
    return next((steps for steps in (1, 4, 8) if num_seqs < 1 << steps), 20)


def _floor_power(x: int) -> int:
    return 1 << max(x.bit_length() - 1, 0)

"""Launches paged attention: single queries split over their keys, several queries of a sequence in tiles.

Nothing is read back from the device: which sequence a program serves it finds in `cu_query_lens` and `seq_lens`, and
how many programs there are follows from the shapes alone, so a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
from torch import Tensor

from ..kv_pages import SCALED_FORMATS, KVPages
from ..verify.tuning import Shape, tuner
from . import attention_decode, attention_prefill
from .attention_tiles import (
    Tile,
    columns_of,
    decode_registers,
    decode_tiles,
    part_bytes,
    prefill_tiles,
    search_steps,
    splits_of,
)
from .hadamard import run_length
from .launch import capability, interpreting, launch, num_sms, pdl

LARGEST_HEAD = 256
PAGE_SIZES = (16, 32, 64)
PART_BYTES = 64 << 20
"""most bytes of split results held at once when queries of a long chunk are treated one by one"""
TRIAL_KEYS, TRIAL_QUERIES = 8192, 2048
"""keys of a decoding sequence, and tokens of a prompt, that candidates are timed on"""
AT_ONCE = 16
"""splits a step of the merge adds up"""


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
            "STEPS": search_steps(self.num_seqs),
            "INTERPRET": interpreting(),
        } | constants(self.format, self.dim, self.scales_of(), window is not None, softcap is not None)
        k, v = (self._pairs(x) for x in (pages.k, pages.v))
        self.kv = (k, v, *(lengths if s is None else s for s, lengths in ((pages.k_scales, k), (pages.v_scales, v))))

    def scales_of(self) -> str:
        """token | layer | none"""
        if self.pages.k_scales is None:
            return "none"
        return "layer" if self.pages.k_scales.dim() == 1 else "token"

    def _picked(self, op: str, candidates: list[Tile], fixed: bool = False) -> Tile:
        """The winner on this card, or the first; with `fixed` always the first: tiles decide the order of sums."""
        if fixed or self.q.device.type != "cuda":
            return candidates[0]
        group = self.heads // self.kv_heads
        shape = Shape(op, (self.format, self.dim, group, self.kv_heads, self.page))
        trial = _trial(op, self.q.dtype, self.q.device, self.format, self.heads, self.kv_heads, self.page, self.dim)
        return Tile(**tuner().pick(shape, [tile._asdict() for tile in candidates], trial))

    def _pairs(self, x: Tensor) -> Tensor:
        return x.view(torch.int16) if self.format in SCALED_FORMATS else x

    def decode(self, first: int, count: int, by_token: bool, tile: Tile | None = None) -> None:
        """Single queries: rows are tokens from `first` on, or sequences."""
        device = self.q.device
        candidates = decode_tiles(self.cap, self.format, self.dim, self.shared["GROUP"])
        tile = tile or self._picked("attention_decode", candidates, by_token)
        sums = torch.empty((count, self.heads, self.places, self.dim), dtype=torch.float32, device=device)
        norms = torch.empty((count, self.heads, self.places, 2), dtype=torch.float32, device=device)
        most = decode_registers(self.cap, self.format, self.dim, self.shared["GROUP"])
        split = {"FIRST": self.splits.first, "SPLITS": self.splits.most, "BY_TOKEN": by_token}
        shared = self.shared | ({} if by_token else {"STEPS": 0})
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
            **({"maxnreg": most} if most else {}),
            **shared,
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
            **{name: shared[name] for name in ("DIM", "FORMAT", "SCALES", "STEPS", "HAS_WINDOW")},
            **split,
        )

    def prefill(self, singles: bool, tile: Tile | None = None) -> None:
        """Sequences of several queries; with `singles` those of one as well."""
        device = self.q.device
        tile = tile or self._picked("attention_prefill", prefill_tiles(self.cap, self.format, self.dim))
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


def _trial(
    op: str, dtype: torch.dtype, device: torch.device, kv_format: str, heads: int, kv_heads: int, page: int, dim: int
) -> Callable[[Mapping[str, int]], Callable[[], object]]:
    """Launches a candidate on one made-up sequence; makes it when a first candidate is tried."""
    made: list[_Step] = []

    def trial(choice: Mapping[str, int]) -> Callable[[], object]:
        new, length = (1, TRIAL_KEYS) if op == "attention_decode" else (TRIAL_QUERIES, TRIAL_QUERIES)
        if not made:
            count = -(-length // page)
            empty = KVPages.empty(kv_format, count, kv_heads, page, dim)
            pages = KVPages(*(None if part is None else _noise(part, device) for part in empty))
            q = torch.randn(new, heads, dim, device=device, dtype=dtype)
            table = torch.arange(count, dtype=torch.int32, device=device)[None]
            bounds = torch.tensor([0, new], dtype=torch.int32, device=device)
            lengths = torch.tensor([length], dtype=torch.int32, device=device)
            made.append(_Step(q, pages, table, bounds, lengths, dim**-0.5, None, None, None))
        tile = Tile(**choice)
        step = made[0]
        step.out.fill_(float("nan"))  # what a kernel leaves out does not pass for the result of the one before it

        def run() -> Tensor:
            if op == "attention_decode":
                step.decode(0, 1, False, tile)
            else:
                step.prefill(True, tile)
            return step.out

        return run

    return trial


def _noise(part: Tensor, device: torch.device) -> Tensor:
    """Made-up pages, or their scales, like `part`."""
    if part.dtype.itemsize > 1:
        largest = 0.02 if part.dim() == 3 else 1.0  # a scale, or a number
        return (torch.rand(part.shape, device=device) * largest).to(part.dtype)
    return torch.randint(0, 100, part.shape, device=device, dtype=torch.uint8).view(part.dtype)  # E4M3: all finite


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

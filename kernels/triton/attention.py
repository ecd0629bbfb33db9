"""Launches paged attention: split-KV kernels for sequences with one query, tiled kernels for several queries.

Nothing is read back from the device: programs find their sequence in `cu_query_lens` and `seq_lens`, and the grid
depends only on shapes, so a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..kv_pages import SCALED_FORMATS, KVPages
from ..verify.tuning import Sampled, Shape, tuner
from . import attention_decode, attention_prefill
from .attention_tiles import (
    Tile,
    columns_of,
    decode_registers,
    decode_tiles,
    prefill_tiles,
    side_by_side,
    splits_of,
)
from .hadamard import run_length
from .launch import card_of, counters, has_ptx, interpreting, launch, power_of_2
from .ops import LARGEST_HEAD, PAGE_SIZES

BLOCK_SIZES = (1, 2, 4, 8)  # tokens of a block of sparse attention, whose blocks are pages to its queries
# maximum size of partial split results when the queries of a long chunk run one by one, and of widened pages
PART_BYTES = 64 << 20
WIDEN_TOKENS = 256  # steps with at least this many tokens widen E4M3 pages once for all; not measured
# keys of the decode trial, and tokens of the prefill trial, that candidates are timed on
TRIAL_KEYS, TRIAL_QUERIES = 8192, 2048
# elements merged per iteration: 64 splits of a head of 128. Each further iteration waits for memory again; four of them
# take 6 to 13 us on an H100 with 32,768 keys
MERGED = 8192
# With 8-bit pages and up to this many query heads per KV head, the last program to finish merges the splits. Step times
# on an H200, merged that way and by a separate kernel: 8B model 2.22 and 2.33 ms; 30B-A3B, with eight heads, 2.30 and
# 2.26; 16-bit pages 4.44 and 4.42, with the next kernel started late (LATE: 1 % less, but 2 % more with 8-bit pages)
MERGED_GROUP = 4
COUNTERS = 1 << 16  # maximum number of (query, KV head) pairs in one launch


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
    *,
    by_token: bool = False,
) -> Tensor:
    """`reference.paged_attention`: sequences with one query use the decode kernels, others the prefill kernel.

    A token's result does not depend on other sequences, nor on chunking, except for chunks of one token; with E4M3
    pages its last bits also depend on whether the step is large enough to widen them. With by_token every query uses
    the decode kernels, and results are bitwise independent of chunks and batches.
    Raises ValueError for arguments that this back end's `fits` rejects, and for non-contiguous tensors.
    """
    step = AttentionStep(q, pages, block_table, cu_query_lens, seq_lens, (scale, window, softcap, sinks, chunked))
    num_tokens, num_seqs = q.shape[0], block_table.shape[0]
    each = step.heads * step.places * (step.dim + 2) * 4  # bytes of partial results per query
    at_once = min(PART_BYTES // each, 65_535, COUNTERS // step.kv_heads)  # so that all merge the same way
    at_once = max(1, at_once & -4)  # rows of int32 that begin at multiples of 16 bytes, as kernels are compiled for
    if by_token:
        for first in range(0, num_tokens, at_once):
            step.decode(first, min(at_once, num_tokens - first), by_token=True)
        return step.out
    if num_seqs > 1 or num_tokens == num_seqs:
        # the queries of sparse attention, each a sequence of its own, may be those of a prompt
        some = at_once if step.page in BLOCK_SIZES else num_seqs
        for first in range(0, num_seqs, some):
            step.decode(first, min(some, num_seqs - first), by_token=False)
    if num_tokens != num_seqs:
        step.prefill(singles=num_seqs == 1)
    return step.out


class AttentionStep:
    """One call: validated arguments, and the arguments that both kernels share."""

    def __init__(
        self,
        q: Tensor,
        pages: KVPages,
        block_table: Tensor,
        cu_query_lens: Tensor,
        seq_lens: Tensor,
        how: tuple[float, int | None, float | None, Tensor | None, bool],
    ) -> None:
        self.num_tokens, self.heads, self.dim = q.shape
        self.kv_heads, self.page = pages.k.shape[1], pages.k.shape[2]
        self.format = pages.format
        if self.page not in (*BLOCK_SIZES, *PAGE_SIZES) or self.heads % self.kv_heads:
            raise ValueError(
                f"page_size {self.page} must be one of {PAGE_SIZES} or, with blocks as pages, of {BLOCK_SIZES}, "
                f"and {self.kv_heads} KV heads must divide {self.heads} heads"
            )
        if self.dim > LARGEST_HEAD or self.dim % 8:
            raise ValueError(f"head_dim {self.dim} must be a multiple of 8 and at most {LARGEST_HEAD}")
        if not (pages.k.is_contiguous() and pages.v.is_contiguous() and block_table.is_contiguous()):
            raise ValueError("pages and block tables must be contiguous")
        scale, window, softcap, self.sinks, chunked = how
        spaced = q.stride(2) == 1 and q.stride(0) == self.heads * q.stride(1)  # queries may be followed by gates
        self.q, self.table, self.window = q if spaced else q.contiguous(), block_table, window or 0
        self.starts, self.lengths = cu_query_lens, seq_lens
        self.num_seqs = block_table.shape[0]
        self.out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        card = card_of(q.device)
        self.cap, self.num_sms, self.splits = card.family, card.num_sms, splits_of(self.kv_heads, card.num_sms)
        self.places = self.splits.places(block_table.shape[1] * self.page, window)
        self.numbers = scale, softcap or 0.0, self.window, block_table.shape[1], self.num_seqs
        self.shared = {
            "DIM": self.dim,
            "STRIDE": q.stride(1) if spaced else self.dim,
            "GROUP": self.heads // self.kv_heads,
            "KV_HEADS": self.kv_heads,
            "PAGE": self.page,
            "HALF": power_of_2(self.dim // 2 if self.format in SCALED_FORMATS else self.dim),
            "FORMAT": self.format,
            "SCALES": "none" if pages.k_scales is None else "layer" if pages.k_scales.dim() == 1 else "token",
            "RUN": run_length(self.dim),
            # binary search steps to find a sequence; only two values, as each compiles another kernel
            "STEPS": 8 if self.num_seqs < 256 else 20,
            "HAS_WINDOW": window is not None,
            "CHUNKED": chunked,
            "HAS_SOFTCAP": softcap is not None,
            "INTERPRET": interpreting(),
            "PTX": has_ptx(q.device),
        }
        k, v = (x.view(torch.int16) if self.format in SCALED_FORMATS else x for x in (pages.k, pages.v))
        self.kv = (k, v, *(lengths if s is None else s for s, lengths in ((pages.k_scales, k), (pages.v_scales, v))))

    def _picked(self, op: str, candidates: tuple[Tile, ...], fixed: bool = False, form: str = "") -> Tile:
        """The measured winner on this GPU, or the first; with `fixed` always the first, as tiles affect sum order."""
        if fixed or self.q.device.type != "cuda":
            return candidates[0]
        form = form or self.format
        shape = Shape(op, (form, self.dim, self.shared["GROUP"], self.kv_heads, self.page))
        own = tuner(self.q.device)
        if (known := own.picked(shape)) is None:
            trial = _trial(op, self.q, form, self.kv_heads, self.page)
            known = own.pick(shape, [tile._asdict() for tile in candidates], trial)
        return Tile(**known)

    def decode(self, first: int, count: int, by_token: bool, tile: Tile | None = None) -> None:
        """Launch decode attention of `count` rows from `first` on: sequences, or with `by_token` tokens."""
        group = self.shared["GROUP"]
        candidates = decode_tiles(self.cap, self.format, self.dim, group)
        tile = tile or self._picked("attention_decode", candidates, by_token or self.page in BLOCK_SIZES)
        places = (count, self.heads, self.places)
        sums = torch.empty((*places, self.dim), dtype=torch.float32, device=self.q.device)
        norms = torch.empty((*places, 2), dtype=torch.float32, device=self.q.device)
        split = {"FIRST": self.splits.first, "SPLITS": self.splits.most, "BY_TOKEN": by_token}
        shared = self.shared | split | ({} if by_token else {"STEPS": 0})
        sinks, padded = norms if self.sinks is None else self.sinks, power_of_2(self.dim)
        most_places = 2 * power_of_2(self.splits.most)
        merging: dict[str, Any] = {"PADDED": padded, "PLACES": most_places, "HAS_SINKS": self.sinks is not None}
        eight, heads = self.format in SCALED_FORMATS, power_of_2(group)
        merges = eight and group <= MERGED_GROUP and count * self.kv_heads <= COUNTERS
        zeros = counters(self.q.device, COUNTERS)
        where = self.table, self.starts, self.lengths
        if first and not by_token:
            where = self.table[first:], self.starts[first:], self.lengths[first:]
        launch(
            attention_decode.decode_split,
            (side_by_side(self.places, count, self.kv_heads, self.num_sms), self.kv_heads, count),
            *(self.q, *self.kv, *where, sums, norms, sinks, zeros),
            self.out,
            *self.numbers,
            *(first, self.places),
            COLUMNS=columns_of(group, self.cap),
            KEYS=tile.keys,
            STAGES=tile.num_stages,
            HEADS=heads,
            AT_ONCE=max(1, 64 * 32 * tile.num_warps // (padded * heads)),  # 64 elements per thread
            MERGES=merges,
            LATE=not eight,
            NATIVE=bool(tile.native),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            registers=decode_registers(self.cap, self.format, self.dim, group, shared["CHUNKED"], tile.native),
            **shared,
            **merging,
        )
        if merges:
            return
        launch(
            attention_decode.merge_splits,
            (self.heads, count),
            *(sums, norms, sinks, self.kv[3], self.out, *where[1:]),
            *(self.window, self.places, self.num_seqs, first),
            HEADS=self.heads,
            AT_ONCE=MERGED // padded,
            COUNTED=self.page in BLOCK_SIZES,
            **merging,
            **{name: shared[name] for name in ("DIM", "FORMAT", "SCALES", "STEPS", "HAS_WINDOW", "CHUNKED", *split)},
        )

    def prefill(self, singles: bool, tile: Tile | None = None) -> None:
        """Launch prefill attention for sequences with several queries; with `singles` also for those with one."""
        places = self.table.numel()
        each = places * self.page * (4 * self.dim + 4)  # bytes per widened KV head
        at_once = PART_BYTES // max(1, each)
        if self.format == "fp8" and self.num_tokens >= WIDEN_TOKENS and at_once:
            at_once = -(-self.kv_heads // -(-self.kv_heads // min(at_once, self.kv_heads)))  # in equal parts
            for first in range(0, self.kv_heads, at_once):
                self._prefill_widened(singles, tile, first, min(at_once, self.kv_heads - first))
        else:
            tile = tile or self._picked("attention_prefill", prefill_tiles(self.cap, self.format, self.dim))
            self._prefill(singles, tile, self.kv, self.table, (0, self.kv_heads), self.shared)

    def _prefill_widened(self, singles: bool, tile: Tile | None, first: int, count: int) -> None:
        """Run prefill for some KV heads with keys and values widened to float16."""
        places, device = self.table.numel(), self.q.device
        shape = (places, count, self.page, self.dim)
        k, v = (torch.empty(shape, dtype=torch.float16, device=device) for _ in range(2))
        scales = self.kv[2]
        if self.shared["SCALES"] == "token":
            scales = torch.empty(shape[:3], dtype=torch.float32, device=device)
        names = ("DIM", "HALF", "KV_HEADS", "PAGE", "SCALES", "PTX")
        launch(
            attention_prefill.widen,
            (places, count),
            *(*self.kv, self.table, k, v, scales, first),
            **{name: self.shared[name] for name in names},
        )
        tile = tile or self._picked("attention_prefill", prefill_tiles(self.cap, "fp16", self.dim), form="fp16")
        shared = self.shared | {"FORMAT": "fp16", "HALF": power_of_2(self.dim)}
        self._prefill(singles, tile, (k, v, scales, self.kv[3]), _in_order(places, device), (first, count), shared)

    def _prefill(
        self,
        singles: bool,
        tile: Tile,
        kv: tuple[Tensor, ...],
        table: Tensor,
        heads: tuple[int, int],
        shared: Mapping[str, Any],
    ) -> None:
        """`heads`: first KV head in the pages, and number of KV heads in them."""
        sinks = self.q if self.sinks is None else self.sinks
        first, count = heads
        launch(
            attention_prefill.prefill,
            (count, self.num_tokens // (tile.rows // self.shared["GROUP"]) + self.num_seqs),
            *(self.q, *kv, sinks, table, self.starts, self.lengths, self.out),
            *(*self.numbers, first, count),
            ROWS=tile.rows,
            KEYS=tile.keys,
            SINGLES=singles,
            HAS_SINKS=self.sinks is not None,
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **shared,
        )


@lru_cache(maxsize=4)
def _in_order(places: int, device: torch.device) -> Tensor:
    """Identity block table, for widened pages stored in table order."""
    return torch.arange(places, dtype=torch.int32, device=device)


def _trial(op: str, like: Tensor, kv_format: str, kv_heads: int, page: int) -> Sampled:
    """Return a trial that runs a candidate on one random sequence, created only when it is needed."""
    _, heads, dim = like.shape
    dtype, device = like.dtype, like.device
    new, length = (1, TRIAL_KEYS) if op == "attention_decode" else (TRIAL_QUERIES, TRIAL_QUERIES)

    def made() -> AttentionStep:
        count = -(-length // page)
        empty = KVPages.empty(kv_format, count, kv_heads, page, dim)
        pages = KVPages(*(None if part is None else _noise(part, device) for part in empty))
        q = torch.randn(new, heads, dim, device=device, dtype=dtype)
        table = torch.arange(count, dtype=torch.int32, device=device)[None]
        bounds, lengths = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, new], [length]))
        return AttentionStep(q, pages, table, bounds, lengths, (dim**-0.5, None, None, None, False))

    def trial(step: AttentionStep, choice: Mapping[str, int]) -> Callable[[], object]:
        tile = Tile(**choice)
        step.out.fill_(float("nan"))  # so that skipped outputs do not keep the previous candidate's results

        def run() -> Tensor:
            if op == "attention_decode":
                step.decode(0, 1, False, tile)
            else:  # without widening: widened pages are tuned as fp16
                step._prefill(True, tile, step.kv, step.table, (0, kv_heads), step.shared)
            return step.out

        return run

    return Sampled(made, trial)


def _noise(part: Tensor, device: torch.device) -> Tensor:
    """Random pages or scales like `part`."""
    if part.dtype.itemsize > 1:
        largest = 0.02 if part.dim() == 3 else 1.0  # scales, or values
        return (torch.rand(part.shape, device=device) * largest).to(part.dtype)
    signs = torch.randint(0, 2, part.shape, device=device, dtype=torch.uint8) << 7
    return (torch.randint(0, 100, part.shape, device=device, dtype=torch.uint8) | signs).view(part.dtype)  # all finite

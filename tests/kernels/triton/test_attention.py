"""Paged attention kernels against their reference: formats, head and page sizes, windows, sinks, what batches do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from localllm.kernels import reference
from localllm.kernels.kv_pages import KVPages
from localllm.kernels.triton import attention, attention_tiles
from localllm.kernels.triton.cards import Card
from localllm.kernels.triton.launch import recording
from localllm.kernels.verify.trial import LINEAR_TOKENS, compare
from localllm.kernels.verify.tuning import AGREEMENT
from localllm.plan.memory import DECODE_SPLITS, SPLIT_PART_BYTES

CPU_TOLERANCE = {"f32": 2e-5, "bf16": 2e-5, "fp16": 2e-5, "int8": 4e-5, "fp8": 4e-5}
"""largest difference to the reference relative to the largest value: the interpreter computes in float32"""
GPU_TOLERANCE = {"f32": 2e-5, "bf16": 1.2e-2, "fp16": 2e-3, "int8": 2e-3, "fp8": 2e-3}
"""operands of matrix instructions are rounded to the format's 16 bits"""

BY_TOKEN = partial(attention.paged_attention, by_token=True)


@dataclass(frozen=True)
class Shape:
    """A step: (new tokens, tokens) of every sequence, and the heads."""

    spans: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 1
    dim: int = 64
    page: int = 16
    kv_format: str = "bf16"
    window: int | None = None
    chunked: bool = False
    softcap: float | None = None
    sinks: bool = False
    layer_scale: bool = False
    spare: int = 2
    """columns of the block table that nothing uses"""


class Step:
    """Pages filled by the reference, in no order; what nobody may read is NaN or -1."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        needed = [-(-length // shape.page) for _, length in shape.spans]
        total = sum(needed) + 2
        pages = KVPages.empty(shape.kv_format, total, shape.kv_heads, shape.page, shape.dim)
        if shape.layer_scale:
            pages = pages._replace(k_scales=torch.tensor([0.011]), v_scales=torch.tensor([0.007]))
        order = torch.randperm(total).tolist()
        self.table = torch.full((len(needed), max(needed) + shape.spare), -1, dtype=torch.int32)
        _poison(pages)
        for row, (count, (new, length)) in enumerate(zip(needed, shape.spans, strict=True)):
            mine = [order.pop() for _ in range(count)]
            self.table[row, :count] = torch.tensor(mine)
            k, v = (torch.randn(length, shape.kv_heads, shape.dim) * 1.5 for _ in range(2))
            at = torch.arange(length)
            slots = self.table[row].long()[at // shape.page] * shape.page + at % shape.page
            reference.kv_write(k, v, pages, slots)
            if shape.window is not None:
                self.table[row, : max(0, length - new - shape.window + 1) // shape.page] = -1
        starts = torch.tensor([0, *(new for new, _ in shape.spans)]).cumsum(0).int()
        self.q = torch.randn(int(starts[-1]), shape.heads, shape.dim).to(device)
        self.sinks = torch.randn(shape.heads).to(device) if shape.sinks else None
        self.pages = KVPages(*(None if part is None else part.to(device) for part in pages))
        self.table, self.starts = self.table.to(device), starts.to(device)
        self.lengths = torch.tensor([length for _, length in shape.spans], dtype=torch.int32, device=device)

    def run(self, op, rows: list[int] | None = None) -> Tensor:  # type: ignore[no-untyped-def]
        """All sequences, or some of them as a batch of their own."""
        shape = self.shape
        q, table, lengths, starts = self.q, self.table, self.lengths, self.starts
        if rows is not None:
            bounds = starts.tolist()
            q = torch.cat([q[bounds[r] : bounds[r + 1]] for r in rows])
            table, lengths = table[rows].contiguous(), lengths[rows]
            starts = torch.tensor([0, *(shape.spans[r][0] for r in rows)]).cumsum(0).int().to(q.device)
        extra = (shape.dim**-0.5, shape.window, shape.softcap, self.sinks, shape.chunked)
        return op(q, self.pages, table, starts, lengths, *extra)


def _poison(pages: KVPages) -> None:
    for part in pages:
        if part is not None and part.is_floating_point() and part.dim() > 1:
            part.fill_(torch.nan)


def check(  # type: ignore[no-untyped-def]
    shape: Shape, device: torch.device, op=attention.paged_attention, is_rounded: bool = False
) -> tuple[Step, Tensor]:
    """The kernel's result, close to the reference's; `is_rounded`: in the interpreter, too."""
    step = Step(shape, device)
    found, expected = step.run(op), step.run(reference.paged_attention)
    tolerance = (CPU_TOLERANCE if device.type == "cpu" and not is_rounded else GPU_TOLERANCE)[shape.kv_format]
    worst = float((found.float() - expected.float()).abs().max() / expected.abs().max())
    assert worst <= tolerance, f"{shape}: off by {worst:.2e}"
    return step, found


def some(values: list, quick: tuple[int, ...]) -> list:  # type: ignore[type-arg]
    """Parameters of which the default run takes those at some places."""
    return [v if i in quick else pytest.param(v, marks=pytest.mark.slow) for i, v in enumerate(values)]


FORMATS = ["bf16", "fp8", "int8", "f32", "fp16"]
DECODE = Shape(((1, 1), (1, 16), (1, 17), (1, 150), (1, 64)), heads=6, kv_heads=2)


@pytest.fixture
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of 64 keys, and more of them than two: short sequences then have several, long ones wider ones."""
    monkeypatch.setattr(attention, "splits_of", lambda heads, sms: attention_tiles.Splits(64, 4))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kv_format", some(FORMATS, (0, 1)))
def test_decode_formats(kv_format: str, device: torch.device, small_splits: None) -> None:
    check(replace(DECODE, kv_format=kv_format), device)


@pytest.mark.parametrize("dim", some([80, 96, 112, 128, 256, 512], (1, 5)))
@pytest.mark.parametrize("kv_format", ["bf16", "int8"])
def test_decode_head_sizes(dim: int, kv_format: str, device: torch.device, small_splits: None) -> None:
    check(Shape(((1, 70), (1, 5)), 2, 1, dim, kv_format=kv_format), device)


@pytest.mark.parametrize("heads", some([1, 2, 3, 5, 7, 8, 12], (4, 6)))
def test_decode_groups(heads: int, device: torch.device, small_splits: None) -> None:
    check(Shape(((1, 33), (1, 90)), heads, 1, 64), device)


@pytest.mark.parametrize("page", some([32, 64], (0,)))
@pytest.mark.parametrize("kv_format", some(["bf16", "fp8"], (1,)))
def test_decode_page_sizes(page: int, kv_format: str, device: torch.device, small_splits: None) -> None:
    check(Shape(((1, 1), (1, page), (1, page + 1), (1, 130)), 4, 2, 64, page, kv_format), device)


WANTS = [
    {"window": 40},
    {"window": 64, "sinks": True},
    {"window": 500},
    {"softcap": 5.0},
    {"sinks": True},
    {"kv_format": "fp8", "layer_scale": True},
    {"kv_format": "int8", "window": 70, "softcap": 20.0, "sinks": True},
    {"kv_format": "fp8", "window": 3},
    {"window": 50, "chunked": True},
    {"kv_format": "int8", "window": 16, "chunked": True},
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("wants", some(WANTS, (6, 8)), ids=str)
def test_decode_windows_caps_sinks(wants: dict, device: torch.device, small_splits: None) -> None:  # type: ignore[type-arg]
    check(replace(DECODE, **wants), device)


@pytest.mark.parametrize("length", some([256, 257, 700], (1,)))
def test_decode_widens_its_splits(length: int, device: torch.device, small_splits: None) -> None:
    """More keys than the most splits of the first size hold."""
    check(Shape(((1, length), (1, 30)), 2, 1, 64), device)
    check(Shape(((1, length),), 2, 1, 64, window=300), device)


PREFILL = Shape(((5, 5), (1, 40), (20, 67), (33, 33), (1, 1), (2, 130)), 6, 2)


@pytest.mark.parametrize("kv_format", some(FORMATS, (0,)))
def test_prefill_formats(kv_format: str, device: torch.device, small_splits: None) -> None:
    check(replace(PREFILL, kv_format=kv_format), device)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("wants", some(WANTS, (6, 8)), ids=str)
def test_prefill_windows_caps_sinks(wants: dict, device: torch.device, small_splits: None) -> None:  # type: ignore[type-arg]
    check(replace(PREFILL, **wants), device)


@pytest.mark.slow
@pytest.mark.parametrize("wants", [{}, {"window": 40, "sinks": True}, {"layer_scale": True, "dim": 80}], ids=str)
@pytest.mark.parametrize("heads_at_once", [1, 2])
def test_prefill_of_pages_that_are_widened_first(
    wants: dict,  # type: ignore[type-arg]
    heads_at_once: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = replace(PREFILL, heads=6, kv_heads=3, kv_format="fp8", **wants)
    places = len(shape.spans) * (9 + shape.spare)
    monkeypatch.setattr(attention, "WIDEN_TOKENS", 1)
    monkeypatch.setattr(attention, "PART_BYTES", heads_at_once * places * shape.page * (4 * shape.dim + 4))
    pieces = []
    widened = attention.AttentionStep._prefill_widened

    def counted(step: attention.AttentionStep, singles: bool, tile: object, first: int, count: int) -> None:
        pieces.append((first, count))
        widened(step, singles, None, first, count)

    monkeypatch.setattr(attention.AttentionStep, "_prefill_widened", counted)
    check(shape, device, is_rounded=True)
    assert pieces == ([(0, 1), (1, 1), (2, 1)] if heads_at_once == 1 else [(0, 2), (2, 1)])


@pytest.mark.parametrize("dim", some([80, 96, 112, 128, 256, 512], (0, 3)))
@pytest.mark.parametrize("kv_format", ["bf16", "int8"])
def test_prefill_head_sizes(dim: int, kv_format: str, device: torch.device) -> None:
    check(Shape(((37, 90),), 2, 1, dim, kv_format=kv_format), device)


@pytest.mark.parametrize("heads", some([1, 2, 3, 5, 7, 8], (2, 5)))
def test_prefill_groups(heads: int, device: torch.device) -> None:
    check(Shape(((150, 170),), heads, 1, 64), device)


@pytest.mark.parametrize("page", some([32, 64], (1,)))
def test_prefill_page_sizes(page: int, device: torch.device) -> None:
    check(Shape(((40, 40), (70, 150)), 4, 2, 64, page), device)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 50])
def test_batches_change_no_bit(window: int | None, device: torch.device, small_splits: None) -> None:
    """A sequence alone and between others, in any order."""
    step = Step(replace(PREFILL, window=window), device)
    whole = step.run(attention.paged_attention).split([new for new, _ in PREFILL.spans])
    for rows in ([1], [2], [5, 0], [2, 2, 1, 4]):
        alone = step.run(attention.paged_attention, rows).split([PREFILL.spans[r][0] for r in rows])
        for row, result in zip(rows, alone, strict=True):
            assert torch.equal(result, whole[row])


@pytest.mark.slow
@pytest.mark.parametrize("window", some([None, 50], (1,)))
def test_by_token_no_chunk_changes_a_bit(window: int | None, device: torch.device, small_splits: None) -> None:
    """A sequence's queries in one chunk, in pieces, and one after the other as in decoding, across a split's end."""
    new, length = 9, 70
    shape = Shape(((new, length),), 2, 1, window=window)
    step, whole = check(shape, device, BY_TOKEN)
    full = step.q
    for count, end in ((1, length), (1, 65), (4, 66), (1, 64)):
        first = end - length + new - count
        step.q, step.starts = full[first : first + count], torch.tensor([0, count], dtype=torch.int32, device=device)
        step.lengths = torch.tensor([end], dtype=torch.int32, device=device)
        assert torch.equal(step.run(BY_TOKEN), whole[first : first + count])
        if count == 1:
            assert torch.equal(step.run(attention.paged_attention), whole[first : first + count])


@pytest.mark.slow
def test_by_token_mixed_batch_in_slices(
    device: torch.device, small_splits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "PART_BYTES", 40_000)
    spans = ((5, 5), (1, 40), (3, 67), (1, 1), (2, 130))
    check(Shape(spans, 2, 1, kv_format="int8", sinks=True), device, BY_TOKEN)


@pytest.mark.parametrize("kv_format", some(["bf16", "int8"], (0,)))
def test_few_programs_compute_the_splits_of_many(
    kv_format: str, device: torch.device, small_splits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit what a program for each split computes."""
    step = Step(Shape(((1, 1), (1, 150), (1, 70)), heads=2, kv_heads=1, window=100, kv_format=kv_format), device)
    found = []
    for most in (16, 1):
        asked = Mock(return_value=most)
        monkeypatch.setattr(attention, "side_by_side", asked)
        found.append(step.run(attention.paged_attention).clone())
        asked.assert_called_once()
    assert torch.equal(*found)


@pytest.mark.parametrize("kv_format", some(["fp8", "int8"], (0,)))
def test_the_last_program_merges_the_splits(
    kv_format: str, device: torch.device, small_splits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernel does that merges them elsewhere, which leaves the prompt of a mixed step alone, too."""
    step = Step(replace(PREFILL, kv_format=kv_format, sinks=True, window=100), device)
    found = step.run(attention.paged_attention).clone()
    assert not attention.counters(device, attention.COUNTERS).any()
    monkeypatch.setattr(attention, "MERGED_GROUP", 0)
    assert compare(step.run(attention.paged_attention), found, 1e-5) == ""
    for group, kernels in ((4, ["decode_split"]), (8, ["decode_split", "merge_splits"])):
        monkeypatch.setattr(attention, "MERGED_GROUP", 4)
        one = Step(Shape(((1, 20),), group, 1, kv_format=kv_format), torch.device("cpu"))
        with recording(Card(90, 132)) as launches:
            one.run(attention.paged_attention)
        assert [launch.kernel.__name__ for launch in launches] == kernels


def kernels_of(spans: tuple[tuple[int, int], ...], kv_format: str) -> set[tuple[str, str]]:
    """What a step of Qwen3 8B launches on an H100, by what makes each another kernel to compile."""
    with recording(Card(90, 132)) as launches:
        empty = KVPages.empty(kv_format, 1, 8, 16, 128)
        pages = KVPages(*(None if x is None else x.to("meta") for x in empty))
        count, wide = sum(new for new, _ in spans), max(-(-length // 16) for _, length in spans)
        ints = [torch.empty(size, dtype=torch.int32, device="meta") for size in (len(spans) + 1, len(spans))]
        table = torch.empty((len(spans), wide), dtype=torch.int32, device="meta")
        q = torch.empty((count, 32, 128), dtype=torch.bfloat16, device="meta")
        attention.paged_attention(q, pages, table, *ints, 0.1)
    return {(one.kernel.__name__, f"{one.constexprs} {one.options}") for one in launches}


@pytest.mark.parametrize("kv_format", ["fp8", "bf16"])
@pytest.mark.parametrize("ctx", [8192, 40_960, 131_072])
def test_no_step_needs_a_kernel_that_no_warming_up_launched(ctx: int, kv_format: str) -> None:
    """`boot.profile.warm_up`: each kernel of FP8 pages that a request compiled took it three seconds."""
    alone = [((count, count),) for count in LINEAR_TOKENS["cuda"]]
    beside = [((count, count), (1, length)) for count, length in ((100, 2), (2048, 2), (2048, ctx - 1))]
    warm = {one for spans in (*alone, *beside) for one in kernels_of(spans, kv_format)}
    steps = [
        *(((min(2048, length), length),) for length in range(256, ctx, 4096)),
        ((100, 100), (1, 2000)), ((100, 4000),), ((1000, 1000), (1000, 1000)),
        *(((count, count), *[(1, 3000)] * 3) for count in (300, 2048)),
        ((2048, 2048), *[(1, 8000)] * 7), ((2048, ctx - 1), *[(1, ctx - 1)] * 7),
    ]  # fmt: skip
    assert all(kernels_of(spans, kv_format) <= warm for spans in steps)


def test_fp8_pages_are_tuned_as_they_are() -> None:
    """Not the float16 ones that are made of them, which have tiles of their own."""
    for form, kernels in (("fp8", ["fp8"]), ("fp16", ["fp16"])):
        call = attention._trial("attention_prefill", torch.empty(1, 32, 128, dtype=torch.bfloat16), form, 8, 16)
        tile = attention_tiles.prefill_tiles(90, form, 128)[0]
        with recording(Card(90, 132)) as launches:
            call(tile._asdict())()
        assert [launch.constexprs["FORMAT"] for launch in launches] == kernels


@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
def test_rows_without_tokens_get_zeros(kv_format: str, device: torch.device) -> None:
    """A bucket of a captured graph may have rows that no sequence fills."""
    step = Step(Shape(((1, 20), (1, 1)), kv_format=kv_format), device)
    step.lengths[1] = 0
    found = step.run(attention.paged_attention)
    assert torch.equal(found[1], torch.zeros_like(found[1])) and found[0].isfinite().all()


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="page_size 48"):
        Step(Shape(((1, 20),), page=48), device).run(attention.paged_attention)
    with pytest.raises(ValueError, match="head_dim 520"):
        Step(Shape(((1, 20),), dim=520), device).run(attention.paged_attention)


def test_split_sizes() -> None:
    """More splits for longer sequences, up to a limit; never a choice by the batch."""
    splits = attention_tiles.splits_of(8, 132)
    assert splits == (128, 64)
    assert [splits.places(keys, None) for keys in (1, 128, 129, 4096, 1 << 20)] == [1, 1, 2, 32, 64]
    assert splits.places(1 << 20, 1000) == 9
    assert attention_tiles.splits_of(1, 132) == (128, 128) and attention_tiles.splits_of(8, 16) == (512, 8)


def test_no_more_programs_than_keep_the_card_busy() -> None:
    """A context of 32k has 64 splits; 64 sequences of 1k need 8 of them each."""
    programs = [attention_tiles.side_by_side(64, queries, 8, 132) for queries in (1, 4, 64, 1000)]
    assert programs == [64, 64, 4, 1]


def test_every_tile_divides_every_split() -> None:
    """Tiles begin at multiples of their size, splits at multiples of the first: at most 128."""
    for cap in (75, 80, 86, 89, 90, 100, 120, 121):
        for kv_format in ("f32", "bf16", "fp16", "int8", "fp8"):
            for dim in (64, 80, 96, 112, 128, 256, 512):
                for group in (1, 4, 12, 32):
                    decode = attention_tiles.decode_tiles(cap, kv_format, dim, group)
                    assert 1 <= len(decode) <= 8 and all(128 % tile.keys == 0 for tile in decode)
                    has_instruction = kv_format == "fp8" and cap >= 89 and dim <= 256
                    assert sum(tile.native for tile in decode) == decode[-1].native == has_instruction
                prefill = attention_tiles.prefill_tiles(cap, kv_format, dim)
                assert 1 <= len(prefill) <= 8 and all(tile.rows >= 16 for tile in prefill)


def test_the_plan_counts_every_split() -> None:
    most = max(
        attention_tiles.splits_of(heads, sms).places(keys, window)
        for heads in (1, 2, 4, 8, 16)
        for sms in (16, 48, 132, 188)
        for keys in (4096, 1 << 17)
        for window in (None, 4096, 1 << 16)
    )
    assert most <= DECODE_SPLITS
    assert attention.PART_BYTES <= SPLIT_PART_BYTES


@pytest.mark.parametrize("op", ["attention_decode", "attention_prefill"])
@pytest.mark.parametrize("kv_format", some(["bf16", "fp8", "int8"], (0,)))
def test_candidates_agree_on_made_up_pages(
    op: str, kv_format: str, device: torch.device, small_splits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tuner compares is finite, not zero, and the same by every tile."""
    monkeypatch.setattr(attention, "TRIAL_KEYS", 80)
    monkeypatch.setattr(attention, "TRIAL_QUERIES", 40)
    trial = attention._trial(op, torch.empty(1, 4, 64, dtype=torch.bfloat16, device=device), kv_format, 2, 16)
    tiles = attention_tiles.decode_tiles(90, kv_format, 64, 2)
    if op == "attention_prefill":
        tiles = attention_tiles.prefill_tiles(90, kv_format, 64)
    found = [trial(tile._asdict())().clone() for tile in tiles[:3]]  # type: ignore[attr-defined]
    assert found[0].isfinite().all() and found[0].abs().float().mean() > 1e-3
    assert all(compare(other, found[0], AGREEMENT) == "" for other in found[1:])

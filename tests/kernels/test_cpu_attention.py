"""Attention in C over pages, against a softmax in float64; a query's result stands alone, bit for bit."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from localllm.kernels import OpFacts
from localllm.kernels.cpu import build, ops
from localllm.kernels.kv_codes import decode, hadamard
from localllm.kernels.kv_pages import KV_DTYPES, SCALED_FORMATS, KVPages


@dataclass(frozen=True)
class Case:
    """Random queries over random pages; what no sequence wrote is NaN."""

    q: Tensor
    pages: KVPages
    table: Tensor
    starts: Tensor
    lens: Tensor
    window: int | None
    softcap: float | None
    sinks: Tensor | None = None
    chunked: bool = False

    def run(self) -> Tensor:
        return ops.paged_attention(
            self.q,
            self.pages,
            self.table,
            self.starts,
            self.lens,
            self.q.shape[2] ** -0.5,
            self.window,
            self.softcap,
            self.sinks,
            self.chunked,
        )

    def alone(self, seq: int, index: int) -> Tensor:
        """One query of a sequence as a step of its own."""
        start, end = int(self.starts[seq]), int(self.starts[seq + 1])
        length = int(self.lens[seq]) - (end - start) + index + 1
        one = Case(
            self.q[start + index : start + index + 1],
            self.pages,
            self.table[seq : seq + 1].contiguous(),
            torch.tensor([0, 1], dtype=torch.int32),
            torch.tensor([length], dtype=torch.int32),
            self.window,
            self.softcap,
            self.sinks,
            self.chunked,
        )
        return one.run()[0]


def nan_pages(kv: str, shape: tuple[int, ...]) -> KVPages:
    """Pages of a format in which every number is NaN: in those of 8 bits by their scales."""
    kv_format, _, fixed = kv.partition(" ")
    dtype = KV_DTYPES[kv_format]
    k, v = (torch.full(shape, float("nan") if dtype.is_floating_point else 0x7F, dtype=dtype) for _ in range(2))
    if kv_format not in SCALED_FORMATS:
        return KVPages(k, v)
    if fixed:
        return KVPages(k, v, torch.tensor([0.013]), torch.tensor([0.009]))
    return KVPages(k, v, *(torch.full(shape[:3], float("nan")) for _ in range(2)))


def make(
    lens: tuple[int, ...],
    queries: tuple[int, ...],
    heads: tuple[int, int],
    dim: int,
    page: int = 16,
    kv: str = "f32",
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    chunked: bool = False,
) -> Case:
    needed = [-(-length // page) for length in lens]
    num_pages = sum(needed) + 2
    pages = nan_pages(kv, (num_pages, heads[1], page, dim))
    order = torch.randperm(num_pages)
    table = torch.full((len(lens), max(needed) + 1), -1, dtype=torch.int32)
    for seq, length in enumerate(lens):
        table[seq, : needed[seq]] = order[sum(needed[:seq]) : sum(needed[: seq + 1])]
        positions = torch.arange(length)
        slots = table[seq].long()[positions // page] * page + positions % page
        ops.kv_write(torch.randn(length, heads[1], dim), torch.randn(length, heads[1], dim), pages, slots)
        if window is not None:
            table[seq, : max(0, length - queries[seq] - window + 1) // page] = -1
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    q = torch.randn(sum(queries), heads[0], dim)
    sink = torch.randn(heads[0]) if sinks else None
    return Case(q, pages, table, starts, torch.tensor(lens, dtype=torch.int32), window, softcap, sink, chunked)


CASES = {
    "one page, all queries": partial(make, lens=(5,), queries=(5,), heads=(4, 2), dim=16),
    "decode, three segments": partial(make, lens=(700, 1, 33), queries=(1, 1, 2), heads=(9, 3), dim=64, kv="bf16"),
    "heads together": partial(make, lens=(700, 513, 900), queries=(1, 2, 1), heads=(16, 8), dim=32, kv="bf16"),
    "heads together, window": partial(
        make, lens=(1000,) * 4, queries=(1, 4, 1, 1), heads=(7, 7), dim=64, kv="int8", window=600
    ),
    "a chunk in the middle": partial(make, lens=(400,), queries=(130,), heads=(9, 3), dim=64),
    "window": partial(make, lens=(350, 40), queries=(350, 3), heads=(4, 1), dim=256, kv="bf16", window=100),
    "window over segments": partial(
        make, lens=(1000, 3), queries=(1, 3), heads=(4, 4), dim=8, page=64, kv="bf16", window=300
    ),
    "softcap, odd dimension": partial(make, lens=(150,), queries=(149,), heads=(6, 6), dim=80, page=32, softcap=5.0),
    "chunks": partial(make, lens=(90, 64), queries=(60, 1), heads=(4, 2), dim=24, window=32, chunked=True),
    "chunks over segments": partial(
        make, lens=(1000, 601, 600), queries=(1, 4, 300), heads=(4, 4), dim=8, kv="bf16", window=300, chunked=True
    ),
    "small pages": partial(make, lens=(90,), queries=(60,), heads=(4, 2), dim=24, page=8, window=7),
    "page boundary": partial(make, lens=(16, 17, 256, 257), queries=(1, 1, 1, 1), heads=(2, 1), dim=32),
    "int8": partial(make, lens=(700, 20), queries=(1, 20), heads=(6, 2), dim=64, kv="int8"),
    "int8, odd runs": partial(make, lens=(90,), queries=(40,), heads=(4, 2), dim=40, kv="int8", window=50),
    "fp8": partial(make, lens=(300, 20), queries=(2, 20), heads=(4, 1), dim=80, page=8, kv="fp8"),
    "fp8, one scale": partial(make, lens=(70,), queries=(70,), heads=(2, 2), dim=256, kv="fp8 fixed"),
    "fp16, sinks": partial(make, lens=(600, 9), queries=(1, 9), heads=(4, 2), dim=48, kv="fp16", sinks=True),
    "heads wider than a block of rows": partial(make, lens=(40,), queries=(2,), heads=(40, 1), dim=512, kv="bf16"),
}


IN_PAIRS = [
    name for name, case in CASES.items() if case.keywords.get("kv") == "bf16" and case.keywords["dim"] % 16 == 0
]
WAYS = [*((name, "floats") for name in CASES), *((name, "pairs") for name in IN_PAIRS)]


@pytest.fixture
def tolerance(isa: str, way: str) -> Iterator[float]:
    """How far results may be off: by the roundings of float32; in pairs by those of queries and weights to bfloat16."""
    flag = ctypes.c_int.in_dll(build.lib(), "ll_bf16")
    if way == "pairs" and (isa not in ("amx", "avx512vnni", "avx512") or "avx512_bf16" not in build._flags_of_cpu()):
        pytest.skip("no products of bfloat16")
    before, flag.value = flag.value, way == "pairs"
    yield 1e-2 if way == "pairs" else 2e-6
    flag.value = before


def expected(c: Case) -> Tensor:
    """The definition, in float64."""
    out = torch.empty(c.q.shape, dtype=torch.float64)
    page, group = c.pages.k.shape[2], c.q.shape[1] // c.pages.k.shape[1]
    q = (hadamard(c.q) if c.pages.format == "int8" else c.q).double()
    keys_and_values = [
        (codes if scales is None else decode(codes, scales)).double()
        for codes, scales in ((c.pages.k, c.pages.k_scales), (c.pages.v, c.pages.v_scales))
    ]
    for seq, length in enumerate(c.lens.tolist()):
        start, end = int(c.starts[seq]), int(c.starts[seq + 1])
        positions = torch.arange(length - (end - start), length)[:, None]
        oldest = 0 if c.window is None else max(0, int(positions[0]) - c.window + 1)
        keys = torch.arange(oldest, length)
        pages = c.table[seq].long()[keys // page]
        k, v = (x[pages, :, keys % page].double().repeat_interleave(group, 1) for x in keys_and_values)
        scores = torch.einsum("qhd,khd->hqk", q[start:end], k) * c.q.shape[2] ** -0.5
        if c.softcap:
            scores = c.softcap * torch.tanh(scores / c.softcap)
        before = keys <= positions - (c.window or length)
        if c.chunked and c.window is not None:
            before = keys // c.window < positions // c.window
        hidden = (keys > positions) | before
        scores = scores.masked_fill(hidden, -torch.inf)
        if c.sinks is not None:
            scores = torch.cat([scores, c.sinks.double()[:, None, None].expand(-1, end - start, 1)], -1)
        out[start:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : length - oldest], v)
    return out


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_attention(isa: str, name: str, tolerance: float) -> None:
    case = CASES[name]()
    y = case.run().double()
    torch.testing.assert_close(y, wanted := expected(case), rtol=0, atol=tolerance)
    assert (y - wanted).norm() <= tolerance / 4 * wanted.norm()
    for seq, queries in enumerate((case.starts[1:] - case.starts[:-1]).tolist()):
        for index in sorted({0, queries // 3, queries // 2, queries - 1}):
            assert torch.equal(case.alone(seq, index), y[int(case.starts[seq]) + index]), (seq, index)


def spoil_keys(case: Case, count: int) -> None:
    """The first keys of every sequence that some query still sees become NaN, in the way of the format."""
    size = case.pages.k.shape[2]
    for seq in range(case.lens.numel()):
        for key in range(min(count, int(case.lens[seq]))):
            page, offset = int(case.table[seq, key // size]), key % size
            if page < 0:
                continue
            if case.pages.k_scales is None:
                case.pages.k[page, :, offset] = torch.nan
            elif case.pages.k_scales.dim() > 1:
                case.pages.k_scales[page, :, offset] = torch.nan
            else:
                case.pages.k[page, :, offset] = 0x7F


@pytest.mark.parametrize("spoilt", ["a query", pytest.param("32 keys", marks=pytest.mark.slow), "one key"])
@pytest.mark.parametrize(("name", "way"), WAYS)
def test_nan_is_never_lost(isa: str, name: str, tolerance: float, spoilt: str) -> None:
    """One NaN among the scores that a row sees makes all of the row NaN: sampling looks for it."""
    case = CASES[name]()
    if spoilt == "a query":
        case.q[-1, 0, 3] = torch.nan
    else:
        spoil_keys(case, 32 if spoilt == "32 keys" else 1)
    y, wanted = case.run().double(), expected(case)
    assert torch.equal(y.isnan(), wanted.isnan()) and not y.isinf().any()
    torch.testing.assert_close(y, wanted, rtol=0, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("sinks", [False, True])
def test_scores_of_minus_infinity_alone(isa: str, sinks: bool) -> None:
    """Nothing was summed: 0 / 0, or all for the sink."""
    case = make(lens=(70, 300), queries=(2, 1), heads=(2, 1), dim=16, sinks=sinks)
    case.q.fill_(1e30)
    case.pages.k.nan_to_num_().fill_(-1e30)
    y = case.run()
    assert bool((y == 0).all() if sinks else y.isnan().all()), y


@pytest.mark.parametrize(("length", "heads"), [(900, (9, 3)), (1500, (16, 8))])
def test_threads_change_nothing(isa: str, length: int, heads: tuple[int, int]) -> None:
    """Nor how many heads are one thread's at a time: 6, 3 and 2 of the 8."""
    case = make(lens=(length, 300), queries=(1, 200), heads=heads, dim=64, kv="bf16")
    try:
        results = [(build.lib().ll_threads(n), case.run())[1] for n in (1, 2, 3)]
    finally:
        build.lib().ll_threads(build.usable_cores())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_large_scores(isa: str) -> None:
    case = make(lens=(70,), queries=(3,), heads=(2, 1), dim=16)
    case.q.mul_(1e4)
    torch.testing.assert_close(case.run().double(), expected(case), rtol=0, atol=1e-5)


def test_what_it_refuses() -> None:
    case = make(lens=(4,), queries=(4,), heads=(3, 2), dim=16)
    with pytest.raises(ValueError, match="3 heads over 2 KV heads"):
        case.run()
    with pytest.raises(TypeError, match="float32"):
        ops.paged_attention(case.q.double(), case.pages, case.table, case.starts, case.lens, 1.0)
    with pytest.raises(ValueError, match="head_dim 16 over pages of 8"):
        ops.paged_attention(
            torch.randn(4, 2, 16), nan_pages("f32", (2, 2, 16, 8)), case.table, case.starts, case.lens, 1.0
        )
    assert "512" in (ops.attention_fits(OpFacts(head_dim=576)) or "")
    assert "bfloat16" in (ops.attention_fits(OpFacts(dtype="bfloat16")) or "")
    assert "cuda" in (ops.attention_fits(OpFacts(device="cuda")) or "")

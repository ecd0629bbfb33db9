"""Attention in C over pages, against a softmax in float64; a query's result stands alone, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from localllm.kernels.cpu import build, ops


@dataclass(frozen=True)
class Case:
    """Random queries over random pages; what no sequence wrote is NaN."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    starts: Tensor
    lens: Tensor
    window: int | None
    softcap: float | None

    def run(self) -> Tensor:
        return ops.paged_attention(
            self.q,
            self.k,
            self.v,
            self.table,
            self.starts,
            self.lens,
            self.q.shape[2] ** -0.5,
            self.window,
            self.softcap,
        )

    def alone(self, seq: int, index: int) -> Tensor:
        """One query of a sequence as a step of its own."""
        start, end = int(self.starts[seq]), int(self.starts[seq + 1])
        length = int(self.lens[seq]) - (end - start) + index + 1
        one = Case(
            self.q[start + index : start + index + 1],
            self.k,
            self.v,
            self.table[seq : seq + 1].contiguous(),
            torch.tensor([0, 1], dtype=torch.int32),
            torch.tensor([length], dtype=torch.int32),
            self.window,
            self.softcap,
        )
        return one.run()[0]


def make(
    lens: tuple[int, ...],
    queries: tuple[int, ...],
    heads: tuple[int, int],
    dim: int,
    page: int = 16,
    bf16: bool = False,
    window: int | None = None,
    softcap: float | None = None,
) -> Case:
    needed = [-(-length // page) for length in lens]
    num_pages = sum(needed) + 2
    k = torch.full((num_pages, heads[1], page, dim), float("nan"), dtype=torch.bfloat16 if bf16 else torch.float32)
    v = k.clone()
    order = torch.randperm(num_pages)
    table = torch.full((len(lens), max(needed) + 1), -1, dtype=torch.int32)
    for seq, length in enumerate(lens):
        table[seq, : needed[seq]] = order[sum(needed[:seq]) : sum(needed[: seq + 1])]
        positions = torch.arange(length)
        slots = table[seq].long()[positions // page] * page + positions % page
        ops.kv_write(torch.randn(length, heads[1], dim), torch.randn(length, heads[1], dim), k, v, slots)
        if window is not None:
            table[seq, : max(0, length - queries[seq] - window + 1) // page] = -1
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    q = torch.randn(sum(queries), heads[0], dim)
    return Case(q, k, v, table, starts, torch.tensor(lens, dtype=torch.int32), window, softcap)


CASES = {
    "one page, all queries": partial(make, lens=(5,), queries=(5,), heads=(4, 2), dim=16),
    "decode, three segments": partial(make, lens=(700, 1, 33), queries=(1, 1, 2), heads=(9, 3), dim=64, bf16=True),
    "a chunk in the middle": partial(make, lens=(400,), queries=(130,), heads=(9, 3), dim=64),
    "window": partial(make, lens=(350, 40), queries=(350, 3), heads=(4, 1), dim=256, bf16=True, window=100),
    "window over segments": partial(
        make, lens=(1000, 3), queries=(1, 3), heads=(4, 4), dim=8, page=64, bf16=True, window=300
    ),
    "softcap, odd dimension": partial(make, lens=(150,), queries=(149,), heads=(6, 6), dim=80, page=32, softcap=5.0),
    "small pages": partial(make, lens=(90,), queries=(60,), heads=(4, 2), dim=24, page=8, window=7),
    "page boundary": partial(make, lens=(16, 17, 256, 257), queries=(1, 1, 1, 1), heads=(2, 1), dim=32),
    "heads wider than a block of rows": partial(make, lens=(40,), queries=(2,), heads=(40, 1), dim=512, bf16=True),
}


def expected(c: Case) -> Tensor:
    """The definition, in float64."""
    out = torch.empty(c.q.shape, dtype=torch.float64)
    page, group = c.k.shape[2], c.q.shape[1] // c.k.shape[1]
    for seq, length in enumerate(c.lens.tolist()):
        start, end = int(c.starts[seq]), int(c.starts[seq + 1])
        positions = torch.arange(length - (end - start), length)[:, None]
        oldest = 0 if c.window is None else max(0, int(positions[0]) - c.window + 1)
        keys = torch.arange(oldest, length)
        pages = c.table[seq].long()[keys // page]
        k, v = (x[pages, :, keys % page].double().repeat_interleave(group, 1) for x in (c.k, c.v))
        scores = torch.einsum("qhd,khd->hqk", c.q[start:end].double(), k) * c.q.shape[2] ** -0.5
        if c.softcap:
            scores = c.softcap * torch.tanh(scores / c.softcap)
        hidden = (keys > positions) | (keys <= positions - (c.window or length))
        out[start:end] = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
    return out


@pytest.mark.parametrize("name", CASES)
def test_attention(isa: str, name: str) -> None:
    case = CASES[name]()
    y = case.run()
    torch.testing.assert_close(y.double(), expected(case), rtol=0, atol=2e-6)
    for seq, queries in enumerate((case.starts[1:] - case.starts[:-1]).tolist()):
        for index in sorted({0, queries // 3, queries // 2, queries - 1}):
            assert torch.equal(case.alone(seq, index), y[int(case.starts[seq]) + index]), (seq, index)


def test_threads_change_nothing(isa: str) -> None:
    case = make(lens=(900, 300), queries=(1, 200), heads=(9, 3), dim=64, bf16=True)
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
    with pytest.raises(ValueError, match="3 heads over 2"):
        case.run()
    with pytest.raises(TypeError, match="float32"):
        ops.paged_attention(case.q.double(), case.k, case.v, case.table, case.starts, case.lens, 1.0)
    assert "float16" in (ops.attention_fits(ops.OpFacts(kv_dtype="float16")) or "")
    assert "512" in (ops.attention_fits(ops.OpFacts(head_dim=576)) or "")
    assert "bfloat16" in (ops.attention_fits(ops.OpFacts(dtype="bfloat16")) or "")
    assert "cuda" in (ops.attention_fits(ops.OpFacts(device="cuda")) or "")

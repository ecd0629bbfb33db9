"""The plain-PyTorch ops against formulas, and bit for bit against themselves when other rows keep them company."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels import reference
from localllm.kernels.kv_pages import KVPages
from localllm.kernels.rope import BLOCK, RopeTable, inverse_frequencies


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["1-thread", "2-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


ROW_OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: reference.rms_norm(x, torch.linspace(0.5, 2, x.shape[-1]), 1e-6),
    "silu_mul": reference.silu_mul,
    "gelu_tanh_mul": reference.gelu_tanh_mul,
    "softcap": lambda x: torch.tanh(x / 30.0).mul_(30.0),
}


@pytest.mark.parametrize("op", ROW_OPS)
@pytest.mark.parametrize("width", [6, 34, 100, 576, 3072])
def test_a_row_does_not_depend_on_its_neighbours(op: str, width: int, threads: int) -> None:
    x = torch.randn(131, width) * 3
    whole = ROW_OPS[op](x)
    for start, end in [(0, 1), (1, 2), (7, 60), (130, 131), (3, 131)]:
        assert torch.equal(ROW_OPS[op](x[start:end].clone()), whole[start:end])


def test_norm_and_activations_match_torch() -> None:
    x, weight = torch.randn(5, 34), torch.randn(34)
    torch.testing.assert_close(
        reference.rms_norm(x, weight, 1e-5), functional.rms_norm(x, (34,), weight, 1e-5), rtol=1e-5, atol=1e-6
    )
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(reference.silu_mul(x), functional.silu(gate) * up, rtol=1e-5, atol=1e-6)
    gelu = functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(reference.gelu_tanh_mul(x), gelu, rtol=1e-5, atol=1e-6)
    cut, up = functional.silu(gate).clamp(max=0.3), up.clamp(-0.3, 0.3)
    torch.testing.assert_close(reference.silu_mul(x, 0.3), cut * up, rtol=1e-5, atol=1e-6)
    cut = functional.gelu(gate, approximate="tanh").clamp(max=0.3)
    torch.testing.assert_close(reference.gelu_tanh_mul(x, 0.3), cut * up, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("extreme", [-1e4, -100.0, 0.0, 100.0, 1e4])
def test_activations_stay_finite(extreme: float) -> None:
    x = torch.full((1, 8), extreme)
    assert reference.silu_mul(x).isfinite().all() and reference.gelu_tanh_mul(x).isfinite().all()


@pytest.mark.parametrize("dim", [8, 6])
def test_interleaved_rope_is_half_rope_on_permuted_rows(dim: int) -> None:
    x = torch.randn(4, 3, 8)
    table = RopeTable(inverse_frequencies(10000.0, dim))
    cos, sin = table.rows(torch.tensor([0, 5, 2, 900]), 901)
    half = reference.rope(x, cos, sin)
    order = torch.cat([torch.arange(dim).view(2, dim // 2).t().reshape(-1), torch.arange(dim, 8)])
    assert torch.equal(reference.rope(x[..., order].contiguous(), cos, sin, True), half[..., order])
    assert torch.equal(half[..., dim:], x[..., dim:])
    torch.testing.assert_close(half.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(half[0], x[0])


def test_rope_table_rows_do_not_depend_on_growth() -> None:
    inv_freq = inverse_frequencies(500000.0, 18)
    slow, fast = RopeTable(inv_freq, 1.25), RopeTable(inv_freq, 1.25)
    positions = torch.tensor([0, 3, BLOCK - 1, BLOCK, 2 * BLOCK + 7])
    for length in (1, 5, BLOCK + 1):
        slow.rows(torch.tensor([0]), length)
    for ours, theirs in zip(slow.rows(positions, 3 * BLOCK), fast.rows(positions, 2 * BLOCK + 8), strict=True):
        assert torch.equal(ours, theirs)
    angles = positions[:, None].double() * inv_freq.double()
    for one, many in zip(RopeTable(inv_freq, 1.25).upto(BLOCK + 1), fast.rows(positions[3:4], BLOCK + 1), strict=True):
        assert torch.equal(one[positions[3:4]], many)
    torch.testing.assert_close(fast.rows(positions, 1)[0].double(), angles.cos() * 1.25, rtol=0, atol=3e-4)


def test_kv_write_puts_tokens_into_their_slots() -> None:
    pages = KVPages(*(torch.zeros(4, 2, 16, 3, dtype=torch.bfloat16) for _ in range(2)))
    k_cache, v_cache = pages.k, pages.v
    k, v = torch.randn(3, 2, 3), torch.randn(3, 2, 3)
    reference.kv_write(k, v, pages, torch.tensor([5, 63, 16]))
    for token, (page, offset) in enumerate([(0, 5), (3, 15), (1, 0)]):
        assert torch.equal(k_cache[page, :, offset], k[token].bfloat16())
        assert torch.equal(v_cache[page, :, offset], v[token].bfloat16())
    assert k_cache.ne(0).sum() == k.numel()
    reference.kv_write(k[:1], v[:1], pages, torch.tensor([34]))
    assert torch.equal(k_cache[2, :, 2], k[0].bfloat16()) and torch.equal(v_cache[2, :, 2], v[0].bfloat16())


def test_embedding_gathers_and_scales() -> None:
    table = torch.randn(7, 4).bfloat16()
    ids = torch.tensor([6, 0, 6])
    assert torch.equal(reference.embedding(ids, table, 3.0), table[ids].float() * 3.0)
    assert reference.embedding(ids, table, dtype=torch.bfloat16).dtype == torch.bfloat16


class Paged:
    """Random pages of one sequence after another, in shuffled order, and dense attention over the same values."""

    def __init__(self, heads: int, kv_heads: int, dim: int, page_size: int, dtype: torch.dtype, length: int) -> None:
        self.heads, self.length, self.scale = heads, length, dim**-0.5
        num_pages = -(-length // page_size) + 3
        self.k = torch.randn(num_pages, kv_heads, page_size, dim).to(dtype)
        self.v = torch.randn(num_pages, kv_heads, page_size, dim).to(dtype)
        self.table = torch.randperm(num_pages)[: -(-length // page_size)].int()
        self.q = torch.randn(length, heads, dim)

    def run(
        self,
        spans: list[tuple[int, int]],
        window: int | None = None,
        softcap: float | None = None,
        chunked: bool = False,
    ) -> Tensor:
        """Attention of queries [start, end) for every span, each a sequence of its own."""
        bounds = torch.tensor([0] + [end - start for start, end in spans]).cumsum(0).int()
        return reference.paged_attention(
            torch.cat([self.q[start:end] for start, end in spans]),
            KVPages(self.k, self.v),
            self.table.expand(len(spans), -1),
            bounds,
            torch.tensor([end for _, end in spans]).int(),
            self.scale,
            window,
            softcap,
            chunked=chunked,
        )

    def dense(self, window: int | None, softcap: float | None, chunked: bool = False) -> Tensor:
        def flat(cache: Tensor) -> Tensor:
            rows = cache[self.table.long()].float().transpose(1, 2).flatten(0, 1)[: self.length]
            return rows.repeat_interleave(self.heads // cache.shape[1], 1)

        scores = torch.einsum("qhd,khd->hqk", self.q, flat(self.k)) * self.scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(self.length)
        hidden = at > at[:, None]
        if window is not None:
            hidden |= at // window < at[:, None] // window if chunked else at <= at[:, None] - window
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), flat(self.v))


SHAPES = [
    (9, 3, 64, 16),
    (4, 1, 256, 32),
    (4, 4, 20, 64),
    (3, 3, 10, 16),
    (6, 2, 6, 16),
    (6, 2, 36, 16),
    (5, 1, 64, 16),
    (16, 1, 8, 16),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page_size"), SHAPES)
@pytest.mark.parametrize("seen", [(None, None), (100, None), (None, 5.0), (7, 2.0), (50, None, True)])
def test_attention_matches_dense_and_no_chunking_changes_a_bit(
    heads: int, kv_heads: int, dim: int, page_size: int, seen: tuple[Any, ...], threads: int
) -> None:
    length = 200
    paged = Paged(heads, kv_heads, dim, page_size, torch.float32, length)
    whole = paged.run([(0, length)], *seen)
    torch.testing.assert_close(whole, paged.dense(*seen), rtol=1e-5, atol=2e-6)
    spans = [(0, 1), (0, 7), (3, 180), (127, 129), (100, 101), (128, 129), (199, 200)]
    expected = [whole[start:end] for start, end in spans]
    for span, rows in zip(spans, expected, strict=True):
        assert torch.equal(paged.run([span], *seen), rows)
    assert torch.equal(paged.run(spans, *seen), torch.cat(expected))


def test_attention_over_bfloat16_pages(threads: int) -> None:
    paged = Paged(9, 3, 64, 16, torch.bfloat16, 200)
    whole = paged.run([(0, 200)])
    torch.testing.assert_close(whole, paged.dense(None, None), rtol=1e-5, atol=2e-6)
    assert torch.equal(paged.run([(199, 200), (5, 90)]), torch.cat([whole[199:], whole[5:90]]))


def test_attention_cuts_long_chunks_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    paged = Paged(6, 2, 36, 16, torch.float32, 300)
    whole = paged.run([(0, 300)], 50)
    monkeypatch.setattr(reference, "SCORE_LIMIT", 20_000)
    assert torch.equal(paged.run([(0, 300)], 50), whole)


def test_what_others_left_in_pages_does_not_reach_a_sequence() -> None:
    paged = Paged(4, 2, 16, 16, torch.float32, 150)
    clean = paged.run([(20, 150)]), paged.run([(149, 150)], 30)
    owned = set(paged.table.tolist())
    for cache in (paged.k, paged.v):
        cache[[page for page in range(cache.shape[0]) if page not in owned]] = math.nan
        cache[int(paged.table[-1]), :, 150 % 16 :] = math.inf
    # pages that fell out of the window are gone, and page 0 may be anybody's
    windowed = paged.table.clone()
    assert torch.equal(paged.run([(20, 150)]), clean[0])
    for gone in windowed[: (150 - 30) // 16].tolist():
        paged.k[gone], paged.v[gone] = math.nan, math.nan
    windowed[: (150 - 30) // 16] = -1
    paged.table = windowed
    assert torch.equal(paged.run([(149, 150)], 30), clean[1])


def test_attention_refuses_pages_that_do_not_tile() -> None:
    with pytest.raises(ValueError, match="page_size 24"):
        Paged(4, 2, 16, 24, torch.float32, 48).run([(0, 48)])

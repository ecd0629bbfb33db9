"""Sparse attention: chosen blocks as pages of a few tokens, with the kernels and with their reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.kernels import mixers, reference
from localllm.kernels.kv_pages import KVPages
from localllm.kernels.layer_weights import AttentionWeights, IndexWeights, Linear, Norm
from localllm.kernels.token_index import Chosen, sparse_attention
from localllm.kernels.triton import attention, segments
from localllm.kernels.verify.trial import compare

SLOW = pytest.mark.slow
PAGE, DIM, KV_HEADS, GROUP, TOP = 16, 64, 2, 6, 30
LONG, SHORT = 200, 21  # tokens of the sequences
TOLERANCE = {"bf16": 2e-2, "int8": 2e-3, "fp8": 2e-3}


def weights_of(ratio: int, gated: bool) -> AttentionWeights:
    norm, linear = Norm(torch.ones(8), 1e-6), Linear(())
    index = IndexWeights(linear, norm, norm, 1, 8, ratio, TOP, torch.zeros(2, 4))
    sizes = {"num_heads": KV_HEADS * GROUP, "num_kv_heads": KV_HEADS, "head_dim": DIM}
    return AttentionWeights(norm, linear, linear, **sizes, scale=DIM**-0.5, gate=gated, index=index)


def pages_of(kv_format: str, count: int, per_layer: bool) -> KVPages:
    pages = KVPages.empty(kv_format, count, KV_HEADS, PAGE, DIM)
    if per_layer:
        pages = pages._replace(k_scales=torch.tensor([0.011]), v_scales=torch.tensor([0.007]))
    k, v = (torch.randn(count * PAGE, KV_HEADS, DIM) * 1.5 for _ in range(2))
    reference.kv_write(k, v, pages, torch.arange(count * PAGE))
    return pages


def chosen_of(tokens: int, table: Tensor, ratio: int) -> Chosen:
    """Random blocks for the last `tokens` tokens of a sequence, and those that no whole block holds."""
    per_page = PAGE // ratio
    blocks = torch.full((tokens, TOP + 1), -1)
    lens = torch.empty(tokens, dtype=torch.int64)
    for row, seen in enumerate(range(LONG - tokens + 1, LONG + 1)):
        picked = torch.randperm(seen // ratio)[:TOP].sort().values
        rest = [seen // ratio] if seen % ratio else []
        blocks[row, : len(picked) + len(rest)] = torch.tensor([*picked.tolist(), *rest])
        lens[row] = len(picked) * ratio + seen % ratio
    at = (table[blocks // per_page] * KV_HEADS).unsqueeze(1) + torch.arange(KV_HEADS).view(1, -1, 1)
    place = torch.where(blocks.unsqueeze(1) < 0, -1, at * per_page + (blocks % per_page).unsqueeze(1))
    return Chosen(
        place.flatten(0, 1).int(), lens.repeat_interleave(KV_HEADS).int(), torch.arange(tokens), torch.arange(1, 2)
    )


def case(
    kv_format: str, per_layer: bool, ratio: int, gated: bool, device: torch.device
) -> tuple[tuple[Any, ...], Chosen]:
    """The arguments of `sparse_attention`: three tokens of a long sequence, and one of a short one."""
    dtype = torch.bfloat16 if kv_format == "bf16" and device.type == "cuda" else torch.float16
    count = -(-LONG // PAGE)
    order = torch.randperm(count + 2)
    table = torch.full((2, count + 3), -1)
    table[0, :count], table[1, :2] = order[:count], order[count:]
    pages = KVPages(*(None if x is None else x.to(device) for x in pages_of(kv_format, count + 2, per_layer)))
    q = torch.randn(4, KV_HEADS * GROUP, DIM * (1 + gated)).to(device, dtype)
    where = table.int(), torch.tensor([0, 3, 4]).int(), torch.tensor([LONG, SHORT]).int()
    chosen = Chosen(*(part.to(device) for part in chosen_of(3, table[0], ratio)))
    return (q, weights_of(ratio, gated), pages, *(part.to(device) for part in where)), chosen


KINDS = [("bf16", False), ("int8", False), ("fp8", False), ("fp8", True)]
QUICK = [("bf16", False, False), ("int8", False, True), ("fp8", True, False)]
MANY = [(*kind, gated) for kind in KINDS for gated in (False, True)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("by_token", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("ratio", [4, *(pytest.param(ratio, marks=SLOW) for ratio in (1, 2, 8, 16))])
@pytest.mark.parametrize(
    ("kv_format", "per_layer", "gated"), [*QUICK, *(pytest.param(*one, marks=SLOW) for one in MANY if one not in QUICK)]
)
def test_queries_see_the_chosen_blocks(
    kv_format: str, per_layer: bool, ratio: int, gated: bool, by_token: bool, device: torch.device
) -> None:
    given, chosen = case(kv_format, per_layer, ratio, gated, device)
    run = partial(attention.paged_attention, by_token=by_token)
    fused = partial(segments.attention, partial(mixers.attention, run))
    wanted = sparse_attention(partial(mixers.attention, reference.paged_attention), *given, chosen)
    tolerance = TOLERANCE[kv_format] if device.type == "cuda" else 2e-3
    for ours in (partial(mixers.attention, run), fused):
        assert compare(sparse_attention(ours, *given, chosen), wanted, tolerance) == ""


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", ["int8", pytest.param("bf16", marks=SLOW)])
def test_the_queries_of_a_prompt_run_in_slices(
    kv_format: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit as together; with int8 and few heads the splits merge themselves."""
    given, chosen = case(kv_format, False, 4, False, device)
    run = partial(mixers.attention, attention.paged_attention)
    whole = sparse_attention(run, *given, chosen)
    counts: list[int] = []
    decode = attention.AttentionStep.decode

    def counted(step: attention.AttentionStep, first: int, count: int, by_token: bool) -> None:
        counts.append(count)
        decode(step, first, count, by_token)

    monkeypatch.setattr(attention.AttentionStep, "decode", counted)
    monkeypatch.setattr(attention, "PART_BYTES", 5 * GROUP * (DIM + 2) * 4)
    assert torch.equal(sparse_attention(run, *given, chosen), whole)
    assert counts == [1, 4, 2]


def test_blocks_of_other_sizes_are_refused(device: torch.device) -> None:
    given, _ = case("bf16", False, 4, False, device)
    pages = KVPages.empty("bf16", 2, 1, 12, DIM)
    q = given[0][:1, :2]
    where = torch.zeros(1, 1).int(), torch.tensor([0, 1]).int(), torch.ones(1).int()
    with pytest.raises(ValueError, match="page_size 12 must be one of"):
        attention.paged_attention(q, pages, *where, 1.0)

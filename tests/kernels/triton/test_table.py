"""A whole decoder from the kernel table of a card against the reference: a prompt, then single tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from localllm.kernels import Impl, OpFacts, Weight
from localllm.kernels.dense_linear import REFERENCE
from localllm.kernels.kv_pages import KVPages
from localllm.kernels.layer_weights import AttentionWeights, Linear, LinearPart, MlpWeights, Norm
from localllm.kernels.registry import OPS, SEGMENTS
from localllm.kernels.segments import KernelTable
from localllm.kernels.table import implementations, kernel_table

pytestmark = pytest.mark.slow
HEADS, KV_HEADS, DIM, HIDDEN, WIDE = 4, 2, 32, 64, 96
FACTS = OpFacts("int8", HEADS, KV_HEADS, DIM, device="cuda", capability=90, dtype="float16", deterministic=False)


def linear(impl: Impl, n: int, k: int, device: torch.device) -> Linear:
    """Random rows; the same for every implementation that asks in the same order."""
    weight = Weight("dense", (n, k), (torch.randn(n, k) * k**-0.5).half().to(device))
    return Linear((LinearPart(impl, impl.prepare(weight), None, (n, k)),))


def layers(impl: Impl, device: torch.device) -> list[tuple[AttentionWeights, MlpWeights, int]]:
    """Two layers, the second with a window and QK-norm."""
    torch.manual_seed(3)
    made = []
    for index in range(2):

        def norm(size: int) -> Norm:
            return Norm((torch.rand(size) + 0.5).to(device), 1e-6)

        attention = AttentionWeights(
            norm(HIDDEN),
            linear(impl, (HEADS + 2 * KV_HEADS) * DIM, HIDDEN, device),
            linear(impl, HIDDEN, HEADS * DIM, device),
            HEADS,
            KV_HEADS,
            DIM,
            DIM**-0.5,
            norm(DIM) if index else None,
            norm(DIM) if index else None,
            window=10 if index else None,
        )
        gate_up, down = linear(impl, 2 * WIDE, HIDDEN, device), linear(impl, HIDDEN, WIDE, device)
        made.append((attention, MlpWeights(norm(HIDDEN), gate_up, down, "silu"), 0))
    return made


def run(table: KernelTable, impl: Impl, device: torch.device) -> Tensor:
    """Hidden states of a prompt of 18 tokens and three more."""
    calls = layers(impl, device)
    pages = [KVPages.empty("int8", 3, KV_HEADS, 16, DIM) for _ in calls]
    pages = [KVPages(*(None if part is None else part.to(device) for part in p)) for p in pages]
    torch.manual_seed(4)
    x, turns = torch.randn(21, HIDDEN).half().to(device), torch.randn(21, DIM // 2).to(device)
    table_row = torch.tensor([[2, 0]], dtype=torch.int32, device=device)
    slots = torch.cat([torch.arange(32, 48), torch.arange(5)]).to(device)
    found = []
    for begin, end in ((0, 18), (18, 19), (19, 20), (20, 21)):
        part = slice(begin, end)
        view = (turns[part].cos(), turns[part].sin(), table_row, slots[part])
        bounds = torch.tensor([0, end - begin], dtype=torch.int32, device=device)
        length = torch.tensor([end], dtype=torch.int32, device=device)
        found.append(table.decoder(x[part].clone(), calls, pages, [view], bounds, length))
        if begin == 0:  # the last layer for rows that are wanted only: few rows take another kernel
            for rows in ([17], [16, 17], []):
                wanted = torch.tensor(rows, dtype=torch.int64, device=device)
                again = table.decoder(x[part].clone(), calls, pages, [view], bounds, length, wanted)
                assert again.shape == (len(rows), HIDDEN)
                torch.testing.assert_close(again, found[0][wanted], rtol=0.05, atol=0.02)
    return torch.cat(found)


def test_the_table_of_a_card_computes_what_the_reference_does(device: torch.device) -> None:
    ours = kernel_table(FACTS)
    assert {dict(ours.ops)[op] for op in OPS} == {"triton"}
    wrong = frozenset(f"{name}:triton" for name, _ in ours.ops)
    others = {f"{op}:triton_{kind}" for op in (*OPS, *SEGMENTS) for kind in ("apart", "invariant")}
    plain_table = kernel_table(FACTS, wrong | others)
    assert set(dict(plain_table.ops).values()) <= {"torch", "chunked"}
    # a segment that failed is followed by one with more kernels
    apart = kernel_table(FACTS, frozenset({"attn_in:triton", "mlp:triton"}))
    assert [dict(apart.ops)[name] for name in ("attn_in", "mlp", "attn_out")] == ["triton_apart"] * 2 + ["triton"]
    plain = next(impl for impl in implementations("linear") if impl.name == "triton")
    expected = run(plain_table, REFERENCE, device).float()
    for table in (ours, apart):
        found = run(table, plain, device).float()
        assert found.isfinite().all()
        assert float((found - expected).square().mean().sqrt()) < 0.02 * float(expected.std())

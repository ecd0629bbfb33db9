"""Norms, RoPE, activations, KV writes and fused segments in C, against plain PyTorch."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from localllm.kernels import Impl, OpFacts, Weight, reference
from localllm.kernels.cpu import ops
from localllm.kernels.cpu import segments as fused
from localllm.kernels.cpu.linear import IMPLS
from localllm.kernels.embedding import Embedding
from localllm.kernels.kv_pages import KVPages
from localllm.kernels.layer_weights import AttentionWeights, HeadWeights, Linear, LinearPart, MlpWeights, Norm
from localllm.kernels.table import kernel_table

C_INT8, C_INT16, C_FLOAT32 = IMPLS
C_OPS = frozenset(f"{op}:c" for op in ops.IMPLS)
"""without these plain PyTorch is left"""
COS_SIN = (torch.tensor([[0.6, 0.8, 1.0, 0.0]]), torch.tensor([[0.8, 0.6, 0.0, 1.0]]))


def close(y: Tensor, expected: Tensor, atol: float = 3e-6) -> None:
    torch.testing.assert_close(y, expected, rtol=2e-6, atol=atol)


@pytest.mark.parametrize("dim", [1, 7, 16, 64, 577])
def test_rms_norm(isa: str, dim: int) -> None:
    x, weight = torch.randn(3, 5, dim) * 4, torch.randn(dim)
    close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    close(ops.rms_norm(x[:, 1:3], weight.bfloat16(), 1e-6), reference.rms_norm(x[:, 1:3], weight.bfloat16(), 1e-6))
    close(ops.rms_norm(x[0].t().contiguous().t(), weight, 1e-6), reference.rms_norm(x[0], weight, 1e-6))


@pytest.mark.parametrize("limit", [None, 2.5])
@pytest.mark.parametrize("dim", [1, 8, 37, 1536])
def test_activations(isa: str, dim: int, limit: float | None) -> None:
    gate_up = torch.randn(4, 2 * dim) * 8
    gate_up[0, 0], gate_up[1, 0] = 200.0, -200.0
    close(ops.silu_mul(gate_up, limit), reference.silu_mul(gate_up, limit), 1e-5)
    close(ops.gelu_tanh_mul(gate_up, limit), reference.gelu_tanh_mul(gate_up, limit), 1e-5)
    rows = torch.cat([ops.silu_mul(row[None], limit) for row in gate_up])
    assert torch.equal(ops.silu_mul(gate_up, limit), rows)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(isa: str, interleaved: bool) -> None:
    for half, dim in ((1, 2), (4, 8), (20, 48), (32, 64)):
        x, cos, sin = torch.randn(6, 5, dim), torch.randn(6, half), torch.randn(6, half)
        close(ops.rope(x, cos, sin, interleaved), reference.rope(x, cos, sin, interleaved))
        close(ops.rope(x[:, 1:4], cos, sin, interleaved), reference.rope(x[:, 1:4], cos, sin, interleaved))


@pytest.mark.parametrize("dim", [24, 64, 80])
@pytest.mark.parametrize("kv", ["f32", "bf16", "fp16", "int8", "fp8", "fp8 fixed"])
def test_kv_write(isa: str, kv: str, dim: int) -> None:
    qkv = torch.randn(9, 9, dim) * torch.logspace(-12, 3, 9)[:, None, None]
    qkv[0, 3, 0], qkv[1, 4, 1], qkv[2, 5] = float("inf"), float("nan"), 0.0
    k, v = qkv[:, 3:6], qkv[:, 6:]
    slots = torch.tensor([3, 63, 16, 17, 40, 41, 1, 0, 33])
    kv_format, _, fixed = kv.partition(" ")
    results = []
    for write in (ops.kv_write, reference.kv_write):
        pages = KVPages.empty(kv_format, 4, 3, 16, dim)
        if fixed:
            pages = pages._replace(k_scales=torch.tensor([0.37]), v_scales=torch.tensor([0.37]))
        write(k, v, pages, slots)
        results.append(pages)
    for one, other in zip(*results, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    write(k[:1], v[:1], pages, slots[:1])
    for one, other in zip(*results, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def linear(n: int, k: int, impl: Impl, bias: bool = False) -> LinearPart:
    codes, scales = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8), torch.rand(n, k // 32) * 0.05
    prepared = impl.prepare(Weight("int4g", (n, k), codes, scales.half(), group_size=32))
    return LinearPart(impl, prepared, torch.randn(n) if bias else None, (n, k))


def norm(dim: int) -> Norm:
    return Norm(torch.rand(dim) + 0.5, 1e-5)


def attention_weights(kind: str) -> AttentionWeights:
    """Hidden 64, four query heads on two key heads of 8 dimensions."""
    gemma = kind == "post norms"
    impl = C_FLOAT32 if kind == "exact" else C_INT16
    narrow = kind == "narrow values"
    parts = (linear(64 - 4 * narrow, 64, impl, True),)
    parts = tuple(linear(n, 64, impl) for n in (32, 16, 16)) if gemma else parts
    out = linear(64, 32, impl)
    if narrow:  # K has no whole groups
        out = LinearPart(C_FLOAT32, C_FLOAT32.prepare(Weight("dense", (64, 24), torch.randn(64, 24))), None, (64, 24))
    head_norm = norm(8) if gemma else None
    return AttentionWeights(
        norm=replace(norm(64), groups=4 if kind == "plain" else 1),
        qkv=Linear(parts),
        out=Linear((out,)),
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        scale=0.3,
        q_norm=head_norm,
        k_norm=head_norm,
        post_norm=norm(64) if gemma else None,
        window=9 if gemma else None,
        interleaved=kind == "interleaved",
        sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]) if kind == "interleaved" else None,
        value_dim=6 * narrow,
        value_scale=0.7 if narrow else 1.0,
    )


def zeros(count: int, kv: str = "f32") -> KVPages:
    """Pages of two heads of 8 dimensions."""
    return KVPages.empty(kv, count, 2, 16, 8)


@pytest.mark.parametrize(
    ("kind", "kv"),
    [("plain", "f32"), ("interleaved", "int8"), ("post norms", "bf16"), ("exact", "fp8"), ("narrow values", "int8")],
)
def test_fused_segments_are_the_composed_ones(isa: str, kind: str, kv: str) -> None:
    torch.manual_seed(1)
    facts = OpFacts(num_heads=4, num_kv_heads=2, head_dim=8)
    table, plain = kernel_table(facts), kernel_table(facts, C_OPS)
    assert dict(table.ops)["mlp"] == "c" and "mlp" not in dict(plain.ops)
    weights = attention_weights(kind)
    impl = C_FLOAT32 if kind == "exact" else C_INT16
    mlp = MlpWeights(
        replace(norm(64), groups=4 if kind == "plain" else 1),
        Linear((linear(96, 64, impl), linear(96, 64, impl))),
        Linear((linear(64, 96, impl, True),)),
        "gelu_tanh" if kind == "post norms" else "silu",
        weights.post_norm,
        sum_norm=norm(64) if kind in ("plain", "post norms") else None,
    )
    for tokens in (1, 3, 20):
        x = torch.randn(tokens, 64)
        cos, sin = torch.rand(tokens, 4), torch.rand(tokens, 4)
        table_rows = torch.tensor([[1, 0]], dtype=torch.int32)
        where = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
        results = []
        for segments in (table, plain):
            pages = zeros(2, kv)
            slots = (torch.arange(tokens) + 16) % 32
            q = segments.attn_in(x.clone(), weights, cos, sin, pages, slots)
            mixed = segments.attention(q, weights, pages, table_rows, *where)
            results.append(
                (
                    q,
                    pages.k.float(),
                    pages.v.float(),
                    mixed,
                    segments.mlp(segments.attn_out(mixed, x.clone(), weights), mlp),
                )
            )
        for y, other in zip(*results, strict=True):
            close(y, other, 2e-3 if impl is C_INT16 else 1e-4)


@pytest.mark.parametrize("softcap", [None, 8.0])
def test_head(isa: str, softcap: float | None) -> None:
    table, plain = kernel_table(OpFacts()), kernel_table(OpFacts(), C_OPS)
    assert dict(table.ops)["head"] == "c"
    for rows, vocab in ((1, 50), (3, 1100), (20, 4096)):
        weights = HeadWeights(norm(64), Linear((linear(vocab, 64, C_INT16),)), softcap)
        x = torch.randn(rows, 64)
        logits = table.head(x, weights)
        close(logits, plain.head(x, weights), 2e-4)
        assert torch.equal(table.head(x[1:2], weights), logits[1:2])
        close(table.head(x.t().contiguous().t(), weights), logits, 2e-4)  # composed


def test_parts_of_a_product_are_what_each_is_alone(isa: str) -> None:
    codes, order = torch.randint(-127, 128, (40, 96), dtype=torch.int8), torch.randperm(96)
    weights = (
        Weight("int8", (40, 96), codes, torch.rand(40, 3).half(), group_size=32),
        Weight("dense", (33, 96), torch.randn(33, 96).bfloat16(), perm=order),
        Weight("gguf", (64, 96), torch.randint(0, 60, (64, 66), dtype=torch.uint8), block_type="Q5_0"),
    )
    others = [
        LinearPart(impl, impl.prepare(weight), torch.randn(weight.shape[0]), weight.shape)
        for weight, impl in zip(weights, (C_INT16, C_FLOAT32, C_INT16), strict=True)
    ]
    similar = linear(70, 96, C_INT16), linear(24, 96, C_INT16, True)
    table, last = kernel_table(OpFacts()), norm(96)
    for rows, parts in product((1, 2, 7, 30, 150), ((others[0], similar[0], *others[1:]), (*similar, *others[:2]))):
        x = torch.randn(rows, 96)
        alone = [table.head(x, HeadWeights(last, Linear((part,)))) for part in parts]
        assert torch.equal(table.head(x, HeadWeights(last, Linear(parts))), torch.cat(alone, -1))


@pytest.mark.parametrize(("inner", "act"), [(96, "silu"), (64, "gelu_tanh"), (48, "silu")])
def test_segments_are_a_token_at_a_time_or_many(isa: str, inner: int, act: str) -> None:
    """Gate and up of many tokens are one product where their tiles are whole (48 have half a one)."""
    weights, down = attention_weights("plain"), linear(64, -(-inner // 32) * 32, C_INT16)
    if inner == 48:  # K has whole groups
        down = LinearPart(C_FLOAT32, C_FLOAT32.prepare(Weight("dense", (64, 48), torch.randn(64, 48))), None, (64, 48))
    mlp = MlpWeights(norm(64), Linear((linear(2 * inner, 64, C_INT16, True),)), Linear((down,)), act)
    x = torch.randn(40, 64)
    table = kernel_table(OpFacts(num_heads=4, num_kv_heads=2, head_dim=8))
    whole = table.mlp(table.attn_out(torch.ones(40, 32), x.clone(), weights), mlp)
    for row in (0, 7, 39):
        one = table.mlp(table.attn_out(torch.ones(1, 32), x[row : row + 1].clone(), weights), mlp)
        assert torch.equal(one[0], whole[row])


@pytest.mark.parametrize("kv", ["f32", "int8"])
def test_all_layers_in_one_call(isa: str, kv: str) -> None:
    table = kernel_table(OpFacts(num_heads=4, num_kv_heads=2, head_dim=8))
    kinds = ("plain", "post norms", "interleaved", "narrow values")
    layers = tuple(
        (
            attention_weights(kind),
            MlpWeights(norm(64), Linear((linear(192, 64, C_INT16),)), Linear((linear(64, 96, C_INT16),)), "silu"),
            view,
        )
        for kind, view in zip(kinds, (0, 1, 0, 1), strict=True)
    )
    for tokens in (1, 4, 4, 30):  # of two sequences, the second one token longer than its queries
        starts = torch.tensor([0, tokens // 2, tokens], dtype=torch.int32)
        lens = starts[1:] - starts[:-1] + torch.tensor([0, 1], dtype=torch.int32)
        slots = torch.cat([torch.arange(tokens // 2), 33 + torch.arange(tokens - tokens // 2)])
        blocks = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
        views = [
            (torch.rand(tokens, 4), torch.rand(tokens, 4), blocks[order].contiguous(), slots.roll(shift))
            for order, shift in (([0, 1], 0), ([1, 0], 1))
        ]
        x, results = torch.randn(tokens, 64), []
        for whole in (True, False):
            pages = [zeros(4, kv) for _ in layers]
            y = x.clone()
            if whole:
                y = fused.decoder(lambda *_: pytest.fail("composed"), y, layers, pages, views, starts, lens)
            else:
                for (weights, mlp, view), of_layer in zip(layers, pages, strict=True):
                    cos, sin, block_table, where = views[view]
                    q = table.attn_in(y, weights, cos, sin, of_layer, where)
                    mixed = table.attention(q, weights, of_layer, block_table, starts, lens)
                    y = table.mlp(table.attn_out(mixed, y, weights), mlp)
            results.append((y, *(part for of_layer in pages for part in of_layer if part is not None)))
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)
        ends = {tuple(range(tokens)), (tokens - 1,), tuple(sorted({tokens // 2 - 1, tokens - 1} - {-1})), ()}
        ends |= {tuple(range(tokens // 2)), (*range(tokens // 2), tokens - 1)}
        for wanted in map(torch.tensor, ends):  # of each sequence all, the last one, or none
            pages = [zeros(4, kv) for _ in layers]
            rows = wanted.long()
            y = fused.decoder(lambda *_: pytest.fail("composed"), x.clone(), layers, pages, views, starts, lens, rows)
            kept = [part for of_layer in pages for part in of_layer if part is not None]
            for one, other in zip((y, *kept), (results[0][0][rows], *results[0][1:]), strict=True):
                assert torch.equal(one, other)


@pytest.mark.parametrize("softcap", [None, 8.0])
def test_a_step_in_one_call(isa: str, softcap: float | None) -> None:
    facts = OpFacts(num_heads=4, num_kv_heads=2, head_dim=8)
    table, parts = kernel_table(facts), kernel_table(facts, frozenset({"step:c"}))
    mlp = MlpWeights(norm(64), Linear((linear(192, 64, C_INT16),)), Linear((linear(64, 96, C_INT16),)), "silu")
    layers = tuple((attention_weights(kind), mlp, view) for kind, view in (("plain", 0), ("post norms", 1)))
    vocabulary = linear(5000, 64, C_INT16)
    rows = vocabulary.impl.rows(vocabulary.prepared)
    assert rows is not None
    read = Embedding(rows, 3.5, torch.float32, 0, vocabulary.prepared)
    given = Embedding(rows, 3.5, torch.float32, 0)
    head = HeadWeights(norm(64), Linear((vocabulary,)), softcap)
    for count in (1, 5):
        ids, positions = torch.randint(5000, (count,)), torch.randint(16, (count,))
        blocks = torch.arange(2 * count, dtype=torch.int32).view(count, 2)
        views = [(torch.rand(40, 4), torch.rand(40, 4), blocks, torch.arange(count) * 32 + positions) for _ in range(2)]
        where = torch.arange(count + 1, dtype=torch.int32), (positions + 1).int()
        pages = tuple(zeros(2 * count) for _ in layers)
        turned = [(cos[positions], sin[positions], *rest) for cos, sin, *rest in views]
        hidden = table.decoder(rows(ids) * 3.5, layers, pages, turned, *where)
        logits = table.head(hidden, head)
        for embedding in (read, given):
            found = fused.step(
                lambda *_: pytest.fail("composed"), ids, positions, embedding, layers, pages, views, *where, head, True
            )
            assert torch.equal(found[0], hidden) and torch.equal(found[1], logits)
            assert found[2] is not None and found[2].tolist() == logits.argmax(-1).tolist()
        composed = parts.step(ids, positions, read, layers, pages, views, *where, head)
        assert composed[2] is None and torch.equal(composed[1], logits)

    def again(*changed: Tensor, finds_best: bool = True) -> tuple[Tensor, ...]:
        new_ids, table_of, *slots = changed
        step_views = [(cos, sin, table_of, where) for (cos, sin, *_), where in zip(views, slots, strict=True)]
        given = new_ids, positions, read, layers, pages, step_views, *where, head
        found = fused.step(lambda *_: pytest.fail("composed"), *given, finds_best)
        assert (found[2] is not None) == finds_best
        return tuple(part.clone() for part in found if part is not None)

    other = HeadWeights(norm(64), head.linear, None)
    blocks_again, slots = blocks.flip(0).contiguous(), [view[3] for view in views]
    first = again(ids, blocks, *slots)
    for part, kept in zip(again(ids, blocks, *slots), first, strict=True):
        assert torch.equal(part, kept)
    ids.copy_((ids + 7) % 5000)  # other numbers in the same tensors, as decoding has them
    second = again(ids, blocks, *slots)
    assert not torch.equal(second[1], first[1])
    for part, kept in zip(again(ids.clone(), blocks, *slots), second, strict=True):
        assert torch.equal(part, kept)
    moved = again(ids, blocks_again, *slots)
    assert not torch.equal(moved[1], second[1])
    table.head(hidden, other)  # takes the place of what is kept of the head
    gc.collect()
    assert torch.equal(again(ids, blocks_again, *slots, finds_best=False)[1], moved[1])
    for part, kept in zip(again(ids, blocks_again, *slots), moved, strict=True):
        assert torch.equal(part, kept)
    broken = HeadWeights(Norm(torch.full((64,), torch.nan), 1e-5), head.linear, softcap)
    best = table.step(ids, positions, read, layers, pages, views, *where, broken, True)[2]
    assert best is not None and best.tolist() == [-1] * 5
    with pytest.raises(IndexError, match="token id"):
        table.step(ids + 5000, positions, read, layers, pages, views, *where, head)


def test_layers_prepared_by_others_are_composed() -> None:
    class Other:
        name = "other"

        @staticmethod
        def run(x: Tensor, prepared: Tensor, bias: Tensor | None) -> Tensor:
            return x @ prepared.T

    part = LinearPart(Other, torch.randn(64, 64), None, (64, 64))  # type: ignore[arg-type]
    mixed = MlpWeights(norm(64), Linear((linear(128, 64, C_INT16),)), Linear((part,)), "silu")
    foreign = MlpWeights(norm(64), Linear((part,)), Linear((linear(64, 64, C_INT16),)), "silu")
    x = torch.randn(2, 64)
    for weights in (mixed, foreign):
        assert fused.mlp(lambda x, w: ("composed", w), x, weights) == ("composed", weights)  # type: ignore[comparison-overlap]
    pages, views = [zeros(1)], [(*COS_SIN, torch.zeros(1, 1).int(), torch.zeros(1).long())]
    layers = ((attention_weights("plain"), mixed, 0),)
    where = torch.tensor([0, 1]).int(), torch.ones(1).int()
    assert fused.decoder(lambda *given: given, x[:1], layers, pages, views, *where)[1] is layers  # type: ignore[arg-type]
    shared = MlpWeights(norm(64), mixed.gate_up, Linear((linear(64, 64, C_INT16),)), "silu")
    again = MlpWeights(norm(64), mixed.gate_up, shared.down, "silu")
    y = fused.mlp(lambda x, w: pytest.fail("composed"), x.clone(), shared)
    assert not torch.equal(y, fused.mlp(lambda x, w: pytest.fail("composed"), x.clone(), again))


def test_other_types_are_refused() -> None:
    x = torch.randn(2, 1, 8, dtype=torch.float64)
    for call in (
        lambda: ops.rms_norm(x, torch.ones(8), 1e-6),
        lambda: ops.rope(x, *COS_SIN),
        lambda: ops.silu_mul(x),
        lambda: ops.kv_write(x, x, zeros(1), torch.zeros(2, dtype=torch.int64)),
    ):
        with pytest.raises(TypeError, match="float64"):
            call()

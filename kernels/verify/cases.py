"""Self-test cases: arguments of every op in the shapes of one model, including odd sizes, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..kv_codes import decode
from ..kv_pages import CompressedPages, KVPages
from ..layer_weights import Norm
from ..registry import OpFacts

TOKENS = (1, 3, 17)  # rows of row-wise ops: one, a few, and a count that is neither a power of two nor a tile size
# (query_len, seq_len) of the sequences in one attention step: decode and prefill, on both sides of page boundaries
LENGTHS = ((1, 1), (1, 300), (5, 5), (1, 33), (20, 67))
LONG = 1041  # seq_len of a lone decode: long enough for several splits, ending inside a page
WINDOW = 37  # representative of any window size: starts inside a page


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """The sizes of one model that its kernels depend on."""

    hidden: int
    intermediate: int
    facts: OpFacts = field(default_factory=OpFacts)
    rotated: int = 0  # RoPE dimensions per head; 0: all
    interleaved: bool = False
    eps: float = 1e-6
    has_windows: bool = False
    has_sinks: bool = False
    chunked: bool = False  # some layers use chunked attention
    softcap: float | None = None
    scale: float = 0.0  # of q·k; 0: head_dim ** -0.5
    states: tuple[tuple[str, tuple[int, ...]], ...] | None = None  # (op of SIZES, sizes as there); None: use SIZES

    @property
    def key(self) -> str:
        """Key of a verdict: everything it depends on besides the kernel and the device."""
        f = self.facts
        heads = f"{f.num_heads}/{f.num_kv_heads}x{f.head_dim}.{self.rotated}{'i' if self.interleaved else ''}"
        other = "w" * self.has_windows + "k" * self.chunked + "s" * self.has_sinks
        other += f"c{self.softcap:g}" if self.softcap else ""
        key = f"{self.hidden}/{self.intermediate} {heads} p{f.page_size}{other} {f.dtype} {f.kv_format}"
        return key + "".join(f" {op} {'x'.join(map(str, sizes))}" for op, sizes in self.states or ())


Case = tuple[str, tuple[Any, ...]]  # (name, the op's arguments)


def seeded(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator with a fixed seed. Imports a module that generators need and the fast torch import skips."""
    import_module("torch._meta_registrations")
    return torch.Generator(device).manual_seed(seed)


class _Source:
    """Reproducible random tensors on one device."""

    def __init__(self, device: str, dtype: str) -> None:
        self.device = torch.device(device)
        self.dtype: torch.dtype = getattr(torch, dtype)
        self._generator = seeded(20, self.device)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers with a few outliers, like the activations of real models."""
        x = torch.randn(shape, device=self.device, generator=self._generator)
        x.view(-1)[:: max(1, x.numel() // 5 + 1)] *= 8
        return x.to(dtype or self.dtype)

    def ints(self, values: list[Any], dtype: torch.dtype) -> Tensor:
        """Integers on the device."""
        return torch.tensor(values, dtype=dtype, device=self.device)


def op_cases(op: str, shapes: ModelShapes) -> Iterator[Case]:
    """Return representative calls of an op of `registry.OPS` for a model of these shapes."""
    return _CASES[op](shapes, _Source(shapes.facts.device, shapes.facts.dtype))


def _rms_norm(shapes: ModelShapes, source: _Source) -> Iterator[Case]:
    f = shapes.facts
    for count in TOKENS:
        x, weight = source.normal(count, shapes.hidden), source.normal(shapes.hidden, dtype=torch.float32)
        yield (f"{count} x {shapes.hidden}", (x, weight, shapes.eps))
    rows = source.normal(3, f.num_heads + 2 * f.num_kv_heads, f.head_dim)
    weight = source.normal(f.head_dim, dtype=torch.float32)
    yield ("heads, strided", (rows[:, : f.num_heads], weight, shapes.eps))


def _rope(shapes: ModelShapes, source: _Source) -> Iterator[Case]:
    f = shapes.facts
    half = (shapes.rotated or f.head_dim) // 2
    heads = f.num_heads + f.num_kv_heads
    for count in TOKENS:
        x = source.normal(count, f.num_heads + 2 * f.num_kv_heads, f.head_dim)
        angles = source.normal(count, half, dtype=torch.float32) * 3
        cos, sin = angles.cos(), angles.sin()
        yield (f"{count} tokens", (x[:, :heads], cos, sin, shapes.interleaved))


def _gated(shapes: ModelShapes, source: _Source) -> Iterator[Case]:
    for count in TOKENS:
        x = source.normal(count, 2 * shapes.intermediate)
        yield (f"{count} x {shapes.intermediate}", (x,))
        yield (f"{count} x {shapes.intermediate}, clamped", (x, 0.5))


LAYER_SCALES = (0.03, 0.05)  # scales of k and v for checkpoints with per-layer FP8 KV scales


def empty_pages(facts: OpFacts, num_pages: int, *, layer_scales: bool = False, value_dim: int | None = None) -> KVPages:
    """Empty pages in a model's KV format on its device."""
    sizes = num_pages, facts.num_kv_heads, facts.page_size, facts.head_dim, value_dim
    pages = KVPages.empty(facts.kv_format, *sizes)
    if layer_scales:
        k, v = (torch.tensor([scale]) for scale in LAYER_SCALES)
        pages = pages._replace(k_scales=k, v_scales=v)
    return KVPages(*(None if part is None else part.to(facts.device) for part in pages))


def copied(pages: KVPages) -> KVPages:
    """Clone pages."""
    return KVPages(*(None if part is None else part.clone() for part in pages))


def numbers(pages: KVPages | CompressedPages) -> tuple[Tensor, ...]:
    """Dequantized keys and values, float32 [num_pages, num_kv_heads, page_size, head_dim] each; then index keys."""
    if isinstance(pages, CompressedPages):
        return tuple(part for kept in pages for part in numbers(kept) if part.numel())
    index = tuple(part.float() for part in (pages.index_keys, pages.block_keys) if part is not None)
    if pages.k_scales is None or pages.v_scales is None:
        return pages.k.float(), pages.v.float(), *index
    return decode(pages.k, pages.k_scales), decode(pages.v, pages.v_scales), *index


def _kv_write(shapes: ModelShapes, source: _Source) -> Iterator[Case]:
    f = shapes.facts
    empty = empty_pages(f, 4)
    scaled = [empty_pages(f, 4, layer_scales=True)] if f.kv_format == "fp8" else []
    for count in TOKENS:
        kv = source.normal(count, f.num_heads + 2 * f.num_kv_heads, f.head_dim)
        slots = source.ints([(7 * i + 3) % (4 * f.page_size) for i in range(count)], torch.int64)
        k, v = kv[:, f.num_heads : f.num_heads + f.num_kv_heads], kv[:, f.num_heads + f.num_kv_heads :]
        yield (f"{count} tokens", (k, v, empty, slots))
        for pages in scaled:
            yield (f"{count} tokens, checkpoint scales", (k, v, pages, slots))


def filled_pages(facts: OpFacts, num_pages: int, source: _Source, *, layer_scales: bool = False) -> KVPages:
    """Pages with random keys and values, written by the reference."""
    pages = empty_pages(facts, num_pages, layer_scales=layer_scales)
    count = num_pages * facts.page_size
    k, v = (source.normal(count, facts.num_kv_heads, facts.head_dim, dtype=torch.float32) for _ in range(2))
    slots = torch.arange(count, device=facts.device)
    reference.kv_write(k, v, pages, slots)
    return pages


def block_table(lengths: tuple[tuple[int, int], ...], page_size: int) -> tuple[list[list[int]], int]:
    """Return (rows of shuffled page ids padded with -1, number of pages) for sequences of these lengths."""
    needed = [-(-length // page_size) for _, length in lengths]
    total = sum(needed)
    order = [(i * 5 + 2) % total if total % 5 else total - 1 - i for i in range(total)]
    width, rows, start = max(needed), [], 0
    for count in needed:
        rows.append([*order[start : start + count], *[-1] * (width - count)])
        start += count
    return rows, total


def _paged_attention(shapes: ModelShapes, source: _Source) -> Iterator[Case]:
    f = shapes.facts
    scale = shapes.scale or f.head_dim**-0.5
    sinks = (source.normal(f.num_heads, dtype=torch.float32),) if shapes.has_sinks else ()
    for name, lengths in (("mixed", LENGTHS), ("decoding", ((1, LONG), (1, 2), (1, 16)))):
        rows, total = block_table(lengths, f.page_size)
        pages = filled_pages(f, total, source)
        starts = [0]
        for new, _ in lengths:
            starts.append(starts[-1] + new)
        q = source.normal(starts[-1], f.num_heads, f.head_dim)
        metadata = (
            source.ints(rows, torch.int32),
            source.ints(starts, torch.int32),
            source.ints([length for _, length in lengths], torch.int32),
        )
        for window in (None, WINDOW) if shapes.has_windows else (None,):
            seen = "" if window is None else f", window {window}"
            yield (f"{name}{seen}", (q, pages, *metadata, scale, window, shapes.softcap, *sinks))
        if shapes.chunked:
            how = (shapes.softcap, *(sinks or (None,)), True)
            yield (f"{name}, chunks of {WINDOW}", (q, pages, *metadata, scale, WINDOW, *how))
        if f.kv_format == "fp8":
            scaled = filled_pages(f, total, source, layer_scales=True)
            yield (f"{name}, checkpoint scales", (q, scaled, *metadata, scale, None, shapes.softcap, *sinks))
    for *_, ratio, _ in _index_sizes(shapes):
        yield f"blocks of {ratio} tokens", (*_of_blocks(f, ratio, source), scale, None, shapes.softcap)


def _of_blocks(f: OpFacts, ratio: int, source: _Source) -> tuple[Any, ...]:
    """(q, pages, block table, cu_query_lens, seq_lens) of sparse attention: the queries of one KV head are sequences of
    one token, and pages are blocks of `ratio` tokens.
    """
    lengths = tuple((1, count) for count in (3, ratio, 9 * ratio + 1, 130 * ratio))
    rows, total = block_table(lengths, ratio)
    of_head = replace(f, num_heads=f.num_heads // f.num_kv_heads, num_kv_heads=1, page_size=ratio)
    pages = filled_pages(of_head, total, source)
    q = source.normal(len(lengths), of_head.num_heads, f.head_dim)
    starts, counts = range(len(lengths) + 1), [count for _, count in lengths]
    return q, pages, *(source.ints(list(values), torch.int32) for values in (rows, starts, counts))


# sizes of ops that only some layers have. index_scores: heads, dim, tokens of a block; index_pool: the same, where keys
# are pooled and the heads of a query have weights; causal_conv: channels, width;
# delta_rule: key heads, value heads, k_dim, v_dim, tiled, 1 for a decay per key channel; state_space: heads, groups,
# head_dim, state size
SIZES: dict[str, tuple[tuple[int, ...], ...]] = {
    "index_scores": ((4, 128, 4), (3, 20, 8)),
    "index_pool": ((32, 128, 4), (3, 20, 8)),
    "causal_conv": ((70, 4),),
    "delta_rule": (
        *((2, 4, 20, 24, 0, 0), (2, 4, 20, 24, 1, 0), (2, 2, 128, 132, 0, 0)),
        *((2, 4, 20, 24, 0, 1), (2, 2, 128, 132, 0, 1)),
    ),
    "state_space": ((4, 2, 10, 20), (6, 1, 64, 128)),
}


def _sizes(op: str, shapes: ModelShapes) -> Iterator[tuple[int, ...]]:
    """The model's sizes for `op`; empty if it has no such layer."""
    return iter(SIZES[op]) if shapes.states is None else (sizes for name, sizes in shapes.states if name == op)


def _steps(device: str) -> Iterator[tuple[str, int, Tensor, Tensor]]:
    """Yield (name, tokens, slots, cu_query_lens) of a pure decode step and of a step with prompts."""
    for name, lengths in (("one token each", [1, 1, 1]), ("prompts", [5, 1, 70])):
        slots = torch.tensor([4, 1, 2], device=device)
        starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        yield name, sum(lengths), slots, starts


def _index_write(shapes: ModelShapes, source: _Source) -> Iterator[Case]:
    for _, dim, ratio in _sizes("index_scores", shapes):
        norm = Norm(source.normal(dim, dtype=torch.float32), 1e-6)
        for slots, keys, pages in _index_keys(shapes, source, dim, dim, ratio):
            angles = source.normal(len(slots), max(1, dim // 4), dtype=torch.float32)
            back = source.normal(2, angles.shape[1], dtype=torch.float32)
            where = source.ints(slots, torch.int64), angles.cos(), angles.sin(), back
            yield (f"{len(slots)} tokens of {dim}, blocks of {ratio}", (keys, norm, pages, *where))


def _index_pool(shapes: ModelShapes, source: _Source) -> Iterator[Case]:
    for _, dim, ratio in _sizes("index_pool", shapes):
        places = source.normal(ratio, dim, dtype=torch.float32)
        for slots, keys, pages in _index_keys(shapes, source, 2 * dim, dim, ratio):
            given = keys, places, pages, source.ints(slots, torch.int64)
            yield (f"{len(slots)} tokens of {dim}, blocks of {ratio}", given)


def _index_keys(
    shapes: ModelShapes, source: _Source, token: int, block: int, ratio: int
) -> Iterator[tuple[list[int], Tensor, KVPages]]:
    """(slots, keys, pages): tokens that begin, continue and complete blocks, of two sequences; then one token each."""
    page = shapes.facts.page_size
    kept = [source.normal(4, count, dim) for count, dim in ((page, token), (page // ratio, block))]
    kept = [part.float() if source.device.type == "cpu" else part.bfloat16() for part in kept]
    pages = empty_pages(shapes.facts, 1)._replace(index_keys=kept[0], block_keys=kept[1])
    several = [*range(1, page - 1), *range(2 * page + ratio - 1, 3 * page)]
    for slots in (several, [page - 1, 3 * page + 1, page + ratio - 1]):
        yield slots, source.normal(len(slots), token), pages


def _index_scores(shapes: ModelShapes, source: _Source) -> Iterator[Case]:
    for heads, dim, ratio, pooled in _index_sizes(shapes):
        for count, num_keys in ((1, 700), (17, 65)):
            q, keys = source.normal(count, heads, dim), source.normal(num_keys, dim)
            keys = keys.float() if source.device.type == "cpu" else keys.bfloat16()
            given: tuple[Any, ...] = (q, keys)
            if pooled:
                given += (None, source.normal(count, heads, dtype=torch.float32))
            yield (f"{count} x {num_keys}, {heads} x {dim}", given)
        per_page = shapes.facts.page_size // ratio
        keys = keys[: per_page * (65 // per_page)].unflatten(0, (-1, per_page))
        table = source.ints([[2, 0, -1], [1, 2, 0]], torch.int32).clamp(max=keys.shape[0] - 1)
        given = q[:2], keys, table
        given += (source.normal(2, heads, dtype=torch.float32),) if pooled else ()
        yield (f"pages of {per_page}, {heads} x {dim}", given)


def _index_sizes(shapes: ModelShapes) -> Iterator[tuple[int, int, int, bool]]:
    """The sizes of indexes, and whether their keys are pooled."""
    for op in ("index_scores", "index_pool"):
        for heads, dim, ratio in _sizes(op, shapes):
            yield heads, dim, ratio, op == "index_pool"


def _choose_blocks(shapes: ModelShapes, source: _Source) -> Iterator[Case]:
    """More and fewer blocks than are chosen; some scores are equal, others 0, in pooled indexes also negative."""
    for *_, ratio, pooled in _index_sizes(shapes):
        per_page, kv_heads = shapes.facts.page_size // ratio, shapes.facts.num_kv_heads
        columns = -(-9000 // per_page)
        scores = (source.normal(5, columns * per_page, dtype=torch.float32) * 9).round() / 8
        scores[3] = source.normal(columns * per_page, dtype=torch.float32)
        scores = scores if pooled else scores.clamp_(min=0)
        table = source.ints([[(7 * i + 3 * row) % 9973 for i in range(columns)] for row in range(5)], torch.int32)
        lens = source.ints([ratio * n + n % ratio for n in (700, 1, 0, 9000, 21)], torch.int32) + ratio // 2
        lens = lens.clamp(max=9000 * ratio)
        for top in (20, 512):
            yield (f"{top} blocks of {ratio} tokens", (scores, table, lens, ratio, top, per_page, kv_heads))


def _causal_conv(shapes: ModelShapes, source: _Source) -> Iterator[Case]:
    for channels, width in _sizes("causal_conv", shapes):
        for name, count, slots, starts in _steps(shapes.facts.device):
            x, weight = source.normal(count, channels), source.normal(channels, width, dtype=torch.float32)
            state = source.normal(5, channels, width - 1, dtype=torch.float32)
            bias = source.normal(channels, dtype=torch.float32)
            yield (f"{name}, {channels} x {width}", (x, weight, None, state, slots, starts))
            yield (f"{name}, {channels} x {width}, bias, silu", (x, weight, bias, state, slots, starts, True))


def _delta_rule(shapes: ModelShapes, source: _Source) -> Iterator[Case]:
    for k_heads, heads, k_dim, dim, tiled, by_channel in _sizes("delta_rule", shapes):
        for name, count, slots, starts in _steps(shapes.facts.device):
            q, k = (source.normal(count, k_heads, k_dim) for _ in range(2))
            v = source.normal(count, heads, dim)
            decay, beta = (source.normal(count, heads, dtype=torch.float32).abs() for _ in range(2))
            if by_channel:  # some channels forget all within a token, and exp(-sum) overflows; others forget nothing
                strength = torch.linspace(0.0, 9.0, k_dim, device=source.device)
                decay = source.normal(count, heads, k_dim, dtype=torch.float32).abs() * strength
            state = source.normal(5, heads, dim, k_dim, dtype=torch.float32)
            arguments = (q, k, v, -decay, beta.clamp(max=1.0), state, slots, starts, bool(tiled))
            more = ", tiled" * tiled + ", by channel" * by_channel
            yield (f"{name}, {heads}/{k_heads} x {k_dim} x {dim}{more}", arguments)


def _state_space(shapes: ModelShapes, source: _Source) -> Iterator[Case]:
    for heads, groups, dim, size in _sizes("state_space", shapes):
        for name, count, slots, starts in _steps(shapes.facts.device):
            x = source.normal(count, heads, dim)
            b, c = (source.normal(count, groups, size) for _ in range(2))
            steps, decay = (source.normal(*shape, dtype=torch.float32).abs() for shape in ((count, heads), (heads,)))
            state = source.normal(5, heads, dim, size, dtype=torch.float32)
            arguments = (x, b, c, steps, -decay, state, slots, starts)
            yield (f"{name}, {heads}/{groups} x {dim} x {size}", arguments)


_CASES: dict[str, Callable[[ModelShapes, _Source], Iterator[Case]]] = {
    "rms_norm": _rms_norm,
    "rope": _rope,
    "silu_mul": _gated,
    "gelu_tanh_mul": _gated,
    "kv_write": _kv_write,
    "paged_attention": _paged_attention,
    "index_write": _index_write,
    "index_pool": _index_pool,
    "index_scores": _index_scores,
    "choose_blocks": _choose_blocks,
    "causal_conv": _causal_conv,
    "delta_rule": _delta_rule,
    "state_space": _state_space,
}

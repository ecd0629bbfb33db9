"""One kernel against its reference: an op, a product with a real weight, a fused segment on real layers.

Each trial says nothing where both agree, else what is wrong. `selftest` decides what follows from it.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ..dequant import dequantize_rows
from ..embedding import Embedding
from ..experts import tokens_of_tiles
from ..kv_pages import KVPages
from ..layer_weights import (
    AttentionWeights,
    ExpertsWeights,
    HeadWeights,
    LatentWeights,
    LayerCall,
    Linear,
    MixerWeights,
    Stepped,
    View,
    linears_of,
)
from ..registry import Impl, LinearFacts, OpFacts
from ..segments import REFERENCES, KernelTable
from ..weight import Weight
from .cases import ModelShapes, block_table, copied, empty_pages, numbers, op_cases, seeded

# Relative RMS error allowed, by dtype of the activations: several roundings of their mantissa. A wrong kernel is off by
# the size of the numbers themselves. Our CPU products round activations to 16 bits, which leaves 4e-5.
TOLERANCE = {"float32": 5e-4, "bfloat16": 2e-2, "float16": 4e-3}
# The same for what goes through pages: where two results differ in a last bit, some are stored one code apart.
KV_SLACK = {"f32": 0.0, "bf16": 4e-3, "fp16": 1e-3, "int8": 1e-2, "fp8": 2e-2}
# of a layer whose queries are rounded to bfloat16, too: four of gemma3-270m, whose scores are large, are off by 1.7e-2
PAIRS_SLACK = 1e-2
WORST = 30  # one number may be off by so many times the tolerance of the root mean square
# rows of a product: a vector, a few, and as many as a prompt has; on a card one of each class that has its own kernel
LINEAR_TOKENS = {"cpu": (1, 3, 40), "cuda": (1, 2, 3, 4, 5, 16, 23, 50, 70, 300)}
ROWS = 64  # outputs compared of a product; the first and the last are among them
# (new tokens, tokens) of the sequences in the steps that fused segments are tried with: on a card one sequence alone,
# and a step of each class of rows that has its own kernels
A_FEW = ((1, 1), (3, 21))
SEGMENT_STEPS = {"cpu": (A_FEW,), "cuda": (((1, 21),), A_FEW, ((1, 1), (5, 21)), ((1, 1), (11, 21)))}


class _Judging(threading.local):
    """Of one thread."""

    off = False


_judging = _Judging()


@contextmanager
def unjudged() -> Iterator[None]:
    """Within it trials of this thread find nothing and try every case: kernels are recorded and leave no results."""
    _judging.off = True
    try:
        yield
    finally:
        _judging.off = False


def compare(found: Tensor, wanted: Tensor, tolerance: float) -> str:
    """Nothing, or how `found` differs from `wanted`: float tensors of one shape.

    Raises NoVerdict where numbers are not finite, and some of `wanted` do not fit into float32 either.
    """
    if _judging.off:
        return ""
    if found.shape != wanted.shape:
        return f"shape {list(found.shape)} instead of {list(wanted.shape)}"
    if not found.numel():
        return ""
    found, wanted = found.double(), wanted.double()
    wrong = int((~found.isfinite() & wanted.isfinite()).sum())
    if wrong:
        said = f"{wrong} of {found.numel()} numbers are not finite"
        if not wanted.float().isfinite().all():
            raise NoVerdict(f"{said}, nor are some of the reference")
        return said
    size = float(wanted.square().mean().sqrt()) or 1.0
    off = (found - wanted).abs()
    rms, most = float(off.square().mean().sqrt()) / size, float(off.max()) / size
    if rms > tolerance or most > WORST * tolerance:
        return f"off by {rms:.1e} of the numbers' size, at most {most:.1e}; {tolerance:.1e} is allowed"
    return ""


def compare_all(found: Iterable[Tensor], wanted: Iterable[Tensor], tolerance: float) -> str:
    """The first difference of several."""
    return next((said for a, b in zip(found, wanted, strict=True) if (said := compare(a, b, tolerance))), "")


# what a launch that never ran says; the next one may run
REFUSED = (
    "out of memory", "out of resource", "too many resources", "invalid argument", "invalid configuration",
    "invalid device function", "no kernel image", "alloc_failed", "not_supported", "invalid_value",
)  # fmt: skip
TRITON = "Triton Error [CUDA]: "
# what Triton's launcher says after that when a context is lost; it reports refusals of one kernel in the same way
LOST = (
    "an illegal", "unspecified launch", "misaligned", "uncorrectable ECC", "unknown error", "context is destroyed",
    "hardware stack", "invalid program counter", "invalid address space", "the launch timed out", "driver shutting",
    "no CUDA-capable", "device kernel image is invalid", "system not",
)  # fmt: skip


def is_device_lost(error: BaseException) -> bool:
    """Whether a GPU's context is unusable after this failure: every later call would fail, too."""
    text = str(error)
    if any(word in text.lower() for word in REFUSED):
        return False
    said = ("CUDA error", "CUDA driver error", "device-side", *(TRITON + word for word in LOST))
    return any(word in text for word in said)


class NoVerdict(Exception):
    """A kernel cannot be judged here and now: it could not be compiled (no compiler, a folder that is full), or the
    model's own numbers leave the range of float32."""


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in str(error).lower()


def _words(error: Exception) -> str:
    """The line that says most: the first, or the assembler's own below it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    own = next((line for line in lines[1:] if line.startswith("ptxas ") and ":" in line), "")
    return f"{lines[0]} {own}".strip()[:240] if "PTXAS" in lines[0] else lines[0][:160]


def tried(name: str, call: Callable[[], str]) -> str:
    """What a case found, with its name; an exception is a finding, too.

    Unless it leaves the device unusable or is no fault of the kernel: raises what memory that ran out raises, and
    NoVerdict where no compiler could be run or the reference overflows, too.
    """
    try:
        found = call()
    except Exception as error:
        if is_device_lost(error) or _is_out_of_memory(error):
            raise
        said = _words(error)
        if isinstance(error, NoVerdict):
            raise NoVerdict(f"{name}: {said}") from error
        found = f"{type(error).__name__}: {said}"
        if isinstance(error, (OSError, subprocess.SubprocessError)) or "C compiler" in said:
            raise NoVerdict(f"{name}: {found}") from error
    return f"{name}: {found}" if found else ""


def first_error(cases: Iterable[tuple[str, Callable[[], str]]]) -> str:
    """What the first case that fails says; (name, call) each."""
    return next((said for name, call in cases if (said := tried(name, call)) and not _judging.off), "")


def _in_pairs(facts: OpFacts) -> bool:
    """Whether attention rounds queries and weights as keys and values were: a CPU with products of bfloat16."""
    return facts.device == "cpu" and facts.kv_format == "bf16"


RECURRENT = {"causal_conv": 3, "delta_rule": 5, "state_space": 5}  # op -> which argument is the state that it changes


def _own(part: Any, is_state: bool) -> Any:
    """What an op may change is copied."""
    if isinstance(part, KVPages):
        return copied(part)
    return part.clone() if is_state else part


def op_error(op: str, run: Callable[..., Any], shapes: ModelShapes) -> str:
    """Nothing, or what is wrong with `run` as op `op` on these shapes."""
    tolerance = TOLERANCE[shapes.facts.dtype]
    if op == "kv_write" or op == "paged_attention" and _in_pairs(shapes.facts):
        tolerance = max(tolerance, KV_SLACK[shapes.facts.kv_format])

    def differs(arguments: tuple[Any, ...]) -> str:
        with torch.inference_mode():
            kept = RECURRENT.get(op)
            ours, theirs = ([_own(part, at == kept) for at, part in enumerate(arguments)] for _ in range(2))
            found, wanted = run(*ours), REFERENCES[op](*theirs)
            if found is None:
                return compare_all(numbers(ours[2]), numbers(theirs[2]), tolerance)
            if kept is None:
                return compare(found, wanted, tolerance)
            return compare_all((found, ours[kept]), (wanted, theirs[kept]), tolerance)

    return first_error((name, partial(differs, arguments)) for name, arguments in op_cases(op, shapes))


def linear_error(impl: Impl, facts: LinearFacts, weight: Weight, prepared: Any) -> str:
    """Nothing, or what is wrong with what `impl` computes from `prepared`, by some rows of the canonical weight."""
    n, k = facts.shape
    device = torch.device(facts.device)
    tolerance = max(TOLERANCE[facts.dtype], 3 * impl.rounds)
    generator = seeded(21)
    rows = torch.cat([torch.tensor([0, n - 1]), torch.randint(n, (ROWS - 2,), generator=generator)])
    values = dequantize_rows(weight, rows.to(weight.qweight.device)).to(device).double()

    def differs(count: int) -> str:
        with torch.inference_mode():
            x = torch.randn((count, k), generator=generator).to(device, getattr(torch, facts.dtype))
            y = impl.run(x, prepared, None)
            if tuple(y.shape) != (count, n):
                return f"shape {list(y.shape)} instead of {[count, n]}"
            return compare(y[:, rows.to(device)], x.double() @ values.T, tolerance)

    counts = LINEAR_TOKENS.get(device.type, LINEAR_TOKENS["cuda"])
    form = f"{facts.form}{facts.block_type}"
    return first_error((f"{form} {n} x {k}, {count} tokens", partial(differs, count)) for count in counts)


def _products(*linears: Linear) -> str:
    parts = (part for linear in linears for part in linear.parts)
    said = (f"{p.impl.name} {p.shape[0]}x{p.shape[1]}{'+b' * (p.bias is not None)}" for p in parts)
    runs = ((name, len(list(alike))) for name, alike in groupby(said))  # experts are alike
    return ",".join(name if count == 1 else f"{count}*{name}" for name, count in runs)


def layer_kind(attention: MixerWeights | None, mlp: Any, view: int) -> str:
    """What makes a layer another case for a fused segment."""
    assert isinstance(attention, AttentionWeights | LatentWeights)
    norms = "".join("n" if norm else "-" for norm in (attention.q_norm, attention.post_norm, mlp and mlp.post_norm))
    if isinstance(attention, LatentWeights):
        norms += f" latents {attention.kept}"
    else:
        norms += "g" * attention.gate + "k" * attention.k_is_v + "r" * attention.reads_only + f" w{attention.window}"
        norms += "c" * attention.chunked + "l" * attention.late_norms
    norms += "p" * getattr(attention, "parallel", False) + "i" * (mlp is not None and mlp.input is not None)
    products = _products(*linears_of(attention), *linears_of(mlp))
    router = ""
    if isinstance(mlp, ExpertsWeights):
        chosen = (mlp.top_k, mlp.renormalise, mlp.scale, mlp.groups, mlp.group_top_k, mlp.limit)
        added = "+b" * (mlp.choice_bias is not None) + "+s" * (mlp.expert_scales is not None) + "+n" * bool(mlp.apart)
        added += "+i" * mlp.share_inputs
        router = f" {mlp.router_kind}{added} {chosen}"
    return f"{view} {products} {norms} {mlp and mlp.activation}{router}"


def ends_kind(embedding: Embedding, head: HeadWeights) -> str:
    """The same of what lies before and after the layers."""
    return (
        f"{_products(head.linear)} cap {head.softcap} embedding x{embedding.scale} {type(embedding.prepared).__name__}"
    )


@dataclass
class SegmentTrial:
    """Fused segments against those composed of references, on real layers with invented activations."""

    shapes: ModelShapes
    layers: Sequence[LayerCall]
    embedding: Embedding
    head: HeadWeights
    rotations: Callable[[int, Tensor], tuple[Tensor, Tensor]]
    step: tuple[tuple[int, int], ...] = A_FEW
    _filled: dict[tuple[int, int, int], KVPages] = field(default_factory=dict, init=False)

    def error(self, name: str, table: KernelTable) -> str:
        """Nothing, or what is wrong with segment `name` of `table`."""
        steps = self._steps(name, torch.device(self.shapes.facts.device).type)

        def cases() -> Iterator[tuple[str, Callable[[], str]]]:
            for step in steps:
                trial = replace(self, step=step)
                whole = {"head": trial._head, "decoder": trial._decoder, "step": trial._step}
                run = whole.get(name) or partial(trial._one, name)
                count = sum(new for new, _ in step)
                yield f"on the first layers of each kind, {count} tokens", partial(run, getattr(table, name))

        return first_error(cases())

    def _steps(self, name: str, device_type: str) -> tuple[tuple[tuple[int, int], ...], ...]:
        """(new tokens, tokens) of the sequences of each step; on a card experts have prompts for all sizes of tiles."""
        if device_type == "cpu" or name != "experts":
            return SEGMENT_STEPS.get(device_type, SEGMENT_STEPS["cuda"])
        mixtures = {(len(mlp.down), mlp.top_k) for _, mlp, _ in self.layers if isinstance(mlp, ExpertsWeights)}
        counts = {count for mixture in mixtures for count in tokens_of_tiles(*mixture)}
        return (*SEGMENT_STEPS["cuda"], *(((count, count),) for count in sorted(counts)))

    @cached_property
    def _made(self) -> tuple[Tensor, int, list[View], Tensor, Tensor, Tensor]:
        """x, number of pages, views, cu_query_lens, seq_lens, positions of a small step."""
        facts = self.shapes.facts
        device = torch.device(facts.device)
        generator = seeded(22)
        size = facts.page_size
        rows, num_pages = block_table(self.step, size)
        starts, slots = [0], []
        positions: list[int] = []
        for (new, length), pages in zip(self.step, rows, strict=True):
            positions += range(length - new, length)
            slots += [pages[p // size] * size + p % size for p in range(length - new, length)]
            starts.append(starts[-1] + new)
        x = torch.randn((starts[-1], self.shapes.hidden), generator=generator)
        at = torch.tensor(positions, device=device)
        table = torch.tensor(rows, dtype=torch.int32, device=device)
        where = torch.tensor(slots, device=device)
        views = [(*self.rotations(view, at), table, where) for view in range(1 + max(v for *_, v in self.layers))]
        lens = torch.tensor([length for _, length in self.step], dtype=torch.int32, device=device)
        cu = torch.tensor(starts, dtype=torch.int32, device=device)
        return x.to(device, getattr(torch, facts.dtype)), num_pages, views, cu, lens, at

    def _inputs(self) -> tuple[Tensor, list[KVPages], list[View], Tensor, Tensor, Tensor]:
        """The same, x and pages of every layer anew."""
        x, _, *others = self._made
        return x.clone(), [copied(self._pages(mixer)) for mixer, *_ in self.layers], *others

    def _given(self) -> Tensor | None:
        """What tokens have for each layer, where layers take that in."""
        sizes = [mlp.input.gate.out_features for _, mlp, _ in self.layers if mlp and mlp.input]
        if not sizes:
            return None
        x, generator = self._made[0], seeded(24)
        return torch.randn((x.shape[0], len(self.layers), sizes[0]), generator=generator).to(x)

    def _pages(self, mixer: Any) -> KVPages:
        """Pages with random keys and values for the heads of one layer: layers may differ in them."""
        facts, (kv_heads, *dims) = self.shapes.facts, mixer.kept
        if mixer.kept not in self._filled:
            num_pages, generator = self._made[1], seeded(22)
            cache = empty_pages(replace(facts, num_kv_heads=kv_heads, head_dim=dims[0]), num_pages, value_dim=dims[1])
            count = num_pages * facts.page_size
            k, v = (torch.randn((count, kv_heads, dim), generator=generator).to(facts.device) for dim in dims)
            REFERENCES["kv_write"](k, v, cache, torch.arange(count, device=k.device))
            self._filled[mixer.kept] = cache
        return self._filled[mixer.kept]

    @property
    def _tolerance(self) -> float:
        rounds = [
            p.impl.rounds for *kinds, _ in self.layers for w in kinds for linear in linears_of(w) for p in linear.parts
        ]
        facts = self.shapes.facts
        slack = max(KV_SLACK[facts.kv_format], PAIRS_SLACK * _in_pairs(facts))
        return max(2 * TOLERANCE[facts.dtype], slack, *(3 * r for r in rounds))

    @torch.inference_mode()
    def _head(self, run: Callable[..., Tensor]) -> str:
        x, *_ = self._inputs()
        return compare(run(x, self.head), REFERENCES["head"](x, self.head), self._tolerance)

    @torch.inference_mode()
    def _decoder(self, run: Callable[..., Tensor]) -> str:
        allowed = self._tolerance * len(self.layers)  # what one layer rounds goes through the next
        for every in (True, False):  # rows, or the last ones of all sequences but the first
            outputs = []
            for call in (run, REFERENCES["decoder"]):
                x, kept, views, cu, lens, _ = self._inputs()
                wanted = None if every else cu[2:].long() - 1
                found = call(x, self.layers, kept, views, cu, lens, wanted, None, self._given())
                outputs.append((found, *(n for c in kept for n in numbers(c))))
            if said := compare_all(outputs[0], outputs[1], allowed):
                return said
        return ""

    @torch.inference_mode()
    def _step(self, run: Callable[..., Stepped]) -> str:
        *_, lens, at = self._inputs()
        ids = torch.randint(self.head.linear.out_features, at.shape, generator=seeded(23)).to(at)
        whole = torch.arange(int(lens.max()), device=at.device)
        outputs = []
        for call in (run, REFERENCES["step"]):
            _, kept, views, cu, lens, _ = self._inputs()
            turned = [(*self.rotations(number, whole), *rest) for number, (_, _, *rest) in enumerate(views)]
            where = self.layers, kept, turned, cu, lens
            hidden, logits, best = call(ids, at, self.embedding, *where, self.head, True)
            if best is not None and not torch.equal(best, logits.argmax(-1)):
                return f"the largest logits are said to be at {best.tolist()}, they are at {logits.argmax(-1).tolist()}"
            outputs.append((hidden, logits, *(n for c in kept for n in numbers(c))))
        allowed = self._tolerance * (len(self.layers) + 1)
        return compare_all(outputs[0], outputs[1], allowed)

    @torch.inference_mode()
    def _one(self, name: str, run: Callable[..., Tensor]) -> str:
        for attention, mlp, view in self.layers:
            x, _, views, cu, lens, _ = self._inputs()
            cos, sin, table, slots = views[view]
            caches = copied(self._pages(attention)), copied(self._pages(attention))
            feed = "experts" if isinstance(mlp, ExpertsWeights) else "mlp"
            arguments: dict[str, list[tuple[Any, ...]]] = {}
            if mlp is not None:
                arguments[feed] = [(x.clone(), mlp) for _ in caches]
            if isinstance(attention, LatentWeights):
                arguments["latent_attention"] = [(x.clone(), attention, of, views[view], cu, lens) for of in caches]
            elif isinstance(attention, AttentionWeights):
                q = torch.randn((x.shape[0], attention.num_heads, attention.head_dim * (1 + attention.gate))).to(x)
                arguments |= {
                    "attn_in": [(x.clone(), attention, cos, sin, of, slots) for of in caches],
                    "attention": [(q, attention, of, table, cu, lens) for of in caches],
                    "attn_out": [(q[..., : attention.head_dim].flatten(1), x.clone(), attention) for _ in caches],
                }
            if name not in arguments:
                continue
            ours, theirs = arguments[name]
            found, wanted = run(*ours), REFERENCES[name](*theirs)
            results = (found, *numbers(caches[0])), (wanted, *numbers(caches[1]))
            if said := compare_all(*results, self._tolerance):
                return said
        return ""

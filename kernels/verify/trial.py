"""Comparison of one kernel with its reference: an op, a linear layer with a real weight, or a fused segment.

Each trial returns "" if both agree, else a description of the error; `selftest` acts on it.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ..dequant import dequantize_rows
from ..embedding import Embedding
from ..experts import tokens_of_tiles
from ..kv_pages import CompressedPages, KVPages
from ..layer_weights import (
    AttentionWeights,
    CompressedWeights,
    ConvWeights,
    DeltaWeights,
    ExpertsWeights,
    HeadWeights,
    HyperWeights,
    LatentWeights,
    LayerCache,
    LayerCall,
    Linear,
    MambaWeights,
    MixedWeights,
    MixerWeights,
    Stepped,
    View,
    linears_of,
)
from ..registry import Impl, LinearFacts, OpFacts
from ..segments import REFERENCES, STATEFUL, KernelTable
from ..state_slots import PagesAndSlots, StateSlots
from ..weight import Weight
from .cases import ModelShapes, block_table, copied, empty_pages, numbers, op_cases, seeded

# allowed relative RMS error by activation dtype: several roundings of the mantissa. A wrong kernel has a relative error
# near 1. The CPU kernels round activations to 16 bits, an error of 4e-5
TOLERANCE = {"float32": 5e-4, "bfloat16": 2e-2, "float16": 4e-3}
# the same for values that go through KV pages: results that differ in the last bit may be stored one code apart
KV_SLACK = {"f32": 0.0, "bf16": 4e-3, "fp16": 1e-3, "int8": 1e-2, "fp8": 2e-2}
# for layers that also round queries to bfloat16: four layers of gemma3-270m, which has large scores, differ by 1.7e-2
PAIRS_SLACK = 1e-2
WORST = 30  # the largest single error may be this many times the RMS tolerance
# rows of a linear layer's input: one, a few, and a prompt; on a GPU one count per class that has its own kernel
LINEAR_TOKENS = {"cpu": (1, 3, 40), "cuda": (1, 2, 3, 4, 5, 16, 23, 50, 70, 300)}
ROWS = 64  # output features of a linear layer that are compared, including the first and the last
# (query_len, seq_len) of the sequences in the steps used for fused segments: on a GPU one sequence alone, and one step
# per class of rows that has its own kernels
A_FEW = ((1, 1), (3, 21))
SEGMENT_STEPS = {"cpu": (A_FEW,), "cuda": (((1, 21),), A_FEW, ((1, 1), (5, 21)), ((1, 1), (11, 21)))}
FEEDS = ("mlp", "experts")
HYPER = ("hyper_in", "hyper_out")
SEEN = 4  # random tokens behind each state, so that it is about as large as what a step adds to it


class _Judging(threading.local):
    """Per-thread switch of `unjudged`."""

    off = False


_judging = _Judging()


@contextmanager
def unjudged() -> Iterator[None]:
    """Context in which trials of this thread run every case and report no errors: for recording kernel launches."""
    _judging.off = True
    try:
        yield
    finally:
        _judging.off = False


def compare(found: Tensor, wanted: Tensor, tolerance: float) -> str:
    """Return "" if `found` is within tolerance of `wanted`, else how it differs. Both are float tensors.

    Raises NoVerdict if `found` has non-finite values and some of `wanted` overflow float32 as well.
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
        message = f"{wrong} of {found.numel()} values are not finite"
        if not wanted.float().isfinite().all():
            raise NoVerdict(f"{message}, and some of the reference's values overflow float32")
        return message
    size = float(wanted.square().mean().sqrt()) or 1.0
    off = (found - wanted).abs()
    rms, most = float(off.square().mean().sqrt()) / size, float(off.max()) / size
    if rms > tolerance or most > WORST * tolerance:
        return f"relative error {rms:.1e} RMS, {most:.1e} maximum; the RMS tolerance is {tolerance:.1e}"
    return ""


def compare_all(found: Iterable[Tensor], wanted: Iterable[Tensor], tolerance: float) -> str:
    """Compare tensors pairwise; return the first difference or ""."""
    return next((problem for a, b in zip(found, wanted, strict=True) if (problem := compare(a, b, tolerance))), "")


# error texts of launches that never ran; the device stays usable
REFUSED = (
    "out of memory", "out of resource", "too many resources", "invalid argument", "invalid configuration",
    "invalid device function", "no kernel image", "kernel image is invalid",  # code of a newer CUDA than the driver's
    "alloc_failed", "not_supported", "invalid_value",
    # calls that a CUDA graph cannot record
    "is capturing", "during capture", "capturing stream", "capturing blocking", "uncaptured work", "capture sequence",
)  # fmt: skip
TRITON = "Triton Error [CUDA]: "
# error texts of Triton's launcher when the context is lost; it reports rejected launches with the same prefix
LOST = (
    "an illegal", "unspecified launch", "misaligned", "uncorrectable", "unknown error", "context is destroyed",
    "hardware stack", "invalid program counter", "invalid address space", "the launch timed out", "driver shutting",
    "no CUDA-capable", "system not", "operation not supported on global", "CUDA-capable device(s) is/are busy",
)  # fmt: skip
# of all of these, what a faulty kernel can cause; the others come from the hardware, the driver or another process
BY_KERNEL = (
    "illegal", "unspecified launch", "misaligned", "assert", "timed out", "hardware stack", "program counter",
    "address space", "execution_failed",
)  # fmt: skip


def is_device_lost(error: BaseException) -> bool:
    """Whether this error leaves the GPU context unusable, so that every later call fails as well."""
    text = str(error)
    if any(word in text.lower() for word in REFUSED):
        return False
    fatal = ("CUDA error", "CUDA driver error", "device-side", *(TRITON + word for word in LOST))
    return isinstance(error, getattr(torch, "AcceleratorError", ())) or any(word in text for word in fatal)


def is_by_kernel(error: BaseException) -> bool:
    """Whether a faulty kernel can have caused an error for which `is_device_lost` is true."""
    said = (str(error).splitlines() or [""])[0].lower()  # torch's further lines mention device-side assertions
    return any(word in said for word in BY_KERNEL)


class NoVerdict(Exception):
    """A kernel cannot be judged now: it failed to compile (no compiler, full disk), or the model overflows float32."""


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in str(error).lower()


def _message(error: Exception) -> str:
    """The most informative line of an error: the first, plus ptxas's own message if there is one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    own = next((line for line in lines[1:] if line.startswith("ptxas ") and ":" in line), "")
    return f"{lines[0]} {own}".strip()[:240] if "PTXAS" in lines[0] else lines[0][:160]


def tried(name: str, call: Callable[[], str]) -> str:
    """Run a case; return "" or its error, prefixed with its name. Most exceptions count as errors of the kernel.

    Re-raises errors that leave the device unusable and out-of-memory errors; raises NoVerdict if the compiler could not
    run or the reference overflows.
    """
    try:
        found = call()
    except Exception as error:
        if is_device_lost(error) or _is_out_of_memory(error):
            raise
        message = _message(error)
        if isinstance(error, NoVerdict):
            raise NoVerdict(f"{name}: {message}") from error
        found = f"{type(error).__name__}: {message}"
        if isinstance(error, (OSError, subprocess.SubprocessError)) or "C compiler" in message:
            raise NoVerdict(f"{name}: {found}") from error
    return f"{name}: {found}" if found else ""


def first_error(cases: Iterable[tuple[str, Callable[[], str]]]) -> str:
    """Run cases (name, call); return the error of the first that fails, or ""."""
    return next((problem for name, call in cases if (problem := tried(name, call)) and not _judging.off), "")


def _in_pairs(facts: OpFacts) -> bool:
    """Whether attention also rounds queries and softmax weights to bfloat16: on CPUs with bfloat16 dot products."""
    return facts.device == "cpu" and facts.kv_format == "bf16"


RECURRENT = {"causal_conv": 3, "delta_rule": 5, "state_space": 5}  # op -> index of the state argument it modifies
MODIFIED = {"choose_blocks": 0}  # op -> index of an argument that it uses up


def _own(part: Any, is_state: bool) -> Any:
    """Clone arguments that an op may modify."""
    if isinstance(part, KVPages):
        return copied(part)
    return part.clone() if is_state else part


def op_error(op: str, run: Callable[..., Any], shapes: ModelShapes) -> str:
    """Return "" if `run` agrees with the reference of `op` on these shapes, else the error."""
    tolerance = TOLERANCE[shapes.facts.dtype]
    if op == "kv_write" or op == "paged_attention" and _in_pairs(shapes.facts):
        tolerance = max(tolerance, KV_SLACK[shapes.facts.kv_format])

    def differs(arguments: tuple[Any, ...]) -> str:
        with torch.inference_mode():
            kept = RECURRENT.get(op)
            modified = MODIFIED.get(op, kept)
            ours, theirs = ([_own(part, at == modified) for at, part in enumerate(arguments)] for _ in range(2))
            found, wanted = run(*ours), REFERENCES[op](*theirs)
            if found is None:
                return compare_all(numbers(ours[2]), numbers(theirs[2]), tolerance)
            if isinstance(found, tuple):  # a choice is right or wrong
                return compare_all(found, wanted, 0.0)
            if kept is None:
                return compare(found, wanted, tolerance)
            return compare_all((found, ours[kept]), (wanted, theirs[kept]), tolerance)

    return first_error((name, partial(differs, arguments)) for name, arguments in op_cases(op, shapes))


def linear_error(impl: Impl, facts: LinearFacts, weight: Weight, prepared: Any) -> str:
    """Return "" if `impl` with `prepared` agrees with sampled rows of the canonical weight, else the error."""
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
    names = (f"{p.impl.name} {p.shape[0]}x{p.shape[1]}{'+b' * (p.bias is not None)}" for p in parts)
    runs = ((name, len(list(alike))) for name, alike in groupby(names))  # experts repeat the same name
    return ",".join(name if count == 1 else f"{count}*{name}" for name, count in runs)


def layer_kind(mixer: MixerWeights | None, mlp: Any, view: int) -> str:
    """Key of a layer: everything that makes it a separate case for fused segments."""
    norms = [mlp and mlp.post_norm]
    options = ""
    if isinstance(mixer, AttentionWeights | LatentWeights):
        norms = [mixer.q_norm, mixer.post_norm, *norms]
    if isinstance(mixer, AttentionWeights):
        options = "g" * mixer.gate + "k" * mixer.k_is_v + "r" * mixer.reads_only + f" w{mixer.window}"
        options += "c" * mixer.chunked + "l" * mixer.late_norms + "p" * mixer.parallel + "s" * mixer.softplus_gate
        options += "" if mixer.second is None else f" beside mamba {_options(mixer.second)}"
    elif isinstance(mixer, LatentWeights):
        options = f" latents {mixer.kept}{' gated' * mixer.gated}"
    elif isinstance(mixer, CompressedWeights):
        options = f" entries {mixer.ratio}"
    elif mixer is not None:
        options = f" {STATEFUL[type(mixer)]} {_options(mixer)}"
    options += f" input {mlp.input.activation}" if mlp is not None and mlp.input is not None else ""
    marks = "".join("n" if norm else "-" for norm in norms)
    products = _products(*linears_of(mixer), *linears_of(mlp))
    router = ""
    if isinstance(mlp, ExpertsWeights):
        chosen = (mlp.top_k, mlp.renormalise, mlp.scale, mlp.groups, mlp.group_top_k, mlp.limit, mlp.shared_limit)
        added = "+b" * (mlp.choice_bias is not None) + "+s" * (mlp.expert_scales is not None) + "+n" * bool(mlp.apart)
        added += "+i" * mlp.share_inputs + "+t" * (mlp.table is not None)
        router = f" {mlp.router_kind}{added} {chosen}"
    return f"{view} {products} {marks}{options} {mlp and mlp.activation}{router}"


def _options(weights: MixerWeights) -> str:
    """A recurrent mixer without its products: numbers, shapes of tensors, and which optional parts it has."""

    def told(value: Any) -> str:
        if isinstance(value, Tensor):
            return "x".join(map(str, value.shape))
        return str(value) if value is None or isinstance(value, int | float | tuple) else "+"

    return " ".join(told(getattr(weights, field.name)) for field in fields(weights))


def ends_kind(embedding: Embedding, head: HeadWeights) -> str:
    """`layer_kind` for the embedding and the head."""
    return (
        f"{_products(head.linear)} cap {head.softcap} embedding x{embedding.scale} {type(embedding.prepared).__name__}"
    )


@dataclass
class SegmentTrial:
    """Compares fused segments with segments composed of references, on real layers with random activations."""

    shapes: ModelShapes
    layers: Sequence[LayerCall]
    embedding: Embedding
    head: HeadWeights
    rotations: Callable[[int, Tensor], tuple[Tensor, Tensor]]
    step: tuple[tuple[int, int], ...] = A_FEW
    _pages: dict[tuple[int, int, int], KVPages] = field(default_factory=dict, init=False)
    _states: dict[int, StateSlots] = field(default_factory=dict, init=False)  # by id of the weights

    def error(self, name: str, table: KernelTable) -> str:
        """Return "" if segment `name` of `table` agrees with its reference, else the error."""
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
        """(query_len, seq_len) of the sequences of each step; on a GPU, experts get a prompt for every tile size."""
        if name == "compressed_attention":  # the last token of an entry, also of the largest
            most = max((mixer.ratio for mixer, *_ in self.layers if isinstance(mixer, CompressedWeights)), default=0)
            return (*SEGMENT_STEPS.get(device_type, SEGMENT_STEPS["cuda"]), ((1, 2 * most or 1),))
        if device_type == "cpu" or name != "experts":
            return SEGMENT_STEPS.get(device_type, SEGMENT_STEPS["cuda"])
        mixtures = {(len(mlp.down), mlp.top_k) for _, mlp, _ in self.layers if isinstance(mlp, ExpertsWeights)}
        counts = {count for mixture in mixtures for count in tokens_of_tiles(*mixture)}
        return (*SEGMENT_STEPS["cuda"], *(((count, count),) for count in sorted(counts)))

    @cached_property
    def _made(self) -> tuple[Tensor, int, list[View], Tensor, Tensor, Tensor]:
        """(x, number of pages, views, cu_query_lens, seq_lens, positions) of a small step."""
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
        last = max(max(view, getattr(mixer, "entry_view", view)) for mixer, _, view in self.layers)
        views = [(*self.rotations(view, at), table, where) for view in range(1 + last)]
        lens = torch.tensor([length for _, length in self.step], dtype=torch.int32, device=device)
        cu = torch.tensor(starts, dtype=torch.int32, device=device)
        return x.to(device, getattr(torch, facts.dtype)), num_pages, views, cu, lens, at

    def _inputs(self) -> tuple[Tensor, list[LayerCache], list[View], Tensor, Tensor, Tensor]:
        """The step of `_made` with fresh copies of x and of every layer's cache."""
        x, _, *others = self._made
        return x.clone(), [self._cache(mixer) for mixer, *_ in self.layers], *others

    @cached_property
    def _slots(self) -> Tensor | None:
        """State slots of the sequences, in descending order; no token changes the first and the last slot."""
        if not any(type(mixer) in STATEFUL or _second(mixer) is not None for mixer, *_ in self.layers):
            return None
        return torch.arange(len(self.step), 0, -1, device=self.shapes.facts.device)

    def _with_empty(self, cu: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Slots and starts of the sequences; an empty one with the last slot leads, unless each has a single token."""
        slots = self._slots
        if slots is None or all(new == 1 for new, _ in self.step):
            return slots, None if slots is None else cu
        return torch.cat([slots[:1] + 1, slots]), torch.cat([cu[:1], cu])

    def _cache(self, mixer: MixerWeights | None) -> LayerCache:
        """A fresh copy of the cache of one layer, with random contents."""
        if mixer is None:
            return None
        if isinstance(mixer, AttentionWeights | LatentWeights):
            pages, second = copied(self._filled_pages(mixer)), _second(mixer)
            return pages if second is None else PagesAndSlots(pages, _between(self._filled_states(second)))
        if isinstance(mixer, CompressedWeights):
            return self._filled_entries(mixer)
        return _between(self._filled_states(mixer))

    def _filled_states(self, mixer: DeltaWeights | ConvWeights | MambaWeights) -> StateSlots:
        """States as the reference leaves them after SEEN random tokens, in two slots more than sequences."""
        if id(mixer) not in self._states:
            device, generator, num_slots = self.shapes.facts.device, seeded(25), len(self.step) + 2
            (channels, width), state = mixer.conv.shape, None
            if isinstance(mixer, DeltaWeights):
                state = torch.zeros(num_slots, mixer.num_v_heads, mixer.v_dim, mixer.k_dim, device=device)
            elif isinstance(mixer, MambaWeights):
                state = torch.zeros(num_slots, mixer.num_heads, mixer.head_dim, mixer.state_size, device=device)
            kept = StateSlots(torch.zeros(num_slots, channels, width - 1, device=device), state)
            x = torch.randn((SEEN * num_slots, self.shapes.hidden), generator=generator).to(self._made[0])
            starts = torch.arange(0, x.shape[0] + 1, SEEN, dtype=torch.int32, device=device)
            slots = torch.arange(num_slots, device=device)
            REFERENCES[STATEFUL[type(mixer)]](x, mixer, kept, slots, starts)
            if isinstance(mixer, DeltaWeights) and mixer.ngrams is not None:
                channels, width = mixer.ngrams.conv.shape
                conv = torch.randn((num_slots, channels, width - 1), generator=generator).to(device)
                kept = kept._replace(ngrams=StateSlots(conv, None))
            self._states[id(mixer)] = kept
        return self._states[id(mixer)]

    def _per_layer_inputs(self) -> Tensor | None:
        """Random per-layer inputs, n-gram embeddings, or ids that choose experts, if the layers use them."""
        x, generator = self._made[0], seeded(24)
        for _, ffn, _ in self.layers:
            if isinstance(ffn, ExpertsWeights) and ffn.table is not None:
                return torch.randint(len(ffn.table), (x.shape[0],), generator=generator).to(x.device)
        for mixer, *_ in self.layers:
            if isinstance(mixer, DeltaWeights) and mixer.ngrams is not None:
                size = mixer.ngrams.key.parts[0].shape[1]
                return torch.randn((x.shape[0], size), generator=generator).to(x)
        sizes = [mlp.input.gate.out_features for _, mlp, _ in self.layers if mlp and mlp.input]
        if not sizes:
            return None
        return torch.randn((x.shape[0], len(self.layers), sizes[0]), generator=generator).to(x)

    def _filled_entries(self, mixer: CompressedWeights) -> LayerCache:
        """Random pages of the last tokens, of what entries are made of, and of entries."""
        window, size, generator = copied(self._filled_pages(mixer)), self.shapes.facts.page_size, seeded(29)
        if not mixer.pools:
            return window
        widths = [pool.norm.weight.shape[0] for pool in mixer.pools]
        dtype = torch.float32 if window.format == "f32" else torch.bfloat16
        shapes = (
            (size, sum(pool.rows.out_features for pool in mixer.pools)),
            (size // min(mixer.ratio, size), sum(widths)),
        )
        made, entries = (torch.randn((len(window.k), *shape), generator=generator) for shape in shapes)
        made, entries = made.to(window.k.device, dtype), entries.to(window.k.device, dtype)
        own = KVPages(window.k[..., :0], window.v, None, None, made[..., :0], entries)
        return CompressedPages(window._replace(index_keys=made, block_keys=made[:, :1, :0]), own)

    def _filled_pages(self, mixer: AttentionWeights | LatentWeights | CompressedWeights) -> KVPages:
        """Pages with random keys and values for one layer's heads, which may differ between layers."""
        facts, (kv_heads, *dims) = self.shapes.facts, mixer.kept
        if mixer.kept not in self._pages:
            num_pages, generator = self._made[1], seeded(22)
            cache = empty_pages(replace(facts, num_kv_heads=kv_heads, head_dim=dims[0]), num_pages, value_dim=dims[1])
            if not isinstance(mixer, CompressedWeights) and (index := mixer.index) is not None:
                token, block, ratio = index.kept
                rows = (facts.page_size, token), (facts.page_size // ratio, block)
                keys, blocks = (torch.zeros(num_pages, *shape, device=facts.device) for shape in rows)
                cache = cache._replace(index_keys=keys, block_keys=blocks)
            count = num_pages * facts.page_size
            k, v = (torch.randn((count, kv_heads, dim), generator=generator).to(facts.device) for dim in dims)
            REFERENCES["kv_write"](k, v, cache, torch.arange(count, device=k.device))
            self._pages[mixer.kept] = cache
        return self._pages[mixer.kept]

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
        x = self._made[0].clone()
        return compare(run(x, self.head), REFERENCES["head"](x, self.head), self._tolerance)

    @torch.inference_mode()
    def _decoder(self, run: Callable[..., Tensor]) -> str:
        allowed = self._tolerance * len(self.layers)  # rounding errors accumulate over layers
        for every in (True, False):  # return all rows, or only the last row of each sequence but the first
            outputs = []
            for call in (run, REFERENCES["decoder"]):
                x, kept, views, cu, lens, _ = self._inputs()
                wanted = None if every else cu[2:].long() - 1
                slots, starts = (self._slots, None) if every else self._with_empty(cu)
                rest = wanted, slots, self._per_layer_inputs(), starts
                outputs.append(([call(x, self.layers, kept, views, cu, lens, *rest)], kept))
            if problem := _compare_kept(outputs, allowed):
                return problem
        return ""

    @torch.inference_mode()
    def _step(self, run: Callable[..., Stepped]) -> str:
        if any(getattr(mixer, "hyper", None) is not None for mixer, *_ in self.layers):
            return ""  # `Model.step` does not use it
        *_, lens, at = self._made
        ids = torch.randint(self.head.linear.out_features, at.shape, generator=seeded(23)).to(at)
        whole = torch.arange(int(lens.max()), device=at.device)
        outputs = []
        for call in (run, REFERENCES["step"]):
            _, kept, views, cu, lens, _ = self._inputs()
            turned = [(*self.rotations(number, whole), *rest) for number, (_, _, *rest) in enumerate(views)]
            where = self.layers, kept, turned, cu, lens
            hidden, logits, best = call(ids, at, self.embedding, *where, self.head, True, self._slots)
            if best is not None and not torch.equal(best, logits.argmax(-1)):
                return f"argmax of the logits is {logits.argmax(-1).tolist()}, but the kernel returned {best.tolist()}"
            outputs.append(([hidden, logits], kept))
        return _compare_kept(outputs, self._tolerance * (len(self.layers) + 1))

    @torch.inference_mode()
    def _one(self, name: str, run: Callable[..., Tensor]) -> str:
        for layer in self.layers:
            if name in _segments_of(*layer):
                outputs = []
                hashed = name == "experts" and isinstance(layer[1], ExpertsWeights) and layer[1].table is not None
                more = {"ids": self._per_layer_inputs()} if hashed else {}
                for call in (run, REFERENCES[name]):
                    cache = None if name in (*FEEDS, *HYPER, "layer_input") else self._cache(layer[0])
                    found = call(*self._arguments(name, layer, cache), **more)
                    outputs.append((list(found) if isinstance(found, tuple) else [found], [cache]))
                if problem := _compare_kept(outputs, self._tolerance):
                    return problem
        return ""

    def _arguments(self, name: str, layer: LayerCall, cache: LayerCache) -> tuple[Any, ...]:
        """Arguments of a segment of this layer."""
        (mixer, ffn, view), (x, _, views, cu, lens, _) = layer, self._made
        x = x.clone()
        if isinstance(cache, PagesAndSlots):
            if name == "mamba":
                return x, _second(mixer), cache.slots, *self._with_empty(cu)
            cache = cache.pages
        if name in FEEDS:
            return x, ffn
        if name == "layer_input":
            given = self._per_layer_inputs()
            assert ffn is not None and given is not None
            return x, ffn.input, given[:, -1]
        if name in HYPER:
            weights: HyperWeights | MixedWeights = mixer.hyper  # type: ignore[union-attr,assignment]
            wide = torch.randn((x.shape[0], weights.wide), generator=seeded(27)).to(x)
            count = weights.count * (1 + weights.count * isinstance(weights, MixedWeights))
            gains = torch.rand((x.shape[0], count), generator=seeded(28)).to(x.device)
            return (wide, weights) if name == "hyper_in" else (wide, x, gains)
        if name == "latent_attention":
            return x, mixer, cache, views[view], cu, lens
        if isinstance(mixer, CompressedWeights):
            return x, mixer, cache, views[view], views[mixer.entry_view] if mixer.pools else None, cu, lens
        if not isinstance(mixer, AttentionWeights):
            return x, mixer, cache, *self._with_empty(cu)
        cos, sin, table, where = views[view]
        heads = x.shape[0], mixer.num_heads, mixer.head_dim * (1 + mixer.gate)
        q = torch.randn(heads, generator=seeded(26)).to(x)
        return {
            "attn_in": (x, mixer, cos, sin, cache, where),
            "attention": (q, mixer, cache, table, cu, lens),
            "attn_out": (q[..., : mixer.values].flatten(1), x, mixer),
        }[name]


def _second(mixer: MixerWeights | None) -> MambaWeights | None:
    """The second mixer of a layer."""
    return mixer.second if isinstance(mixer, AttentionWeights) else None


def _between(states: StateSlots) -> StateSlots:
    """A copy in which, as in the model, a slot of another layer lies between two slots."""

    def spread(part: Tensor | None) -> Any:
        return None if part is None else torch.stack((part, part), 1)[:, 1]

    own = None if states.ngrams is None else _between(states.ngrams)
    return StateSlots(spread(states.conv), spread(states.state), own)


def _parts(states: StateSlots) -> list[Tensor]:
    """The tensors of a layer's states."""
    own = [] if states.ngrams is None else _parts(states.ngrams)
    return [part for part in (states.conv, states.state) if part is not None] + own


def _segments_of(mixer: MixerWeights | None, ffn: Any, _view: int) -> tuple[str, ...]:
    """The segments of a layer that are tried one by one."""
    feed: tuple[str, ...] = () if ffn is None else (FEEDS[isinstance(ffn, ExpertsWeights)],)
    if ffn is not None and ffn.input is not None and getattr(mixer, "streams", None) is None:
        feed += ("layer_input",)
    feed += HYPER if getattr(mixer, "hyper", None) is not None else ()
    if isinstance(mixer, AttentionWeights):
        return "attn_in", *["mamba"] * (mixer.second is not None), "attention", "attn_out", *feed
    if mixer is None:
        return feed
    if isinstance(mixer, CompressedWeights):
        return "compressed_attention", *feed
    return "latent_attention" if isinstance(mixer, LatentWeights) else STATEFUL[type(mixer)], *feed


def _compare_kept(results: Sequence[tuple[list[Tensor], Sequence[LayerCache]]], tolerance: float) -> str:
    """Compare the outputs of a segment with its reference's, and the caches that both may have modified.

    The first and the last state slot must be unchanged.
    """
    near, exact = [], []
    for outputs, caches in results:
        caches = [part for one in caches for part in (one if isinstance(one, PagesAndSlots) else (one,))]
        pages = [part for cache in caches if isinstance(cache, KVPages | CompressedPages) for part in numbers(cache)]
        states = [part for cache in caches if isinstance(cache, StateSlots) for part in _parts(cache)]
        near.append([*outputs, *pages, *(part[1:-1] for part in states)])
        exact.append([part[:: part.shape[0] - 1] for part in states])
    problem = compare_all(near[0], near[1], tolerance)
    return problem or (compare_all(exact[0], exact[1], 0.0) and "it changed the state of another sequence")

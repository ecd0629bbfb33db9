"""Model facts + machine facts + wishes -> what runs where, with every byte counted and a reason for every choice.

Pure: no file, no torch, no measurement. `llm` builds exactly what the plan says; `localllm plan` prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

from localllm.errors import ConfigError, LocalLLMError
from localllm.plan.memory import (
    DENSE_FORMATS,
    MIB,
    TARGET_BYTES,
    PageGroup,
    graph_buckets,
    page_groups,
    weights_in_use,
    work_terms,
)
from localllm.plan.placement import chosen_device, idle_card, room_of
from localllm.plan.plan import MIN_CTX, Plan
from localllm.terminal import GIB, gib

if TYPE_CHECKING:
    from localllm.device import GpuFacts, MachineFacts
    from localllm.models.architectures.facts import ModelFacts

__all__ = [
    "GIB",
    "MIB",
    "Calibration",
    "PageGroup",
    "Plan",
    "PlanOptions",
    "bytes_s_of",
    "page_groups",
    "plan",
    "runs_here",
    "weights_in_use",
]

CPU_CTX = 8192
"""The CPU's context when none is asked for: reading a longer prompt takes minutes there."""
USEFUL_CTX = 4096
"""A model whose weights leave less room than this is quantised while loading, if it is not yet."""
FULL_CTX = 32768
"""A GPU's key/value cache stays in 16 bits while it holds so many tokens, or all the model can; then 8 bits."""
PREFILL = {"cpu": (512,), "cuda": (2048, 1024, 512)}
"""prompt tokens per step, the first that leaves room"""
ETA = {"cpu": 0.7, "cuda": 0.75}
"""share of the memory bandwidth that decoding reaches: gemma3-270m 0.78 on two EPYC cores that read 27 GB/s"""
LAYER_S = {"cpu": 30e-6, "cuda": 40e-6}
"""time per layer and token that no bandwidth explains: calls, norms, small products"""
KV_TYPES = ("bf16", "fp16", "f32", "int8", "fp8")
KV_COST = {
    "bf16": "half the bytes of float32, mean KL below 0.0001",
    "int8": "a scale per token and head, keys rotated: mean KL 0.0004 to 0.002, p99 below 0.02 (two small models)",
    "fp8": "E4M3, a scale per token and head: mean KL 0.009 to 0.013, p99 about 0.1 (two small models)",
}
"""KV format -> what it costs in quality, against float32"""
DTYPES = ("float32", "bfloat16", "float16")
ON_LOAD_COST = {
    "fp8": "weights off by 2.7 % (E4M3, a scale per row)",
    "int8": "weights off by 1 % (a scale per row)",
    "int4": "weights off by 8 to 9 % (groups of 64 with zero points)",
}
"""what plain weights become while loading when they do not fit -> what it costs; best quality first"""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the user asked for; auto and None leave it to the plan."""

    device: str = "auto"
    dtype: str = "auto"
    kv: str = "auto"
    ctx: int | Literal["auto"] | str = "auto"
    max_parallel: int = 4
    page_size: int = 16
    prefill_budget: int | None = None
    prefix_cache: bool = True
    gpu_mem: float = 0.92
    quant: str = "auto"
    """what linear layers become while loading: auto, or a target of `quant.encode`"""
    kv_measured: Mapping[str, float] = field(default_factory=dict)
    """KV format -> mean KL that the quality meter measured for this model"""
    learned_bytes: int = 0
    """what an earlier proof of this model here took beyond its plan"""


class Calibration(Protocol):
    """What benches on this machine have shown (`calibrate.py`)."""

    def bytes_s(self, facts: ModelFacts, device: str) -> float | None:
        """Weights read per second while decoding a model stored like this; `device` is cpu or a GPU's name."""
        ...

    def tps(self, facts: ModelFacts, device: str) -> float | None:
        """Tokens per second of this very model there, at the start of its context. None: not measured."""
        ...


def plan(
    facts: ModelFacts,
    machine: MachineFacts,
    options: PlanOptions | None = None,
    calibration: Calibration | None = None,
) -> Plan:
    """The best plan for these facts; `fits` says whether it can be started.

    calibration   measured speeds of this machine; without it they are estimates

    Raises ConfigError for options that cannot be, DeviceError when the device asked for is not there.
    """
    options = options or PlanOptions()
    _check(facts, options)
    device, gpu, reasons = chosen_device(machine, options.device)
    made = _on(facts, machine, options, device, gpu, reasons, calibration)
    if gpu is not None and not made.fits and options.device == "auto":
        why = f"CPU: {gib(made.need_bytes, 1)} are needed, {gpu.name} has {gib(made.have_bytes, 1)} free"
        on_cpu = _on(facts, machine, options, "cpu", None, (why,), calibration)
        if on_cpu.fits:
            return on_cpu
    return made


def runs_here(facts: ModelFacts | None, machine: MachineFacts) -> tuple[bool, float]:
    """Whether a model fits this machine, and at how many tokens per second; (False, 0) for one that cannot run."""
    if facts is None:
        return False, 0.0
    try:
        made = plan(facts, machine)
    except LocalLLMError:
        return False, 0.0
    return made.fits, made.decode_tps


def _check(facts: ModelFacts, options: PlanOptions) -> None:
    if options.kv not in ("auto", *KV_TYPES):
        raise ConfigError(f"kv {options.kv} is none of auto, {', '.join(KV_TYPES)}", "use --kv auto")
    if options.quant not in ("auto", "", *TARGET_BYTES):
        raise ConfigError(f"quant {options.quant} is none of auto, {', '.join(TARGET_BYTES)}", "use --quant auto")
    if options.dtype not in ("auto", *DTYPES):
        raise ConfigError(f"dtype {options.dtype} is none of auto, {', '.join(DTYPES)}", "use --dtype auto")
    if options.max_parallel < 1:
        raise ConfigError(f"max_parallel is {options.max_parallel}, it must be at least 1", "use --parallel 1")
    if options.prefill_budget is not None and options.prefill_budget < 1:
        raise ConfigError(f"prefill_budget is {options.prefill_budget}, it must be at least 1", "leave it out")
    if options.ctx != "auto":
        if not isinstance(options.ctx, int) or options.ctx < 1:
            raise ConfigError(f"ctx {options.ctx!r} is neither auto nor a number of tokens", "use --ctx 8192")
        if options.ctx > facts.max_context:
            raise ConfigError(
                f"ctx {options.ctx:,} is more than the model's own context of {facts.max_context:,} tokens",
                f"use --ctx {facts.max_context} or less",
            )


# --- how much ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Choice:
    """What is left to choose on a device, best quality first."""

    quant: str
    kv: str
    budget: int
    enough_ctx: int
    """with room for so many tokens, nothing smaller is tried"""


def _on(
    facts: ModelFacts,
    machine: MachineFacts,
    options: PlanOptions,
    device: str,
    gpu: GpuFacts | None,
    reasons: tuple[str, ...],
    calibration: Calibration | None = None,
) -> Plan:
    """The plan for one device: the best weights, KV format and chunk that leave room for a useful context."""
    most: Plan | None = None
    for choice in _choices(facts, options, gpu):
        made = _with(facts, machine, options, device, gpu, choice, reasons, calibration)
        if made.max_ctx >= choice.enough_ctx:
            return made
        if most is None or made.max_ctx > most.max_ctx:
            most = made
    assert most is not None
    return most


def _choices(facts: ModelFacts, options: PlanOptions, gpu: GpuFacts | None) -> Iterable[_Choice]:
    """Weights, then KV formats, then chunks."""
    budgets = (options.prefill_budget,) if options.prefill_budget else PREFILL["cuda" if gpu else "cpu"]
    formats = _kv_formats(options, gpu)
    for quant in _quants(facts, options, gpu):
        for index, kv in enumerate(formats):
            for budget in budgets:
                if isinstance(options.ctx, int):
                    enough = options.ctx
                else:
                    enough = min(facts.max_context, USEFUL_CTX if index == len(formats) - 1 else FULL_CTX)
                yield _Choice(quant, kv, budget, enough)


def _quants(facts: ModelFacts, options: PlanOptions, gpu: GpuFacts | None) -> tuple[str, ...]:
    """What linear layers become while loading, best first: plain weights may be quantised to fit."""
    if options.quant not in ("auto", ""):
        return (options.quant,)
    if options.quant == "" or facts.stored_format not in DENSE_FORMATS:
        return ("",)
    return ("", "fp8" if gpu is not None and gpu.has_fp8 else "int8", "int4")


def _kv_formats(options: PlanOptions, gpu: GpuFacts | None) -> tuple[str, ...]:
    """KV formats, best first; on a GPU 8 bits come after 16, fp8 unless int8 was measured to be better."""
    if options.kv != "auto":
        return (options.kv,)
    if gpu is None:
        return ("bf16",)
    measured = options.kv_measured
    eight = "int8" if measured.get("int8", 1.0) < measured.get("fp8", 0.0) else "fp8"
    return ("bf16" if gpu.has_bf16 else "fp16", eight)


def _with(
    facts: ModelFacts,
    machine: MachineFacts,
    options: PlanOptions,
    device: str,
    gpu: GpuFacts | None,
    choice: _Choice,
    reasons: tuple[str, ...],
    calibration: Calibration | None,
) -> Plan:
    """The plan for one choice of formats."""
    kind = "cuda" if gpu else "cpu"
    dtype, kv, budget = _dtype(options, gpu), choice.kv, choice.budget
    have, margin = room_of(machine, gpu, options.gpu_mem)
    held, read = weights_in_use(facts, device, dtype, bool(machine.compiler), choice.quant)

    def work(ctx: int) -> dict[str, int]:
        """Bytes of everything but weights and pages."""
        terms = work_terms(
            facts,
            device,
            ctx,
            min(budget, ctx),
            options.max_parallel,
            page_size=options.page_size,
            has_compiler=bool(machine.compiler),
            torch_cuda=bool(machine.torch_cuda),
            unified=gpu is not None and gpu.unified,
        )
        return terms | ({"learned": options.learned_bytes} if options.learned_bytes else {})

    def room(ctx: int) -> int:
        """Bytes left for pages at this context."""
        return have - margin - held - sum(work(ctx).values())

    def one(ctx: int) -> int:
        """Bytes of the pages one sequence takes."""
        return sum(g.page_bytes * g.needed for g in page_groups(facts, kv, ctx, options.page_size, budget))

    most = _largest(lambda ctx: one(ctx) <= room(ctx), facts.max_context)
    ctx, why = _context(facts, options, kind, most)
    groups = page_groups(facts, kv, ctx, options.page_size, budget)
    num_pages = _pages(groups, room(ctx), options, kind)
    terms = work(ctx)
    speed = gpu.bandwidth if gpu else machine.cpu.bandwidth
    place = gpu.name if gpu else "cpu"
    reached = calibration.bytes_s(facts, place) if calibration else None
    eta = reached / speed if reached and speed else ETA[kind]
    measured = calibration.tps(facts, place) if calibration else None
    start, end = (_speed(facts, kind, speed, n, eta) for n in (read, read + one(ctx)))
    made = Plan(
        device=device,
        dtype=dtype,
        kv=kv,
        ctx=ctx,
        page_size=options.page_size,
        num_pages=num_pages,
        max_parallel=options.max_parallel,
        prefill_budget=budget,
        weight_bytes=held,
        kv_bytes=sum(g.page_bytes * count for g, count in zip(groups, num_pages, strict=True)),
        work_bytes=sum(terms.values()),
        margin_bytes=margin,
        have_bytes=have,
        max_ctx=most,
        decode_tps=measured or start,
        decode_tps_full=measured * end / start if measured and start else end,
        basis="measured" if measured else "estimate",
        eta=eta,
        bandwidth=speed,
        read_bytes=read,
        sequence_bytes=one(ctx),
        quant=choice.quant,
        graph_buckets=graph_buckets(options.max_parallel) if gpu else (),
        work_terms=tuple(terms.items()),
        idle=idle_card(machine, device),
        reasons=(*reasons, *_weight_reason(facts, options, choice.quant), why, f"KV {kv}: {_kv_reason(options, kv)}"),
    )
    return replace(made, warnings=tuple(_warnings(facts, machine, made, gpu)))


def _dtype(options: PlanOptions, gpu: GpuFacts | None) -> str:
    if options.dtype != "auto":
        return options.dtype
    return "float32" if gpu is None else "bfloat16" if gpu.has_bf16 else "float16"


def _weight_reason(facts: ModelFacts, options: PlanOptions, quant: str) -> tuple[str, ...]:
    if not quant:
        return ()
    if options.quant == quant:
        return (f"weights {quant}: as asked for",)
    return (f"weights {quant}: {facts.stored_format} does not fit, so they are quantised while loading",)


def _kv_reason(options: PlanOptions, kv: str) -> str:
    if options.kv != "auto":
        return f"as asked for; {KV_COST[kv]}" if kv in KV_COST else "as asked for"
    if kv in ("int8", "fp8"):
        measured = options.kv_measured.get(kv)
        cost = f"mean KL {measured:.4f} measured for this model" if measured is not None else KV_COST[kv]
        return f"16 bits would leave too little context; {cost}"
    return KV_COST["bf16"] if kv == "bf16" else "this card has no bfloat16"


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest context up to `limit` that fits, in steps of 256 tokens (the limit itself counts); 0 when none."""
    if fits(limit):
        return limit
    low, high = 0, limit // 256
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * 256) else (low, middle - 1)
    return low * 256


def _context(facts: ModelFacts, options: PlanOptions, kind: str, most: int) -> tuple[int, str]:
    if isinstance(options.ctx, int):
        return options.ctx, f"context {options.ctx:,}: as asked for"
    own = facts.max_context
    wanted = min(own, CPU_CTX) if kind == "cpu" else own
    if most < min(MIN_CTX, own):
        return min(MIN_CTX, own), f"context {min(MIN_CTX, own):,}: the smallest that is of use"
    if most < wanted:
        return most, f"context {most:,}: the largest that fits; the model's own is {own:,}"
    if wanted < own:
        return wanted, f"context {wanted:,}: the CPU's default; --ctx takes up to {min(most, own):,}"
    return wanted, f"context {wanted:,}: the model's own"


def _pages(groups: tuple[PageGroup, ...], room: int, options: PlanOptions, kind: str) -> tuple[int, ...]:
    """Pages per group: one sequence at full context always, then as many as may run, then finished prompts for reuse.

    On the CPU at most half of what is left is taken (and memory is only touched as pages are written), and finished
    prompts share the pages of sequences that are not at full length.
    """
    room = room // 2 if kind == "cpu" else room
    one = sum(g.page_bytes * g.needed for g in groups)
    wished = options.max_parallel * (2 if options.prefix_cache and kind == "cuda" else 1)
    copies = max(1.0, min(float(wished), room / max(1, one)))
    full = max((g.needed for g in groups), default=0)
    return tuple(min(int(g.needed * copies), int(full * copies)) for g in groups)


def _speed(facts: ModelFacts, kind: str, bandwidth: float, read: int, eta: float) -> float:
    if not bandwidth:
        return 0.0
    return 1 / (read / (eta * bandwidth) + facts.num_layers * LAYER_S[kind])


def bytes_s_of(tps: float, read_bytes: int, num_layers: int, device: str) -> float:
    """The bytes per second that a measured rate means, by the formula of the estimate; 0 when it means none."""
    rest = 1 / tps - num_layers * LAYER_S["cpu" if device == "cpu" else "cuda"] if tps > 0 else 0.0
    return read_bytes / rest if rest > 0 else 0.0


def _warnings(facts: ModelFacts, machine: MachineFacts, made: Plan, gpu: GpuFacts | None) -> Iterable[str]:
    if made.quant and made.quant in ON_LOAD_COST:
        yield f"weights become {made.quant} while loading: {ON_LOAD_COST[made.quant]}"
    if gpu is not None:
        if not machine.compiler:
            yield "no C compiler: Triton's kernels cannot be built and torch's run instead, slower; install gcc"
        held = sum(process.used_bytes for process in gpu.processes)
        if held > gpu.total_bytes // 10:
            names = ", ".join(f"{p.name or 'a process'} ({p.pid})" for p in gpu.processes[:3])
            yield f"{gpu.name} is in use: {names} hold {gib(held, 1)} of it"
    if not made.quant and facts.decoded_bytes > facts.weight_bytes // 2:
        more = f"{gib(facts.weight_bytes + facts.decoded_bytes, 1)} instead of {facts.weight_bytes / GIB:.1f}"
        yield f"{facts.stored_format} is decoded to bfloat16 while loading: {more}; Q2_K and larger stay as they are"
    if gpu is None and made.weight_bytes > 1.5 * (facts.weight_bytes + facts.decoded_bytes) + (
        facts.vocab_size * facts.hidden_size * 4
    ):
        yield "no C compiler: weights are kept as float32, slower and larger; install gcc (`localllm doctor`)"
    if made.device == "cpu" and machine.cpu.isa == "generic":
        yield f"{machine.cpu.name or 'this CPU'} has neither AVX2 nor NEON: expect a few tokens per second"

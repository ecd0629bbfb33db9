"""Model facts + machine facts + wishes -> what runs where, with every byte counted and a reason for every choice.

Pure: no file, no torch, no measurement. `llm` builds exactly what the plan says; `localllm plan` prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from localllm.checkpoint.facts import kv_bytes_per_token
from localllm.errors import ConfigError, DeviceError, DoesNotFit, LocalLLMError

if TYPE_CHECKING:
    from localllm.checkpoint.facts import ModelFacts
    from localllm.device import GpuFacts, MachineFacts

GIB = 1 << 30
MIB = 1 << 20
CPU_CTX = 8192
"""The CPU's context when none is asked for: reading a longer prompt takes minutes there."""
LEAST_CTX = 512
"""A smaller window is no help to anyone: the plan then says that the model does not fit."""
PREFILL = {"cpu": 512, "cuda": 2048}
"""prompt tokens per step"""
BASE_BYTES = {"cpu": 300 * MIB, "cuda": 700 * MIB}
"""Python, torch and what loading holds for a moment; on a GPU the CUDA context and library workspaces"""
ADDRESS_BYTES = GIB
"""what libraries and thread stacks reserve of the address space without touching it: counts under `ulimit -v` only"""
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
INT4_FORMATS = ("Q4_0", "Q4_1", "awq", "gptq", "compressed-tensors")
QUANTISED_EMBEDDING = 34 / 32
"""bytes a value of a Q8_0 table: what quantised files keep the embedding in, at most"""


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


class Calibration(Protocol):
    """What benches on this machine have shown (`calibrate.py`)."""

    def bytes_s(self, facts: ModelFacts, device: str) -> float | None:
        """Weights read per second while decoding a model stored like this; `device` is cpu or a GPU's name."""
        ...

    def tps(self, facts: ModelFacts, device: str) -> float | None:
        """Tokens per second of this very model there, at the start of its context. None: not measured."""
        ...


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Layers that keep the same tokens, in the order of `models.kv_cache.cache_groups`."""

    window: int | None
    page_bytes: int
    needed: int
    """pages one sequence takes at full context"""


@dataclass(frozen=True, slots=True)
class Plan:
    """What runs where. Bytes are whole and add up: need = weights + KV + work + margin."""

    device: str
    """cpu | cuda:N"""
    dtype: str
    kv: str
    ctx: int
    page_size: int
    num_pages: tuple[int, ...]
    """per cache group"""
    max_parallel: int
    prefill_budget: int
    weight_bytes: int
    kv_bytes: int
    work_bytes: int
    margin_bytes: int
    have_bytes: int
    max_ctx: int
    """the largest context that would fit, 0 when not even the smallest does"""
    decode_tps: float
    """expected tokens per second of one sequence at the start of its context"""
    decode_tps_full: float
    """the same at its end"""
    basis: str = "estimate"
    """estimate | measured"""
    eta: float = 0.0
    """share of the memory bandwidth behind the estimate"""
    bandwidth: float = 0.0
    """bytes per second of the device's memory, 0 when not known"""
    read_bytes: int = 0
    """weights read for one token"""
    sequence_bytes: int = 0
    """pages one sequence takes at full context; `kv_bytes` holds those of all that may run or be kept for reuse"""
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def need_bytes(self) -> int:
        """Everything together."""
        return self.weight_bytes + self.kv_bytes + self.work_bytes + self.margin_bytes

    @property
    def least_bytes(self) -> int:
        """The same with pages for a single sequence: below this it does not start."""
        return self.need_bytes - self.kv_bytes + self.sequence_bytes

    @property
    def fits(self) -> bool:
        """Whether it may be started."""
        return self.need_bytes <= self.have_bytes

    @property
    def place(self) -> str:
        """For people: where the memory is."""
        return "this machine" if self.device == "cpu" else f"GPU {self.device.removeprefix('cuda:')}"

    def parts(self) -> dict[str, int]:
        """The terms of `need_bytes`."""
        return {
            "weights": self.weight_bytes,
            "kv": self.kv_bytes,
            "work": self.work_bytes,
            "margin": self.margin_bytes,
        }

    def error(self, name: str) -> DoesNotFit:
        """The refusal, with both numbers and commands that would work."""
        fixes: list[tuple[str, str]] = []
        if LEAST_CTX <= self.max_ctx < self.ctx:
            fixes.append((f"localllm chat {name} --ctx {self.max_ctx}", "fits"))
        if self.kv == "f32":
            fixes.append((f"localllm chat {name} --kv bf16", "halves the cache"))
        if self.device != "cpu":
            fixes.append((f"localllm chat {name} --device cpu", "uses RAM, slower"))
        fixes.append(("localllm plan", "which models fit"))
        sizes = " + ".join(f"{part} {size / GIB:.1f}" for part, size in self.parts().items())
        return DoesNotFit(
            f"{name} needs {self.need_bytes / GIB:.1f} GiB at {self.ctx:,} tokens of context,"
            f" {self.place} has {self.have_bytes / GIB:.1f} GiB free",
            fixes[0][0],
            why=f"{sizes} GiB (plan)",
            fixes=fixes,
            context={
                "need_bytes": self.need_bytes,
                "have_bytes": self.have_bytes,
                "ctx": self.ctx,
                "parts": self.parts(),
            },
        )


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
    device, gpu, reasons = _device(machine, options)
    made = _on(facts, machine, options, device, gpu, reasons, calibration)
    if gpu is not None and not made.fits and options.device == "auto":
        why = f"CPU: {made.need_bytes / GIB:.1f} GiB are needed, {gpu.name} has {made.have_bytes / GIB:.1f} GiB free"
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


# --- where ------------------------------------------------------------------------------------------------------------


def _device(machine: MachineFacts, options: PlanOptions) -> tuple[str, GpuFacts | None, tuple[str, ...]]:
    name = options.device
    if name == "cpu":
        return "cpu", None, ()
    if name == "auto":
        usable = [g for g in machine.gpus if not _unusable(machine, g)]
        if usable:
            best = max(usable, key=lambda g: g.free_bytes)
            return f"cuda:{machine.gpus.index(best)}", best, (f"{best.name}: the GPU with most free memory",)
        if machine.gpus:
            return "cpu", None, (f"CPU: {_unusable(machine, machine.gpus[0])}",)
        return "cpu", None, (f"CPU: {machine.gpu_error}" if machine.gpu_error else "CPU: no NVIDIA GPU here",)
    kind, _, number = name.partition(":")
    if kind != "cuda" or not (number.isdigit() or name == "cuda"):
        raise ConfigError(f"device {name!r} is none of auto, cpu, cuda, cuda:N", "use --device auto")
    index = int(number or 0)
    if index >= len(machine.gpus):
        seen = (
            f"{len(machine.gpus)} GPUs are visible" if machine.gpus else machine.gpu_error or "no NVIDIA GPU is visible"
        )
        raise DeviceError(f"there is no {name} here: {seen}", "use --device cpu; `localllm doctor` tells more")
    gpu = machine.gpus[index]
    if _unusable(machine, gpu):
        raise DeviceError(
            f"{name} cannot be used: {_unusable(machine, gpu)}", "use --device cpu; `localllm doctor` tells more"
        )
    return f"cuda:{index}", gpu, ()


def _unusable(machine: MachineFacts, gpu: GpuFacts) -> str:
    if gpu.capability < 75:
        return f"{gpu.name} has compute capability {gpu.capability / 10:.1f}, 7.5 is needed"
    if not machine.torch_cuda:
        return f"torch {machine.torch_version} was built without CUDA, so {gpu.name} stays unused"
    return ""


# --- how much ---------------------------------------------------------------------------------------------------------


def weights_in_use(facts: ModelFacts, device: str, dtype: str, has_compiler: bool) -> tuple[int, int]:
    """(bytes the loaded weights take, bytes of them that decoding one token reads).

    Our C kernels keep the stored bits, and look rows of a tied embedding up in the head. Without them, and on a GPU in
    this version, quantised weights are multiplied as float32 beside the stored table; int4 goes through torch's
    own product on the CPU.
    """
    table = facts.vocab_size * facts.hidden_size
    per_value = facts.weight_bytes / max(1, facts.num_params)
    table_bytes = int(table * (max(per_value, QUANTISED_EMBEDDING) if per_value < 1.6 else per_value))
    inner = facts.num_params - table * (1 if facts.tied_embeddings else 2)
    if device == "cpu" and has_compiler:
        return facts.weight_bytes, facts.weight_bytes - (0 if facts.tied_embeddings else table_bytes)
    if facts.stored_format == "bf16" and dtype == "bfloat16":
        held = facts.weight_bytes + (table_bytes if facts.tied_embeddings else 0)
    elif device == "cpu" and facts.stored_format.startswith(INT4_FORMATS):
        held = int(inner * 0.75) + table * 4 + table_bytes
    else:
        held = (inner + table) * 4 + table_bytes
    return held, held - table_bytes


def page_groups(facts: ModelFacts, kv: str, ctx: int, page_size: int, prefill_budget: int) -> tuple[PageGroup, ...]:
    """The cache groups, in the order of `models.kv_cache.cache_groups`: full attention first, then the widest window.

    A window group keeps the window, the chunk being computed, and a page for where both start.
    """
    windows = facts.windows or (None,) * facts.num_layers
    groups = []
    for window in sorted(set(windows), key=lambda w: (w is not None, -(w or 0))):
        page_bytes = page_size * kv_bytes_per_token(facts, kv, windows.count(window))
        tokens = ctx if window is None else min(ctx, window + prefill_budget)
        groups.append(PageGroup(window, page_bytes, -(-tokens // page_size) + 1))
    return tuple(groups)


def work_bytes(facts: ModelFacts, device: str, ctx: int, rows: int, max_parallel: int) -> int:
    """The most a step holds beside weights and pages: activations of `rows` tokens, gathered KV, scores, logits."""
    width = 4 if device == "cpu" else 2
    heads = (facts.num_heads + 2 * facts.num_kv_heads) * facts.head_dim
    activations = rows * (6 * facts.hidden_size + 3 * facts.intermediate_size + 3 * heads) * width
    gathered = 2 * ctx * facts.num_kv_heads * facts.head_dim * 4
    logits = 3 * max(max_parallel, 16) * facts.vocab_size * 4
    return BASE_BYTES["cpu" if device == "cpu" else "cuda"] + activations + gathered + 64 * MIB + logits


def _on(
    facts: ModelFacts,
    machine: MachineFacts,
    options: PlanOptions,
    device: str,
    gpu: GpuFacts | None,
    reasons: tuple[str, ...],
    calibration: Calibration | None = None,
) -> Plan:
    """The plan for one device."""
    kind = "cuda" if gpu else "cpu"
    dtype, kv = _types(options, gpu)
    budget = options.prefill_budget or PREFILL[kind]
    have, margin = _have(machine, gpu, options.gpu_mem)
    held, read = weights_in_use(facts, device, dtype, bool(machine.compiler))

    def room(ctx: int) -> int:
        """Bytes left for pages at this context."""
        return have - margin - held - work_bytes(facts, device, ctx, min(budget, ctx), options.max_parallel)

    def one(ctx: int) -> int:
        """Bytes of the pages one sequence takes."""
        return sum(g.page_bytes * g.needed for g in page_groups(facts, kv, ctx, options.page_size, budget))

    most = _largest(lambda ctx: one(ctx) <= room(ctx), facts.max_context)
    ctx, why = _context(facts, options, kind, most)
    groups = page_groups(facts, kv, ctx, options.page_size, budget)
    num_pages = _pages(groups, room(ctx), options, kind)
    kv_bytes = sum(g.page_bytes * count for g, count in zip(groups, num_pages, strict=True))
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
        kv_bytes=kv_bytes,
        work_bytes=work_bytes(facts, device, ctx, min(budget, ctx), options.max_parallel),
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
        reasons=(*reasons, why, f"KV {kv}: {_kv_reason(options, kv)}"),
    )
    return replace(made, warnings=tuple(_warnings(facts, machine, made, held)))


def _types(options: PlanOptions, gpu: GpuFacts | None) -> tuple[str, str]:
    if gpu is None:
        dtype, kv = "float32", "bf16"
    else:
        dtype, kv = ("bfloat16", "bf16") if gpu.has_bf16 else ("float16", "fp16")
    return (dtype if options.dtype == "auto" else options.dtype, kv if options.kv == "auto" else options.kv)


def _kv_reason(options: PlanOptions, kv: str) -> str:
    if options.kv != "auto":
        return f"as asked for; {KV_COST[kv]}" if kv in KV_COST else "as asked for"
    return KV_COST["bf16"] if kv == "bf16" else "this card has no bfloat16"


def _have(machine: MachineFacts, gpu: GpuFacts | None, share: float) -> tuple[int, int]:
    """(bytes that may be taken, bytes of them kept free for others)."""
    if gpu is None:
        reserved = ADDRESS_BYTES if machine.ram_limit == "ulimit" else 0
        return max(0, machine.ram_available_bytes - reserved), min(GIB, machine.ram_total_bytes // 20)
    ours = min(gpu.free_bytes, int(gpu.total_bytes * share))
    return ours, min(GIB // 2, gpu.total_bytes // 40)


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
    if most < min(LEAST_CTX, own):
        return min(LEAST_CTX, own), f"context {min(LEAST_CTX, own):,}: the smallest that is of use"
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


def _warnings(facts: ModelFacts, machine: MachineFacts, made: Plan, held: int) -> Iterable[str]:
    if held > 1.5 * facts.weight_bytes + facts.vocab_size * facts.hidden_size * 4:
        if made.device == "cpu":
            yield "no C compiler: weights are kept as float32, slower and larger; install gcc (`localllm doctor`)"
        else:
            yield "quantised weights run as float32 on a GPU in this version: --device cpu needs less memory"
    if made.device == "cpu" and machine.cpu.isa == "generic":
        yield f"{machine.cpu.name or 'this CPU'} has neither AVX2 nor NEON: expect a few tokens per second"

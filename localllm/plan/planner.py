"""The planner: model facts + machine facts + options -> a `Plan`, with every byte counted and every choice explained.

It works in this order: device (`placement.py`), candidate formats by preference (here), bytes (`memory.py`), choice
(here). It needs no torch and measures nothing. `llm` builds exactly what the plan says; `localllm plan` prints it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from localllm.checkpoint.adapter_file import MOST_RESIDENT, open_adapter
from localllm.config import EngineOptions
from localllm.device import GpuFacts, MachineFacts
from localllm.device import machine as this_machine
from localllm.errors import ConfigError, LocalLLMError, UnsupportedModel
from localllm.models.architectures.facts import ModelFacts, expert_counts, read_layers, without_predictor
from localllm.plan import speeds
from localllm.plan.cores import Threads, chosen_threads, over_quota, whole_quota
from localllm.plan.memory import DENSE_FORMATS, TARGET_BYTES, Memory
from localllm.plan.placement import Placement, chosen_device, idle_card, room_of
from localllm.plan.plan import MIN_CTX, Plan
from localllm.plan.profiles import MemoryProfiles
from localllm.plan.quality import kl_by_kv
from localllm.plan.ranks import divided
from localllm.terminal import GIB, gib

MOST_MORE = 512  # allowed difference in a drafter's vocabulary size: a family's larger models reserve more tokens
CPU_CTX = 8192  # default context on the CPU, where prefilling a longer prompt takes minutes
USEFUL_CTX = 4096  # if unquantized weights leave room for less context than this, they are quantized while loading
SPLIT_CTX = 16384  # context to aim for when experts move to host memory: moving a few more of them costs little
# On a GPU the KV cache stays in 16 bits if it then holds this many tokens or the model's maximum; else it takes 8 bits.
FULL_CTX = 32768
PAGE_SIZES = (16, 32, 64, 128)  # tokens; attention reads tiles of 128 keys
PREFILL = {"cpu": (512,), "cuda": (2048, 1024, 512)}  # prompt tokens per step: the first value that leaves room
# KV format -> its loss of quality against float32
KV_COST = {
    "bf16": "half the size of float32, mean KL below 0.0001",
    "int8": "one scale per token and head, keys rotated: mean KL 0.0004 to 0.002, p99 below 0.02 (two small models)",
    "fp8": "E4M3, one scale per token and head: mean KL 0.009 to 0.013, p99 about 0.1 (two small models)",
}
# formats that unquantized weights may take while loading, best quality first -> their loss
ON_LOAD_COST = {
    "fp8": "weight error 2.7 % (E4M3, one scale per row)",
    "int8": "weight error 1 % (one scale per row)",
    "int4": "weight error 8 to 9 % (groups of 64 with zero points)",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements from earlier runs on this machine; empty by default."""

    speeds: speeds.Speeds = speeds.Speeds()
    profiles: MemoryProfiles | None = None
    kl_by_kv: Mapping[str, float] = field(default_factory=dict)  # of one model: KV format -> mean KL


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans models for one machine and one set of options; shared by all commands, the server and the Python API.

    draft   facts of the draft model named in the options
    """

    machine: MachineFacts
    options: EngineOptions = EngineOptions()
    measured: Measured = Measured()
    draft: ModelFacts | None = None

    @classmethod
    def here(cls, options: EngineOptions | None = None, machine: MachineFacts | None = None) -> Planner:
        """A planner for this machine, with everything measured on it so far."""
        machine = machine or this_machine()
        return cls(machine, options or EngineOptions(), Measured(speeds.load(machine), MemoryProfiles()))

    def having(self, **options: Any) -> Planner:
        """A copy with some options replaced."""
        if all(getattr(self.options, name) == value for name, value in options.items()):
            return self
        return replace(self, options=replace(self.options, **options))

    def plan(self, facts: ModelFacts, path: Path | str = "", host_experts: int | None = None) -> Plan:
        """The best plan for a model; check `fits` before starting it.

        path          the model's files, to look up results of `localllm eval`
        host_experts  fixes the number of experts per layer in host memory

        Raises ConfigError for invalid options, DeviceError if the requested device does not exist.
        """
        _check(facts, self.options)
        self._check_drafter(facts)
        planner = self.having(ctx=facts.max_context) if self.options.ctx == "max" else self
        if path:
            planner = replace(planner, measured=replace(self.measured, kl_by_kv=kl_by_kv(path)))
        if self.options.tensor_parallel not in (1, "auto"):
            made = divided(planner, facts)
            assert made is not None
            return made
        where = chosen_device(self.machine, self.options.device)
        made = planner._on(where, facts, host_experts or 0)
        if where.gpu is None or host_experts is not None or (made.fits and self.options.experts != "host"):
            return made
        if self.options.tensor_parallel == "auto" and not self._follows:
            several = divided(planner, facts)
            if several is not None and several.fits:
                return several
        found = [one for one in [planner._split(where, facts)] if one is not None]
        if not made.fits and self.options.device == "auto":
            why = f"CPU: the model needs {gib(made.need_bytes, 1)}, {where.gpu.name} has {gib(made.have_bytes, 1)} free"
            on_cpu = planner._on(Placement("cpu", None, (why,)), facts)
            found += [on_cpu] if on_cpu.fits else []
        if not found:  # the error then suggests this context
            made = replace(made, max_ctx=max(made.max_ctx, planner._largest_split(where, facts)))
        return max(found, key=lambda one: one.pace, default=made)

    def _split(self, where: Placement, facts: ModelFacts) -> Plan | None:
        """The plan that moves the fewest experts to host memory and still leaves room for a useful context, else None.

        With `engine.experts` = host, all of them move.
        """
        count, most = expert_counts(facts)[0], self._largest_split(where, facts)
        if not most:
            return None
        have, margin = room_of(self.machine, None, 1.0)
        formats = [memory for memory, _ in self.formats(where, facts)]
        low = count if self.options.experts == "host" else 1
        for enough in (SPLIT_CTX, USEFUL_CTX):
            wanted = min(facts.max_context, enough)
            ctx = max(wanted, self.options.ctx) if isinstance(self.options.ctx, int) else wanted

            def is_room(some: int, ctx: int = ctx) -> bool:
                moved = (replace(memory, host_experts=some) for memory in formats)
                return any(memory.sequence_bytes(ctx) <= memory.room(ctx) for memory in moved)

            # fewer experts leave no format enough room; this many may still be too few for the best format
            for some in range(low + bisect_left(range(low, count + 1), True, key=is_room), count + 1):
                memory, largest = self._best(where, facts, some)
                made = self.with_memory(memory, max(largest, most))
                if made.fits and memory.max_ctx >= wanted:
                    if made.host_bytes <= have - margin:
                        return made
                    break
        return None

    def _largest_split(self, where: Placement, facts: ModelFacts) -> int:
        """The largest context with as many experts in host memory as it can hold; 0 if none may move there."""
        count, _ = expert_counts(facts)
        if not count or where.gpu is None or where.gpu.unified or self.options.experts == "device":
            return 0
        have, margin = room_of(self.machine, None, 1.0)
        most = 0
        for memory, _ in self.formats(where, facts):
            all_away = replace(memory, host_experts=count)
            some = min(count, count * (have - margin) // max(1, all_away.host_and_read[0]))
            most = max(most, replace(memory, host_experts=some).max_ctx) if some > 0 else most
        return most

    def plan_within(self, facts: ModelFacts, path: Path | str = "") -> Plan:
        """Like `plan`, but clamps the requested context to the model's maximum; for lists of models."""
        ctx = self.options.ctx
        return self.having(ctx=min(ctx, facts.max_context) if isinstance(ctx, int) else ctx).plan(facts, path)

    def runs(self, facts: ModelFacts | None) -> tuple[bool, float]:
        """(whether the model fits, its decode speed in tokens per second); (False, 0) if it cannot run."""
        if facts is None:
            return False, 0.0
        try:
            made = self.plan_within(facts)
        except LocalLLMError:
            return False, 0.0
        return made.fits, made.decode_tps

    def _on(self, where: Placement, facts: ModelFacts, host_experts: int = 0) -> Plan:
        """The plan for one device."""
        return self.with_memory(*self._best(where, facts, host_experts))

    def _best(self, where: Placement, facts: ModelFacts, host_experts: int) -> tuple[Memory, int]:
        """(best formats that leave room for a useful context, else those with the most; the most of any formats)."""
        choices = [
            (replace(memory, host_experts=host_experts) if host_experts else memory, enough_ctx)
            for memory, enough_ctx in self.formats(where, facts)
        ]
        smallest, _ = choices[-1]
        best = next((memory for memory, enough_ctx in choices if memory.max_ctx >= enough_ctx), None)
        best = best or max((memory for memory, _ in choices), key=lambda memory: memory.max_ctx)
        return best, max(best.max_ctx, smallest.max_ctx)

    def formats(self, where: Placement, facts: ModelFacts) -> Iterator[tuple[Memory, int]]:
        """The candidate formats, each with the context at which the search stops.

        Ordered by quality: weight formats first, then KV formats, then prompt tokens per step.
        """
        options, machine, profiles = self.options, self.machine, self.measured.profiles
        excess = profiles.excess_bytes(facts, machine, where.device) if profiles else 0
        budgets = (options.prefill_budget,) if options.prefill_budget else PREFILL[where.kind]
        if not facts.causal:  # an encoder computes a whole text in one step
            budgets = (options.ctx if isinstance(options.ctx, int) else facts.max_context,)
        budgets = tuple(dict.fromkeys(max(one, _whole_image_tokens(facts)) for one in budgets))
        adapters = _adapter_bytes(options)
        kvs = _kv_formats(options, where.gpu, self.measured.kl_by_kv)
        dtype = options.dtype
        if dtype == "auto":
            dtype = "float32" if where.gpu is None else "bfloat16" if where.gpu.has_bf16 else "float16"
        planned = self._with_heads(facts)
        for quant, kv, rows in itertools.product(_quants(facts, options, where.gpu), kvs, budgets):
            enough = min(facts.max_context, USEFUL_CTX if kv == kvs[-1] else FULL_CTX)
            memory = Memory(planned, machine, options, where, dtype, quant, kv, rows, excess, self._drafts)
            memory = replace(memory, adapter_bytes=adapters) if adapters else memory
            yield memory, options.ctx if isinstance(options.ctx, int) else enough

    def _with_heads(self, facts: ModelFacts) -> ModelFacts:
        """The facts without the MTP head, unless the options use it, and with the layers of a `follower`."""
        if self._drafts is not None and self._drafts.follower is not None and not facts.pooling:
            return replace(without_predictor(facts), drafting=self._drafts.layers)
        is_asked = self.options.speculation in ("auto", "mtp") and not facts.pooling
        return facts if is_asked else without_predictor(facts)

    @property
    def _follows(self) -> bool:
        """Whether the draft model reads the model's own pages or hidden states."""
        return self._drafts is not None and self._drafts.only_drafts

    def _check_drafter(self, facts: ModelFacts) -> None:
        """Raise UnsupportedModel for a drafter on its own, ConfigError for one that cannot draft for the model."""
        if facts.only_drafts:
            name = facts.name or facts.source_architecture
            larger = "Gemma 4 model" if facts.assistant is not None else "model"
            what = f"{name} drafts tokens for a larger {larger} and cannot run alone"
            raise UnsupportedModel(what, f"localllm chat MODEL --draft {name or 'DRAFTER'}")
        draft = self._drafts
        if draft is None or not draft.only_drafts:
            return
        name = self.options.draft or draft.name
        if self.options.tensor_parallel not in (1, "auto"):
            reads = "KV cache" if draft.assistant is not None else "hidden states"
            what = f"{name} reads the {reads} of a model on one device, not on {self.options.tensor_parallel}"
            raise ConfigError(what, "use --tensor-parallel 1, or leave --draft out")
        if draft.follower is not None:
            self._check_follower(name, draft, facts)
            return
        assert draft.assistant is not None
        theirs = draft.assistant.hidden, draft.vocab_size
        if theirs != (facts.hidden_size, facts.vocab_size):
            raise ConfigError(
                f"{name} drafts for a model with {theirs[0]:,} hidden units and {theirs[1]:,} tokens, and this one has"
                f" {facts.hidden_size:,} and {facts.vocab_size:,}",
                "give --draft the assistant that was published with this model, or leave it out",
            )
        if read_layers(draft, facts) is None:
            raise ConfigError(
                f"{name} expects a KV cache with other shapes than this model's",
                "give --draft the assistant that was published with this model, or leave it out",
            )

    @staticmethod
    def _check_follower(name: str, draft: ModelFacts, facts: ModelFacts) -> None:
        """Raise ConfigError if a drafter that reads hidden states was trained for another model."""
        own, hint = draft.follower, "give --draft the drafter that was published for this model, or leave it out"
        assert own is not None
        if not all(part is None for part in (facts.inputs, facts.streams, facts.hyper)):
            what = f"{name} cannot draft for a model with per-layer inputs or several residual streams"
            raise ConfigError(what, "leave --draft out")
        more = 0 if draft.eagle3 is None or draft.eagle3.table else MOST_MORE
        is_other = abs(draft.vocab_size - facts.vocab_size) > more
        if own.hidden != facts.hidden_size or is_other:
            raise ConfigError(
                f"{name} drafts for a model with {own.hidden:,} hidden units and {draft.vocab_size:,} tokens,"
                f" and this one has {facts.hidden_size:,} and {facts.vocab_size:,}",
                hint,
            )
        if not own.taps_in(facts.num_layers):
            what = f"{name} drafts for a model with {own.fitting}, and this one has {facts.num_layers} layers"
            raise ConfigError(what, hint)

    @property
    def _drafts(self) -> ModelFacts | None:
        if self.draft is None or self.options.speculation not in ("auto", "draft"):
            return None
        return without_predictor(self.draft)

    def with_memory(self, memory: Memory, largest: int, tightest: Memory | None = None) -> Plan:
        """The plan for one choice of formats.

        largest   the largest context that any candidate leaves room for
        tightest  the rank with the least room for context, if there are several
        """
        options, machine, facts, where = memory.options, memory.machine, memory.facts, memory.where
        ctx, why = _context(tightest or memory, largest)
        num_pages, num_slots, work = memory.num_pages(ctx), memory.num_slots(ctx), memory.work_terms(ctx)
        held, read = memory.weights_and_read
        have, margin = memory.have_and_margin
        pace = self.measured.speeds.expected(memory, ctx)
        threads = _threads(memory, ctx)
        made = Plan(
            device=where.device,
            dtype=memory.dtype,
            activations="" if options.activations == "auto" else options.activations,
            kv=memory.kv,
            ctx=ctx,
            page_size=options.page_size,
            num_pages=num_pages,
            num_slots=num_slots - bool(num_slots and memory.graph_buckets),
            max_parallel=options.max_parallel,
            prefill_budget=memory.rows if facts.causal else ctx,
            threads=threads.count,
            cpus=threads.cpus,
            nodes=threads.nodes,
            deterministic=where.gpu is None if options.deterministic == "auto" else options.deterministic,
            prefix_cache=options.prefix_cache and facts.causal,
            speculation=_speculation(memory),
            num_drafts=memory.num_drafts,
            weight_bytes=held,
            draft_pages=memory.draft_pages(ctx),
            draft_slots=memory.draft_slots,
            kv_bytes=memory.page_bytes(ctx) + num_slots * memory.slot_bytes,
            work_bytes=sum(work.values()),
            margin_bytes=margin,
            have_bytes=have,
            max_ctx=largest,
            **pace,
            read_bytes=read,
            sequence_bytes=memory.sequence_bytes(ctx) + memory.least_slots * memory.slot_bytes,
            host_experts=memory.host_experts,
            host_bytes=memory.host_and_read[0],
            host_read_bytes=memory.host_and_read[1],
            stream_rows=speeds.stream_rows(memory),
            quant=memory.quant,
            graph_buckets=memory.graph_buckets,
            guess_buckets=memory.guess_buckets,
            work_terms=tuple(work.items()),
            idle=idle_card(machine, where.device),
            reasons=(*_reasons(memory, why, self.measured.kl_by_kv), *_expert_speeds(memory, pace), *threads.reasons),
        )
        warnings = [*_warnings(facts, machine, made, where.gpu)]
        if memory.reads_back and options.graphs and not (facts.pooling or memory.host_experts):
            warnings.append(f"no CUDA graphs, so decoding is slower: {memory.reads_back}")
        return replace(made, warnings=tuple(warnings))


def _adapter_bytes(options: EngineOptions) -> int:
    """Bytes of the largest adapters that can be resident at once. Raises what `open_adapter` raises."""
    sizes = sorted(open_adapter(path).nbytes for path in options.adapter_paths.values())
    return sum(sizes[-MOST_RESIDENT:])


def _threads(memory: Memory, ctx: int) -> Threads:
    """Compute threads on the CPU; without placement and reason if only the GPU computes."""
    if memory.where.gpu is not None and not memory.host_experts:
        return replace(
            chosen_threads(memory.machine.cpu, memory.options.threads), placement="", cpus=(), nodes=(), why=""
        )
    held = memory.host_and_read[0] or memory.weights_and_read[0] + memory.page_bytes(ctx)
    return chosen_threads(memory.machine.cpu, memory.options.threads, held)


def _check(facts: ModelFacts, options: EngineOptions) -> None:
    """Raise ConfigError for invalid values that `EngineOptions` does not check."""
    if options.quant not in ("auto", "", *TARGET_BYTES):
        raise ConfigError(
            f"quant must be one of auto, {', '.join(TARGET_BYTES)}, not {options.quant!r}", "use --quant auto"
        )
    if options.prefill_budget is not None and options.prefill_budget < 1:
        raise ConfigError(f"prefill_budget must be at least 1, not {options.prefill_budget}", "leave it out")
    if options.page_size not in PAGE_SIZES:
        sizes = ", ".join(map(str, PAGE_SIZES))
        raise ConfigError(f"page_size must be one of {sizes} tokens, not {options.page_size}", "leave it out")
    if isinstance(options.ctx, int) and options.ctx > facts.max_context:
        raise ConfigError(
            f"ctx {options.ctx:,} exceeds the model's maximum context of {facts.max_context:,} tokens",
            f"use --ctx {facts.max_context} or less",
        )


# --- formats ----------------------------------------------------------------------------------------------------------


def _quants(facts: ModelFacts, options: EngineOptions, gpu: GpuFacts | None) -> tuple[str, ...]:
    """Candidate formats of the linear layers, best first; unquantized weights may be quantized to fit."""
    if options.quant not in ("auto", ""):
        return (options.quant,)
    if options.quant == "" or facts.stored_format not in DENSE_FORMATS:
        return ("",)
    return ("", "fp8" if gpu is not None and gpu.has_fp8 else "int8", "int4")


def _kv_formats(options: EngineOptions, gpu: GpuFacts | None, measured: Mapping[str, float]) -> tuple[str, ...]:
    """Candidate KV formats, best first. A GPU falls back from 16 to 8 bits: fp8 unless int8 measured better."""
    if options.kv != "auto":
        return (options.kv,)
    if gpu is None:
        return ("bf16",)
    eight = "int8" if measured.get("int8", 1.0) < measured.get("fp8", 0.0) else "fp8"
    return ("bf16" if gpu.has_bf16 else "fp16", eight)


# --- the choice -------------------------------------------------------------------------------------------------------


def _context(memory: Memory, largest: int) -> tuple[int, str]:
    """(tokens of context, why)"""
    asked, own, most = memory.options.ctx, memory.facts.max_context, memory.max_ctx
    if isinstance(asked, int):
        return asked, f"context {asked:,}: as requested"
    wanted = min(own, CPU_CTX) if memory.where.gpu is None else own
    if most < min(MIN_CTX, own):
        return min(MIN_CTX, own), f"context {min(MIN_CTX, own):,}: the smallest useful size"
    if most < min(wanted, largest):
        why = f"the largest that fits without losing speed or quality; --ctx allows up to {largest:,}"
        return most, f"context {most:,}: {why}"
    if most < wanted:
        return most, f"context {most:,}: the largest that fits; the model supports {own:,}"
    if wanted < own:
        return wanted, f"context {wanted:,}: the default on CPU; --ctx allows up to {min(largest, own):,}"
    return wanted, f"context {wanted:,}: the model's maximum"


def _whole_image_tokens(facts: ModelFacts) -> int:
    """Tokens of the largest image whose tokens see each other, so that one step must compute them; 0 without."""
    return facts.vision.tokens if facts.vision is not None and facts.vision.bidirectional else 0


def _reasons(memory: Memory, context: str, kl_by_kv: Mapping[str, float]) -> Iterator[str]:
    yield from memory.where.reasons
    if memory.quant:
        asked, stored = memory.options.quant == memory.quant, memory.facts.stored_format
        why = "as requested" if asked else f"{stored} does not fit, so they are quantized while loading"
        yield f"weights {memory.quant}: {why}"
    if memory.host_experts:
        yield _host_reason(memory)
    yield context
    kv = memory.kv
    if memory.options.kv != "auto":
        why = f"as requested; {KV_COST[kv]}" if kv in KV_COST else "as requested"
    elif kv in ("int8", "fp8"):
        cost = f"mean KL {kl_by_kv[kv]:.4f} measured for this model" if kv in kl_by_kv else KV_COST[kv]
        why = f"16 bits would leave too little context; {cost}"
    else:
        why = KV_COST["bf16"] if kv == "bf16" else "this GPU has no bfloat16"
    yield f"KV {kv}: {why}"
    budget = memory.options.prefill_budget
    if budget and budget < memory.rows and memory.facts.causal:
        yield f"{memory.rows:,} prompt tokens per step, not {budget:,}: an image is computed in one step"
    yield from _speculation_reasons(memory)


def _speculation(memory: Memory) -> str:
    """The requested speculation, or "off" if the model or the options lack what it needs."""
    asked, drafter = memory.options.speculation, memory.drafter
    lacks = (asked == "draft" and drafter is None) or (asked == "mtp" and memory.facts.predictor is None)
    return "off" if not memory.num_drafts or lacks else asked


def _speculation_reasons(memory: Memory) -> Iterator[str]:
    """Reasons about speculative decoding."""
    asked, drafter = memory.options.speculation, memory.drafter
    if not memory.num_drafts:
        return
    when = "while that is faster" if asked == "auto" else "as requested"
    facts = memory.facts
    if asked in ("auto", "ngram"):
        yield f"speculation: drafts up to {memory.num_drafts} tokens per step from repeated text, {when}"
    if drafter is not None:
        kept = " and its own KV cache"
        if drafter.facts.only_drafts:
            many = len(facts.drafting)
            kept = f" and the KV cache of {many} layer{'s' * (many > 1)}" if many else ""
        held = f"{gib(drafter.weights_and_read[0], 2)} of weights{kept}"
        yield f"draft {memory.options.draft or drafter.facts.name}: drafts tokens {when}; the plan includes {held}"
    elif asked == "draft":
        yield "speculation off: no draft model given; set one with --draft"
    if facts.predictor is not None:
        held = f"{gib(facts.predictor_bytes, 2)} of weights and the KV cache of one layer"
        yield f"MTP head: drafts tokens {when}; the plan includes {held}"
    elif asked == "mtp":
        yield f"speculation off: {facts.predictor_flaw or 'the model has no MTP head'}"


def _host_reason(memory: Memory) -> str:
    """The placement of the experts, and its cost per token."""
    count, _ = expert_counts(memory.facts)
    away, read = memory.host_and_read
    why = "as requested" if memory.options.experts == "host" else "because the GPU cannot hold all of them"
    return (
        f"experts: {memory.host_experts} of {count} per layer stay in host memory and run on the CPU, {why}:"
        f" {gib(away, 1)} in host memory, {gib(memory.weights_and_read[0], 1)} of weights on the GPU; each token reads"
        f" {gib(read)} of host memory and transfers {sum(memory.moved_per_token) / 1024:,.0f} KiB"
    )


def _expert_speeds(memory: Memory, pace: Mapping[str, Any]) -> Iterator[str]:
    """Expected speeds with experts in host memory, and which of them are streamed."""
    if not memory.host_experts:
        return
    count, _ = expert_counts(memory.facts)
    share, least = 100 * (count - memory.host_experts) // count, speeds.stream_rows(memory)
    tps = pace["decode_tps"]
    yield f"pace: ≈ {tps:.0f} tok/s with {share} % of the experts on the GPU; the most used ones move there"
    if least:
        yield (
            f"prompts: ≈ {pace['prefill_tps']:,.0f} tok/s; an expert with at least {least:,} rows in a step is streamed"
            f" to the GPU, up to {gib(memory.host_and_read[0], 1)} per {memory.rows:,} tokens"
        )


def _warnings(facts: ModelFacts, machine: MachineFacts, made: Plan, gpu: GpuFacts | None) -> Iterable[str]:
    if made.quant and made.quant in ON_LOAD_COST:
        yield f"weights are quantized to {made.quant} while loading: {ON_LOAD_COST[made.quant]}"
    if gpu is not None:
        if not machine.compiler:
            yield "no C compiler: Triton kernels cannot be built, so slower torch kernels run instead; install gcc"
        held = sum(process.used_bytes for process in gpu.processes)
        if held > gpu.total_bytes // 10:
            names = ", ".join(f"{p.name or 'a process'} ({p.pid})" for p in gpu.processes[:3])
            yield f"{gpu.name} is in use: {names} hold {gib(held, 1)} of it"
    if not made.quant and facts.decoded_bytes > facts.weight_bytes // 2:
        more = f"{gib(facts.weight_bytes + facts.decoded_bytes, 1)} instead of {facts.weight_bytes / GIB:.1f}"
        yield f"{facts.stored_format} is decoded to bfloat16 while loading: {more}; Q2_K and larger stay quantized"
    if (
        gpu is None
        and not machine.compiler
        and made.weight_bytes
        > 1.5 * (facts.weight_bytes + facts.decoded_bytes) + (facts.vocab_size * facts.hidden_size * 4)
    ):
        yield "no C compiler: weights are kept in float32, which is larger and slower; install gcc (`localllm doctor`)"
    if made.device == "cpu" and (stopped := over_quota(machine.cpu, made.threads)):
        yield f"{stopped}; use --threads {whole_quota(machine.cpu)}"
    if made.device == "cpu" and machine.cpu.isa == "generic":
        yield f"{machine.cpu.name or 'this CPU'} has neither AVX2 nor NEON: expect a few tokens per second"

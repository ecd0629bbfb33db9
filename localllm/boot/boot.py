"""Boots an engine over loaded weights: builds pages and graphs, profiles the plan's memory and tunes kernel tiles.

Deviations from the plan are listed in `warnings`, for the run summary and the status lines.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import ClassVar
from weakref import WeakSet

import torch

from localllm.boot.assembly import assemble
from localllm.boot.claim import confined
from localllm.boot.memory_meter import Meter
from localllm.boot.profile import CpuProfiler, WarmAgain, profile_gpu, warm_up
from localllm.device import MachineFacts
from localllm.engine.adapters import Residents
from localllm.engine.engine import Engine
from localllm.engine.failures import explained
from localllm.errors import DeviceError, OutOfMemory
from localllm.kernels.cpu.build import cache_folder, library
from localllm.kernels.verify.records import Records, identity
from localllm.kernels.verify.selftest import COMPILING_THREADS, SelfTest, compiler
from localllm.kernels.verify.tuning import BUDGET_S, Tuned, Tuner, gpu_seconds, tuner, waited
from localllm.models.architectures.facts import expert_counts
from localllm.models.assistant import AssistantModel
from localllm.models.dflash import DFlashModel
from localllm.models.eagle3 import Eagle3Model
from localllm.models.model import Model
from localllm.models.parallel import ParallelModel
from localllm.plan.plan import Plan
from localllm.plan.planner import Planner
from localllm.plan.profiles import MemoryProfile, MemoryProfiles, of_ranks
from localllm.terminal import gib
from localllm.testing import step_fault

log = logging.getLogger(__name__)

# activation quantization -> the matmul kernel that applies it
ROUNDING = {"fp8": "triton_fp8_w8a8", "nvfp4": "triton_nvfp4_w4a4", "int8": "c_int8"}


def first_use(device: str, machine: MachineFacts) -> SelfTest:
    """The self-test for loading on a device, with earlier verdicts; also applies tiles tuned earlier."""
    known = identity(device, machine.driver)
    if device != "cpu":
        tuner(torch.device(device)).use(Records("tuning", known, cache_folder()))
    return SelfTest(Records("selftest", known, cache_folder()), compiler(device, COMPILING_THREADS))


def recorder(plan: Plan) -> Callable[[Callable[[], object]], Callable[[], None]] | None:
    """Like `compiler`, split into recording and compiling (`launch.recorded`); None without Triton or with ranks."""
    if plan.ranks or compiler(plan.device) is None:
        return None
    from localllm.kernels.triton.launch import recorded

    return partial(recorded, device=torch.device(plan.device))


class Boot:
    """One engine over loaded weights.

    planner        made the plan, and makes a smaller one if the plan does not hold
    draft          draft model
    adapters       adapters that requests may name
    base_bytes     anonymous memory of the process before the weights were loaded
    program_bytes  the part of it taken by our imports and the tokenizer
    since          `profile.Neighbours.changes` when these were read
    """

    _alive: ClassVar[WeakSet[Boot]] = WeakSet()  # all of this process, because torch counts their memory together

    def __init__(
        self,
        model: Model,
        plan: Plan,
        planner: Planner,
        selftest: SelfTest,
        *,
        draft: Model | AssistantModel | DFlashModel | Eagle3Model | None = None,
        adapters: Residents | None = None,
        base_bytes: int = 0,
        program_bytes: int = 0,
        since: int = 0,
    ) -> None:
        self.plan = plan  # the plan in effect: smaller than the given one if its memory profile did not hold
        self._model, self._draft, self._adapters = model, draft, adapters
        self._planner = planner
        self._selftest = selftest
        self._profiles = planner.measured.profiles or MemoryProfiles()
        self._shrunk = ""
        taken = " ".join(model.kernels.values())
        self._unrounded = plan.activations if plan.activations and ROUNDING[plan.activations] not in taken else ""
        self.profile_note = ""  # state of the memory profile: profiled, pending, or did not hold
        self.tuned: list[Tuned] = []
        self.is_tuning = False  # the engine's thread is tuning right now, while idle
        self._tuning_left_s = BUDGET_S
        self._compile_ahead = compiler(plan.device)
        self._warming: WarmAgain | None = None
        self._engine: Engine | None = None
        self._alive.add(self)
        self._build_engine()
        # a profile of one rank's part must not be taken for one of the whole model
        self._facts = of_ranks(model.facts, len(plan.ranks), plan.split) if plan.ranks else model.facts
        known = self._profiles.known(self._facts, planner.machine, self.plan)
        if known is not None:
            self.profile_note = str(known)
        elif plan.device == "cpu":
            self.profile_note = "profile pending"
            pages, host = self.engine.scheduler.pages, (base_bytes, program_bytes, since)
            theirs = self.weight_bytes - model.weight_bytes, self.kv_bytes - self.engine.runner.cache.nbytes
            profiler = CpuProfiler(self.engine.runner, pages, self.plan, *host, theirs, self._on_cpu_profile)
            self.engine.when_idle(profiler)
        else:
            self._profile_gpu()
        if plan.device != "cpu":
            warm_up(self.engine.runner, self.plan, self._facts)
            self.engine.when_idle(self._tune_when_idle)

    @property
    def engine(self) -> Engine:
        """The engine, running after `start`."""
        assert self._engine is not None, "asleep"
        return self._engine

    def start(self) -> None:
        """Start the engine's thread, on the plan's CPUs."""
        with confined(self.plan):
            self.engine.start()

    @property
    def _reader(self) -> str:
        """What drafts from the model's hidden states."""
        if isinstance(self._draft, AssistantModel | DFlashModel | Eagle3Model):
            return "the draft model"
        return "" if self._model.predictor is None else "the MTP head"

    @property
    def weight_bytes(self) -> int:
        """Weight bytes of the model and its draft model."""
        return self._model.weight_bytes + (0 if self._draft is None else self._draft.weight_bytes)

    @property
    def kv_bytes(self) -> int:
        """Bytes of all pages and states, used or not, including those of the drafters."""
        speculation = self.engine.stepper.speculation
        return self.engine.runner.cache.nbytes + (0 if speculation is None else speculation.kept_bytes)

    def release(self) -> None:
        """Free the pages and the engine over them; profiles and tuned tiles stay."""
        self._drop_engine()
        for model in (self._model, self._draft):
            if model is not None:
                model.forget_pages()

    def _drop_engine(self) -> None:
        """Drop every reference to the engine and its pages."""
        engine, self._engine, self._warming = self._engine, None, None
        if engine is not None:
            engine.runner.release()

    def _build_engine(self) -> None:
        """Build the engine for the current plan. Raises OutOfMemory if the pages do not fit."""
        self._drop_engine()  # free the previous pages first
        self._meter = Meter(torch.device(self.plan.device))
        try:
            with confined(self.plan):
                self._engine = assemble(
                    self._model,
                    self.plan,
                    draft=self._draft,
                    adapters=self._adapters,
                    meter=self._meter,
                    selftest=self._selftest,
                    check_invariants=self._planner.options.debug_invariants,
                )
        except (MemoryError, RuntimeError) as error:
            if "out of memory" not in str(error).lower() and not isinstance(error, MemoryError):
                raise
            raise OutOfMemory(
                f"not enough memory on {self.plan.place} for {gib(self.plan.kv_bytes, 1)} of KV cache pages",
                "use a smaller --ctx, or close other programs that use the memory",
            ) from error
        self._engine.stepper.fault = step_fault()
        if isinstance(self._model, ParallelModel):
            self._model.on_lost = self._engine.fail
        graphs = self._engine.runner.graphs
        self._graphs_note = graphs.note if graphs is not None else ""

    # --- memory -------------------------------------------------------------------------------------------------------

    def _on_cpu_profile(self, profile: MemoryProfile | None) -> None:
        """Called in the engine's thread. A shortfall is taken out of the free pages."""
        if profile is None:
            self.profile_note = "not profiled: another model is loaded"
            return
        self._keep(profile)
        if not profile.held:
            pages = self.engine.scheduler.pages
            kept = self.plan.kv_bytes if profile.rank is None else self.plan.ranks[profile.rank].kv_bytes
            share = profile.excess_bytes / max(1, kept)
            longest = -(-self.plan.ctx // self.plan.page_size) + 1  # keep enough for one full context
            taken = [
                pool.withdraw(min(int(share * pool.num_pages), max(0, pool.num_pages - longest)))
                for pool in pages.pools
            ]
            self._shrunk = f"the KV cache was reduced by {sum(taken):,} pages; the next start plans for it"

    def _profile_gpu(self) -> None:
        started, before = time.monotonic(), self._computed_beside()
        profile = self._measure_gpu()
        after = self._computed_beside()
        if not profile.held and (after != before or any(computes for _, computes in after)):
            self.profile_note = "not profiled: another model is loaded"  # its steps were measured as well
            return
        if not profile.held and (taken := self._taken_bytes()) > profile.excess_bytes // 2:
            self.profile_note = f"not profiled: other programs took {gib(taken, 1)} of GPU memory meanwhile"
            return  # a lasting deduction from later plans would be wrong
        self._keep(profile)
        if not profile.held and self.plan.ranks:
            missing = f"{gib(profile.excess_bytes, 2)} short on rank {profile.rank}"
            self._shrunk = f"{missing}; the next start plans for it"
        elif not profile.held:
            old = self.plan
            new = self._planner.having(device=old.device, quant=old.quant, kv=old.kv).plan(
                self._model.facts, host_experts=old.host_experts
            )
            if new.fits:
                self.plan = new
                self.release()
                gc.collect()  # graphs refer to what captured them, and so to the pages
                self._build_engine()
                self._shrunk = f"context {new.ctx:,} instead of {old.ctx:,} tokens"
                if new.ctx == old.ctx:
                    self._shrunk = f"{sum(new.num_pages):,} KV cache pages instead of {sum(old.num_pages):,}"
                profile = self._measure_gpu()
                self._keep(profile)
            else:  # the user requested this context and nothing can shrink: run anyway, at the risk of running out
                self._shrunk = f"{gib(profile.excess_bytes, 2)} short; start with a smaller --ctx"
        log.info("profiled in %.1f s: %s", time.monotonic() - started, profile)

    def _taken_bytes(self) -> int:
        """GPU memory that other programs took since the plan was made, by the driver's numbers."""
        from localllm.device import machine

        before = self._planner.machine.gpus
        index = int(self.plan.device.removeprefix("cuda:") or 0)
        now = next((card for card in machine().gpus if index < len(before) and card.uuid == before[index].uuid), None)
        if now is None or now.unified:
            return 0
        ours = torch.cuda.memory_reserved(index) + dict(self.plan.work_terms).get("context", 0)
        return before[index].free_bytes - now.free_bytes - ours

    def _computed_beside(self) -> list[tuple[int, bool]]:
        """(number of steps, is computing) of every other engine on this GPU."""
        others = [one._engine for one in list(self._alive) if one is not self and one.plan.device == self.plan.device]
        return [(one.stepper.stats.num_steps, one.step_age_s > 0) for one in others if one is not None]

    def _measure_gpu(self) -> MemoryProfile:
        held = {"weights": self.weight_bytes, **self._meter.found}
        return profile_gpu(self.engine.runner, self.plan, held)

    def _keep(self, profile: MemoryProfile) -> None:
        self._profiles.keep(self._facts, self._planner.machine, self.plan, profile)
        self.profile_note = str(profile)  # set after saving, so that a reader of the note finds the profile

    # --- tiles --------------------------------------------------------------------------------------------------------

    @property
    def _tuner(self) -> Tuner:
        return tuner(torch.device(self.plan.device))

    def _tune_when_idle(self, must_stop: Callable[[], bool]) -> bool:
        """Idle job (`Engine.when_idle`) that tunes tiles for at most BUDGET_S in total, across interruptions."""
        if self._tuning_left_s <= 0:
            return True
        started, self.is_tuning = time.monotonic(), True
        try:
            tuned = self._time_tiles(self._tuning_left_s, lambda: self._tuning_left_s <= 0 or must_stop())
        finally:
            self.is_tuning = False
            self._tuning_left_s = max(0.0, self._tuning_left_s - (time.monotonic() - started))
        if tuned and self._on_tuned(tuned):
            self.engine.when_idle(self._capture_when_idle)
        return not self._tuner.waiting or self._tuning_left_s <= 0

    def _capture_when_idle(self, must_stop: Callable[[], bool]) -> bool:
        """Idle job that recaptures stale graphs; no request can run during a capture."""
        return self.engine.runner.capture(must_stop)

    def stop_tuning(self) -> None:
        """Stop tuning while idle, because `tune` follows or the caller wants quiet."""
        self._tuning_left_s = 0.0

    def tune(self, budget_s: float, on_progress: Callable[[Tuned], None]) -> list[Tuned]:
        """Tune the tiles of all shapes used so far, in the engine's thread, and wait for it.

        KeyboardInterrupt stops it and keeps the results so far. Raises DeviceError if the engine stops.
        """
        if self.plan.device == "cpu":
            return []
        found: list[Tuned] = []
        stopped, ended = threading.Event(), Future[None]()

        def job(must_stop: Callable[[], bool]) -> bool:
            try:
                found.extend(self._time_tiles(budget_s, lambda: stopped.is_set() or must_stop(), on_progress))
                self._on_tuned(found)
                self.engine.runner.capture()
            except Exception as error:
                ended.set_exception(explained(error))
                raise
            ended.set_result(None)
            return True

        self.engine.when_idle(job)
        try:
            waited(ended, lambda: self.engine.is_dead)
        except KeyboardInterrupt:
            stopped.set()
            return list(self.tuned)
        if not ended.done():
            raise DeviceError(f"the engine stopped: {self.engine.failure}", "localllm doctor")
        ended.result()
        return found

    def _time_tiles(
        self, budget_s: float, stop: Callable[[], bool], on_tuned: Callable[[Tuned], None] = lambda tuned: None
    ) -> list[Tuned]:
        try:
            return self._tuner.tune(gpu_seconds, budget_s, stop, on_tuned, self._compile_ahead)
        finally:
            torch.cuda.empty_cache()  # trials use random weights (1.2 GB for the head of an 8B) that no plan includes

    def _on_tuned(self, tuned: list[Tuned]) -> bool:
        """Called in the engine's thread. Returns True if graphs became stale and no recapture is scheduled yet."""
        self.tuned += tuned
        if not any(one.us < one.first_us for one in tuned):
            return False
        if self._warming is None or self._warming.is_done:  # timing did not compile all kernels of the new tiles
            runner, pages = self.engine.runner, self.engine.scheduler.pages
            self._warming = WarmAgain(runner, pages, self.plan, self._facts, recorder(self.plan))
            self.engine.when_idle(self._warming)
        runner, waits = self.engine.runner, not self.engine.runner.is_captured
        if runner.graphs is not None:
            runner.graphs.renew()
        return not runner.is_captured and not waits

    # --- words -------------------------------------------------------------------------------------------------------

    @property
    def facts_line(self) -> str:
        """The part of the run summary after the kernels: graphs, experts, speculation, tiles, memory profile."""
        parts = [self._graphs_note, self._experts_note, self._table_note, self._speculation_note]
        if self.plan.device != "cpu":
            measured = self._tuner.num_measured
            parts.append(f"{measured} tiles tuned here" if measured else "tiles not measured on this GPU")
            if unsteady := self._tuner.num_unsteady:
                parts.append(f"{unsteady} tiles not tuned: the GPU's clocks changed during timing")
        return " · ".join(part for part in (*parts, self.profile_note) if part)

    @property
    def rounded(self) -> str:
        """The activation quantization in effect; "" if no kernel applies it."""
        return "" if self._unrounded else self.plan.activations

    @property
    def _table_note(self) -> str:
        """Where the n-gram table is, for the run summary; "" if there is none."""
        table = self._model.facts.ngrams
        if table is None:
            return ""
        return f"n-gram table of {gib(table.nbytes, 1)} read from the file, {len(table.sizes)} rows per token"

    @property
    def _experts_note(self) -> str:
        """Placement of the experts for the run summary; "" if all are on the device."""
        if not self.plan.host_experts:
            return ""
        count, _ = expert_counts(self._model.facts)
        layers = self._model.host_experts
        size = gib(sum(one.nbytes for one in layers), 1)
        words = f"{self.plan.host_experts} of {count} experts per layer on the CPU ({size}), so no CUDA graphs"
        moved = [one.moved for one in layers]
        chosen = sum(one.chosen for one in moved)
        if not chosen:
            return words
        hits = 100 * sum(one.on_device for one in moved) // chosen
        moves = gib(sum(m.to_host + m.to_device for m in moved))
        words += f", {hits} % of routed tokens hit the device, {moves} of activations moved"
        for count, what in (
            (sum(m.streamed for m in moved), "streamed"),
            (sum(m.exchanged for m in moved), "exchanged"),
        ):
            words += f", {gib(count)} of weights {what}" if count else ""
        return words

    @property
    def _speculation_note(self) -> str:
        """Acceptance rates of the drafters for the run summary; "" without speculation."""
        stats = self._engine.stepper.stats if self._engine is not None else None
        guesses = dict(stats.guesses) if stats is not None else {}
        if not guesses:
            return f"speculation {self.plan.speculation}" if self.plan.speculation != "off" else ""
        shares = (f"{100 * right // all_} % of {all_:,} {name} tokens" for name, (all_, right) in guesses.items())
        return f"speculation {self.plan.speculation}, {', '.join(shares)} accepted"

    @property
    def warnings(self) -> tuple[str, ...]:
        """Shortfalls against the plan, each with a way to fix it."""
        found = [f"{failure}; a fallback kernel replaces it" for failure in self._selftest.failures]
        if self.plan.device == "cpu":
            missing, note = library().reason, library().note
            if missing and not any("compiler" in warning for warning in self.plan.warnings):
                found.insert(0, f"{missing}; slower PyTorch kernels are used instead")
            if note:
                found.append(note)
        graphs = self._engine.runner.graphs if self._engine is not None else None
        if graphs is not None and graphs.failure:
            found.append(f"CUDA graphs: {graphs.failure}; decoding is slower, because it launches every kernel")
        if self._unrounded:
            takes = f"{self._unrounded} weights, a GPU with {self._unrounded} matmuls and engine.deterministic off"
            if self._unrounded == "int8":
                takes = "a CPU with int8 dot products (VNNI, Arm dotprod) and quantized weights"
            found.append(
                f"activations are not quantized to {self._unrounded}, which needs {takes}; `localllm doctor --kernels`"
                " shows the kernels in use"
            )
        if self._shrunk:
            found.append(f"{self.profile_note}: {self._shrunk}")
        if self.plan.speculation != "off" and self._engine is not None and self._engine.stepper.speculation is None:
            found.append("speculation is off because drafting or a verification step failed; see the log")
        elif self._reader and self._engine is not None and self._engine.runner.listener is None:
            found.append(f"{self._reader} is off because it failed to follow a step; see the log")
        note = self._engine.pressure.note if self._engine is not None else ""
        if note:
            found.append(f"{note}; close other programs that use the memory, or start with a smaller --ctx")
        return tuple(found)


def kernel_words(kernels: Mapping[str, str]) -> str:
    """The kernels in use, by layer class, in one line: equal ones are grouped, and leftover torch ops are named.

    kernels   layer class, op or fused segment -> implementation names
    """
    products: dict[str, list[str]] = {}
    for name in ("qkv", "o", "gate_up", "down", "experts_gate_up", "experts_down", "lm_head"):
        if name in kernels:
            products.setdefault(kernels[name], []).append(name)
    if len(products) == 1:
        words = [f"matmuls {next(iter(products))}"]
    else:
        words = [f"{'+'.join(names)} {impl}" for impl, names in products.items()] or ["none"]
        words[0] = f"matmuls {words[0]}"  # `interface.Facts.brief` cuts the run summary here
    attention = kernels.get("attention") or kernels.get("paged_attention", "none")
    words.append(f"attention {attention}")
    slow = [name for name in ("rms_norm", "rope", "kv_write") if kernels.get(name) == "torch" != attention]
    fused = [name for name in ("step", "decoder", "experts", "mlp", "attn_in") if name in kernels]
    if fused:
        words.append(f"fused {fused[0]} {kernels[fused[0]]}")
    return ", ".join([*words, *(f"{name} torch" for name in slow)])

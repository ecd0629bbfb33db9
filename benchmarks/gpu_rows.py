"""How fast a loaded model runs on the card at hand: steps at a depth that need not be computed, and whole answers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from localllm.boot.assembly import assemble
from localllm.boot.profile import WorstSteps
from localllm.config import EngineOptions
from localllm.device import MachineFacts
from localllm.engine.engine import Engine
from localllm.kernels.verify.tuning import gpu_seconds
from localllm.models.model import Model
from localllm.plan.plan import Plan
from localllm.plan.planner import Planner
from localllm.request import Request, SamplingParams

GIB = 1 << 30
BATCHES, CONTEXTS, PREFILLS = (1, 2, 4, 8, 32, 64), (512, 4096, 32768), (512, 4096, 32768)


def limited(machine: MachineFacts, free_bytes: int) -> MachineFacts:
    """The same machine, as if no more than this were free on its cards."""
    return replace(machine, gpus=tuple(replace(g, free_bytes=min(g.free_bytes, free_bytes)) for g in machine.gpus))


def copy_bandwidth(device: str) -> float:
    """Bytes per second of the card's memory: a copy of 2 GiB, reading and writing counted."""
    size = 2 * GIB if device != "cpu" else 64 << 20
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / best_seconds(lambda: target.copy_(source), device)


def matmul_peak(device: str) -> float:
    """Multiplications and additions per second of torch's bfloat16 product, 8192 cubed, random numbers."""
    n = 8192 if device != "cpu" else 512
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    return 2 * n**3 / best_seconds(lambda: torch.mm(a, b), device)


def best_seconds(call: Callable[[], object], device: str, runs: int = 10) -> float:
    """Least seconds of a call, by events on a card."""
    for _ in range(3):
        call()
    if device == "cpu":
        times = []
        for _ in range(3):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        return min(times)
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(runs)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return min(begin.elapsed_time(end) for begin, end in events) / 1e3


class Bench:
    """One model with pages and graphs as a plan gives them."""

    def __init__(
        self, model: Model, machine: MachineFacts, kv: str, ctx: int, parallel: int, device: str, graphs: bool = True
    ) -> None:
        """Raises DoesNotFit where the plan says so."""
        facts = model.facts
        options = EngineOptions(
            device=device, kv=kv, ctx=ctx, max_parallel=parallel, quant="", prefill_budget=2048, graphs=graphs
        )
        self.plan: Plan = Planner(machine, options).plan(facts)
        if not self.plan.fits:
            raise self.plan.error(facts.name)
        self.model = model
        self.device = device
        torch.cuda.reset_peak_memory_stats() if device != "cpu" else None
        self.engine: Engine = assemble(model, self.plan)
        self.tokens = self.plan.num_pages[0] * self.plan.page_size  # that the pages hold

    def fits(self, batch: int, ctx: int) -> bool:
        """Whether there are pages for so many sequences of this length."""
        return batch <= self.plan.max_parallel and ctx <= self.plan.ctx and batch * (ctx + 32) <= self.tokens

    def _steps(self, ctx: int) -> WorstSteps:
        made = replace(self.plan, ctx=ctx)
        pages = [range(count) for count in self.plan.num_pages]
        return WorstSteps(self.engine.runner, made, pages)

    def decode_seconds(self, batch: int, ctx: int, steps: int = 24) -> float:
        """Seconds of one step for `batch` sequences of `ctx` tokens, sampling and the copy of its tokens included."""
        worst = self._steps(ctx)
        prepared = worst.decoding(batch, waits=False)
        for _ in range(4):
            prepared()
        rounds = []
        for _ in range(3):
            self._wait()
            started = time.perf_counter()
            for _ in range(steps // 3):
                prepared()
            self._wait()
            rounds.append((time.perf_counter() - started) / (steps // 3))
        return statistics.median(rounds)

    def prefill_seconds(self, length: int) -> float:
        """Seconds to read a prompt in chunks, and draw its first token."""
        worst = self._steps(length + 1)
        budget = self.plan.prefill_budget
        chunks = [(start, min(budget, length - start)) for start in range(0, length, budget)]
        calls = [worst.chunk(start, count) for start, count in chunks]

        def run() -> None:
            for call in calls:
                call()
            self._wait()

        run()
        times = []
        for _ in range(3):
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    def attention_seconds(self, ctx: int) -> float:
        """Seconds of decode attention alone, of one layer, for one sequence."""
        facts, size = self.model.facts, self.plan.page_size
        pages = self.engine.runner.cache.layers[0]
        count = -(-ctx // size)
        table = torch.randperm(self.plan.num_pages[0], device=self.device)[:count].to(torch.int32).view(1, -1)
        q = torch.randn(1, facts.num_heads, facts.head_dim, device=self.device, dtype=torch.bfloat16)
        starts = torch.tensor([0, 1], dtype=torch.int32, device=self.device)
        lengths = torch.tensor([ctx], dtype=torch.int32, device=self.device)
        weights = self.model.layers[0].mixer
        run = self.model.table.attention
        with torch.inference_mode():
            if self.device == "cpu":
                return best_seconds(lambda: run(q.float(), weights, pages, table, starts, lengths), "cpu")
            return gpu_seconds(lambda: run(q, weights, pages, table, starts, lengths))

    def answer(self, prompt: int, tokens: int, batch: int = 1) -> dict[str, float]:
        """Whole answers through the engine: TTFT and TPOT in seconds, tokens per second of all together."""
        engine = self.engine
        quiet = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        prompts = [[(7 * i + 13 * j) % 900 + 3 for i in range(prompt)] for j in range(batch)]
        if engine._thread is None:
            engine.start()
        started = time.perf_counter()
        streams = [engine.submit(Request(ids, quiet, use_prefix_cache=False)) for ids in prompts]
        ends = [list(stream)[-1] for stream in streams]
        took = time.perf_counter() - started
        timings = [end.timing for end in ends if end.timing is not None]
        ttft = statistics.median(t.ttft_s for t in timings)
        tpot = statistics.median((t.total_s - t.ttft_s) / max(1, tokens - 1) for t in timings)
        return {"ttft_s": ttft, "tpot_s": tpot, "tps": batch * tokens / took}

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def close(self) -> None:
        """Stop the engine and give the pages back."""
        self.engine.close()
        del self.engine
        if self.device != "cpu":
            torch.cuda.empty_cache()


def generate(
    model: Model, device: str, kv: str, *, graphs: bool, ahead: bool, together: bool = True
) -> list[list[int]]:
    """Greedy and seeded answers of a few requests that come one after the other, or each when the last has ended."""
    from localllm.device import machine

    options = EngineOptions(device=device, kv=kv, ctx=600, quant="", prefill_budget=256, graphs=graphs)
    engine = assemble(model, Planner(machine(), options).plan(model.facts))
    engine.stepper.runs_ahead = ahead
    streams = []
    for index, length in enumerate((3, 300, 17, 64, 130, 5)):
        params = SamplingParams(temperature=0.8 * (index % 2), top_p=0.9, seed=index, max_tokens=24, ignore_eos=True)
        ids = [(11 * i + index) % 900 + 1 for i in range(length)]
        streams.append(engine.submit(Request(ids, params)))
        engine.run_once()
        while not together and not engine.is_idle:
            engine.run_once()
    while not engine.is_idle:
        engine.run_once()
    events = [list(stream) for stream in streams]
    engine.close()
    for event in (e[-1] for e in events):
        if event.error is not None:
            raise event.error
    return [[token for event in e for token in event.token_ids] for e in events]

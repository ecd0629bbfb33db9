"""Speed of a loaded model on this GPU: steps at a context that need not be computed, and whole answers."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any

import torch
from gpu_place import Place
from torch import Tensor

from localllm.boot.profile import WorstSteps
from localllm.engine.drafter import Guess
from localllm.engine.mtp import HeadDrafter
from localllm.engine.sequence import Sequence
from localllm.engine.speculation import Speculation
from localllm.kernels.layer_weights import AttentionWeights
from localllm.models.architectures.facts import layer_views
from localllm.models.architectures.mixers import Attention
from localllm.models.dflash import DFlashModel
from localllm.models.eagle3 import Eagle3Model
from localllm.models.model import Model
from localllm.request import Request, SamplingParams

Propose = Callable[[Many[Sequence], Many[int]], list[tuple[int, ...]]]


def copy_bandwidth(place: Place) -> float:
    """Memory bandwidth of the GPU in bytes per second: a copy, counting reads and writes."""
    source = torch.empty(place.sizes.copied, dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / place.seconds(lambda: target.copy_(source))


def matmul_peak(place: Place) -> float:
    """FLOP/s of torch's bfloat16 matrix product with random numbers."""
    n = place.sizes.matrix
    a, b = (torch.randn(n, n, device=place.device).bfloat16() for _ in range(2))
    return 2 * n**3 / place.seconds(lambda: torch.mm(a, b))


ROUNDS = 6  # answers, each learning from the ones before


class Bench:
    """One model with the pages and graphs of its plan."""

    def __init__(
        self, model: Model, place: Place, kv: str, ctx: int, parallel: int, *, graphs: bool = True, free: int = 1 << 62
    ) -> None:
        """Raises DoesNotFit if the plan says so. free: the most bytes of memory to plan with."""
        given = {"kv": kv, "ctx": ctx, "max_parallel": parallel, "prefill_budget": place.sizes.budget}
        self.plan = place.plan(model.facts, free, graphs=graphs, **given)
        self.model, self.place = model, place
        place.forget_peak()
        self.engine = place.assembled(model, self.plan)
        self.engine.stepper.speculation = None  # repetitions of random weights are meaningless
        self.head, self.engine.runner.listener = self.engine.runner.listener, None  # the MTP head, while it drafts
        self.tokens = self.plan.num_pages[0] * self.plan.page_size  # capacity of the pages

    def fits(self, batch: int, ctx: int) -> bool:
        """Return whether the pages hold `batch` sequences of `ctx` tokens."""
        return batch <= self.plan.max_parallel and ctx <= self.plan.ctx and batch * (ctx + 32) <= self.tokens

    def _steps(self, ctx: int) -> WorstSteps:
        made = replace(self.plan, ctx=ctx)
        pages = [range(count) for count in self.plan.num_pages]
        return WorstSteps(self.engine.runner, made, pages, slots=range(self.plan.num_slots))

    def decoding(self, batch: int, ctx: int) -> Callable[[], None]:
        """Return a call that computes and samples a step for `batch` sequences of `ctx` tokens without waiting."""
        return self._steps(ctx).decoding(batch, waits=False)

    def decode_seconds(self, batch: int, ctx: int, steps: int = 0, guessed: int = 0) -> float:
        """Seconds of one such step, timed over `steps`. `guessed`: draft tokens that the first sequence checks."""
        steps, step = steps or self.place.sizes.steps, self.decoding(batch, ctx)
        if guessed:
            step = self._steps(ctx).checking(batch, guessed, waits=False)
        for _ in range(min(4, steps)):
            step()
        rounds = []
        for _ in range(3):
            self.place.wait()
            started = time.perf_counter()
            for _ in range(steps // 3):
                step()
            self.place.wait()
            rounds.append((time.perf_counter() - started) / (steps // 3))
        return statistics.median(rounds)

    def prefill_seconds(self, length: int) -> float:
        """Seconds to prefill a prompt in chunks and sample its first token."""
        worst = self._steps(length + 1)
        budget = self.plan.prefill_budget
        chunks = [(start, min(budget, length - start)) for start in range(0, length, budget)]
        calls = [worst.chunk(start, count) for start, count in chunks]

        def run() -> None:
            for call in calls:
                call()
            self.place.wait()

        run()
        times = []
        for _ in range(1 if self.place.is_dry else 3):
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    def attention_inputs(self, layer: int, ctx: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query, pages in random order, sequence starts and lengths for one decoding sequence of `ctx` tokens."""
        mixer, device = self.model.facts.layers[layer].mixer, self.place.device
        assert isinstance(mixer, Attention)
        count = -(-ctx // self.plan.page_size)
        views, of_layers = layer_views(self.model.facts)
        pages = self.plan.num_pages[views[of_layers[layer]][0]]
        table = torch.randperm(pages, device=device)[:count].to(torch.int32).view(1, -1)
        q = torch.randn(1, mixer.num_heads, mixer.head_dim, device=device, dtype=getattr(torch, self.place.dtype))
        starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
        return q, table, starts, torch.tensor([ctx], dtype=torch.int32, device=device)

    def attention_seconds(self, layer: int, ctx: int) -> float:
        """Seconds of decode attention alone, for one layer and one sequence."""
        pages, weights = self.engine.runner.cache.layers[layer], self.model.layers[layer].mixer
        assert isinstance(weights, AttentionWeights)
        q, *where = self.attention_inputs(layer, ctx)
        with torch.inference_mode():
            return self.place.cold_seconds(lambda: self.model.table.attention(q, weights, pages, *where))

    def guessed(self, prompt: int, tokens: int, deep: int, right: float, *, head: bool = False) -> dict[str, float]:
        """Generate an answer without and with `deep` guesses per step, each right with probability `right`; return the
        speedup and the share of right guesses.

        head   let the MTP head draft, so that its time counts, and replace its drafts; otherwise guesses are free
        """
        known, stepper = Known(deep, right), self.engine.stepper
        goes_back = bool(self.model.states)
        stepper.speculation = Speculation(known, "always", goes_back=goes_back)
        plain, drafter = self.answer(prompt, tokens)["tpot_s"], known.name
        if head:
            assert isinstance(self.head, HeadDrafter)
            self.engine.runner.listener, self.head.deep, drafter = self.head, deep, self.head.name
            self.head.propose = known.instead_of(self.head.propose)  # type: ignore[method-assign]
            stepper.speculation = Speculation((self.head,), "always", goes_back=goes_back)
        quick, checked, held = 0.0, 0, 0
        for _ in range(
            1 if self.place.is_dry else ROUNDS
        ):  # several rows round differently from one, so answers diverge, later in each round
            known.learn()
            before = stepper.stats.guesses.get(drafter, (0, 0))
            quick = self.answer(prompt, tokens)["tpot_s"]
            after = stepper.stats.guesses.get(drafter, (0, 0))
            checked, held = after[0] - before[0], after[1] - before[1]
            if held > 0.9 * right * checked and 1.5 * checked > tokens:
                break
        stepper.speculation = self.engine.runner.listener = None
        return {"times": plain / max(quick, 1e-9), "right": held / max(1, checked), "tpot_ms": quick * 1e3}

    def answer(self, prompt: int, tokens: int, batch: int = 1) -> dict[str, float]:
        """Generate whole answers with the engine: TTFT and TPOT in seconds, total tokens per second."""
        engine = self.engine
        quiet = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        prompts = [[(7 * i + 13 * j) % _ids(self.model) + 3 for i in range(prompt)] for j in range(batch)]
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

    def close(self) -> None:
        """Stop the engine and free the pages."""
        self.engine.close()
        del self.engine
        self.place.free()


class Known:
    """Drafter that guesses the previous answer to the same prompt, with each token wrong at random."""

    name = "known"

    def __init__(self, deep: int, right: float) -> None:
        self._deep, self._right = deep, right
        self._rng = random.Random(1)
        self._heard: dict[int, Sequence] = {}
        self._texts: list[list[int]] = []

    def learn(self) -> None:
        """Guess from the answers so far."""
        self._texts += [sequence.token_ids for sequence in self._heard.values()]
        self._heard.clear()

    def guess(self, sequence: Sequence) -> Guess | None:
        """Return the known next tokens."""
        ids = sequence.token_ids
        self._heard[sequence.number] = sequence
        text = next((text for text in self._texts if text[: len(ids)] == ids), [])[len(ids) : len(ids) + self._deep]
        if not text:
            return None
        return Guess(tuple(token if self._rng.random() < self._right else abs(token - 1) for token in text), 9)

    def instead_of(self, propose: Propose) -> Propose:
        """`propose` of a drafter, with these guesses instead of its drafts."""

        def told(sequences: Many[Sequence], counts: Many[int]) -> list[tuple[int, ...]]:
            drafts, guesses = propose(sequences, counts), map(self.guess, sequences)
            return [guess.token_ids[: len(own)] if guess else () for own, guess in zip(drafts, guesses, strict=True)]

        return told


def _ids(model: Model) -> int:
    return min(900, model.facts.vocab_size - 8)


def generate(
    model: Model, place: Place, kv: str, *, graphs: bool, ahead: bool, together: bool = True,
    known: Known | None = None, draft: DFlashModel | Eagle3Model | None = None, headed: bool = False,
    drafts: list[list[tuple[int, ...]]] | None = None, tokens: int = 0,
) -> list[list[int]]:  # fmt: skip
    """Greedy and seeded answers of a few requests that arrive staggered, or each after the last has ended.

    known   guesses tokens
    draft   drafts tokens in every step, as does with `headed` the MTP head; `drafts` receives them
    tokens  of an answer; 0: as many as usual
    """
    tokens = tokens or place.sizes.same
    longest = max(place.sizes.prompts) + tokens
    alone = not (together or known or draft or headed)  # otherwise the model is batch-invariant
    sizes = {"ctx": longest + 64, "prefill_budget": 256, "max_parallel": 8}
    plan = place.plan(model.facts, kv=kv, graphs=graphs, deterministic=not alone, **sizes)
    engine = place.assembled(model, replace(plan, speculation="draft" if draft else "mtp" if headed else "off"), draft)
    engine.stepper.runs_ahead = ahead
    listener: Any = engine.runner.listener
    if listener is not None and drafts is not None:
        propose = listener.propose
        listener.propose = lambda *asked: drafts.append(propose(*asked)) or drafts[-1]
    # n-gram lookup guesses depending on timing, which changes the rows and thus the kernels
    if draft is None and not headed:
        engine.stepper.speculation = known and Speculation(known, "always", goes_back=bool(model.states))
    streams = []
    for index, length in enumerate(place.sizes.prompts):
        sampled = {"temperature": 0.8 * (index % 2), "top_p": 0.9, "seed": index}
        params = SamplingParams(**sampled, max_tokens=tokens, ignore_eos=True)
        ids = [(11 * i + index) % _ids(model) + 1 for i in range(length)]
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

"""Half an hour of mixed load on the CPU engine: does it slow down, does its memory grow?

    python benchmarks/load.py [MODEL] [--minutes 30] [--json FILE]

Requests of every kind run four at a time: short and long prompts, shared prefixes, greedy and sampled, log-
probabilities, several answers, some stopped half way. Every quarter of a minute the load pauses to measure decoding,
the reference loop (summing an array as large as the weights, independent of the engine) and anonymous memory.
Targets: decoding relative to the reference loop changes by at most 5 % from the first third to the last, and RssAnon
does not grow after the first five minutes (by more than 16 MB, which the allocator keeps).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from localllm import LLM, SamplingParams
from localllm.bench.results import OtherWork, versions
from localllm.bench.throughput import OurEngine, words
from localllm.device.memory import rss_anon_bytes
from localllm.errors import LocalLLMError

AT_ONCE = 4
EVERY_S = 15.0
SETTLED_S = 300.0
DRIFT_LINE = 0.05
GROWTH_LINE_BYTES = 16 << 20
REPEATS = 3


class Load:
    """Worker threads that send requests until paused or stopped."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.sent = self.stopped = self.failed = 0
        self.tokens = 0
        self._go, self._end, self._lock = threading.Event(), threading.Event(), threading.Lock()
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._beginnings = [words(llm, random.Random(seed), 300) for seed in range(3)]
        self._busy = 0
        self._workers = [self._pool.submit(self._work, random.Random(seed)) for seed in range(AT_ONCE)]

    def run(self, seconds: float) -> None:
        """Run the load for `seconds`; returns when the last request has ended."""
        self._go.set()
        time.sleep(seconds)
        self._go.clear()
        while self._busy:
            time.sleep(0.01)

    def close(self) -> None:
        """Stop the workers. Raises the error of a failed worker."""
        self._end.set()
        self._go.set()
        for worker in self._workers:
            worker.result()
        self._pool.shutdown()

    def _work(self, rng: random.Random) -> None:
        while not self._end.is_set():
            if not self._go.wait(0.1) or self._end.is_set():
                continue
            with self._lock:
                self._busy += 1
            try:
                self._one(rng)
            finally:
                with self._lock:
                    self._busy -= 1

    def _one(self, rng: random.Random) -> None:
        shared = rng.choice(self._beginnings)[: rng.choice((0, 64, 300))]
        prompt = [*shared, *words(self.llm, rng, rng.choice((3, 20, 100, 500, 1200)))]
        params = SamplingParams(
            temperature=rng.choice((0.0, 0.7, 1.2)),
            top_k=rng.choice((0, 40)),
            top_p=rng.choice((1.0, 0.9)),
            repetition_penalty=rng.choice((1.0, 1.1)),
            logprobs=rng.choice((None, None, 3)),
            n=rng.choice((1, 1, 2)),
            max_tokens=rng.choice((1, 16, 64, 200)),
            seed=rng.randrange(1 << 30),
        )
        self.sent += 1
        try:
            turn = self.llm.submit(prompt, params)
            if rng.random() < 0.1:
                time.sleep(rng.random() * 0.3)
                turn.abort()
                self.stopped += 1
            self.tokens += turn.answer().usage.completion_tokens
        except LocalLLMError as error:
            self.failed += error.__class__.__name__ != "Aborted"


def main() -> int:
    """Run the load and print a verdict; exit 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    samples: list[dict[str, float]] = []
    with LLM(options.model, ctx=4096, max_parallel=8, device="cpu") as llm:
        array = np.ones(llm.state().weight_bytes // 4, dtype=np.int32)
        ours, load = OurEngine(llm), Load(llm)
        started = time.monotonic()
        try:
            while time.monotonic() - started < options.minutes * 60:
                load.run(EVERY_S)
                samples.append(sample(ours, array, time.monotonic() - started))
        finally:
            load.close()
        counts = {"sent": load.sent, "stopped": load.stopped, "failed": load.failed, "tokens": load.tokens}
    found = verdict(samples)
    if options.json:
        document = {"schema": "localllm.load/1", "model": options.model, "minutes": options.minutes, **counts}
        options.json.write_text(
            json.dumps(document | {"versions": versions(), "verdict": found, "samples": samples}) + "\n"
        )
    print(json.dumps(counts), json.dumps(found), sep="\n")
    return 0 if found["holds"] and not counts["failed"] else 1


def sample(ours: OurEngine, array: np.ndarray, at_s: float) -> dict[str, float]:
    """Best of a few alternating repetitions of both loops, because other work on the machine only slows them."""
    tps, rate = 0.0, 0.0
    with OtherWork() as others:
        for number in range(REPEATS):
            tps = max(tps, ours.decode([words(ours.llm, random.Random(number), 8)], 48))
            began = time.perf_counter()
            array.sum()
            rate = max(rate, array.nbytes / (time.perf_counter() - began) / 1e9)
    print(
        f"{at_s:7.0f} s  decode {tps:6.1f} tok/s  loop {rate:5.1f} GB/s  RssAnon {rss_anon_bytes() / 1e6:6.0f} MB",
        flush=True,
    )
    return {
        "at_s": round(at_s, 1),
        "decode_tps": round(tps, 2),
        "loop_gb_s": round(rate, 3),
        "rss_anon": rss_anon_bytes(),
        "other_cores": round(others.cores, 2),
    }


def verdict(samples: list[dict[str, float]]) -> dict[str, Any]:
    """Speed drift from the first to the last third, and memory growth after the first minutes."""
    third = max(1, len(samples) // 3)
    ratios = [s["decode_tps"] / s["loop_gb_s"] for s in samples]
    drift = statistics.median(ratios[-third:]) / statistics.median(ratios[:third]) - 1
    settled = [s["rss_anon"] for s in samples if s["at_s"] >= min(SETTLED_S, samples[-1]["at_s"] / 2)]
    growth = int(statistics.median(settled[-third:]) - settled[0])
    holds = abs(drift) <= DRIFT_LINE and growth <= GROWTH_LINE_BYTES
    return {"drift": round(drift, 4), "rss_anon_growth_bytes": growth, "samples": len(samples), "holds": holds}


if __name__ == "__main__":
    raise SystemExit(main())

"""Prometheus metrics under vLLM's names, plus page counts of our own.

The engine threads update the counters with each delta; gauges are read from the engines at each scrape. Labels hold
only model names, finish reasons and the like, never values that a client chooses.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily as CounterFamily
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from localllm.llm.outputs import OutputDelta
from localllm.request import SamplingParams

from .admission import Admission
from .exchange import Exchange
from .pool import ModelPool

MODEL = ("model_name",)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
SMALL = (1, 2, 5, 10, 20, 50, 100, 128)
TIMES = (0, 1, 2, 5, 10, 20, 50, 100)
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "request_prompt_tokens": ("Prompt tokens per request.", TOKENS),
    "request_generation_tokens": ("Generated tokens per request.", TOKENS),
    "request_params_n": ("The request parameter n.", SMALL),
    "request_params_max_tokens": ("The request parameter max_tokens.", TOKENS),
    "time_to_first_token_seconds": ("Time from arrival to the first token.", SECONDS),
    "e2e_request_latency_seconds": ("Time from arrival to the last token.", SECONDS),
    "request_queue_time_seconds": ("Time from arrival to the first step.", SECONDS),
    "request_inference_time_seconds": ("Time from the first step to the last token.", SECONDS),
    "request_prefill_time_seconds": ("Time from the first step to the first token.", SECONDS),
    "request_decode_time_seconds": ("Time from the first to the last token.", SECONDS),
    "request_num_preemptions": ("Preemptions per request.", TIMES),
}
Read = Callable[[Any], float]
GAUGES: dict[str, tuple[str, Read]] = {
    "vllm:num_requests_running": ("Running sequences.", lambda s: s.num_running),
    "vllm:kv_cache_usage_perc": (
        "Fraction of KV cache pages in use, 0 to 1; cached pages count as free.",
        lambda s: (s.pages_total - s.pages_free - s.pages_cached) / max(1, s.pages_total),
    ),
    "localllm:kv_pages_total": ("KV cache pages.", lambda s: s.pages_total),
    "localllm:kv_pages_free": (
        "KV cache pages that are free or held only by the prefix cache.", lambda s: s.pages_free + s.pages_cached,
    ),
    "localllm:kv_store_bytes": ("Bytes of KV pages stored on disk, all models together.", lambda s: s.kv_store_bytes),
    "localllm:kv_store_limit_bytes": ("Limit of the KV pages on disk in bytes; 0 if off.", lambda s: s.kv_store_limit),
    "localllm:kv_pages_cached": ("KV cache pages held only by the prefix cache.", lambda s: s.pages_cached),
}  # fmt: skip
COUNTERS: dict[str, tuple[str, Read]] = {
    "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", lambda s: s.prefix_query_tokens),
    "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache.", lambda s: s.prefix_hit_tokens),
    "localllm:kv_store_read_tokens": ("Tokens whose pages were read from disk.", lambda s: s.kv_store_read_tokens),
    "localllm:kv_store_written_tokens": ("Tokens whose pages were written.", lambda s: s.kv_store_written_tokens),
    "localllm:kv_store_dropped": ("Pages and states that could not be written.", lambda s: s.kv_store_dropped),
    "vllm:spec_decode_num_drafts": ("Drafts verified, each of one sequence.", lambda s: s.num_drafts),
    "vllm:spec_decode_num_draft_tokens": ("Draft tokens verified.", lambda s: s.num_draft_tokens),
    "vllm:spec_decode_num_accepted_tokens": ("Draft tokens accepted.", lambda s: s.num_accepted_tokens),
    "vllm:num_preemptions": ("Preempted sequences.", lambda s: s.num_preemptions),
}


class Metrics(Collector):
    """Everything `/metrics` shows."""

    def __init__(self, pool: ModelPool, queues: Mapping[str, Admission]) -> None:
        self.registry = registry = CollectorRegistry()
        self.generated: Counts[str] = Counts()  # tokens per model; updated per delta, so a plain number
        self.gaps: dict[str, Gaps] = {}  # time between tokens, per model; updated per token
        self.decode_tps: dict[str, float] = {}  # tokens per second of each model's last sequence
        text = "Prompt tokens of finished requests, including cached ones."
        self.prompt_tokens = Counter("vllm:prompt_tokens", text, MODEL, registry=registry)
        reasons = (*MODEL, "finished_reason")
        self.success = Counter("vllm:request_success", "Finished requests.", reasons, registry=registry)
        self.http = Counter("localllm:http_requests", "HTTP requests by status class.", ("status",), registry=registry)
        self._histograms = {
            name: Histogram(f"vllm:{name}", text, MODEL, registry=registry, buckets=buckets)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._pool, self._queues = pool, queues
        registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def observe(self, model: str, **values: float) -> None:
        """Record one value in each named histogram of `HISTOGRAMS`."""
        for name, value in values.items():
            self._histograms[name].labels(model).observe(value)

    def ended(self, exchange: Exchange) -> None:
        """Count a finished HTTP request."""
        self.http.labels(f"{exchange.status // 100}xx" if 100 <= exchange.status < 600 else "other").inc()

    def describe(self) -> Iterable[Metric]:
        """Empty: the metric names are known only at the first scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Read the counts of engines and queues at each scrape."""
        rows = [([name], number) for name, number in self.generated.items()]
        yield _family(CounterFamily, "vllm:generation_tokens", "Generated tokens.", rows)
        gaps = [gaps.row(name) for name, gaps in self.gaps.items()]
        itl = "vllm:inter_token_latency_seconds"
        yield _family(HistogramMetricFamily, itl, "Time between two tokens of a sequence.", gaps)
        models = self._pool.awake()
        stats = {name: llm.stats() for name, llm in models}
        for family, table in ((GaugeMetricFamily, GAUGES), (CounterFamily, COUNTERS)):
            for title, (text, read) in table.items():
                yield _family(family, title, text, [([name], read(one)) for name, one in stats.items()])
        guesses = [(name, by, count) for name, one in stats.items() for by, count in list(one.guesses.items())]
        for at, text in enumerate(("Draft tokens verified, by drafter.", "Draft tokens accepted, by drafter.")):
            title = "localllm:" + ("guessed_tokens", "guessed_tokens_right")[at]
            rows = [([name, by], count[at]) for name, by, count in guesses]
            yield _family(CounterFamily, title, text, rows, labels=(*MODEL, "drafter"))
        steps = [([name], list(one.step_tokens.buckets()), one.step_tokens.total) for name, one in stats.items()]
        yield _family(HistogramMetricFamily, "vllm:iteration_tokens_total", "Tokens per step.", steps)
        gauge = partial(_family, GaugeMetricFamily)
        yield gauge("localllm:models_loaded", "Models in memory.", [([], len(models))], labels=())
        waiting = {
            name: one.num_waiting + (self._queues[name].num_waiting if name in self._queues else 0)
            for name, one in stats.items()
        }
        text = "Waiting requests."
        yield gauge("vllm:num_requests_waiting", text, [([name], number) for name, number in waiting.items()])
        reasons = [
            ([name, reason], number if reason == "capacity" else 0)
            for name, number in waiting.items()
            for reason in ("capacity", "deferred")
        ]
        text = "Waiting requests by reason; the reason is always capacity."
        yield gauge("vllm:num_requests_waiting_by_reason", text, reasons, labels=(*MODEL, "reason"))
        labels = (*MODEL, "block_size", "cache_dtype", "num_gpu_blocks", "enable_prefix_caching")
        caches = [
            ([name, str(p.page_size), p.kv, str(sum(p.num_pages)), str(p.prefix_cache).lower()], 1)
            for name, p in ((name, llm.plan) for name, llm in models)
        ]
        yield gauge("vllm:cache_config_info", "Configuration of the KV cache.", caches, labels=labels)


class Gaps:
    """Histogram of seconds between tokens, written only by the model's engine thread."""

    __slots__ = ("_counts", "_sum")

    def __init__(self) -> None:
        self._counts = [0] * (len(GAPS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, count: int) -> None:
        self._counts[bisect_left(GAPS, seconds)] += count
        self._sum += seconds * count

    def row(self, model: str) -> tuple[list[str], list[tuple[str, int]], float]:
        """Labels, buckets and sum."""
        bounds = (*(str(float(bound)) for bound in GAPS), "+Inf")
        return [model], list(zip(bounds, accumulate(self._counts), strict=True)), self._sum


class RequestMeter:
    """Counts the deltas of one request, even after its client has left."""

    def __init__(
        self, metrics: Metrics, model: str, params: SamplingParams, exchange: Exchange, *, generates: bool = True
    ) -> None:
        self._metrics, self._model, self._params, self._exchange = metrics, model, params, exchange
        self._generates = generates  # False: the prompt is only scored, and generated tokens are dropped
        self._last: dict[int, float] = {}
        self._num_tokens = 0
        self._num_preemptions = 0
        self._open = params.n
        self._num_prompt_tokens: int | None = None
        self._gaps = metrics.gaps.setdefault(model, Gaps())

    def take(self, delta: OutputDelta) -> None:
        now = time.monotonic()
        count = len(delta.token_ids)
        if count:
            last = self._last.get(delta.index)
            if last is None:
                if not self._last:
                    self._exchange.ttft_s = now - self._exchange.started
                    self._metrics.observe(self._model, time_to_first_token_seconds=self._exchange.ttft_s)
            else:
                self._gaps.observe((now - last) / count, count)
            self._last[delta.index] = now
            if self._generates:
                self._num_tokens += count
                self._metrics.generated[self._model] += count
        if delta.finish_reason is not None:
            self._open -= 1
            self._count_sequence(delta)
            if self._open == 0:
                self._end(delta, now)

    def _count_sequence(self, delta: OutputDelta) -> None:
        exchange = self._exchange
        if delta.usage is not None:
            if self._num_prompt_tokens is None and delta.usage.prompt_tokens:
                self._num_prompt_tokens = delta.usage.prompt_tokens
                exchange.prompt_tokens += delta.usage.prompt_tokens
                exchange.cached_tokens += delta.usage.cached_tokens
            exchange.completion_tokens += delta.usage.completion_tokens if self._generates else 0
        if delta.timing is not None:
            self._num_preemptions += delta.timing.num_preemptions
            exchange.decode_tps = delta.timing.decode_tps
            if delta.timing.decode_tps:
                self._metrics.decode_tps[self._model] = delta.timing.decode_tps

    def _end(self, last: OutputDelta, now: float) -> None:
        model, exchange, timing = self._model, self._exchange, last.timing
        exchange.finish = str(last.finish_reason)
        self._metrics.success.labels(model, exchange.finish).inc()
        self._metrics.prompt_tokens.labels(model).inc(self._num_prompt_tokens or 0)
        seen = {
            "request_prompt_tokens": self._num_prompt_tokens or 0,
            "request_generation_tokens": self._num_tokens,
            "request_params_n": self._params.n,
            "request_num_preemptions": self._num_preemptions,
            "e2e_request_latency_seconds": now - exchange.started,
        }
        if self._params.max_tokens is not None:
            seen["request_params_max_tokens"] = self._params.max_tokens if self._generates else 0
        if timing is not None and timing.total_s:
            seen |= {
                "request_queue_time_seconds": timing.queue_s,
                "request_inference_time_seconds": max(0.0, timing.total_s - timing.queue_s),
                "request_prefill_time_seconds": max(0.0, timing.ttft_s - timing.queue_s),
                "request_decode_time_seconds": max(0.0, timing.total_s - timing.ttft_s),
            }
        self._metrics.observe(model, **seen)


def _family(kind: Any, name: str, text: str, rows: Iterable[Any], labels: Sequence[str] = MODEL) -> Metric:
    """Build a metric from rows of label values, followed by the value, or by the buckets and their sum."""
    made: Metric = kind(name, text, labels=labels)
    for row in rows:
        made.add_metric(*row)  # type: ignore[attr-defined]
    return made

"""Counters and gauges in Prometheus' text form, under vLLM's names, with our own page counts beside them.

Counters grow as the engine's thread makes deltas; gauges are read from the engines when somebody looks. Labels hold
model names and finish reasons only: nothing a client can invent.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

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


class Metrics:
    """Everything `/metrics` shows."""

    def __init__(self, pool: ModelPool, queues: Mapping[str, Admission]) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"vllm:{name}", text, (*MODEL, *labels), registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", text, MODEL, registry=registry, buckets=buckets)

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of answered requests, cached ones included.")
        self.generated: Counts[str] = Counts()  # tokens per model; counted for every delta, so it is a plain number
        self.success = counter("request_success", "Requests that ended.", "finished_reason")
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self.request_generation_tokens = histogram(
            "request_generation_tokens", "Tokens of a request's answers.", TOKENS
        )
        self.params_n = histogram("request_params_n", "The parameter n.", SMALL)
        self.params_max_tokens = histogram("request_params_max_tokens", "The parameter max_tokens.", TOKENS)
        self.ttft = histogram("time_to_first_token_seconds", "From arrival to the first token.", SECONDS)
        self.gaps: dict[str, Gaps] = {}  # between two tokens of an answer, per model; counted for every token
        self.e2e = histogram("e2e_request_latency_seconds", "From arrival to the last token.", SECONDS)
        self.queue = histogram("request_queue_time_seconds", "From arrival to the first step.", SECONDS)
        self.inference = histogram("request_inference_time_seconds", "From the first step to the last token.", SECONDS)
        self.prefill = histogram("request_prefill_time_seconds", "From the first step to the first token.", SECONDS)
        self.decode = histogram("request_decode_time_seconds", "From the first to the last token.", SECONDS)
        self.preempted = histogram("request_num_preemptions", "How often a request was put back to make room.", TIMES)
        self._speeds: dict[str, float] = {}
        self.http = Counter("localllm:http_requests", "HTTP requests by status class.", ("status",), registry=registry)
        registry.register(_Engines(self, pool, queues))

    def text(self) -> bytes:
        """The page."""
        return generate_latest(self.registry)

    def decode_tps(self) -> dict[str, float]:
        """Tokens per second of each model's last answer."""
        return dict(self._speeds)

    def note_speed(self, model: str, tps: float) -> None:
        """An answer had this speed."""
        self._speeds[model] = tps

    def meter(self, model: str, params: SamplingParams, exchange: Exchange, *, generates: bool = True) -> RequestMeter:
        """What counts one request. `generates`: False where its tokens are dropped: a prompt is only scored."""
        return RequestMeter(self, model, params, exchange, generates)

    def ended(self, exchange: Exchange) -> None:
        """An HTTP request is over."""
        self.http.labels(f"{exchange.status // 100}xx" if 100 <= exchange.status < 600 else "other").inc()


class Gaps:
    """A histogram of seconds between tokens, written by the model's engine thread only."""

    __slots__ = ("_counts", "_sum")

    def __init__(self) -> None:
        self._counts = [0] * (len(GAPS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, count: int) -> None:
        """So many gaps of that length."""
        self._counts[bisect_left(GAPS, seconds)] += count
        self._sum += seconds * count

    def add_to(self, family: HistogramMetricFamily, model: str) -> None:
        """Show it."""
        bounds = (*(str(float(bound)) for bound in GAPS), "+Inf")
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family.add_metric([model], buckets, self._sum)


class RequestMeter:
    """Counts the deltas of one request, whether or not somebody still reads them."""

    def __init__(
        self, metrics: Metrics, model: str, params: SamplingParams, exchange: Exchange, generates: bool
    ) -> None:
        self._metrics, self._model, self._params, self._exchange = metrics, model, params, exchange
        self._generates = generates
        self._last: dict[int, float] = {}
        self._num_tokens = 0
        self._num_preemptions = 0
        self._open = params.n
        self._num_prompt_tokens: int | None = None
        self._gaps = metrics.gaps.setdefault(model, Gaps())

    def take(self, delta: OutputDelta) -> None:
        """Count one."""
        now = time.monotonic()
        count = len(delta.token_ids)
        if count:
            last = self._last.get(delta.index)
            if last is None:
                if not self._last:
                    self._first(now)
            else:
                self._gaps.observe((now - last) / count, count)
            self._last[delta.index] = now
            if self._generates:
                self._num_tokens += count
                self._metrics.generated[self._model] += count
        if delta.finish_reason is not None:
            self._open -= 1
            self._of_answer(delta)
            if self._open == 0:
                self._end(delta, now)

    def _first(self, now: float) -> None:
        self._exchange.ttft_s = now - self._exchange.started
        self._metrics.ttft.labels(self._model).observe(self._exchange.ttft_s)

    def _of_answer(self, delta: OutputDelta) -> None:
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
                self._metrics.note_speed(self._model, delta.timing.decode_tps)
            exchange.queue_s = delta.timing.queue_s

    def _end(self, delta: OutputDelta, now: float) -> None:
        metrics, model = self._metrics, self._model
        reason = str(delta.finish_reason)
        self._exchange.finish = reason
        metrics.success.labels(model, reason).inc()
        prompt = self._num_prompt_tokens or 0
        metrics.prompt_tokens.labels(model).inc(prompt)
        metrics.request_prompt_tokens.labels(model).observe(prompt)
        metrics.request_generation_tokens.labels(model).observe(self._num_tokens)
        metrics.params_n.labels(model).observe(self._params.n)
        if self._params.max_tokens is not None:
            metrics.params_max_tokens.labels(model).observe(self._params.max_tokens if self._generates else 0)
        metrics.preempted.labels(model).observe(self._num_preemptions)
        metrics.e2e.labels(model).observe(now - self._exchange.started)
        timing = delta.timing
        if timing is None or not timing.total_s:
            return
        metrics.queue.labels(model).observe(timing.queue_s)
        metrics.inference.labels(model).observe(max(0.0, timing.total_s - timing.queue_s))
        metrics.prefill.labels(model).observe(max(0.0, timing.ttft_s - timing.queue_s))
        metrics.decode.labels(model).observe(max(0.0, timing.total_s - timing.ttft_s))


class _Engines(Collector):
    """Gauges and counters that the engines and queues keep themselves."""

    def __init__(self, metrics: Metrics, pool: ModelPool, queues: Mapping[str, Admission]) -> None:
        self._metrics, self._pool, self._queues = metrics, pool, queues

    def describe(self) -> Iterable[Metric]:
        """Nothing known beforehand: names come with the first look."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Called for every look at `/metrics`."""

        def gauge(name: str, text: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(name, text, labels=MODEL)

        def count(name: str, text: str) -> CounterFamily:
            return CounterFamily(name, text, labels=MODEL)

        running = gauge("vllm:num_requests_running", "Sequences being computed.")
        waiting = gauge("vllm:num_requests_waiting", "Requests that wait for their turn.")
        reasons = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "What they wait for: here it is always room.",
            labels=(*MODEL, "reason"),
        )  # fmt: skip
        usage = gauge("vllm:kv_cache_usage_perc", "Share of the pages in use, 1 is all; cached pages count as free.")
        total = gauge("localllm:kv_pages_total", "Pages of keys and values.")
        free = gauge("localllm:kv_pages_free", "Pages nobody holds, or only the prefix cache.")
        cached = gauge("localllm:kv_pages_cached", "Pages only the prefix cache holds: free on demand.")
        queries = count("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        hits = count("vllm:prefix_cache_hits", "Prompt tokens found there.")
        preempted = count("vllm:num_preemptions", "Sequences put back to make room.")
        steps = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens of a step.", labels=MODEL)
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "How keys and values are kept.",
            labels=(*MODEL, "block_size", "cache_dtype", "num_gpu_blocks", "enable_prefix_caching"),
        )  # fmt: skip
        generated = count("vllm:generation_tokens", "Tokens generated.")
        for name, number in self._metrics.generated.items():
            generated.add_metric([name], number)
        itl = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds", "Between two tokens of an answer.", labels=MODEL
        )
        for name, gaps in self._metrics.gaps.items():
            gaps.add_to(itl, name)
        yield from (generated, itl)
        for name, llm in self._pool.awake():
            stats, queue = llm.stats(), self._queues.get(name)
            used = stats.pages_total - stats.pages_free - stats.pages_cached
            running.add_metric([name], stats.num_running)
            num_waiting = stats.num_waiting + (queue.num_waiting if queue else 0)
            waiting.add_metric([name], num_waiting)
            reasons.add_metric([name, "capacity"], num_waiting)
            reasons.add_metric([name, "deferred"], 0)
            usage.add_metric([name], used / max(1, stats.pages_total))
            total.add_metric([name], stats.pages_total)
            free.add_metric([name], stats.pages_free + stats.pages_cached)
            cached.add_metric([name], stats.pages_cached)
            queries.add_metric([name], stats.prefix_query_tokens)
            hits.add_metric([name], stats.prefix_hit_tokens)
            preempted.add_metric([name], stats.num_preemptions)
            plan = llm.plan
            info.add_metric(
                [name, str(plan.page_size), plan.kv, str(sum(plan.num_pages)), str(plan.prefix_cache).lower()], 1
            )
            steps.add_metric([name], list(stats.step_tokens.buckets()), stats.step_tokens.total)
        loaded = GaugeMetricFamily("localllm:models_loaded", "Models in memory.")
        loaded.add_metric([], len(self._pool.awake()))
        yield from (running, waiting, reasons, usage, total, free, cached, queries, hits, preempted, steps, info)
        yield loaded

"""Counters and timings of the engine."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from localllm.request import Timing

from .sequence import Sequence

PACE_TOKENS = 64  # shorter answers are too noisy to measure the decode speed
PACE_SHARE = 0.5  # with fewer of its tokens computed one by one, most of an answer's time went into verifying drafts
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class StepTokens:
    """Histogram of tokens per step. Written by the engine's thread, read by any."""

    def __init__(self) -> None:
        self._counts = [0] * (len(STEP_TOKENS) + 1)
        self.total = 0  # tokens of all steps

    def observe(self, count: int) -> None:
        self._counts[bisect_left(STEP_TOKENS, count)] += 1
        self.total += count

    def buckets(self) -> Iterator[tuple[str, int]]:
        """(upper bound, cumulative count) pairs in Prometheus' format."""
        bounds = (*(f"{bound}.0" for bound in STEP_TOKENS), "+Inf")
        return zip(bounds, accumulate(self._counts), strict=True)


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, and the current state."""

    num_running: int = 0
    num_waiting: int = 0
    pages_total: int = 0  # pages of the first cache group
    pages_free: int = 0  # unused pages
    pages_cached: int = 0  # pages held only by the prefix tree, which eviction can free
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_ahead: int = 0  # steps launched before the previous step's tokens were on the host
    num_drafts: int = 0  # drafts verified, counted per sequence and step
    num_draft_tokens: int = 0  # draft tokens verified
    num_accepted_tokens: int = 0  # draft tokens accepted
    guesses: dict[str, tuple[int, int]] = field(default_factory=dict)  # drafter -> (verified, accepted) tokens
    num_relieved: int = 0  # steps that ran out of memory and were retried with lower limits
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    kv_store_bytes: int = 0  # bytes on the disk, of all models
    kv_store_limit: int = 0  # 0 without a store
    kv_store_read_tokens: int = 0
    kv_store_written_tokens: int = 0
    kv_store_dropped: int = 0  # pages and states not stored, because they were evicted first or the disk failed
    used_tokens: int = 0  # tokens of running sequences in the KV cache
    step_tokens: StepTokens = field(default_factory=StepTokens)
    longest_step_s: float = 0.0
    fastest_tps: float = 0.0  # decode speed of the fastest answer of at least `PACE_TOKENS`, without drafts


def timing_of(sequence: Sequence) -> Timing:
    """The timings of one sequence; prompt tokens from the cache do not count toward the prefill rate."""
    first = sequence.first_token_time or sequence.last_token_time
    last = sequence.last_token_time or first
    if not sequence.start_time:
        return Timing()
    decode_s = last - first
    prefill_s = (sequence.prefill_time or last) - sequence.start_time
    prefilled = sequence.num_prompt_tokens - sequence.num_cached_tokens
    outputs = sequence.num_output_tokens
    return Timing(
        queue_s=sequence.start_time - sequence.submit_time,
        ttft_s=max(0.0, first - sequence.submit_time),
        total_s=max(0.0, last - sequence.submit_time),
        prefill_tps=prefilled / prefill_s if prefill_s > 0 else 0.0,
        decode_tps=(outputs - 1) / decode_s if outputs > 1 and decode_s > 0 else 0.0,
        num_preemptions=sequence.num_preemptions,
        draft_tokens=sequence.num_draft_tokens,
        accepted_tokens=sequence.num_accepted_tokens,
        drafters=tuple(sequence.drafters),
    )

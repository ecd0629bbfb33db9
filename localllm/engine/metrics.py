"""Counters and times of the engine, as plain values."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from localllm.request import Timing

from .sequence import Sequence

PACE_TOKENS = 64  # a shorter answer says little about a model's pace
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class StepTokens:
    """How many tokens the steps had: counts per bucket. Written by the engine's thread, read by any."""

    def __init__(self) -> None:
        self._counts = [0] * (len(STEP_TOKENS) + 1)
        self.total = 0  # tokens of all steps

    def observe(self, count: int) -> None:
        self._counts[bisect_left(STEP_TOKENS, count)] += 1
        self.total += count

    def buckets(self) -> Iterator[tuple[str, int]]:
        """(upper bound, steps up to it), as Prometheus wants them."""
        bounds = (*(f"{bound}.0" for bound in STEP_TOKENS), "+Inf")
        return zip(bounds, accumulate(self._counts), strict=True)


@dataclass(slots=True)
class EngineStats:
    """What was counted so far, and where things stand."""

    num_running: int = 0
    num_waiting: int = 0
    pages_total: int = 0  # of the first cache group
    pages_free: int = 0  # held by nobody
    pages_cached: int = 0  # held by the prefix tree alone: free on demand
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_ahead: int = 0  # steps launched before the tokens of the one before were on the host
    num_drafts: int = 0  # times that guessed tokens of a sequence were checked
    num_draft_tokens: int = 0  # those tokens
    num_accepted_tokens: int = 0  # those of them that were right
    guesses: dict[str, tuple[int, int]] = field(default_factory=dict)  # the same two numbers by drafter
    num_relieved: int = 0  # steps that ran out of memory and were tried again smaller
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    kv_store_bytes: int = 0  # on the disk, of all models
    kv_store_limit: int = 0  # 0: nothing is kept there
    kv_store_read_tokens: int = 0
    kv_store_written_tokens: int = 0
    kv_store_dropped: int = 0  # pages and states that were not kept: gone before their turn, or refused by the disk
    used_tokens: int = 0  # K/V tokens of running sequences
    step_tokens: StepTokens = field(default_factory=StepTokens)
    longest_step_s: float = 0.0
    fastest_tps: float = 0.0  # tokens per second of the fastest answer of at least `PACE_TOKENS`, guesses left out


def timing_of(sequence: Sequence) -> Timing:
    """Times of one sequence; rates over what was really computed."""
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

"""Recovery from out-of-memory errors in a step: lower the limits, preempt, and report, instead of failing.

Every failed step lowers the limits of the next: first no drafts, then half the chunk size, then one sequence fewer. A
request fails only if a single sequence with the smallest chunk does not fit. After many good steps the limits rise
again, because another process may have held the memory only for a while.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from .scheduler import Scheduler, Step

log = logging.getLogger(__name__)

MIN_CHUNK = 16  # prompt tokens per step; smaller chunks save no more memory
GOOD_STEPS = 512  # successful steps before the limits are doubled again


class Pressure:
    """Lowers and raises the limits of one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._full = scheduler.limits
        self._good = 0
        self.num_relieved = 0  # steps that ran out of memory and were retried with lower limits

    @property
    def note(self) -> str:
        """The limits below plan, for the run summary; "" if none are."""
        now = self._scheduler.limits
        if now == self._full:
            return ""
        parts = []
        if now.max_parallel < self._full.max_parallel:
            parts.append(f"{now.max_parallel} of {self._full.max_parallel} sequences at once")
        if now.prefill_budget < self._full.prefill_budget:
            parts.append(f"prompts in chunks of {now.prefill_budget} instead of {self._full.prefill_budget} tokens")
        if now.drafts < self._full.drafts:
            parts.append("no speculation")
        return f"limits lowered after running out of memory: {', '.join(parts)}" if parts else ""

    def relieve(self, step: Step) -> bool:
        """Lower the limits after this step ran out of memory. False if they cannot go lower."""
        self._good = 0
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # frees fragments that the allocator cached
        limits = self._scheduler.limits
        largest = max((part.num_tokens for part in step.scheduled), default=0)
        if limits.whole and len(step.scheduled) == 1:
            return False
        if any(part.drafts for part in step.scheduled):
            smaller = replace(limits, drafts=0)
        elif largest > MIN_CHUNK:
            half = max(MIN_CHUNK, min(limits.prefill_budget, largest) // 2)
            smaller = replace(limits, prefill_budget=half, score_rows=min(limits.score_rows, half))
        elif len(self._scheduler.running) > 1:
            self._scheduler.preempt_latest()
            smaller = replace(limits, max_parallel=len(self._scheduler.running))
        else:
            return False
        self._scheduler.limits = smaller
        self.num_relieved += 1
        log.warning("a step ran out of memory; %s", self.note)
        return True

    def count_good(self) -> None:
        if self._scheduler.limits == self._full:
            return
        self._good += 1
        if self._good >= GOOD_STEPS:
            self._good = 0
            now, full = self._scheduler.limits, self._full
            names = ("max_parallel", "prefill_budget", "score_rows")
            doubled = {name: min(getattr(full, name), 2 * getattr(now, name)) for name in names}
            self._scheduler.limits = replace(now, **doubled, drafts=full.drafts)

"""What the engine does when memory runs out in a step: preempt, shrink, tell. Never die of it.

Each failed step makes the next one smaller, so that it ends: chunks of half the size, then one sequence fewer at once;
only when a single sequence with the smallest chunk does not fit either does its request fail. After many good steps
the limits go back up: another process may have taken the memory for a while.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from .scheduler import Scheduler, Step

log = logging.getLogger(__name__)

MIN_CHUNK = 16  # prompt tokens per step below which nothing is won any more
GOOD_STEPS = 512  # steps without trouble before the limits are doubled again


class Pressure:
    """The limits of one scheduler, lowered and raised."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._full = scheduler.limits
        self._good = 0
        self.num_relieved = 0  # steps that ran out of memory and were tried again smaller

    @property
    def note(self) -> str:
        """What is smaller than planned now, for the run summary; nothing when all is as planned."""
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
        return f"memory ran out: {', '.join(parts)}" if parts else ""

    def relieve(self, step: Step) -> bool:
        """Make the next step smaller than this one, which ran out of memory. False when it cannot be."""
        self._good = 0
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # what the allocator holds in pieces of the wrong size
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

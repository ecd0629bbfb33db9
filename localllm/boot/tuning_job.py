"""Tiles timed in idle moments, after the first answer; somebody who asks something stops it."""

from __future__ import annotations

import time
from collections.abc import Callable

from localllm.kernels.verify.tuning import BUDGET_S, Tuned, Tuner, gpu_seconds


class TuningJob:
    """An idle job (`Engine.when_idle`). Takes at most BUDGET_S in all, however often it is interrupted."""

    def __init__(
        self,
        tuner: Tuner,
        done: Callable[[list[Tuned]], None],
        measure: Callable[[Callable[[], object]], float] = gpu_seconds,
    ) -> None:
        self._tuner = tuner
        self._done = done
        self._measure = measure
        self._left_s = BUDGET_S
        self.is_running = False  # right now, in the engine's thread

    def cancel(self) -> None:
        """Nothing more is timed: somebody tunes on purpose, or wants quiet."""
        self._left_s = 0.0

    def __call__(self, must_stop: Callable[[], bool]) -> bool:
        """True when nothing waits any more, or the time is spent."""
        if self._left_s <= 0:
            return True
        started, self.is_running = time.monotonic(), True
        try:
            tuned = self._tuner.tune(self._measure, self._left_s, lambda: self._left_s <= 0 or must_stop())
        finally:
            self.is_running = False
            self._left_s = max(0.0, self._left_s - (time.monotonic() - started))
        if tuned:
            self._done(tuned)
        return not self._tuner.waiting or self._left_s <= 0

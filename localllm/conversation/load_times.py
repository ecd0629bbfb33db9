"""How long models took to load on this machine: what the next load is expected to take."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from statistics import median
from typing import Any

from localllm import paths

KEPT = 5
"""loads of a model"""
MODELS = 200
log = logging.getLogger(__name__)


class LoadTimes:
    """Seconds by model, in one small file. One that cannot be read or written costs the forecast, nothing else."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file or paths.state_dir() / "load-times.json"

    def expected(self, model: str) -> float | None:
        """Seconds from the first phase to ready, the median of the last loads; None when there was none."""
        times = self._read().get(model)
        return median(times) if times else None

    def add(self, model: str, seconds: float) -> None:
        """Another load has ended."""
        known = self._read()
        times = [*known.pop(model, []), round(seconds, 3)][-KEPT:]
        known[model] = times  # at the end: those not loaded for the longest time are dropped first
        part = self._file.with_suffix(f".{os.getpid()}.part")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(dict(list(known.items())[-MODELS:])))
            part.replace(self._file)
        except OSError:
            log.warning("load times are not kept", exc_info=True)

    def _read(self) -> dict[str, list[float]]:
        try:
            found: Any = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return {}
        rows = found.items() if isinstance(found, dict) else ()
        return {model: times for model, times in rows if _sound(times)}


def _sound(times: Any) -> bool:
    return isinstance(times, list) and all(isinstance(t, int | float) and 0 <= t < 1e6 for t in times) and bool(times)

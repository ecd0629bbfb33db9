"""Loading times of models on this machine, to predict the next load."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from statistics import median
from typing import Any

from localllm import paths

KEPT = 5  # loads per model
MODELS = 200
log = logging.getLogger(__name__)


def expected_s(model: str) -> float | None:
    """Median seconds from the first phase to ready over the last loads; None without any."""
    times = _read().get(model)
    return median(times) if times else None


def add(model: str, seconds: float) -> None:
    """Record a loading time. A file that cannot be written only costs the prediction."""
    known = _read()
    times = [*known.pop(model, []), round(seconds, 3)][-KEPT:]
    known[model] = times  # moved to the end: the models not loaded for longest are dropped first
    try:
        paths.replace_file(_file(), json.dumps(dict(list(known.items())[-MODELS:])))
    except OSError:
        log.warning("load times cannot be saved", exc_info=True)


def _file() -> Path:
    return paths.state_dir() / "load-times.json"


def _read() -> dict[str, list[float]]:
    return {model: times for model, times in paths.read_json(_file()).items() if _sound(times)}


def _sound(times: Any) -> bool:
    return isinstance(times, list) and all(isinstance(t, int | float) and 0 <= t < 1e6 for t in times) and bool(times)

"""Benchmark results: rows of rates with their spread, the facts about the run, and the saved files."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from localllm import paths
from localllm._version import __version__
from localllm.device.memory import sizes


@dataclass(frozen=True, slots=True)
class BenchRow:
    """Tokens per second of one test over its repetitions."""

    test: str
    tps: float  # median
    spread: float  # standard deviation
    runs: tuple[float, ...]
    ttft_ms: float | None = None  # median, for tests that start a request

    @classmethod
    def of(cls, test: str, rates: Sequence[float], ttfts: Sequence[float | None] = ()) -> BenchRow:
        """Build a row from rates in tokens per second and times to first token in seconds."""
        known = [ttft for ttft in ttfts if ttft is not None]
        ttft_ms = statistics.median(known) * 1000 if known else None
        return cls(test, statistics.median(rates), spread(rates), tuple(rates), ttft_ms)


@dataclass(frozen=True, slots=True)
class PeerResult:
    """Results of another engine on the same tests."""

    name: str  # llama.cpp | transformers
    rows: tuple[BenchRow, ...]
    peak_rss_bytes: int
    versions: dict[str, str]


@dataclass(slots=True)
class BenchResult:
    """Results of all tests of one model."""

    model: str
    truth_line: str
    load_s: float
    weight_bytes: int
    rss_anon_bytes: int = 0
    peak_rss_bytes: int = 0
    rows: list[BenchRow] = field(default_factory=list)
    peer: PeerResult | None = None
    load: list[dict[str, Any]] = field(default_factory=list)  # `load.LoadRow`s of a load test
    machine: dict[str, Any] = field(default_factory=dict)
    subject: dict[str, Any] = field(default_factory=dict)  # what was measured, in the form `plan.speeds.load` looks up
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""
    command: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"schema": "localllm.bench/1", "version": __version__, **asdict(self)}

    def ratio(self, test: str) -> float | None:
        """Our median rate over the peer's; None unless both were measured."""
        theirs = next((row.tps for row in self.peer.rows if row.test == test), 0.0) if self.peer else 0.0
        ours = next((row.tps for row in self.rows if row.test == test), 0.0)
        return ours / theirs if theirs and ours else None


def spread(rates: Sequence[float]) -> float:
    """Standard deviation; 0 for a single rate."""
    return statistics.stdev(rates) if len(rates) > 1 else 0.0


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that compute."""
    found = {"python": platform.python_version()}
    for package in ("torch", "triton", "numpy", "tokenizers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def peak_rss_bytes(pid: int | None = None) -> int:
    """Peak resident memory of a process, by default this one."""
    return sizes(Path(f"/proc/{pid or 'self'}/status")).get("VmHWM", 0)


def save(result: BenchResult) -> Path:
    """Save a result in the data folder, where the planner finds it."""
    folder = paths.data_dir() / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    target = folder / f"{Path(result.model).name.replace(':', '_')}-{stamp}.json"
    paths.replace_file(target, json.dumps(result.to_json(), indent=1))
    return target


class OtherWork:
    """CPU use of other processes during a block, in cores. Linux only; always 0 elsewhere."""

    def __enter__(self) -> OtherWork:
        self.cores = 0.0
        self._before = (_busy_cpu_s(), _own_cpu_s(), os.times().elapsed)
        return self

    def __exit__(self, *error: object) -> None:
        busy, ours, clock = _busy_cpu_s(), _own_cpu_s(), os.times().elapsed
        elapsed = clock - self._before[2]
        if elapsed > 0 and busy:
            self.cores = max(0.0, (busy - self._before[0]) - (ours - self._before[1])) / elapsed


def _own_cpu_s() -> float:
    """CPU seconds of this process and its children, both ended and running ones (such as a peer)."""
    total = sum(os.times()[:4])
    with suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # it just ended, and `os.times` counts it once it was waited for
                total += sum(child.cpu_times()[:4])
    return total


def _busy_cpu_s() -> float:
    """Busy seconds of all cores together since boot."""
    try:
        times = psutil.cpu_times()
    except OSError:
        return 0.0
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))

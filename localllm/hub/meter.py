"""Download progress: worker threads record the bytes they receive, one thread turns them into progress events."""

from __future__ import annotations

import threading
import time
from collections import deque

from localllm.request import LoadProgress

STALL_NOTICE_S = 10.0  # without data; after that, progress events report a stall


class Meter:
    """Received bytes, shared by the workers and the reporting thread."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._lock = threading.Lock()
        self._done: dict[str, int] = {}
        self._shown = 0
        self._file = ""
        self._notice = ""
        self._moved = time.monotonic()
        self._history: deque[tuple[float, int]] = deque()

    def at(self, file: str, done: int, *, arrived: bool = True) -> None:
        """Record how much of a file is on disk. `arrived` is false for bytes from an earlier run."""
        with self._lock:
            self._done[file] = done
            if arrived:
                self._moved, self._file, self._notice = time.monotonic(), file, ""

    def notice(self, text: str) -> None:
        """Set the text to show until the next bytes arrive."""
        with self._lock:
            self._notice = text

    def phase(self) -> LoadProgress:
        """Return the state as a progress event. `done` never decreases, even if a file restarts."""
        with self._lock:
            now, real = time.monotonic(), min(sum(self._done.values()), self.total)
            self._shown = max(self._shown, real)
            self._history.append((now, real))
            while len(self._history) > 2 and now - self._history[0][0] > 5:
                self._history.popleft()
            before, span = self._history[0][1], now - self._history[0][0]
            rate = max(0.0, (real - before) / span) if span > 0.2 else 0.0
            quiet = now - self._moved
            detail = self._notice
            if quiet >= STALL_NOTICE_S and not detail:
                detail = f"stalled {quiet:.0f} s, retrying"
            eta = (self.total - self._shown) / rate if rate > 0 else None
            return LoadProgress("download", self._shown, self.total, detail, rate, eta, self._file)

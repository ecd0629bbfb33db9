"""The card shown until the model is ready: download with bar and time left, then load phases."""

from __future__ import annotations

import time

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import ProgressBar, Static

from localllm.request import LoadProgress
from localllm.terminal import clean_line, gib, seconds_short

STALL_S = 10.0
BYTES = 1 << 16  # totals from here on are byte counts


class LoadCard(Vertical):
    """Phases as they come: 'Loading smollm2 · 2.1 s of about 4.2 s', 'starting up ✓ 1.1 s · weights 3/8'."""

    def __init__(self, model: str, expected_s: float | None = None) -> None:
        """`expected_s`: time from the first phase after the download until ready, from earlier loads."""
        super().__init__()
        self._model = clean_line(model)
        self._expected_s = expected_s
        self._loading_since: float | None = None
        self._finished: list[str] = []
        self._phase: LoadProgress | None = None
        self._since = time.monotonic()
        self._moved_at = time.monotonic()
        self._done = 0

    def compose(self) -> ComposeResult:
        yield Static(f"Starting {self._model}", id="load-title", markup=False)
        yield Static("", id="load-line", markup=False)

    @property
    def downloads(self) -> bool:
        """Whether a download is running, which can be paused."""
        return self._phase is not None and self._phase.name == "download"

    def update(self, phase: LoadProgress) -> None:
        now = time.monotonic()
        if self._phase is None or phase.name != self._phase.name:
            if self._phase is not None and self._phase.name not in ("resolve", "download"):
                self._finished.append(f"{clean_line(self._phase.label)} ✓ {seconds_short(now - self._since)}")
            self._since = now
            if self._loading_since is None and phase.name not in ("resolve", "download"):
                self._loading_since = now
        if phase.name == "download" and phase.done > self._done:
            self._done, self._moved_at = phase.done, now
        self._phase = phase
        self.tick()

    def tick(self) -> None:
        phase = self._phase
        if phase is None or not self.is_mounted:
            return
        shown = phase.name == "download" and phase.total > 0
        if shown and not self.query(ProgressBar):
            self.mount(ProgressBar(show_eta=False, id="load-bar"), before="#load-line")
        for bar in self.query(ProgressBar):
            bar.display = shown
            if shown:
                bar.update(total=phase.total, progress=self._done)
        line, title = self.query_one("#load-line", Static), self.query_one("#load-title", Static)
        if phase.name == "download":
            title.update(f"Downloading {clean_line(phase.file) or self._model}")
            line.update(self._bytes(phase))
        else:
            of = f" of about {seconds_short(self._expected_s)}" if self._expected_s else ""
            times = f" · {seconds_short(self.elapsed_s)}{of}" if self.elapsed_s is not None else ""
            title.update(f"Loading {self._model}{times}")
            line.update(" · ".join([*self._finished, self.current()]))

    def _bytes(self, phase: LoadProgress) -> str:
        still = time.monotonic() - self._moved_at
        if still >= STALL_S and self._done < phase.total:
            return f"stalled for {seconds_short(still)}, retrying"
        parts = [f"{gib(self._done)} of {gib(phase.total)}" if phase.total else gib(self._done)]
        if phase.rate:
            parts.append(f"{gib(phase.rate)}/s")
        if phase.eta_s is not None:
            parts.append(f"{seconds_short(phase.eta_s)} left")
        return " · ".join(parts)

    @property
    def elapsed_s(self) -> float | None:
        """Time since loading began, without the download; None before."""
        return None if self._loading_since is None else time.monotonic() - self._loading_since

    def current(self) -> str:
        """The current phase, for the status line."""
        phase = self._phase
        if phase is None:
            return "starting…"
        label = clean_line(phase.label)
        if phase.name == "download":
            return f"downloading {self._done * 100 // phase.total} %" if phase.total else "downloading"
        if phase.total >= BYTES:
            return f"{label} {gib(phase.done)} of {gib(phase.total)}"
        if phase.total > 1:
            return f"{label} {phase.done}/{phase.total}"
        return f"{label} {seconds_short(time.monotonic() - self._since)}"

"""How slow phases are shown on stderr: a bar on a terminal, lines in a log, NDJSON for programs, or nothing.

The bar uses carriage returns and spaces only, so NO_COLOR leaves no escape sequences. It never runs backwards, says
when nothing has moved for ten seconds, and is erased before an answer is printed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from localllm.cli.frame.console import Console
from localllm.request import LoadProgress
from localllm.terminal import cell_width, clean_line, dumb, fit, gib, seconds_short, terminal_size

STALL_S = 10.0  # without movement before the bar says so
PLAIN_EVERY_S = 5.0  # between lines while a phase moves


class Progress:
    """A progress display; this one shows nothing. Downloaded bytes never go down, whatever a retry reports."""

    def __init__(self, console: Console, title: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._title = clean_line(title)
        self._clock = clock
        self._done = self._total = 0
        self._moved_at = clock()
        self._kept: int | None = None  # bytes that an interruption leaves; None for all
        self._resumed = -1  # percent that an earlier run had downloaded; -1 when there was none

    def update(self, phase: LoadProgress) -> None:
        """Report that a phase moved."""
        if phase.name == "download":
            is_first = not self._total
            self._total = max(self._total, phase.total)
            if phase.done > self._done:
                self._done = min(phase.done, self._total) if self._total else phase.done
                self._moved_at = self._clock()
            if is_first and 0 < phase.done < phase.total:
                self._resumed = self._percent
            self._kept = phase.kept
            phase = replace(phase, done=self._done, total=self._total)
        self._show(phase)

    def tick(self) -> None:
        """Report that time passed; called a few times a second."""

    def interrupted(self) -> str:
        """Ctrl+C: return how to resume; empty when there is nothing to resume."""
        if self._done >= self._total:
            return ""
        if self._kept is None:
            return f"paused at {self._percent} %; run the same command to resume"
        again = f"goes on at {self._kept * 100 // self._total} %" if self._kept else "starts again"
        return f"stopped at {self._percent} %; the same command {again}: a package index sends whole packages"

    def close(self) -> None:
        """Erase what should not stay."""

    def _show(self, phase: LoadProgress) -> None:
        pass

    @property
    def _percent(self) -> int:
        """Percent of the download, rounded down."""
        return self._done * 100 // self._total if self._total else 0

    @property
    def _stalled(self) -> str:
        """How long the download has stalled; empty below STALL_S."""
        still = self._clock() - self._moved_at
        return seconds_short(still) if still >= STALL_S and self._done < self._total else ""

    @property
    def _amount(self) -> str:
        """'13.2/27.6 GiB': both numbers in the unit of the second."""
        total = gib(self._total)
        unit = total.split()[1]
        scale = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[unit]
        return f"{self._done / scale:.1f}/{total}" if unit != "B" else f"{self._done}/{total}"


def make_progress(console: Console, mode: str = "auto", title: str = "") -> Progress:
    """The display for a mode (one of `command.PROGRESS`); `auto` is a bar on a terminal and lines elsewhere."""
    if mode == "auto":
        mode = "none" if console.quiet else "bar" if console.err_tty and not dumb() else "plain"
    kinds = {"bar": BarProgress, "plain": PlainProgress, "json": JsonProgress, "none": Progress}
    return kinds[mode](console, title)


def phase_event(phase: LoadProgress) -> dict[str, Any]:
    """A phase as an event of events/1."""
    if phase.name == "download":
        event: dict[str, Any] = {"done": phase.done, "total": phase.total, "rate": round(phase.rate)}
        if phase.eta_s is not None:
            event["eta_s"] = round(phase.eta_s, 1)
        if phase.file:
            event["file"] = phase.file
    elif _is_note(phase):
        return {"event": "note", "message": clean_line(phase.detail)}
    elif phase.name == "resolve":
        event = {"model": phase.detail}
    elif phase.name == "ready":
        event = {"detail": phase.detail}
    else:
        return {"event": "load", "phase": phase.name, "done": phase.done, "total": phase.total}
    return {"event": phase.name, **event}


class JsonProgress(Progress):
    """One JSON object per line on stderr; programs keep the time themselves."""

    def _show(self, phase: LoadProgress) -> None:
        self._console.event(phase_event(phase))

    def interrupted(self) -> str:
        """Emit the last line of an interrupted download."""
        if self._total:
            kept = self._done if self._kept is None else self._kept
            self._console.event({"event": "paused", "done": kept, "total": self._total})
        return super().interrupted()


class PlainProgress(Progress):
    """One line every 10 % or 5 seconds."""

    def __init__(self, console: Console, title: str = "") -> None:
        super().__init__(console, title)
        self._shown_percent = -10
        self._shown_at = time.monotonic()
        self._loading = ""
        self._phase: LoadProgress | None = None  # the current phase, unless it is a download
        self._phase_start = self._shown_at
        self._stall_shown = False

    def _show(self, phase: LoadProgress) -> None:
        now, began = time.monotonic(), self._phase_start
        is_due = now - self._shown_at >= PLAIN_EVERY_S
        if self._phase is None or self._phase.name != phase.name:
            self._phase_start = now
        self._phase = None if phase.name in ("download", "resolve", "ready") else phase
        if _is_note(phase):
            self._console.paragraph(clean_line(phase.detail))
        elif phase.name == "download":
            if self._shown_percent < 0 <= self._resumed:
                self._console.say(f"download resumes at {self._resumed} %")
            if self._percent - self._shown_percent >= 10 or (is_due and self._percent < 100):
                self._shown_percent = self._percent - self._percent % 10
                self._shown_at = now
                self._stall_shown = False
                self._console.say(f"download {self._percent} % {self._amount}")
        elif phase.name == "batch":
            if not self._loading or is_due:
                self._console.say(f"answering {self._title}: {phase.done:,} of {phase.total:,}")
                self._loading, self._shown_at = phase.name, now
        elif phase.name not in ("resolve", "ready"):
            if self._loading == "compile" != phase.name:
                self._console.say(f"built the kernels in {seconds_short(now - began)}")
                is_due = True
            if not self._loading:
                verb = phase.label if phase.name in ("verify", "calibrate", "quantize") else "loading"
                self._console.say(f"{verb} {self._title}".rstrip())
            elif phase.name == "compile":
                self._console.say("building the kernels for this CPU (first use only)")
            elif not is_due:
                return
            elif phase.name == "quantize":  # counted in bytes
                percent = phase.done * 100 // max(1, phase.total)
                self._console.say(f"quantizing: {percent} %, {clean_line(phase.detail)}")
            elif phase.name == self._loading:
                self._console.say(f"{clean_line(phase.label)} {phase.done:,} of {phase.total:,}")
            else:
                self._console.say(f"loading: {clean_line(phase.label)}")
            self._loading, self._shown_at = phase.name, now

    def tick(self) -> None:
        now = time.monotonic()
        if self._stalled and not self._stall_shown:
            self._stall_shown = True
            self._console.say(f"download stalled for {self._stalled} at {self._percent} %, retrying")
        elif self._phase is not None and now - self._shown_at >= 2 * PLAIN_EVERY_S:
            self._shown_at = now
            self._console.say(f"{clean_line(self._phase.label)}: {seconds_short(now - self._phase_start)} so far")


class BarProgress(Progress):
    """One line, redrawn in place."""

    def __init__(self, console: Console, title: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, title, clock)
        self._last: LoadProgress | None = None
        self._finished: list[str] = []
        self._phase_start = clock()
        self._width = 0
        self._drawn_at = 0.0

    def _show(self, phase: LoadProgress) -> None:
        """Redraw, at most 20 times a second."""
        if _is_note(phase):
            self.close()
            self._console.paragraph(clean_line(phase.detail))
            return
        now = self._clock()
        changed = self._last is None or self._last.name != phase.name
        if changed and self._last is not None and self._last.name not in ("resolve", "download"):
            took = seconds_short(now - self._phase_start)
            self._finished.append(f"{self._last.label} ✓ {took}")
        if changed:
            self._phase_start = now
        self._last = phase
        if changed or now - self._drawn_at > 0.05:
            self._draw()

    def tick(self) -> None:
        """Redraw about once a second, for stalls and elapsed time."""
        if self._last is not None and self._clock() - self._drawn_at > 0.5:
            self._draw()

    def close(self) -> None:
        if self._width:
            self._console.stderr.write("\r" + " " * self._width + "\r")
            self._console.stderr.flush()
            self._width = 0
        self._last = None

    def _draw(self) -> None:
        self._drawn_at = self._clock()
        columns = max(20, terminal_size().columns - 1)
        phase = self._last
        if phase is None or phase.name == "ready":
            return
        text = self._download_line(phase, columns) if phase.name == "download" else self._load_line(phase)
        text = fit(self._console.glyphs(text, err=True), columns)
        width = cell_width(text)
        self._console.stderr.write("\r" + text + " " * max(0, self._width - width))
        self._console.stderr.flush()
        self._width = max(width, self._width)

    def _download_line(self, phase: LoadProgress, columns: int) -> str:
        if self._stalled:
            tail = f"stalled for {self._stalled}, retrying"
        else:
            left = "" if phase.eta_s is None else f"  {seconds_short(phase.eta_s)} left"
            tail = f"{gib(phase.rate)}/s{left}" if phase.rate else ""
            if self._resumed > 0:
                tail += f"  (resumed at {self._resumed} %)"
        title = f"Downloading {self._title or clean_line(phase.file)}".rstrip()
        numbers = f"{self._percent:3d} %  {self._amount}  {tail}"
        room = columns - cell_width(title) - cell_width(numbers) - 4
        middle = f"  {_bar(phase.done, phase.total, min(30, room))}  " if room >= 8 else "  "
        return title + middle + numbers

    def _load_line(self, phase: LoadProgress) -> str:
        if phase.name == "batch":
            return f"Answering  {self._title}  {_bar(phase.done, phase.total, 24)}  {phase.done:,}/{phase.total:,}"
        if phase.name == "verify":
            return f"Checking  {self._title}  {_bar(phase.done, phase.total, 24)}"
        if phase.name == "quantize":
            return f"Quantizing  {self._title}  {_bar(phase.done, phase.total, 24)}  {clean_line(phase.detail)}"
        label = clean_line(phase.label)
        if phase.name == "resolve":
            return f"Looking up {clean_line(phase.detail)}"
        if phase.total > 1:
            now = f"{label} {_bar(phase.done, phase.total, 12)}"
        else:
            now = f"{label} {seconds_short(self._clock() - self._phase_start)}"
        return "Loading  " + " · ".join([*self._finished, now])


def _is_note(phase: LoadProgress) -> bool:
    """Whether the phase carries a sentence of the hub's that should stay on screen, not a name being looked up."""
    return phase.name == "resolve" and " " in phase.detail


def _bar(done: int, total: int, width: int) -> str:
    filled = min(width, done * width // total) if total else 0
    head = "╸" if 0 < filled < width else ""
    return "━" * (filled - len(head)) + head + "─" * (width - filled)

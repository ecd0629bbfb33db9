"""F4: the engine panel: run summary, KV pages, batches, speeds, prefix hits, memory against plan, power.

Reads `facts()` into one Static, twice a second while the engine is busy: under 1 % of a core.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import cast

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from localllm.conversation.session import Session
from localllm.interface import Facts
from localllm.request import Timing
from localllm.terminal import clean, gib, rate
from localllm.tui.frame import Frame

LOOK_S = 0.5
KEPT = 200  # values kept for the bars
STILL_S = 2.0  # between updates while the engine is idle
MAP_ROWS = 6
LOW = 34  # height below which the page map gets half its rows
MEMORY_MARKS = {"weights": ("█", "$primary"), "kv": ("▓", "$accent"), "work": ("▒", "$secondary")}
_BARS = " ▁▂▃▄▅▆▇█"
_FREE, _CACHED, _USED = 0, 1, 2
_MARKS = {_FREE: ("░", "dim"), _CACHED: ("▒", "$secondary"), _USED: ("█", "$accent")}


class EnginePanel(VerticalScroll):
    """Hidden until `open`; reads the facts only while it is visible."""

    can_focus = False

    def __init__(self, session: Session) -> None:
        super().__init__(id="engine")
        self._session = session
        self._before: tuple[float, Facts] | None = None
        # of this session's turns, recorded even while hidden
        self._ttft_s, self._decode_tps = deque[float](maxlen=KEPT), deque[float](maxlen=KEPT)
        # tokens per second between two updates
        self._prefill, self._decode = deque[float](maxlen=KEPT), deque[float](maxlen=KEPT)
        self._step_ms = 0.0
        self.display = False

    def compose(self) -> ComposeResult:
        yield Static("", id="engine-text", markup=False)

    def on_mount(self) -> None:
        self.border_title = "Engine"
        self.border_subtitle = f"{cast(Frame, self.app).keymap.label('engine.open')} closes"
        self._timer = self.set_interval(LOOK_S, self.look, pause=True)

    def add(self, timing: Timing) -> None:
        """Record the times of a finished turn."""
        if timing.ttft_s > 0:
            self._ttft_s.append(timing.ttft_s)
        if timing.decode_tps > 0:
            self._decode_tps.append(timing.decode_tps)

    def open(self, shown: bool) -> None:
        """Show or hide the panel; hidden, it costs nothing."""
        self.display = shown
        if shown:
            self._before = None
            self._timer.resume()
            self.call_after_refresh(self.look)
        else:
            self._timer.pause()

    def look(self) -> None:
        facts, now = self._session.backend.facts(), time.monotonic()
        busy = facts.num_running or facts.num_waiting
        if not busy and self._before is not None and now - self._before[0] < STILL_S:
            return
        if self._before is not None and self._before[1].model == facts.model:
            past, old = self._before
            gap = max(now - past, 1e-3)
            self._prefill.append(max(0, facts.num_prompt_tokens - old.num_prompt_tokens) / gap)
            self._decode.append(max(0, facts.num_output_tokens - old.num_output_tokens) / gap)
            steps = facts.num_steps - old.num_steps
            self._step_ms = gap * 1000 / steps if steps > 0 else 0.0
        self._before = now, facts
        width = max(20, self.size.width - 1)
        self.query_one("#engine-text", Static).update(Content("\n").join(self.lines(facts, width)))

    def lines(self, facts: Facts, width: int) -> Iterator[Content]:
        if not facts.model:
            yield Content("no model is loaded")
            return
        yield from Content(clean(facts.run_summary)).wrap(width)
        if facts.url:
            yield Content(f"running at {clean(facts.url)}")
        if url := self._session.url:
            yield Content(f"api {url}/v1")
        yield Content("")
        yield from self._pages(facts, width)
        yield from self._batch(facts, width)
        yield from self._speed(facts, width)
        if facts.power_w:
            rate = self._decode[-1] if self._decode else 0.0
            per = f" · {rate / facts.power_w:.2f} tok/J" if rate else ""
            yield _head("Power", f"{facts.power_w:.0f} W{per}")
        yield Content("")
        yield from self._memory(facts, width)

    def _pages(self, facts: Facts, width: int) -> Iterator[Content]:
        if not facts.pages_total:
            return
        used = facts.pages_total - facts.pages_free - facts.pages_cached
        size = f" × {facts.page_size} tokens" if facts.page_size else ""
        yield _head("KV pages", f"{facts.pages_total:,}{size} · KV {facts.kv or '–'}")
        if facts.page_map:
            yield from page_map(facts.page_map, width, MAP_ROWS if self.size.height >= LOW else MAP_ROWS // 2)
        counts = ((_USED, "in use", used), (_CACHED, "cached", facts.pages_cached), (_FREE, "free", facts.pages_free))
        parts = [Content.styled(_MARKS[s][0], _MARKS[s][1]) + Content(f" {name} {n:,}") for s, name, n in counts]
        yield Content("  ").join(parts)
        if facts.prefix_query_tokens:
            share = facts.prefix_hit_tokens / facts.prefix_query_tokens
            yield _head(
                "Prefix",
                f"{share * 100:.0f} % hit · {facts.prefix_hit_tokens:,} of {facts.prefix_query_tokens:,} tokens",
            )
        if facts.kv_store_limit:
            size = f"{gib(facts.kv_store_bytes)} of {gib(facts.kv_store_limit)}"
            yield _head("On disk", f"{size} · {facts.kv_store_read_tokens:,} tokens read back")
        yield Content("")

    def _batch(self, facts: Facts, width: int) -> Iterator[Content]:
        step = f" · {self._step_ms:.1f} ms/step" if self._step_ms else ""
        yield _head("Batch", f"{facts.num_running} running · {facts.num_waiting} waiting{step}")
        room = width - 10
        for name, rates, style in (("prefill", self._prefill, "$secondary"), ("decode", self._decode, "$accent")):
            bars = sparkline(rates, room, max([*rates, 1.0]))
            yield Content.styled(f"{name:10}", "dim") + Content.styled(bars, style)
        if facts.num_preemptions:
            yield Content(f"{facts.num_preemptions:,} preempted for lack of pages")
        if facts.num_draft_tokens:
            share = facts.num_accepted_tokens * 100 // facts.num_draft_tokens  # as in the run summary
            yield Content(f"{share} % of {facts.num_draft_tokens:,} draft tokens accepted")
        yield Content("")

    def _speed(self, facts: Facts, width: int) -> Iterator[Content]:
        now = self._decode_tps[-1] if self._decode_tps else 0.0
        expected = f" · ≈ {rate(facts.decode_tps)} expected" if facts.decode_tps and not now else ""
        yield _head("Speed", (f"{now:.1f} tok/s" if now else "–") + expected)
        yield _row(self._decode_tps, width)
        ttft = f"{self._ttft_s[-1] * 1000:,.0f} ms" if self._ttft_s else "–"
        yield _head("TTFT", ttft)
        yield _row(self._ttft_s, width)

    def _memory(self, facts: Facts, width: int) -> Iterator[Content]:
        parts = dict(facts.plan_parts)
        if not parts:
            if facts.weight_bytes:
                yield _head("Memory", f"weights {gib(facts.weight_bytes)} · KV {gib(facts.kv_bytes)}")
            return
        planned = sum(parts.values())
        yield _head("Memory", f"{gib(facts.held_bytes)} held of {gib(planned)} planned")
        whole = max(planned, facts.held_bytes, 1)
        yield memory_bar([(name, size) for name, size in parts.items() if name != "margin"], whole, width)
        held = round(facts.held_bytes / whole * (width - 1))
        yield Content.styled(" " * held + "▲" if held > width - 8 else " " * held + "▲ held", "dim")
        names = [f"{'KV' if name == 'kv' else name} {gib(size)}" for name, size in parts.items() if size]
        yield from Content(" · ".join([*names, f"free {gib(facts.have_bytes)}"])).wrap(width)


def memory_bar(parts: Iterable[tuple[str, int]], whole: int, width: int) -> Content:
    """Draw the parts of `whole` bytes, each with its mark; the rest is free."""
    bar = Content("")
    for name, size in parts:
        mark, style = MEMORY_MARKS.get(name, ("·", "dim"))
        bar += Content.styled(mark * round(size / whole * width), style)
    return (bar + Content.styled("░" * max(0, width - len(bar.plain)), "dim"))[:width]


def page_map(states: bytes, width: int, rows: int) -> Iterator[Content]:
    """Draw pages as cells, in order. A cell of several is free when all are, else in use or cached by majority."""
    each = -(-len(states) // (width * rows)) or 1
    cells = bytes(_cell(states[at : at + each]) for at in range(0, len(states), each))
    for start in range(0, len(cells), width):
        runs = ((len(list(run)), *_MARKS[state]) for state, run in groupby(cells[start : start + width]))
        yield Content.assemble(*((mark * count, style) for count, mark, style in runs))


def _cell(pages: bytes) -> int:
    used, cached = pages.count(_USED), pages.count(_CACHED)
    if not used and not cached:
        return _FREE
    return _USED if used >= cached else _CACHED


def sparkline(values: Iterable[float], width: int, most: float) -> str:
    """The last values as bars, scaled to `most`."""
    shown = list(values)[-width:]
    return "".join(_BARS[min(8, round(value / most * 8))] if most > 0 else " " for value in shown)


def _row(values: deque[float], width: int) -> Content:
    return Content.styled(sparkline(values, width, max([*values, 1e-9])), "$success")


def _head(name: str, text: str) -> Content:
    return Content.styled(f"{name:10}", "bold") + Content(clean(text))

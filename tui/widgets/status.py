"""The top line (model and device) and the bottom line (activity and context use)."""

from __future__ import annotations

from dataclasses import dataclass, field

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content
from textual.widgets import Static

from localllm.conversation.tree import number
from localllm.interface import Facts
from localllm.terminal import cell_width, clean_line, fit, tokens_short

WARN_SHARE = 0.8  # context use from which the meter warns


@dataclass(slots=True)
class State:
    """The contents of the status line."""

    text: str = "starting…"
    facts: Facts = field(default_factory=Facts)
    used_tokens: int = 0
    sampling: dict[str, object] = field(default_factory=dict)
    think: str = "auto"
    offline: bool = False
    unsaved: bool = False
    api: str = ""  # address for other programs


def bar(share: float, cells: int = 10) -> str:
    """'▓▓▓▓░░░░░░' for 0.4."""
    filled = min(cells, round(share * cells))
    return "▓" * filled + "░" * (cells - filled)


class _Line(Horizontal):
    """A line with two sides, redrawn only when something has changed."""

    LEFT, RIGHT = "", ""

    def __init__(self) -> None:
        super().__init__()
        self._shown: tuple[Content, str] | None = None

    def compose(self) -> ComposeResult:
        yield Static("", id=self.LEFT, markup=False)
        yield Static("", id=self.RIGHT, markup=False)

    def _put(self, left: Content, right: str) -> None:
        if (left, right) == self._shown:
            return
        moves = self._shown is None or right != self._shown[1]
        self._shown = left, right
        # the left side takes all remaining room, so only a change on the right moves anything
        self.query_one(f"#{self.LEFT}", Static).update(left, layout=moves)
        if moves:
            self.query_one(f"#{self.RIGHT}", Static).update(f"{right} ")


class TitleLine(_Line):
    """Name of the chat on the left, the model and its device on the right."""

    LEFT, RIGHT = "title", "model"

    def show(self, title: str, model: str, facts: Facts) -> None:
        width = self.app.size.width
        name = clean_line(facts.model or model)
        name = fit(name.rstrip("/").rsplit("/", 1)[-1], max(12, width // 2 - 8))
        process = f" (pid {facts.pid})" if facts.pid and width >= 80 else ""
        device = f"via {facts.url}{process}" if facts.url else clean_line(facts.device)
        right = " · ".join(filter(None, [name, device, memory_meter(facts) if width >= 100 else ""]))
        room = max(10, width - cell_width(right) - 16)
        self._put(Content.styled(" localllm", "bold $primary") + Content(f"   {fit(clean_line(title), room)}"), right)


def memory_meter(facts: Facts) -> str:
    """'VRAM 14.0/24.0 GiB ▓▓▓▓▓▓░░░░': held and available memory; "" when unknown."""
    if not facts.held_bytes or not facts.have_bytes:
        return ""
    kind = "VRAM" if facts.device.startswith("cuda") else "RAM"
    meter = bar(facts.held_bytes / facts.have_bytes)
    return f"{kind} {facts.held_bytes / 2**30:.1f}/{facts.have_bytes / 2**30:.1f} GiB {meter}"


class StatusLine(_Line):
    """Activity, context meter and sampling on the left; keys on the right."""

    LEFT, RIGHT = "state", "keys"

    def show(self, state: State, keys: str) -> None:
        """Show the state; for lack of room, keys are dropped first, then the end of the left side."""
        width = self.app.size.width
        wide = width >= 100
        parts = [Content(f" {state.text}")]
        if state.facts.ctx:
            parts.append(_context_meter(state, wide))
        if state.offline:
            parts.append(Content.styled("offline", "$text-warning"))
        if state.unsaved:
            parts.append(Content.styled("! not saved" if wide else "!", "$text-warning"))
        if wide and state.sampling:
            parts.append(Content(" ".join(f"{_SHORT.get(k, k)} {number(v)}" for k, v in state.sampling.items())))
        if wide and state.think != "auto":
            parts.append(Content(f"think {state.think}"))
        if state.api:
            parts.append(Content(f"api :{state.api.rsplit(':', 1)[-1]}"))  # F4 shows the full address
        left = Content(" │ ").join(parts)
        while keys and cell_width(left.plain) + cell_width(keys) + 2 > width:
            keys = keys.partition(" · ")[2]
        self._put(left, keys)


def _context_meter(state: State, wide: bool) -> Content:
    used, ctx = state.used_tokens, state.facts.ctx
    share = min(1.0, used / ctx)
    meter = f" {bar(share)}" if wide else ""
    text = f"ctx {tokens_short(used)}/{tokens_short(ctx)}{meter} {share * 100:.0f} %"
    if share >= WARN_SHARE:
        return Content.styled(f"! {text}" + (": /ctx" if wide else ""), "$text-warning")
    return Content(text)


_SHORT = {"temperature": "temp", "max_tokens": "max"}

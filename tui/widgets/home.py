"""The home screen, shown when no model was named: chats to continue, models to start, this machine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from localllm.history.records import SavedChat
from localllm.interface import Check, ModelChoice
from localllm.terminal import clean_line, counted, fit, gib, rate, tokens_short
from localllm.tui.keymap import Keymap

CHATS = 3
MODELS = 6
NONE_YET = "No models yet. Press Enter to download one:"
SLOW_TPS = 5.0  # slower models are not suggested


class Listing(OptionList):
    """Keeps the row under the cursor in view, even when other widgets take room from the list."""

    def on_resize(self) -> None:
        self.call_after_refresh(self.scroll_to_highlight)


class Home(Vertical):
    """Rows to choose from; their ids are chat:ID, model:NAME or browse. Offline, there are no downloads among them."""

    def __init__(self, keys: Keymap, offline: bool) -> None:
        super().__init__(id="home")
        self._keys, self._offline = keys, offline
        self.chats: Sequence[SavedChat] = ()
        self.models: Sequence[ModelChoice] | None = None

    def compose(self) -> ComposeResult:
        yield Static(Content.styled("l o c a l l l m", "bold $primary"), id="home-name")
        yield Static("", id="home-machine", markup=False)
        yield Listing(markup=False, compact=True, id="home-list")
        models, doctor, leave = map(self._keys.label, ("models.open", "app.doctor", "app.quit"))
        keys = f"⏎ start   {models} all models   {doctor} doctor   {leave} quit   or just type"
        yield Static(keys, id="home-keys", markup=False)
        yield Static("", id="home-said", markup=False)

    def on_mount(self) -> None:
        self.tell("")
        self._fill()

    def on_resize(self) -> None:
        self.call_after_refresh(self._fill)  # rows of the new width

    @property
    def default_model(self) -> str:
        """The model for a message typed here; "" while the list is loading."""
        usable = [row for row in self.models or () if row.local and row.supported and row.fits and row.chat]
        return usable[0].name if usable else ""

    def has(self, name: str) -> bool:
        """Whether a chat can use this model without a download."""
        return any(row.name == name and row.local and row.supported and row.chat for row in self.models or ())

    def show_chats(self, chats: Sequence[SavedChat]) -> None:
        self.chats = chats[:CHATS]
        self._fill()

    def show_models(self, models: Sequence[ModelChoice]) -> None:
        self.models = models
        self._fill()

    def show_machine(self, checks: Sequence[Check]) -> None:
        found = {check.id: check for check in checks}
        parts = [clean_line(found[name].title) for name in ("gpu.present", "cpu", "ram") if name in found]
        # F9 runs without a terminal and skips the terminal checks
        about_here = [check for check in checks if check.id != "term" and not check.id.startswith("term.")]
        bad = [check for check in about_here if check.status in ("warn", "fail")]
        key = self._keys.label("app.doctor")
        doctor = f"doctor: {counted(len(bad), 'finding')} ({key})" if bad else "doctor: no problems"
        self.query_one("#home-machine", Static).update(f"{' · '.join(parts)}\n{doctor}")

    def tell(self, text: str) -> None:
        """Show what went wrong with a choice, below the keys; "" hides it."""
        said = self.query_one("#home-said", Static)
        said.update(text)
        said.display = bool(text)

    def _fill(self) -> None:
        listing = self.query_one(OptionList)
        row = listing.highlighted_option
        listing.set_options(self._options())
        listing.set_styles(max_height=listing.option_count)  # keeps the keys right below the list
        ids = [option.id for option in listing.options]
        if row is not None and row.id in ids:  # the cursor follows its row
            listing.highlighted = ids.index(row.id)
        else:
            listing.action_first()

    def _options(self) -> Iterator[Option]:
        width = max(30, min(self.size.width or 80, 96) - 6)
        if self.chats:
            yield Option("Continue", disabled=True)
        for chat in self.chats:
            when = time.strftime("%d %b %H:%M", time.localtime(chat.updated))
            title = fit(clean_line(chat.title) or "untitled", width - 18)
            yield Option(f"  {title:{width - 16}}{when:>14}", id=f"chat:{chat.id}")
        if self.chats:
            yield Option("", disabled=True)
        if self.models is None:
            yield Option("Looking for models …", disabled=True)
            return
        rows = _offered([row for row in self.models if row.local or not self._offline])
        here = any(row.local for row in rows)
        none = "No chat models here, and offline mode is on" if self._offline else NONE_YET
        yield Option("New chat with" if here else none, disabled=True)
        for row in rows:
            yield Option(f"  {model_line(row, width)}", id=f"model:{row.name}")
        yield Option("  … browse all models", id="browse")


def _offered(models: Sequence[ModelChoice]) -> list[ModelChoice]:
    """Runnable local models, then downloads that fit: the recommended, the smallest, and one in between."""
    local = [row for row in models if row.local and row.supported and row.fits and row.chat]
    fetched = sorted((row for row in models if not row.local and row.fits), key=lambda row: row.size_bytes)
    fetched = [row for row in fetched if not 0 < row.tps < SLOW_TPS] or fetched
    best = [row for row in models if row.recommended and not row.local]
    between = [fetched[i] for i in sorted({0, len(fetched) // 2, len(fetched) - 1})] if fetched else []
    picks = [*best, *(row for row in between if row not in best)][:3]
    return [*local[:MODELS], *picks[: max(0, MODELS - len(local)) or 1]]


def pace(row: ModelChoice, unit: str = "tok/s") -> str:
    """'✓ 91 tok/s', measured, or '≈ 0.7 tok/s', estimated."""
    return f"{'✓' if row.basis == 'measured' else '≈'} {rate(row.tps)} {unit}"


def model_line(row: ModelChoice, width: int) -> str:
    """'smollm2   on disk   fits 8k   ≈ 260 tok/s'."""
    where = ("★ " if row.recommended else "") + ("on disk" if row.local else f"{gib(row.size_bytes)} download")
    ctx = row.max_ctx or row.ctx
    fits = f"fits {tokens_short(ctx)}" if row.fits and ctx else "fits" if row.fits else "does not fit"
    speed = pace(row) if row.tps else ""
    room = max(16, width - 52)
    return f"{fit(clean_line(row.name), room):{room}}  {where:20}{fits:12}{speed:>14}"

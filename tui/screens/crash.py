"""The engine stopped: what happened, where the log is, and what can be done. Answers with the choice's name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static

from localllm.terminal import clean
from localllm.tui.widgets.choices import Choice, Choices

REPORT = "report"


class CrashScreen(ModalScreen[str]):
    """Nothing else can go on, so it lies over everything; the last choice is what Esc means.

    said    one sentence
    log     where more is, if anywhere
    report  copies a report and says how: the question stays
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,ctrl+c", "leave", "Close", priority=True)]

    def __init__(self, said: str, log: str, choices: Sequence[Choice], report: Callable[[], str]) -> None:
        super().__init__()
        self._said, self._log, self._choices, self._report = said, log, choices, report

    def compose(self) -> ComposeResult:
        with Vertical(classes="box -wrong") as box:
            box.border_title = "The engine stopped"
            yield Static(clean(self._said), markup=False)
            yield Static("What it had written is kept.", markup=False)
            if self._log:
                yield Static(f"log: {clean(self._log)}", classes="where", markup=False)
            yield Choices()

    def on_mount(self) -> None:
        self._offer()

    def _offer(self) -> None:
        self.query_one(Choices).offer("crash", "", self._choices)

    @on(Choices.Chosen)
    def _chosen(self, event: Choices.Chosen) -> None:
        event.stop()
        if event.name == REPORT:
            self.query_one(".box", Vertical).border_subtitle = f"report: {self._report()}"
            self._offer()
        else:
            self.dismiss(event.name)

    def action_leave(self) -> None:
        """As the last choice."""
        self.dismiss(self._choices[-1].name)

"""The application without its screens: theme, keys, terminal handling, and what screens need of it.

Depends on `ChatBackend` alone.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakSet

from textual import events
from textual.app import App, SystemCommand
from textual.css.query import NoMatches
from textual.driver import Driver
from textual.screen import ModalScreen, Screen
from textual.theme import Theme
from textual.widgets import OptionList

from localllm.config import UiConfig
from localllm.conversation import clipboard
from localllm.conversation.attention import Attention
from localllm.conversation.session import Session
from localllm.paths import toml_beside
from localllm.terminal import no_color
from localllm.tui.keymap import Keymap
from localllm.tui.terminal_input import InputParser

HANGUP_S = 1.0  # between checks that the terminal still exists
GONE_S = 20.0
HANGUP_EXIT = 128 + signal.SIGHUP
ALWAYS = ("escape", "ctrl+c", "ctrl+q")  # keys that can only stop, close or leave
DRAIN_S = 0.1
DRAIN_STILL_S = 0.25  # between looks at the queue with animations off: the screen changes no more often
log = logging.getLogger("localllm.tui")


@dataclass(frozen=True)
class ScreenOptions:
    """How the full screen starts.

    name      the model to request from the backend; None for the session's model
    home      load nothing until a chat or a model is chosen
    log_file  the file that F12 shows
    encoding  the terminal's encoding; other characters are drawn as ASCII
    """

    ui: UiConfig = field(default_factory=UiConfig)
    keys: Mapping[str, str] = field(default_factory=dict)
    name: str | None = None
    home: bool = False
    offline: bool = False
    log_file: Path | None = None
    encoding: str = "utf-8"


class Frame(App[None]):
    """The base that every screen runs in.

    failure        the error shown to the user at the end, if the interface failed
    wants_restart  whether the command should start the interface again with this chat
    moving         whether animations are on
    ended          the exit code, if a signal or a lost terminal ended the program
    problems       settings that cannot be applied
    """

    TITLE = "localllm"
    HORIZONTAL_BREAKPOINTS = [(0, "-tiny"), (40, "-narrow"), (100, "-wide")]
    VERTICAL_BREAKPOINTS = [(0, "-low"), (12, "-short"), (20, "-high")]

    def __init__(self, session: Session, options: ScreenOptions | None = None) -> None:
        self.session, self.options = session, options or ScreenOptions()
        ui = self.options.ui
        self._colorless = no_color()
        # set here, because Textual chooses between no color and grey at this point
        super().__init__(ansi_color=True if self._colorless else None)
        if self.options.encoding != "utf-8":
            from localllm.tui.ascii import Encodable

            self._filters.append(Encodable(self.options.encoding))
        session.copy = self.copy
        self.code_theme = ui.code_theme
        self.keymap = Keymap(ui.keys, self.options.keys)
        self.attention = Attention(ui.notify, self._to_terminal)
        self._unseen = WeakSet[Screen[Any]]()  # screens not drawn yet; one may already lie below another
        self._shown_at = 0.0
        self.failure: Exception | None = None
        self.wants_restart = False
        self.ended = 0
        still = ui.animations is False or (ui.animations == "auto" and "SSH_CONNECTION" in os.environ)
        self.moving = not still
        self.drain_s = DRAIN_STILL_S if still else DRAIN_S
        if still:
            self.animation_level = "none"
        self._apply_theme()
        self.problems = self.keymap.problems

    def _apply_theme(self) -> None:
        """Set the theme before the start: setting `theme` later would parse every style sheet again."""
        for name, colors in toml_beside(__file__, "themes.toml").items():
            self.register_theme(Theme(name, **colors))
        self.set_reactive(App.theme, "ansi-dark" if self._colorless else self.options.ui.theme)
        theme = self.current_theme
        self.add_class(f"-theme-{theme.name}", "-dark-mode" if theme.dark else "-light-mode", update=False)
        self.remove_class("-light-mode" if theme.dark else "-dark-mode", update=False)
        self._refresh_truecolor_filter(self.ansi_theme)
        self.stylesheet.set_variables(self.get_css_variables())

    def _build_driver(self, *args: Any, **options: Any) -> Driver:
        """Install our input parser: each of Textual's drivers uses the parser its module names."""
        driver = super()._build_driver(*args, **options)
        vars(sys.modules[type(driver).__module__])["XTermParser"] = InputParser
        return driver

    @property
    def size_classes(self) -> list[str]:
        """The size classes of a new screen, known before it is styled, so that nothing is styled twice."""
        breakpoints = ((self.size.width, self.HORIZONTAL_BREAKPOINTS), (self.size.height, self.VERTICAL_BREAKPOINTS))
        return [next(name for least, name in reversed(steps) if cells >= least) for cells, steps in breakpoints]

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """The width of the text column, for the style sheet."""
        column = self.options.ui.column
        return {"column": str(column + 4 if column else 1000)}

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """None of Textual's commands: the palette has our own."""
        return ()

    def push_screen(self, screen: Any, *args: Any, **options: Any) -> Any:
        """Push a screen; keys typed before it is drawn do not reach it."""
        pushed = super().push_screen(screen, *args, **options)
        if len(self.screen_stack) > 2:  # the first two are Textual's default screen and the chat
            self._unseen.add(self.screen)
            self.screen.call_after_refresh(self._screen_is_seen, self.screen)
        return pushed

    def _screen_is_seen(self, screen: Screen[Any]) -> None:
        self._unseen.discard(screen)
        self._shown_at = time.monotonic()

    async def on_event(self, event: events.Event) -> None:
        """Keep keys from screens that appeared after they were typed: letters go to the draft, others are dropped.

        A forwarded key comes back from a widget that did not use it; a screen may have appeared in the meantime.
        """
        if isinstance(event, events.Key):
            unseen = self.screen in self._unseen  # its widgets may not exist yet
            if (
                unseen
                and event.key != "ctrl+q"
                or (event.time < self._shown_at and len(self.screen_stack) > 2 and event.key not in ALWAYS)
            ):
                if event.character and event.is_printable and not event.is_forwarded:
                    self.typed_before(event.character)
                return
            if not event.is_forwarded:
                if event.key in ("pageup", "pagedown") and self._list_has_no_room():
                    return
                self.before_key(event)
        await super().on_event(event)

    def _list_has_no_room(self) -> bool:
        """Whether a key could reach a list of zero height, on which Textual fails to page."""
        on_top = isinstance(self.screen, ModalScreen)
        lists = (one for one in self.screen.query(OptionList) if on_top or one.has_focus)
        return any(not one.scrollable_content_region for one in lists)

    def typed_before(self, character: str) -> None:
        """Take a letter that was typed before the top screen appeared."""
        raise NotImplementedError

    def before_key(self, event: events.Key) -> None:
        """Make sure that a key reaches a visible widget that accepts it."""
        raise NotImplementedError

    def run(self, **options: Any) -> None:
        """Run; signals end the program like a key does: the terminal is restored and the chat is saved."""
        ours = (signal.SIGHUP, signal.SIGTERM)
        # the driver replaces the last two and never restores them: later they would draw without an event loop
        before = {number: signal.getsignal(number) for number in (*ours, signal.SIGTSTP, signal.SIGCONT)}
        for number in ours:
            if before[number] is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        try:
            super().run(**options)
        finally:
            self._check_terminal()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._loop is None:
            raise SystemExit(128 + number)
        self._loop.call_soon_threadsafe(self._end, 128 + number)

    def _end(self, code: int) -> None:
        self.ended = code
        self.exit(return_code=code)

    def watch_terminal(self) -> None:
        """Exit when the terminal goes away without SIGHUP: reading from it would spin forever."""
        if not self.is_headless:
            self.set_interval(HANGUP_S, self._check_terminal)

    def _check_terminal(self) -> None:
        if not _is_gone(0):
            return
        log.warning("the terminal is gone")
        signal.signal(signal.SIGCONT, lambda *_: None)  # follows SIGHUP; Textual would start again
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in filter(_is_gone, (0, 1)):
            os.dup2(nothing, stream)
        os.close(nothing)
        last_resort = threading.Timer(GONE_S, os._exit, (HANGUP_EXIT,))  # in case shutdown hangs on the terminal
        last_resort.daemon = True
        last_resort.start()
        self._end(HANGUP_EXIT)

    def _to_terminal(self, sequence: str) -> None:
        if self._driver is not None and not self.is_headless:
            self._driver.write(sequence)

    def copy(self, text: str) -> str:
        self._clipboard = text
        return clipboard.copy(text, self._to_terminal)

    def on_app_blur(self) -> None:
        self.attention.look(False)

    def on_app_focus(self) -> None:
        self.attention.look(True)

    def on_unmount(self) -> None:
        self.attention.end()

    def _handle_exception(self, error: Exception) -> None:
        """Log the traceback; `failure` becomes the user's message."""
        cause = getattr(error, "error", error)  # the exception inside a worker's error
        if not self.is_running and isinstance(cause, NoMatches):  # widgets go away first during shutdown
            return
        self.failure = error
        log.error("the interface failed", exc_info=error)
        super()._handle_exception(error)

    def _print_error_renderables(self) -> None:
        """Print nothing: the command that opened the interface prints one sentence instead."""
        self._exit_renderables.clear()


def _is_gone(descriptor: int) -> bool:
    """Whether the other end of a descriptor has hung up."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0))

"""The application: holds the backend and the settings, opens the chat screen, knows how to copy.

Built on `ChatBackend` alone. The backend is started after the first frame, so that the prompt can be typed into while
torch is imported.
"""

from __future__ import annotations

import logging
import os
import select
import threading

from textual.app import App
from textual.theme import Theme

from localllm.config import UiConfig
from localllm.request import ChatBackend
from localllm.terminal import gib, no_color
from localllm.tui import clipboard
from localllm.tui.conversation import Conversation
from localllm.tui.screens.chat import ChatScreen

DARK = Theme(
    name="localllm-dark",
    primary="#7aa2f7",
    secondary="#9d7cd8",
    accent="#ff9e64",
    foreground="#c8d0e8",
    background="#14161f",
    surface="#1a1d29",
    panel="#222637",
    success="#9ece6a",
    warning="#e0af68",
    error="#f7768e",
    dark=True,
)
HANGUP_S = 1.0
"""between two looks whether the terminal is still there"""
GONE_S = 5.0
HANGUP_EXIT = 129
DRAIN_S = 0.1
DRAIN_STILL_S = 0.25
"""Between two looks at the queue with animations off: nothing on the screen moves more often."""


class ChatApp(App[None]):
    """`chat` in a terminal."""

    CSS_PATH = "app.tcss"
    TITLE = "localllm"
    HORIZONTAL_BREAKPOINTS = [(0, "-tiny"), (40, "-narrow"), (100, "-wide")]
    VERTICAL_BREAKPOINTS = [(0, "-low"), (12, "-high")]
    ENABLE_COMMAND_PALETTE = True

    def __init__(
        self,
        backend: ChatBackend,
        conversation: Conversation,
        *,
        model: str | None = None,
        shown: str = "",
        ui: UiConfig | None = None,
        first_message: str = "",
        offline: bool = False,
    ) -> None:
        self._colorless = no_color()
        # said here, because Textual chooses at this moment between no colour and grey
        super().__init__(ansi_color=True if self._colorless else None)
        self.backend = backend
        self.conversation = conversation
        self.ui = ui or UiConfig()
        self.model = shown or model or ""
        self.offline = offline
        self._start_with = model
        self._first_message = first_message
        self._started = False
        self.failure: Exception | None = None
        still = self.ui.animations is False or (self.ui.animations == "auto" and "SSH_CONNECTION" in os.environ)
        self.moving = not still
        self.drain_s = DRAIN_STILL_S if still else DRAIN_S
        if still:
            self.animation_level = "none"

    def on_mount(self) -> None:
        """Colours, then the chat."""
        self.register_theme(DARK)
        wanted = "ansi-dark" if self._colorless else self.ui.theme
        self.theme = wanted if wanted in self.available_themes else "localllm-dark"
        self.push_screen(ChatScreen(self.conversation))
        if not self.is_headless:
            self.set_interval(HANGUP_S, self._watch_terminal)

    def _watch_terminal(self) -> None:
        """End with a terminal that went away without SIGHUP: reading from it would spin for ever."""
        poll = select.poll()
        poll.register(0, 0)
        if any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0)):
            logging.getLogger("localllm.tui").warning("the terminal is gone")
            last_resort = threading.Timer(GONE_S, os._exit, (HANGUP_EXIT,))  # if tidying up hangs on it
            last_resort.daemon = True
            last_resort.start()
            self.exit(return_code=HANGUP_EXIT)

    async def start_backend(self) -> None:
        """Begin to load: called once, when the first frame is out."""
        if self._started:
            return
        self._started = True
        self.backend.start(self._start_with)
        if self._first_message and isinstance(self.screen, ChatScreen):
            await self.screen.submit(self._first_message)

    def _handle_exception(self, error: Exception) -> None:
        """Put the traceback into the log; `failure` is what the user is told."""
        self.failure = error
        logging.getLogger("localllm.tui").error("the interface failed", exc_info=error)
        super()._handle_exception(error)

    def _print_error_renderables(self) -> None:
        """Nothing: the command that opened the interface says one sentence."""
        self._exit_renderables.clear()

    def copy(self, text: str) -> str:
        """Copy, and say how."""
        self._clipboard = text
        driver = self._driver
        return clipboard.copy(text, driver.write if driver is not None and not self.is_headless else lambda _: None)

    def stats_text(self, conversation: Conversation) -> str:
        """/stats."""
        facts = self.backend.facts()
        lines = [facts.truth_line or "no model is loaded yet"]
        if facts.weight_bytes:
            cached = f", {facts.pages_cached:,} cached" if facts.pages_cached else ""
            lines.append(
                f"weights {gib(facts.weight_bytes)} · KV {gib(facts.kv_bytes)} · pages {facts.pages_total:,}"
                f" ({facts.pages_free:,} free{cached})"
            )
        if conversation.summary:
            lines.append(conversation.summary)
        return "\n".join(lines)

"""The application: holds the backend, the chats and the settings, opens the chat screen, knows how to copy.

Built on `ChatBackend` alone. The backend is started after the first frame, so that the prompt can be typed into while
torch is imported.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from textual.app import App, SystemCommand
from textual.screen import Screen

from localllm._version import __version__
from localllm.config import Preset, UiConfig, load_config
from localllm.conversation import clipboard
from localllm.conversation.attachments import Attachment
from localllm.conversation.attention import Attention
from localllm.conversation.saver import Saver
from localllm.conversation.serving import OFF, Endpoint
from localllm.conversation.tree import Conversation
from localllm.errors import LocalLLMError
from localllm.interface import ChatBackend, Check, Failed
from localllm.terminal import clean_line, gib, no_color
from localllm.tui.downloads import Downloads
from localllm.tui.keys import KEYS, Keymap
from localllm.tui.screens.chat import ChatScreen
from localllm.tui.themes import DARK, LIGHT
from localllm.tui.widgets.home import Home

HANGUP_S = 1.0
"""between two looks whether the terminal is still there"""
GONE_S = 5.0
HANGUP_EXIT = 129
DRAIN_S = 0.1
DRAIN_STILL_S = 0.25
"""Between two looks at the queue with animations off: nothing on the screen moves more often."""


def _palette() -> type:
    from localllm.tui.palette import Everything

    return Everything


class ChatApp(App[None]):
    """`chat` in a terminal."""

    CSS_PATH = "app.tcss"
    TITLE = "localllm"
    HORIZONTAL_BREAKPOINTS = [(0, "-tiny"), (40, "-narrow"), (100, "-wide")]
    VERTICAL_BREAKPOINTS = [(0, "-low"), (12, "-high")]
    ENABLE_COMMAND_PALETTE = True
    COMMANDS: ClassVar[set[Any]] = {_palette}

    def __init__(
        self,
        backend: ChatBackend,
        conversation: Conversation,
        *,
        model: str | None = None,
        shown: str = "",
        ui: UiConfig | None = None,
        keys: Mapping[str, str] | None = None,
        presets: Mapping[str, Preset] | None = None,
        saver: Saver | None = None,
        first_message: str = "",
        files: Iterable[Attachment] = (),
        offline: bool = False,
        home: bool = False,
        log_file: Path | None = None,
        endpoint: Endpoint | None = None,
        serve: int | None = OFF,
        encoding: str = "utf-8",
    ) -> None:
        """The interface over `backend`.

        home       nothing is loaded before a chat or a model is chosen
        saver      where chats are kept; None keeps none
        log_file   what F12 shows
        endpoint   what /serve turns on and off
        encoding   the characters that the terminal takes; others are drawn as ASCII
        serve      the port to answer at from the start; None is the usual one
        """
        self._colorless = no_color()
        self.ui = ui or UiConfig()
        # said here, because Textual chooses at this moment between no colour and grey
        super().__init__(ansi_color=True if self._colorless else None)
        if encoding != "utf-8":
            from localllm.tui.ascii import Encodable

            self._filters.append(Encodable(encoding))
        self.backend = backend
        self.conversation = conversation
        self.keymap = Keymap(self.ui.keys, keys)
        self.presets = dict(presets or {})
        self.saver = saver or Saver(None)
        self.model = shown or model or ""
        self.offline = offline
        self.log_file = log_file
        self.endpoint = endpoint
        self.serves = serve
        """the port that is wished for, `OFF`, or None for the usual one"""
        self.starts_with_model = not home
        self.code_theme = self.ui.code_theme
        self.wants_restart = False
        """the command that opened the interface should start it again, with this chat"""
        self.downloads = Downloads(lambda text: self.chat.flash(text))
        self._start_with = model
        self._first_message = first_message
        self._files = list(files)
        self._started = False
        self.attention = Attention(self.ui.notify, self._to_terminal)
        self.failure: Exception | None = None
        still = self.ui.animations is False or (self.ui.animations == "auto" and "SSH_CONNECTION" in os.environ)
        self.moving = not still
        self.drain_s = DRAIN_STILL_S if still else DRAIN_S
        if still:
            self.animation_level = "none"
        self.problems: list[str] = []
        """settings that cannot be followed"""
        self._begin_with_theme()

    def _begin_with_theme(self) -> None:
        """Colours from the start: setting `theme` later would parse every style sheet a second time."""
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        wanted = "ansi-dark" if self._colorless else self.ui.theme
        known = wanted in self.available_themes
        if not known:
            near = get_close_matches(wanted, list(self.available_themes), 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            self.problems.append(f"ui.theme: there is no theme {clean_line(wanted)}{meant}")
        self.set_reactive(App.theme, wanted if known else "localllm-dark")
        theme = self.current_theme
        self.add_class(f"-theme-{theme.name}", "-dark-mode" if theme.dark else "-light-mode", update=False)
        self.remove_class("-light-mode" if theme.dark else "-dark-mode", update=False)
        self._refresh_truecolor_filter(self.ansi_theme)
        self.stylesheet.set_variables(self.get_css_variables())

    @property
    def chat(self) -> ChatScreen:
        """The chat screen, also below a modal one."""
        return next(screen for screen in self.screen_stack if isinstance(screen, ChatScreen))

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """The width of the text column, for the style sheet."""
        return {"column": str(self.ui.column + 4 if self.ui.column else 1000)}

    def on_mount(self) -> None:
        """Keys, then the chat."""
        self.set_keymap({name: keys for name, keys in self.keymap.own.items() if KEYS[name].action})
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
        screen = self.chat
        if self.starts_with_model:
            self.backend.start(self._start_with)
        else:
            self.run_worker(self._look_around, thread=True, exit_on_error=False, group="home")
        for problem in (*self.problems, *self.keymap.problems):
            await screen.transcript.say(f"! {problem}", "warning")
        screen.prompt.load_history(screen.prompts.load())
        if self.conversation.exchanges:
            await screen.transcript.sync()
            last = self.conversation.exchanges[-1].usage
            screen.state.used_tokens = last.prompt_tokens + last.completion_tokens
        await screen.show_chats_if_wide()
        screen.attached += self._files
        if self._first_message:
            await screen.submit(self._first_message)

    def _look_around(self) -> None:
        """What the first screen shows, piece by piece; in a thread."""
        home = self.chat.query_one(Home)

        def show(what: Callable[[Any], None], reads: Callable[[], Any]) -> None:
            try:
                self.call_from_thread(what, reads())
            except LocalLLMError as error:
                self.call_from_thread(self.chat.flash, error.message)

        if self.saver.kept:
            show(home.show_chats, lambda: self.saver.run(lambda history: history.chats(limit=5)).result())
        show(home.show_models, self.backend.choices)
        show(home.show_machine, self._checks)

    def _checks(self) -> list[Check]:
        return self.backend.checks()

    def has_model(self, name: str) -> bool:
        """Whether a model of this name is among those the first screen has found here."""
        rows = self.chat.query_one(Home).models or ()
        return any(row.name == name and row.local and row.supported for row in rows)

    def reload_presets(self) -> None:
        """After one was saved."""
        self.presets = dict(load_config().presets)

    # --- what several screens do -------------------------------------------------------------------------------------

    def show_command(self, *words: str, then: Callable[[], Any] | None = None) -> None:
        """Show what another command of this program says; `then` is called when that is closed."""
        from localllm.tui.screens.viewer import Viewer

        self.push_screen(Viewer(f"localllm {' '.join(words)}", command=words), lambda _: then() if then else None)

    def everything(self) -> Iterator[tuple[str, str, Callable[[], Any]]]:
        """The palette's rows: name, meaning, what it does."""
        screen = self.chat
        named = {
            "Models": "models.open", "Chats": "chats.open", "New chat": "chat.new", "Parameters": "params.open",
            "Engine": "engine.open", "Sidebar": "ui.sidebar", "Thinking": "ui.thinking", "Help": "app.help",
            "Doctor": "app.doctor", "Log": "app.log", "Edit in $EDITOR": "prompt.editor",
            "Sent before": "prompt.search",
        }  # fmt: skip
        for name, key in named.items():
            meaning = f"{KEYS[key].meaning}  ({self.keymap.label(key)})"
            yield name, meaning, getattr(screen, f"action_{KEYS[key].action}")
        typed = {
            "Copy the last answer": "/copy", "Copy the last code block": "/copy code", "Answer again": "/regen",
            "Continue the answer": "/continue", "Take the last question back": "/undo",
            "Export as Markdown": "/export md", "Export as HTML": "/export html", "Export as JSON": "/export json",
            "Serve this model to other programs": "/serve", "Stop serving": "/serve off",
            "What fills the context": "/ctx", "Statistics": "/stats", "Plan": "/plan", "What is loaded": "/ps",
        }  # fmt: skip
        for name, command in typed.items():
            yield name, command, partial(screen.submit, command)
        yield "Theme", "colours", self.search_themes
        yield "Screenshot", "write an SVG of this screen", self.deliver_screenshot
        yield "Quit", "leave; the chat is saved", self.exit

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """None of Textual's: ours are in `everything`."""
        return ()

    def announce(self, what: str) -> None:
        """An answer has ended: call when nobody looks, as the settings say."""
        self.attention.call(self.conversation.shown_title, what)

    def _to_terminal(self, sequence: str) -> None:
        if self._driver is not None and not self.is_headless:
            self._driver.write(sequence)

    def on_app_blur(self) -> None:
        """The terminal's window is no longer in front."""
        self.attention.look(False)

    def on_app_focus(self) -> None:
        """The terminal's window is in front again."""
        self.attention.look(True)

    def on_unmount(self) -> None:
        """The end: the window's title is what it was."""
        self.attention.end()

    def restart(self) -> None:
        """Leave, to be started again with this chat: a device error can outlive everything else."""
        self.wants_restart = True
        self.exit()

    def report(self, failed: Failed) -> str:
        """What to paste into a bug report: no text of the conversation."""
        facts = self.backend.facts()
        return (
            f"localllm {__version__}\n{failed.message} [{failed.code}]\n{failed.why}\n{facts.run_summary}\n"
            f"log: {self.log_file}\nlocalllm doctor --report tells about the machine\n"
        )

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
        return clipboard.copy(text, self._to_terminal)

    def stats_text(self, conversation: Conversation) -> str:
        """/stats."""
        facts = self.backend.facts()
        lines = [facts.run_summary or "no model is loaded yet"]
        if facts.weight_bytes:
            cached = f", {facts.pages_cached:,} cached" if facts.pages_cached else ""
            lines.append(
                f"weights {gib(facts.weight_bytes)} · KV {gib(facts.kv_bytes)} · pages {facts.pages_total:,}"
                f" ({facts.pages_free:,} free{cached})"
            )
        if conversation.summary:
            lines.append(conversation.summary)
        return "\n".join(lines)

"""The application: the frame with the chat screen in it."""

from __future__ import annotations

from typing import Any, ClassVar

from textual import events

from localllm.tui.chat.screen import ChatScreen
from localllm.tui.frame import Frame
from localllm.tui.keymap import KEYS
from localllm.tui.palette import Everything


class ChatApp(Frame):
    """`chat` in a terminal."""

    CSS_PATH = "app.tcss"
    COMMANDS: ClassVar[set[Any]] = {Everything}

    @property
    def chat(self) -> ChatScreen:
        """The chat screen, even below a modal one."""
        return next(screen for screen in self.screen_stack if isinstance(screen, ChatScreen))

    def exit(self, *args: Any, **options: Any) -> None:
        """Exit, keeping a partial answer."""
        if self.is_running:
            self.chat.give_up()
        super().exit(*args, **options)

    def typed_before(self, character: str) -> None:
        self.chat.prompt.insert(character)

    def before_key(self, event: events.Key) -> None:
        if isinstance(self.screen, ChatScreen):
            self.screen.settle_focus()
            if event.character and event.is_printable:
                self.screen.before_letter()

    def on_mount(self) -> None:
        self.set_keymap({name: keys for name, keys in self.keymap.own.items() if KEYS[name].action})
        screen = ChatScreen(self.session)
        screen.add_class(*self.size_classes, update=False)
        self.push_screen(screen)
        self.watch_terminal()

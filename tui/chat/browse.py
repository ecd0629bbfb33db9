"""Browse mode: a cursor on messages, and single-key actions on the message under it."""

from __future__ import annotations

import time
from functools import partialmethod
from inspect import isawaitable

from localllm.conversation.markdown import code_blocks
from localllm.conversation.session import write_new
from localllm.conversation.tree import Exchange
from localllm.errors import ConfigError
from localllm.terminal import clean_line
from localllm.tui.screens.dialogs import AskScreen
from localllm.tui.screens.viewer import Viewer
from localllm.tui.widgets.messages import AssistantMessage, UserMessage

from .turns import Turns

Turn = UserMessage | AssistantMessage
TWICE_S = 0.6  # two presses of Esc within this time edit the last question


class Browse:
    """The cursor; inactive until `enter`."""

    def __init__(self, screen: Turns) -> None:
        self._screen = screen
        self.at: Turn | None = None
        self.wanted = ""  # the search text in this chat
        self._code = -1
        self._entered = 0.0
        self._armed: Turn | None = None

    @property
    def active(self) -> bool:
        return self.at is not None

    def enter(self, step: int = 0) -> bool:
        """Put the cursor on a message: its last one moved by `step`, or the last message. False when there is none."""
        messages = self._screen.transcript.messages
        if not messages:
            return False
        if not self.active:
            self._entered = time.monotonic()
        place = messages.index(self.at) + step if self.active and self.at in messages else len(messages) - 1
        self._screen.transcript.focus()
        self._put(messages[max(0, min(place, len(messages) - 1))])
        return True

    def leave(self) -> None:
        self.unmark()
        self._screen.prompt.focus()

    def unmark(self) -> None:
        self._put(None)

    def _put(self, message: Turn | None) -> None:
        if self.at is not None:
            self.at.remove_class("-at")
        self.at, self._code, self._armed = message, -1, None
        if message is not None:
            message.add_class("-at")
            message.scroll_visible(animate=False)

    async def key(self, key: str) -> bool:
        """Handle a key. False for a key without meaning here; a letter then goes to the prompt."""
        screen = self._screen
        name = screen.frame.keymap.browse().get(key, "")
        if key == "ctrl+z":  # in the prompt this is undo
            screen.app.action_suspend_process()
        elif key == "escape" and time.monotonic() - self._entered < TWICE_S and not screen.prompt.text:
            self.leave()
            if screen.conversation.exchanges:
                screen.edit(screen.conversation.exchanges[-1], True)
        elif name == "browse.leave":
            self.leave()
        elif name and self.at is not None:
            done = getattr(self, f"_do_{name.removeprefix('browse.')}")(self.at)
            if isawaitable(done):
                await done
        elif key in ("pageup", "pagedown"):
            getattr(screen.transcript, f"scroll_page_{key.removeprefix('page')}")(animate=False)
        else:
            return False
        return True

    async def _do_move_up(self, at: Turn) -> None:
        if at is self._screen.transcript.messages[0]:
            await self._screen.transcript.load_earlier()
        self.enter(-1)

    def _do_move_down(self, at: Turn) -> None:
        self.enter(1)

    async def _do_first(self, at: Turn) -> None:
        await self._screen.transcript.load_earlier()
        self._put(self._screen.transcript.messages[0])

    def _do_last(self, at: Turn) -> None:
        self._put(self._screen.transcript.messages[-1])
        self._screen.transcript.anchor()

    @property
    def text(self) -> str:
        if self.at is None:
            return ""
        return self.at.exchange.user if isinstance(self.at, UserMessage) else self.at.exchange.text

    def _do_copy(self, at: Turn) -> None:
        self._screen.flash(f"message: {self._screen.session.copy(self.text)}")

    def _blocks(self) -> list[str]:
        blocks = code_blocks(self.text)
        if not blocks:
            self._screen.flash("this message has no code block")
        return blocks

    def _do_code(self, at: Turn) -> None:
        if blocks := self._blocks():
            self._code = (self._code + 1) % len(blocks)
            how = self._screen.session.copy(blocks[self._code])
            self._screen.flash(f"code block {self._code + 1} of {len(blocks)}: {how}")

    def _do_save(self, at: Turn) -> None:
        if not (blocks := self._blocks()):
            return
        code = blocks[max(0, self._code)]

        def write(path: str | None) -> None:
            if path and path.strip():
                try:
                    self._screen.flash(write_new(path.strip(), code))
                except ConfigError as error:
                    self._screen.flash(f"{error.message}; {error.hint}")

        self._screen.app.push_screen(AskScreen("Write code block to", "path"), write)

    def _do_edit(self, at: Turn) -> None:
        self.leave()
        self._screen.edit(at.exchange, isinstance(at, UserMessage))

    async def _do_again(self, at: Turn) -> None:
        async with self._screen.change():
            if self._screen.may_change():
                self.leave()
                await self._screen.ask_again(self._screen.conversation.again(at.exchange))

    async def _do_branch(self, at: Turn) -> None:
        async with self._screen.change():
            if self._screen.may_change():
                self.leave()
                await self._screen.branch(at.exchange)

    async def _step(self, at: Turn, step: int) -> None:
        talk, transcript = self._screen.conversation, self._screen.transcript
        of_question = isinstance(at, UserMessage)
        async with self._screen.changing:
            if not self._screen.may_change():
                return
            if talk.place(at.exchange, of_question)[1] < 2:
                self._screen.flash("this message has no other branch")
                return
            other = talk.step(at.exchange, step, of_question)
            self.at = None
            await transcript.sync()
            self._screen.keep()
        found = [m for m in transcript.messages if m.exchange is other]
        self._put(found[0 if of_question else -1] if found else None)
        transcript.focus()

    _do_previous, _do_next = partialmethod(_step, step=-1), partialmethod(_step, step=1)

    def _do_fold(self, at: Turn) -> None:
        if isinstance(at, AssistantMessage) and at.exchange.reasoning:
            at.thought.toggle()

    def _do_raw(self, at: Turn) -> None:
        self._screen.app.push_screen(Viewer("Raw message", self.text))

    async def _do_delete(self, at: Turn) -> None:
        async with self._screen.changing:
            if not self._screen.may_change():
                return
            if self._armed is not at:
                self._armed = at
                self._screen.flash("press d again to remove this turn and everything after it")
                return
            self._screen.conversation.remove(at.exchange)
            self.at = None
            await self._screen.transcript.sync()
            self._screen.keep()
        if not self.enter():
            self.leave()

    def _do_search(self, at: Turn) -> None:
        def found(text: str | None) -> None:
            self.wanted = (text or "").casefold()
            if self.wanted:
                self._screen.call_later(self._find, self.at, -1)

        self._screen.app.push_screen(AskScreen("Search in this chat", "text", self.wanted), found)

    async def _find(self, at: Turn | None, step: int) -> None:
        """Go to the next (1) or previous (-1) message that matches the search."""
        screen, turns = self._screen, self._screen.conversation.exchanges
        places = [(n, part) for n, one in enumerate(turns) for part in (0, 1) if self.wanted in _parts(one)[part]]
        if not self.wanted or not places:
            screen.flash(f"“{clean_line(self.wanted)}” is not in this chat" if self.wanted else "press / to search")
            return
        here = (turns.index(at.exchange), int(isinstance(at, AssistantMessage))) if at is not None else (1 << 60, 0)
        later, earlier = [p for p in places if p > here], [p for p in places if p < here]
        found = (later or places)[0] if step > 0 else (earlier or places)[-1]
        exchange = turns[found[0]]
        await screen.transcript.reveal(exchange)
        for message in screen.transcript.messages:
            if message.exchange is exchange and isinstance(message, AssistantMessage) == bool(found[1]):
                screen.transcript.focus()
                self._put(message)
        screen.flash(f"{places.index(found) + 1} of {len(places)}")

    _do_search_next, _do_search_back = partialmethod(_find, step=1), partialmethod(_find, step=-1)


def _parts(exchange: Exchange) -> tuple[str, str]:
    return exchange.user.casefold(), exchange.text.casefold()

"""What the parts of the chat screen share: its state, by name and type, and saying something in the status line.

`ChatScreen` is put together from parts, because in one file it would be too long to read: `actions` (keys), `saved`
(chats on disk), `stream` (events of the backend), `chat` (layout and turns).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from textual.screen import Screen

from localllm.conversation.attachments import Attachment
from localllm.conversation.tree import Conversation, Exchange
from localllm.history import PromptHistory
from localllm.terminal import clean_line
from localllm.tui.widgets.engine import Turns
from localllm.tui.widgets.messages import AssistantMessage, UserMessage
from localllm.tui.widgets.prompt import PromptArea
from localllm.tui.widgets.status import State
from localllm.tui.widgets.transcript import Transcript

if TYPE_CHECKING:
    from localllm.tui.app import ChatApp

    from .browse import Browse
    from .questions import Questions
    from .serving import Serving

AGAIN_S = 2.0
"""A second Ctrl+C within this time quits."""


class Parts(Screen[None]):
    """The state. Set by `ChatScreen`."""

    conversation: Conversation
    phase: str
    waiting: deque[tuple[Exchange, UserMessage]]
    current: tuple[int, AssistantMessage] | None
    editing: tuple[Exchange, bool] | None
    side: tuple[int, list[str]] | None
    attached: list[Attachment]
    browse: Browse
    questions: Questions
    serving: Serving
    turns: Turns
    state: State
    changing: asyncio.Lock
    prompts: PromptHistory
    _message = ""
    _message_until = 0.0
    _interrupted_at = -AGAIN_S

    if TYPE_CHECKING:  # what the screen has

        @property
        def chat_app(self) -> ChatApp: ...
        @property
        def transcript(self) -> Transcript: ...
        @property
        def prompt(self) -> PromptArea: ...
        @property
        def can_go_on(self) -> bool: ...
        def refresh_lines(self) -> None: ...
        def show_home(self, shown: bool) -> None: ...
        def keep(self, *exchanges: Exchange) -> None: ...
        def give_up(self) -> None: ...
        async def load(self, name: str, changes: Mapping[str, Any] | None = None) -> None: ...
        async def next_turn(self) -> None: ...
        async def clear(self) -> None: ...
        async def open_chat(self, chat_id: str) -> None: ...
        def focus_home(self) -> None: ...

    # --- saying something --------------------------------------------------------------------------------------------

    def flash(self, text: str, seconds: float = 4.0) -> None:
        """Say something in the status line for a moment."""
        self._message, self._message_until = clean_line(text), time.monotonic() + seconds
        self.refresh_lines()

    @property
    def message(self) -> str:
        """What is being said in the status line; empty when its time is over."""
        if time.monotonic() >= self._message_until:
            self._message = ""
        return self._message

    @property
    def flashing(self) -> bool:
        """Whether a message's time has just run out: the line must be drawn once more."""
        return bool(self._message) and time.monotonic() >= self._message_until

    def may_change(self) -> bool:
        """Whether the branch may be changed now; says why not."""
        if self.current is None and not self.waiting and self.side is None:
            return True
        self.flash(f"{self.chat_app.keymap.label('chat.stop')} stops the answer first")
        return False

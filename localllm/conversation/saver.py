"""Saves chats from its own thread, so that a slow or locked disk never blocks the interface.

Data that could not be written is kept and retried with the next write; meanwhile `problem` says what is wrong.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from localllm.conversation.storage import saved_chat, saved_messages
from localllm.conversation.tree import Conversation, Exchange
from localllm.errors import ConfigError, LocalLLMError
from localllm.history.records import SavedChat, SavedMessage

if TYPE_CHECKING:
    from localllm.history.store import History

log = logging.getLogger(__name__)
T = TypeVar("T")
AUTOSAVE_S = 1.0  # between writes of a streaming answer


class Saver:
    """Reads and writes of one `History`, in order.

    opens    called in the thread; None: chats are not saved
    problem  why chats cannot be saved at the moment
    notice   what happened when the database was opened; shown once
    """

    def __init__(self, opens: Callable[[], History] | None) -> None:
        self.problem = self.notice = ""
        self.kept = opens is not None
        self._opens = opens
        self._history: History | None = None
        self._jobs: queue.SimpleQueue[tuple[Callable[[History], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._chats: dict[str, tuple[SavedChat, dict[int, SavedMessage]]] = {}
        self._removed: list[int] = []
        self._questions: dict[int, SavedMessage] = {}  # as saved, to skip unchanged ones: they may hold whole files
        self._thread: threading.Thread | None = None

    def save(self, conversation: Conversation, *exchanges: Exchange) -> Future[None] | None:
        """Save the chat and these turns in their present state. None when chats are not saved."""
        if not self.kept or not conversation.roots:
            return None
        chat = saved_chat(conversation)
        messages = [replace(m, chat_id=chat.id) for one in exchanges for m in saved_messages(one)]
        removed, conversation.removed = conversation.removed, []

        def write(history: History) -> None:
            _, waiting = self._chats.get(chat.id, (chat, {}))
            changed = {message.id: message for message in messages if self._questions.get(message.id) != message}
            self._chats[chat.id] = chat, waiting | changed
            self._removed += removed
            self._write(history)

        return self.run(write)

    def _write(self, history: History) -> None:
        for chat, messages in list(self._chats.values()):
            history.save(chat, list(messages.values()))
            self._questions |= {one.id: one for one in messages.values() if one.role == "user"}
            del self._chats[chat.id]
        if self._removed:
            history.remove_messages(self._removed)
            for gone in self._removed:
                self._questions.pop(gone, None)
            self._removed = []
        self.problem = ""

    def run(self, work: Callable[[History], T]) -> Future[T]:
        """Call `work` in the thread. The future fails with a LocalLLMError when the database cannot be used."""
        future: Future[T] = Future()
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="history", daemon=True)
            self._thread.start()
        self._jobs.put((work, future))
        return future

    def close(self, wait_s: float = 10.0) -> None:
        """Write what is left, then end the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(wait_s)
            self._thread = None

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, future = job
            if not future.set_running_or_notify_cancel():
                continue  # cancelled: nobody waits for it
            try:
                future.set_result(work(self._opened()))
            except Exception as error:
                if not isinstance(error, LocalLLMError):
                    log.exception("the history failed")
                self.problem = getattr(error, "message", "") or str(error)
                future.set_exception(error)
        if self._history is not None:
            try:
                self._write(self._history)
            except Exception:
                log.exception("the last turns could not be saved")
            self._history.close()
            self._history = None

    def _opened(self) -> History:
        if self._history is None:
            if self._opens is None:
                raise ConfigError("chats are not saved", "drop --no-save")
            self._history = self._opens()
            if self._history.notice:
                log.warning("%s", self._history.notice)
                self.notice = self._history.notice
        return self._history

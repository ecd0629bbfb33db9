"""Saved chats by the name that a user types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localllm.conversation.tree import Conversation
    from localllm.history.records import SavedChat
    from localllm.history.store import History


def find(history: History, name: str) -> SavedChat:
    """A chat by the beginning of its id, or `last`. Raises ChatNotFound."""
    latest = history.chats(limit=1) if name == "last" else []
    return latest[0] if latest else history.find(name)


def load_chat(name: str, sampling: dict[str, Any]) -> Conversation:
    """A chat as it was; `sampling` is filled with what it had set. Raises ChatNotFound, HistoryError."""
    from localllm.conversation.storage import restored
    from localllm.history.store import History

    with History() as history:
        chat = find(history, name)
        return restored(chat, history.messages(chat.id), sampling)

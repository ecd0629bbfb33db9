"""Saved conversations: SQLite with full-text search, exports, imports, and the prompts typed before.

A chat is a tree of messages. Every write is one transaction; what was saved survives a kill of the process. Knows
nothing of models, engines or screens. Its names load when they are used: the interface paints before SQLite is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .database import HistoryError
    from .export import as_html, as_json, as_markdown
    from .importing import read_export
    from .prompts import PromptHistory
    from .records import Hit, SavedChat, SavedMessage, active_path, new_chat_id, new_message_id
    from .store import History

_WHERE = {
    "HistoryError": "database",
    "as_html": "export",
    "as_json": "export",
    "as_markdown": "export",
    "read_export": "importing",
    "PromptHistory": "prompts",
    "Hit": "records",
    "SavedChat": "records",
    "SavedMessage": "records",
    "active_path": "records",
    "new_chat_id": "records",
    "new_message_id": "records",
    "History": "store",
}

__all__ = [
    "History",
    "HistoryError",
    "Hit",
    "PromptHistory",
    "SavedChat",
    "SavedMessage",
    "active_path",
    "as_html",
    "as_json",
    "as_markdown",
    "new_chat_id",
    "new_message_id",
    "read_export",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_WHERE[name]}", __name__), name)

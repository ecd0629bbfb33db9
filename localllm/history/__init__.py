"""Saved conversations: SQLite with full-text search, exports, imports, and the prompts typed before.

A chat is a tree of messages. Every write is one transaction; what was saved survives a kill of the process. Knows
nothing of models, engines or screens.
"""

from .database import HistoryError
from .export import as_html, as_json, as_markdown
from .importing import read_export
from .prompts import PromptHistory
from .records import Hit, SavedChat, SavedMessage, active_path, new_chat_id, new_message_id
from .store import History

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

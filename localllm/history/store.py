"""The chats on disk: save, list, read, search, remove. One connection; methods may be called from any thread."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from localllm.errors import ModelNotFound
from localllm.paths import data_dir

from .database import explain, open_database, transaction
from .records import PARTIAL, STREAMING, Hit, SavedChat, SavedMessage, from_row

# columns in the order of the fields of SavedChat and SavedMessage; `_values` parses those marked [mapping]
_CHATS = (
    'SELECT c.id, c.title, c.model, c.system, c.params_json AS "params [mapping]", c.created, c.updated, c.leaf_id,'
    " (SELECT count(*) FROM messages m WHERE m.chat_id = c.id AND m.role <> 'system') FROM chats c "
)
_MESSAGES = (
    'SELECT id, chat_id, parent_id, role, content, reasoning, model, params_json AS "params [mapping]",'
    ' stats_json AS "stats [mapping]", created, status FROM messages '
)


class ChatNotFound(ModelNotFound):
    """No saved chat has this id."""

    number = 3


class History:
    """All saved chats.

    path   the database; by default the user's own. It is created if missing.

    `notice` tells the user what happened on opening. Raises HistoryError as `open_database` does; so does every method
    when the disk is full, another program holds the lock, or the file is damaged.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or data_dir() / "chats.db"
        self._lock = threading.RLock()
        self._connection, self.notice = open_database(self.path)
        self._writer = f"{os.getpid()}:{_started(os.getpid())}"
        with contextlib.suppress(Exception):  # a read-only file can still be read
            self._mark_abandoned()

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        with self._lock:
            self._connection.close()

    def __enter__(self) -> History:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                yield self._connection
            except sqlite3.Error as error:
                raise explain(error, self.path) from error

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._reading() as connection, transaction(connection):
            yield connection

    def _mark_abandoned(self) -> None:
        """Mark messages whose writer was killed as partial."""
        rows = self._connection.execute("SELECT DISTINCT writer FROM messages WHERE status = ?", (STREAMING,))
        dead = [writer for (writer,) in rows.fetchall() if not _is_alive(writer)]
        if dead:
            with self._writing() as connection:
                connection.executemany(
                    "UPDATE messages SET status = ? WHERE status = ? AND writer = ?",
                    [(PARTIAL, STREAMING, writer) for writer in dead],
                )

    # --- writing -----------------------------------------------------------------------------------------------------

    def save(self, chat: SavedChat, messages: Sequence[SavedMessage] = ()) -> None:
        """Write a chat and its new or changed messages in one transaction."""
        chat_row = _row(chat)
        del chat_row["num_messages"]
        rows = [_row(m) | {"writer": self._writer if m.status == STREAMING else ""} for m in messages]
        with self._writing() as connection:
            _upsert(connection, "chats", [chat_row], {"id", "created"})
            _upsert(connection, "messages", rows, {"id", "chat_id", "role", "created"})

    def remove(self, chat_id: str) -> None:
        """Remove a chat with all its messages; their text is overwritten in the file."""
        with self._reading() as connection:
            connection.execute("PRAGMA secure_delete = ON")
            with transaction(connection):
                connection.execute("DELETE FROM chats WHERE id = ?", (chat_id,))

    def remove_messages(self, message_ids: Sequence[int]) -> None:
        """Remove messages; their replies must be among them."""
        with self._writing() as connection:
            connection.executemany("DELETE FROM messages WHERE id = ?", [(one,) for one in message_ids])

    # --- reading -----------------------------------------------------------------------------------------------------

    def chats(self, limit: int = 1000, query: str = "") -> list[SavedChat]:
        """Chats, last changed first; with `query`, those with its words in title or text."""
        titled = "WHERE CAST(c.title AS TEXT) LIKE ? ESCAPE '\\' ORDER BY c.updated DESC LIMIT ?"
        found = {chat.id: chat for chat in self._chats(titled, f"%{_escaped(query.strip())}%", limit)}
        for chat_id in dict.fromkeys(hit.chat_id for hit in self.search(query, limit)):
            if chat_id not in found and len(found) < limit:
                found[chat_id] = self.chat(chat_id)
        return list(found.values())

    def _chats(self, which: str, *values: Any) -> list[SavedChat]:
        with self._reading() as connection:
            return [from_row(SavedChat, row) for row in connection.execute(_CHATS + which, values)]

    def chat(self, chat_id: str) -> SavedChat:
        """One chat by its full id. Raises ChatNotFound."""
        for chat in self._chats("WHERE c.id = ?", chat_id):
            return chat
        raise ChatNotFound(f"no chat has the id {chat_id}", "localllm logs list")

    def find(self, name: str) -> SavedChat:
        """The chat whose id starts with `name`; `last` is the one changed last. Raises ChatNotFound."""
        if name == "last":  # ids are hexadecimal
            if not (latest := self.chats(1)):
                raise ChatNotFound("no chat has been saved yet", "localllm chat")
            return latest[0]
        found = self._chats("WHERE c.id LIKE ? ESCAPE '\\' LIMIT 2", _escaped(name.lower()) + "%") if name else []
        if len(found) != 1:
            what = f"several chat ids start with {name!r}" if found else f"no chat id starts with {name!r}"
            raise ChatNotFound(what, "localllm logs list")
        return found[0]

    def messages(self, chat_id: str) -> list[SavedMessage]:
        """All messages of a chat, oldest first, all branches."""
        with self._reading() as connection:
            rows = connection.execute(_MESSAGES + "WHERE chat_id = ? ORDER BY created, rowid", (chat_id,))
            return [from_row(SavedMessage, row) for row in rows]

    def search(self, query: str, limit: int = 50) -> list[Hit]:
        """Messages with all words of `query`, questions before answers, then by relevance. Word prefixes match."""
        words = re.findall(r"\w+", query)
        if not words:
            return []
        match = " ".join(f'"{word}"*' for word in words)
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT m.chat_id, c.title, m.id, m.role, snippet(messages_fts, 0, char(2), char(3), '…', 16),"
                " m.created FROM messages_fts JOIN messages m ON m.id = messages_fts.rowid"
                " JOIN chats c ON c.id = m.chat_id WHERE messages_fts MATCH ?"
                " ORDER BY m.role <> 'user', bm25(messages_fts), m.created DESC LIMIT ?",
                (match, limit),
            ).fetchall()
            if not rows:  # to the index, scripts without spaces are one word
                rows = connection.execute(
                    "SELECT m.chat_id, c.title, m.id, m.role, substr(m.content, max(1, instr(m.content, ?1) - 30), 90),"
                    " m.created FROM messages m JOIN chats c ON c.id = m.chat_id WHERE m.content LIKE ?2 ESCAPE '\\'"
                    " AND m.status <> 'streaming'"
                    " ORDER BY m.role <> 'user', m.created DESC LIMIT ?3",
                    (query.strip(), f"%{_escaped(query.strip())}%", limit),
                ).fetchall()
        return [from_row(Hit, row) for row in rows]


def _upsert(connection: sqlite3.Connection, table: str, rows: Sequence[Mapping[str, Any]], fixed: set[str]) -> None:
    """Insert rows, or update those whose id exists, except for the `fixed` columns."""
    if not rows:
        return
    columns = list(rows[0])
    changed = ", ".join(f"{name} = excluded.{name}" for name in columns if name not in fixed)
    connection.executemany(
        f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join(f':{name}' for name in columns)})"
        f" ON CONFLICT (id) DO UPDATE SET {changed}",
        rows,
    )


def _row(record: SavedChat | SavedMessage) -> dict[str, Any]:
    """The columns of a record: mappings as JSON, text as SQLite can store it."""
    row = {}
    for name, value in ((f.name, getattr(record, f.name)) for f in fields(record)):
        if isinstance(value, Mapping):
            name, value = f"{name}_json", json.dumps(dict(value), ensure_ascii=False, default=str)
        row[name] = _text(value) if isinstance(value, str) else value
    return row


def _values(text: bytes) -> dict[str, Any]:
    """A stored mapping; a broken one becomes empty, so that its message survives."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


sqlite3.register_converter("mapping", _values)


def _text(text: str) -> str:
    """Text that SQLite can store: half a surrogate pair has no UTF-8."""
    return text.encode("utf-8", "replace").decode()


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")


def _started(pid: int) -> str:
    """A process's start time in kernel ticks, which tells apart processes with the same pid."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return ""


def _is_alive(writer: str) -> bool:
    pid, _, started = writer.partition(":")
    return pid.isdigit() and bool(started) and _started(int(pid)) == started

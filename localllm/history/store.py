"""The chats on disk: save, list, read, search, remove. One connection; every method may be called from any thread."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from localllm.errors import ModelNotFound
from localllm.paths import data_dir

from .database import explain, open_database, transaction
from .records import PARTIAL, STREAMING, Hit, SavedChat, SavedMessage

_CHAT = "c.id, c.title, c.model, c.system, c.params_json, c.created, c.updated, c.leaf_id"
_COUNT = "(SELECT count(*) FROM messages m WHERE m.chat_id = c.id AND m.role <> 'system')"


class ChatNotFound(ModelNotFound):
    """No saved chat of that name."""

    number = 3


class History:
    """All saved chats.

    path   the database; the user's own when None. It is made when it is not there.

    `notice` says what happened while opening, for the user. Raises HistoryError as `open_database` does; so does every
    method, when the disk is full, another program holds the lock, or the file is broken.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or data_dir() / "chats.db"
        self._lock = threading.RLock()
        self._connection, self.notice = open_database(self.path)
        self._writer = f"{os.getpid()}:{_started(os.getpid())}"
        with contextlib.suppress(Exception):  # a read-only file can still be read
            self._mark_left_behind()

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

    def _mark_left_behind(self) -> None:
        """Messages whose writer was killed are partial ones."""
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
        """Write a chat and the messages that are new or have changed: all of it, or nothing."""
        with self._writing() as connection:
            connection.execute(
                "INSERT INTO chats (id, title, model, system, params_json, created, updated, leaf_id)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET title = excluded.title,"
                " model = excluded.model, system = excluded.system, params_json = excluded.params_json,"
                " updated = excluded.updated, leaf_id = excluded.leaf_id",
                (
                    chat.id, _text(chat.title), _text(chat.model), _text(chat.system), _json(chat.params),
                    chat.created, chat.updated, chat.leaf_id,
                ),
            )  # fmt: skip
            connection.executemany(
                "INSERT INTO messages (id, chat_id, parent_id, role, content, reasoning, model, params_json,"
                " stats_json, created, status, writer) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (id) DO UPDATE SET parent_id = excluded.parent_id, content = excluded.content,"
                " reasoning = excluded.reasoning, model = excluded.model, params_json = excluded.params_json,"
                " stats_json = excluded.stats_json, status = excluded.status, writer = excluded.writer",
                [self._row(message) for message in messages],
            )

    def _row(self, message: SavedMessage) -> tuple[Any, ...]:
        writer = self._writer if message.status == STREAMING else ""
        return (
            message.id, message.chat_id, message.parent_id, message.role, _text(message.content),
            _text(message.reasoning), _text(message.model), _json(message.params), _json(message.stats),
            message.created, message.status, writer,
        )  # fmt: skip

    def rename(self, chat_id: str, title: str) -> None:
        with self._writing() as connection:
            connection.execute("UPDATE chats SET title = ? WHERE id = ?", (_text(title), chat_id))

    def remove(self, chat_id: str) -> None:
        """Remove a chat with all its messages; their text is overwritten in the file."""
        with self._reading() as connection:
            connection.execute("PRAGMA secure_delete = ON")
            with transaction(connection):
                connection.execute("DELETE FROM chats WHERE id = ?", (chat_id,))

    def remove_messages(self, message_ids: Sequence[int]) -> None:
        """Remove messages; what answers them is to be among them."""
        with self._writing() as connection:
            connection.executemany("DELETE FROM messages WHERE id = ?", [(one,) for one in message_ids])

    # --- reading -----------------------------------------------------------------------------------------------------

    def chats(self, limit: int = 1000, query: str = "") -> list[SavedChat]:
        """Chats, the one changed last first; with `query` those that hold its words in title or text."""
        if not query.strip():
            with self._reading() as connection:
                rows = connection.execute(
                    f"SELECT {_CHAT}, {_COUNT} FROM chats c ORDER BY c.updated DESC LIMIT ?", (limit,)
                )
                return [_chat(row) for row in rows.fetchall()]
        wanted = dict.fromkeys(hit.chat_id for hit in self.search(query, limit))
        with self._reading() as connection:
            like = f"%{_escaped(query.strip())}%"
            rows = connection.execute(
                f"SELECT {_CHAT}, {_COUNT} FROM chats c WHERE c.title LIKE ? ESCAPE '\\' ORDER BY c.updated DESC"
                " LIMIT ?",
                (like, limit),
            )
            found = {chat.id: chat for chat in map(_chat, rows.fetchall())}
        for chat_id in wanted:
            if chat_id not in found and len(found) < limit:
                found[chat_id] = self.chat(chat_id)
        return list(found.values())

    def chat(self, chat_id: str) -> SavedChat:
        """One chat by its whole id. Raises ChatNotFound."""
        with self._reading() as connection:
            row = connection.execute(f"SELECT {_CHAT}, {_COUNT} FROM chats c WHERE c.id = ?", (chat_id,)).fetchone()
        if row is None:
            raise ChatNotFound(f"there is no chat {chat_id}", "localllm logs list")
        return _chat(row)

    def find(self, name: str) -> SavedChat:
        """The chat whose id begins with `name`. Raises ChatNotFound when there is none, or more than one."""
        with self._reading() as connection:
            rows = connection.execute(
                f"SELECT {_CHAT}, {_COUNT} FROM chats c WHERE c.id LIKE ? ESCAPE '\\' LIMIT 2",
                (_escaped(name.lower()) + "%",),
            ).fetchall()
        if len(rows) != 1 or not name:
            what = f"the ids of several chats begin with {name!r}" if rows and name else f"there is no chat {name!r}"
            raise ChatNotFound(what, "localllm logs list")
        return _chat(rows[0])

    def latest(self) -> SavedChat | None:
        found = self.chats(limit=1)
        return found[0] if found else None

    def messages(self, chat_id: str) -> list[SavedMessage]:
        """All messages of a chat, oldest first, all branches."""
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT id, chat_id, parent_id, role, content, reasoning, model, params_json, stats_json, created,"
                " status FROM messages WHERE chat_id = ? ORDER BY created, rowid",
                (chat_id,),
            )
            return [_message(row) for row in rows.fetchall()]

    def search(self, query: str, limit: int = 50) -> list[Hit]:
        """Messages with all words of `query`; questions before answers, then by relevance. Half words count."""
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
            if not rows:  # scripts without spaces are one word to the index
                rows = connection.execute(
                    "SELECT m.chat_id, c.title, m.id, m.role, substr(m.content, max(1, instr(m.content, ?1) - 30), 90),"
                    " m.created FROM messages m JOIN chats c ON c.id = m.chat_id WHERE m.content LIKE ?2 ESCAPE '\\'"
                    " AND m.status <> 'streaming'"
                    " ORDER BY m.role <> 'user', m.created DESC LIMIT ?3",
                    (query.strip(), f"%{_escaped(query.strip())}%", limit),
                ).fetchall()
        return [Hit(*row) for row in rows]

    def check(self) -> str:
        """ "ok", or what SQLite finds wrong with the whole file."""
        with self._reading() as connection:
            return str(connection.execute("PRAGMA integrity_check(1)").fetchone()[0])


def _chat(row: Sequence[Any]) -> SavedChat:
    identity, title, model, system, params, created, updated, leaf, count = row
    return SavedChat(identity, title, model, system, _values(params), created, updated, leaf, count)


def _message(row: Sequence[Any]) -> SavedMessage:
    identity, chat, parent, role, content, reasoning, model, params, stats, created, status = row
    return SavedMessage(
        identity, chat, parent, role, content, reasoning, model, _values(params), _values(stats), created, status
    )


def _values(text: str) -> dict[str, Any]:
    """A stored mapping; a broken one is empty, the message is worth more."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _json(values: Mapping[str, Any]) -> str:
    return _text(json.dumps(dict(values), ensure_ascii=False, default=str))


def _text(text: str) -> str:
    """What SQLite can store: half a surrogate pair cannot be UTF-8."""
    return text.encode("utf-8", "replace").decode()


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")


def _started(pid: int) -> str:
    """When a process began, in the kernel's ticks: a number that is used again gets another one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return ""


def _is_alive(writer: str) -> bool:
    pid, _, started = writer.partition(":")
    return pid.isdigit() and bool(started) and _started(int(pid)) == started

"""Opens the database of chats: schema, versions, and what to do with one that is damaged, foreign, newer or locked.

A damaged file is never deleted: it is renamed, and a new one begun. `PRAGMA synchronous=FULL` in WAL mode: what a
transaction wrote survives a kill and a power cut.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from localllm.errors import LocalLLMError

VERSION = 1
APPLICATION = 0x6C6C6D31  # in the file's header, so that another program's database is told apart
BUSY_S = 10.0  # how long a write waits for another process
CHECK_BYTES = 64 << 20  # a larger file is not read as a whole when it is opened

_SCHEMA = """
CREATE TABLE chats (
    id TEXT PRIMARY KEY,
    title TEXT NOT NULL DEFAULT '',
    model TEXT NOT NULL DEFAULT '',
    system TEXT NOT NULL DEFAULT '',
    params_json TEXT NOT NULL DEFAULT '{}',
    created REAL NOT NULL,
    updated REAL NOT NULL,
    leaf_id INTEGER
);
CREATE INDEX chats_by_time ON chats (updated DESC);
CREATE TABLE messages (
    id INTEGER PRIMARY KEY,
    chat_id TEXT NOT NULL REFERENCES chats (id) ON DELETE CASCADE,
    parent_id INTEGER,
    role TEXT NOT NULL,
    content TEXT NOT NULL,
    reasoning TEXT NOT NULL DEFAULT '',
    tool_calls TEXT NOT NULL DEFAULT '[]',
    model TEXT NOT NULL DEFAULT '',
    params_json TEXT NOT NULL DEFAULT '{}',
    stats_json TEXT NOT NULL DEFAULT '{}',
    created REAL NOT NULL,
    status TEXT NOT NULL DEFAULT 'done',
    writer TEXT NOT NULL DEFAULT ''
);
CREATE INDEX messages_by_chat ON messages (chat_id, created);
CREATE INDEX messages_streaming ON messages (status) WHERE status = 'streaming';
CREATE VIRTUAL TABLE messages_fts USING fts5 (content, tokenize = "unicode61 remove_diacritics 2", prefix = '2 3');
CREATE TRIGGER messages_added AFTER INSERT ON messages WHEN new.status <> 'streaming' BEGIN
    INSERT INTO messages_fts (rowid, content) VALUES (new.id, new.content);
END;
CREATE TRIGGER messages_changed AFTER UPDATE OF content, status ON messages WHEN new.status <> 'streaming' BEGIN
    DELETE FROM messages_fts WHERE rowid = old.id;
    INSERT INTO messages_fts (rowid, content) VALUES (new.id, new.content);
END;
CREATE TRIGGER messages_removed AFTER DELETE ON messages BEGIN
    DELETE FROM messages_fts WHERE rowid = old.id;
END;
"""


class HistoryError(LocalLLMError):
    """The database of chats cannot be read or written."""

    number = 3


class Damaged(Exception):
    """The file is no database of ours, or is broken."""


def open_database(path: Path) -> tuple[sqlite3.Connection, str]:
    """A connection, and what the user should be told ("" when all is well).

    Raises HistoryError when the file cannot be opened, is locked for long, or was written by a newer version.
    """
    with _explained(path):
        _make_folder(path)
        try:
            return _open(path), ""
        except Damaged:
            pass
        with _alone(path):  # of several processes that find the damage, one sets the file aside
            try:
                return _open(path), ""
            except Damaged as damage:
                moved = _set_aside(path)
                text = f"{path.name} is damaged ({damage}); it is kept as {moved.name}, and a new one was begun"
                return _open(path), text


def _make_folder(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists() and not path.is_symlink():
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))  # before SQLite makes it readable for all


def _open(path: Path) -> sqlite3.Connection:
    if path.exists() and not path.is_file():
        raise HistoryError(f"{path} is not a file", f"move it away: mv {path} {path}.old")
    # the connection is used by one thread at a time; the store's lock sees to it
    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        _prepare(connection, path)
    except BaseException as error:
        connection.close()
        if isinstance(error, sqlite3.DatabaseError) and is_damage(error):
            raise Damaged(str(error)) from error
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    connection.execute(f"PRAGMA busy_timeout = {int(BUSY_S * 1000)}")
    version = _number(connection, "user_version")
    tables = _number(connection, None)
    if version > VERSION:
        raise HistoryError(
            f"{path} was written by a newer localllm (its schema is {version}, this one knows {VERSION})",
            "update localllm, or move the file away",
            context={"path": str(path), "schema": version},
        )
    if tables and _number(connection, "application_id") != APPLICATION:
        raise Damaged("it is not a database of localllm")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    if version < VERSION:
        _migrate(connection)
    if path.stat().st_size <= CHECK_BYTES:
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise Damaged(str(found))


def _migrate(connection: sqlite3.Connection) -> None:
    """To this version, in one transaction: a kill leaves the old schema or the new one."""
    with transaction(connection):
        if _number(connection, "user_version") >= VERSION:
            return  # another process was faster
        for statement in _statements(_SCHEMA):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        connection.execute(f"PRAGMA user_version = {VERSION}")


def _statements(script: str) -> Iterator[str]:
    """The statements of a script; `executescript` would commit before it begins."""
    held = ""
    for line in script.splitlines(keepends=True):
        held += line
        if sqlite3.complete_statement(held):
            yield held
            held = ""


def _number(connection: sqlite3.Connection, pragma: str | None) -> int:
    query = f"PRAGMA {pragma}" if pragma else "SELECT count(*) FROM sqlite_master"
    return int(connection.execute(query).fetchone()[0])


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All or nothing. The write lock is taken at the beginning, so that waiting for it never fails half-way."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def is_damage(error: sqlite3.DatabaseError) -> bool:
    """Whether an error means that the file itself is broken."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    lock = os.open(path.with_name(path.name + ".lock"), os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _set_aside(path: Path) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    target = path.with_name(f"{path.name}.damaged-{stamp}")
    number = 0
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.damaged-{stamp}-{number}")
    os.rename(path, target)
    for tail in ("-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.rename(f"{path}{tail}", f"{target}{tail}")
    _make_folder(path)
    return target


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise explain(error, path) from error
    except OSError as error:
        raise HistoryError(
            f"{path} cannot be opened: {error.strerror or error}", f"make {path.parent} writable"
        ) from error


def explain(error: sqlite3.Error, path: Path) -> HistoryError:
    """What a user can do about an error of SQLite's."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return HistoryError(f"{path} is locked by another program", "close it, then try again")
    if code == sqlite3.SQLITE_FULL:
        return HistoryError(f"{path} cannot grow: the disk is full", "free some space")
    if code == sqlite3.SQLITE_READONLY:
        return HistoryError(f"{path} cannot be written", f"chmod u+w {path} {path.parent}")
    if code == sqlite3.SQLITE_CANTOPEN:
        return HistoryError(f"{path} cannot be opened", f"chmod u+rw {path}, or move it away")
    if isinstance(error, sqlite3.DatabaseError) and is_damage(error):
        return HistoryError(f"{path} is damaged ({error})", "start localllm chat again: the file is then set aside")
    return HistoryError(f"{path}: {error}", "see the log")

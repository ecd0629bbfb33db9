"""Opens the chat database: schema and versions, and handling of damaged, foreign, newer or locked files.

A damaged file is never deleted: it is renamed, and a new one is created. `PRAGMA synchronous=FULL` in WAL mode makes
transactions survive a kill and a power cut.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from localllm.errors import LocalLLMError

VERSION = 1
APPLICATION = 0x6C6C6D31  # in the file's header, to recognize another program's database
BUSY_S = 10.0  # how long a write waits for another process
CHECK_BYTES = 64 << 20  # larger files are not fully checked on opening
DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)  # error codes of a damaged file
# code -> (message, hint)
_LOCKED = ("{path} is locked by another program", "close it, then try again")
_FULL = ("{path} cannot grow: the disk is full", "free some space")
FULL_BYTES = 1 << 20  # with less free space than this, an I/O error means a full disk
_EXPLAINED = {
    sqlite3.SQLITE_BUSY: _LOCKED,
    sqlite3.SQLITE_LOCKED: _LOCKED,
    sqlite3.SQLITE_FULL: _FULL,
    sqlite3.SQLITE_IOERR: ("{path} cannot be read or written: {error}", "check the disk"),
    sqlite3.SQLITE_READONLY: ("{path} cannot be written", "chmod u+w {path} {folder}"),
    sqlite3.SQLITE_CANTOPEN: ("{path} cannot be opened", "chmod u+rw {path}, or move it away"),
    **dict.fromkeys(DAMAGE, ("{path} is damaged ({error})", "run `localllm chat` again: it sets the file aside")),
}


class HistoryError(LocalLLMError):
    """The chat database cannot be read or written."""

    number = 3


class Damaged(Exception):
    """The file is damaged, or not one of our databases."""


def open_database(path: Path) -> tuple[sqlite3.Connection, str]:
    """Open the database; return the connection and a notice for the user ("" when all is well).

    Raises HistoryError when the file cannot be opened, stays locked, or was written by a newer version.
    """
    try:
        _make_folder(path)
        with contextlib.suppress(Damaged):
            try:
                return _open(path), ""
            except sqlite3.Error as error:
                if not _is_full(error, path):
                    raise
                return _open(path, alone=True), "the disk is full: saved chats can be read, but none can be saved"
        with _exclusive_lock(path):  # if several processes find the damage, only one sets the file aside
            try:
                return _open(path), ""
            except Damaged as damage:
                moved = _set_aside(path)
                text = f"{path.name} was damaged ({damage}): it was renamed to {moved.name} and replaced by a new file"
                return _open(path), text
    except sqlite3.Error as error:
        raise explain(error, path) from error
    except OSError as error:
        why = error.strerror or error
        raise HistoryError(f"{path} cannot be opened: {why}", f"make {path.parent} writable") from error


def _make_folder(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists() and not path.is_symlink():
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))  # before SQLite creates it readable for everyone


def _open(path: Path, *, alone: bool = False) -> sqlite3.Connection:
    """`alone`: without the file in which processes share the index of the WAL, for which a full disk has no room."""
    if path.exists() and not path.is_file():
        raise HistoryError(f"{path} is not a file", f"mv {path} {path}.old")
    # used by one thread at a time; the store's lock ensures that
    connection = sqlite3.connect(
        path, timeout=BUSY_S, isolation_level=None, check_same_thread=False, detect_types=sqlite3.PARSE_COLNAMES
    )
    connection.text_factory = lambda text: text.decode("utf-8", "replace")  # one broken text must not hide the rest
    try:
        if alone:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        _prepare(connection, path)
    except BaseException as error:
        connection.close()
        if isinstance(error, sqlite3.Error) and _code(error) in DAMAGE:
            raise Damaged(str(error)) from error
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    version = _pragma(connection, "user_version")
    if version > VERSION:
        raise HistoryError(
            f"{path} was written by a newer localllm (schema {version}; this version supports {VERSION})",
            "update localllm, or move the file away",
            context={"path": str(path), "schema": version},
        )
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if tables and _pragma(connection, "application_id") != APPLICATION:
        raise Damaged("it is not a database of localllm")
    _write_ahead(connection)
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    if version < VERSION:
        _migrate(connection)
    if path.stat().st_size <= CHECK_BYTES:
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise Damaged(str(found))


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Switch to write-ahead logging. SQLite does not wait when several processes open a new file at once (it was busy
    in 9 of 1,800 openings by four threads), so this function does.
    """
    until = time.monotonic() + BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if _code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(0.01)


def _migrate(connection: sqlite3.Connection) -> None:
    """Migrate to this version in one transaction: a kill leaves either the old schema or the new one."""
    with transaction(connection):
        if _pragma(connection, "user_version") >= VERSION:
            return  # another process was faster
        schema = Path(__file__).with_name("schema.sql").read_text(encoding="utf-8")
        for statement in schema.split("\n\n"):  # `executescript` would commit first
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        connection.execute(f"PRAGMA user_version = {VERSION}")


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All or nothing. Takes the write lock at the start, so that waiting for it never fails half-way."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


@contextlib.contextmanager
def _exclusive_lock(path: Path) -> Iterator[None]:
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


def explain(error: sqlite3.Error, path: Path) -> HistoryError:
    """Turn an SQLite error into one that tells the user what to do."""
    code = _code(error)
    message, hint = _FULL if _is_full(error, path) else _EXPLAINED.get(code, ("{path}: {error}", "see the log"))
    return HistoryError(*(text.format(path=path, folder=path.parent, error=error) for text in (message, hint)))


def _is_full(error: sqlite3.Error, path: Path) -> bool:
    """SQLite says so of the database, but not of its WAL files."""
    with contextlib.suppress(OSError):
        if _code(error) == sqlite3.SQLITE_IOERR and shutil.disk_usage(path.parent).free < FULL_BYTES:
            return True
    return _code(error) == sqlite3.SQLITE_FULL


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF

"""Saved chats: what was written is there, whatever happens to the process, the file or its neighbours."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from localllm.conversation.storage import restored
from localllm.errors import LocalLLMError
from localllm.history import database as database_module
from localllm.history.database import HistoryError
from localllm.history.export import FORMATS, render
from localllm.history.records import SavedChat, SavedMessage, active_path, day_of, new_message_id
from localllm.history.store import History


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data/chats.db"


def message(chat: str, role: str, content: str, parent: int | None = None, **rest: object) -> SavedMessage:
    return SavedMessage(new_message_id(), chat, parent, role, content, **rest)  # type: ignore[arg-type]


def filled(history: History, name: str = "aa11", question: str = "Why is the sky blue?") -> list[SavedMessage]:
    asked = message(name, "user", question)
    said = message(name, "assistant", "Rayleigh scattering", asked.id, model="m", stats={"tokens": 3})
    history.save(SavedChat(name, "Sky", "m", "be brief", {"temperature": 0.5}, leaf_id=said.id), [asked, said])
    return [asked, said]


def is_whole(path: Path) -> bool:
    with contextlib.closing(sqlite3.connect(path)) as opened:
        return opened.execute("PRAGMA integrity_check(1)").fetchone() == ("ok",)


def test_what_is_saved_is_read(path: Path) -> None:
    with History(path) as history:
        saved = filled(history)
    with History(path) as history:
        chat = history.find("aa")
        assert (chat.title, chat.system, chat.params, chat.num_messages) == ("Sky", "be brief", {"temperature": 0.5}, 2)
        assert history.messages(chat.id) == saved
        assert history.chats(limit=1) == [chat]
        assert is_whole(path)
    assert path.stat().st_mode & 0o077 == 0


def test_saving_again_changes_and_a_branch_is_a_second_child(path: Path) -> None:
    with History(path) as history:
        asked, said = filled(history)
        other = message("aa11", "assistant", "Because of light", asked.id)
        history.save(SavedChat("aa11", "Sky 2", leaf_id=other.id), [replace(said, content="changed"), other])
        found = history.messages("aa11")
        assert [m.content for m in active_path(found, other.id)] == ["Why is the sky blue?", "Because of light"]
        assert [m.content for m in active_path(found, said.id)] == ["Why is the sky blue?", "changed"]
        assert history.chat("aa11").title == "Sky 2"
        history.remove_messages([other.id])
        assert len(history.messages("aa11")) == 2


def test_search_finds_questions_first_and_half_words(path: Path) -> None:
    with History(path) as history:
        filled(history)
        filled(history, "bb22", "What is Rayleigh?")
        hits = history.search("rayl")
        assert [hit.role for hit in hits] == ["user", "assistant", "assistant"]
        assert "\x02Rayleigh\x03" in hits[0].snippet
        assert [chat.id for chat in history.chats(query="blue")] == ["aa11"]
        assert len(history.chats(query="Sky")) == 2  # by title
        for odd in ('"', "a OR", "NEAR(", "*", "col:x", "-", "' --", "%", "\x00"):
            history.search(odd)
        history.save(SavedChat("cc33"), [message("cc33", "user", "日本語の文章です")])
        assert [hit.chat_id for hit in history.search("文章")] == ["cc33"]


def test_removed_chats_are_found_no_more(path: Path) -> None:
    with History(path) as history:
        filled(history)
        history.remove("aa11")
        assert history.chats() == [] and history.search("sky") == [] and history.messages("aa11") == []
        with pytest.raises(LocalLLMError, match="no chat"):
            history.find("aa")
    assert b"Rayleigh" not in path.read_bytes()


def test_an_ambiguous_or_odd_name_is_refused(path: Path) -> None:
    with History(path) as history:
        filled(history, "ab01")
        filled(history, "ab02")
        for name in ("ab", "", "%", "zz"):
            with pytest.raises(LocalLLMError):
                history.find(name)
        assert history.find("ab01").id == "ab01"


def test_a_message_being_written_is_not_searched_and_marked_when_its_writer_dies(path: Path) -> None:
    with History(path) as history:
        asked, _ = filled(history)
        half = message("aa11", "assistant", "half an answer", asked.id, status="streaming")
        history.save(SavedChat("aa11"), [half])
        with History(path) as other:  # the writer lives: nobody else touches it
            assert other.messages("aa11")[-1].status == "streaming"
        assert history.search("half") == []
        with contextlib.closing(sqlite3.connect(path)) as beside, beside:
            beside.execute("UPDATE messages SET writer = '999999999:1' WHERE status = 'streaming'")
    with History(path) as history:
        assert history.messages("aa11")[-1].status == "partial"
        assert len(history.search("half answer")) == 1


def test_half_characters_and_control_characters_can_be_stored(path: Path) -> None:
    with History(path) as history:
        history.save(SavedChat("aa", "\ud800title"), [message("aa", "user", "\udcff\x00\x1b[2Jtext")])
        assert history.messages("aa")[0].content == "?\x00\x1b[2Jtext"


# --- broken files ----------------------------------------------------------------------------------------------------


def broken_file(path: Path, how: str) -> None:
    with History(path) as history:
        filled(history)
    data = path.read_bytes()
    if how == "garbage":
        path.write_bytes(random.Random(1).randbytes(9000))
    elif how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "bit":
        path.write_bytes(data[:4096] + bytes([data[4096] ^ 0x1F]) + data[4097:])
    elif how == "foreign":
        path.unlink()
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE other (x)")
        connection.commit()
        connection.close()


@pytest.mark.parametrize("how", ["garbage", "truncated", "bit", "foreign"])
def test_a_damaged_file_is_kept_aside_and_a_new_one_begun(path: Path, how: str) -> None:
    broken_file(path, how)
    with History(path) as history:
        assert "damaged" in history.notice
        filled(history)
        assert is_whole(path)
    kept = [p for p in path.parent.iterdir() if ".damaged-" in p.name]
    assert kept


def test_an_empty_file_is_a_new_one(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    with History(path) as history:
        assert history.notice == ""


@pytest.mark.parametrize("how", ["folder", "loop", "future"])
def test_files_that_cannot_be_used_are_an_error_with_a_way_out(path: Path, how: str) -> None:
    path.parent.mkdir()
    if how == "folder":
        path.mkdir()
    elif how == "loop":
        path.symlink_to(path)
    else:
        History(path).close()
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA user_version = 99")
        connection.close()
    with pytest.raises(HistoryError) as caught:
        History(path)
    assert str(path) in caught.value.message and caught.value.hint
    assert ("newer localllm" in caught.value.message) == (how == "future")
    assert not list(path.parent.glob("*damaged*"))


def test_a_locked_file_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "BUSY_S", 0.1)
    with History(path) as history:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(HistoryError, match="locked by another program"):
            filled(history)
        other.execute("ROLLBACK")
        other.close()
        filled(history)


def test_a_full_disk_loses_nothing_that_was_there(path: Path) -> None:
    with History(path) as history:
        filled(history)
        history._connection.execute("PRAGMA max_page_count = 1")
        with pytest.raises(HistoryError, match="disk is full"):
            history.save(SavedChat("bb"), [message("bb", "user", "x" * 200_000)])
        assert len(history.messages("aa11")) == 2


ON_A_FULL_DISK = """
import resource, shutil, sys
from pathlib import Path
from types import SimpleNamespace
from localllm.history.database import HistoryError
from localllm.history.records import SavedChat
from localllm.history.store import History
shutil.disk_usage = lambda folder: SimpleNamespace(free=0)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # no file can grow
with History(Path(sys.argv[1])) as history:
    print(history.notice)
    print([message.content for message in history.messages("aa11")][0])
    try:
        history.save(SavedChat("bb"), [])
    except HistoryError as error:
        print(error.message)
"""


def test_chats_can_be_read_on_a_full_disk(path: Path) -> None:
    """Where the index of the write-ahead log has no room."""
    with History(path) as history:
        filled(history)
    done = subprocess.run([sys.executable, "-c", ON_A_FULL_DISK, str(path)], capture_output=True, text=True, timeout=60)
    notice, content, failed = done.stdout.splitlines()
    assert notice == "the disk is full: saved chats can be read, but none can be saved"
    assert content == "Why is the sky blue?" and failed.endswith("cannot grow: the disk is full"), done
    with History(path) as history:
        assert not history.notice and len(history.messages("aa11")) == 2


# --- kills and neighbours --------------------------------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
from localllm.history.records import SavedChat, SavedMessage, new_message_id
from localllm.history.store import History
history = History(Path(sys.argv[1]))
number = 0
while True:
    one = SavedMessage(new_message_id(), "chat", None, "user", f"{sys.argv[2]} {number}")
    half = SavedMessage(new_message_id(), "chat", one.id, "assistant", "x" * number, status="streaming")
    history.save(SavedChat("chat"), [one, half])
    print(number, flush=True)
    number += 1
"""


def kill_a_writer(path: Path, rounds: int) -> None:
    acknowledged: set[str] = set()
    cut = random.Random(22)
    for number in range(rounds):
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", WRITER, str(path), str(number)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        wanted = cut.randint(1, 12)
        for line in child.stdout:
            acknowledged.add(f"{number} {line.strip()}")
            if int(line) >= wanted:
                break
        time.sleep(cut.random() * 0.01)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        with History(path) as history:
            assert history.notice == "" and is_whole(path)
            found = history.messages("chat")
            assert acknowledged <= {m.content for m in found if m.role == "user"}
            assert {m.status for m in found if m.role == "assistant"} == {"partial"}


def test_a_killed_writer_loses_nothing_acknowledged(path: Path) -> None:
    kill_a_writer(path, 3)


@pytest.mark.slow
def test_many_kills(path: Path) -> None:
    kill_a_writer(path, 200)


MAKER = """
import os, sys, threading
from pathlib import Path
from localllm.history.store import History
threading.Timer(float(sys.argv[2]), os._exit, (0,)).start()
History(Path(sys.argv[1])).close()
"""


@pytest.mark.slow
def test_a_kill_while_the_file_is_made(path: Path) -> None:
    for number in range(30):
        subprocess.run([sys.executable, "-P", "-c", MAKER, str(path), str(number * 0.004)], check=False)
        with History(path) as history:
            assert history.notice == "" and is_whole(path)
        for left in path.parent.iterdir():
            left.unlink()


def write_beside(path: Path, each: int) -> None:
    failures: list[BaseException] = []

    def work(name: str) -> None:
        try:
            with History(path) as history:
                for number in range(each):
                    history.save(SavedChat(name), [message(name, "user", str(number))])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(f"chat{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    with History(path) as history:
        assert sum(chat.num_messages for chat in history.chats()) == 4 * each


def test_four_writers_at_once_never_find_it_locked(path: Path) -> None:
    write_beside(path, 25)


@pytest.mark.slow
def test_ten_thousand_writes_beside_each_other(path: Path) -> None:
    write_beside(path, 2500)


def test_several_that_find_the_same_damage_set_it_aside_once(path: Path) -> None:
    broken_file(path, "garbage")
    notices: list[str] = []

    def work() -> None:
        with History(path) as history:
            notices.append(history.notice)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(notices) == 4
    assert (
        len([p for p in path.parent.iterdir() if p.name.startswith("chats.db.damaged") and "-wal" not in p.name]) == 1
    )


def test_headings_of_a_list() -> None:
    now = time.mktime((2026, 11, 21, 0, 30, 0, 0, 0, -1))
    assert day_of(now - 60, now) == "Today"
    assert day_of(now - 3600, now) == "Yesterday"
    assert day_of(now - 4 * 86400, now) == "Last week"
    assert day_of(now - 40 * 86400, now) == "October 2026"


def test_the_files_of_one_user_are_not_for_others(path: Path) -> None:
    before = os.umask(0)
    try:
        History(path).close()
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o077 == 0 and path.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "value", ["soon", b"\xff\x00", 1e300, -1e300, float("inf"), "9" * 400, 2**62, -(2**62)], ids=repr
)
def test_a_row_whose_values_are_of_other_types_is_read_and_hides_no_other(path: Path, value: object) -> None:
    with History(path) as history:
        filled(history)
        filled(history, "bb22", "Why is grass green?")
    columns = {
        "chats": "title model system params_json created updated leaf_id",
        "messages": "parent_id role content reasoning model params_json stats_json created status",
    }
    with contextlib.closing(sqlite3.connect(path)) as opened:
        for table, names in columns.items():
            changes = ", ".join(f"{name} = :value" for name in names.split())
            which = "id" if table == "chats" else "chat_id"
            opened.execute(f"UPDATE {table} SET {changes} WHERE {which} = 'bb22'", {"value": value})
        opened.commit()
    with History(path) as history:
        rows = {chat.id: chat for chat in history.chats()}
        assert rows.keys() == {"aa11", "bb22"} and rows["aa11"].title == "Sky"
        for chat in rows.values():
            messages = history.messages(chat.id)
            assert len(messages) == 2
            for one in (chat, *messages):
                day_of(one.created)
                assert time.gmtime(one.created).tm_year < 9999
                assert isinstance(one.model, str) and isinstance(one.params, dict)
            for kind in FORMATS:
                assert render(chat, messages, kind)
            talk = restored(chat, messages)
            talk.ask("and now?")
        assert [hit.chat_id for hit in history.search("grass sky")] == []
        assert [hit.chat_id for hit in history.search("Rayleigh")] == ["aa11"]


def test_a_text_that_is_no_utf8_hides_no_other(path: Path) -> None:
    with History(path) as history:
        filled(history)
    with contextlib.closing(sqlite3.connect(path)) as opened:
        opened.execute("UPDATE chats SET title = CAST(x'ff41' AS TEXT)")
        opened.commit()
    with History(path) as history:
        assert [chat.title for chat in history.chats()] == ["\ufffdA"]


@pytest.mark.parametrize(("free", "said"), [(4096, "the disk is full"), (1 << 40, "disk I/O error")])
def test_an_input_error_on_a_full_disk_is_called_so(
    free: int, said: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR | 19 << 8  # the file beside it cannot grow
    monkeypatch.setattr(database_module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    assert said in database_module.explain(error, path).message


def test_several_open_a_new_file_at_once(tmp_path: Path) -> None:
    """Each begins its write-ahead log, for which SQLite does not wait."""
    failures: list[BaseException] = []
    together = threading.Barrier(4)

    def work(path: Path) -> None:
        together.wait()
        try:
            for _ in range(3):
                History(path).close()
        except BaseException as error:
            failures.append(error)

    for number in range(40):
        threads = [threading.Thread(target=work, args=(tmp_path / f"{number}.db",)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures

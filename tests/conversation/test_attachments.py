"""What goes with a message: named in it or attached, as much as there is room for, kept as it was sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm.backend.scripted import FakeBackend
from localllm.conversation.attachments import fit, mentioned, missing, read_documents
from localllm.conversation.commands import run
from localllm.conversation.session import Session
from localllm.conversation.slash import understand
from localllm.conversation.storage import restored, saved_chat, saved_messages
from localllm.conversation.tree import Conversation
from localllm.errors import ConfigError
from localllm.interface import Facts


def count(text: str) -> int:
    return len(text.split())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    topics = ["pumps", "valves", "pipes", "sensors"]
    for topic in topics:
        (tmp_path / "src" / f"{topic}.txt").write_text(f"About {topic}. " + "filler " * 150)
    (tmp_path / "note.txt").write_text("a note")
    return tmp_path


def test_what_is_mentioned() -> None:
    assert [one.name for one in mentioned("see @note.txt, and @src/; twice @note.txt")] == ["note.txt", "src/"]
    assert not mentioned("mail me@here or @ @! @... @~nobody_there @" + "x" * 5000 + " @none.txt \0@\0")


def test_a_file_that_is_not_there_is_told() -> None:
    """By its ending: not a name, a decorator or an address."""
    assert missing("see @note.txt, @src/ and (@nobody) @pytest.mark.slow @app.get('/') me@here.txt @a.com") == ""
    assert missing("what is @cat.png?") == "no such file: cat.png; the name is sent as text"
    assert missing("compare @a.py, @b/c.csv and @a.py") == "no such files: a.py, b/c.csv; sent as text"
    assert missing("@" + "x" * 5000 + ".txt \0@\0.txt").startswith("no such file")


def test_what_is_attached_can_be_taken_back() -> None:
    session = Session(FakeBackend(), Conversation())

    def say(line: str) -> str:
        return run(session, understand(line))

    assert say("/attach note.txt src").startswith("2 files for the next message: 620 tokens, 32k free")
    assert [one.name for one in session.files] == ["note.txt", "src/"]
    with pytest.raises(ConfigError, match="the files are 1 note.txt, 2 src/"):
        say("/attach off 3")
    assert say("/attach off src/") == "removed src/" and len(session.files) == 1
    assert say("/attach off") == "removed all files from the next message" and not session.files


def test_parts_are_chosen_when_the_window_is_small_and_kept_as_they_were_sent() -> None:
    talk = Conversation()
    question = talk.ask("How are the valves?", tuple(read_documents("src note.txt")))
    said = fit(talk, question, Facts(ctx=800), count)
    assert said[0] == "src/, note.txt: 620 tokens, 496 free: sending the parts that match the question best"
    assert any("src/: " in line and "parts sent" in line and "valves.txt" in line for line in said)
    assert "About valves" in question.content and question.content.endswith("How are the valves?")
    assert count(question.content) < 500
    question.text, question.stop = "fine", "stop"
    again = restored(saved_chat(talk), list(saved_messages(question)))
    assert again.exchanges[0].content == question.content, "the engine finds its pages again"
    larger = talk.again(question)
    assert fit(talk, larger, Facts(ctx=8000), count) == ["src/, note.txt: 620 tokens, 6.8k free"]
    assert all(f"About {topic}" in larger.content for topic in ("pumps", "valves", "pipes", "sensors"))


def test_without_any_room_nothing_is_left_out() -> None:
    talk = Conversation("word " * 700)
    question = talk.ask("How are the valves?", tuple(read_documents("src")))
    assert fit(talk, question, Facts(ctx=800), count)[0].endswith(", 0 free")
    assert question.sent is None and "About pipes" in question.content, "the engine refuses it, and the user is asked"

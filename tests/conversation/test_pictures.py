"""Pictures that go with a message: read within limits, kept with the chat, refused by name."""

from __future__ import annotations

import base64
import io
import json
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from localllm.backend.scripted import FakeBackend
from localllm.conversation.attachments import dropped, fit, mentioned, read_documents
from localllm.conversation.commands import run
from localllm.conversation.saver import Saver
from localllm.conversation.session import Session
from localllm.conversation.slash import understand
from localllm.conversation.storage import restored, saved_chat, saved_messages
from localllm.conversation.tree import Conversation
from localllm.errors import ConfigError
from localllm.history.export import as_html, as_json, as_markdown
from localllm.history.importing import read_export
from localllm.history.records import SavedMessage
from localllm.history.store import History
from localllm.interface import Facts


def picture(form: str = "PNG", size: tuple[int, int] = (20, 30)) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", size, "red").save(stream, form)
    return stream.getvalue()


def huge(width: int, height: int) -> bytes:
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((13, head), (0, b"IDAT"))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", size) + chunk + struct.pack(">I", zlib.crc32(chunk)) for size, chunk in chunks
    )


def count(text: str) -> int:
    return len(text.split())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "red.png").write_bytes(picture())
    (tmp_path / "note.txt").write_text("a note")
    return tmp_path


def test_a_picture_stands_before_the_text() -> None:
    talk = Conversation("be brief")
    files = (*mentioned("what is @red.png"), *read_documents("note.txt"))
    asked = talk.ask("what is @red.png", files)
    assert files[0].label.startswith("red.png · ")
    said = fit(talk, asked, Facts(ctx=4096, image_tokens=256), count)
    assert said == ["red.png, note.txt: 261 tokens, 2.9k free"]
    _, message = talk.messages(asked)
    image, text = message["content"]
    url = image["image_url"]["url"]
    assert url == "data:image/png;base64," + base64.b64encode(picture()).decode()
    assert text == {"type": "text", "text": "note.txt:\n```\na note\n```\n\nwhat is @red.png"}


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_the_type_is_that_of_the_bytes(form: str, folder: Path) -> None:
    (folder / "x.png").write_bytes(picture(form))
    [document] = read_documents("x.png")
    assert document.picture.startswith(f"data:image/{form.lower()};base64,")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (picture(size=(300, 300))[:-60], "x.png: an image is damaged or truncated"),
        (huge(10_000, 10_000), "x.png: an image has 10,000 x 10,000 pixels; the limit is 50,000,000 in total"),
        (b"plain text", "x.png: an image is damaged, or not in one of the formats PNG"),
        (b"\0" * (9 << 20), "x.png is 9.0 MiB; the limit is 8.0 MiB"),
    ],
    ids=["cut", "100-megapixels", "text", "large"],
)
def test_a_picture_that_cannot_be_read_is_refused_by_name(data: bytes, said: str, folder: Path) -> None:
    (folder / "x.png").write_bytes(data)
    with pytest.raises(ConfigError) as error:
        read_documents("x.png")
    assert said in error.value.message and error.value.hint


def test_a_folder_of_pictures_and_a_missing_package_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "album.png").mkdir()
    (folder / "album.png" / "a.png").write_bytes(picture())
    with pytest.raises(ConfigError, match=r"album\.png has no text files"):
        read_documents("album.png")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"red\.png: images need the package pillow") as error:
        read_documents("red.png")
    assert f"{sys.executable} -m pip install 'pillow>=" in error.value.hint


def test_a_model_that_reads_text_only_refuses_before_anything_is_lost() -> None:
    backend = FakeBackend()
    backend.model, backend.image_tokens = "fake", 0
    session = Session(backend, Conversation())
    with pytest.raises(ConfigError, match=r"red\.png is an image, and fake reads text only"):
        run(session, understand("/attach red.png"))
    assert not session.files
    backend.image_tokens = 256
    assert "256 tokens, 32k free" in run(session, understand("/attach red.png"))
    talk = session.conversation
    asked = talk.ask("what is it?", tuple(session.files))
    asked.text = "a picture"
    session.files.clear()
    assert "images                     256" in run(session, understand("/ctx"))


@pytest.mark.parametrize(
    ("pasted", "path"),
    [
        ("{}/red.png", "{}/red.png"),
        ("'{}/a b.png' ", "{}/a b.png"),
        ("{}/a\\ b.png\n", "{}/a b.png"),
        ("file://{}/a%20b.png", "{}/a b.png"),
        ("{}/none.png", ""),
        ("{}/note.txt", ""),
        ("see {}/red.png", ""),
        ("it's", ""),
        ("", ""),
    ],
)
def test_a_dropped_picture_is_told_from_text(pasted: str, path: str, folder: Path) -> None:
    (folder / "a b.png").write_bytes(picture())
    assert dropped(pasted.format(folder)) == path.format(folder)


def saved() -> tuple[Any, list[SavedMessage]]:
    talk = Conversation()
    one = talk.ask("what is it?", tuple(read_documents("red.png")))
    one.text, one.stop = "red", "stop"
    return saved_chat(talk), list(saved_messages(one))


def test_a_resumed_and_an_exported_chat_have_the_picture(folder: Path) -> None:
    chat, messages = saved()
    (folder / "red.png").unlink()
    talk = restored(chat, messages)
    [asked] = talk.exchanges
    url = "data:image/png;base64," + base64.b64encode(picture()).decode()
    assert talk.messages(asked)[0]["content"][0]["image_url"]["url"] == url
    assert f"![red.png]({url})" in as_markdown(chat, messages)
    assert as_markdown(chat, messages, pictures=False).count("red.png") == 1
    page = as_html(chat, messages)
    assert f'<img alt="" src="{url}">' in page and "img-src data:" in page
    file = folder / "chat.json"
    file.write_text(json.dumps(as_json(chat, messages)))
    [(_, back)] = read_export(file).chats
    assert back[0].params == messages[0].params


def test_a_picture_from_elsewhere_is_never_sent() -> None:
    chat, (question, answer) = saved()
    for url in ("http://127.0.0.1/x.png", 'data:image/png;base64,AA" onerror="x', 7):
        changed = {"attachments": [{"name": "x.png", "image": url}]}
        broken = SavedMessage(question.id, "", None, "user", "what?", params=changed)
        assert restored(chat, [broken, answer]).exchanges[0].content == "x.png:\n```\n\n```\n\nwhat?"
        assert "<img" not in as_html(chat, [broken, answer])


def test_a_picture_is_written_once_while_an_answer_grows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[list[str]] = []
    save = History.save
    monkeypatch.setattr(
        History, "save", lambda self, chat, rows: (written.append([row.role for row in rows]), save(self, chat, rows))
    )
    saver, talk = Saver(lambda: History(folder / "chats.db")), Conversation()
    one = talk.ask("what is it?", tuple(read_documents("red.png")))
    for text in ("", "r", "re", "red"):
        one.text = text
        future = saver.save(talk, one)
        assert future is not None
        future.result(20)
    saver.close()
    assert written == [["user"], ["assistant"], ["assistant"], ["assistant"]]
    with History(folder / "chats.db") as history:
        assert [one.content for one in history.messages(talk.id)] == ["what is it?", "red"]

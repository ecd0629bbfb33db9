"""Documents in the full screen: what they take is said before the message is sent, and which parts went with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from textual import events

from localllm.tui.widgets.messages import Notice

from .conftest import Chat, chat


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("localllm.tui.chat.screen.TYPING_S", 0.0)
    (tmp_path / "src").mkdir()
    for topic in ("pumps", "valves", "pipes", "sensors"):
        (tmp_path / "src" / f"{topic}.txt").write_text(f"About {topic}. " + "filler " * 150)
    (tmp_path / "note.txt").write_text("a note")
    return tmp_path


def notices(running: Chat) -> str:
    return "\n".join(str(one.render()) for one in running.screen.query(Notice))


async def test_what_a_mention_takes_is_said_while_it_is_typed() -> None:
    async with chat(ctx=1000) as running:
        await running.ready()
        running.prompt.text = "valves? @src"
        await running.until(lambda: "src/ · " in running.text("#files"))
        await running.until(lambda: " tokens, 6" in running.text("#files"))
        running.prompt.text = ""
        await running.until(lambda: not running.screen.query_one("#files").display)


async def test_the_parts_that_were_sent_are_told() -> None:
    async with chat(ctx=800, first="") as running:
        await running.ready()
        await running.send("/attach src note.txt")
        await running.until(lambda: "sending the parts that match the question best" in running.text("#files"))
        answer = await running.ask("How are the valves?")
        assert "valves.txt" in notices(running) and "parts sent" in notices(running)
        [sent] = running.backend.sent[0][0]
        assert "About valves" in sent["content"] and "parts)" in sent["content"]
        assert not running.screen.session.files and answer.exchange.stop
        await running.send("/attach note.txt")
        await running.until(lambda: running.screen.session.files)
        await running.send("/attach off")
        await running.until(lambda: not running.screen.session.files)


async def test_a_mention_of_a_file_that_is_not_there_is_told() -> None:
    async with chat() as running:
        await running.ready()
        await running.ask("what is in @nothing.txt")
        assert "no such file: nothing.txt; the name is sent as text" in notices(running)
        assert running.backend.sent[0][0][-1]["content"] == "what is in @nothing.txt"


async def test_a_picture_is_mentioned_or_dropped_and_refused_where_it_cannot_be_read(folder: Path) -> None:
    Image.new("RGB", (20, 30), "red").save(folder / "a cat.png")
    Image.new("RGB", (20, 30), "red").save(folder / "red.png")
    async with chat() as running:
        await running.ready()
        running.app.post_message(events.Paste(f"'{folder}/a cat.png' "))
        await running.until(lambda: "+ a cat.png · " in running.text("#files"))
        assert not running.prompt.text
        await running.ask("what is @red.png")
        [message] = running.backend.sent[0][0]
        assert [part["type"] for part in message["content"]] == ["image_url", "image_url", "text"]
        assert "a cat.png, red.png: " in notices(running)
        running.backend.image_tokens = 0
        await running.send("and @red.png")
        await running.until(lambda: "red.png is an image, and fake reads text only" in notices(running))
        assert len(running.screen.conversation.exchanges) == 1 and len(running.backend.sent) == 1
        await running.pilot.press("up")
        assert running.prompt.text == "and @red.png"
        running.prompt.text = "/attach "
        running.prompt.move_cursor(running.prompt.document.end)
        running.app.post_message(events.Paste(f"{folder}/red.png"))
        await running.until(lambda: running.prompt.text == f"/attach {folder}/red.png")

"""Documents in the full screen: what they take is said before the message is sent, and which parts went with it."""

from __future__ import annotations

from pathlib import Path

import pytest

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
        await running.until(lambda: "the parts that suit the question best are sent" in running.text("#files"))
        answer = await running.ask("How are the valves?")
        assert "valves.txt" in notices(running) and "parts sent" in notices(running)
        [sent] = running.backend.sent[0][0]
        assert "About valves" in sent["content"] and "parts)" in sent["content"]
        assert not running.screen.session.files and answer.exchange.stop
        await running.send("/attach note.txt")
        await running.until(lambda: running.screen.session.files)
        await running.send("/attach off")
        await running.until(lambda: not running.screen.session.files)

"""Turns that do not simply follow each other: branches, edits, a full context, failures."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from textual.widgets import OptionList

from localllm.config import Preset, SamplingConfig
from localllm.conversation.tree import Conversation
from localllm.history.records import active_path
from localllm.history.store import History
from localllm.tui.widgets.choices import Choices
from localllm.tui.widgets.messages import AssistantMessage, Notice, UserMessage
from localllm.tui.widgets.prompt import PromptArea

from .conftest import Chat, chat


def said(running: Chat) -> str:
    """All that the program said."""
    return "\n".join(str(n.render()) for n in running.screen.query(Notice))


def stats(message: AssistantMessage) -> str:
    """The line below an answer; "" until it is mounted."""
    return "".join(str(line.render()) for line in message.query(".stats"))  # type: ignore[attr-defined]


async def finish(running: Chat) -> None:
    """Wait until nothing runs."""
    await running.until(lambda: running.screen.current is None and not running.screen.waiting)
    await running.pilot.pause()


async def test_an_answer_is_saved_before_it_is_drawn_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = asyncio.Event()

    async def finish(self: AssistantMessage) -> None:
        await drawn.wait()

    async with chat(path=tmp_path / "chats.db") as running:
        await running.ready()
        monkeypatch.setattr(AssistantMessage, "finish", finish)
        running.backend.answers = ["the whole answer"]
        await running.send("question")
        await running.until(lambda: running.screen.conversation.exchanges[-1:] and running.screen.current is None)
        running.app.exit()
    with History(tmp_path / "chats.db") as history:
        [kept] = history.chats()
        assert history.messages(kept.id)[-1].content == "the whole answer"


@pytest.mark.slow
async def test_answering_again_makes_branches_and_the_disk_has_the_tree(tmp_path: Path) -> None:
    async with chat(path=tmp_path / "chats.db") as running:
        await running.ready()
        running.backend.answers = ["first", "second", "third"]
        await running.ask("question")
        for _ in range(2):
            await running.send("/regen")
            await running.until(lambda: running.screen.current is not None or running.answers[-1].exchange.stop)
            await finish(running)
        await running.until(lambda: "‹3/3›" in stats(running.answers[-1]))
        assert running.answers[-1].exchange.text == "third"
        assert len(running.answers) == 1
        await running.pilot.press("escape")
        await running.until(lambda: running.screen.browse.active)
        await running.pilot.press("left_square_bracket")
        await running.until(lambda: running.answers[-1].exchange.text == "second")
        assert "‹2/3›" in stats(running.answers[-1])
        await running.pilot.press("k", "e")  # the question above, edited
        await running.until(lambda: running.prompt.text == "question")
        await running.send("another question")
        await finish(running)
        await running.until(lambda: running.answers[-1].exchange.text == "another question")
        assert [m["content"] for m in running.backend.sent[-1][0]] == ["another question"]
    with History(tmp_path / "chats.db") as history:
        found = history.chats()[0]
        messages = history.messages(found.id)
        assert [m.content for m in active_path(messages, found.leaf_id)] == ["another question", "another question"]
        asked = [m for m in messages if m.content == "question" and m.role == "user"]
        assert len(asked) == 1
        assert {m.content for m in messages if m.parent_id == asked[0].id} == {"first", "second", "third"}
        assert all(m.status == "stop" for m in messages if m.role == "assistant")


@pytest.mark.slow
async def test_browse_copies_messages_and_code_and_saves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with chat() as running:
        await running.ready()
        text = "one\n\n```python\na = 1\n```\n\ntwo\n\n```\nb\n```\n"
        running.backend.answers = [text]
        await running.ask("code")
        await running.pilot.press("escape")
        await running.until(lambda: running.screen.browse.active)
        await running.until(lambda: "copy" in running.text("#keys"))
        await running.pilot.press("y")
        await running.until(lambda: running.app.clipboard == text)
        await running.pilot.press("c")
        await running.until(lambda: running.app.clipboard == "a = 1")
        await running.pilot.press("c")
        await running.until(lambda: running.app.clipboard == "b")
        await running.pilot.press("s")
        await running.until(lambda: len(running.app.screen_stack) == 3)
        await running.pilot.press(*"out.txt", "enter")
        await running.until(lambda: (tmp_path / "out.txt").exists())
        assert (tmp_path / "out.txt").read_text() == "b\n"
        await running.pilot.press("x")  # any other letter goes to the prompt
        await running.until(lambda: running.prompt.text == "x")
        assert running.app.focused is running.prompt


@pytest.mark.slow
async def test_browse_moves_branches_off_removes_and_searches() -> None:
    async with chat() as running:
        await running.ready()
        for text in ("apple", "pear", "plum"):
            await running.ask(text)
        await running.pilot.press("escape", "k", "k", "k")  # the second question
        assert isinstance(running.screen.browse.at, UserMessage) and running.screen.browse.text == "pear"
        await running.pilot.press("b")
        await running.until(lambda: len(running.screen.conversation.exchanges) == 2)
        await running.ask("cherry")
        assert [m["content"] for m in running.backend.sent[-1][0]] == ["apple", "apple", "pear", "pear", "cherry"]
        assert running.screen.conversation.place(running.screen.conversation.exchanges[-1], True) == (2, 2)
        await running.pilot.press("escape", "slash")
        await running.until(lambda: len(running.app.screen_stack) == 3)
        await running.pilot.press(*"appl", "enter")
        await running.until(lambda: running.screen.browse.text == "apple")
        await running.pilot.press("n")
        await running.until(lambda: "of 2" in running.text("#state"))
        await running.pilot.press("G", "d")
        assert "d again" in running.text("#state")
        await running.pilot.press("d")
        await running.until(
            lambda: [e.user for e in running.screen.conversation.exchanges] == ["apple", "pear", "plum"]
        )


@pytest.mark.slow
async def test_enter_alone_goes_on_with_what_was_stopped_and_with_nothing_else() -> None:
    async with chat(tps=200) as running:
        await running.ready()
        await running.ask("whole")
        await running.pilot.press("enter")
        await running.send("long")
        await running.until(lambda: running.answers and running.answers[-1].exchange.text)
        await running.pilot.press("enter", "escape")
        await running.until(lambda: "stopped · ⏎ continues" in running.text("#state"))
        exchange = running.screen.conversation.exchanges[-1]
        before = exchange.text.rstrip()
        running.prompt.text = "  "
        await running.pilot.press("enter")
        await running.pilot.pause()
        assert len(running.backend.sent) == 2
        running.prompt.text = ""
        await running.pilot.press("enter")
        await running.until(lambda: exchange.stop == "stop")
        assert exchange.text == before + " and so on."
        assert len(running.backend.sent) == 3
        await running.pilot.press("enter")
        await running.pilot.pause()
        assert len(running.backend.sent) == 3 and "ready" in running.text("#state")


@pytest.mark.slow
async def test_an_answer_is_rewritten_and_continued() -> None:
    async with chat() as running:
        await running.ready()
        await running.ask("tell me")
        await running.pilot.press("escape", "e")
        await running.until(lambda: running.prompt.text == "tell me")
        await running.send("I said")
        await running.until(lambda: running.screen.conversation.exchanges[-1].text == "I said")
        await running.until(lambda: "edited by you" in stats(running.answers[-1]))
        await running.send("/continue")
        await running.until(lambda: running.screen.conversation.exchanges[-1].text == "I said and so on.")
        await finish(running)
        assert running.backend.sent[-1][0][-1] == {"role": "assistant", "content": "I said"}
        assert running.answers[-1].answer.source == "I said and so on."
        await running.send("/continue")
        await running.until(lambda: "is complete" in said(running))


@pytest.mark.slow
async def test_esc_twice_edits_the_last_question_and_undo_takes_it_back() -> None:
    async with chat() as running:
        await running.ready()
        await running.ask("first")
        await running.ask("second")
        await running.pilot.press("escape", "escape")
        await running.until(lambda: running.prompt.text == "second")
        assert "editing a question" in str(running.prompt.border_title)
        await running.pilot.press("escape")
        await running.until(lambda: not running.prompt.text and running.screen.editing is None)
        await running.send("/undo")
        await running.until(lambda: running.prompt.text == "second")
        assert [e.user for e in running.screen.conversation.exchanges] == ["first"]
        assert len(running.screen.query(UserMessage)) == 1


@pytest.mark.slow
async def test_branches_are_not_changed_while_an_answer_comes() -> None:
    async with chat(tps=100) as running:
        await running.ready()
        await running.send("long")
        await running.until(lambda: running.answers and running.answers[0].exchange.text)
        await running.send("/regen")
        await running.until(lambda: "stop the answer first" in running.text("#state"))
        await running.pilot.press("escape")
        await finish(running)


@pytest.mark.slow
async def test_the_model_summarises_what_no_longer_fits() -> None:
    async with chat(ctx=44) as running:
        await running.ready()
        for text in ("a a a a a a a a", "b b b b b b b b"):
            await running.ask(text)
        await running.send("c c c c c c c c")
        await running.until(lambda: running.screen.query_one(Choices).display)
        running.backend.answers = ["letters"]
        await running.pilot.press("tab", "s")
        await running.until(lambda: running.screen.conversation.summary_text == "letters")
        talk = running.screen.conversation
        await running.until(lambda: [(e.user[0], e.stop) for e in talk.exchanges][-1] == ("c", "stop"))
        contents = [m["content"] for m in running.backend.sent[-1][0]]
        assert contents[0].endswith("letters") and [c[0] for c in contents[1:]] == ["b", "b", "c"]


@pytest.mark.slow
async def test_a_larger_window_is_loaded_and_the_message_sent() -> None:
    async with chat(ctx=18) as running:
        await running.ready()
        await running.ask("a b")
        await running.send("c d e f g h i j k l m n o")
        await running.until(lambda: running.screen.query_one(Choices).display)
        await running.pilot.press("tab", "c")
        await running.until(lambda: running.screen.conversation.exchanges[-1].stop == "stop")
        assert running.backend.started[-1] == ("fake", {"ctx": 72})


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("key", "asked"),
    [("c", "abcm"), ("n", "cm")]
    + [pytest.param(key, asked, marks=pytest.mark.slow) for key, asked in (("e", "abm"), ("t", "abcm"), ("s", "abcm"))],
)
async def test_a_message_queued_behind_one_that_does_not_fit_stays(tmp_path: Path, key: str, asked: str) -> None:
    async with chat(ctx=44, path=tmp_path / "chats.db") as running:
        await running.ready()
        for text in ("a a a a a a a a", "b b b b b b b b"):
            await running.ask(text)
        await running.send("c c c c c c c c")
        await running.until(lambda: running.screen.query_one(Choices).display)
        await running.send("my name")
        await running.until(lambda: running.screen.waiting)
        await running.until(lambda: "waits for your choice" in running.text("UserMessage.-queued .queued"))
        await running.send("/regen")
        await running.until(lambda: "first choose above the prompt" in running.text("#state"))
        running.backend.answers = ["letters", "c"] if key == "s" else ["c"] if key != "e" else []
        await running.pilot.press("tab", key)
        await running.until(lambda: not running.screen.query_one(Choices).display)
        await running.until(lambda: running.backend.sent[-1][0][-1]["content"] == "my name")
        await finish(running)
        talk = running.screen.conversation
        assert [(one.user[0], one.stop) for one in talk.exchanges] == [(name, "stop") for name in asked]
        assert [one.exchange for one in running.screen.query(UserMessage)] == talk.exchanges
        assert [one.exchange for one in running.answers] == talk.exchanges
        assert running.prompt.text == ("c c c c c c c c" if key == "e" else "")
        assert running.screen.state.used_tokens > sum(len(m["content"].split()) for m in running.backend.sent[-1][0])
    with History(tmp_path / "chats.db") as history:
        found = history.chat(talk.id)
        path = active_path(history.messages(found.id), found.leaf_id)
        assert "".join(one.content[0] for one in path if one.role == "user") == asked
        chats = [[one.content[0] for one in history.messages(row.id) if one.role == "user"] for row in history.chats()]
        assert sorted(chats) == ([list("ab"), list("cm")] if key == "n" else [list(asked)])


@pytest.mark.slow
async def test_a_new_answer_that_does_not_fit_gives_way_to_the_old_one() -> None:
    async with chat() as running:
        await running.ready()
        for text in ("one", "two"):
            await running.ask(text)
        running.backend.ctx = 1
        await running.send("/regen 1")
        await running.until(lambda: running.screen.query_one(Choices).display)
        await running.send("three")
        await running.until(lambda: running.screen.waiting)
        running.backend.ctx = 100
        await running.pilot.press("tab", "e")
        await running.until(lambda: running.prompt.text == "one" and not running.screen.busy)
        assert [one.text for one in running.screen.conversation.exchanges] == ["one", "two", "three"]
        assert [one.exchange.text for one in running.answers] == ["one", "two", "three"]


async def test_memory_that_ran_out_offers_what_helps() -> None:
    async with chat() as running:
        await running.ready()
        await running.ask("!oom")
        banner = running.screen.query_one("#choices", OptionList)
        await running.until(lambda: banner.display)
        assert [str(banner.get_option_at_index(i).prompt)[1] for i in range(banner.option_count)] == [
            "k",
            "c",
            "m",
            "q",
        ]
        assert "the chat is saved" in str(banner.border_title)
        await running.pilot.press("tab", "k")
        await running.until(lambda: running.backend.started[-1] == ("fake", {"kv": "int8"}))
        await running.ready()
        assert (await running.ask("again")).exchange.text == "again"


async def test_a_dead_engine_is_loaded_again_and_keeps_what_it_wrote(tmp_path: Path) -> None:
    async with chat(log_file=tmp_path / "log") as running:
        await running.ready()
        message = await running.ask("!crash")
        assert "E601" in stats(message) and message.exchange.text
        banner = running.screen.query_one(Choices)
        await running.until(lambda: banner.display)
        assert "illegal address" in stats(message)
        rows = [str(banner.get_option_at_index(i).prompt) for i in range(banner.option_count)]
        assert f"the log is {tmp_path / 'log'}" in rows[2]
        assert "the engine stopped" in running.text("#state")
        await running.pilot.press("tab", "p")
        await running.until(lambda: "illegal address" in running.app.clipboard)
        await running.until(lambda: banner.display and "report" in running.text("#state"))  # the question stays
        await running.pilot.press("escape")
        await running.until(lambda: not banner.display)
        await running.send("hello")
        await running.until(lambda: "no model is loaded" in said(running))
        assert running.prompt.text == "hello"
        running.prompt.text = ""
        await running.send("/model fake")
        await running.ready()
        await running.ask("!crash")
        await running.until(lambda: banner.display)
        await running.pilot.press("tab", "r")
        await running.until(lambda: len(running.backend.started) == 3)
        await running.ready()
        assert (await running.ask("again")).exchange.text == "again"


@pytest.mark.slow
async def test_a_choice_takes_no_letters_that_are_meant_for_the_prompt() -> None:
    async with chat(tps=200) as running:
        await running.ready()
        await running.send("!oom")
        running.prompt.text = "next mess"
        await running.until(lambda: running.screen.query_one(Choices).display)
        assert running.app.focused is running.prompt
        await running.pilot.press("k")
        assert "k" in running.prompt.text and len(running.backend.started) == 1


@pytest.mark.slow
async def test_another_model_in_the_middle_keeps_the_conversation() -> None:
    async with chat() as running:
        await running.ready()
        await running.ask("hello")
        await running.send("/model fake-download")
        await running.until(lambda: len(running.backend.started) == 2)
        await running.ready()
        await running.ask("and now")
        assert [m["content"] for m in running.backend.sent[-1][0]] == ["hello", "hello", "and now"]
        assert running.screen.conversation.exchanges[-1].model == "fake-download"
        assert "fake-download" in running.text("#model")


@pytest.mark.slow
async def test_another_model_during_an_answer_stops_it_and_takes_what_is_queued(tmp_path: Path) -> None:
    async with chat(tps=50, path=tmp_path / "chats.db") as running:
        await running.ready()
        await running.send("long")
        await running.until(lambda: running.answers and running.answers[0].exchange.text)
        await running.send("queued")
        await running.until(lambda: running.screen.waiting)
        running.backend.load_s = 1.0
        await running.send("/model fake-other")
        await running.until(lambda: len(running.backend.started) == 2)
        await running.until(lambda: "stopped by you · /continue" in stats(running.answers[0]))
        assert "sent when the model is free" in running.text("UserMessage.-queued .queued")
        await running.until(lambda: "stop" not in running.text("#keys"))
        assert running.screen.phase == "loading"
        await running.until(lambda: "↑" in stats(running.answers[-1]))
        first, last = running.screen.conversation.exchanges
        assert (first.stop, last.stop, last.model) == ("abort", "stop", "fake-other")
        assert [m["content"] for m in running.backend.sent[-1][0]] == ["long", first.text, "queued"]
        assert running.screen.current is None and not running.screen.waiting
    with History(tmp_path / "chats.db") as history:
        found = history.chats()[0]
        path = active_path(history.messages(found.id), found.leaf_id)
        assert [(m.role, m.status) for m in path][1::2] == [("assistant", "abort"), ("assistant", "stop")]


async def test_a_model_that_does_not_load_keeps_what_is_queued_for_the_next_one() -> None:
    async with chat(tps=50) as running:
        await running.ready()
        await running.send("long")
        await running.until(lambda: running.answers and running.answers[0].exchange.text)
        await running.send("queued")
        await running.until(lambda: running.screen.waiting)
        await running.send("/model fake-huge")
        await running.until(lambda: running.screen.query_one(Choices).display)
        await running.until(lambda: "waits for your choice" in running.text("UserMessage.-queued .queued"))
        await running.pilot.press("escape")
        await running.until(lambda: "when a model is loaded" in running.text("UserMessage.-queued .queued"))
        await running.send("/model fake")
        await running.until(lambda: running.screen.conversation.exchanges[-1].stop == "stop")
        assert running.screen.conversation.exchanges[-1].text == "queued"


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("used", "name", "told"), [("./m.gguf", "fake", True), ("fake", "fake", False), ("/m/m.gguf", "/m/m.gguf", False)]
)
async def test_a_resumed_chat_says_when_another_model_continues_it(used: str, name: str, told: bool) -> None:
    talk = Conversation()
    answer = talk.ask("one")
    talk.model, answer.text, answer.stop = used, "eins", "stop"
    async with chat(model=name, name=name, talk=talk) as running:
        await running.ready()
        assert (f"this chat used {used} and now continues with fake" in said(running)) == told
        assert running.backend.started[0][0] == running.screen.session.model  # by this name it can be loaded again


@pytest.mark.slow
async def test_files_presets_thinking_and_titles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("some notes")
    (tmp_path / "binary.bin").write_bytes(b"\0\1")
    presets = {"calm": Preset("be calm", None, SamplingConfig(temperature=0.1))}
    async with chat(presets=presets, path=tmp_path / "chats.db") as running:
        await running.ready()
        await running.send("/attach binary.bin")
        await running.until(lambda: "is not text" in said(running))
        await running.send("/attach notes.txt")
        await running.until(lambda: "notes.txt" in running.text("#files"))
        await running.send("/preset calm")
        await running.send("/think low")
        await running.send("/rename My notes")
        await running.ask("what is in @notes.txt?")
        messages = running.backend.sent[-1][0]
        assert messages[0]["content"] == "be calm"
        assert messages[1]["content"].count("some notes") == 2 and messages[1]["content"].endswith("@notes.txt?")
        assert running.backend.templates[-1] == {"enable_thinking": True, "reasoning_effort": "low"}
        assert running.screen.conversation.sampling == {"temperature": 0.1}
        assert not running.app.session.files
        await running.send("/ctx")
        await running.until(lambda: "attachments" in said(running) and "of 32k" in said(running))
        await running.send("/export md out.md")
        await running.until(lambda: (tmp_path / "out.md").exists())
        await running.until(lambda: "My notes" in running.text("#title"))
    with History(tmp_path / "chats.db") as history:
        chat_ = history.chats()[0]
        assert chat_.title == "My notes" and chat_.params["think"] == "low"


async def test_a_download_is_paused_and_goes_on() -> None:
    async with chat(model="fake-download", load_s=0.1) as running:
        await running.until(lambda: "downloading" in running.text("#state"))
        await running.pilot.press("escape")
        await running.until(lambda: running.screen.query_one(Choices).display)
        await running.pilot.press("p")
        await running.until(lambda: "is paused" in said(running))
        running.backend.load_s = 0
        await running.send("/model fake-download")
        await running.ready()
        assert (await running.ask("hello")).exchange.text == "hello"


async def test_an_edit_waits_for_what_was_typed_before_it() -> None:
    async with chat(tps=20) as running:
        await running.ready()
        screen = running.screen
        first = (await running.ask("one")).exchange
        screen.post_message(PromptArea.Sent("long"))  # Enter was pressed, and nothing has come of it yet
        running.prompt.put("draft")
        screen.call_later(screen.edit, first, True)
        await running.until(lambda: screen.editing is not None and screen.current is not None)
        running.prompt.text = "two"
        await running.pilot.press("enter")
        await running.until(lambda: "stop the answer first" in running.text("#state"))
        assert screen.editing is not None and running.prompt.text == "two"
        await running.pilot.press("escape")
        await running.until(lambda: not screen.busy)
        assert [one.user for one in screen.conversation.exchanges] == ["one", "long"]
        await running.pilot.press("enter")
        await running.until(lambda: [one.user for one in screen.conversation.exchanges] == ["two"])
        assert running.prompt.text == "draft"
        await running.until(lambda: not screen.busy)


async def test_an_answer_may_end_after_it_was_taken_off_the_screen() -> None:
    async with chat() as running:
        await running.ready()
        answer = await running.ask("one")
        await answer.remove()
        await answer.finish()
        assert running.app.failure is None


async def test_a_turn_that_was_taken_back_marks_no_branch_while_it_is_still_shown() -> None:
    async with chat() as running:
        await running.ready()
        await running.ask("apple")
        await running.ask("pear")
        screen = running.screen
        pear = screen.conversation.exchanges[-1]
        again = screen.conversation.again(pear)
        screen.conversation.remove(pear)  # as the choice to edit it does, before its message goes
        await screen.transcript.add_question(again)
        assert running.app.failure is None
        assert screen.conversation.place(pear, False) == screen.conversation.place(again, False) == (1, 1)

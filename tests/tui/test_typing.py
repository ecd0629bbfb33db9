"""What is typed reaches what was on the screen when it was typed, and no text is lost."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from textual.command import CommandList
from textual.events import Key, Paste
from textual.geometry import Region
from textual.widgets import OptionList

from localllm.history.store import History
from localllm.tui.keymap import KEYS, VIM, is_key
from localllm.tui.screens.help import HelpScreen
from localllm.tui.screens.models import ModelsScreen
from localllm.tui.terminal_input import InputParser
from localllm.tui.widgets.choices import Choices
from localllm.tui.widgets.engine import EnginePanel
from localllm.tui.widgets.home import Home
from localllm.tui.widgets.prompt import Hints
from localllm.tui.widgets.sidebar import Sidebar

from .conftest import chat
from .test_chat import notices
from .test_panels import long_chat


async def test_a_model_chosen_on_the_first_screen_leaves_the_keyboard_at_the_prompt() -> None:
    async with chat(home=True) as running:
        await running.until(lambda: running.screen.query_one("#home-list", OptionList).option_count > 2)
        await running.pilot.press("ctrl+o")
        await running.until(lambda: isinstance(running.app.screen, ModelsScreen) and running.app.screen.row)
        await running.pilot.press("enter")
        await running.ready()
        await running.pilot.press("h", "i")
        assert running.prompt.text == "hi" and running.app.focused is running.prompt


async def test_a_terminal_that_was_too_small_for_a_while_keeps_keys_and_draft() -> None:
    async with chat() as running:
        await running.ready()
        await running.pilot.press("a")
        await running.pilot.resize_terminal(30, 8)
        await running.until(lambda: running.screen.query_one("#small").display)
        await running.pilot.press("b")
        await running.pilot.resize_terminal(80, 24)
        await running.until(lambda: not running.screen.query_one("#small").display)
        await running.pilot.press("c")
        assert running.prompt.text == "abc"


@pytest.mark.slow
async def test_nothing_is_drawn_next_to_the_words_that_the_terminal_is_too_small() -> None:
    async with chat() as running:
        await running.ready()
        await running.ask("!oom")
        await running.until(lambda: running.screen.query_one(Choices).display)
        await running.pilot.press("/")
        await running.until(lambda: running.screen.query_one(Hints).display)
        for size in ((39, 12), (80, 11), (20, 3)):
            await running.pilot.resize_terminal(*size)
            await running.until(lambda: running.screen.query_one("#small").display)
            await running.pilot.pause()
            assert "".join(running.drawn).split() == ["terminal", "too", "small", "(40×12)"]
        await running.pilot.resize_terminal(80, 24)
        await running.until(lambda: any("/model" in line for line in running.drawn))
        assert not any("too small" in line for line in running.drawn)
        assert running.prompt.text == "/"


async def test_a_question_of_the_program_takes_no_letters_until_tab() -> None:
    async with chat() as running:
        await running.ready()
        await running.ask("!oom")
        banner = running.screen.query_one(Choices)
        await running.until(lambda: banner.display)
        await running.pilot.press("k", "enter")
        await running.until(lambda: running.screen.conversation.exchanges[-1].user == "k")
        assert len(running.backend.started) == 1
        assert "Tab to choose" in str(banner.border_title)
        await running.pilot.press("n", "tab")
        assert running.app.focused is banner and "Tab" not in str(banner.border_title)
        await running.pilot.press("k")
        await running.until(lambda: len(running.backend.started) == 2)
        assert running.prompt.text == "n"


async def test_a_key_typed_before_a_screen_was_drawn_is_not_for_it() -> None:
    async with chat() as running:
        await running.ready()
        early = Key("d", "d")
        enter = Key("enter", "\r")
        running.prompt.text = "draft "
        await running.pilot.press("end", "ctrl+o")
        await running.until(lambda: isinstance(running.app.screen, ModelsScreen) and running.app.screen.row)
        for key in (early, enter):
            running.app.post_message(key)
        await running.until(lambda: running.prompt.text == "draft d")
        assert isinstance(running.app.screen, ModelsScreen)
        assert not [worker for worker in running.app.workers if worker.group == "downloads"]


async def test_a_model_that_is_not_there_leaves_the_one_that_runs() -> None:
    async with chat(tps=100) as running:
        await running.ready()
        await running.send("long")
        await running.until(lambda: running.answers and running.answers[0].exchange.text)
        await running.send("/model nosuch")
        await running.until(lambda: "unknown model nosuch" in notices(running))
        assert running.screen.phase == "ready" and running.screen.session.model == "fake"
        assert running.screen.current is not None and len(running.backend.started) == 1
        await running.send("/model fak")  # another name of the one that runs
        await running.until(lambda: "is already running" in running.text("#state"))
        assert len(running.backend.started) == 1
        await running.pilot.press("escape")


async def test_what_is_typed_in_a_row_is_carried_out_in_this_order(monkeypatch: pytest.MonkeyPatch) -> None:
    async with chat() as running:
        await running.ready()
        found = running.backend.find

        def slow(name: str) -> str:
            time.sleep(0.2)
            return found(name)

        monkeypatch.setattr(running.backend, "find", slow)
        await running.send("/model fake-download")
        await running.send("hello")
        await running.until(lambda: running.screen.conversation.exchanges)
        assert [name for name, _ in running.backend.started] == ["fake", "fake-download"]
        assert running.screen.session.model == "fake-download"


async def test_esc_that_came_too_late_to_stop_does_not_browse() -> None:
    async with chat() as running:
        await running.ready()
        await running.ask("hello")
        running.screen.ended_at = time.monotonic() + 60
        await running.pilot.press("escape", "e")
        assert running.prompt.text == "e" and running.screen.editing is None


async def test_esc_closes_a_panel_before_it_browses_and_a_draft_keeps_it_in_the_prompt(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    long_chat(path, 1)
    async with chat(path=path) as running:
        await running.ready()
        await running.ask("hello")
        await running.pilot.press("f4", "escape")
        assert not running.screen.query_one(EnginePanel).display and not running.screen.browse.active
        await running.pilot.press("f3")
        await running.until(lambda: running.screen.query_one(Sidebar).display)
        await running.pilot.press("escape")
        assert not running.screen.query_one(Sidebar).display and not running.screen.browse.active
        await running.pilot.press("d", "escape", "e")
        assert running.prompt.text == "de" and running.screen.editing is None


@pytest.mark.parametrize("key", ["f4", *(pytest.param(key, marks=pytest.mark.slow) for key in ("f1", "ctrl+o"))])
async def test_keys_of_the_chat_work_while_browsing(key: str) -> None:
    async with chat() as running:
        await running.ready()
        await running.ask("hello")
        await running.pilot.press("escape")
        await running.until(lambda: running.screen.browse.active)
        await running.pilot.press(key)
        shown = {"f1": HelpScreen, "ctrl+o": ModelsScreen}.get(key)
        panel = running.screen.query_one(EnginePanel)
        await running.until(lambda: isinstance(running.app.screen, shown) if shown else panel.display)
        await running.pilot.press("escape")


async def test_drafts_come_back() -> None:
    async with chat() as running:
        await running.ready()
        await running.ask("earlier")
        await running.ask("first")
        running.prompt.text = "draft"
        await running.pilot.press("up", "!")
        assert running.prompt.text == "first!"
        await running.pilot.press("up", "down")
        assert running.prompt.text == "first!"
        await running.pilot.press("enter")
        await running.until(lambda: running.screen.conversation.exchanges[-1].user == "first!")
        assert running.prompt.sent_before[-2:] == ["draft", "first!"]
        await running.until(lambda: running.screen.conversation.exchanges[-1].stop)
        running.prompt.text = "another"
        await running.send("/edit 2")
        await running.until(lambda: running.prompt.text == "first")
        running.prompt.text = "half"
        await running.pilot.press("escape")
        assert running.prompt.text == "" and "half" in running.prompt.sent_before
        running.prompt.text = "gone?"
        await running.pilot.press("ctrl+c", "up")
        assert running.prompt.text == "gone?"


async def test_an_edit_returns_the_draft_it_displaced() -> None:
    async with chat() as running:
        await running.ready()
        await running.ask("first")
        running.prompt.text = "draft"
        running.screen.edit(running.screen.conversation.exchanges[0], True)
        assert running.prompt.text == "first"
        await running.pilot.press("escape")
        assert running.prompt.text == "draft" and running.screen.editing is None


async def test_enter_in_the_search_of_chats_opens_what_was_typed(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    long_chat(path, 1)
    async with chat(path=path, talk=None) as running:
        await running.ready()
        await running.ask("hello")
        with History(path) as history:
            assert len(history.chats()) >= 1
        await running.pilot.press("ctrl+s")
        await running.until(lambda: running.screen.query_one("#chat-filter").has_focus)
        running.screen.query_one("#chat-filter").value = "zzz"  # type: ignore[attr-defined]
        await running.pilot.press("enter")
        assert running.screen.conversation.exchanges[-1].user == "hello"  # nothing matched: nothing was opened


async def test_an_editor_that_is_not_there_leaves_the_screen_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VISUAL", raising=False)
    async with chat() as running:
        for editor, said in (("no-such-editor -w", "not installed"), ("'", "not installed"), ("   ", "not installed")):
            monkeypatch.setenv("EDITOR", editor)
            running.prompt.text = "draft"
            await running.pilot.press("ctrl+g")
            await running.until(lambda said=said: said in running.text("#state"))  # type: ignore[misc]
            assert running.prompt.text == "draft"
            running.screen.flash("")


async def test_attached_files_can_be_taken_back(tmp_path: Path) -> None:
    names = [tmp_path / f"{name}.txt" for name in "ab"]
    for name in names:
        name.write_text("text")
    async with chat() as running:
        await running.ready()
        files = running.screen.session.files

        async def attach() -> None:
            await running.send(f"/attach {names[0]} {names[1]}")
            await running.until(lambda: len(files) == 2)

        await attach()
        await running.pilot.press("backspace")
        assert [one.name for one in files] == ["a.txt"]
        await running.pilot.press("escape")
        assert not files
        await attach()
        await running.send("/attach off")
        await running.until(lambda: not files)
        await attach()
        await running.send("/new")
        await running.until(lambda: not files)
        assert not running.screen.query_one("#files").display


@pytest.mark.parametrize("turns", [3, *(pytest.param(turns, marks=pytest.mark.slow) for turns in (2, 4))])
async def test_a_worker_that_ends_while_it_removes_something_does_no_harm(turns: int) -> None:
    async with chat() as running:  # whose end would fail
        await running.ready()
        transcript = running.screen.transcript
        await transcript.begin_loading("fake")
        removing = running.screen.run_worker(transcript.end_loading)
        for _ in range(turns):
            await asyncio.sleep(0)
        removing.cancel()
        await running.until(lambda: transcript.card is None)


async def test_a_list_without_room_takes_no_page_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    async with chat() as running:
        await running.ready()
        await running.pilot.press("ctrl+p")
        await running.until(lambda: [one for one in running.app.screen.query(CommandList) if one.options])
        monkeypatch.setattr(CommandList, "scrollable_content_region", Region())  # as until it is laid out
        running.app.screen.query_one(CommandList)._clear_caches()
        await running.pilot.press("pagedown", "pageup", "escape")
        assert running.app.failure is None and running.app.screen is running.screen


async def test_a_screen_that_lay_below_another_before_it_was_drawn_takes_no_keys_until_then() -> None:
    async with chat() as running:
        await running.ready()
        app = running.app
        for screen in (ModelsScreen("", str), HelpScreen(app.keymap)):
            app.push_screen(screen)
        app.pop_screen()
        assert isinstance(app.screen, ModelsScreen)
        for key in (Key("escape", None), Key("a", "a")):  # its widgets are not there yet
            await app.on_event(key)
        assert isinstance(app.screen, ModelsScreen) and running.prompt.text == "a"
        await running.until(lambda: app.screen.is_mounted and app.screen.row)
        await running.pilot.press("escape")
        assert app.screen is running.screen


async def test_a_key_that_comes_back_unused_does_nothing_to_a_screen_that_appeared_meanwhile() -> None:
    async with chat() as running:
        await running.ready()
        app, key = running.app, Key("escape", None)
        key._forwarded = True  # the prompt had it
        app.push_screen(ModelsScreen("", str))
        await app.on_event(key)
        await running.until(lambda: app.screen.is_mounted and app.screen.row)
        await running.pilot.press("escape")
        assert app.screen is running.screen


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ("a\x1b\rb", ["a", "alt+enter", "b"]),
        ("\x1b\n\x1b[13;3u\r\n", ["alt+enter", "alt+enter", "enter", "ctrl+j"]),
        ("\x1b[A\x1b", ["up", "escape"]),
        ("x\x1b[200~a\x1b\rb\x1b[2Jc\x1b[201~\x1b\r", ["x", "pasted: a\rb[2Jc", "alt+enter"]),
        ("\x1b[200~a\x1b[200~\x1b[201~\x1b[200~b\x1b\x1b[201~", ["pasted: a[200~", "pasted: b"]),
    ],
    ids=["alt-enter", "enters", "escape", "esc-in-a-paste", "pastes"],
)
def test_bytes_of_a_terminal_are_keys_and_pasted_texts(
    sent: str, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in (1, 5, len(sent)):  # as they come in
        parser = InputParser()
        events = [one for at in range(0, len(sent), size) for one in parser.feed(sent[at : at + size])]
        with monkeypatch.context() as later:  # nothing follows: a lone Esc is a key
            later.setattr("textual._parser.get_time", lambda: float("inf"))
            events += parser.tick()
        keys = [f"pasted: {one.text}" if isinstance(one, Paste) else getattr(one, "key", one) for one in events]
        assert keys == read, size


async def test_enter_right_behind_the_letters_that_leave_the_first_screen_sends_them() -> None:
    """As they arrive over a slow line, all at once: each was for the list, until the first brought the prompt."""
    async with chat(home=True) as running:
        await running.until(lambda: running.screen.query_one(Home).default_model)
        for letter in "hello":
            running.app.post_message(Key(letter, letter))
        running.app.post_message(Key("enter", "\r"))
        await running.until(lambda: running.screen.conversation.exchanges)
        assert running.screen.conversation.exchanges[0].user == "hello" and not running.prompt.text


async def test_a_key_that_does_not_exist_leaves_the_default_one() -> None:
    own = {"chat.stop": "esc,notakey", "app.help": "ctl+x, f2", "foo.bar": "escape"}
    async with chat(keys=own, tps=20) as running:
        await running.ready()
        told = notices(running).split("\n")
        assert "! [keys] chat.stop: 'notakey' is not a key; escape is used" in told
        assert "! [keys] app.help: 'ctl+x' is not a key; f2 is used" in told
        assert any("'foo.bar' is not a key binding" in line for line in told)
        await running.send("long")
        await running.until(lambda: running.screen.current is not None)
        await running.until(lambda: "esc stop · F2 help" in running.text("#keys"))
        await running.pilot.press("escape")
        await running.until(lambda: running.screen.conversation.exchanges[0].stop == "abort")


def test_every_key_that_is_bound_exists() -> None:
    bound = (*(key.keys for key in KEYS.values()), *VIM.values())
    assert all(is_key(key) for keys in bound for key in keys.split(","))
    assert all(map(is_key, ("ctrl+shift+a", "super+k", "slash", "G", "é", "f24", "-")))
    assert not any(map(is_key, ("esc", "Escape", "notakey", "ctl+x", "ctrl+", "f99", "pgup", "")))

"""Panels around the conversation: home, models, parameters, engine, chats, palette, viewers."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from textual.widgets import DataTable, Input, OptionList, Static

from localllm.backend.scripted import FakeBackend
from localllm.config import Preset, UiConfig
from localllm.conversation.session import Session
from localllm.conversation.tree import Conversation
from localllm.errors import ModelNotFound
from localllm.history.records import SavedChat, SavedMessage
from localllm.history.store import History
from localllm.interface import Check, Facts, ModelChoice
from localllm.tui.chat.screen import ChatScreen
from localllm.tui.frame import Frame
from localllm.tui.screens.dialogs import PickScreen
from localllm.tui.screens.models import ModelsScreen
from localllm.tui.screens.params import ParamsScreen
from localllm.tui.screens.viewer import Viewer
from localllm.tui.widgets.engine import EnginePanel, page_map
from localllm.tui.widgets.home import Home, model_line
from localllm.tui.widgets.messages import AssistantMessage, UserMessage
from localllm.tui.widgets.sidebar import Sidebar

from .conftest import WAIT_S, Chat, chat


def shown(running: Chat, selector: str) -> str:
    """What a Static of the present screen shows."""
    return str(running.app.screen.query_one(selector, Static).render())


def options(listing: OptionList) -> list[str]:
    """The rows of a list."""
    return [str(listing.get_option_at_index(i).prompt) for i in range(listing.option_count)]


def long_chat(path: Path, turns: int) -> str:
    """A saved chat; every third answer has a list and code."""
    messages: list[SavedMessage] = []
    parent = None
    for number in range(turns):
        asked = SavedMessage(2 * number + 1, "aaaa", parent, "user", f"question {number}", created=1e9 + number)
        text = f"answer {number}\n\n- one\n- two\n\n```python\nx = {number}\n```\n" if number % 3 == 0 else "short"
        said = SavedMessage(2 * number + 2, "aaaa", asked.id, "assistant", text, created=1e9 + number + 0.5)
        messages += [asked, said]
        parent = said.id
    with History(path) as history:
        history.save(SavedChat("aaaa", "A long chat", "fake", leaf_id=parent), messages)
    return "aaaa"


async def test_enter_in_an_empty_prompt_goes_to_what_can_be_started() -> None:
    async with chat(home=True) as running:
        await running.until(lambda: running.screen.query_one(Home).default_model)
        running.prompt.focus()
        await running.pilot.press("enter")
        await running.until(lambda: running.app.focused is running.screen.query_one("#home-list"))
        assert not running.backend.started
        await running.pilot.press("enter")
        await running.until(lambda: running.backend.started)


async def test_home_says_what_is_wrong_with_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> str:
        raise ModelNotFound("huggingface.co cannot be reached", "localllm pull smollm2")

    async with chat(model="", home=True) as running:
        home = running.screen.query_one(Home)
        listing = home.query_one(OptionList)
        await running.until(lambda: any("fake-download" in row for row in options(listing)))
        monkeypatch.setattr(running.backend, "find", find)
        await running.pilot.press("enter")
        await running.until(lambda: "cannot be reached" in shown(running, "#home-said"))
        assert home.display and not running.backend.started


def test_a_row_of_home_keeps_its_columns_apart() -> None:
    row = ModelChoice("qwen3-4b-instruct-2507", "Q4_K_M", 2_500_000_000, False, True, recommended=True, ctx=8192)
    assert "2.3 GiB download  fits 8k" in model_line(row, 74)
    for tps, shown in ((0.4, "≈ 0.4 tok/s"), (1.25, "≈ 1.2 tok/s"), (91.4, "≈ 91 tok/s")):
        assert model_line(replace(row, tps=tps), 74).endswith(f" {shown}")


async def test_home_offers_chats_and_models_and_loads_nothing_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    long_chat(path, 3)
    async with chat(model="", path=path, home=True) as running:
        home = running.screen.query_one(Home)
        listing = home.query_one(OptionList)
        await running.until(lambda: any("fake-download" in row for row in options(listing)))
        rows = options(listing)
        assert any("A long chat" in row for row in rows)
        assert any("✓ 200 tok/s" in row for row in rows) and any("400 MiB download" in row for row in rows)
        assert not any("fake-broken" in row for row in rows)
        await running.until(lambda: "CPU only" in shown(running, "#home-machine"))
        assert running.backend.started == []
        assert running.app.focused is listing
        await running.pilot.press("x", "backspace")
        assert running.app.focused is running.prompt
        await running.send("hello")  # with the first model here
        await running.until(lambda: running.backend.started == [("fake", {})])
        await running.until(lambda: running.screen.conversation.exchanges[-1].text == "hello")
        assert not home.display


@pytest.mark.slow
async def test_home_continues_a_chat_with_its_model(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    long_chat(path, 3)
    async with chat(model="", path=path, home=True) as running:
        listing = running.screen.query_one(Home).query_one(OptionList)
        await running.until(lambda: any("A long chat" in row for row in options(listing)))
        listing.highlighted = next(i for i, row in enumerate(options(listing)) if "A long chat" in row)
        await running.until(lambda: running.screen.query_one(Home).models is not None)
        await running.pilot.press("enter")
        await running.until(lambda: len(running.answers) == 3)
        await running.until(lambda: running.backend.started == [("fake", {})])


async def test_a_wide_terminal_shows_the_chats_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    long_chat(path, 1)
    async with chat(path=path, size=(140, 34)) as running:
        await running.until(lambda: running.screen.query_one(Sidebar).display)
        assert running.app.focused is running.prompt


@pytest.mark.slow
async def test_a_long_chat_opens_with_few_widgets_and_earlier_turns_come_back(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    name = long_chat(path, 500)
    async with chat(path=path) as running:
        await running.ready()
        await running.screen.open_chat(name)
        await running.until(lambda: len(running.answers) == 8)
        assert len(running.screen.query("UserMessage, AssistantMessage")) <= 20
        assert "492 earlier" in running.text("#earlier")
        assert running.screen.conversation.exchanges[-1].user == "question 499"
        await running.screen.transcript.load_earlier()
        await running.until(lambda: len(running.screen.query(UserMessage)) == 13)
        assert "487 earlier" in running.text("#earlier")
        await running.ask("one more")
        assert len(running.backend.sent[-1][0]) == 1001
        assert len(running.screen.query(AssistantMessage)) <= 10


async def test_chats_are_listed_searched_and_opened(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    long_chat(path, 2)
    async with chat(path=path) as running:
        await running.ready()
        await running.ask("about kernels")
        await running.pilot.press("f3")
        bar = running.screen.query_one(Sidebar)
        listing = bar.query_one(OptionList)
        await running.until(lambda: any("about kernels" in row for row in options(listing)))
        assert options(listing)[0] == "Today"
        await running.pilot.press("ctrl+s")
        await running.until(lambda: bar.query_one(Input).has_focus)
        await running.pilot.press(*"question")
        await running.until(lambda: not any("kernels" in row for row in options(listing)))
        await running.pilot.press("enter")
        await running.until(lambda: running.screen.conversation.id == "aaaa")
        await running.until(lambda: len(running.answers) == 2)
        await running.pilot.resize_terminal(80, 24)
        await running.until(lambda: running.screen.has_class("-narrow"))
        await running.pilot.press("escape")
        await running.until(lambda: not bar.display)


@pytest.mark.parametrize("size", [pytest.param((118, 34), marks=pytest.mark.slow), (60, 11)])
async def test_the_first_screen_knows_its_size_before_it_is_styled(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    steps = {name for _, name in Frame.HORIZONTAL_BREAKPOINTS + Frame.VERTICAL_BREAKPOINTS}
    seen: list[frozenset[str]] = []
    compose = ChatScreen.compose
    monkeypatch.setattr(ChatScreen, "compose", lambda screen: seen.append(screen.classes) or compose(screen))
    async with chat(size=size) as running:
        assert len(seen[0] & steps) == 2
        assert running.screen.classes & steps == seen[0] & steps


@pytest.mark.slow
async def test_an_answer_that_runs_is_kept_when_another_chat_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    name = long_chat(path, 2)
    async with chat(path=path, tps=100) as running:
        await running.ready()
        first = running.screen.conversation.id
        await running.send("long")
        await running.until(lambda: running.answers and running.answers[0].exchange.text.startswith("Sentence"))
        await running.screen.open_chat(name)
        await running.until(lambda: len(running.answers) == 2)
        await running.screen.open_chat(first)
        await running.until(lambda: running.screen.conversation.id == first)
        exchange = running.screen.conversation.exchanges[0]
        assert exchange.stop == "abort" and exchange.text.startswith("Sentence")


async def test_models_show_fit_and_speed_and_change_with_the_context() -> None:
    async with chat() as running:
        await running.ready()
        await running.pilot.press("ctrl+o")
        await running.until(lambda: isinstance(running.app.screen, ModelsScreen))
        table = running.app.screen.query_one(DataTable)
        await running.until(lambda: table.row_count == 5)
        cells = [[str(cell) for cell in table.get_row_at(i)] for i in range(5)]
        assert cells[0][0] == "fake" and cells[0][5] == "✓ 200 tok/s" and cells[0][6] == "✓ running"
        assert cells[3][6] == "↓ download" and "short" in cells[4][6] and cells[2][6] == "✗ cannot run"
        assert "weights" in shown(running, "#model-detail")
        await running.pilot.press("right")
        await running.until(lambda: "@4k" in str(table.get_row_at(0)[3]))
        await running.pilot.press("tab")
        await running.until(lambda: table.row_count == 3)  # on disk
        await running.pilot.press("slash", *"small", "enter")
        await running.until(lambda: table.row_count == 1)
        await running.pilot.press("enter")
        # all that it reads: the window that was looked at is beyond its own limit
        await running.until(lambda: running.backend.started[-1] == ("fake-small", {"ctx": 64}))


@pytest.mark.slow
async def test_q_goes_through_the_formats_of_a_model_and_quality_is_shown_where_it_was_measured() -> None:
    async with chat() as running:
        await running.ready()
        await running.pilot.press("ctrl+o")
        await running.until(lambda: isinstance(running.app.screen, ModelsScreen))
        table = running.app.screen.query_one(DataTable)
        await running.until(lambda: table.row_count == 5)
        await running.until(lambda: "KL 0.03512" in shown(running, "#model-detail"))
        await running.pilot.press("q")
        await running.until(lambda: "has only one format" in shown(running, "#model-detail"))
        await running.pilot.press("down", "down", "down")
        await running.until(lambda: "q ▸ Q4_K_M 400 MiB · Q8_0 650 MiB" in shown(running, "#model-detail"))
        await running.pilot.press("q")
        await running.until(lambda: "Q4_K_M 400 MiB · ▸ Q8_0 650 MiB" in shown(running, "#model-detail"))
        assert [str(cell) for cell in table.get_row_at(3)][1:3] == ["Q8_0", "650 MiB"]
        await running.pilot.press("q")
        await running.until(lambda: str(table.get_row_at(3)[1]) == "Q4_K_M")
        await running.pilot.press("q", "enter")
        await running.until(lambda: running.backend.started[-1] == ("fake-download:Q8_0", {}))


async def test_the_picker_says_that_it_is_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning every model takes a while; meanwhile the table is empty."""
    async with chat() as running:
        found = threading.Event()
        monkeypatch.setattr(running.backend, "choices", lambda ctx=None: [] if found.wait(WAIT_S) else None)
        await running.pilot.press("ctrl+o")
        await running.until(lambda: isinstance(running.app.screen, ModelsScreen))
        await running.pilot.resize_terminal(100, 30)
        await running.until(lambda: shown(running, "#model-detail") == "looking …")
        found.set()
        await running.until(lambda: shown(running, "#model-detail") == "no models")


@pytest.mark.slow
async def test_an_offline_model_is_not_fetched() -> None:
    async with chat(offline=True) as running:
        await running.ready()
        await running.pilot.press("ctrl+o")
        await running.until(lambda: isinstance(running.app.screen, ModelsScreen))
        table = running.app.screen.query_one(DataTable)
        await running.until(lambda: table.row_count == 5)
        await running.pilot.press("down", "down", "down", "enter")
        await running.until(lambda: "offline" in shown(running, "#model-detail"))
        await running.pilot.press("escape")
        await running.until(lambda: "offline" in running.text("#state"))


@pytest.mark.slow
async def test_the_home_screen_offers_no_downloads_offline() -> None:
    async with chat(model="", home=True, offline=True) as running:
        listing = running.screen.query_one("#home-list", OptionList)
        await running.until(lambda: "New chat with" in [str(one.prompt) for one in listing.options])
        assert [one.id for one in listing.options if not one.disabled] == ["model:fake", "model:fake-small", "browse"]
        home = running.screen.query_one(Home)
        home.show_models([one for one in home.models or () if not one.local])
        assert str(listing.options[0].prompt) == "No chat models here, and offline mode is on"


SMALL = [(40, 12), pytest.param((60, 15), marks=pytest.mark.slow), pytest.param((80, 20), marks=pytest.mark.slow)]


@pytest.mark.slow
@pytest.mark.parametrize("size", SMALL)
async def test_home_shows_the_row_under_the_cursor_in_a_small_window(size: tuple[int, int], tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    long_chat(path, 1)
    async with chat(model="", path=path, home=True, size=size) as running:
        home = running.screen.query_one(Home)
        listing = home.query_one(OptionList)
        await running.until(lambda: home.models and any("A long chat" in row for row in running.drawn))

        def is_seen() -> bool:
            option = listing.highlighted_option
            assert option is not None
            return any(str(option.prompt)[:20].strip() in line for line in running.drawn)

        for key in ("down", "end", "up", "home"):
            await running.pilot.press(key)
            await running.until(is_seen)
        await running.pilot.press("end")
        home.tell("what went wrong")
        await running.until(lambda: any("went wrong" in line for line in running.drawn) and is_seen())
        await running.pilot.resize_terminal(118, 34)
        await running.pilot.resize_terminal(*size)
        await running.until(is_seen)


@pytest.mark.slow
async def test_the_table_of_models_shows_the_row_under_the_cursor_in_a_small_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = 40, 12
    async with chat(size=size) as running:
        await running.ready()
        first, *rest = running.backend.choices()
        rows = [first, *rest, *(replace(first, name=f"model-{number}") for number in range(20))]
        monkeypatch.setattr(running.backend, "choices", lambda ctx: rows)
        await running.pilot.press("ctrl+o")
        await running.until(lambda: isinstance(running.app.screen, ModelsScreen) and running.app.screen.row)
        table = running.app.screen.query_one(DataTable)

        def seen() -> list[str]:
            return [row.name for row in rows if any(f" {row.name} " in line for line in running.drawn)]

        for at in (0, 3, len(rows) - 1, 5):
            table.move_cursor(row=at)
            await running.until(lambda at=at: rows[at].name in seen() and len(seen()) >= 3)  # type: ignore[misc]
        await running.pilot.resize_terminal(118, 34)
        table.move_cursor(row=len(rows) - 1)
        await running.pilot.resize_terminal(*size)
        await running.until(lambda: rows[-1].name in seen())


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("size", "columns", "status"),
    [
        ((118, 34), 7, "GiB short"),
        ((80, 24), 5, "✗ too large"),
        pytest.param((60, 20), 3, "✗ too large", marks=pytest.mark.slow),
        ((40, 12), 2, "✗ too large"),
    ],
)
async def test_the_table_of_models_fits_its_box(
    size: tuple[int, int], columns: int, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with chat(size=size) as running:
        await running.ready()
        first, *rest = running.backend.choices()
        wide = replace(first, name="a-model-of-a-long-name", format="UD-Q4_K_XL", size_bytes=999 << 20, tps=128.0)
        monkeypatch.setattr(running.backend, "choices", lambda ctx: [wide, *rest])
        await running.pilot.press("ctrl+o")
        await running.until(lambda: isinstance(running.app.screen, ModelsScreen))
        table = running.app.screen.query_one(DataTable)
        await running.until(lambda: table.row_count == 5)
        await running.until(lambda: table.virtual_size.width)
        assert len(table.columns) == columns and table.max_scroll_x == 0
        await running.until(lambda: any(status in line for line in running.drawn))
        await running.pilot.resize_terminal(60, 20)
        await running.until(lambda: len(table.columns) == 3 and table.row_count == 5)
        edge = running.app.screen.query_one("#models").content_region.right
        await running.until(lambda: any("▒" in line and line[edge - 1] == "░" for line in running.drawn))


@pytest.mark.parametrize("size", [pytest.param((118, 34), marks=pytest.mark.slow), (80, 24)])
async def test_parameters_say_who_recommends_them(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Facts(sampling=(("temperature", 0.6, "card of Qwen3 2507 Thinking"),))
    async with chat(size=size) as running:
        await running.ready()
        monkeypatch.setattr(running.backend, "facts", lambda: facts)
        await running.pilot.press("f2")
        await running.until(lambda: isinstance(running.app.screen, ParamsScreen))
        await running.until(lambda: any("0.6 (card of Qwen3 2507 Thinking)" in line for line in running.drawn))


@pytest.mark.slow
async def test_parameters_can_be_typed_at_once() -> None:
    sampling: dict[str, object] = {"temperature": 0.5}
    async with chat(sampling=sampling, presets={"short": Preset()}) as running:  # type: ignore[arg-type]
        await running.ready()
        await running.pilot.press("f2")
        await running.until(lambda: isinstance(running.app.screen, ParamsScreen) and running.app.focused)
        await running.pilot.press(*"0.3", "enter")
        await running.until(lambda: sampling == {"temperature": 0.3})


async def test_parameters_are_checked_and_taken_over() -> None:
    sampling: dict[str, object] = {"temperature": 0.5}
    async with chat(sampling=sampling) as running:  # type: ignore[arg-type]
        await running.ready()
        await running.pilot.press("f2")
        await running.until(lambda: isinstance(running.app.screen, ParamsScreen))
        screen = running.app.screen
        assert screen.query_one("#p-temperature", Input).value == "0.5"
        assert screen.query_one("#p-temperature", Input).placeholder == "1 (default)"  # what an empty field means
        assert screen.query_one("#p-top_k", Input).placeholder == "off"
        screen.query_one("#p-top_p", Input).value = "7"
        await running.pilot.press("ctrl+s")
        await running.until(lambda: "top_p" in shown(running, "#wrong"))
        screen.query_one("#p-top_p", Input).value = "0.9"
        screen.query_one("#p-temperature", Input).value = ""
        await running.pilot.press("ctrl+s")
        await running.until(lambda: sampling == {"top_p": 0.9})
        await running.until(lambda: "from the next message" in running.text("#state"))


@pytest.mark.slow
async def test_the_engine_panel_shows_pages_batches_speeds_and_memory() -> None:
    async with chat(tps=200) as running:
        await running.ready()
        await running.pilot.press("f4")
        panel = running.screen.query_one(EnginePanel)
        assert panel.display
        await running.send("long")
        await running.until(lambda: "1 running" in running.text("#engine-text"))
        await running.until(lambda: "ms/step" in running.text("#engine-text"))
        text = running.text("#engine-text")
        for part in ("fake kernels", "KV pages", "█ in use", "▒ cached", "░ free", "402 MiB held of 453 MiB planned"):
            assert part in text
        await running.pilot.press("escape")
        await running.until(lambda: running.screen.current is None)
        await running.until(
            lambda: "tok/s" in running.text("#engine-text") and "TTFT      " in running.text("#engine-text")
        )
        await running.pilot.press("f4")
        assert not panel.display


def test_the_map_of_pages_draws_every_state() -> None:
    lines = list(page_map(bytes([2] * 10 + [1] * 5 + [0] * 25), 10, 6))
    assert [line.plain for line in lines] == ["█" * 10, "▒" * 5 + "░" * 5, "░" * 10, "░" * 10]
    large = "".join(line.plain for line in page_map(bytes([0] * 9000 + [2]), 40, 6))
    assert len(large) <= 240 and large.endswith("█") and large.count("█") == 1
    panel = EnginePanel(Session(FakeBackend(), Conversation()))
    full = Facts(model="m", run_summary="t\x1b[2J", pages_total=1, power_w=200.0, num_preemptions=3)
    text = "\n".join(line.plain for line in panel.lines(full, 40))
    assert "\x1b" not in text and "200 W" in text and "preempted" in text
    assert [line.plain for line in panel.lines(Facts(), 40)] == ["no model is loaded"]


@pytest.mark.slow
async def test_the_palette_finds_commands_chats_and_models(tmp_path: Path) -> None:
    from localllm.tui.palette import Everything

    path = tmp_path / "chats.db"
    long_chat(path, 1)
    async with chat(path=path) as running:
        await running.ready()
        provider = Everything(running.screen)
        await provider.startup()
        for query in ("Models", "Export", "long chat", "fake-small"):
            hits = [hit async for hit in provider.search(query)]
            assert hits, query
        assert len([hit async for hit in provider.discover()]) > 20
        await running.pilot.press("ctrl+p")
        await running.until(lambda: len(running.app.screen_stack) == 3)
        await running.pilot.press(*"engine")
        await running.until(lambda: any("(F4)" in line for line in running.drawn))
        await running.pilot.press("enter")
        await running.until(lambda: running.screen.query_one(EnginePanel).display)


@pytest.mark.slow
async def test_keys_can_be_bound_another_way() -> None:
    keys = {"chat.new": "ctrl+y", "models.open": "f8", "app.halp": "f1"}
    async with chat(keys=keys) as running:
        await running.ready()
        assert "F8 models" in running.text("#keys")
        await running.until(lambda: "app.help?" in "".join(str(n.render()) for n in running.screen.query("Notice")))
        await running.ask("hello")
        await running.pilot.press("ctrl+n")
        assert running.screen.conversation.exchanges
        await running.pilot.press("f8")
        await running.until(lambda: isinstance(running.app.screen, ModelsScreen))


@pytest.mark.slow
async def test_vim_keys() -> None:
    async with chat(ui=UiConfig(keys="vim")) as running:
        await running.ready()
        await running.ask("hello")
        await running.pilot.press("escape", "k")
        assert running.screen.browse.text == "hello"
        await running.pilot.press("u")  # answer again
        await running.until(lambda: len(running.backend.sent) == 2)


@pytest.mark.slow
async def test_what_other_commands_say_can_be_read_and_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setattr("localllm.tui.downloads.OWN", [sys.executable, "-c", "print('all \\x1b[2Jwell')"])
    async with chat() as running:
        await running.ready()
        await running.pilot.press("f9")
        await running.until(lambda: isinstance(running.app.screen, Viewer))
        await running.until(lambda: "all [2Jwell" in shown(running, "Static"))
        await running.pilot.press("y")
        await running.until(lambda: "well" in running.app.clipboard)
        await running.pilot.press("escape")
        await running.until(lambda: not isinstance(running.app.screen, Viewer))


async def test_names_titles_and_files_cannot_reach_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b]0;x\x07\x9b31m[red]\u202egnp"
    path = tmp_path / "chats.db"
    with History(path) as history:
        history.save(SavedChat("bbbb", evil, evil, evil), [SavedMessage(1, "bbbb", None, "user", evil)])
    talk = Conversation(evil)
    async with chat(path=path, talk=talk, model="fake" + evil, presets={}) as running:
        await running.until(lambda: running.screen.phase == "ready")
        await running.pilot.press("f3", "f4")
        await running.screen.open_chat("bbbb")
        await running.until(lambda: any("[red]" in line for line in running.drawn))
        text = "".join(running.drawn)
        for bad in ("\x1b", "\x07", "\x9b", "\u202e"):
            assert bad not in text


@pytest.mark.parametrize("what", ["future", pytest.param("folder", marks=pytest.mark.slow)])
async def test_a_database_that_cannot_be_used_costs_the_history_not_the_chat(tmp_path: Path, what: str) -> None:
    path = tmp_path / "chats.db"
    if what == "folder":
        path.mkdir()
    else:
        with History(path) as history:
            history._connection.execute("PRAGMA user_version = 99")
    async with chat(path=path) as running:
        await running.ready()
        assert (await running.ask("hello")).exchange.text == "hello"
        await running.until(
            lambda: "not being saved" in "".join(str(n.render()) for n in running.screen.query("Notice"))
        )
        await running.until(lambda: "not saved" in running.text("#state"))


@pytest.mark.slow
async def test_a_message_sent_before_is_searched_and_put_into_the_prompt() -> None:
    async with chat() as running:
        await running.ready()
        for text in ("apples", "pears", "plums"):
            await running.ask(text)
        await running.pilot.press("ctrl+r")
        await running.until(lambda: isinstance(running.app.screen, PickScreen))
        listing = running.app.screen.query_one(OptionList)
        assert options(listing)[:3] == ["plums", "pears", "apples"]
        await running.pilot.press("down", "down", "up", "enter")
        await running.until(lambda: running.prompt.text == "pears")
        await running.pilot.press("ctrl+r", *"apl", "backspace", "enter")
        await running.until(lambda: running.prompt.text == "apples")


async def test_the_first_screen_counts_what_f9_shows() -> None:
    found = (("term.size", "terminal", "warn"), ("ram", "hardware", "warn"), ("cpu", "hardware", "ok"))
    checks = [Check(name, group, status, "words") for name, group, status in found]  # type: ignore[arg-type]
    async with chat(home=True) as running:
        await running.until(lambda: "doctor:" in shown(running, "#home-machine"))
        running.screen.query_one(Home).show_machine(checks)
        assert "doctor: 1 finding" in shown(running, "#home-machine")
        await running.until(lambda: running.screen.query_one("#home-list", OptionList).option_count > 4)
        listing = running.screen.query_one("#home-list", OptionList)
        at = listing.highlighted_option
        running.screen.query_one(Home).show_chats([SavedChat("aaaa", "A chat", "fake")])
        assert at is not None and listing.highlighted_option is not None and listing.highlighted_option.id == at.id


async def test_models_in_a_narrow_terminal_have_their_format_and_one_size() -> None:
    async with chat(size=(80, 24)) as running:
        await running.pilot.press("ctrl+o")
        await running.until(lambda: isinstance(running.app.screen, ModelsScreen) and running.app.screen.row)
        table = running.app.screen.query_one(DataTable)
        assert [str(column.label) for column in table.columns.values()] == ["MODEL", "QUANT", "SIZE", "SPEED", "STATUS"]
        rows = [[str(cell) for cell in table.get_row_at(at)] for at in range(table.row_count)]
        assert {row[4] for row in rows} >= {"✓ running", "↓ download"}
        assert table.virtual_size.width <= table.size.width

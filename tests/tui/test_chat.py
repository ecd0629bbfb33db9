"""The chat screen over the scripted engine."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest
from textual.containers import VerticalScroll
from textual.widgets import OptionList

from localllm.backend.script import ANSWERS
from localllm.config import UiConfig, load_config
from localllm.config.kinds import THEMES
from localllm.errors import ConfigError
from localllm.interface import Facts, Prefill
from localllm.tui.screens.help import HelpScreen
from localllm.tui.screens.models import ModelsScreen
from localllm.tui.widgets.loading import LoadCard
from localllm.tui.widgets.messages import AssistantMessage, Failure, Notice, UserMessage
from localllm.tui.widgets.status import memory_meter

from .conftest import Chat, chat


def notices(running: Chat) -> str:
    """All that the program said."""
    return "\n".join(str(n.render()) for n in running.screen.query(Notice))


async def test_the_prompt_works_before_the_engine_is_there() -> None:
    async with chat(model="fake-slow") as running:
        assert running.app.focused is running.prompt
        await running.pilot.press("h", "i")
        assert running.prompt.text == "hi"
        assert running.screen.phase == "loading"
        await running.until(lambda: "starting up" in running.text("#state"))
        assert running.screen.query(LoadCard)


async def test_a_message_before_ready_waits_and_is_sent() -> None:
    async with chat(load_s=0.3) as running:
        await running.send("early")
        await running.send("second")
        await running.until(lambda: len(running.screen.query("UserMessage.-queued")) == 2)
        assert running.prompt.border_title == "2 queued"
        await running.until(lambda: len(running.screen.conversation.exchanges) == 2)
        await running.until(lambda: all(e.stop for e in running.screen.conversation.exchanges))
        assert not running.screen.query("UserMessage.-queued")
        assert [messages[-1]["content"] for messages, _ in running.backend.sent] == ["early", "second"]
        assert running.backend.sent[1][0][:2] == [
            {"role": "user", "content": "early"},
            {"role": "assistant", "content": "early"},
        ]


async def test_an_answer_with_its_numbers() -> None:
    async with chat(tps=500) as running:
        await running.ready()
        message = await running.ask("hello there, you")
        assert message.answer.source == "hello there, you"
        footer = str(message.query_one(".stats").render())  # type: ignore[attr-defined]
        assert "tok/s" in footer and "TTFT" in footer and "↑" in footer
        await running.until(lambda: "ready" in running.text("#state"))
        assert "ctx" in running.text("#state") and "%" in running.text("#state")
        assert "fake kernels" in notices(running)
        assert "fake · cpu" in running.text("#model")


async def test_esc_stops_and_keeps_what_is_there() -> None:
    async with chat(tps=100) as running:
        await running.ready()
        await running.send("long")
        await running.until(lambda: running.answers and running.answers[0].exchange.text)
        pressed = time.monotonic()
        await running.pilot.press("escape")
        await running.until(lambda: 0 in running.backend.stopped_at)
        assert running.backend.stopped_at[0] - pressed < 25
        await running.until(lambda: running.answers[0].exchange.stop)
        message = running.answers[0]
        assert message.exchange.stop == "abort"
        await running.until(lambda: "stopped by you" in str(message.query_one(".stats").render()))  # type: ignore[attr-defined]
        assert message.exchange.text == running.backend.emitted[0] == message.answer.source


@pytest.mark.slow
async def test_esc_ends_the_timing_of_kernels() -> None:
    """It goes on in idle moments after the first answer, and is said in the line of keys."""
    async with chat() as running:
        running.backend.device = "cuda:0"
        await running.ready()
        await running.send("hi")
        await running.until(lambda: running.answers and running.answers[0].exchange.stop)
        assert "timing" not in running.text("#keys")
        running.backend.times_kernels = True
        await running.until(lambda: "timing kernels for this GPU · esc stop" in running.text("#keys"))
        await running.pilot.press("escape")
        assert not running.backend.times_kernels
        await running.until(lambda: "kernel timing stopped" in running.text("#state"))
        await running.until(lambda: "timing" not in running.text("#keys"))


@pytest.mark.slow
async def test_scrolled_up_stays_and_end_follows_again() -> None:
    async with chat(tps=1000) as running:
        await running.ready()
        await running.ask("!md")
        await running.send("long")
        await running.until(lambda: len(running.answers) == 2 and running.answers[1].exchange.text)
        transcript = running.screen.query_one("#transcript", VerticalScroll)
        end = transcript.scroll_y
        await running.pilot.press("pageup")
        await running.until(lambda: transcript.scroll_y < end and transcript.scroll_y == transcript.scroll_target_y)
        at, had = transcript.scroll_y, len(running.answers[1].exchange.text)
        await running.until(lambda: len(running.answers[1].exchange.text) > had + 400)
        assert transcript.scroll_y == at
        await running.pilot.press("end")
        await running.until(lambda: transcript.scroll_y >= transcript.max_scroll_y - 1)
        await running.pilot.press("escape")


@pytest.mark.slow
async def test_a_full_context_asks_what_to_leave_out() -> None:
    async with chat() as running:
        await running.ready()
        for text in ("one", "two", "three"):
            await running.ask(text)
        await running.ask("!full now")
        choices = running.screen.query_one("#choices", OptionList)
        await running.until(lambda: choices.display)
        letters = [str(choices.get_option_at_index(i).prompt)[1] for i in range(choices.option_count)]
        assert letters == ["t", "s", "c", "n", "e"]
        assert "oldest 2 questions" in str(choices.get_option_at_index(0).prompt)
        sent = len(running.backend.sent)
        await running.pilot.press("tab", "down", "down", "down", "down", "enter")  # edit
        await running.until(lambda: running.prompt.text == "!full now")
        assert not choices.display
        assert len(running.backend.sent) == sent
        assert "!full now" not in [e.user for e in running.screen.conversation.exchanges]


@pytest.mark.slow
async def test_leaving_out_sends_again_without_the_oldest() -> None:
    async with chat(ctx=18) as running:
        await running.ready()
        for text in ("a b", "c d"):
            await running.ask(text)
        await running.send("e f g h i j k")
        choices = running.screen.query_one("#choices", OptionList)
        await running.until(lambda: choices.display)
        running.backend.answers = ["short"]  # what is left of the window
        await running.pilot.press("tab", "enter")
        await running.until(lambda: running.screen.conversation.exchanges[-1].stop == "stop")
        contents = [message["content"] for message in running.backend.sent[-1][0]]
        assert contents == ["c d", "c d", "e f g h i j k"]


@pytest.mark.parametrize(
    ("model", "says"),
    [("fake-gated", "hf auth login"), pytest.param("fake-huge", "--ctx 16k", marks=pytest.mark.slow)],
)
async def test_loading_fails_with_its_fixes_and_the_screen_lives(model: str, says: str) -> None:
    async with chat(model=model) as running:
        await running.until(lambda: running.screen.phase == "failed")
        await running.until(lambda: running.screen.query(Failure))
        assert says in str(running.screen.query_one(Failure).render())
        assert not running.screen.query(LoadCard)
        await running.until(lambda: running.screen.query_one("#choices", OptionList).display)
        await running.pilot.press("escape")
        await running.send("hello?")
        await running.until(lambda: "no model is loaded" in notices(running))
        assert running.prompt.text == "hello?"  # nothing typed is lost


@pytest.mark.slow
async def test_a_base_model_points_to_run() -> None:
    async with chat(model="fake-base") as running:
        await running.until(lambda: running.screen.phase == "failed")
        await running.until(lambda: running.screen.query(Failure))
        assert "localllm run fake-base" in str(running.screen.query_one(Failure).render())
        await running.until(lambda: running.text("#model").strip() == "fake-base")  # neither device nor memory
        running.screen.action_models()
        await running.until(lambda: isinstance(running.app.screen, ModelsScreen))
        assert running.app.screen._now == "", "not marked as running"


@pytest.mark.slow
async def test_a_base_model_does_not_replace_the_running_one() -> None:
    async with chat() as running:
        await running.ready()
        await running.ask("one")
        await running.screen.use_model("fake-base")  # what the model picker does
        assert 'a base model without a chat template (localllm run fake-base "Once upon a time")' in notices(running)
        assert (running.screen.phase, running.screen.session.model) == ("ready", "fake")
        assert (await running.ask("two")).exchange.text == "two"


@pytest.mark.parametrize(("prompt", "code"), [("!oom", "E502"), pytest.param("!error", "E101", marks=pytest.mark.slow)])
async def test_a_failed_turn_is_a_turn_and_the_next_one_works(prompt: str, code: str) -> None:
    async with chat() as running:
        await running.ready()
        message = await running.ask(prompt)
        assert code in str(message.query_one(".stats").render())  # type: ignore[attr-defined]
        if code == "E502":
            await running.until(lambda: running.screen.query_one("#choices", OptionList).display)
            await running.pilot.press("tab", "q")
        after = await running.ask("again")
        assert after.exchange.text == "again"


@pytest.mark.slow
async def test_while_an_answer_comes_its_speed_and_time_are_shown() -> None:
    async with chat(tps=100) as running:
        await running.ready()
        await running.send("long")
        await running.until(lambda: running.answers)
        stats = running.answers[0].query_one(".stats")
        await running.until(lambda: re.search(r"^\d+ tok/s [ ▁▂▃▄▅▆▇█]{2,} · esc stop$", str(stats.render())))  # type: ignore[attr-defined]
        await running.until(lambda: re.search(r"generating 0:0[1-9]", running.text("#state")))
        await running.pilot.press("escape")
        await running.until(lambda: running.answers[0].exchange.stop)


@pytest.mark.slow
async def test_how_fast_a_long_prompt_is_read_does_not_count_what_was_cached() -> None:
    async with chat(tps=0.2) as running:
        await running.ready()
        await running.send("hello")
        await running.until(lambda: running.answers and running.screen.current)
        turn, message = running.screen.current  # type: ignore[misc]
        stats = message.query_one(".stats")
        running.backend.events().append(Prefill(turn, 1024, 5120))
        await running.until(lambda: "reading 5,120 tokens" in str(stats.render()))  # type: ignore[attr-defined]
        running.screen._reading = time.monotonic() - 2.0, 1024
        running.backend.events().append(Prefill(turn, 3072, 5120))
        await running.until(lambda: "60 %" in str(stats.render()))  # type: ignore[attr-defined]
        shown = re.search(r"▓▓▓▓░░ 60 % · (\S+) tok/s", str(stats.render()))  # type: ignore[attr-defined]
        assert shown and shown[1] in {"1000", "1.0k", *map(str, range(500, 1000))}
        await running.pilot.press("escape")


def test_the_title_line_says_what_memory_is_held() -> None:
    gib = 1 << 30
    facts = Facts(device="cuda:0", held_bytes=14 * gib, have_bytes=24 * gib)
    assert memory_meter(facts) == "VRAM 14.0/24.0 GiB ▓▓▓▓▓▓░░░░"
    assert memory_meter(replace(facts, device="cpu", held_bytes=30 * gib)) == "RAM 30.0/24.0 GiB ▓▓▓▓▓▓▓▓▓▓"
    assert memory_meter(Facts(device="cpu")) == ""


@pytest.mark.slow
async def test_the_memory_stands_in_wide_title_lines_only() -> None:
    async with chat() as running:
        await running.ready()
        await running.until(lambda: "RAM 0.4/8.0 GiB" in running.text("#model"))
        await running.pilot.resize_terminal(80, 24)
        await running.until(lambda: "RAM" not in running.text("#model"))


@pytest.mark.slow
async def test_resizing_while_an_answer_comes() -> None:
    async with chat(tps=300) as running:
        await running.ready()
        await running.send("!md")
        for size in ((60, 24), (118, 34), (39, 11), (100, 40), (20, 5), (118, 34)):
            await running.pilot.resize_terminal(*size)
            small = size[0] < 40 or size[1] < 12
            await running.until(lambda small=small: running.screen.query_one("#small").display == small)  # type: ignore[misc]
        await running.until(lambda: running.answers and running.answers[0].exchange.stop)
        assert running.answers[0].answer.source == ANSWERS["!md"]


async def test_thinking_folds_and_opens() -> None:
    async with chat() as running:
        await running.ready()
        message = await running.ask("!think")
        thought = str(message.thought.render())
        assert thought.startswith("▸ thought for") and "from every side" not in thought
        await running.pilot.press("ctrl+t")
        await running.until(lambda: "from every side" in str(message.thought.render()))
        assert message.answer.source == "The answer is 42."


@pytest.mark.slow
async def test_reasoning_is_not_sent_back() -> None:
    async with chat() as running:
        await running.ready()
        await running.ask("!think")
        await running.ask("next")
        assert [m["content"] for m in running.backend.sent[-1][0]] == ["!think", "The answer is 42.", "next"]


async def test_ctrl_c_stops_clears_and_then_quits() -> None:
    async with chat(tps=100) as running:
        await running.ready()
        await running.send("long")
        await running.until(lambda: running.answers and running.answers[0].exchange.text)
        await running.pilot.press("ctrl+c")
        await running.until(lambda: running.answers[0].exchange.stop == "abort")
        await running.pilot.press("x")  # typing goes on with the chat: the next one is a first one again
        await running.pilot.pause()
        await running.pilot.press("ctrl+c")
        assert running.prompt.text == ""
        assert "press Ctrl+C again" in running.text("#state")
        await running.pilot.press("y", "ctrl+c")  # typing goes on with the chat
        await running.pilot.pause()
        assert running.app.return_code is None and running.prompt.text == ""
        await running.pilot.press("ctrl+c")
        await running.until(lambda: running.app.return_code is not None)


async def test_ctrl_q_leaves() -> None:
    async with chat() as running:
        await running.pilot.press("ctrl+q")
        await running.until(lambda: running.app.return_code is not None)


async def test_words_that_leave() -> None:
    async with chat() as running:
        await running.send("/bye")
        await running.until(lambda: running.app.return_code is not None)


@pytest.mark.slow
async def test_ctrl_d_deletes_in_text_and_leaves_without() -> None:
    async with chat() as running:
        await running.pilot.press("a", "b", "home", "ctrl+d")
        assert running.prompt.text == "b"
        await running.pilot.press("ctrl+d", "ctrl+d")
        await running.until(lambda: running.app.return_code is not None)


@pytest.mark.slow
async def test_keys_for_a_new_line() -> None:
    async with chat() as running:
        for key in ("ctrl+j", "shift+enter", "alt+enter"):
            running.prompt.text = ""
            await running.pilot.press("a", key, "b")
            assert running.prompt.text == "a\nb"
        running.prompt.text = "a\\"
        running.prompt.move_cursor(running.prompt.document.end)
        await running.pilot.press("enter", "b")
        assert running.prompt.text == "a\nb"


async def test_enter_may_mean_a_new_line() -> None:
    async with chat(ui=UiConfig(enter="newline")) as running:
        await running.ready()
        await running.pilot.press("a", "enter", "b", "ctrl+j")
        await running.until(lambda: running.screen.conversation.exchanges)
        assert running.screen.conversation.exchanges[0].user == "a\nb"


async def test_the_prompt_remembers() -> None:
    async with chat() as running:
        await running.ready()
        await running.ask("first")
        await running.ask("second")
        running.prompt.text = "draft"
        await running.pilot.press("up")
        assert running.prompt.text == "second"
        await running.pilot.press("up")
        assert running.prompt.text == "first"
        await running.pilot.press("down", "down")
        assert running.prompt.text == "draft"


async def test_commands_are_hinted_and_completed() -> None:
    async with chat(size=(40, 12)) as running:
        await running.pilot.press("slash")
        await running.until(lambda: any("/help" in line for line in running.drawn))
        assert "localllm" in running.drawn[0] and running.drawn[1].strip().startswith("╭")
        running.prompt.text = ""
        await running.pilot.press("slash", "s", "y")
        await running.until(lambda: "/system" in running.text("#hints"))
        await running.pilot.press("tab")
        assert running.prompt.text == "/system "


async def test_the_context_meter_is_whole_in_a_small_window() -> None:
    async with chat(size=(40, 12), tps=0) as running:
        await running.ready()
        await running.ask("one " * 200)
        await running.until(lambda: "│ ctx 402/32k 1 % " in running.drawn[-1] and "F1 help" in running.drawn[-1])


async def test_commands() -> None:
    sampling: dict[str, object] = {}
    async with chat(sampling=sampling) as running:  # type: ignore[arg-type]
        await running.ready()
        await running.ask("hello")
        await running.send("/set temp 0.3")
        await running.until(lambda: "temperature = 0.3" in notices(running))
        assert sampling == {"temperature": 0.3}
        await running.send("/set temp hot")
        await running.until(lambda: "must be a number" in notices(running))
        await running.send("/system be brief")
        await running.until(lambda: "system message set" in notices(running))
        await running.send("/stats")
        await running.until(lambda: "pages" in notices(running))
        await running.send("/copy")
        await running.until(lambda: running.app.clipboard == "hello")
        await running.send("/frob")
        await running.until(lambda: "unknown command /frob" in notices(running))
        await running.ask("//literal")
        assert running.backend.sent[-1][0][0] == {"role": "system", "content": "be brief"}
        assert running.backend.sent[-1][0][-1]["content"] == "/literal"


async def test_bench_takes_the_word_quick_or_options(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, ...]] = []
    monkeypatch.setattr("localllm.tui.chat.commands.show_command", lambda app, *words: shown.append(words))
    async with chat() as running:
        await running.ready()
        for line in ("/bench", "/bench quick", "/bench -d 4k"):
            await running.send(line)
        await running.until(lambda: len(shown) == 3)
        quick = ["-p", "128", "-n", "32", "-r", "1", "--no-save"]
        assert shown == [("bench", "fake", *words) for words in (["-r", "2"], quick, ["-d", "4k"])]


@pytest.mark.slow
async def test_new_chat_forgets_also_while_an_answer_comes() -> None:
    async with chat(tps=100) as running:
        await running.ready()
        await running.send("long")
        await running.until(lambda: running.answers and running.answers[0].exchange.text)
        await running.pilot.press("ctrl+n")
        await running.until(lambda: not running.screen.query(AssistantMessage))
        assert not running.screen.query(UserMessage)
        message = await running.ask("fresh")
        assert message.exchange.text == "fresh"
        assert [m["content"] for m in running.backend.sent[-1][0]] == ["fresh"]


async def test_help_opens_and_closes() -> None:
    async with chat() as running:
        await running.pilot.press("f1")
        await running.until(lambda: isinstance(running.app.screen, HelpScreen))
        await running.pilot.press("escape")
        await running.until(lambda: not isinstance(running.app.screen, HelpScreen))
        assert running.app.focused is running.prompt


@pytest.mark.slow
async def test_old_turns_leave_the_screen_and_come_back() -> None:
    async with chat(ui=UiConfig(history_window=6)) as running:
        await running.ready()
        for number in range(6):
            await running.ask(f"question {number}")
        assert len(running.screen.query(UserMessage)) == 3
        assert "3 earlier" in running.text("#earlier")
        transcript = running.screen.query_one("#transcript", VerticalScroll)
        transcript.scroll_home(animate=False)
        await running.until(lambda: transcript.scroll_y == 0)
        await running.pilot.click("#earlier")
        await running.until(lambda: len(running.screen.query(UserMessage)) == 6)
        assert [a.exchange.user for a in running.answers] == [f"question {n}" for n in range(6)]
        assert running.answers[0].answer.source == "question 0"


async def test_the_first_message_may_come_with_the_command() -> None:
    async with chat(first="from the command line") as running:
        await running.until(
            lambda: running.screen.conversation.exchanges and running.screen.conversation.exchanges[0].stop
        )
        assert running.screen.conversation.exchanges[0].text == "from the command line"


@pytest.mark.slow
async def test_a_download_shows_its_bytes() -> None:
    async with chat(model="fake-download", load_s=0.05) as running:
        await running.until(lambda: "MiB of 400 MiB" in running.text("#load-line"))
        await running.until(lambda: "downloading" in running.text("#state"))
        await running.ready()
        await running.until(lambda: not running.screen.query(LoadCard))


@pytest.mark.slow
async def test_still_means_slow_timers() -> None:
    async with chat(ui=UiConfig(animations=False)) as running:
        assert running.app.drain_s >= 0.25
        assert running.app.animation_level == "none"


async def test_pasted_control_characters_are_dropped() -> None:
    from textual.events import Paste

    async with chat() as running:
        running.app.post_message(Paste("a\x1b[2J\r\nb\x07"))
        await running.until(lambda: running.prompt.text == "a[2J\nb")


@pytest.mark.parametrize("theme", ["localllm-light", pytest.param("ansi-dark", marks=pytest.mark.slow)])
async def test_themes_draw_everything(theme: str) -> None:
    async with chat(ui=UiConfig(theme=theme)) as running:
        await running.ready()
        message = await running.ask("!md")
        assert message.answer.source == ANSWERS["!md"]
        assert running.app.theme == theme


@pytest.mark.slow
async def test_every_theme_can_be_chosen() -> None:
    async with chat() as running:
        await running.ready()
        await running.ask("!md")
        for theme in running.app.available_themes:
            running.app.theme = theme
            await running.pilot.pause()


@pytest.mark.slow
async def test_the_settings_know_the_themes_there_are() -> None:
    async with chat() as running:
        assert set(THEMES) == set(running.app.available_themes)
    with pytest.raises(ConfigError, match="theme"):
        load_config({"ui.theme": "localllm-drak"})


@pytest.mark.slow
async def test_no_color_is_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with chat() as running:
        await running.ready()
        await running.ask("!md")
        assert running.app.theme == "ansi-dark"
        assert "NoColor" in [type(one).__name__ for one in running.app._filters]


async def test_an_exception_of_our_own_ends_in_a_log_and_not_on_the_screen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from textual.app import App

    from localllm.tui.app import ChatApp

    for name in ("_handle_exception", "_print_error_renderables"):  # what we override must still be there
        assert hasattr(App, name) and getattr(ChatApp, name) is not getattr(App, name)
    with pytest.raises(ZeroDivisionError):
        async with chat() as running:
            monkeypatch.setattr(type(running.screen), "action_help", lambda self: 1 / 0)
            await running.pilot.press("f1")
            await running.pilot.pause()
    assert isinstance(running.app.failure, ZeroDivisionError)
    assert "the interface failed" in caplog.text


@pytest.mark.slow
async def test_messages_that_wait_are_never_taken_off_the_screen() -> None:
    async with chat(load_s=0.1, ui=UiConfig(history_window=2)) as running:
        for number in range(5):
            await running.send(f"question {number}")
        await running.until(lambda: len(running.screen.conversation.exchanges) == 5)
        await running.until(lambda: all(e.stop for e in running.screen.conversation.exchanges))
        assert [e.text for e in running.screen.conversation.exchanges] == [f"question {n}" for n in range(5)]


@pytest.mark.slow
async def test_the_context_meter_follows_the_branch() -> None:
    async with chat(ctx=100) as running:
        await running.ready()
        await running.ask("one two three")
        first = running.screen.state.used_tokens
        await running.ask("four five")
        second = running.screen.state.used_tokens
        assert second > first > 0
        await running.send("/branch 1")
        await running.until(lambda: running.screen.state.used_tokens == first)
        assert f"ctx {first}/100" in running.text("#state") or "goes on from here" in running.text("#state")
        await running.send("long")
        await running.until(lambda: running.answers[-1].exchange.stop)
        third = running.screen.state.used_tokens
        assert third > second
        running.backend.tps, running.backend.answers = 20, ["one two three"]
        await running.send("/regen 1")
        await running.until(lambda: running.screen.current and running.answers[-1].exchange.text)
        assert running.screen.state.used_tokens <= first
        await running.until(lambda: running.answers[-1].exchange.stop)
        assert running.screen.state.used_tokens == first


@pytest.mark.slow
async def test_a_window_that_is_full_does_not_offer_to_go_on() -> None:
    async with chat(ctx=40) as running:
        await running.ready()
        message = await running.ask("long")
        assert "/continue" not in message.exchange.stats and "the context window is full" in message.exchange.stats
        assert not running.screen.can_go_on


async def test_a_larger_window_is_offered_only_if_the_message_fits_into_it() -> None:
    async with chat(ctx=400) as running:
        await running.ready()
        await running.ask("one")
        for needed, offered in ((1500, True), (1700, False)):
            running.screen.questions._full(running.screen.conversation.exchanges[-1], needed)
            banner = running.screen.query_one("#choices", OptionList)
            rows = [str(banner.get_option_at_index(i).prompt) for i in range(banner.option_count)]
            assert any(row.startswith("[c]") for row in rows) == offered


@pytest.mark.slow
async def test_nothing_is_left_out_for_a_message_that_is_too_long_by_itself() -> None:
    async with chat(ctx=400) as running:
        await running.ready()
        await running.ask("one")
        await running.send("word " * 450)
        banner = running.screen.query_one("#choices", OptionList)
        await running.until(lambda: banner.display)
        assert [str(banner.get_option_at_index(i).prompt)[1] for i in range(banner.option_count)] == ["c", "e"]


@pytest.mark.slow
async def test_the_expected_speed_gives_way_to_the_measured_one() -> None:
    async with chat(tps=400) as running:
        await running.ready()
        await running.pilot.press("f4")
        await running.until(lambda: "≈ 400 expected" in running.text("#engine-text"))
        await running.ask("one two three four")
        await running.until(lambda: "expected" not in running.text("#engine-text"))


@pytest.mark.slow
async def test_a_long_message_of_the_program_is_read_in_the_transcript() -> None:
    async with chat(size=(60, 20)) as running:
        await running.ready()
        running.screen.flash("could not be downloaded: " + "because " * 12)
        await running.until(lambda: "because because" in notices(running))
        running.screen.flash("short")
        assert running.text("#state").strip().startswith("short") and running.text("#keys").strip() == ""

"""What typing means, what the model is sent, what is copied; the clipboard and the guard of descriptor 2."""

from __future__ import annotations

import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localllm.conversation import clipboard
from localllm.conversation.answer import failure_lines
from localllm.conversation.markdown import code_blocks
from localllm.conversation.slash import matching, understand
from localllm.conversation.storage import restored, saved_messages
from localllm.conversation.tree import Conversation
from localllm.errors import ConfigError
from localllm.history.records import SavedChat, SavedMessage
from localllm.interface import Done, Failed
from localllm.request import Timing, Usage
from localllm.tui.stderr_guard import stderr_to

ROLES = ("user", "assistant", "system", "tool", "")


@pytest.mark.parametrize(
    ("line", "command", "text"),
    [
        ("hello", "", "hello"),
        ("/set temp 1", "set", "temp 1"),
        ("/BYE", "quit", ""),
        ("//etc/passwd", "", "/etc/passwd"),
        ("quit", "quit", ""),
        (" exit ", "quit", ""),
        ("a\nb", "", "a\nb"),
    ],
)
def test_what_a_line_means(line: str, command: str, text: str) -> None:
    typed = understand(line)
    assert (typed.command, typed.text) == (command, text)


def test_an_unknown_command_is_an_error_with_a_way_out() -> None:
    with pytest.raises(ConfigError) as caught:
        understand("/sistem x")
    assert "did you mean /system" in caught.value.message
    assert "//sistem" in caught.value.hint


def test_matching_is_fuzzy() -> None:
    assert [slash.name for slash in matching("/s")][:4] == ["system", "set", "save", "stats"]
    assert [slash.name for slash in matching("/cp")] == ["copy"]


def test_what_the_model_is_sent() -> None:
    talk = Conversation("be brief")
    first = talk.ask("one")
    first.text, first.stop = "eins", "stop"
    lost = talk.ask("lost")
    lost.stop = "error"
    last = talk.ask("two")
    assert [m["content"] for m in talk.messages(last)] == ["be brief", "one", "eins", "two"]
    first.forgotten = True
    assert [m["content"] for m in talk.messages(last)] == ["be brief", "two"]


def test_what_is_offered_for_leaving_out() -> None:
    talk = Conversation()
    for number in range(5):
        talk.ask(str(number)).text = "x"
    new = talk.ask("new")
    assert [e.user for e in talk.oldest_half(new)] == ["0", "1", "2"]


def test_a_question_taken_out_leaves_those_after_it() -> None:
    talk = Conversation()
    first, second = (talk.ask(text) for text in "ab")
    again = talk.again(first)
    later = [talk.ask(text) for text in "cd"]
    assert talk.take_out(again) == later
    assert talk.exchanges == [first, second, *later] and talk.removed == [again.answer_id]
    assert [m["content"] for m in talk.messages(later[1])][-1] == "d" and later[0].parent is second
    talk.show(first)
    assert talk.exchanges == [first, second, *later]
    assert talk.take_out(first) == [second, *later]
    assert talk.exchanges == [second, *later] and talk.roots == [second]
    assert talk.removed == [again.answer_id, first.question_id, first.answer_id]


def test_code_blocks() -> None:
    assert code_blocks("a\n~~~\n```\n~~~\n````\n```\n````\n") == ["```", "```"]
    assert code_blocks("none") == []


def test_lines_below_an_answer() -> None:
    talk = Conversation()
    exchange = talk.ask("q")
    exchange.usage, exchange.timing = Usage(1204, 1024, 312), Timing(ttft_s=0.041, total_s=3.4, decode_tps=91.43)
    assert exchange.stats == "↑ 1,204 (cached 1,024)  ↓ 312  ·  91.4 tok/s  ·  TTFT 41 ms"
    exchange.stop = "abort"
    assert "stopped by you · 312 tokens · /continue" in exchange.stats
    unknown = replace(exchange, usage=Usage(), text="so far")  # another model was loaded meanwhile
    assert unknown.stats.endswith("stopped by you · /continue · /regen")
    assert talk.summary == "1 turn · 312 tokens · 91 tok/s avg"
    lines = failure_lines(Failed(0, "E501", "too big", "smaller", (("localllm chat x --ctx 8k", "fits"),)))
    assert lines[0] == "✗ too big   [E501]" and lines[-1].strip() == "localllm chat x --ctx 8k   fits"


def test_tokens_of_an_answer_in_pieces_are_counted_once() -> None:
    talk = Conversation()
    exchange = talk.ask("q")
    exchange.add(Done(0, "length", Usage(38, 0, 40), Timing()))
    exchange.add(Done(1, "length", Usage(78, 64, 40), Timing()))  # /continue: the first 40 are in the prompt
    assert talk.used_tokens == 118
    assert exchange.stats.startswith("↑ 38 (cached 38)  ↓ 80")


def test_an_interrupted_answer_is_estimated_in_the_context() -> None:
    talk = Conversation()
    first, second = talk.ask("one"), talk.ask("two " * 10)
    first.text, first.stop, first.usage = "eins", "stop", Usage(30, 0, 10)
    second.text = "word " * 40
    assert talk.used_tokens == 40  # it is still being answered
    second.stop = "partial"
    assert talk.used_tokens == 40 + 50 + 10
    talk.ask("queued")
    assert talk.used_tokens == 100
    second.usage = Usage(60, 0, 41)
    assert talk.used_tokens == 101


def test_copying_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clipboard.shutil, "which", lambda name: None)
    monkeypatch.delenv("TMUX", raising=False)
    written: list[str] = []
    assert "OSC 52" in clipboard.copy("hi", written.append)
    assert written == ["\x1b]52;c;aGk=\x07"]
    monkeypatch.setenv("TMUX", "x")
    assert clipboard.osc52("hi").startswith("\x1bPtmux;\x1b\x1b]52")
    assert "too much" in clipboard.copy("x" * 200_000, written.append)
    assert len(written) == 1


def test_what_libraries_write_to_descriptor_2_goes_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log/localllm.log"
    before = sys.__stderr__
    with stderr_to(log):
        os.write(2, b"CORRUPT\n")
        assert sys.__stderr__ is not before
    assert sys.__stderr__ is before
    assert log.read_text() == "CORRUPT\n"


def test_the_guard_does_without_a_log_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with stderr_to(tmp_path / "file/log"):
        os.write(2, b"nowhere\n")


@pytest.mark.parametrize(
    ("said", "title"),
    [
        ("  short \n second line", "short"),
        ("Write a python function that reverses a list, with a table of its cost", None),
        ("x" * 200, "x" * 59 + "…"),
        ("海" * 100, "海" * 59 + "…"),
    ],
)
def test_a_chat_is_called_by_its_first_line_cut_between_words(said: str, title: str | None) -> None:
    talk = Conversation("")
    talk.ask(said)
    assert talk.shown_title == (title or "Write a python function that reverses a list, with a table…")


def test_a_chat_names_itself_after_its_first_question_unless_told_not_to() -> None:
    talk = Conversation()
    talk.ask("Fix the build\nplease")
    assert talk.shown_title == "Fix the build"
    talk.titles_itself = False
    assert talk.shown_title == ""
    talk.title = "Build"
    assert talk.shown_title == "Build"


def test_any_rows_make_a_conversation_that_goes_on() -> None:
    """Roles of other programs, parents that are missing or go round in circles, a leaf that is not there."""
    draw = random.Random(7)
    for _ in range(300):
        ids = range(1, draw.randint(2, 8))
        rows = [
            SavedMessage(i, "c", draw.choice([None, i - 1 or None, *range(9)]), draw.choice(ROLES), f"text {i}")
            for i in ids
        ]
        talk = restored(SavedChat("c", leaf_id=draw.choice([None, *range(9)])), rows)
        asked = talk.ask("and now?")
        assert talk.messages(asked)[-1]["content"] == "and now?"
        assert talk.messages(talk.again(asked))[-1]["content"] == "and now?"
        assert [one.role for one in saved_messages(asked)] == ["user"]


def test_a_resumed_chat_knows_how_full_its_window_is() -> None:
    talk = Conversation()
    answer = talk.ask("one")
    answer.text, answer.stop, answer.usage = "eins", "stop", Usage(40, 0, 7)
    rows = [replace(row, id=at, parent_id=at - 1 or None) for at, row in enumerate(saved_messages(answer), 1)]
    assert restored(SavedChat("c", leaf_id=2), rows).used_tokens == talk.used_tokens == 47


def test_a_saved_chat_sets_only_what_a_setting_can_be() -> None:
    kept = {"temperature": "hot", "top_k": 10**400, "top_p": 0.5, "min_p": None, "nonsense": 1, "seed": []}
    sampling: dict[str, Any] = {}
    talk = restored(SavedChat("c", params={"sampling": kept, "think": ["on"], "summary": None}), [], sampling)
    assert sampling == {"top_p": 0.5} and talk.think == "auto"

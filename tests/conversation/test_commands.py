"""What slash commands do to a chat, whichever interface they are typed into."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.backend.scripted import FakeBackend
from localllm.conversation.answer import Call
from localllm.conversation.commands import COMMANDS, run
from localllm.conversation.session import Session, full_name
from localllm.conversation.slash import SLASHES, understand
from localllm.conversation.tree import Conversation
from localllm.errors import ConfigError
from localllm.interface import Done
from localllm.request import Timing, Usage


def typing(talk: Conversation) -> Callable[[str], str]:
    """What a slash command answers in this conversation; what is copied is answered as it is."""
    session = Session(FakeBackend(), talk, copy=lambda text: text)
    return lambda line: run(session, understand(line))


def test_set_and_system() -> None:
    talk = Conversation()
    say = typing(talk)
    assert "No overrides" in say("/set")
    assert "temperature       1  default" in say("/params")
    assert say("/set top_p=0.9") == "top_p = 0.9, from the next message"
    assert talk.sampling == {"top_p": 0.9}
    assert "top_p           0.9  set" in say("/params") and say("/set top_p") == "top_p 0.9 (set)"
    assert "default" in say("/set top_p off")
    assert talk.sampling == {}
    for bad in ("nope 1", "temp hot", "temp 500"):
        with pytest.raises(ConfigError):
            say(f"/set {bad}")
    say("/system x y")
    assert talk.system == "x y"
    say("/system off")
    assert talk.system == ""


def test_the_context_is_what_the_engine_counted() -> None:
    talk = Conversation()
    say = typing(talk)
    assert say("/ctx").split()[:2] == ["free", "32,768"]
    first, second = talk.ask("q"), talk.ask("one more")
    for one, used in ((first, Usage(30, 0, 1)), (second, Usage(70, 0, 8))):
        one.text, one.usage, one.stop = "a", used, "stop"
    assert say("/ctx").splitlines() == [
        "questions                    3",
        "answers                      2",
        "template and reasoning      73",
        "free                    32,690   of 32k",
    ]
    talk.ask("and now").reasoning = "hm"
    assert say("/ctx").splitlines()[3:] == [
        "this question                2",
        "its answer so far            1",
        "free                    32,687   of 32k",
    ]
    first.forgotten = True
    assert "1 question dropped" in say("/ctx")


def test_an_answer_that_goes_on_is_counted_once() -> None:
    """Up to its last stop by the engine; then the results of calls, and what came since. Words are tokens here."""
    talk = Conversation()
    say = typing(talk)
    one = talk.ask("the weather in Paris")
    one.text, one.calls = "let me look", [Call("1", "weather", "{}")]
    one.add(Done(1, "stop", Usage(100, 0, 20), Timing()))
    one.calls[0].result = "sunny " * 400
    one.end_round()
    one.text, one.reasoning = "it is", "so "
    before = ["questions                    4", "template and reasoning     116"]
    assert say("/ctx").splitlines() == [
        *before,
        "added to its answer          3",
        "results of its calls       400",
        "free                    32,245   of 32k",
    ]
    one.add(Done(1, "length", Usage(530, 0, 5), Timing()))
    one.stop, one.text = "", "it is sunny and warm"
    assert say("/ctx").splitlines() == [
        "questions                    4",
        "answers                      2",
        "template and reasoning     529",
        "added to its answer          3",
        "free                    32,230   of 32k",
    ]
    one.usage, one.known = Usage(), (0, 0, 0)  # of a server that does not count
    assert "results of its calls       400" in say("/ctx") and "questions" not in say("/ctx")


def test_what_is_copied() -> None:
    talk = Conversation()
    say = typing(talk)
    with pytest.raises(ConfigError):
        say("/copy")
    talk.ask("q1").text = "a1"
    with pytest.raises(ConfigError) as caught:
        say("/copy 99")
    assert caught.value.hint.startswith("/copy, /copy 1,")
    talk.ask("q2").text = "see\n```py\nx = 1\n```\nand\n```\ny\n"
    assert say("/copy 1") == "answer 1: a1"
    assert say("/copy code") == "the last code block: y"
    assert "**q1**" in say("/copy all")
    for bad in ("3", "x"):
        with pytest.raises(ConfigError):
            say(f"/copy {bad}")


def test_line_mode_offers_what_is_shared_and_what_it_does_itself() -> None:
    plain = {slash.name for slash in SLASHES if slash.plain}
    assert plain == {*COMMANDS, "help", "regen", "continue", "quit"} - {"paste"}


def test_every_branch_is_exported_into_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    talk = Conversation()
    say = typing(talk)
    with pytest.raises(ConfigError):
        say("/export")
    first = talk.ask("Which way?")
    first.text, first.stop = "left", "stop"
    other = talk.again(first)
    other.text, other.stop = "right", "stop"
    assert say("/export json") == "wrote which-way.json"
    assert say("/export json") == "wrote which-way-2.json"
    assert {m["content"] for m in json.loads((tmp_path / "which-way.json").read_text())["messages"]} == {
        "Which way?", "left", "right",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="already exists"):
        say("/export json which-way.json")
    say("/export")
    assert "· 2 of 3 messages\n" in (tmp_path / "which-way.md").read_text()
    with pytest.raises(ConfigError, match="/export must be followed by md, json, html or a path, not pdf"):
        say("/export pdf")
    for path in ("notes.txt", "./notes"):
        assert say(f"/export {path}") == f"wrote {path}"
    say("/export my chat.html")
    assert "<html" in (tmp_path / "my chat.html").read_text(), "as its ending says"


def test_undo_keeps_the_turn_as_a_branch() -> None:
    talk = Conversation()
    say = typing(talk)
    with pytest.raises(ConfigError):
        say("/undo")
    talk.ask("one").text = "eins"
    talk.ask("two").text = "zwei"
    say("/undo")
    assert [one.user for one in talk.exchanges] == ["one"] and talk.roots[0].children


def test_a_model_named_by_a_path_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.gguf").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/config.json").touch()
    (tmp_path / "smollm2").mkdir()
    assert full_name("./a.gguf") == full_name("a.gguf") == f"{tmp_path}/a.gguf"
    assert full_name("folder/") == f"{tmp_path}/folder"
    for name in ("smollm2", "org/repo:Q4_K_M", "gone.gguf"):
        assert full_name(name) == name

"""`localllm logs` and the flags of `chat` that go on with a saved chat."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.cli.frame.console import Console
from localllm.history.records import SavedChat, SavedMessage
from localllm.history.store import History
from localllm.terminal import cell_width

from .conftest import Invoke, valid


@pytest.fixture
def saved(empty_home: Path) -> Path:
    """Two chats; the title of one attacks terminals."""
    with History() as history:
        one = SavedMessage(1, "7f3a00", None, "user", "Why CUDA graphs?", created=1e9)
        two = SavedMessage(2, "7f3a00", 1, "assistant", "They save launches.\x1b[2J", created=1e9 + 1)
        history.save(SavedChat("7f3a00", "CUDA \x1b]0;x\x07graphs", "fake", leaf_id=2, updated=1e9), [one, two])
        other = SavedMessage(3, "8b0000", None, "user", "A haiku", created=2e9)
        history.save(SavedChat("8b0000", "Haiku", "fake", leaf_id=3, updated=2e9), [other])
    return empty_home


def test_chats_are_listed_newest_first(invoke: Invoke, saved: Path) -> None:
    result = invoke("logs")
    lines = result.stdout.splitlines()
    assert lines[1].startswith("8b0000") and "7f3a00" in lines[2] and "\x1b" not in result.stdout
    rows = valid(invoke("logs", "list", "--json").stdout, "logs-1")["chats"]
    assert [row["id"] for row in rows] == ["8b0000", "7f3a00"] and rows[1]["messages"] == 2
    assert "7f3a00" in invoke("logs", "list", "launches").stdout
    assert invoke("logs", "-n", "1").stdout.count("\n") == 2


@pytest.mark.parametrize("width", [50, 80])
def test_a_narrow_terminal_has_one_line_for_each_chat(saved: Path, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.cli.commands.logs import _list

    monkeypatch.setenv("COLUMNS", str(width))
    with History() as history:
        history.save(SavedChat("900000", "A title of many words " * 5, "m" * 40, updated=3e9), [])
        out = io.StringIO()
        env: Any = SimpleNamespace(console=Console(stdout=out, stderr=io.StringIO(), color="never"))
        env.console.out_tty = True
        _list(env, history, "", 9)
    lines = out.getvalue().splitlines()
    assert len(lines) == 4 and all(cell_width(line) < width for line in lines), lines
    assert lines[1].startswith("900000") and "A title of many" in lines[1]


def test_there_is_no_last_chat_yet(invoke: Invoke, empty_home: Path) -> None:
    result = invoke("logs", "show", "last")
    assert result.exit_code == 3 and "no chat has been saved yet" in result.stderr


def test_words_are_found(invoke: Invoke, saved: Path) -> None:
    result = invoke("logs", "search", "cuda")
    assert "Why CUDA graphs?" in result.stdout and "\x1b" not in result.stdout
    hits = valid(invoke("logs", "search", "launch", "--json").stdout, "logs-1")["hits"]
    assert [hit["role"] for hit in hits] == ["assistant"]
    assert "no message matches" in invoke("logs", "search", "zebra").stderr


def test_a_chat_is_shown_exported_and_comes_back(invoke: Invoke, saved: Path, tmp_path: Path) -> None:
    assert "# CUDA" in invoke("logs", "show", "7f3").stdout
    chat = valid(invoke("logs", "show", "7f3", "--json").stdout, "logs-1")["chat"]
    assert [m["content"] for m in chat["messages"]][0] == "Why CUDA graphs?"
    target = tmp_path / "out.json"
    assert invoke("logs", "export", "7f3", "--format", "json", "-o", str(target)).exit_code == 0
    assert json.loads(target.read_text())["id"] == "7f3a00"
    refused = invoke("logs", "export", "7f3", "-o", str(target))
    assert refused.exit_code == 2 and "already exists" in refused.stderr
    assert invoke("logs", "export", "last", "-o", "-").stdout.startswith("# Haiku")
    assert "<html" in invoke("logs", "export", "7f3", "--format", "html").stdout
    assert "1 chat from localllm" in invoke("logs", "import", str(target)).stderr
    assert len(valid(invoke("logs", "--json").stdout, "logs-1")["chats"]) == 3


def test_every_action_answers_in_json(invoke: Invoke, saved: Path, tmp_path: Path) -> None:
    file = str(tmp_path / "out.json")
    for words, key, value in (
        (("export", "7f3", "--format", "json", "-o", file), "output", file),
        (("import", file), "imported", 1),
        (("rm", "-y", "7f3a", "7f3"), "removed", ["7f3a00"]),
    ):
        assert valid(invoke("logs", *words, "--json").stdout, "logs-1")[key] == value
    for words in (("show", "8b", "last"), ("export", "8b"), ("export", "8b", "last", "--format", "json")):
        result = invoke("logs", *words, "--json")
        assert result.exit_code == 2 and valid(result.stdout, "error-1")


def test_other_branches_are_counted_where_they_are_not_shown(invoke: Invoke, saved: Path) -> None:
    with History() as history:
        other = SavedMessage(9, "7f3a00", 1, "assistant", "Another answer", created=1e9 + 2)
        history.save(history.find("7f3"), [other])
    assert invoke("logs", "list", "graphs").stdout.splitlines()[1].split()[-2:] == ["3", "fake"]
    assert "2 of 3 messages" in invoke("logs", "show", "7f3").stdout


def test_removing_asks(invoke: Invoke, saved: Path) -> None:
    assert invoke("logs", "rm", "7f3").exit_code == 2
    assert invoke("logs", "rm", "7f3", "-y").exit_code == 0
    assert "7f3a00" not in invoke("logs").stdout


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("logs", "frob"), 2), (("logs", "show"), 2), (("logs", "show", "zz"), 3),
        (("logs", "export", "7f3", "--format", "x"), 2),
        (("logs", "import", "/nowhere.json"), 2),
    ],
)  # fmt: skip
def test_wrong_words_have_a_way_out(invoke: Invoke, saved: Path, words: tuple[str, ...], code: int) -> None:
    result = invoke(*words)
    assert result.exit_code == code and "try" in result.stderr


def test_what_is_missing_is_named(invoke: Invoke, saved: Path) -> None:
    assert "no chat matches zebra" in invoke("logs", "list", "zebra").stderr
    assert "needs a file" in invoke("logs", "import").stderr


def test_folders_and_empty_words_are_called_so(invoke: Invoke, saved: Path, tmp_path: Path) -> None:
    assert f"{tmp_path} is not a file" in invoke("logs", "import", str(tmp_path)).stderr
    assert f"{tmp_path} is a folder" in invoke("logs", "export", "last", "-o", str(tmp_path), "-y").stderr
    assert "logs search needs words" in invoke("logs", "search", " ").stderr


def test_nothing_saved_yet(invoke: Invoke, empty_home: Path) -> None:
    assert "no saved chats" in invoke("logs").stderr


def test_keys_are_listed(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke("chat", "--list-keys")
    assert result.exit_code == 0 and "chat.stop" in result.stdout and "browse.copy" in result.stdout
    assert "ctrl+p" in invoke("chat", "--list-keys", "--keys", "vim").stdout

"""Exports, imports of other programs' chats, and the prompts typed before."""

from __future__ import annotations

import json
import multiprocessing
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localllm.errors import ConfigError
from localllm.history.export import as_html, as_json, as_markdown
from localllm.history.importing import read_export
from localllm.history.prompts import PromptHistory
from localllm.history.records import SavedChat, SavedMessage, active_path
from localllm.history.store import History

CHAT = SavedChat("c0ffee", "A <b>title", "m", "be brief", leaf_id=2, created=0)
MESSAGES = [
    SavedMessage(1, "c0ffee", None, "user", "Q?", params={"attachments": [{"name": "<a>.txt", "text": "x"}]}),
    SavedMessage(
        2, "c0ffee", 1, "assistant",
        "**A** <script>alert(1)</script>\n\n[x](javascript:alert(1)) ![i](http://evil/x.png) [ok](https://ok)\n", "hm",
    ),
    SavedMessage(3, "c0ffee", 1, "assistant", "another branch"),
]  # fmt: skip


def test_markdown_holds_the_branch_on_the_screen() -> None:
    text = as_markdown(CHAT, MESSAGES, reasoning=True)
    assert "## You" in text and "## System\n\nbe brief" in text and "Attached: <a>.txt" in text and "> hm" in text
    assert "another branch" not in text
    assert "· 2 of 3 messages" in text and "· 1 message\n" in as_markdown(CHAT, MESSAGES[:1])


def test_html_runs_nothing_and_fetches_nothing() -> None:
    text = as_html(CHAT, MESSAGES)
    assert "<script" not in text and "<img" not in text and 'href="javascript' not in text
    assert "&lt;script&gt;" in text and "<strong>A</strong>" in text and 'href="https://ok"' in text
    assert "A &lt;b&gt;title" in text and "· 2 of 3 messages" in text and "default-src 'none'" in text


def test_formulas_are_exported_as_they_were_written() -> None:
    said = r"\[ x \, y \\ z \] and \(a*b*c\)"
    page = as_html(CHAT, [MESSAGES[0], replace(MESSAGES[1], content=said)])
    assert r"<code>\[ x \, y \\ z \]</code> and <code>\(a*b*c\)</code>" in page


def test_calls_of_tools_and_their_results_are_exported() -> None:
    call = {"id": "1", "name": "read", "arguments": '{"path": "<a>"}', "result": "```\nb\n```", "failed": True}
    rounds = [{"text": "Let me look.", "reasoning": "", "calls": [call]}, {"calls": "no list"}, 7]
    messages = [MESSAGES[0], replace(MESSAGES[1], params={"rounds": rounds})]
    text = as_markdown(CHAT, messages)
    shown = 'Let me look.\n\nTool call: read (failed)\n\n```\n{"path": "<a>"}\n```\n\n````\n```\nb\n```\n````\n'
    assert text.index(shown) < text.index("**A**")
    page = as_html(CHAT, messages)
    assert "<summary>Tool call: read (failed)</summary>" in page and "{&quot;path&quot;: &quot;&lt;a&gt;&quot;}" in page
    assert as_json(CHAT, messages)["messages"][1]["params"]["rounds"][0]["calls"] == [call]


def test_our_own_json_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    file.write_text(json.dumps(as_json(CHAT, MESSAGES)))
    found = read_export(file)
    ((chat, messages),) = found.chats
    assert (found.source, chat.title, chat.system) == ("localllm", CHAT.title, "be brief")
    assert [m.content for m in active_path(messages, chat.leaf_id)] == [MESSAGES[0].content, MESSAGES[1].content]
    assert len(messages) == 3


def node(key: str, parent: str | None, role: str, text: str) -> dict[str, Any]:
    content = {"content_type": "text", "parts": [text]}
    return {"id": key, "parent": parent, "message": {"author": {"role": role}, "content": content, "create_time": 5.0}}


CHATGPT = {
    "title": "From there",
    "create_time": 1700000000.5,
    "update_time": 1700000100.5,
    "conversation_id": "abc",
    "current_node": "a2",
    "mapping": {
        "root": {"id": "root", "parent": None, "message": None},
        "s": node("s", "root", "system", ""),
        "u": node("u", "s", "user", "Hello?"),
        "t": node("t", "u", "tool", "hidden"),
        "a1": node("a1", "t", "assistant", "First"),
        "a2": node("a2", "t", "assistant", "Second"),
    },
}
OPEN_WEBUI = {
    "id": "x",
    "title": "From here",
    "created_at": 1700000000,
    "chat": {
        "models": ["llama"],
        "params": {"system": "be kind"},
        "history": {
            "currentId": "2",
            "messages": {
                "1": {"id": "1", "parentId": None, "role": "user", "content": "Hi", "timestamp": 1700000000000},
                "2": {"id": "2", "parentId": "1", "role": "assistant", "content": "Ho", "model": "llama"},
            },
        },
    },
}


def test_a_chatgpt_export_keeps_its_branches(tmp_path: Path) -> None:
    archive = tmp_path / "export.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("conversations.json", json.dumps([CHATGPT]))
        file.writestr("chat.html", "<html>")
    found = read_export(archive)
    ((chat, messages),) = found.chats
    assert (found.source, chat.title, len(messages)) == ("ChatGPT", "From there", 3)
    assert [m.content for m in active_path(messages, chat.leaf_id)] == ["Hello?", "Second"]
    assert len({m.parent_id for m in messages if m.role == "assistant"}) == 1
    with History(tmp_path / "chats.db") as history:
        for _ in range(2):  # the same again changes nothing
            history.save(chat, messages)
        assert history.chat(chat.id).num_messages == 3


def test_an_open_webui_export(tmp_path: Path) -> None:
    file = tmp_path / "chats.json"
    file.write_text(json.dumps([OPEN_WEBUI, {"nonsense": 1}]))
    found = read_export(file)
    ((chat, messages),) = found.chats
    assert (found.source, found.num_skipped, chat.system, chat.model) == ("Open WebUI", 1, "be kind", "llama")
    assert [m.content for m in active_path(messages, chat.leaf_id)] == ["Hi", "Ho"]
    assert 1.69e9 < messages[0].created < 1.71e9


def test_broken_links_between_messages_are_mended(tmp_path: Path) -> None:
    mapping = {
        "a": node("a", "b", "user", "one"),
        "b": node("b", "a", "assistant", "two"),
        "c": node("c", "nowhere", "user", "three"),
        "d": "no node",
        "e": {"parent": "e", "message": {"author": None, "content": None}},
        "f": node("f", "e", "user", "four"),
    }
    file = tmp_path / "conversations.json"
    file.write_text(json.dumps([{"title": None, "mapping": mapping, "current_node": "b"}]))
    ((_, messages),) = read_export(file).chats
    parents = {m.content: m.parent_id for m in messages}
    assert parents["three"] is None and parents["four"] is None
    assert sorted(map(bool, (parents["one"], parents["two"]))) == [False, True]


def test_a_long_chain_is_read_in_one_go(tmp_path: Path) -> None:
    many = 4_000
    mapping = {str(n): node(str(n), str(n - 1) if n else None, "user", f"m{n}") for n in range(many)}
    file = tmp_path / "conversations.json"
    file.write_text(json.dumps({"title": "long", "mapping": mapping, "current_node": str(many - 1)}))
    ((chat, messages),) = read_export(file).chats
    assert len(active_path(messages, chat.leaf_id)) == many


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"mapping": {}}'])
def test_a_file_that_is_no_export_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError):
        read_export(file)
    with pytest.raises(ConfigError):
        read_export(tmp_path / "none.json")


# --- prompts ---------------------------------------------------------------------------------------------------------


def add_many(path: str, name: str) -> None:
    history = PromptHistory(Path(path))
    for number in range(50):
        history.add(f"{name} {number}")


def test_prompts_of_two_programs_do_not_overwrite_each_other(tmp_path: Path) -> None:
    path = tmp_path / "state/history.jsonl"
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=add_many, args=(str(path), name)) for name in "ab"]
    for one in both:
        one.start()
    for one in both:
        one.join()
    found = PromptHistory(path).load()
    assert sorted(found) == sorted(f"{name} {n}" for name in "ab" for n in range(50))


def test_broken_lines_and_files_cost_no_chat(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(b'{"text": "one"}\nnot json\n{"text": 5}\n\xff\n{"text": "two\\nlines"}\n')
    assert PromptHistory(path).load() == ["one", "two\nlines"]
    path.unlink()
    path.mkdir()
    history = PromptHistory(path)
    assert history.load() == []
    history.add("lost, and nothing else")


def test_the_file_of_prompts_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.history.prompts.MAX_BYTES", 2000)
    monkeypatch.setattr("localllm.history.prompts.KEPT", 10)
    history = PromptHistory(tmp_path / "h.jsonl")
    for number in range(200):
        history.add(f"prompt number {number}")
    assert history.path.stat().st_size < 3000
    assert history.load()[-1] == "prompt number 199"


@pytest.mark.parametrize("when", [1e999, 1e300, 10**400, -1, "now", True])
def test_a_time_that_is_none_is_passed_over(tmp_path: Path, when: object) -> None:
    messages = [{"id": 1, "role": "user", "content": "Hi", "created": when}, {"id": 2, "role": "tool", "content": "x"}]
    path = tmp_path / "export.json"
    path.write_text(json.dumps({"id": "a", "leaf_id": 1, "created": when, "messages": messages}))
    ((chat, read),) = read_export(path).chats
    assert chat.created < 1e11 and [message.role for message in read] == ["user"]

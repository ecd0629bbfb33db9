"""Streamed Markdown: what is on the screen is what the engine said, however it was cut."""

from __future__ import annotations

import random

import pytest
from markdown_it import MarkdownIt
from textual.app import App, ComposeResult
from textual.content import Content
from textual.widgets import Label, Markdown

from localllm.backend.script import ANSWERS
from localllm.config import UiConfig
from localllm.conversation.markdown import new_parser
from localllm.terminal import clean
from localllm.tui.widgets.markdown import Answer, Fence, Settler, Tail, _FlatList

from .conftest import chat

PROSE = "One paragraph.\n\nAnother with **bold**, `code` and a [link](http://example.org).\n\n" * 5
LISTS = "Before\n\n1. one\n   - two\n     - three\n\n       more of three\n2. four\n\n- five\n\n  a paragraph\n\nAfter"
LONG_LIST = "".join(f"{n}. item number {n}\n" for n in range(1, 120)) + "\nThe end."
TABLE = "| a | b |\n|---|--:|\n" + "".join(f"| {n} | {n * n} |\n" for n in range(9)) + "\nafter"
OPEN_FENCE = "Look:\n\n```python\n" + "".join(f"x{n} = {n}  # a comment\n" for n in range(200))
ODD = (
    "日本語の文章。\n\n😀\U0001f469\u200d\U0001f467 e\u0301\n\n[markup] [/] [red]x[/red]\n\n<div>html</div>\n\n"
    "[ref]: http://x\n\nText[^1]\n\n&amp; &lt;"
)
TRAPS = (
    "para\n===\n\n- a\n- b\n**lazy** line\n\n    indented code\n\n~~~\ntilde ``` inside\n~~~\n\n"
    "* x\n+ y\n\n---\n***\n\\"
)
TEXTS = {
    "prose": PROSE, "lists": LISTS, "long list": LONG_LIST, "table": TABLE, "open fence": OPEN_FENCE, "odd": ODD,
    "traps": TRAPS, "everything": ANSWERS["!md"], "empty lines": "\n\n\na\n\n\n", "spaces": "   ",
    "one line": "x" * 5000,
}  # fmt: skip


class Host(App[None]):
    CSS_PATH = "../../tui/app.tcss"

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return {"column": "104"}

    def compose(self) -> ComposeResult:
        yield Answer()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", TEXTS)
async def test_the_screen_holds_the_text_byte_for_byte(name: str) -> None:
    text, cut = TEXTS[name], random.Random(name)
    app = Host()
    async with app.run_test(size=(80, 30)):
        answer = app.query_one(Answer)
        at = 0
        while at < len(text):
            step = cut.choice((1, 3, 7, 40, 200))
            answer.feed(text[at : at + step])
            at += step
            if cut.random() < 0.7:
                await answer.flush()
                assert answer.source == text[:at]
        await answer.finish()
        assert answer.source == text


@pytest.mark.slow
async def test_ten_thousand_tokens_through_the_whole_interface() -> None:
    text = (PROSE * 8 + LISTS + "\n\n" + TABLE + "\n\n" + OPEN_FENCE + "```\n\n") * 4
    assert len(text) > 30_000
    async with chat() as running:
        await running.ready()
        running.backend.answers = [text]
        message = await running.ask("go")
        assert message.answer.source == text
        assert message.exchange.text == text == running.backend.emitted[0]


def settle(text: str, step: int) -> list[str]:
    """The pieces a Settler makes of a text that arrives in steps."""
    settler, tail, pieces = Settler(), "", []
    for at in range(0, len(text), step):
        tail += text[at : at + step]
        cut, _ = settler.split(tail)
        if cut:
            pieces.append(tail[:cut])
            tail = tail[cut:]
    return [*pieces, tail]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("step", [1, 17])
def test_pieces_mean_what_the_whole_means(name: str, step: int) -> None:
    """Blocks parsed one by one are the blocks of the whole; only a long list may be cut in two."""
    from localllm.tui.widgets.markdown import new_parser

    def blocks(text: str) -> list[tuple[str, str]]:
        kinds = ("inline", "fence", "code_block", "hr")
        return [(token.type, token.content) for token in new_parser().parse(text) if token.type in kinds]

    pieces = settle(TEXTS[name], step)
    assert "".join(pieces) == TEXTS[name]
    assert [block for piece in pieces for block in blocks(piece)] == blocks(TEXTS[name])


def test_a_long_list_settles_item_by_item() -> None:
    pieces = settle(LONG_LIST, 5)
    assert len(pieces) >= 5
    assert max(map(len, pieces)) < 600


def test_an_open_fence_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    settler, calls, parse = Settler(), 0, MarkdownIt.parse

    def counted(parser: MarkdownIt, text: str) -> object:
        nonlocal calls
        calls += 1
        return parse(parser, text)

    monkeypatch.setattr(MarkdownIt, "parse", counted)
    tail = "```python\n"
    settler.split(tail)
    for number in range(200):
        tail += f"line {number}\n"
        assert settler.split(tail) == (0, False)
    assert calls == 1
    assert settler.split(tail + "```\n")[0] == len(tail) + 4


async def test_lists_are_one_widget_with_hanging_indents() -> None:
    app = Host()
    async with app.run_test(size=(40, 30)) as pilot:
        answer = app.query_one(Answer)
        answer.feed("1. " + "word " * 12 + "\n   - nested **bold**\n2. two\n")
        await answer.finish()
        await pilot.pause()
        flat = app.query_one(_FlatList)
        assert not flat.children
        lines = str(flat.render()).split("\n")
        assert lines[0].startswith("1. word") and lines[1].startswith("   word")
        assert lines[-2] == "   • nested bold" and lines[-1] == "2. two"
        assert flat.size.height == len(lines)


async def test_a_list_with_code_in_it_keeps_its_code_block() -> None:
    app = Host()
    async with app.run_test(size=(60, 30)) as pilot:
        answer = app.query_one(Answer)
        answer.feed("- look:\n\n  ```python\n  x = 1\n  ```\n- end\n")
        await answer.finish()
        await pilot.pause()
        assert app.query_one(Fence).code == "x = 1"


@pytest.mark.slow
async def test_clicking_the_line_above_code_copies_it() -> None:
    async with chat() as running:
        await running.ready()
        running.backend.answers = ["```python\nx = 1\n```\n"]
        await running.ask("code")
        await running.until(lambda: running.screen.query("Fence .head"))
        await running.pilot.click("Fence .head")
        await running.until(lambda: running.app.clipboard == "x = 1")


async def test_hostile_text_is_shown_harmless_and_literal() -> None:
    async with chat() as running:
        await running.ready()
        message = await running.ask("!escape")
        assert message.answer.source == clean(ANSWERS["!escape"])
        assert message.exchange.text == ANSWERS["!escape"]  # the model sees what it said
        shown = "".join(running.drawn)
        for bad in ("\x1b", "\x07", "\x9b", "\u202e"):
            assert bad not in shown
        assert "[red]literal[/red]" in shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (r"\(a_1 \, b\) *x*", r"\(a_1 \, b\) x"),
        ("\\[ \\{a\\} \\\\\n *b* \\]", "\\[ \\{a\\} \\\\\n *b* \\]"),
        (r"$a*b*c$, $$\%$$", r"$a*b*c$, $$\%$$"),
        (r"$5 or *$6*, $HOME:$PATH, \[x", "$5 or $6, $HOME:$PATH, [x"),  # neither prices nor variables
    ],
)
def test_formulas_keep_their_backslashes_and_stars(text: str, shown: str) -> None:
    [block] = [token for token in new_parser().parse(text) if token.children]
    assert "".join(part.content for part in block.children or ()) == shown


@pytest.mark.slow
async def test_every_column_of_a_table_is_seen_beside_a_word_wider_than_the_screen() -> None:
    app = Host()
    async with app.run_test(size=(40, 30)) as pilot:
        answer = app.query_one(Answer)
        answer.feed(f"| name | address |\n|---|---|\n| one | {'x' * 90}! |\n")
        await answer.finish()
        await pilot.pause()
        lines = ["".join(segment.text for segment in strip) for strip in app.screen._compositor.render_strips()]
        assert any("name" in line for line in lines) and any("one" in line for line in lines)
        assert sum(line.count("x") for line in lines) == 90 and any("!" in line for line in lines)


async def test_html_and_reference_lines_do_not_vanish() -> None:
    app = Host()
    async with app.run_test(size=(80, 30)):
        answer = app.query_one(Answer)
        answer.feed("<think>x</think>\n\n[1]: http://example.org\n")
        await answer.finish()
        shown = "\n".join(str(block.render()) for block in app.query_one(Markdown).children)  # type: ignore[attr-defined]
        assert "<think>" in shown and "http://example.org" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "background", "keyword"),
    [("xcode", "#ffffff", "#a90d91"), pytest.param("monokai", "#272822", "#66d9ef", marks=pytest.mark.slow)],
)
async def test_code_has_the_colours_of_the_setting(name: str, background: str, keyword: str) -> None:
    async with chat(ui=UiConfig(code_theme=name)) as running:
        await running.ready()
        running.backend.answers = ["```python\ndef double(x):\n    return 2 * x\n```\n"]
        await running.ask("code")
        await running.until(lambda: running.screen.query("Fence Label"))
        fence = running.screen.query_one(Fence)
        assert fence.styles.background.hex.lower() == background
        code = fence.query_one("#code-content", Label).render()
        assert isinstance(code, Content)
        assert keyword in {str(span.style).lower() for span in code.spans if code.plain[span.start : span.end] == "def"}
        running.app.theme = "localllm-light"  # colours of code are asked for: they stay
        await running.pilot.pause()
        assert fence.styles.background.hex.lower() == background


async def test_an_answer_may_end_before_its_open_end_is_mounted() -> None:
    async with Host().run_test() as pilot:
        answer = pilot.app.query_one(Answer)
        await answer.query_one(Tail).remove_children()  # as on a slow machine, where they are not there yet
        answer.feed("an answer")
        await answer.finish()
        assert answer.source == "an answer"

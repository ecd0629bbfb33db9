"""Reasoning split from content: any cut of the text gives the same two texts."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from localllm.chat.parser import ChainedParser, ReasoningParser, reasoning_tags
from localllm.chat.tools.formats import BY_NAME
from localllm.chat.tools.parser import answer_parser


def reasoning_parser(template: str, prompt_tail: str = "") -> ReasoningParser | None:
    """A fresh parser for one answer. `prompt_tail` is the end of the prompt, control tokens as text."""
    tags = reasoning_tags(template, prompt_tail)
    return None if tags is None else ReasoningParser(*tags, opened=prompt_tail.rstrip().endswith(tags[0]))


def split(parser: ReasoningParser, pieces: list[str]) -> tuple[str, str]:
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    assert all(text for _, text in parts)
    return tuple("".join(t for k, t in parts if k == kind) for kind in ("reasoning", "content"))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("opened", "text", "reasoning", "content"),
    [
        (False, "<think>\nWhy?\n</think>\n\nBecause.", "Why?", "Because."),
        (True, "Why?\n\nSo.\n</think>\n\nBecause.", "Why?\n\nSo.", "Because."),
        (True, "<think>\nWhy?</think>Because.", "Why?", "Because."),
        (False, "<think>\n\n</think>\n\nBecause.", "", "Because."),
        (False, "Plain answer.\n", "", "Plain answer.\n"),
        (False, "  \n<think>x</think>y", "x", "y"),
        (False, "</think>\n\ny </think>", "", "y </think>"),
        (False, "</thin", "", "</thin"),
        (False, "The tag <think> opens, </think> closes.", "", "The tag <think> opens, </think> closes."),
        (False, "<think>a </think> b <think>c</think>", "a ", " b <think>c</think>"),
        (False, "<think>never closed\n", "never closed\n", ""),
        (True, "</think>\n    indented", "", "    indented"),
        (False, "<thin", "", "<thin"),
        (False, "<thinker>", "", "<thinker>"),
        (True, "a</thin", "a</thin", ""),
        (True, "a\n</thinkx></think>b", "a\n</thinkx>", "b"),
        (False, "\n\n", "", "\n\n"),
        (False, "", "", ""),
        (True, "x" + "\n" * 100 + "</think>y", "x" + "\n" * 36, "y"),
        (False, " " * 65 + "<think>x", "", " " * 65 + "<think>x"),
    ],
)
def test_split(opened: bool, text: str, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text), [text[i : i + 3] for i in range(0, len(text), 3)]):
        assert split(ReasoningParser(opened=opened), pieces) == (reasoning, content)


THOUGHT_CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"I look.\n{THOUGHT_CALL}", ("I look.", "", 1)),
        (f"{THOUGHT_CALL}\nDone.", ("", "Done.", 1)),
        (f"a {THOUGHT_CALL} b {THOUGHT_CALL}", ("a", "b", 2)),
        (f"a {THOUGHT_CALL} b\n</think>\nc {THOUGHT_CALL}", (f"a {THOUGHT_CALL} b", "c", 1)),
        (f"a {THOUGHT_CALL}</think>c", (f"a {THOUGHT_CALL}", "c", 0)),
        (f"a <tool_call> b {THOUGHT_CALL}", ("a <tool_call> b", "", 1)),
        ('a <tool_call>{"name": "g"}</tool_call> b', ('a <tool_call>{"name": "g"}</tool_call> b', "", 0)),
        ('a <tool_call>{"name": "f", "arg', ('a <tool_call>{"name": "f", "arg', "", 0)),
        ("a \n</think>\nb", ("a ", "b", 0)),
        (f"</think>{THOUGHT_CALL}", ("", "", 1)),
    ],
)
def test_a_call_in_reasoning_that_is_never_closed(text: str, expected: tuple[str, str, int]) -> None:
    """It is a call; where the reasoning is closed after it, it was a thought."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    for pieces in ([text], list(text), [text[i : i + 3] for i in range(0, len(text), 3)]):
        parsers = [answer_parser(BY_NAME["hermes"], tools) for _ in range(2)]
        parser = ChainedParser(ReasoningParser(opened=True), *parsers)
        parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
        assert all(said for _, said in parts)
        reasoning, content = ("".join(t for k, t in parts if k == kind) for kind in ("reasoning", "content"))
        assert (reasoning, content, sum('"name"' in t for k, t in parts if k == "tool_call")) == expected


def test_reasoning_streams_though_calls_are_looked_for() -> None:
    parsers = [answer_parser(BY_NAME["hermes"], []) for _ in range(2)]
    parser = ChainedParser(ReasoningParser(opened=True), *parsers)
    assert [parser.push(piece) for piece in ("I ", "think <tool", "> of")] == [
        [("reasoning", "I")],
        [("reasoning", " think")],
        [("reasoning", " <tool> of")],
    ]


PIECES = st.sampled_from(["<think>", "</think>", "<", "</", "think", ">", "a", " ", "\n", "\r\n", "🙂", "\n" * 40])


@given(st.lists(PIECES, max_size=12).map("".join), st.booleans(), st.lists(st.integers(0, 80), max_size=10))
@settings(max_examples=150)
@example("<think>a\n</think>\nb", False, [3, 8, 10])
def test_any_cut_gives_the_same(text: str, opened: bool, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    whole = split(ReasoningParser(opened=opened), [text])
    assert split(ReasoningParser(opened=opened), pieces) == whole
    tags = text.count("<think>") + text.count("</think>")
    assert sum(map(len, whole)) <= len(text)
    assert tags or opened or whole == ("", text)


def test_waiting_text_is_short_and_work_is_linear() -> None:
    parser = ReasoningParser(opened=True)
    seen = sum(len(text) for _ in range(20_000) for _, text in parser.push("\n"))
    assert seen == 0  # line ends before anything is said belong to the tag
    parser.push("x")
    seen = sum(len(text) for _ in range(20_000) for _, text in parser.push("\n"))
    assert seen >= 20_000 - 64 - 8


def test_tags_come_from_the_template() -> None:
    assert reasoning_tags("{{ messages }}") is None
    assert reasoning_parser("plain") is None
    assert reasoning_tags("{% if '</think>' in content %}") == ("<think>", "</think>")
    assert reasoning_tags("[THINK]{{ x }}[/THINK]") == ("[THINK]", "[/THINK]")
    assert reasoning_tags("<seed:think>..</seed:think>") == ("<seed:think>", "</seed:think>")
    efforts = "<ifm|think></ifm|think><ifm|think_fast></ifm|think_fast>"
    assert reasoning_tags(efforts, "assistant\n<ifm|think_fast>\n") == ("<ifm|think_fast>", "</ifm|think_fast>")
    assert reasoning_tags("<|channel>thought\n{{ x }}<channel|>") == ("<|channel>thought", "<channel|>")
    assert reasoning_tags("◁think▷{{ x }}◁/think▷") == ("◁think▷", "◁/think▷")
    assert reasoning_tags("no tags", "<|im_start|>assistant\n<think>\n") == ("<think>", "</think>")


@pytest.mark.parametrize(
    ("tail", "text", "expected"),
    [
        ("<|im_start|>assistant\n<think>\n", "r</think>c", ("r", "c")),
        ("<|im_start|>assistant\n", "<think>r</think>c", ("r", "c")),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "c", ("", "c")),
    ],
)
def test_the_prompt_may_have_opened_the_tag(tail: str, text: str, expected: tuple[str, str]) -> None:
    parser = reasoning_parser("{{ '<think>' }}", tail)
    assert parser is not None
    assert parser.in_reasoning == tail.endswith("<think>\n")
    assert split(parser, list(text)) == expected
    assert not parser.in_reasoning


def test_gemma_4_thinks_in_a_channel() -> None:
    parser = reasoning_parser("<|channel>thought\n..<channel|>", "<|turn>model\n")
    assert parser is not None
    assert split(parser, list("<|channel>thought\nwhy?\n<channel|>Because.")) == ("why?", "Because.")


@given(st.lists(PIECES, max_size=10).map("".join), st.lists(st.integers(0, 60), max_size=6))
@settings(max_examples=60)
def test_a_chain_gives_the_same_for_any_cut(text: str, cuts: list[int]) -> None:
    """Reasoning first, calls in what follows it."""
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    text += call

    def chain(pieces: list[str]) -> list[tuple[str, str]]:
        parser = ChainedParser(
            ReasoningParser(), answer_parser(BY_NAME["hermes"], [{"function": {"name": "f"}}], new_id=lambda: "id")
        )
        parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
        kinds = ("reasoning", "content", "tool_call")
        return [(kind, "".join(t for k, t in parts if k == kind)) for kind in kinds]

    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    assert chain(pieces) == chain([text]) == chain(list(text))
    said = text.lstrip()  # a tag after more than 64 characters of white space is text
    in_reasoning = said.startswith("<think>") and "</think>" not in text and len(text) - len(said) <= 64
    assert bool(chain([text])[2][1]) == (not in_reasoning)

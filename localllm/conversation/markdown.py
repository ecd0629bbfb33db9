"""Markdown that is still being written: fences, and how much of a text can no longer change."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from localllm.history.formulas import keep_formulas

if TYPE_CHECKING:  # the parser is imported while the model loads, not before the first frame
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

LIST_CHUNK = 24  # items an open list may have before its finished ones are settled
_FENCE = re.compile(r" {0,3}(`{3,}(?=[^`\n]*$)|~{3,})(.*)$")


def opened_fence(line: str) -> tuple[str, str] | None:
    """(fence, info string such as "python") of a line that opens a code block."""
    found = _FENCE.match(line)
    return (found[1], found[2].strip()) if found else None


def closes_fence(line: str, fence: str) -> bool:
    """Whether a line closes the code block that `fence` opened."""
    bare = line.strip()
    return bare.startswith(fence) and not bare.strip(fence[0])


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """(info string, contents) of the fenced blocks of a text, including one left open."""
    fences = (token for token in new_parser().parse(text) if token.type == "fence")
    return [(token.info.strip(), token.content.removesuffix("\n")) for token in fences]


def code_blocks(text: str) -> list[str]:
    """The contents of the fenced blocks of a text."""
    return [block for _, block in fenced_blocks(text)]


def new_parser() -> MarkdownIt:
    """GitHub's Markdown without HTML and reference definitions, which would hide text from the screen."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("gfm-like", {"html": False}).disable("reference")
    keep_formulas(parser)
    return parser


class Settler:
    """Finds how much of a growing text can no longer change. Only whole lines count."""

    def __init__(self) -> None:
        self._parser = new_parser()
        self._checked = 0

    def split(self, tail: str) -> tuple[int, bool]:
        """Return (settled characters of `tail`, whether the cut is inside a list)."""
        end = tail.rfind("\n") + 1
        if end <= self._checked:
            return 0, False
        fresh, self._checked = tail[self._checked : end], end
        if _in_open_fence(tail, fresh):
            return 0, False
        cut, inside = self._cut(tail[:end])
        if cut:
            self._checked = 0
        return cut, inside

    def _cut(self, text: str) -> tuple[int, bool]:
        tokens = self._parser.parse(text)
        top = [token for token in tokens if token.level == 0 and token.map]
        if not top:
            return 0, False
        last = top[-1]
        assert last.map is not None
        lines = text.split("\n")
        line, inside = last.map[0], False
        if _is_closed(last, lines):
            line = last.map[1]
        elif last.type in ("bullet_list_open", "ordered_list_open"):
            items = [t for t in tokens[tokens.index(last) :] if t.level == 1 and t.type == "list_item_open"]
            if len(items) > LIST_CHUNK and items[-1].map:
                line, inside = items[-1].map[0], True
        return sum(len(part) + 1 for part in lines[:line]), inside


def _in_open_fence(tail: str, fresh: str) -> bool:
    """Whether `tail` is an open code block that `fresh` does not close: such a block is not parsed at every line."""
    first = tail[: tail.find("\n")]
    fence = opened_fence(first)
    if fence is None or fresh.startswith(first + "\n"):
        return False
    return not any(closes_fence(line, fence[0]) for line in fresh.split("\n"))


def _is_closed(token: Token, lines: list[str]) -> bool:
    """Whether a block is complete even though nothing follows it yet."""
    assert token.map is not None
    start, end = token.map
    if token.type in ("heading_open", "hr"):
        return True
    if token.type == "paragraph_open":
        return end < len(lines) - 1 and not lines[end].strip()
    return token.type == "fence" and end - start > 1 and closes_fence(lines[end - 1], token.markup)

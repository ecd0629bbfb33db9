"""Keeps LaTeX formulas in Markdown as they were written."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_inline import StateInline

# \(a\), \[a\], $$a$$; $a$ without inner spaces at the marks and no word or number after it, so not prices or variables
_FORMULA = re.compile(
    r"\\\(.{1,1000}?\\\)|\\\[.{1,1000}?\\\]|\$\$.{1,1000}?\$\$|\$(?![\s$])(?:[^$\\\n]|\\.){1,300}?(?<!\s)\$(?!\w)",
    re.DOTALL,
)


def keep_formulas(parser: MarkdownIt) -> None:
    """Make a parser treat formulas like code: no escapes for backslashes, no emphasis for stars."""
    parser.inline.ruler.before("escape", "formula", _formula)


def _formula(state: StateInline, silent: bool) -> bool:
    found = _FORMULA.match(state.src, state.pos, state.posMax)
    if found is None:
        return False
    if not silent:
        state.push("code_inline", "code", 0).content = found[0]
    state.pos = found.end()
    return True

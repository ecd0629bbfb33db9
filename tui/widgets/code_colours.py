"""Colours of code: those of the interface's theme, or a style of Pygments (`ui.code_theme`)."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from textual.highlight import HighlightTheme


class CodeColours(NamedTuple):
    """How code is drawn."""

    tokens: type[HighlightTheme]  # kind of token -> Textual's words for its style
    background: str  # "#272822"


@cache
def code_colours(name: str) -> CodeColours | None:
    """A Pygments style by name; None for "auto", and for a name that is none."""
    from pygments.styles import get_style_by_name
    from pygments.util import ClassNotFound

    if name == "auto":
        return None
    try:
        style = get_style_by_name(name)
    except ClassNotFound:
        return None
    words = {}
    for kind, look in style:
        parts = [word for word in ("bold", "italic", "underline") if look[word]]
        parts += [f"#{look['color']}"] if look["color"] else []
        parts += [f"on #{look['bgcolor']}"] if look["bgcolor"] else []
        if parts:
            words[kind] = " ".join(parts)
    return CodeColours(type("PygmentsTheme", (HighlightTheme,), {"STYLES": words}), style.background_color)

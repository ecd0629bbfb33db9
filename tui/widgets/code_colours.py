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
    words = {kind: _words(look) for kind, look in style}
    theme = type("PygmentsTheme", (HighlightTheme,), {"STYLES": {kind: text for kind, text in words.items() if text}})
    return CodeColours(theme, style.background_color)


def _words(look: dict[str, str | bool | None]) -> str:
    parts = [word for word in ("bold", "italic", "underline") if look.get(word)]
    if look.get("color"):
        parts.append(f"#{look['color']}")
    if look.get("bgcolor"):
        parts.append(f"on #{look['bgcolor']}")
    return " ".join(parts)

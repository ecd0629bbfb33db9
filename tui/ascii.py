"""Replaces characters that the terminal's encoding lacks with ASCII of the same width, for non-UTF-8 locales."""

from __future__ import annotations

import codecs
import unicodedata
from functools import cache

from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

# each replacement is one cell wide
_MARKS = {
    **dict.fromkeys("─━┄┅┈┉╌╍═╴╶╸╺╼╾–—▔‐‑", "-"),
    **dict.fromkeys("│┃┆┇┊┋╎╏║╵╷╹╻╽╿▌▐▏▎▍▋▊▉·", "|"),
    **dict.fromkeys("▓█▀▖▗▘▙▚▛▜▝▞▟■", "#"),
    **dict.fromkeys("❯▸▶›→⇒", ">"),
    **dict.fromkeys("◂◀‹←⏎⇐", "<"),
    **dict.fromkeys("↑▲⇧", "^"),
    **dict.fromkeys("↓▾▼", "v"),
    **dict.fromkeys("“”„", '"'),
    **dict.fromkeys("‘’", "'"),
    **dict.fromkeys("•●★◆", "*"),
    **dict.fromkeys("✗×✕", "x"),
    **dict.fromkeys("░…", "."),
    "✓": "+", "≈": "~", "▒": ":", "○": "o",
    "▁": "_", "▂": ".", "▃": "-", "▄": "=", "▅": "+", "▆": "*", "▇": "%",
}  # fmt: skip


@cache
def plain(char: str) -> str:
    """The ASCII replacement of a character, of the same width."""
    width = cell_len(char)
    if width == 0:
        return ""
    known = _MARKS.get(char) or ("+" if "\u2500" <= char <= "\u257f" else "")  # the corners of boxes
    if not known:
        known = "".join(part for part in unicodedata.normalize("NFKD", char) if part.isascii())
    return known if len(known) == width else "?" * width


def _replaced(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(map(plain, error.object[error.start : error.end])), error.end


codecs.register_error("localllm.plain", _replaced)


class Encodable(LineFilter):
    """Keeps everything on screen within one encoding's characters."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self._encoding = encoding

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Convert the segments of a line, keeping their widths."""
        return [segment if segment.control or segment.text.isascii() else self._of(segment) for segment in segments]

    def _of(self, segment: Segment) -> Segment:
        text = segment.text.encode(self._encoding, "localllm.plain").decode(self._encoding)
        width = cell_len(segment.text)
        if cell_len(text) != width:  # joined characters are narrower than their sum
            text = text[:width].ljust(width) if text.isascii() else "?" * width
        return Segment(text, segment.style)

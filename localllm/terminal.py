"""Terminal output: cleaning foreign text, cell widths, stream capabilities, formatting. No Rich, no Textual.

Model output, model names, file names and hub texts are untrusted: `clean` and `Cleaner` remove everything a terminal
would obey (ESC, C0 and C1 controls, BEL, lone carriage returns) and bidi controls, which reorder text.
"""

from __future__ import annotations

import codecs
import locale
import os
import re
import shutil
import sys
import unicodedata
from contextlib import suppress
from typing import IO

# combining marks kept per base character; no script needs more, and 10^5 of them freeze a terminal
MAX_COMBINING = 16

GIB = 1 << 30

_DROPPED = [*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0)]
_BIDI = [0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_TABLE = dict.fromkeys([*_DROPPED, *_BIDI])
_JSON_ESCAPED = re.compile("[" + "".join(f"\\u{code:04x}" for code in [*range(0x7F, 0xA0), *_BIDI]) + "]")


class Cleaner:
    """`clean` for text that arrives in pieces: combining marks are counted across them."""

    def __init__(self) -> None:
        self._marks = 0

    def push(self, text: str) -> str:
        """Return the cleaned form of the next piece."""
        text = text.translate(_TABLE)
        if text.isascii():
            if text:
                self._marks = 0
            return text
        kept = []
        for char in text:
            if unicodedata.category(char) in ("Mn", "Me"):
                self._marks += 1
                if self._marks > MAX_COMBINING:
                    continue
            else:
                self._marks = 0
            kept.append(char)
        return "".join(kept)


def clean(text: str) -> str:
    """Remove everything from `text` that a terminal obeys; newlines and tabs stay."""
    return Cleaner().push(text)


def clean_line(text: str) -> str:
    """`clean`, joined to one line: for names, titles and table cells."""
    return " ".join(clean(text).split())


def escaped(text: str) -> str:
    """`text` with characters that cannot be printed, line breaks among them, as escapes (`\\n`, `\\x1b`)."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def spaced(text: str) -> str:
    """`text` on one line, with characters that cannot be printed as spaces, and no two spaces in a row."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def json_safe(text: str) -> str:
    """Escape C1 and bidi controls in JSON text (`json.dumps` has already escaped C0 controls)."""
    return _JSON_ESCAPED.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def cell_width(text: str) -> int:
    """Terminal cells of a single line."""
    if text.isascii():
        return len(text)
    cells = 0
    for char in text:
        if unicodedata.category(char) in ("Mn", "Me", "Cf"):
            continue
        cells += 2 if unicodedata.east_asian_width(char) in "WF" else 1
    return cells


def fit(text: str, cells: int) -> str:
    """Cut `text` to at most `cells` cells, with an ellipsis where something was cut."""
    if cell_width(text) <= cells:
        return text
    kept, used = [], 0
    for char in text:
        width = cell_width(char)
        if used + width > cells - 1:
            break
        kept.append(char)
        used += width
    return "".join(kept) + "…"


def is_tty(stream: IO[str] | None) -> bool:
    """Whether a stream is a terminal; a closed or missing one is not."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def terminal_size() -> os.terminal_size:
    """Columns and lines: COLUMNS and LINES, else those of the terminal on stdout, stderr or stdin, else 80 × 24."""
    for descriptor in (2, 0):  # the standard library only asks stdout
        with suppress(OSError):
            if (size := os.get_terminal_size(descriptor)).columns:
                return shutil.get_terminal_size(size)
    return shutil.get_terminal_size()


def dumb() -> bool:
    """Whether the terminal can only print (TERM=dumb)."""
    return os.environ.get("TERM", "") in ("dumb", "unknown")


def no_color() -> bool:
    """Whether the user wants no color (no-color.org: set and not empty)."""
    return bool(os.environ.get("NO_COLOR"))


def is_utf8(stream: IO[str] | None) -> bool:
    """Whether characters beyond ASCII can be written to a stream."""
    return "utf" in (getattr(stream, "encoding", None) or sys.getdefaultencoding()).lower()


def locale_encoding() -> str:
    """The character encoding of the locale; "utf-8" when it is unknown.

    The stream's own encoding is not used: Python takes UTF-8 for the locale C, which means ASCII.
    """
    try:
        return codecs.lookup(locale.nl_langinfo(locale.CODESET)).name
    except (AttributeError, LookupError):
        return "utf-8"


def gib(num_bytes: float, digits: int | None = None) -> str:
    """Format bytes in binary units: '512 B', '98.4 MiB', '7.8 GiB'; with `digits`, always in GiB: '0.10 GiB'."""
    if digits is not None:
        return f"{num_bytes / GIB:.{digits}f} GiB"
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def tokens_short(count: int) -> str:
    """Format a number of tokens for a meter: 512, 1.5k, 32k."""
    if count < 1000:
        return str(count)
    if count % 1024 == 0:
        return f"{count // 1024}k"
    return f"{count / 1000:.1f}k" if count < 10_000 else f"{count / 1000:.0f}k"


def params_short(count: int) -> str:
    """Format a number of parameters: 7.6 B, 135 M."""
    return f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.0f} M"


def rate(value: float) -> str:
    """Format tokens per second, or seconds: '0.7', '42'."""
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def seconds_short(seconds: float) -> str:
    """Format a duration: '0.4 s', '12 s', '2:43', '1:02:03'."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"


def counted(count: int, what: str) -> str:
    """'1 turn', '2,000 turns'."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"

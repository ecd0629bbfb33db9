"""Kinds of values: parse a variable's or flag's text, or a TOML value, or raise ValueError."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from localllm.request import Range


def as_text(value: Any) -> str:
    """Format a value as it would be typed: `true`, `a,b`, nothing for None."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple) else "" if value is None else str(value)


@dataclass(frozen=True, slots=True)
class Kind:
    """The values that a key accepts. `parse` returns the value or raises ValueError; `show` formats it as typed."""

    expects: str
    parse: Callable[[Any], Any]
    show: Callable[[Any], str] = as_text
    # accepted words, if any: suggestions for a wrong word come from these
    names: Callable[[], Iterable[str]] = tuple


def _only(suits: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """Return a parser that accepts suitable values unchanged and raises ValueError for others."""

    def parse(value: Any) -> Any:
        if not suits(value):
            raise ValueError
        return value

    return parse


def _flag(value: Any) -> bool:
    if str(value).lower() in ("1", "true", "yes", "on"):
        return True
    if str(value).lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError


def _texts(value: Any) -> tuple[str, ...]:
    parts = [p.strip() for p in value.split(",") if p.strip()] if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not all(isinstance(p, str) for p in parts):
        raise ValueError
    return tuple(parts)


def _origins(value: Any) -> tuple[str, ...]:
    """As browsers send them: in lower case, without a path."""
    parts = tuple(part.lower().removesuffix("/") for part in _texts(value))
    if not all(part == "null" or re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/?#,*]+", part) for part in parts):
        raise ValueError
    return parts


def _adapters(value: Any) -> tuple[str, ...]:
    """NAME=PATH each; a path alone is named after its last part."""
    given = [f"{name}={path}" for name, path in value.items()] if isinstance(value, Mapping) else _texts(value)
    parts = [one.partition("=") if "=" in one else (one.rstrip("/").rpartition("/")[2], "=", one) for one in given]
    names = [name for name, _, _ in parts]
    if not all(name and path for name, _, path in parts) or len(set(names)) < len(names):
        raise ValueError
    return tuple("".join(part) for part in parts)


def _scaled(units: Mapping[str, float]) -> Callable[[Any], float]:
    def parse(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise ValueError
        found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", str(value).strip())
        if not found or found[2].lower() not in units:
            raise ValueError
        return float(found[1]) * units[found[2].lower()]

    return parse


_BYTES = {"": 1.0, "b": 1.0} | {f"{p}b": 1000.0**i for i, p in enumerate("kmgt", 1)}
_BYTES |= {f"{p}{tail}": 1024.0**i for i, p in enumerate("kmgt", 1) for tail in ("", "ib")}
parse_bytes = _scaled(_BYTES)  # 32GiB, 32G (both powers of two), 32GB (powers of ten), 4096 -> bytes; ValueError
parse_seconds = _scaled({"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400})  # 90, 90s, 30m, 2h, 1d -> seconds; ValueError
parse_tokens = _scaled({"": 1, "k": 1024})  # 4096, 8k -> tokens; ValueError


def within(allowed: Range) -> Kind:
    """A number in a range."""

    def parse(value: Any) -> Any:
        if isinstance(value, bool) or (allowed.whole and isinstance(value, float)):
            raise ValueError
        number = int(value) if allowed.whole else float(value)
        if number not in allowed:
            raise ValueError
        return number

    noun = "a whole number" if allowed.whole else "a number"
    if allowed.open:
        return Kind(f"{noun} above {allowed.low:g}, up to {allowed.high:g}", parse)
    if allowed.whole and allowed.high >= 1 << 20:
        noun = f"a {int(allowed.high).bit_length() + 1}-bit whole number"
        return Kind(f"{noun} of at least {allowed.low}" if allowed.low > -(1 << 20) else noun, parse)
    return Kind(f"{noun} from {allowed.low:g} to {allowed.high:g}", parse)


def _tokens(value: Any) -> int:
    count = parse_tokens(value)
    if count != int(count) or not 16 <= count <= 1 << 24:
        raise ValueError
    return int(count)


def choice(*names: str) -> Kind:
    """One of a few words."""
    return Kind(" | ".join(names), _only(lambda value: value in names), names=lambda: names)


def or_auto(kind: Kind) -> Kind:
    """The word auto, or whatever `kind` accepts."""
    return Kind(
        f"auto, or {kind.expects}",
        lambda value: "auto" if value == "auto" else kind.parse(value),
        names=lambda: ("auto", *kind.names()),
    )


def _styles() -> Iterable[str]:
    """Pygments' styles, imported only when a setting names one."""
    from pygments.styles import get_all_styles

    return get_all_styles()


def _whole_units(*units: tuple[int, str]) -> Callable[[float], str]:
    def show(value: float) -> str:
        return next(
            (f"{value // size:.15g}{name}" for size, name in units if value and value % size == 0), f"{value:.15g}"
        )

    return show


TEXT = Kind("text", _only(lambda value: isinstance(value, str)))
FLAG = Kind("true | false", _flag)
ORIGINS = Kind("a list of origins such as http://localhost:3000", _origins)
ADAPTERS = Kind("NAME=PATH entries with distinct names", _adapters)
DEVICE = Kind(
    "auto | cpu | cuda | cuda:N",
    _only(lambda value: isinstance(value, str) and re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", value) is not None),
)
CODE_THEME = or_auto(
    Kind("a Pygments style, such as monokai", _only(lambda value: value in set(_styles())), names=_styles)
)
# ours and Textual's, listed here because every command reads the settings and Textual is slow to import
THEMES = (
    "localllm-dark", "localllm-light", "ansi-dark", "ansi-light", "atom-one-dark", "atom-one-light",
    "catppuccin-frappe", "catppuccin-latte", "catppuccin-macchiato", "catppuccin-mocha", "dracula", "flexoki",
    "gruvbox", "monokai", "nord", "rose-pine", "rose-pine-dawn", "rose-pine-moon", "solarized-dark", "solarized-light",
    "textual-dark", "textual-light", "tokyo-night",
)  # fmt: skip
THEME = Kind("a theme, such as localllm-light", _only(lambda value: value in THEMES), names=lambda: THEMES)
TOKENS = Kind(
    "auto, max, or 16 to 16,777,216 tokens, such as 8192 or 32k",
    lambda value: value if value in ("auto", "max") else _tokens(value),
    names=lambda: ("auto", "max"),
)
SIZE = Kind(
    "a size such as 32GiB", lambda value: int(parse_bytes(value)), _whole_units((1 << 30, "GiB"), (1 << 20, "MiB"))
)
DURATION = Kind(
    "a time such as 90s, 30m or 2h; 0 for never", parse_seconds, _whole_units((3600, "h"), (60, "m"), (1, "s"))
)

"""Every key of the interface by id; `[keys]` in the settings and `--keys vim` change them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from textual.binding import Binding
from textual.keys import KEY_NAME_REPLACEMENTS, Keys, format_key, key_to_character

from localllm.errors import nearest
from localllm.paths import toml_beside

MODIFIERS = {"ctrl", "shift", "alt", "super", "hyper", "meta"}
NAMES = {key.value for key in Keys} | {*KEY_NAME_REPLACEMENTS.values()}


class Key(NamedTuple):
    """An action's keys (comma-separated), its meaning, and where it belongs: chat, prompt or browse."""

    keys: str
    meaning: str
    where: str
    action: str = ""


_TABLES = toml_beside(__file__, "keymap.toml")
VIM: Mapping[str, str] = _TABLES.pop("vim")
KEYS = {name: Key(where=where, **row) for where, rows in _TABLES.items() for name, row in rows.items()}


class Keymap:
    """The keys in effect: defaults, style, and the user's own. `problems` lists invalid ones."""

    def __init__(self, style: str = "default", own: Mapping[str, str] | None = None) -> None:
        self.own = {**(VIM if style == "vim" else {}), **(own or {})}
        self.problems = []
        for name in (name for name in self.own if name not in KEYS):
            near = nearest(name, KEYS)
            meant = f"did you mean {near}?" if near else "`localllm chat --list-keys` lists them"
            self.problems.append(f"[keys] {name!r} is not a key binding; {meant}")
        wrong = [(name, key) for name in self.own if name in KEYS for key in _split(self.own[name]) if not is_key(key)]
        known = {name: ",".join(filter(is_key, _split(keys))) for name, keys in self.own.items() if name in KEYS}
        self.own = {name: keys for name, keys in known.items() if keys}
        for name, key in wrong:
            self.problems.append(f"[keys] {name}: {key!r} is not a key; {self.keys(name)[0]} is used")

    def keys(self, name: str) -> tuple[str, ...]:
        return tuple(_split(self.own.get(name, KEYS[name].keys)))

    def label(self, name: str) -> str:
        """The first key of a binding, as displayed: ^P, F1, esc."""
        return shown(self.keys(name)[0])

    def labels(self, name: str) -> str:
        return "  ".join(dict.fromkeys(shown(key) for key in self.keys(name) if not key.startswith("upper_")))

    def browse(self) -> dict[str, str]:
        """Key -> id for browse mode."""
        return {key: name for name in KEYS if KEYS[name].where == "browse" for key in self.keys(name)}


def _split(keys: str) -> list[str]:
    return [key.strip() for key in keys.split(",") if key.strip()]


def is_key(text: str) -> bool:
    """Whether a terminal may send this key: `ctrl+x`, `f5`, `escape`, `g`, `slash`, `upper_n`."""
    *modifiers, last = text.split("+")
    character = key_to_character(last.removeprefix("upper_")) or "\0"
    return (last in NAMES or character.isprintable()) and MODIFIERS.issuperset(modifiers)


def shown(key: str) -> str:
    """Format a key for display."""
    *modifiers, last = key.split("+")
    name = format_key(last)
    if "ctrl" in modifiers and len(name) == 1 or last[0] == "f" and last[1:].isdigit():
        name = name.upper()
    marks = {"ctrl": "^", "shift": "⇧", "alt": "alt+"}
    return "".join(marks.get(m, f"{m}+") for m in modifiers) + {"space": "Space"}.get(name, name)


def bindings() -> list[Binding]:
    """The key bindings of the chat screen, each with its id."""
    return [
        Binding(key.keys, key.action, key.meaning, show=False, priority=name == "app.interrupt", id=name)
        for name, key in KEYS.items()
        if key.action
    ]

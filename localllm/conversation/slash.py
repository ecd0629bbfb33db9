"""Parses typed lines into messages and slash commands; lists the commands. No Textual, no output."""

from __future__ import annotations

import re
from typing import NamedTuple

from localllm.errors import ConfigError, did_you_mean, nearest
from localllm.paths import toml_beside


class Slash(NamedTuple):
    """A slash command: name, meaning, argument, and whether line mode has it."""

    name: str
    meaning: str
    argument: str = ""
    plain: bool = True


SLASHES = tuple(Slash(name, **row) for name, row in toml_beside(__file__, "slash.toml").items())
ALIASES = {"bye": "quit", "exit": "quit", "q": "quit", "?": "help", "clear": "new", "retry": "regen", "models": "model"}
MAX_PORT = 65_535
OFF = -1  # `parse_port` returns it for "off"
_BARE_QUIT = ("exit", "quit", ":q")


class Typed(NamedTuple):
    """A parsed line: a message (`command` is empty), or a slash command with its argument."""

    text: str
    command: str = ""


def understand(line: str) -> Typed:
    """Parse a typed line. `//x` is the message "/x". Raises ConfigError for an unknown command."""
    text = line.strip()
    if text in _BARE_QUIT:
        return Typed("", "quit")
    if text.startswith("//"):
        return Typed(text[1:])
    if not text.startswith("/"):
        return Typed(line.strip("\n"))
    word, _, rest = text[1:].partition(" ")
    name = ALIASES.get(word.lower(), word.lower())
    if name not in {slash.name for slash in SLASHES}:
        names = [slash.name for slash in SLASHES]
        near = nearest(name, names, 0.5) or next((n for n in names if word and n.startswith(word[0].lower())), "")
        raise ConfigError(
            f"unknown command /{word}{did_you_mean(near and f'/{near}')}",
            f"/help lists the commands; //{word} sends it as a message",
        )
    return Typed(rest.strip(), name)


def matching(prefix: str) -> list[Slash]:
    """Commands matching a half-typed one: those that start with it, then those that contain its letters in order."""
    wanted = prefix.removeprefix("/").lower()
    letters = re.compile(".*".join(map(re.escape, wanted)))
    known = [slash for slash in SLASHES if letters.search(slash.name)]
    return sorted(known, key=lambda slash: not slash.name.startswith(wanted))


def parse_port(text: str) -> int | None:
    """Parse the argument of /serve: a port, `OFF`, or None for the default port. Raises ConfigError."""
    if not text:
        return None
    if text == "off":
        return OFF
    if not text.isascii() or not text.isdigit() or int(text) > MAX_PORT:
        raise ConfigError(f"/serve must be followed by a port up to {MAX_PORT} or off, not {text}", "/serve 8000")
    return int(text)

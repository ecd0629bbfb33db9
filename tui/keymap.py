"""Every key of the interface by the id it is bound under: `[keys]` in the settings and `--keys vim` change them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from textual.binding import Binding


class Key(NamedTuple):
    """An action's keys, comma-separated, and what it does."""

    keys: str
    meaning: str
    action: str = ""  # the screen's action; empty where a widget looks the key up itself
    where: str = "chat"  # chat | prompt | browse


KEYS: Mapping[str, Key] = {
    "prompt.send": Key("enter", "send; while an answer runs, the message waits its turn", where="prompt"),
    "prompt.newline": Key("shift+enter,alt+enter,ctrl+j", "new line (so does a \\ before Enter)", where="prompt"),
    "prompt.search": Key("ctrl+r", "search the messages sent earlier", "search_prompts"),
    "prompt.editor": Key("ctrl+g", "write in $EDITOR", "editor"),
    "chat.stop": Key("escape", "stop the answer; else close what is open; else browse", "escape"),
    "app.interrupt": Key("ctrl+c", "copy the selection, stop, clear the prompt; twice to quit", "interrupt"),
    "app.quit": Key("ctrl+q", "quit (so does Ctrl+D when the prompt is empty)", "quit_chat"),
    "chat.new": Key("ctrl+n", "new chat", "new_chat"),
    "chats.open": Key("ctrl+s", "saved chats, searched as you type", "chats"),
    "ui.sidebar": Key("f3,ctrl+b", "show or hide the list of chats", "sidebar"),
    "models.open": Key("ctrl+o", "models: choose, download, remove", "models"),
    "params.open": Key("f2", "parameters: sampling, thinking, instructions", "params"),
    "engine.open": Key("f4", "the engine: pages, batches, speeds, memory", "engine"),
    "ui.thinking": Key("ctrl+t", "show or hide thinking", "thinking"),
    "browse.up": Key("alt+up", "browse: the message above", "browse_up"),
    "browse.down": Key("alt+down", "browse: the message below", "browse_down"),
    "app.help": Key("f1", "this help", "help"),
    "app.doctor": Key("f9", "check this machine", "doctor"),
    "app.log": Key("f12", "the log of this program", "logs"),
    "browse.copy": Key("y", "copy the message as Markdown", where="browse"),
    "browse.code": Key("c", "copy a code block; again for the next", where="browse"),
    "browse.save": Key("s", "write a code block to a file", where="browse"),
    "browse.edit": Key("e", "edit: a question is asked anew, an answer rewritten", where="browse"),
    "browse.again": Key("r", "answer again, as a new branch", where="browse"),
    "browse.branch": Key("b", "go on from here; what follows stays as a branch", where="browse"),
    "browse.previous": Key("left_square_bracket", "the previous branch", where="browse"),
    "browse.next": Key("right_square_bracket", "the next branch", where="browse"),
    "browse.fold": Key("space", "open or close the thinking", where="browse"),
    "browse.delete": Key("d", "remove the message and what follows; twice", where="browse"),
    "browse.search": Key("slash", "search in this chat", where="browse"),
    "browse.search_next": Key("n", "the next match", where="browse"),
    "browse.search_back": Key("N,upper_n", "the previous match", where="browse"),
    "browse.raw": Key("o", "the message as the model wrote it", where="browse"),
    "browse.move_up": Key("k,up", "move up", where="browse"),
    "browse.move_down": Key("j,down", "move down", where="browse"),
    "browse.first": Key("g,home", "to the first message", where="browse"),
    "browse.last": Key("G,upper_g,end", "to the last message", where="browse"),
    "browse.leave": Key("i,enter,escape", "back to the prompt (as any other letter)", where="browse"),
}
# What `--keys vim` binds another way.
VIM: Mapping[str, str] = {
    "chat.new": "ctrl+n",
    "browse.up": "alt+up,alt+k",
    "browse.down": "alt+down,alt+j",
    "browse.move_up": "k,up,ctrl+p,ctrl+y",
    "browse.move_down": "j,down,ctrl+n,ctrl+e",
    "browse.leave": "i,a,o,enter,escape,colon",
    "browse.raw": "K,upper_k",
    "browse.delete": "d,x",
    "browse.again": "r,u",
}
_NAMES = {
    "escape": "esc", "enter": "⏎", "slash": "/", "left_square_bracket": "[", "right_square_bracket": "]",
    "space": "Space", "up": "↑", "down": "↓", "colon": ":",
}  # fmt: skip


class Keymap:
    """The keys in force: the defaults, the style, the user's own. `problems` names what could not be used."""

    def __init__(self, style: str = "default", own: Mapping[str, str] | None = None) -> None:
        self.own = {**(VIM if style == "vim" else {}), **(own or {})}
        self.problems = [
            f"[keys] {name!r} is not a key binding" + _meant(name) for name in self.own if name not in KEYS
        ]
        self.own = {name: keys for name, keys in self.own.items() if name in KEYS and keys.strip()}

    def keys(self, name: str) -> tuple[str, ...]:
        return tuple(key.strip() for key in self.own.get(name, KEYS[name].keys).split(",") if key.strip())

    def label(self, name: str) -> str:
        """The first of them, as it is shown: ^P, F1, esc."""
        return shown(self.keys(name)[0])

    def labels(self, name: str) -> str:
        """All of them, as they are shown."""
        return "  ".join(dict.fromkeys(shown(key) for key in self.keys(name) if not key.startswith("upper_")))

    def browse(self) -> dict[str, str]:
        """Key -> id, of browse mode."""
        return {key: name for name in KEYS if KEYS[name].where == "browse" for key in self.keys(name)}


def shown(key: str) -> str:
    """A key for people."""
    *modifiers, last = key.split("+")
    name = _NAMES.get(last, last.upper() if len(last) > 1 and last[0] == "f" and last[1:].isdigit() else last)
    marks = {"ctrl": "^", "shift": "⇧", "alt": "alt+"}
    if "ctrl" in modifiers and len(name) == 1:
        name = name.upper()
    return "".join(marks.get(m, f"{m}+") for m in modifiers) + name


def bindings() -> list[Binding]:
    """The bindings of the chat screen, each with its id."""
    return [
        Binding(key.keys, key.action, key.meaning, show=False, priority=name == "app.interrupt", id=name)
        for name, key in KEYS.items()
        if key.action
    ]


def _meant(name: str) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, list(KEYS), 1, 0.6)
    return f"; did you mean {near[0]}?" if near else "; `localllm chat --list-keys` lists them"

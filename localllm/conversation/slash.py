"""What typing means: a message, or one of the slash commands; which commands there are. No Textual, no output."""

from __future__ import annotations

from typing import NamedTuple

from localllm.errors import ConfigError


class Slash(NamedTuple):
    """A slash command: its name, the shape of its argument, its meaning, whether the line mode has it too."""

    name: str
    argument: str
    meaning: str
    plain: bool = True


SLASHES = (
    Slash("help", "", "keys and commands"),
    Slash("model", "[name]", "choose another model; the conversation stays", False),
    Slash("new", "", "start a new chat"),
    Slash("chats", "[query]", "saved chats, searched", False),
    Slash("rename", "title", "give this chat a title"),
    Slash("system", "[text|off]", "show or set the instructions for the model"),
    Slash("preset", "[name|save name]", "use or save a set of instructions and sampling"),
    Slash("set", "[key value]", "show or set sampling: temperature, top_p, seed, …"),
    Slash("params", "", "all parameters in a panel", False),
    Slash("think", "[auto|off|low|medium|high]", "reasoning of models that can switch it"),
    Slash("attach", "path…", "add text files to the next message"),
    Slash("paste", "", "attach what the clipboard of this machine holds", False),
    Slash("regen", "[n]", "answer again, as a new branch"),
    Slash("edit", "[n]", "change a question of yours, as a new branch", False),
    Slash("undo", "", "take the last question and its answer back"),
    Slash("branch", "[n]", "go on from answer n; what came after stays as another branch", False),
    Slash("continue", "", "go on with an answer that was cut short"),
    Slash("copy", "[n|code [k]|all]", "copy the last answer, answer n, a code block, or all"),
    Slash("save", "path", "write the last code block to a file"),
    Slash("export", "[md|json|html] [path]", "write this chat to a file"),
    Slash("ctx", "", "what fills the context window"),
    Slash("stats", "", "speeds, memory and what runs"),
    Slash("engine", "", "the engine panel: pages, batches, speeds, memory", False),
    Slash("serve", "[port|off]", "let other programs on this machine use this model: an OpenAI-compatible API"),
    Slash("ps", "", "what is loaded on this machine", False),
    Slash("plan", "", "what fits on this machine", False),
    Slash("doctor", "", "check this machine", False),
    Slash("bench", "", "measure this model", False),
    Slash("theme", "[name]", "colours", False),
    Slash("keys", "", "keys and how they are bound", False),
    Slash("logs", "", "the log of this program", False),
    Slash("quit", "", "leave"),
)
ALIASES = {"bye": "quit", "exit": "quit", "q": "quit", "?": "help", "clear": "new", "retry": "regen", "models": "model"}
_BARE_QUIT = ("exit", "quit", ":q")


class Typed(NamedTuple):
    """A line as understood: a message (`command` is empty), or a slash command with its argument."""

    text: str
    command: str = ""


def understand(line: str) -> Typed:
    """What a typed line means. `//x` is the message "/x". Raises ConfigError for an unknown command."""
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
        from difflib import get_close_matches

        names = [slash.name for slash in SLASHES]
        near = get_close_matches(name, names, 1, 0.5) or [n for n in names if word and n.startswith(word[0].lower())]
        meant = f"; did you mean /{near[0]}?" if near else ""
        raise ConfigError(f"there is no command /{word}{meant}", f"/help lists them; //{word} sends it as a message")
    return Typed(rest.strip(), name)


def matching(prefix: str, plain: bool = False) -> list[Slash]:
    """Commands for a half-typed one: those that start with it, then those that hold its letters in order."""
    wanted = prefix.removeprefix("/").lower()
    known = [slash for slash in SLASHES if slash.plain or not plain]
    starts = [slash for slash in known if slash.name.startswith(wanted)]
    return starts + [slash for slash in known if slash not in starts and _subsequence(wanted, slash.name)]


def _subsequence(letters: str, name: str) -> bool:
    rest = iter(name)
    return all(letter in rest for letter in letters)

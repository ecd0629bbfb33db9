"""Answers a shell that completes a command's or a local model's name, without loading the program.

What needs the program's options is left to Typer: `answered` then says no, having printed nothing.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable

from localllm.cli.commands import ALIASES, COMMANDS

# commands whose first word is a model
ONE_MODEL = frozenset({"bench", "chat", "doctor", "eval", "quantize", "run", "show", "stop", "tune"})
MANY_MODELS = frozenset({"plan", "pull", "rm", "serve"})  # commands whose words all are


def answered() -> bool:
    """Print the completions when they are of the quick kind; False when Typer must be asked."""
    shell = os.environ["_LOCALLLM_COMPLETE"].removeprefix("complete_")
    words = _words(shell)
    found = None if words is None else candidates(words[:-1], words[-1])
    if found is None:
        return False
    text = _shown(shell, found)
    if text is None:
        return False
    sys.stdout.write(text + "\n" if text else "")
    return True


def candidates(before: list[str], incomplete: str) -> list[tuple[str, str]] | None:
    """(value, help) of what may stand where `incomplete` does, after the words `before`; None when it is not known."""
    if incomplete.startswith("-") or any(word.startswith("-") for word in before):
        return None
    if not before:
        return [(name, summary) for name, _, summary in COMMANDS if name.startswith(incomplete)]
    command = ALIASES.get(before[0], before[0])
    if command in ("config", "logs"):
        return [(value, text) for value, text in _words_of(command, before[1:]) if value.startswith(incomplete)]
    if command in MANY_MODELS or (command in ONE_MODEL and len(before) == 1):
        return [(name, "") for name in local_names() if name.startswith(incomplete)]
    return None


def _words_of(command: str, before: list[str]) -> list[tuple[str, str]]:
    """What `config` and `logs` take after the words `before`: an action, a setting, a value, a chat."""
    if command == "logs":
        if not before:
            return [(word, "") for word in ("list", "search", "show", "export", "import", "rm")]
        return _chats() if before[0] in ("show", "export", "rm") else []
    from localllm.config import KEYS

    if not before:
        return [(word, "") for word in ("list", "get", "set", "unset", "path", "edit", "schema")]
    if before[0] in ("get", "set", "unset") and len(before) == 1:
        return [(key.path, key.meaning) for key in KEYS.values()]
    if before[0] == "set" and len(before) == 2 and before[1] in KEYS:
        kind = KEYS[before[1]].kind
        return [(word, "") for word in (*kind.names(), *(("true", "false") if kind.expects == "true | false" else ()))]
    return []


def _chats() -> list[tuple[str, str]]:
    """Ids of saved chats with their titles; nothing raises."""
    from localllm.errors import LocalLLMError
    from localllm.history.store import History

    try:
        with History() as history:
            return [("last", ""), *((chat.id[:6], chat.title) for chat in history.chats(50))]
    except (LocalLLMError, OSError):
        return []


def local_names() -> list[str]:
    """Names of the models on this machine, from folder names alone: no file is opened, nothing raises."""
    from localllm.errors import LocalLLMError
    from localllm.hub.local import scan

    try:
        return [found.name for found in scan() if not found.problem]
    except (LocalLLMError, OSError):
        return []


def _words(shell: str) -> list[str] | None:
    """The words after the program's name, the last one being completed; None where the shell's way is not known."""
    try:
        if shell == "bash":
            words = shlex.split(os.environ["COMP_WORDS"])
            at = int(os.environ["COMP_CWORD"])
            return [*words[1:at], words[at] if at < len(words) else ""]
        if shell in ("zsh", "fish"):
            line = os.environ.get("_TYPER_COMPLETE_ARGS", "")
            return [*shlex.split(line)[1:], *([""] if not line or line.endswith(" ") else [])] or [""]
    except (KeyError, ValueError, IndexError):  # a line with an open quote: Typer splits more forgivingly
        return None
    return None


def _shown(shell: str, found: Iterable[tuple[str, str]]) -> str | None:
    """As the shell's completion script wants it; None for another shell."""
    found = list(found)
    if shell == "bash":
        return "\n".join(value for value, _ in found)
    if shell == "zsh":
        if not found:
            return "_files"
        listed = "\n".join(f'"{_zsh(v)}":"{_zsh(h)}"' if h else f'"{_zsh(v)}"' for v, h in found)
        return f"_arguments '*: :(({listed}))'"
    if shell == "fish":
        action = os.environ.get("_TYPER_COMPLETE_FISH_ACTION", "")
        if action == "get-args":
            return "\n".join(f"{value}\t{text}" if text else value for value, text in found)
        if action == "is-args" and found:
            return ""
    return None


def _zsh(text: str) -> str:
    quoted = text.replace('"', '""').replace("'", "''").replace("$", "\\$").replace("`", "\\`")
    return quoted.replace(":", r"\\:")

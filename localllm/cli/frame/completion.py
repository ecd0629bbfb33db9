"""Completes command names and local model names for a shell without loading the program.

Everything that needs the program's options is left to Typer: `answered` then returns False without printing.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable

from localllm.cli.commands import ALIASES, COMMANDS

# commands whose first word is a model
ONE_MODEL = frozenset({"bench", "chat", "doctor", "eval", "quantize", "run", "show", "stop", "tune"})
MANY_MODELS = frozenset({"plan", "pull", "rm", "serve"})  # commands whose words are all models


def answered() -> bool:
    """Print completions that need no Typer; return False when Typer must be asked."""
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
    """(value, help) pairs that can replace `incomplete` after the words `before`; None when that is not known."""
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
    """The words that `config` and `logs` accept after `before`: an action, a setting, a value, a chat."""
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
    """Ids of saved chats with their titles; never raises."""
    from localllm.errors import LocalLLMError
    from localllm.history.store import History

    try:
        with History() as history:
            return [("last", ""), *((chat.id[:6], chat.title) for chat in history.chats(50))]
    except (LocalLLMError, OSError):
        return []


def local_names() -> list[str]:
    """Names of the models on this machine, from folder names alone: opens no file and never raises."""
    from localllm.errors import LocalLLMError
    from localllm.hub.local import scan

    try:
        return [found.name for found in scan() if not found.problem]
    except (LocalLLMError, OSError):
        return []


def _words(shell: str) -> list[str] | None:
    """The words after the program's name, the last one incomplete; None for an unknown shell."""
    try:
        if shell == "bash":
            words = shlex.split(os.environ["COMP_WORDS"])
            at = int(os.environ["COMP_CWORD"])
            return [*words[1:at], words[at] if at < len(words) else ""]
        if shell in ("zsh", "fish"):
            line = os.environ.get("_TYPER_COMPLETE_ARGS", "")
            return [*shlex.split(line)[1:], *([""] if not line or line.endswith(" ") else [])] or [""]
    except (KeyError, ValueError, IndexError):  # a line with an open quote: Typer splits it more forgivingly
        return None
    return None


def _shown(shell: str, found: Iterable[tuple[str, str]]) -> str | None:
    """Format completions for the shell's completion script; None for an unknown shell."""
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

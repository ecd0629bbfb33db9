"""What each error code means and what helps: `localllm help E501`, and docs/errors.md, made from the same words."""

from __future__ import annotations

import re
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

from localllm import errors
from localllm.errors import LocalLLMError

CODE = re.compile(r"E\d{3,5}", re.IGNORECASE)  # the form of a code
HEAD = """\
# Errors

Made by `localllm --errors > docs/errors.md`; a test compares. An error on the terminal ends with its code;
`localllm help CODE` prints the same words as this page.
"""


@cache
def explanations() -> dict[str, Any]:
    """errors.toml: `exits` (exit code -> meaning) and `steps` (error code -> what to try)."""
    import tomllib

    return tomllib.loads(Path(__file__).with_name("errors.toml").read_text(encoding="utf-8"))


def kinds() -> dict[str, type[LocalLLMError]]:
    """The errors a user can meet, by their codes: E, exit code, two digits."""
    from localllm.history.database import HistoryError
    from localllm.history.store import ChatNotFound

    found = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, LocalLLMError)]
    found += [ChatNotFound, HistoryError]
    known = sorted((k for k in found if k is not LocalLLMError), key=lambda k: (k.exit_code, k.number))
    return {f"E{kind.exit_code}{kind.number:02d}": kind for kind in known}


def explained(code: str) -> str | None:
    """What an error code means, for people; None for an unknown one."""
    wanted = code.upper()
    if (kind := kinds().get(wanted)) is None:
        return None
    lines = [f" {wanted}   exit {kind.exit_code}", "", *_wrapped(_meaning(kind)), ""]
    for when, command in explanations()["steps"].get(wanted, ()):
        lines += [*_wrapped(f"{when}:"), f"   $ {command}"]
    return "\n".join(lines).rstrip() + "\n"


def page() -> str:
    """docs/errors.md."""
    parts = [HEAD]
    for code, kind in kinds().items():
        parts.append(f"## {code}\n\nExit code {kind.exit_code}. {_meaning(kind)}\n")
        if steps := explanations()["steps"].get(code):
            parts.append("".join(f"* {when}: `{command}`\n" for when, command in steps))
    return "\n".join(parts)


def _meaning(kind: type[LocalLLMError]) -> str:
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())


def _wrapped(text: str) -> list[str]:
    return [f" {line}" for line in textwrap.wrap(text, 78)]

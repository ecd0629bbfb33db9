"""What each error code means and what helps: `localllm help E501`, and docs/errors.md, made from the same words."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from localllm import errors
from localllm.errors import LocalLLMError

CODE = re.compile(r"E\d{3,5}", re.IGNORECASE)  # the form of a code


class Step(NamedTuple):
    """One thing to try."""

    when: str
    command: str


# code -> what helps, most likely first
STEPS: dict[str, tuple[Step, ...]] = {
    "E101": (
        Step("see what happened: the log has the details", "localllm doctor --report"),
        Step("tell more while it happens", "localllm run MODEL PROMPT -vv"),
    ),
    "E103": (
        Step("what is wrong with the file", "localllm doctor --only db"),
        Step("talk without it", "localllm chat NAME --no-save"),
    ),
    "E201": (
        Step("the options of a command", "localllm run -h"),
        Step("where a setting comes from", "localllm config list --origin"),
        Step("a settings file that cannot be read", "localllm config edit"),
    ),
    "E202": (Step("the ranges of sampling options", "localllm run -h"),),
    "E203": (
        Step("try another schema", "localllm run NAME PROMPT --schema FILE"),
        Step("say it in a grammar, Lark or GBNF", "localllm run NAME PROMPT --grammar FILE"),
    ),
    "E301": (
        Step("what is here", "localllm ls"),
        Step("fetch it", "localllm pull NAME"),
        Step("what would fit", "localllm plan qwen"),
    ),
    "E303": (
        Step("the chats that are saved", "localllm logs list"),
        Step("one with these words", "localllm logs search WORDS"),
    ),
    "E401": (
        Step("accept the license on the model's page, then", "hf auth login"),
        Step("whether a token is found", "localllm doctor --only hf"),
    ),
    "E501": (
        Step("what fits, and with how much context", "localllm plan NAME"),
        Step("a smaller window", "localllm chat NAME --ctx 8k"),
        Step("keys and values in 8 bits", "localllm chat NAME --kv fp8"),
        Step("a disk that is full", "localllm rm --partial"),
    ),
    "E502": (
        Step("a smaller window", "localllm chat NAME --ctx 8k"),
        Step("who else holds memory", "localllm doctor --only gpu.mem,ram"),
    ),
    "E601": (
        Step("what is wrong with the device", "localllm doctor"),
        Step("an error text of the driver or of torch", "localllm doctor --log FILE"),
        Step("without a GPU", "localllm chat NAME --device cpu"),
    ),
    "E701": (
        Step("the same command goes on where it was", "localllm pull NAME"),
        Step("whether the hub answers", "localllm doctor --only net,hf"),
        Step("only what is here", "localllm chat NAME --offline"),
    ),
    "E801": (
        Step("another port", "localllm serve NAME --port 8001"),
        Step("who holds it", "localllm doctor --only server"),
    ),
    "E901": (
        Step("a larger window, where it fits", "localllm chat NAME --ctx max"),
        Step("leave the middle of a long prompt out", "localllm run NAME PROMPT --truncate middle"),
        Step("what fits", "localllm plan NAME"),
    ),
    "E1001": (Step("leave more room for the answer", "localllm run NAME PROMPT --max-tokens 2048"),),
    "E1201": (
        Step("hash the files again and fetch what is wrong", "localllm pull NAME --repair"),
        Step("what else is damaged", "localllm ls --all"),
    ),
    "E1202": (Step("what this version runs", "localllm plan qwen"), Step("all files here", "localllm ls --all")),
    "E1203": (Step("another file of the same model", "localllm plan NAME"),),
    "E13001": (Step("an interrupted download goes on", "localllm pull NAME"),),
}


def kinds() -> list[type[LocalLLMError]]:
    """The errors a user can meet, by code."""
    from localllm.history.database import HistoryError
    from localllm.history.store import ChatNotFound

    found = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, LocalLLMError)]
    found += [ChatNotFound, HistoryError]
    return sorted((k for k in found if k is not LocalLLMError), key=lambda k: (k.exit_code, k.number))


def code_of(kind: type[LocalLLMError]) -> str:
    """E + exit code + two digits."""
    return f"E{kind.exit_code}{kind.number:02d}"


def explained(code: str) -> str | None:
    """What an error code means, for people; None for an unknown one."""
    wanted = code.upper()
    kind = next((k for k in kinds() if code_of(k) == wanted), None)
    if kind is None:
        return None
    lines = [f" {wanted}   exit {kind.exit_code}", "", *_wrapped(_meaning(kind)), ""]
    for step in STEPS.get(wanted, ()):
        lines += [*_wrapped(f"{step.when}:"), f"   $ {step.command}"]
    return "\n".join(lines).rstrip() + "\n"


def page() -> str:
    """docs/errors.md."""
    return "\n".join(_page()) + "\n"


def _page() -> Iterator[str]:
    yield "# Errors"
    yield ""
    yield "Made by `localllm --errors > docs/errors.md`; a test compares. An error on the terminal ends with its code;"
    yield "`localllm help CODE` prints the same words as this page."
    for kind in kinds():
        code = code_of(kind)
        yield ""
        yield f"## {code}"
        yield ""
        yield f"Exit code {kind.exit_code}. {_meaning(kind)}"
        steps = STEPS.get(code, ())
        if steps:
            yield ""
        for step in steps:
            yield f"* {step.when}: `{step.command}`"


def _meaning(kind: type[LocalLLMError]) -> str:
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())


def _wrapped(text: str) -> list[str]:
    return [f" {line}" for line in textwrap.wrap(text, 78)]

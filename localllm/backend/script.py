"""The scripted engine's answers: all kinds of Markdown, text that attacks a terminal, long prose (script.toml)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

from localllm.paths import toml_beside

Piece = tuple[Literal["content", "reasoning", "tool_call"], str]
SCRIPT: dict[str, Any] = toml_beside(__file__, "script.toml")
ANSWERS = {
    message: "".join(text.replace("{n}", str(n)) for times, text in parts for n in range(times))
    for message, parts in SCRIPT["answers"].items()
}
ANSWERS["!mixed"] *= 20
ANSWERS["!oom"] = ANSWERS["!crash"] = ANSWERS["long"]


def script(prompt: str, has_tools: bool = False) -> Iterator[Piece]:
    """Yield the pieces of the answer to a message; lines of `!call NAME ARGUMENTS` become calls."""
    if has_tools and prompt.startswith("!call "):
        for index, line in enumerate(prompt.splitlines()):
            _, name, arguments = (line + "  ").split(" ", 2)
            yield "tool_call", json.dumps({"index": index, "id": f"call_{index}", "name": name, "arguments": ""})
            for piece in pieces(arguments.rstrip()):
                yield "tool_call", json.dumps({"index": index, "arguments": piece})
        return
    if prompt == "!think":
        for word in pieces("First I look at it from every side.\nThen I decide.\n"):
            yield "reasoning", word
    for piece in pieces(ANSWERS.get(prompt, prompt)):
        yield "content", piece


def pieces(text: str) -> Iterator[str]:
    """Split text into pieces about as long as tokens, keeping every character."""
    at = 0
    while at < len(text):
        end = at + 1
        while end < len(text) and end - at < 4 and text[end] not in " \n":
            end += 1
        yield text[at:end]
        at = end

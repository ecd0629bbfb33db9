"""What the scripted engine says: Markdown of every kind, text that attacks a terminal, long prose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

Piece = tuple[Literal["content", "reasoning"], str]
MARKDOWN = """\
# A heading

Some *prose* with **bold**, `code`, [markup] and 日本語, 😀 and e\u0301.

1. First item
   - nested **one**
   - nested two
2. Second item

| name | size |
|------|-----:|
| one  | 1    |
| two  | 22   |

> A quotation, over
> two lines.

```python
def double(x):
    return [2 * x]  # [red]not markup[/red]
```

---

The end, and a fence that is never closed:

```
left open [/]
"""
HOSTILE = (
    "\x1b]52;c;ZXZpbA==\x07 \x1b]8;;http://evil\x1b\\x\x1b]0;title\x07 \x1b[6n \x1bP1$r\x1b\\ \x9b31m \x1b[2J"
    + "\x07" * 50
    + " over\rwritten \u202egnp.exe\u202c [link=file:///etc/passwd]x[/link] [/] [red]literal[/red] a"
    + "\u0301" * 500
    + " end"
)
# Prose, a list of thirty and sixty lines of code: what the interface's cost is measured with.
MIXED = (
    "".join(
        f"Paragraph {n} says something about **kernels**, `tiles` and memory, long enough to take a few lines of a "
        "wide terminal, because that is what most answers look like when somebody wants an explanation.\n\n"
        for n in range(4)
    )
    + "".join(f"{n}. point number {n} of a list, with a few words behind it\n" for n in range(1, 31))
    + "\n```python\n"
    + "".join(f"value_{n} = compute({n}, scale={n * 0.5})  # step {n}\n" for n in range(60))
    + "```\n\n"
)


def script(prompt: str) -> Iterator[Piece]:
    """The pieces of the answer to a message."""
    if prompt == "!think":
        for word in pieces("First I look at it from every side.\nThen I decide.\n"):
            yield "reasoning", word
    text = {
        "!md": MARKDOWN,
        "!escape": HOSTILE,
        "!mixed": MIXED * 20,
        "!list": "".join(f"- item number {i} of a list that goes on\n" for i in range(500)),
        "!think": "The answer is 42.",
    }.get(prompt, prompt)
    if prompt in ("long", "!oom", "!crash"):
        text = "".join(f"Sentence number {i} goes on for a while. " for i in range(2000))
    for piece in pieces(text):
        yield "content", piece


def pieces(text: str) -> Iterator[str]:
    """Text in pieces about as long as tokens, with every character kept."""
    at = 0
    while at < len(text):
        end = at + 1
        while end < len(text) and end - at < 4 and text[end] not in " \n":
            end += 1
        yield text[at:end]
        at = end

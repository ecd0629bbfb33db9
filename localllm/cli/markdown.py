"""Markdown on a terminal as it streams: marks become styles, and nothing is ever redrawn.

Handles only what can be decided within a line: headings, bold, italics, inline code, bullets, fences. A span is held
back until it closes (a few words at most), so text appears as it is generated, and scrolls, copies and pipes as text.
"""

from __future__ import annotations

import re

from localllm.conversation.markdown import closes_fence, opened_fence

BOLD, ITALIC, CODE, HEADING, DIM, RESET = "\x1b[1m", "\x1b[3m", "\x1b[36m", "\x1b[1;36m", "\x1b[2m", "\x1b[0m"
MAX_HELD = 400  # characters that a span may hold back; a longer one is shown unstyled

_LINE_START = re.compile(r" {0,3}(?:#{0,6}|`{0,3}|~{0,3}|[-*+])? ?$| *$")
_SPANS = (
    (re.compile(r"`([^`\n]+)`"), CODE),
    (re.compile(r"\*\*(\S(?:[^\n]*?\S)?)\*\*"), BOLD),
    (re.compile(r"\*([^\s*](?:[^*\n]*?[^\s*])?)\*(?!\*)"), ITALIC),
)


class MarkdownStream:
    """`push` pieces and print what it returns; `flush` at the end."""

    def __init__(self) -> None:
        self._held = ""
        self._style: str | None = None  # of the whole line; None while undecided
        self._fence = ""  # the fence that opened the code block around the line

    def push(self, text: str) -> str:
        """Return the printable form of everything that can be decided."""
        *ended, last = text.split("\n")
        return "".join(self._grow(part, final=True) + "\n" for part in ended) + self._grow(last, final=False)

    def flush(self) -> str:
        """Return the text that was held back."""
        return self._grow("", final=True) if self._held or self._style is not None else ""

    def _grow(self, text: str, final: bool) -> str:
        """Return what can be printed of a line that continues with `text`, or ends with it."""
        self._held += text
        start = ""
        if self._style is None:
            start = self._start_line(final)
            if self._style is None:
                return ""
        if self._style in (CODE, DIM):
            done, self._held = self._held, ""
        else:
            done, self._held = _styled(self._held, final)
            done = done.replace(RESET, RESET + self._style)
        if final:
            done += RESET if self._style else ""
            self._style = None
        return start + done

    def _start_line(self, final: bool) -> str:
        """Decide what kind of line is held, if possible; return what to print before it."""
        found = opened_fence(self._held)
        mark = ""
        if self._fence or found:
            if not final and (found or (len(self._held) < 6 and opened_fence(self._held.lstrip() + "```"))):
                return ""  # a fence line is shown once it is complete
            self._style = CODE
            if found and not self._fence:
                self._style, self._fence = DIM, found[0]
            elif found and closes_fence(self._held, self._fence):
                self._style, self._fence = DIM, ""
        elif final or not _LINE_START.fullmatch(self._held):
            self._style = ""
            if heading := re.match(r" {0,3}#{1,6} +", self._held):
                self._style, self._held = HEADING, self._held[heading.end() :]
            elif bullet := re.match(r"( *)[-*+] +", self._held):
                mark, self._held = f"{bullet[1]}• ", self._held[bullet.end() :]
        return (self._style or "") + mark


def _styled(line: str, final: bool) -> tuple[str, str]:
    """Return (text with styles, text that must wait for more). With `final`, nothing waits."""
    out, at = [], 0
    while starts := [i for i in (line.find("`", at), line.find("*", at)) if i >= 0]:
        start = min(starts)
        out.append(line[at:start])
        found = ((pattern.match(line, start), style) for pattern, style in _SPANS)
        span, style = next(((match, style) for match, style in found if match), (None, ""))
        may_be_bold = span is not None and style == ITALIC and span.end() == len(line) and not final
        if span is not None and not may_be_bold:
            inner = span[1] if style == CODE else _styled(span[1], final=True)[0].replace(RESET, RESET + style)
            out.append(style + inner + RESET)
            at = span.end()
        elif not final and len(line) - start < MAX_HELD:
            return "".join(out), line[start:]
        else:
            out.append(line[start])
            at = start + 1
    return "".join(out) + line[at:], ""

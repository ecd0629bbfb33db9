"""Markdown on a terminal while it streams: marks become styles, nothing is ever redrawn.

Only what can be decided inside a line: headings, bold, italics, inline code, bullets, fences. A span is held back until
it closes (a few words at most), so the text appears as fast as it is made, and scrolls, copies and pipes like text.
"""

from __future__ import annotations

import re

from localllm.conversation.markdown import closes_fence, opened_fence

BOLD, ITALIC, CODE, HEADING, DIM, RESET = "\x1b[1m", "\x1b[3m", "\x1b[36m", "\x1b[1;36m", "\x1b[2m", "\x1b[0m"
MAX_HELD = 400  # Characters a span may hold back; what is longer is shown as it is.

_LINE_START = re.compile(r" {0,3}(?:#{0,6}|`{0,3}|~{0,3}|[-*+])? ?$| *$")
_SPANS = (
    (re.compile(r"`([^`\n]+)`"), CODE),
    (re.compile(r"\*\*(\S(?:[^\n]*?\S)?)\*\*"), BOLD),
    (re.compile(r"\*([^\s*](?:[^*\n]*?[^\s*])?)\*(?!\*)"), ITALIC),
)


class MarkdownStream:
    """`push` pieces, print what comes back; `flush` at the end."""

    def __init__(self) -> None:
        self._held = ""
        self._line_start = True
        self._heading = False
        self._fence = ""

    def push(self, text: str) -> str:
        """The printable form of as much as can be decided."""
        self._held += text
        out = []
        while self._held and (step := self._step()) is not None:
            out.append(step)
        return "".join(out)

    def flush(self) -> str:
        """What was held back, as it is."""
        rest, self._held = self._held, ""
        return rest + (RESET if self._heading or self._fence else "")

    def _step(self) -> str | None:
        """The next printable part; None when more text is needed to decide."""
        if self._line_start:
            return self._start_line()
        if self._fence:
            return self._to_line_end(self._held)
        newline = self._held.find("\n")
        line = self._held if newline < 0 else self._held[:newline]
        done, rest = _styled(line, final=newline >= 0)
        if self._heading:
            done = done.replace(RESET, RESET + HEADING)
        if newline < 0:
            self._held = rest
            return done or None
        self._held = self._held[newline + 1 :]
        end = RESET if self._heading else ""
        self._heading, self._line_start = False, True
        return done + rest + end + "\n"

    def _to_line_end(self, text: str) -> str:
        newline = text.find("\n")
        if newline < 0:
            self._held = ""
            return text
        self._held = text[newline + 1 :]
        self._line_start = True
        return text[:newline] + RESET + "\n"

    def _start_line(self) -> str | None:
        if self._fence or opened_fence(self._held.partition("\n")[0]):
            return self._start_fenced()
        if "\n" not in self._held and _LINE_START.fullmatch(self._held):
            return None
        self._line_start = False
        if heading := re.match(r" {0,3}#{1,6} +", self._held):
            self._held = self._held[heading.end() :]
            self._heading = True
            return HEADING
        if bullet := re.match(r"( *)[-*+] +", self._held):
            self._held = self._held[bullet.end() :]
            return f"{bullet[1]}• "
        return ""

    def _start_fenced(self) -> str | None:
        """A line that opens or closes a fence, or one inside."""
        line, newline, rest = self._held.partition("\n")
        found = opened_fence(line)
        if not newline and (found or (len(line) < 6 and opened_fence(line.lstrip() + "```"))):
            return None  # a fence line is shown when it is whole
        if found and not self._fence:
            self._fence = found[0]
        elif found and closes_fence(line, self._fence):
            self._fence = ""
        else:
            self._line_start = False
            return CODE
        self._held = rest
        return DIM + line + RESET + "\n"


def _styled(line: str, final: bool) -> tuple[str, str]:
    """(text with styles, what must wait for more). With `final`, nothing waits."""
    out, at = [], 0
    while at < len(line):
        starts = [i for i in (line.find("`", at), line.find("*", at)) if i >= 0]
        if not starts:
            break
        start = min(starts)
        out.append(line[at:start])
        found = ((pattern.match(line, start), style) for pattern, style in _SPANS)
        span, style = next(((match, style) for match, style in found if match), (None, ""))
        closed_later = span is not None and style == ITALIC and span.end() == len(line) and not final
        if span is None or closed_later:
            if not final and len(line) - start < MAX_HELD:
                return "".join(out), line[start:]
            out.append(line[start])
            at = start + 1
            continue
        inner = span[1] if style == CODE else _styled(span[1], final=True)[0].replace(RESET, RESET + style)
        out.append(style + inner + RESET)
        at = span.end()
    return "".join(out) + line[at:], ""

"""Line output: results on stdout, everything else on stderr; tables, questions, errors, JSON and exit codes.

Foreign text is cleaned before it reaches a terminal (`terminal.clean`); to a pipe or file it passes verbatim.
No color is written with NO_COLOR, TERM=dumb, `--color never` or off a terminal. Progress is in `progress.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, cast

from localllm._version import __version__
from localllm.errors import ConfigError, LocalLLMError
from localllm.terminal import (
    Cleaner,
    cell_width,
    clean,
    clean_line,
    dumb,
    fit,
    is_tty,
    is_utf8,
    json_safe,
    no_color,
    terminal_size,
)

MAX_FIXES = 5  # an error has at most eight lines: what, why, hint, and these

MIN_NOTE = 14  # minimum width of a table's note before a column is dropped for it

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36", "accent": "1;36"}
_ASCII = str.maketrans("✓✗–·━╸─≈╭╮╰╯│★×−µ❯•“”", "+x-|=>-~++++|*x-u>*\"\"") | {
    ord("…"): "...", ord("→"): "->", ord("±"): "+-", ord("η"): "eta", ord("°"): "deg ",
}  # fmt: skip
_COMMAND = re.compile(r"`((?:localllm|hf|sudo|export|pip|uv) [^`]+)`")


def silence(stream: IO[str]) -> None:
    """Discard what is still buffered and everything written from now on."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Messages:
    """stderr. Text that cannot be written (full disk, closed reader) is dropped; that never ends the command."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        try:
            self._stream.write(text)
        except OSError:
            silence(self._stream)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            silence(self._stream)


@dataclass
class Console:
    """Where a command writes. `as_json`, `quiet`, `yes` and `color` are the global options of the same names.

    verbose   0, 1 (log lines on stderr), 2 (also tracebacks)
    ask       False with --no-input
    as_events messages on stderr are events, one JSON object per line: --progress json
    """

    stdout: IO[str] = field(default_factory=lambda: sys.stdout)
    stderr: IO[str] = field(default_factory=lambda: cast("IO[str]", Messages(sys.stderr)))
    as_json: bool = False
    quiet: bool = False
    verbose: int = 0
    color: str = "auto"
    ask: bool = True
    yes: bool = False
    as_events: bool = False

    def __post_init__(self) -> None:
        self.out_tty = is_tty(self.stdout)
        self.err_tty = is_tty(self.stderr)
        self._cleaner = Cleaner()
        self._has_document = False  # stdout already holds the one JSON object
        self._start = time.monotonic()

    def event(self, event: Mapping[str, Any], stream: IO[str] | None = None) -> None:
        """Write an event (schema events/1) as one line to stderr or `stream`, with the seconds since the start."""
        line = {"t": round(time.monotonic() - self._start, 3), **event}
        text = json_safe(json.dumps(line, ensure_ascii=False, default=str)) + "\n"
        if stream is None:
            self._err(text)
        else:
            stream.write(text)
            stream.flush()

    def colored(self, stream: IO[str]) -> bool:
        if self.color != "auto":
            return self.color == "always"
        if no_color() or dumb():
            return False
        return is_tty(stream) or bool(os.environ.get("FORCE_COLOR"))

    def style(self, text: str, name: str, *, err: bool = False) -> str:
        """Return `text` in a style, or unchanged where color is off."""
        if not text or not self.colored(self.stderr if err else self.stdout):
            return text
        return f"\x1b[{_STYLES[name]}m{text}\x1b[0m"

    def glyphs(self, text: str, *, err: bool = False) -> str:
        """Replace our own symbols with ASCII where the stream's encoding lacks them."""
        return text if is_utf8(self.stderr if err else self.stdout) else text.translate(_ASCII)

    def answer(self, text: str) -> None:
        """Write a piece of an answer to stdout at once: verbatim off a terminal, cleaned on one."""
        self.raw(self._cleaner.push(text) if self.out_tty else text)

    def raw(self, text: str) -> None:
        """Write our own text to stdout, styles included; the caller has cleaned any data in it."""
        self.stdout.write(text)
        self.stdout.flush()

    def line(self, text: str = "") -> None:
        """Write one line of a result to stdout, nothing with --json; the caller has cleaned any data in it."""
        if not self.as_json:
            self.raw(self.glyphs(text) + "\n")

    def heading(self, text: str) -> None:
        self.line(self.style(text, "bold"))

    def say(self, text: str) -> None:
        """Write a message to stderr; nothing with --quiet. The caller has cleaned any data in it."""
        if self.as_events:
            self.event({"event": "note", "message": clean(text)})
        elif not self.quiet:
            self._err(self.glyphs(text, err=True) + "\n")

    def warn(self, text: str) -> None:
        """Write a warning to stderr, even with --quiet."""
        if self.as_events:
            self.event({"event": "warning", "message": clean(text)})
        else:
            self._err(self.style("warning: ", "yellow", err=True) + clean(text) + "\n")

    def emit(self, kind: str, fields: Mapping[str, Any]) -> bool:
        """With --json, write the command's JSON object to stdout and return True; otherwise return False.

        kind   'run/1', 'ls/1' and so on
        """
        if self.as_json:
            self.write_json({"schema": f"localllm.{kind}", "version": __version__, **fields})
        return self.as_json

    def write_json(self, value: Mapping[str, Any]) -> None:
        """Write one JSON value and a newline to stdout: indented on a terminal, compact otherwise."""
        self._has_document = True
        indent = 2 if self.out_tty else None
        separators = None if indent else (",", ":")
        text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, default=str)
        self.raw(json_safe(text) + "\n")

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        right: Sequence[str] = (),
        spare: Sequence[str] = (),
    ) -> None:
        """Write a borderless table to stdout. Cells are cleaned; columns named in `right` are right-aligned.

        On a terminal too narrow for all columns, those in `spare` are dropped in that order. A last column without a
        name is a note, which is cut first.
        """
        cells = [[clean_line(cell) for cell in row] for row in rows]
        if self.out_tty:
            columns, cells = _narrowed(columns, cells, spare, terminal_size().columns - 1)
        widths = _widths(columns, cells)
        for number, row in enumerate([list(columns), *cells]):
            parts = []
            for name, cell, width in zip(columns, row, widths, strict=True):
                padding = " " * (width - cell_width(cell))
                parts.append(padding + cell if name in right else cell + padding)
            text = "  ".join(parts).rstrip()
            self.line(self.style(text, "dim") if number == 0 else text)

    def paragraph(self, text: str) -> None:
        """Write a message to stderr, wrapped at words where the terminal is too narrow."""
        start = text[: len(text) - len(text.lstrip())]
        width = max(20, columns(self.err_tty))
        for line in [text] if self.as_events else wrapped(text, width, subsequent_indent=start):
            self.say(line)

    @property
    def can_ask(self) -> bool:
        """Whether a question can be asked."""
        return self.ask and self.err_tty and is_tty(sys.stdin)

    def confirm(self, question: str, *, default: bool = True, flag: str = "-y") -> bool:
        """Ask on the terminal. --yes agrees; without a terminal, raises a ConfigError that names the flag to pass."""
        if self.yes:
            return True
        if not self.can_ask:
            raise ConfigError(
                f"{clean_line(question)} needs an answer, but this is not a terminal", f"pass {flag} to agree"
            )
        self._err(f"{question} {'[Y/n]' if default else '[y/N]'} ")
        reply = sys.stdin.readline()
        if not reply:  # Ctrl+D
            self._err("\n")
            return False
        reply = reply.strip().lower()
        return default if not reply else reply in ("y", "yes")

    def to_terminal(self, sequence: str) -> None:
        """Write a terminal control sequence to stderr; nothing when stderr is no terminal."""
        if self.err_tty:
            self._err(sequence)

    def fail(self, error: LocalLLMError) -> int:
        """Show an error on stderr; with --json also as JSON on stdout, unless the result is already there.

        Returns the exit code.
        """
        if self.as_events:
            self.event({"event": "error", **error_json(error)["error"]})
        else:
            width = columns(self.err_tty)
            self._err(error_text(error, lambda text, style: self.style(text, style, err=True), width))
        try:
            if self.as_json and not self._has_document:
                self.write_json(error_json(error))
            self.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError:  # stdout accepts no more output, which is the error being shown
            silence(self.stdout)
        return error.exit_code

    def _err(self, text: str) -> None:
        self.stderr.write(text)
        self.stderr.flush()


def columns(is_terminal: bool) -> int:
    """Columns to fill. Off a terminal, lines are never wrapped, so grep finds whole lines."""
    return terminal_size().columns - 1 if is_terminal else 10_000


def wrapped(text: str, width: int, **indents: str) -> list[str]:
    """Wrap a text at words only."""
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False, **indents)  # type: ignore[arg-type]


def wrapped_at(indent: int, text: str, width: int) -> str:
    """Wrap a sentence that starts after `indent` columns; a command in it stays in one piece."""
    kept = re.sub(r"`[^`]+`|localllm [^;,()]+", lambda found: found[0].replace(" ", "\0"), text)
    return f"\n{' ' * indent}".join(wrapped(kept, max(20, width - indent))).replace("\0", " ")


def one_of(option: str, value: str, known: Sequence[str], hint: str) -> None:
    """Raise ConfigError for a value that the option does not accept."""
    if value not in known:
        raise ConfigError(f"{option} must be one of {', '.join(known)}, not {value!r}", hint)


def iso(seconds: float | None) -> str | None:
    """A time in ISO 8601, for JSON; None for None."""
    return None if seconds is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def picked(value: Any, names: str) -> dict[str, Any]:
    """Attributes by name, for JSON."""
    return {name: getattr(value, name) for name in names.split()}


def _widths(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> list[int]:
    return [max([cell_width(name), *(cell_width(row[i]) for row in cells)]) for i, name in enumerate(columns)]


def _narrowed(
    columns: Sequence[str], cells: list[list[str]], spare: Sequence[str], room: int
) -> tuple[list[str], list[list[str]]]:
    """Drop and cut columns until the table fits in `room` columns."""
    names, spares = list(columns), list(spare)
    while True:
        widths = _widths(names, cells)
        note = bool(names) and not names[-1]
        used = sum(widths[:-1] if note else widths) + 2 * (len(names) - 1)
        if used + (min(widths[-1], MIN_NOTE) if note else 0) <= room or not spares:
            break
        if (name := spares.pop(0)) in names:
            at = names.index(name)
            del names[at]
            cells = [[*row[:at], *row[at + 1 :]] for row in cells]
    if note and used + widths[-1] > room:
        cells = [[*row[:-1], fit(row[-1], max(1, room - used))] for row in cells]
    return names, cells


def error_fixes(error: LocalLLMError) -> list[tuple[str, str]]:
    """(command, note) pairs: the error's fixes, else the commands in its hint."""
    if error.fixes:
        return list(error.fixes)[:MAX_FIXES]
    hint = clean_line(error.hint)
    if hint.startswith("localllm "):
        return [(hint, "")]
    return [(command, "") for command in _COMMAND.findall(hint)]


def error_text(error: LocalLLMError, style: Any = lambda text, _: text, width: int = 10_000) -> str:
    """Format an error in at most eight lines: what, why, and what to do next, commands last.

    width   columns to wrap sentences to
    """
    code = f"[{error.code}]"
    message = wrapped_at(7, f"{clean_line(error.message)}   {code}", width)
    lines = [f"{style('error:', 'red')} {message.removesuffix(code)}{style(code, 'dim')}"]
    if error.why:
        lines.append(f"  {style('why', 'dim')}   {wrapped_at(8, clean_line(error.why), width)}")
    hint = clean_line(error.hint)
    steps = [(wrapped_at(8, hint, width), "")] if hint else []
    steps += [(clean_line(cmd), clean_line(note)) for cmd, note in error.fixes[:MAX_FIXES] if clean_line(cmd) != hint]
    width = max((cell_width(cmd) for cmd, note in steps if note), default=0)
    for number, (command, note) in enumerate(steps):
        label = style("try", "dim") if number == 0 else "   "
        gap = " " * (width - cell_width(command) + 3) if note else ""
        lines.append(f"  {label}   {command}{gap}{style(note, 'dim') if note else ''}")
    return "\n".join(lines) + "\n"


def error_json(error: LocalLLMError) -> dict[str, Any]:
    """An error as JSON."""
    return {
        "schema": "localllm.error/1",
        "version": __version__,
        "error": {
            "code": error.code,
            "exit": error.exit_code,
            "message": error.message,
            "why": error.why,
            "hint": error.hint,
            "fixes": [{"cmd": command, "note": note} for command, note in error_fixes(error)],
            "docs": f"docs/errors.md#{error.code.lower()}",
            "context": error.context,
        },
    }

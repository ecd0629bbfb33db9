"""Checks of the terminal."""

from __future__ import annotations

import codecs
import os
import shutil
import subprocess
import sys

from localllm.interface import Check
from localllm.terminal import locale_encoding, terminal_size

from .finding import TERMINAL, Checks, Survey, ok, skip, warn

CHECKS = Checks(TERMINAL)

MIN_COLUMNS, MIN_ROWS = 60, 16
# variables set by terminals that distinguish Shift+Enter from Enter
KITTY_KEYS = ("KITTY_WINDOW_ID", "GHOSTTY_RESOURCES_DIR", "WEZTERM_EXECUTABLE", "ALACRITTY_SOCKET")


def _no_terminal(survey: Survey) -> str:
    return "" if sys.stdout.isatty() or sys.stderr.isatty() else "no terminal"


@CHECKS.add("term")
def term(survey: Survey) -> Check:
    """Terminal type: can it show full-screen chat?"""
    name = os.environ.get("TERM", "")
    if why := _no_terminal(survey):
        return skip(why, term=name)
    if name in ("", "dumb"):
        title = f"TERM={name or '(unset)'}: chat runs line by line"
        return warn(title, fix="export TERM=xterm-256color")
    inside = next((n for n, v in (("tmux", "TMUX"), ("screen", "STY"), ("ssh", "SSH_TTY")) if os.environ.get(v)), "")
    return ok(name + (f" inside {inside}" if inside else ""), term=name, inside=inside)


@CHECKS.add("term.size", _no_terminal)
def term_size(survey: Survey) -> Check:
    """Terminal size."""
    columns, rows = terminal_size()
    title = f"{columns}×{rows}"
    if columns < MIN_COLUMNS or rows < MIN_ROWS:
        title += f" is too small: full-screen chat needs {MIN_COLUMNS}×{MIN_ROWS}"
        return warn(title, fix="localllm chat --plain", columns=columns, rows=rows)
    return ok(title, columns=columns, rows=rows)


@CHECKS.add("term.utf8")
def term_utf8(survey: Survey) -> Check:
    """Output encoding: can it represent every script?"""
    try:  # the full-screen interface captures stdout with an object that has no encoding
        encoding = codecs.lookup(getattr(sys.stdout, "encoding", locale_encoding()) or "ascii").name
    except LookupError:
        encoding = "ascii"
    if encoding != "utf-8":
        title = f"the encoding is {encoding}"
        return warn(title, fix="export LC_ALL=C.UTF-8", encoding=encoding)
    return ok("UTF-8", encoding=encoding)


@CHECKS.add("term.color", _no_terminal)
def term_color(survey: Survey) -> Check:
    """Number of colors that the terminal reports."""
    if os.environ.get("NO_COLOR"):
        return ok("off (NO_COLOR)", colors=0)
    if os.environ.get("COLORTERM", "") in ("truecolor", "24bit"):
        return ok("16 million", colors=1 << 24)
    if "256" in os.environ.get("TERM", ""):
        return ok("256", colors=256)
    return ok("16 (set COLORTERM=truecolor if the terminal has more)", colors=16)


@CHECKS.add("term.keys", _no_terminal)
def term_keys(survey: Survey) -> Check:
    """Keyboard: does the terminal report Shift+Enter?"""
    tells = any(os.environ.get(name) for name in KITTY_KEYS) and not os.environ.get("TMUX")
    title = "Shift+Enter inserts a new line" if tells else "Ctrl+J or \\ Enter inserts a new line; Shift+Enter may not"
    return ok(title, kitty=tells)


@CHECKS.add("term.clipboard", _no_terminal)
def term_clipboard(survey: Survey) -> Check:
    """Clipboard: does copied text reach it?"""
    if os.environ.get("TMUX"):
        setting = _tmux("set-clipboard")
        if setting != "on":
            title = f"tmux does not pass copied text on (set-clipboard {setting or 'unknown'})"
            fix = "echo 'set -g set-clipboard on' >> ~/.tmux.conf && tmux source ~/.tmux.conf"
            return warn(title, "", fix, tmux=setting)
        return ok("through tmux", tmux=setting)
    if os.environ.get("STY"):
        title = "screen does not pass copied text on"
        return warn(title, "", "tmux new -s chat")
    tool = next((n for n in ("wl-copy", "xclip", "xsel", "pbcopy", "clip.exe") if shutil.which(n)), "")
    return ok(f"through the terminal{f' and {tool}' if tool else ''}", tool=tool)


def _tmux(option: str) -> str:
    """A global option of the surrounding tmux; "" if it cannot be read."""
    try:
        run = subprocess.run(
            ["tmux", "show-options", "-gsv", option], capture_output=True, text=True, timeout=1, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout.strip()

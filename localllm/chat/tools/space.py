"""Content on its way out: white space waits until it is known what it stands next to."""

from __future__ import annotations

from collections.abc import Callable

MAX_HELD = 64  # characters of white space that wait for what follows


class HeldSpace:
    """Content less the white space next to calls."""

    def __init__(self, out: Callable[[str], None], *, after_call: bool = False) -> None:
        self._out = out
        self._held = ""
        self._after_call = after_call

    def push(self, text: str) -> None:
        """More content."""
        if not text:
            return
        text = self._held + text
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        said = text.rstrip()
        self._held = text[len(said) :]
        if len(self._held) > MAX_HELD:
            said, self._held = text[:-MAX_HELD], text[-MAX_HELD:]
        if said:
            self._out(said)

    def drop(self) -> None:
        """A call follows: the white space before it is nothing, and so will be that after it."""
        self._held = ""
        self._after_call = True

    def flush(self) -> None:
        """The end of the answer."""
        if self._held:
            self._out(self._held)
            self._held = ""

"""The message for copying a code block: in its own module, so that its receivers do not load Markdown."""

from dataclasses import dataclass

from textual.message import Message


@dataclass
class CopyCode(Message):
    """A request to copy this code."""

    code: str

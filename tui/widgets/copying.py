"""The message of a code block that somebody wants to copy: apart, so that nobody loads Markdown to hear it."""

from dataclasses import dataclass

from textual.message import Message


@dataclass
class CopyCode(Message):
    """Somebody wants this code."""

    code: str

"""The message of a code block that somebody wants to copy: apart, so that nobody loads Markdown to hear it."""

from textual.message import Message


class CopyCode(Message):
    """Somebody wants this code."""

    def __init__(self, code: str) -> None:
        super().__init__()
        self.code = code

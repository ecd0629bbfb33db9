"""A running chat: what line mode and the full screen share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from localllm.config import Preset
from localllm.conversation.attachments import budget, room_in
from localllm.conversation.documents import Document
from localllm.conversation.saver import Saver
from localllm.conversation.slash import OFF
from localllm.conversation.tools import Toolbox
from localllm.conversation.tree import Conversation, Exchange
from localllm.errors import ConfigError, LocalLLMError
from localllm.interface import ChatBackend
from localllm.request import ToolUse
from localllm.terminal import clean_line


class Endpoint(Protocol):
    """The engine of a chat as an endpoint for other programs of this machine.

    Made by the command that opened the chat, since the interface knows neither engine nor server.
    """

    @property
    def url(self) -> str:
        """Where it answers; "" while it does not."""

    def start(self, model: str, port: int | None) -> str:
        """Answer for the model that is loaded, called `model`; None is the usual port. Returns the URL.

        Takes a moment. Raises LocalLLMError: the port is taken, nothing is loaded, there is nothing to serve.
        """

    def stop(self) -> None:
        """Close the port; twice does nothing. Takes a moment."""


@dataclass
class Session:
    """A backend, the conversation with it, and what a chat can be told to do.

    model        the model as it is called here
    files        go with the next message
    first        the message to begin with
    endpoint     what /serve turns on and off; None where there is no engine of this chat's own
    serves       the port that is asked for, `OFF`, or None for the usual one
    tools        what the model may call; None: nothing
    copy         puts a text into the clipboard and returns how
    """

    backend: ChatBackend
    conversation: Conversation
    saver: Saver = field(default_factory=lambda: Saver(None))
    model: str = ""
    presets: Mapping[str, Preset] = field(default_factory=dict)
    files: list[Document] = field(default_factory=list)
    first: str = ""
    endpoint: Endpoint | None = None
    serves: int | None = OFF
    tools: Toolbox | None = None
    copy: Callable[[str], str] = str

    def budget(self, files: Sequence[Document]) -> str:
        """How many tokens files take, and how many there is room for in the next message. Takes a while."""
        talk, facts, count = self.conversation, self.backend.facts(), self.backend.count_tokens
        last = talk.exchanges[-1] if talk.exchanges else None
        room = room_in(talk, Exchange(parent=last), facts, count, self.offered) if facts.ctx else 0
        return budget(files, room, facts, count)

    @property
    def offered(self) -> ToolUse | None:
        """The tools that go with a turn."""
        return self.tools.offered if self.tools is not None else None

    @property
    def url(self) -> str:
        """Where other programs reach the model now; "" while they cannot."""
        return self.endpoint.url if self.endpoint is not None else ""

    def serve(self, port: int | None) -> str:
        """Open the endpoint, or close it (`OFF`). Returns what to say. Takes a moment; raises LocalLLMError."""
        if self.endpoint is None:
            raise ConfigError("this chat has no engine of its own to serve", "localllm serve")
        if port == OFF:
            was, self.serves = self.url or self.serves != OFF, OFF
            self.endpoint.stop()
            return "closed: no other program uses this model now" if was else "it is not being served"
        if port is not None or not self.url:
            self.serves = OFF
            self.serves = int(self.endpoint.start(self.model, port).rsplit(":", 1)[-1])  # and after the next model
        return f"this model answers at {self.url}/v1 while the chat is open; /serve off ends that"


def write_new(path: str, text: str) -> str:
    """Write a file that is not there yet. Returns what to say. Raises ConfigError."""
    shown = clean_line(path)
    try:
        with Path(path).expanduser().open("x", encoding="utf-8") as file:
            file.write(text if text.endswith("\n") else text + "\n")
    except FileExistsError:
        raise ConfigError(f"{shown} is there already", "choose another name") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{shown} cannot be written: {reason}", "choose another place") from None
    return f"written to {shown}"


def complaint(error: LocalLLMError) -> str:
    """An error of the user's, in one line."""
    return f"! {error.message}" + (f" ({error.hint})" if error.hint else "")

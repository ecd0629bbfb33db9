"""A running chat, shared by line mode and the full screen."""

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
    """A chat's engine as an endpoint for other programs on this machine.

    Made by the command that opened the chat, because the interface knows neither engine nor server.
    """

    @property
    def url(self) -> str:
        """Its address; "" while it is off."""

    def start(self, model: str, port: int | None) -> str:
        """Serve the loaded model under the name `model`; None means the default port. Returns the URL.

        Takes a moment. Raises LocalLLMError when the port is taken, no model is loaded, or there is nothing to serve.
        """

    def stop(self) -> None:
        """Close the port; safe to call twice. Takes a moment."""


@dataclass
class Session:
    """A backend, its conversation, and the services of a chat.

    model        the model's name for the backend
    files        attachments of the next message
    first        the first message
    endpoint     what /serve turns on and off; None when this chat has no engine of its own
    serves       the requested port, `OFF`, or None for the default port
    tools        the tools that the model may call; None for no tools
    copy         puts a text on the clipboard and returns how
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
        """Say how many tokens the files take, and how many fit in the next message. Takes a while."""
        talk, facts, count = self.conversation, self.backend.facts(), self.backend.count_tokens
        last = talk.exchanges[-1] if talk.exchanges else None
        room = room_in(talk, Exchange(parent=last), facts, count, self.offered) if facts.ctx else 0
        return budget(files, room, facts, count)

    @property
    def offered(self) -> ToolUse | None:
        """The tools offered with a turn."""
        return self.tools.offered if self.tools is not None else None

    @property
    def url(self) -> str:
        """The endpoint's address; "" while it is off."""
        return self.endpoint.url if self.endpoint is not None else ""

    def serve(self, port: int | None) -> str:
        """Open the endpoint, or close it (`OFF`). Returns what to say. Takes a moment; raises LocalLLMError."""
        if self.endpoint is None:
            raise ConfigError("this chat has no engine of its own to serve", "localllm serve")
        if port == OFF:
            was, self.serves = self.url or self.serves != OFF, OFF
            self.endpoint.stop()
            return "stopped serving this model" if was else "this model is not being served"
        if port is not None or not self.url:
            self.serves = OFF
            self.serves = int(self.endpoint.start(self.model, port).rsplit(":", 1)[-1])  # reused for the next model
        return f"serving this model at {self.url}/v1 until the chat is closed; /serve off stops it"


def full_name(name: str) -> str:
    """The name of a model that was found, valid in any folder: a path is made absolute."""
    path = Path(name).expanduser()
    is_path = path.suffix.lower() in (".gguf", ".safetensors") and path.exists()
    is_path |= any((path / file).exists() for file in ("config.json", "tokenizer.json"))
    return str(path.absolute()) if is_path else name


def write_new(path: str, text: str) -> str:
    """Write a new file. Returns what to say. Raises ConfigError."""
    shown = clean_line(path)
    try:
        with Path(path).expanduser().open("x", encoding="utf-8") as file:
            file.write(text if text.endswith("\n") else text + "\n")
    except FileExistsError:
        raise ConfigError(f"{shown} already exists", "choose another name") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{shown} cannot be written: {reason}", "choose another path") from None
    return f"wrote {shown}"


def complaint(error: LocalLLMError) -> str:
    """A user error in one line."""
    return f"! {error.message}" + (f" ({error.hint})" if error.hint else "")

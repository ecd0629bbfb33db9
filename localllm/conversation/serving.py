"""/serve: the engine of a chat as an endpoint for other programs of this machine."""

from __future__ import annotations

from typing import Protocol

from localllm.errors import ConfigError

MAX_PORT = 65_535
OFF = -1  # what `parse_port` makes of the word off


class Endpoint(Protocol):
    """Made by the command that opened the chat, since the interface knows neither engine nor server."""

    @property
    def url(self) -> str:
        """Where it answers; "" while it does not"""
        ...

    def start(self, model: str, port: int | None) -> str:
        """Answer for the model that is loaded, called `model`; None is the usual port. Returns the URL.

        Takes a moment. Raises LocalLLMError: the port is taken, nothing is loaded, there is nothing to serve.
        """
        ...

    def stop(self) -> None:
        """Close the port; twice does nothing. Takes a moment"""
        ...


def parse_port(text: str) -> int | None:
    """What follows /serve: a port, `OFF`, or None for the usual port. Raises ConfigError."""
    if not text:
        return None
    if text == "off":
        return OFF
    if not text.isascii() or not text.isdigit() or int(text) > MAX_PORT:
        raise ConfigError(f"/serve {text}: it can be a port up to {MAX_PORT}, or off", "/serve 8000")
    return int(text)

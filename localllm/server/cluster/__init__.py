"""One endpoint over several replicas of a model: the server's application as a Ray Serve deployment."""

from __future__ import annotations

from typing import Any


def app(args: dict[str, Any]) -> Any:
    """Build the application for `serve run localllm.server.cluster:app` or a Serve config. Raises ConfigError."""
    from .deployment import application

    return application(args)

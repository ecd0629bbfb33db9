"""One endpoint over several replicas of a model: the server's application as a Ray Serve deployment."""

from __future__ import annotations

from typing import Any


def app(args: dict[str, Any]) -> Any:
    """What `serve run localllm.server.cluster:app` and a Serve config start. Raises ConfigError for wrong `args`."""
    from .deployment import application

    return application(args)

"""`serve --ray`: replicas of one model behind one endpoint, from the command's side."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from localllm._version import __version__
from localllm.cli.background import cut_log
from localllm.cli.frame.console import Console
from localllm.cli.names import Choice
from localllm.errors import ConfigError
from localllm.terminal import clean_line, counted

if TYPE_CHECKING:
    from localllm.config import UserConfig

LOCAL = "local"
ADDRESS = re.compile(r"auto|(ray://)?[\w.-]+:\d{4,5}|\[[0-9a-f:]+\]:\d{4,5}")


def address_in(
    models: list[str], replicas: str | None, alone: Mapping[str, bool], *, ray: bool
) -> tuple[list[str], str]:
    """Split the words into models and the cluster's address: `local` when none is given, "" without --ray.

    Raises ConfigError for anything --ray does not support: several models, and the options set in `alone`.
    """
    if not ray:
        if replicas is not None:
            raise ConfigError("--replicas needs --ray", f"localllm serve MODEL --ray --replicas {replicas}")
        return models, ""
    named = [name for name in models if not ADDRESS.fullmatch(name)]
    addresses = [name for name in models if ADDRESS.fullmatch(name)]
    if len(named) != 1 or len(addresses) > 1:
        raise ConfigError("--ray takes one model and at most one address", "localllm serve MODEL --ray --replicas 2")
    for option, given in alone.items():
        if given:
            raise ConfigError(f"{option} cannot be combined with --ray", "drop one of them")
    return named, addresses[0] if addresses else LOCAL


class FleetLife:
    """Notices over the life of a fleet's HTTP server; the server's own notices, except for what is ready."""

    def __init__(self, life: Any, console: Console, model: str) -> None:
        self._life, self._console, self._model = life, console, clean_line(model)
        self.draining = life.draining

    def listening(self, url: str) -> None:
        self._life.listening(url)
        self._console.say(f"starting Ray and replicas of {self._model}")

    def ready(self, url: str, service: Any) -> None:
        say, count = self._console.say, counted(service.num_replicas, "replica")
        say(f"localllm {__version__}")
        say(f"ready  {self._model}  {count} in the Ray cluster {service.cluster}")
        say(f"  APIs    {url}/v1 (OpenAI)   {url} (Anthropic, Ollama)")
        self._console.emit("serve/1", {"url": url, "pid": os.getpid(), "models": [self._model]})
        self._life.note((self._model,))

    def tick(self) -> None:
        cut_log()


def serve_replicas(
    config: UserConfig, options: Any, model: Choice, prompts: Sequence[str], life: FleetLife,
    fleet: tuple[str, str, list[str] | None],
) -> bool:  # fmt: skip
    """Serve until a signal; pin `prompts`. `fleet` is (address, count, aliases). True means all memory is freed."""
    from localllm.server.cluster.deployment import FleetOptions, replicas_of
    from localllm.server.cluster.replica import ReplicaOptions
    from localllm.server.cluster.run import serve

    address, count, aliases = fleet
    names = (model.shown, *(aliases or ()))
    wanted = ReplicaOptions(model.name, names, config.engine, options.service, tuple(prompts), config.offline)
    serve(options, wanted, FleetOptions(*replicas_of(count)), address, life)
    return True

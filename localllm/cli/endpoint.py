"""The endpoint of a chat (`--serve`, /serve): serves this process's engine to other programs on this machine."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.cli.frame.command import Env
from localllm.config import UserConfig
from localllm.errors import ConfigError, LocalLLMError, ServerError
from localllm.terminal import clean_line

if TYPE_CHECKING:
    from localllm.device.processes import Record
    from localllm.interface import ChatBackend
    from localllm.server.run import BackgroundServer

LOOPBACK = "127.0.0.1"


class ChatEndpoint:
    """See `conversation.session.Endpoint`. It serves the backend's model: nothing is loaded twice.

    record   this process's entry in `localllm ps`; None when it cannot be written
    """

    def __init__(self, env: Env, config: UserConfig, backend: ChatBackend, record: Record | None) -> None:
        self._env, self._config, self._backend, self._record = env, config, backend, record
        self._server: BackgroundServer | None = None

    @property
    def url(self) -> str:
        """Its address; "" while it is off."""
        return self._server.url if self._server is not None and self._server.is_running else ""

    def start(self, model: str, port: int | None) -> str:
        """Serve on the loopback address, replacing a running endpoint. Raises ConfigError or ServerError."""
        from localllm.backend.in_process import InProcessBackend
        from localllm.backend.placed import PlacedBackend

        backend = self._backend.now if isinstance(self._backend, PlacedBackend) else self._backend
        if backend is None:
            raise ServerError("no model is loaded", "/model NAME")
        if not isinstance(backend, InProcessBackend):
            url = backend.facts().url
            if url:
                raise ConfigError(f"{url} answers this chat, and other programs can use it directly", "/serve off")
            raise ConfigError("the scripted engine has no server", "`unset LOCALLLM_ENGINE`")
        llm = backend.llm
        if llm is None:
            raise ServerError("no model is loaded", "/model NAME")
        from localllm.cli.commands.serve import api_keys, taken_by
        from localllm.server import ServeOptions, ServiceOptions
        from localllm.server.run import BackgroundServer

        self.stop()
        settings = self._config.server
        wanted = settings.port if port is None else port
        is_path = os.sep in model and Path(model).exists()
        name = clean_line(llm.path.name if is_path else model)
        keys = api_keys(self._env, self._config)
        service = ServiceOptions(llm.plan.max_parallel, default_model=name)
        options = ServeOptions(host=LOOPBACK, port=wanted, api_keys=keys, origins=settings.cors, service=service)
        try:
            self._server = BackgroundServer(llm, (name,), options, self._ended)
        except ServerError as error:
            raise ServerError(taken_by(error, wanted).message, f"/serve {(wanted + 1) % 65536}") from error
        self._register(self._server.url, name, keys[0] if keys else "")
        return self._server.url

    def stop(self) -> None:
        running, self._server = self._server, None
        if running is not None:
            running.stop()
            self._register("", "", "")

    def _ended(self, running: BackgroundServer) -> None:
        """The server ended on its own: unregister it. `stop` unregisters those that it ends."""
        if running is self._server:
            self._register("", "", "")

    def _register(self, url: str, name: str, token: str) -> None:
        """Register the endpoint for `localllm ps` and for chats that look for a server."""
        if self._record is not None:
            with contextlib.suppress(OSError, LocalLLMError):
                models = (name,) if name else self._record.running.models
                self._record.update(models, url=url, token=token)

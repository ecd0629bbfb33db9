"""`serve`: bind, load, run uvicorn until a signal; a second signal drops what is still running."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from localllm.errors import ConfigError, DeviceError, ServerError
from localllm.llm import LLM

from .app import AppOptions, create_app
from .service import Service

log = logging.getLogger(__name__)

DRAIN_S = 30
HEADER_BYTES = 32 << 10


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Where and how to listen."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    origins: tuple[str, ...] = ()
    insecure: bool = False
    """allow a non-loopback address without a key"""


def bind(options: ServeOptions) -> socket.socket:
    """A listening socket, before anything slow happens. Raises ConfigError or ServerError (port busy)."""
    loopback = is_loopback(options.host)
    if not loopback and not options.api_key and not options.insecure:
        raise ConfigError(
            f"{options.host} can be reached from the network, and no API key is set",
            "add --api-key-file FILE, or --insecure if you mean it",
        )
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((options.host, options.port))
        sock.listen(512)
    except OSError as error:
        sock.close()
        raise ServerError(
            f"cannot listen on {options.host} port {options.port}: {error.strerror or error}",
            f"add --port {options.port + 1}",
        ) from error
    return sock


def is_loopback(host: str) -> bool:
    """Whether an address to bind is this machine's alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve(
    load: Callable[[], tuple[LLM, tuple[str, ...]]],
    options: ServeOptions,
    on_ready: Callable[[str, Service], None],
) -> None:
    """Bind, load, answer until SIGINT or SIGTERM.

    load      gives the model and the ids it answers to; called after the port is ours
    on_ready  called with the base URL when requests are taken
    """
    sock = bind(options)
    try:
        llm, names = load()
        try:
            asyncio.run(_run(sock, Service(llm, names), options, on_ready))
        finally:
            llm.close()
    finally:
        sock.close()


async def _run(
    sock: socket.socket, service: Service, options: ServeOptions, on_ready: Callable[[str, Service], None]
) -> None:
    import uvicorn

    loopback = is_loopback(options.host)
    app = create_app(service, AppOptions(loopback, options.api_key, options.origins))
    config = uvicorn.Config(
        app, http="h11", h11_max_incomplete_event_size=HEADER_BYTES, log_config=None, access_log=False, lifespan="off",
        timeout_graceful_shutdown=DRAIN_S, server_header=False, date_header=True,
    )  # fmt: skip
    server = _server_class()(config)
    loop = asyncio.get_running_loop()
    host, port = sock.getsockname()[:2]

    def stop() -> None:
        if service.is_draining:
            server.force_exit = True
        service.is_draining = True
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    shown = f"[{host}]" if ":" in host else host
    on_ready(f"http://{shown}:{port}", service)
    watch = asyncio.ensure_future(_watch(service, server))
    try:
        await server.serve(sockets=[sock])
    finally:
        watch.cancel()
    if service.llm.engine.is_dead:
        raise DeviceError("the engine stopped while serving", "restart the server; its log holds the cause")


async def _watch(service: Service, server: Any) -> None:
    """End the server, once its answers are out, when the engine is dead."""
    while not service.llm.engine.is_dead:
        await asyncio.sleep(0.5)
    server.should_exit = True


def _server_class() -> Any:
    import uvicorn

    class Server(uvicorn.Server):
        """uvicorn's server, with the signals left to us: it would re-raise them after draining."""

        def install_signal_handlers(self) -> None:
            """Ours are installed in `_run`."""

        def capture_signals(self) -> Any:
            """The same, by its newer name."""
            import contextlib

            return contextlib.nullcontext()

    return Server

"""`serve`: bind, answer at once (503 while models load), run until a signal, drain; a second signal exits immediately.

`BackgroundServer` serves the model of a program that keeps running, such as a chat.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import resource
import signal
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from localllm.errors import Aborted, ConfigError, DeviceError, LocalLLMError, ServerError
from localllm.llm.llm import LLM

from .app import create_app
from .middleware import AppOptions, is_loopback
from .pool import ModelPool
from .service import STALL_S, Service, ServiceOptions

log = logging.getLogger(__name__)

DRAIN_S = 25.0  # time for responses to finish; after that they are cut short, with a regular end
CUT_S = 3.0  # time for the connections that are still open then
STOP_S = 2 * CUT_S + 2  # time for a background server to cut responses and close connections
LOADING_S = 0.5  # time for a load in progress to stop at shutdown
CLOSING_S = 600.0  # time to free models and write what is kept of them; a driver may hang in it
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HEADER_BYTES = 32 << 10
KEEP_ALIVE_S = 60
BACKLOG = 512
FIRST_LISTEN_FD = 3  # sd_listen_fds(3)
FILES = 65536  # open file limit to request; each connection uses one


@dataclass(frozen=True, slots=True)
class ServeOptions(AppOptions):
    """Where and how to listen."""

    host: str = "127.0.0.1"
    port: int = 8000
    unix: Path | None = None  # a socket file instead of host and port
    insecure: bool = False  # allow a non-loopback address without a key
    preload: tuple[str, ...] = ()  # models to load before requests are accepted
    service: ServiceOptions = ServiceOptions()

    def __post_init__(self) -> None:
        object.__setattr__(self, "loopback", self.unix is None and is_loopback(self.host))


class Served(Protocol):
    """What a server can drain: a `Service`, or the `Door` in front of replicas."""

    is_draining: bool

    @property
    def num_reserved(self) -> int: ...
    def cut_all(self) -> None: ...


class Hooks(Protocol):
    """Callbacks of the command at the stages of a server's life, in its event loop."""

    def listening(self, url: str) -> None: ...  # the port is open; requests get 503 until `ready`
    def ready(self, url: str, service: Any) -> None: ...  # requests are accepted
    def tick(self) -> None: ...  # called every 0.1 s
    def draining(self, running: int, again: bool) -> None: ...  # a signal arrived; `again`: the process exits at once


def bind(options: ServeOptions) -> socket.socket:
    """Open a listening socket, before anything slow. Raises ConfigError, or ServerError if the port is in use."""
    if options.unix is not None:
        return _bind_unix(options.unix)
    given = _systemd_socket()
    host = options.host if given is None or given.family == socket.AF_UNIX else given.getsockname()[0]
    if not is_loopback(host) and not options.api_keys and not options.insecure:
        raise ConfigError(
            f"{host} can be reached from the network, and no API key is set",
            "add --api-key-file FILE, or --insecure if you mean it",
        )
    if given is not None:
        return given
    other = options.port + 1 if 1023 < options.port < 65535 else 8000
    return _bind_tcp(options.host, options.port, f"add --port {other}")


def bind_ollama(options: ServeOptions, first: socket.socket) -> list[socket.socket]:
    """Bind Ollama's address too, if enabled and not already `first`. Raises ServerError if the port is in use."""
    if options.ollama is None or first.getsockname() == options.ollama:
        return []
    return [
        _bind_tcp(*options.ollama, "free the port with systemctl stop ollama or localllm stop, or leave out --ollama")
    ]


def _bind_tcp(host: str, port: int, fix: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # name the protocol: asyncio disables Nagle's algorithm (40 ms delays) only on sockets with IPPROTO_TCP
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    with _listening(sock, f"{host} port {port}", fix):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
                what = f"{host} is not an address of this machine"
                raise ConfigError(what, "use --host 127.0.0.1, or --host 0.0.0.0 for all addresses") from None
            raise
    return sock


def _systemd_socket() -> socket.socket | None:
    """The socket passed by systemd (sd_listen_fds(3)), or None. Raises ServerError if it is of another kind."""
    for_us = os.environ.get("LISTEN_PID") == str(os.getpid())
    count = os.environ.get("LISTEN_FDS", "") if for_us else ""
    if not count:
        return None
    for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):  # child processes must not inherit them
        os.environ.pop(name, None)
    try:
        sock = socket.socket(fileno=FIRST_LISTEN_FD)
        sock.set_inheritable(False)
        if count != "1" or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise OSError("expected one listening stream socket")
    except OSError as error:
        raise ServerError(f"the socket from systemd cannot be used: {error}", "see ListenStream in the unit") from error
    return sock


def _bind_unix(path: Path) -> socket.socket:
    """Bind a socket file with access for its owner only; a stale file of a dead server is replaced."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _listening(sock, str(path), "choose another --unix PATH"):
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(str(path)) == 0:
                    raise ServerError(f"another server is listening on {path}", "choose another --unix PATH")
            path.unlink()
        old = os.umask(0o177)
        try:
            sock.bind(str(path))
        finally:
            os.umask(old)
    return sock


@contextlib.contextmanager
def _listening(sock: socket.socket, where: str, fix: str) -> Iterator[None]:
    """Listen after the block, or close the socket on failure. Raises ServerError, and LocalLLMErrors of the block."""
    try:
        yield
        sock.listen(BACKLOG)
    except (OSError, LocalLLMError) as error:
        sock.close()
        if isinstance(error, LocalLLMError):
            raise
        raise ServerError(f"cannot listen on {where}: {error.strerror or error}", fix) from error


def serve(pool: ModelPool, options: ServeOptions, hooks: Hooks) -> bool:
    """Serve until SIGINT, SIGTERM or SIGHUP, then close `pool`; returns False if a model is still loading or stuck.

    Raises ConfigError, ServerError, the error of a failed preload, or DeviceError if an engine died for good.
    """
    try:
        with listening(options) as socks:
            asyncio.run(_run(socks, pool, options, hooks))
    except BaseException:
        pool.close(LOADING_S)
        raise
    stuck = [name for name, llm in pool.awake() if llm.engine.step_age_s > STALL_S]
    if stuck:  # its thread may never return from the driver
        log.error("leaving although the engine of %s is stuck in a step", " and ".join(stuck))
    freed = pool.close(LOADING_S if pool.is_loading or stuck else CLOSING_S)
    for number in SIGNALS:  # the work is done, and a late signal would only print a traceback
        signal.signal(number, signal.SIG_IGN)
    return freed


@contextlib.contextmanager
def listening(options: ServeOptions) -> Iterator[list[socket.socket]]:
    """Open the listening sockets, and close them after the block. Raises ConfigError or ServerError."""
    socks = [bind(options)]
    try:
        socks += bind_ollama(options, socks[0])
        _raise_file_limit()
        yield socks
    finally:
        for sock in socks:
            sock.close()
        if options.unix is not None:
            with contextlib.suppress(OSError):
                options.unix.unlink()


def _raise_file_limit() -> None:
    """Raise the open file limit, up to `FILES`: the usual 1,024 would limit the number of connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _run(socks: list[socket.socket], pool: ModelPool, options: ServeOptions, hooks: Hooks) -> None:
    service = Service(pool, options.service)
    service.is_loading = bool(options.preload)
    server = make_server(service, options)
    url = url_of(socks[0])
    try:
        with signals(service, server, hooks):
            hooks.listening(url)
            loading = asyncio.ensure_future(_preload(service, options.preload, server, hooks, url))
            watch = asyncio.ensure_future(_watch(service, server, hooks))
            try:
                await server.serve(sockets=socks)
            finally:
                watch.cancel()
                loading.cancel()
        error = loading.exception() if loading.done() and not loading.cancelled() else None
        if error is not None and not (service.is_draining and isinstance(error, Aborted | DeviceError)):
            raise error
        if broken := pool.broken:
            raise DeviceError(f"{broken} while serving", "restart the server; its log shows the cause")
    finally:
        service.close()


def make_server(service: Service, options: AppOptions) -> Any:
    """Create a uvicorn server for our application, with our connection class and signal handling."""
    return server_of(create_app(service, options))


def server_of(app: Any) -> Any:
    """Like `make_server`, for any ASGI application."""
    import uvicorn

    from .protocol import Connection

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    Connection.max_connections = min(Connection.max_connections, max(64, soft - 200))
    config = uvicorn.Config(
        app, http=Connection, ws="none", h11_max_incomplete_event_size=HEADER_BYTES,
        log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=round(CUT_S), server_header=False,
        date_header=True, timeout_keep_alive=KEEP_ALIVE_S, backlog=BACKLOG,
    )  # fmt: skip

    class Server(uvicorn.Server):
        """uvicorn's server without its signal handling, which would raise the signals again after draining."""

        def capture_signals(self) -> Any:
            return contextlib.nullcontext()

    return Server(config)


def url_of(sock: socket.socket) -> str:
    """The URL of a bound socket: `http://host:port`, or `unix:path`."""
    name = sock.getsockname()
    if isinstance(name, str):
        return f"unix:{os.path.abspath(name)}"  # other commands run in other folders
    host, port = name[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def _preload(service: Service, names: tuple[str, ...], server: Any, hooks: Hooks, url: str) -> None:
    try:
        for name in names:
            model = await service.find(name)
            (await service.lease(model)).release()
    except Exception:
        server.should_exit = True
        raise
    gc.freeze()  # exclude long-lived objects from garbage collection, which would delay requests
    service.is_loading = False
    if not service.is_draining:
        hooks.ready(url, service)


@contextlib.contextmanager
def signals(service: Served, server: Any, hooks: Hooks) -> Iterator[None]:
    """Handle SIGINT, SIGTERM and SIGHUP during the block: the first drains the server, the second exits."""
    loop = asyncio.get_running_loop()
    draining: list[asyncio.Task[None]] = []

    def drop(number: int) -> None:
        hooks.draining(service.num_reserved, True)
        os._exit(128 + number)  # do not wait for a running step, load or download, which may take long

    def stop(number: int) -> None:
        if draining:
            drop(number)
        draining.append(asyncio.ensure_future(drain(service, server, DRAIN_S)))
        hooks.draining(service.num_reserved, False)

    for number in SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, lambda number, _: drop(number))  # for the time it takes to close models and threads


async def drain(service: Served, server: Any, drain_s: float) -> None:
    """Reject new requests with 503, wait up to `drain_s` for running ones, then cut the rest short."""
    service.is_draining = True
    loop = asyncio.get_running_loop()
    deadline = loop.time() + drain_s
    while service.num_reserved and loop.time() < deadline:
        await asyncio.sleep(0.05)
    if service.num_reserved:
        service.cut_all()
        deadline = loop.time() + CUT_S
        while service.num_reserved and loop.time() < deadline:
            await asyncio.sleep(0.05)
    server.should_exit = True


async def _watch(service: Service, server: Any, hooks: Hooks) -> None:
    """Call the command's tick, and stop the server when an engine is dead for good."""
    while True:
        hooks.tick()
        service.pool.restart_dead()
        if service.pool.broken and not server.should_exit:
            log.error("%s; shutting down", service.pool.broken)
            server.should_exit = True
        await asyncio.sleep(0.1)


class BackgroundServer:
    """Serves one loaded model in its own thread. The caller owns the model, and stops the server before closing it."""

    def __init__(
        self, llm: LLM, names: Sequence[str], options: ServeOptions,
        ended: Callable[[BackgroundServer], None] = lambda _: None,  # called from its thread when the port is closed
    ) -> None:  # fmt: skip
        """Start serving. `names`: the model's id, then its aliases. Raises ConfigError or ServerError."""
        sock = bind(options)
        self.url = url_of(sock)
        self._ended = ended
        self._pool = ModelPool.holding(llm, names)
        self._pool.models()
        self._service = Service(self._pool, options.service)
        self._server = make_server(self._service, options)
        self._loop = asyncio.new_event_loop()
        self._ending: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, args=(sock,), name="endpoint", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """False once the server has ended, after `stop` or on an error."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Close the port and cut running responses short; returns when done. A second call does nothing."""
        try:
            self._loop.call_soon_threadsafe(self._begin_shutdown)
        except RuntimeError:  # the loop is closed, so the server has ended
            return
        self._thread.join(STOP_S)

    # --- in the thread -----------------------------------------------------------------------------------------------

    def _run(self, sock: socket.socket) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._server.serve(sockets=[sock]))
        except Exception:
            log.exception("the endpoint stopped with an error")
        finally:
            self._service.close()
            sock.close()
            self._pool.close(0)
            self._ended(self)

    def _begin_shutdown(self) -> None:
        self._ending = self._ending or self._loop.create_task(drain(self._service, self._server, 0.0))

"""`chat --web`: the same interface in a local browser, one engine for all tabs, behind a one-time link.

`textual-serve` starts one process per tab. All tabs attach to one server (`localllm serve`, started here when none is
running), so the model is loaded once. It listens on loopback only. The link's token admits one visit, which gets a
cookie; Host and Origin are checked because any web page can reach a local port.
"""

from __future__ import annotations

import hmac
import os
import secrets
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from localllm.cli.attach import Attached, ask
from localllm.cli.frame.command import Env
from localllm.cli.start import Start
from localllm.config import KEYS, UserConfig
from localllm.device.processes import running
from localllm.errors import ConfigError, ServerError
from localllm.request import extra_hint

from .attach import fake_engine

COOKIE = "localllm"
START_S = 600.0  # for a server to load its model
_TAB = [sys.executable, "-P", "-m", "localllm", "chat", "-q"]


class Gate:
    """Admits one visit by its token, and from then on that browser by its cookie."""

    def __init__(self, hosts: tuple[str, ...]) -> None:
        self._hosts = hosts
        self.token = secrets.token_urlsafe(24)
        self._session = secrets.token_urlsafe(32)
        self._used = False

    def check(self, host: str, origin: str | None, cookie: str, token: str | None) -> tuple[int, str]:
        """(status, cookie to set): 200 admits, 302 sets the cookie and redirects to the page, 403 refuses."""
        if host not in self._hosts or (origin is not None and origin not in {f"http://{name}" for name in self._hosts}):
            return 403, ""
        if cookie and hmac.compare_digest(cookie.encode(), self._session.encode()):
            return 200, ""
        if token and not self._used and hmac.compare_digest(token.encode(), self.token.encode()):
            self._used = True
            return 302, self._session
        return 403, ""


def serve_web(env: Env, config: UserConfig, start: Start, attach: Sequence[Path] = ()) -> int:
    """Serve until Ctrl+C. Every tab, and the server started for them, gets the values of the flags.

    attach   paths of the files in `start`
    """
    try:
        import textual_serve.server  # noqa: F401
    except ImportError:
        raise ConfigError("--web needs the package textual-serve", extra_hint("web")) from None
    child: subprocess.Popen[bytes] | None = None
    words: list[str] = []
    key = ""
    os.environ.update(_setting_variables(config, start))
    if not fake_engine():
        attached = start.attached
        if attached is None:
            name = start.choice.name if start.choice else ""
            child, attached = _start_server(env, name, config.engine.debug_invariants)
        words, key = ["--attach-to", attached.url], attached.key
        model = attached.model
    else:
        model = start.choice.name if start.choice else ""
    try:
        return _serve(env, [*_TAB, *words, *_tab_flags(start, attach), "--", *filter(None, [model, start.first])], key)
    finally:
        if child is not None:
            child.terminate()
            child.wait(30)


def _setting_variables(config: UserConfig, start: Start) -> dict[str, str]:
    """The settings given by flags or a preset, as environment variables."""
    given = {path: config.get(path) for path, origin in config.origins.items() if origin == "flag" and path in KEYS}
    given |= {f"sampling.{name}": value for name, value in start.conversation.sampling.items()}
    given |= {"chat.system": start.conversation.system} if start.conversation.system else {}
    return {KEYS[path].env: KEYS[path].kind.show(value) for path, value in given.items() if value is not None}


def _tab_flags(start: Start, attach: Sequence[Path]) -> Iterator[str]:
    """Flags for a tab's chat that no setting covers."""
    yield from ("--think", start.conversation.think)
    for text in start.sampling.stop:
        yield f"--stop={text}"
    for path in attach:
        yield f"--attach={path.absolute()}"
    if start.conversation.exchanges:
        yield f"--resume={start.conversation.id}"


def _start_server(env: Env, model: str, checks: bool) -> tuple[subprocess.Popen[bytes], Attached]:
    """Start a server of our own on a free port and wait until it is ready. Its messages go to our stderr."""
    env.console.say("starting the server that all tabs share")
    words = ["serve", model, "--port", "0", "--preload", "-y", *(["--debug-invariants"] if checks else [])]
    child = subprocess.Popen([sys.executable, "-P", "-m", "localllm", *words], stdin=subprocess.DEVNULL)
    end = time.monotonic() + START_S
    while child.poll() is None and time.monotonic() < end:
        if attached := _ready(child.pid):
            return child, attached
        time.sleep(0.1)
    child.terminate()
    raise ServerError("the server did not start", "see its error above")


def _ready(pid: int) -> Attached | None:
    """The server of a process, once it answers with a model loaded."""
    found = next((one for one in running() if one.pid == pid and one.url), None)
    if found is None or not found.models or ask(found, "GET", "/health") is None:
        return None
    return Attached(found.url, found.token, found.models[0])


def _serve(env: Env, command: list[str], key: str) -> int:
    sock = socket.create_server(("127.0.0.1", 0), backlog=64)  # before the link is shown, as it may be opened at once
    port = sock.getsockname()[1]
    gate = Gate((f"127.0.0.1:{port}", f"localhost:{port}"))
    if key:
        os.environ["LOCALLLM_API_KEY"] = key  # inherited by the tabs' processes; kept out of their command lines
    server = make_server(shlex.join(command), port, gate)
    env.console.say(f"Open http://127.0.0.1:{port}/?token={gate.token}   (works in one browser; Ctrl+C to stop)")
    from aiohttp import web

    web.run_app(server._make_app(), sock=sock, print=lambda *_: None, handle_signals=True)
    return 0


def make_server(command: str, port: int, gate: Gate) -> Any:
    """The textual-serve server, silenced and behind the gate."""
    from aiohttp import web
    from textual_serve.server import Server

    @web.middleware
    async def check_visit(request: Any, handler: Any) -> Any:
        headers, cookie = request.headers, request.cookies.get(COOKIE, "")
        status, fresh = gate.check(headers.get("host", ""), headers.get("origin"), cookie, request.query.get("token"))
        if status == 403:
            text = "This link is invalid or has been used already. Run `localllm chat --web` again.\n"
            return web.Response(status=403, text=text)
        if status == 302:
            response = web.Response(status=302, headers={"location": "/", "referrer-policy": "no-referrer"})
            response.set_cookie(COOKIE, fresh, httponly=True, samesite="Strict")
            return response
        return await handler(request)

    class GatedServer(Server):
        async def _make_app(self) -> Any:
            app = await super()._make_app()
            app.middlewares.append(check_visit)
            return app

        async def on_startup(self, app: Any) -> None:
            """Print nothing: the link has been shown."""

    return GatedServer(command, "127.0.0.1", port, title="localllm", public_url=f"http://127.0.0.1:{port}")

"""Finds a running server that a command can use instead of loading a model a second time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from localllm.cli.background import installed, wake
from localllm.device import processes
from localllm.device.processes import Running
from localllm.errors import ServerError
from localllm.terminal import clean_line
from localllm.testing import only_in_tests

if TYPE_CHECKING:
    from localllm.cli.frame.command import Env
    from localllm.cli.frame.options import EngineFlags
    from localllm.config import UserConfig


class Attached(NamedTuple):
    """A server, its key, and the name of the model on it ("" for its first)."""

    url: str
    key: str
    model: str = ""


def fake_engine() -> bool:
    """Whether the scripted engine was requested. Raises ConfigError outside tests."""
    return only_in_tests("LOCALLLM_ENGINE").startswith("fake")


def wish_of(env: Env, config: UserConfig, engine: EngineFlags, wish: str) -> str:
    """`--attach-to` as meant: flags that say how to load a model imply loading it here, so `auto` becomes `off`."""
    says_how = engine != type(engine)() or env.options.device is not None or env.options.config is not None
    says_how |= any(key.startswith("engine.") and where.startswith("env ") for key, where in config.origins.items())
    return "off" if wish == "auto" and says_how else wish


def find_server(wish: str, names: tuple[str, ...]) -> Attached | None:
    """The server of `--attach-to auto|off|URL` for a model with one of `names` (none: any); None to load it here.

    `auto` picks a server that has the model, then one that can load it, then the service that waits for a connection.
    Raises ServerError for an invalid URL.
    """
    if wish == "off" or (wish == "auto" and fake_engine()):
        return None
    servers = [one for one in processes.running() if one.url]  # including chats that /serve
    if wish != "auto":
        if not wish.startswith(("http://", "https://", "unix:")):
            raise ServerError(f"{clean_line(wish)} is not a server address", "--attach-to http://127.0.0.1:8000")
        url = wish.rstrip("/").removesuffix("/v1")
        own = next((one.token for one in servers if one.url.rstrip("/") == url), "")
        return Attached(url, own or os.environ.get("LOCALLLM_API_KEY", ""), names[0] if names else "")
    for one in servers:
        shared = [name for name in names if name in one.models]
        if (shared or (not names and one.models)) and _answers(one):
            return Attached(one.url, one.token, shared[0] if shared else "")
    return next((found for one in servers if (found := _offer(one, names))), None) or _wake_service(names, servers)


def can_be_named(config: UserConfig, name: str) -> bool:
    """Whether a server may know a model by this name: it is neither one of the user's aliases nor a file."""
    return name not in config.aliases and not Path(name).expanduser().exists()


def _answers(one: Running) -> bool:
    return ask(one, "GET", "/health") is not None


def _offer(one: Running, names: tuple[str, ...]) -> Attached | None:
    """The server, if it has a model with one of these names on disk and accepts requests."""
    known = (told for name in names if (told := ask(one, "GET", f"/v1/models/{quote(name)}")) is not None)
    row = next(known, {})
    name = str(row.get("root") or row.get("id") or "")  # its own name for the model, should it have several
    return Attached(one.url, one.token, name) if name and _answers(one) else None


def _wake_service(names: tuple[str, ...], running: list[Running]) -> Attached | None:
    """The installed service, woken by connecting to it."""
    service = installed() if names else None
    if service is None or any(one.url == service.url for one in running):
        return None
    woken = wake(service)
    return _offer(woken, names) if woken is not None else None


def quant_on(attached: Attached) -> str | None:
    """The stored format of the model on a server; None when the server does not say."""
    one = Running(0, "serve", attached.url, token=attached.key)
    row = ask(one, "GET", f"/v1/models/{quote(attached.model)}" if attached.model else "/v1/models") or {}
    rows = row.get("data")
    row = rows[0] if isinstance(rows, list) and rows else row
    meta = row.get("meta") if isinstance(row, dict) else None
    return (str(meta.get("quant") or "") or None) if isinstance(meta, dict) else None


def process_at(url: str) -> int:
    """The process that answers at `url`; 0 when it is none of ours on this machine."""
    return next((one.pid for one in processes.running() if one.url == url), 0)


ASK_S = 2.0  # timeout for a server to report its state


def ask(one: Running, method: str, path: str, body: Any = None, timeout: float = ASK_S) -> dict[str, Any] | None:
    """Query a running server as its owner; None when it does not answer or refuses."""
    from localllm.wire import FAILURES, Wire

    try:
        with Wire(one.url, one.token).send(method, path, body, timeout) as reply:
            value = json.loads(reply.body.read()) if reply.status == 200 else None
    except FAILURES:
        return None
    return value if isinstance(value, dict) else None

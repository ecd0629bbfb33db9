"""Which running server a chat may use instead of loading a model a second time."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from localllm import processes
from localllm.errors import ServerError
from localllm.processes import Running
from localllm.terminal import clean_line

from .session import fake_engine


class Attached(NamedTuple):
    """A server, the key it wants, the model of its that was meant ("" for its first)."""

    url: str
    key: str
    model: str = ""


def find_server(wish: str, names: tuple[str, ...]) -> Attached | None:
    """The server of `--attach-to auto|off|URL` for a model called one of `names` (none: any); None loads it here.

    Raises ServerError for a URL that cannot be one.
    """
    if wish == "off" or (wish == "auto" and fake_engine()):
        return None
    servers = [one for one in processes.running() if one.url]  # also chats that are served (/serve)
    if wish != "auto":
        if not wish.startswith(("http://", "https://", "unix:")):
            raise ServerError(f"{clean_line(wish)} is not the address of a server", "--attach-to http://127.0.0.1:8000")
        url = wish.rstrip("/").removesuffix("/v1")
        own = next((one.token for one in servers if one.url.rstrip("/") == url), "")
        return Attached(url, own or os.environ.get("LOCALLLM_API_KEY", ""), names[0] if names else "")
    for one in servers:
        shared = [name for name in names if name in one.models]
        if shared or (not names and one.models):
            return Attached(one.url, one.token, shared[0] if shared else "")
    return None


def process_at(url: str) -> int:
    """The process that answers at `url`, 0 where it is none of ours on this machine."""
    return next((one.pid for one in processes.running() if one.url == url), 0)


ASK_S = 2.0  # how long a server may take to tell about itself


def ask(one: Running, method: str, path: str, body: Any = None, timeout: float = ASK_S) -> dict[str, Any] | None:
    """What a running server answers its owner; None when it does not, or refuses."""
    import httpx

    unix = one.url.removeprefix("unix:") if one.url.startswith("unix:") else None
    options: dict[str, Any] = {
        "transport": httpx.HTTPTransport(uds=unix) if unix else None,
        "base_url": "http://localhost" if unix else one.url,
        "headers": {"authorization": f"Bearer {one.token}"},
        "timeout": timeout,
        "trust_env": False,
    }
    try:
        with httpx.Client(**options) as client:
            response = client.request(method, path, json=body)
            value = response.json() if response.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None
    return value if isinstance(value, dict) else None

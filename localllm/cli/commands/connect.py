"""Serve: Settings for opencode, Zed, Open WebUI, llm, aider, ..."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Annotated, Any

from typer import Argument, Option

from localllm.cli.attach import ASK_S
from localllm.cli.frame.command import Env, command
from localllm.conversation.clipboard import osc52
from localllm.device.processes import Running, running
from localllm.errors import ConfigError, did_you_mean, nearest
from localllm.terminal import clean, clean_line

UNIX = "unix:"
SHOWN = 8  # models listed in a message


@dataclass(frozen=True, slots=True)
class Server:
    """The server that an app connects to."""

    url: str  # http://... without a path, or unix:/path
    model: str
    ctx: int
    needs_key: bool
    most: int = 0  # the largest context that the model can hold; 0 when unknown
    models: tuple[str, ...] = ()  # every model it offers

    @property
    def socket(self) -> str:
        """The socket file of a server without a port; "" when it has one."""
        return self.url.removeprefix(UNIX) if self.url.startswith(UNIX) else ""


# connect.toml: name -> about, snippet, and optionally file, note, prompt and unix
APPS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def snippet(app: dict[str, Any], server: Server) -> str:
    """Return the settings for an app, with the server's values in the places that connect.toml leaves for them."""
    name = server.model
    plain = re.fullmatch(r"[A-Za-z][\w./-]*(:[\w./-]+)*", name) and name.lower() not in ("true", "yes", "on", "null")
    quoted = json.dumps(name, ensure_ascii=False)
    text = app["unix" if server.socket else "snippet"]
    text = re.sub("<<(.*?)>>", r"\1" if server.needs_key else "", text, flags=re.DOTALL)
    return Template(text.strip()).substitute(
        url=server.url,
        socket=shlex.quote(server.socket),
        socket_json=json.dumps(server.socket, ensure_ascii=False),
        ctx=server.ctx,
        output=max(256, server.ctx // 4),
        key="YOUR-KEY" if server.needs_key else "none",
        json=quoted[1:-1],
        yaml=name if plain else quoted,
        shell=shlex.quote(name),
        body=shlex.quote(json.dumps({"model": name, "messages": [{"role": "user", "content": "hi"}]})),
    )


@command("localllm connect opencode", "localllm connect zed --model qwen", "localllm connect")
def connect(
    env: Env,
    app: Annotated[
        str | None,
        Argument(metavar="[APP]", help="The app; without one, list them.", autocompletion=lambda: list(APPS)),
    ] = None,
    url: Annotated[str | None, Option(metavar="URL", help="The server; by default the one that is running.")] = None,
    model: Annotated[str | None, Option(metavar="NAME", help="The model; by default the server's first.")] = None,
    copy: Annotated[bool, Option("--copy", help="Also copy the snippet to the clipboard.")] = False,
) -> int:
    """Print the settings that connect another program to `localllm serve`, and the file they belong in."""
    if copy and not env.console.err_tty:
        raise ConfigError("--copy needs a terminal", "localllm connect APP | xclip -selection clipboard")
    if app is None:
        if copy or url is not None or model is not None:
            raise ConfigError("no app is named", "`localllm connect` lists the apps")
        env.console.emit("connect/1", {"apps": {name: one["about"] for name, one in APPS.items()}})
        rows = [(n, a["about"], a.get("file", "–").split(" in ")[0]) for n, a in APPS.items()]
        env.console.table(("APP", "WHAT IT IS", "SETTINGS"), rows, spare=("SETTINGS",))
        return 0
    name = app.lower().replace("_", "-").replace(" ", "-")
    if name not in APPS:
        meant = did_you_mean(nearest(name, APPS, 0.5))
        raise ConfigError(f"no settings for {clean_line(app)}{meant}", "`localllm connect` lists the apps")
    one, server = APPS[name], _server(env, name, url, model)
    text, file, note = snippet(one, server), one.get("file"), _note(one, server)
    fields = {"app": name, "file": file, "snippet": text, "note": note, "url": server.url, "model": server.model}
    if env.console.emit("connect/1", fields | {"models": list(server.models)}):
        return 0
    if file:
        env.console.say(f"# {file}")
    env.console.line(clean(text))
    for line in (note, "replace YOUR-KEY with your key" if server.needs_key else "", _others(server)):
        if line:
            env.console.say(f"# {line}")
    if copy:
        env.console.to_terminal(osc52(text))  # also works over ssh
    return 0


def _server(env: Env, app: str, url: str | None, model: str | None) -> Server:
    """The server that was named or is running, with its first model; else the one from the settings."""
    settings = env.config.server
    unix = "unix" in APPS[app]  # whether this app can use a socket file
    servers = [one for one in running() if one.url]
    found = next((one for one in servers if unix or not one.url.startswith(UNIX)), next(iter(servers), None))
    base = default = f"http://{_host(settings.host)}:{settings.port}"
    if url is not None:
        base = _checked_address(url)
        found = next((one for one in servers if one.url == base), Running(0, "serve", base))
    elif found is not None:
        base = found.url
    else:
        env.console.say("# no server is running: localllm serve")
    needs_key, rows = (bool(settings.api_key_file), []) if found is None else _query_models(base, found.token)
    if needs_key is None:
        env.console.warn(f"no server answers at {clean_line(base)}: localllm serve")
        needs_key = bool(settings.api_key_file)
    names = tuple(str(row["id"]) for row in rows if row.get("id"))
    chosen: dict[str, Any] = next((row for row in rows if model in (None, row.get("id"))), {})
    if rows and not chosen:
        offered = clean_line(", ".join(names[:SHOWN]))
        env.console.warn(f"{clean_line(base)} does not offer {clean_line(str(model))}; it offers {offered}")
    if base.startswith(UNIX) and not unix:
        what = f"{clean_line(app)} cannot use {clean_line(base)}"
        if url is not None:
            raise ConfigError(f"{what}, a Unix socket", "start the server without --unix")
        env.console.warn(f"{what}, where a server runs: start it without --unix")
        base = default
    name = model or chosen.get("id") or env.config.model or "MODEL"
    meta = chosen.get("meta")
    most = int((meta.get("n_ctx_train") if isinstance(meta, dict) else 0) or 0)
    return Server(base, str(name), int(chosen.get("max_model_len") or 8192), needs_key, most, names)


def _host(address: str) -> str:
    """The host of a URL for a server that listens on this address."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    return f"[{host}]" if ":" in host else host


def _others(server: Server) -> str:
    """The server's other models, which these settings do not name."""
    others = [clean_line(name) for name in server.models if name != server.model]
    if server.model not in server.models or not others:
        return ""
    return f"the server also offers {', '.join(others[:SHOWN])}{' …' if others[SHOWN:] else ''}: --model NAME"


def _note(app: dict[str, Any], server: Server) -> str | None:
    """What else to know; for an app with a long prompt of its own, whether the model can hold it."""
    prompt = app.get("prompt", 0)
    if not 0 < server.most <= prompt:
        return app.get("note")
    return (
        f"its own prompt has about {prompt:,} tokens, and {clean_line(server.model)} holds at most {server.most:,}: "
        "serve a model with a longer context"
    )


def _checked_address(url: str) -> str:
    """The address of a server: http://HOST:PORT, or unix:PATH. Raises ConfigError."""
    from urllib.parse import urlsplit

    if url.startswith(f"{UNIX}/") and url.isprintable():
        return url
    base = url.rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(base)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound or not base.isprintable() or any(mark in base for mark in " '\"\\$`?#"):
        raise ConfigError(
            f"--url must be an address such as http://127.0.0.1:8000, not {clean_line(url)!r}",
            "`localllm ps` lists the servers",
        )
    return base


def _query_models(base: str, token: str) -> tuple[bool | None, list[dict[str, Any]]]:
    """Return (whether a key is needed, or None when no server answers; the models on offer)."""
    from localllm.wire import FAILURES, Wire

    try:
        status, body = Wire(base).get("/v1/models", ASK_S)
        needs_key = status == 401
        if needs_key and token:
            status, body = Wire(base, token).get("/v1/models", ASK_S)
        value = json.loads(body) if status == 200 else {}
    except FAILURES:
        return None, []
    listed = value.get("data") if isinstance(value, dict) else None
    return needs_key, [row for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []

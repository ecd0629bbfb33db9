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

from localllm.cli.frame.command import Env, command
from localllm.conversation.clipboard import osc52
from localllm.device.processes import running
from localllm.errors import ConfigError, did_you_mean, nearest
from localllm.terminal import clean, clean_line


@dataclass(frozen=True, slots=True)
class Server:
    """The server that an app connects to."""

    url: str  # without a path
    model: str
    ctx: int
    needs_key: bool
    most: int = 0  # the largest context that the model can hold; 0 when unknown


# connect.toml: name -> about, snippet, and optionally file and note
APPS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def snippet(app: dict[str, Any], server: Server) -> str:
    """Return the settings for an app, with the server's values in the places that connect.toml leaves for them."""
    name = server.model
    plain = re.fullmatch(r"[A-Za-z][\w./-]*(:[\w./-]+)*", name) and name.lower() not in ("true", "yes", "on", "null")
    quoted = json.dumps(name, ensure_ascii=False)
    text = re.sub("<<(.*?)>>", r"\1" if server.needs_key else "", app["snippet"], flags=re.DOTALL)
    return Template(text.strip()).substitute(
        url=server.url,
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
    if app is None:
        env.console.emit("connect/1", {"apps": {name: one["about"] for name, one in APPS.items()}})
        rows = [(n, a["about"], a.get("file", "–").split(" in ")[0]) for n, a in APPS.items()]
        env.console.table(("APP", "WHAT IT IS", "SETTINGS"), rows, spare=("SETTINGS",))
        return 0
    name = app.lower().replace("_", "-").replace(" ", "-")
    if name not in APPS:
        meant = did_you_mean(nearest(name, APPS, 0.5))
        raise ConfigError(f"no settings for {clean_line(app)}{meant}", "`localllm connect` lists the apps")
    one, server = APPS[name], _server(env, url, model)
    text, file, note = snippet(one, server), one.get("file"), _note(one, server)
    fields = {"app": name, "file": file, "snippet": text, "note": note, "url": server.url, "model": server.model}
    if env.console.emit("connect/1", fields):
        return 0
    if file:
        env.console.say(f"# {file}")
    env.console.line(clean(text))
    for line in (note, "replace YOUR-KEY with your key" if server.needs_key else ""):
        if line:
            env.console.say(f"# {line}")
    if copy:
        if not env.console.err_tty:
            raise ConfigError("--copy needs a terminal", "localllm connect APP | xclip -selection clipboard")
        env.console.to_terminal(osc52(text))  # also works over ssh
    return 0


def _server(env: Env, url: str | None, model: str | None) -> Server:
    """The server that was named or is running, with its first model; else the one from the settings."""
    settings = env.config.server
    found = next((one for one in running() if one.url.startswith("http")), None)
    if url is not None:
        base = _checked_address(url)
        token = next((one.token for one in running() if one.url == base), "")
    elif found is not None:
        base, token = found.url, found.token
    else:
        env.console.say("# no server is running: localllm serve")
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
        base, token = f"http://{f'[{host}]' if ':' in host else host}:{settings.port}", ""
    needs_key, rows = (
        _query_models(base, token) if url is not None or found is not None else (bool(settings.api_key_file), [])
    )
    if needs_key is None:
        env.console.warn(f"no server answers at {clean_line(base)}: localllm serve")
        needs_key = bool(settings.api_key_file)
    chosen: dict[str, Any] = next((row for row in rows if model in (None, row.get("id"))), {})
    if rows and not chosen:
        names = ", ".join(str(row.get("id")) for row in rows[:8])
        env.console.warn(f"{clean_line(base)} does not offer {clean_line(str(model))}; it offers {clean_line(names)}")
    name = model or chosen.get("id") or env.config.model or "MODEL"
    meta = chosen.get("meta")
    most = int((meta.get("n_ctx_train") if isinstance(meta, dict) else 0) or 0)
    return Server(base, str(name), int(chosen.get("max_model_len") or 8192), needs_key, most)


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
    """The address of a server, without a path. Raises ConfigError."""
    from urllib.parse import urlsplit

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
    import httpx

    try:
        with httpx.Client(timeout=2.0, trust_env=False) as client:
            answer = client.get(f"{base}/v1/models")
            needs_key = answer.status_code == 401
            if needs_key and token:
                answer = client.get(f"{base}/v1/models", headers={"authorization": f"Bearer {token}"})
            value = answer.json() if answer.status_code == 200 else {}
    except (httpx.HTTPError, ValueError):
        return None, []
    listed = value.get("data") if isinstance(value, dict) else None
    return needs_key, [row for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []

"""Serve: Settings for opencode, Zed, Open WebUI, llm, aider, ..."""

from __future__ import annotations

import base64
import json
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from typer import Argument, Option

from localllm.cli.frame.command import Env, command
from localllm.errors import ConfigError
from localllm.processes import running
from localllm.terminal import clean, clean_line


@dataclass(frozen=True, slots=True)
class Server:
    """What is connected to."""

    url: str  # without a path
    model: str
    ctx: int
    needs_key: bool

    @property
    def key(self) -> str:
        """What to write where a key belongs."""
        return "YOUR-KEY" if self.needs_key else "none"


@dataclass(frozen=True, slots=True)
class App:
    """A program: where its settings are, and how they read."""

    about: str
    file: str  # where the snippet goes; "" for commands to run
    snippet: Callable[[Server], str]
    note: str = ""


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _yaml(name: str) -> str:
    """A name as YAML reads it back."""
    plain = re.fullmatch(r"[A-Za-z][\w./-]*(:[\w./-]+)*", name) and name.lower() not in ("true", "yes", "on", "null")
    return name if plain else json.dumps(name, ensure_ascii=False)


def _opencode(s: Server) -> str:
    models = {s.model: {"name": s.model, "limit": {"context": s.ctx, "output": max(256, s.ctx // 4)}}}
    options = {"baseURL": f"{s.url}/v1"} | ({"apiKey": s.key} if s.needs_key else {})
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "localllm", "options": options, "models": models}
    return _json(
        {
            "$schema": "https://opencode.ai/config.json",
            "provider": {"localllm": provider},
            "model": f"localllm/{s.model}",
        }
    )


def _continue(s: Server) -> str:
    return (
        "name: localllm\nversion: 1.0.0\nschema: v1\nmodels:\n"
        f"  - name: {_yaml(s.model)}\n    provider: openai\n    model: {_yaml(s.model)}\n"
        f"    apiBase: {s.url}/v1\n    apiKey: {s.key}\n"
        "    roles: [chat, edit, apply]\n"
        f"    defaultCompletionOptions:\n      contextLength: {s.ctx}"
    )


def _zed(s: Server) -> str:
    capabilities = {"tools": True, "images": False, "parallel_tool_calls": True, "prompt_cache_key": False}
    model = {"name": s.model, "display_name": s.model, "max_tokens": s.ctx, "capabilities": capabilities}
    provider = {"localllm": {"api_url": f"{s.url}/v1", "available_models": [model]}}
    return _json({"language_models": {"openai_compatible": provider}})


def _llm(s: Server) -> str:
    key = "  api_key_name: localllm\n" if s.needs_key else ""
    name = _yaml(s.model)
    return (
        f'- model_id: {name}\n  model_name: {name}\n  api_base: "{s.url}/v1"\n{key}'
        "  supports_schema: true\n  supports_tools: true"
    )


def _codex(s: Server) -> str:
    key = 'env_key = "CODEX_LOCALLLM_KEY"\n' if s.needs_key else ""  # a name of the user's, read by codex only
    return (
        f'model = {json.dumps(s.model)}\nmodel_provider = "localllm"\n\n[model_providers.localllm]\nname = "localllm"\n'
        f'base_url = "{s.url}/v1"\nwire_api = "responses"\n{key}'.rstrip()
    )


def _python(s: Server) -> str:
    return (
        "from openai import OpenAI\n\n"
        f'client = OpenAI(base_url="{s.url}/v1", api_key="{s.key}")\n'
        "answer = client.chat.completions.create(\n"
        f'    model={json.dumps(s.model)}, messages=[{{"role": "user", "content": "hi"}}]\n)\n'
        "print(answer.choices[0].message.content)"
    )


def _curl(s: Server) -> str:
    key = f" -H 'authorization: Bearer {s.key}'" if s.needs_key else ""
    body = json.dumps({"model": s.model, "messages": [{"role": "user", "content": "hi"}]})
    return f"curl {s.url}/v1/chat/completions -H 'content-type: application/json'{key} \\\n  -d {shlex.quote(body)}"


APPS: dict[str, App] = {
    "opencode": App("coding agent in the terminal", "~/.config/opencode/opencode.json", _opencode),
    "continue": App("VS Code and JetBrains", "~/.continue/config.yaml", _continue),
    "zed": App(
        "editor",
        "~/.config/zed/settings.json",
        _zed,
        "the key is read from LOCALLLM_API_KEY; any value where none is needed",
    ),
    "open-webui": App(
        "chat in a browser",
        "",
        lambda s: f"OPENAI_API_BASE_URLS={s.url}/v1 OPENAI_API_KEYS={s.key} open-webui serve --port 3000",
        "or in its settings: Connections, OpenAI API; from a container the address is http://host.docker.internal:PORT/v1",
    ),
    "llm": App("command line", "extra-openai-models.yaml in the folder that `llm logs path` shows", _llm),
    "aider": App(
        "pair programmer in the terminal",
        "",
        lambda s: f"OPENAI_API_BASE={s.url}/v1 OPENAI_API_KEY={s.key} aider --model {shlex.quote('openai/' + s.model)}",
    ),
    "claude-code": App(
        "coding agent, through /v1/messages",
        "",
        lambda s: (
            f"ANTHROPIC_BASE_URL={s.url} ANTHROPIC_AUTH_TOKEN={s.key} ANTHROPIC_MODEL={shlex.quote(s.model)} \\\n"
            f"  ANTHROPIC_DEFAULT_HAIKU_MODEL={shlex.quote(s.model)} claude"
        ),
        "its own prompts are long: start the server with --ctx 32k or more",
    ),
    "codex": App("coding agent, through /v1/responses", "~/.codex/config.toml", _codex),
    "ollama": App(
        "whatever speaks its API", "", lambda s: f"OLLAMA_HOST={s.url}", "the address to give instead of port 11434"
    ),
    "python": App("the openai package", "", _python),
    "curl": App("a request by hand", "", _curl),
}


@command("localllm connect opencode", "localllm connect zed --model qwen", "localllm connect")
def connect(
    env: Env,
    app: Annotated[
        str | None,
        Argument(metavar="[APP]", help="Which program; nothing lists them.", autocompletion=lambda: list(APPS)),
    ] = None,
    url: Annotated[str | None, Option(metavar="URL", help="The server; by default the one that runs.")] = None,
    model: Annotated[str | None, Option(metavar="NAME", help="The model; by default the server's first.")] = None,
    copy: Annotated[bool, Option("--copy", help="Put the snippet on the clipboard, too.")] = False,
) -> int:
    """Print settings with which another program uses `localllm serve`, and the file they belong in."""
    if app is None:
        if env.console.as_json:
            env.console.emit("connect/1", {"apps": {name: one.about for name, one in APPS.items()}})
            return 0
        rows = [(n, a.about, a.file.split(" in ")[0] or "–") for n, a in APPS.items()]
        env.console.table(("APP", "WHAT IT IS", "SETTINGS"), rows, spare=("SETTINGS",))
        return 0
    name = app.lower().replace("_", "-").replace(" ", "-")
    if name not in APPS:
        from difflib import get_close_matches

        near = get_close_matches(name, APPS, 1, 0.5)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"there are no settings for {clean_line(app)}{meant}", "localllm connect lists the programs")
    one, server = APPS[name], _server(env, url, model)
    snippet = one.snippet(server)
    if env.console.as_json:
        fields = {"app": name, "file": one.file or None, "snippet": snippet, "note": one.note or None}
        env.console.emit("connect/1", fields | {"url": server.url, "model": server.model})
        return 0
    if one.file:
        env.console.say(f"# {one.file}")
    env.console.line(clean(snippet))
    for line in (one.note, "put your key in the place of YOUR-KEY" if server.needs_key else ""):
        if line:
            env.console.say(f"# {line}")
    if copy:
        _copy(env, snippet)
    return 0


def _server(env: Env, url: str | None, model: str | None) -> Server:
    """The server that was named or runs, with its first model; what the settings say where none answers."""
    settings = env.config.server
    found = next((one for one in running() if one.url.startswith("http")), None)
    if url is not None:
        base = _address(url)
        token = next((one.token for one in running() if one.url == base), "")
    elif found is not None:
        base, token = found.url, found.token
    else:
        env.console.say("# no server is running: localllm serve")
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
        base, token = f"http://{f'[{host}]' if ':' in host else host}:{settings.port}", ""
    needs_key, rows = _asked(base, token) if url is not None or found is not None else (bool(settings.api_key_file), [])
    if needs_key is None:
        env.console.warn(f"nothing answers at {clean_line(base)} now: localllm serve")
        needs_key = bool(settings.api_key_file)
    chosen: dict[str, Any] = next((row for row in rows if model in (None, row.get("id"))), {})
    if rows and not chosen:
        names = ", ".join(str(row.get("id")) for row in rows[:8])
        env.console.warn(f"{clean_line(base)} does not offer {clean_line(str(model))}; it offers {clean_line(names)}")
    name = model or chosen.get("id") or env.config.model or "MODEL"
    return Server(base, str(name), int(chosen.get("max_model_len") or 8192), needs_key)


def _address(url: str) -> str:
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
            f"--url is {clean_line(url)!r}, expected an address such as http://127.0.0.1:8000", "localllm ps shows it"
        )
    return base


def _asked(base: str, token: str) -> tuple[bool | None, list[dict[str, Any]]]:
    """(whether a key is needed, None where nothing answers; the models on offer)"""
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


def _copy(env: Env, text: str) -> None:
    """Through the terminal (OSC 52), which also works over ssh."""
    if not env.console.err_tty:
        raise ConfigError("--copy needs a terminal", "localllm connect APP | xclip -selection clipboard")
    sys.stderr.write(f"\x1b]52;c;{base64.b64encode(text.encode()).decode()}\x07")
    sys.stderr.flush()

"""Configuration of MCP servers: reads and checks `mcpServers` as written by Claude Desktop, LM Studio and VS Code."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localllm.errors import ConfigError
from localllm.terminal import clean_line

MAX_FILE_BYTES = 1 << 20
MAX_SERVERS = 32
TIMEOUT_S = 60.0  # per call, unless the server's entry sets another
_VARIABLE = re.compile(r"\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


@dataclass(frozen=True, slots=True)
class ServerEntry:
    """A server: a program that speaks over its standard streams, or a URL (streamable HTTP).

    timeout_s   time limit for one call
    """

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = TIMEOUT_S


def read_servers(path: Path) -> list[ServerEntry]:
    """Read the servers from a JSON file with `mcpServers`. Raises ConfigError naming the file and the field."""
    shown = clean_line(str(path))
    hint = 'give a JSON file with {"mcpServers": {...}}'
    try:
        if path.exists() and not path.is_file():  # a FIFO would block, a device would never end
            raise ConfigError(f"{shown} is not a file", hint)
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{shown} cannot be read: {getattr(error, 'strerror', None) or error}", hint) from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{shown} is larger than {MAX_FILE_BYTES >> 20} MiB", hint)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise ConfigError(f"{shown} is not valid JSON", hint) from None
    servers = value.get("mcpServers", value.get("servers")) if isinstance(value, dict) else None
    if servers is None:
        raise ConfigError(f"{shown} has no mcpServers", hint)
    return servers_of(servers, shown)


def servers_of(value: Any, where: str) -> list[ServerEntry]:
    """Parse a table {name: entry} into servers, leaving out disabled ones. Raises ConfigError.

    where   the file or setting to name in errors
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: the servers must be a table of entries", 'such as {"files": {"command": "..."}}')
    if len(value) > MAX_SERVERS:
        raise ConfigError(f"{where}: {len(value)} servers; the limit is {MAX_SERVERS}", "remove some")
    entries = [_entry(str(name), one, f"{where}: {clean_line(str(name))[:64]}") for name, one in value.items()]
    return [entry for entry in entries if entry is not None]


def _entry(name: str, value: Any, where: str) -> ServerEntry | None:
    if not name.strip() or len(name) > 64 or clean_line(name) != name:
        raise ConfigError(f"{where}: a server's name must be 1 to 64 printable characters", "rename it")
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must be a table", "give it a command or a url")
    given = {key: item for key, item in value.items() if item is not None}
    if given.get("disabled") is True or given.get("enabled") is False:
        return None
    transport = given.get("type", given.get("transport"))
    if transport == "sse":
        raise ConfigError(f"{where}: the SSE transport is not supported", "use the server's streamable HTTP address")
    fill = _variable_expander(where)

    def text(key: str) -> str:
        if not isinstance(item := given.get(key, ""), str) or "\0" in item:
            raise ConfigError(f"{where}: {key} must be a string", "see the server's documentation")
        return fill(item)

    def table(key: str) -> dict[str, str]:
        item = given.get(key, {})
        if not isinstance(item, Mapping) or not all(isinstance(v, str | int | float) for v in item.values()):
            raise ConfigError(f"{where}: {key} must be a table of strings", f'such as {{"{key}": {{"NAME": "value"}}}}')
        return {str(k): fill(str(v)) for k, v in item.items()}

    args = given.get("args", [])
    if not isinstance(args, list | tuple) or not all(isinstance(one, str) and "\0" not in one for one in args):
        raise ConfigError(f"{where}: args must be a list of strings", 'such as ["-m", "my_server"]')
    entry = ServerEntry(
        name, text("command"), tuple(map(fill, args)), table("env"), text("cwd"), text("url"), table("headers"),
        _timeout(given, where),
    )  # fmt: skip
    if bool(entry.command) == bool(entry.url):
        raise ConfigError(f"{where} must have either a command or a url", "see the server's documentation")
    if entry.url and not entry.url.startswith(("http://", "https://")):
        raise ConfigError(f"{where}: url must start with http:// or https://", "see the server's documentation")
    return entry


def _timeout(given: Mapping[str, Any], where: str) -> float:
    """The timeout in seconds. LM Studio writes `timeout` in milliseconds, others in seconds: a value over 600 is ms."""
    value = given.get("timeout", TIMEOUT_S)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 3_600_000:
        raise ConfigError(f"{where}: timeout must be seconds (up to 600) or milliseconds (above 600)", "such as 60")
    return value / 1000 if value > 600 else float(value)


def _variable_expander(where: str) -> Callable[[str], str]:
    """Return a function that replaces ${NAME}, ${env:NAME} and ${NAME:-default} with environment variables."""

    def one(found: re.Match[str]) -> str:
        value = os.environ.get(found[1], found[2])
        if value is None:
            raise ConfigError(f"{where}: the environment variable {found[1]} is not set", f"export {found[1]}=...")
        return value

    return lambda text: _VARIABLE.sub(one, text)

"""Loads the settings: flags over environment over project file over the user's file over defaults."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from localllm.errors import ConfigError, did_you_mean
from localllm.paths import config_file, read_small
from localllm.testing import TEST_ONLY

from .keys import (
    ENVIRONMENT,
    KEYS,
    PROJECT_FILE,
    SECTIONS,
    TABLES,
    Preset,
    SamplingConfig,
    UserConfig,
    environment,
    find_key,
    nearest_key,
)

MAX_FILE_BYTES = 1 << 20


def settings_file(environ: Mapping[str, str] = os.environ) -> Path:
    """The user's settings file: LOCALLLM_CONFIG, else the XDG one. It may not exist."""
    return Path(environ["LOCALLLM_CONFIG"]).expanduser() if environ.get("LOCALLLM_CONFIG") else config_file()


def load_config(
    flags: Mapping[str, Any] | None = None,
    *,
    path: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    folder: Path | None = None,
    strict: bool = False,
) -> UserConfig:
    """Load all settings, each with its origin.

    flags    key path -> value; None means "not given"
    path     the user's file (`--config`); it must exist
    folder   folder of the project file; by default the working folder
    strict   an unreadable file is an error instead of a warning, for commands whose defaults would be less safe

    Raises ConfigError for a wrong flag or variable, and for a file given by `path` that cannot be read or is not valid
    TOML. Unknown keys and wrong values in a file become `warnings`; so does an unreadable default file (`broken` says
    why), and the defaults apply.
    """
    if path is not None and not path.is_file():
        wrong = "is not a file" if path.exists() else "does not exist"
        raise ConfigError(f"the settings file {path} {wrong}", "drop --config, or name an existing file")
    loading = _Loading(strict=strict)
    loading.take_file(path or settings_file(environ), strict=path is not None)
    if environ.get("LOCALLLM_PROJECT") == "1":
        loading.take_file((folder or Path.cwd()) / PROJECT_FILE)
    loading.take_environment(environ)
    for name, value in (flags or {}).items():
        if value is not None:
            loading.put(name, find_key(name).parse(value, "flag"), "flag")
    return loading.config()


def read_toml(file: Path) -> dict[str, Any]:
    """Read the tables of a settings file; a missing file is empty. Raises ConfigError with file, line and column."""
    hint = f"edit {file}, or move it away"
    try:
        return tomllib.loads(read_small(file, MAX_FILE_BYTES).decode())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not valid TOML: {error}", hint) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not valid TOML: it is not UTF-8 text", hint) from None
    except (ValueError, RecursionError) as error:  # a number with thousands of digits
        raise ConfigError(f"{file} is not valid TOML: {type(error).__name__}", hint) from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", hint) from None


class _Loading:
    """The values gathered so far; a later `put` wins."""

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self.broken = ""
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.tables: dict[str, dict[str, Any]] = {name: {} for name in TABLES}
        self.mcp_servers: dict[str, Any] = {}
        self.warnings: list[str] = []
        self.unknown: list[str] = []

    def put(self, path: str, value: Any, origin: str) -> None:
        self.values[path] = value
        self.origins[path] = origin

    def take_file(self, file: Path, strict: bool = False) -> None:
        origin = f"file {file}"
        try:
            tables = read_toml(file)
        except ConfigError as error:
            if strict or self.strict:
                raise
            self.broken = error.message
            self.warnings.append(f"{error.message}; using the defaults")
            return
        for name, value in tables.items():
            if name == "mcp":
                self._take_servers(value, file)
            elif name not in (*SECTIONS, *TABLES):
                self._take(name, value, origin)
            elif not isinstance(value, dict):
                self.warnings.append(f"{file}: {name} must be a table ([{name}]); ignored")
            elif name in TABLES:
                self._take_table(name, value, origin)
            else:
                for leaf, inner in value.items():
                    self._take(f"{name}.{leaf}", inner, origin)

    def _take_servers(self, value: Any, file: Path) -> None:
        servers = value.get("servers") if isinstance(value, dict) and set(value) <= {"servers"} else None
        if not isinstance(servers, dict):
            self.warnings.append(f"{file}: [mcp] must contain only [mcp.servers.NAME] tables; ignored")
        elif file.name == PROJECT_FILE:  # entering a folder must not run its programs
            self.warnings.append(f"{file}: MCP servers are only read from your own settings file; ignored")
        else:
            self.mcp_servers |= servers
            self.origins |= {f"mcp.servers.{name}": f"file {file}" for name in servers}

    def take_environment(self, environ: Mapping[str, str]) -> None:
        by_env = {key.env: key for key in KEYS.values()}
        for name, text in environ.items():
            if name in by_env:
                self.put(by_env[name].path, by_env[name].parse(text, name), f"env {name}")
            elif name.startswith("LOCALLLM_") and name not in ENVIRONMENT:
                known = {one: meaning for one, meaning in environment().items() if one not in TEST_ONLY}
                self.unknown.append(f"unknown variable {name}{did_you_mean(nearest_key(name, known))}")
        hub_offline = environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
        if hub_offline and "LOCALLLM_OFFLINE" not in environ:
            self.put("offline", True, "env HF_HUB_OFFLINE")

    def _take(self, path: str, value: Any, origin: str) -> None:
        if path not in KEYS:
            self.unknown.append(f"{origin[5:]}: unknown key {path}{did_you_mean(nearest_key(path))}")
            return
        try:
            self.put(path, KEYS[path].parse(value, origin), origin)
        except ConfigError as error:
            self.warnings.append(f"{error.message}; ignored")

    def _take_table(self, name: str, value: Mapping[str, Any], origin: str) -> None:
        for key, inner in value.items():
            where = f"{name}.{key}"
            if name == "presets" and isinstance(inner, dict):
                self.tables[name][key] = self._preset(where, inner, origin)
            elif name != "presets" and isinstance(inner, str):
                self.tables[name][key] = inner
            else:
                wanted = "a table" if name == "presets" else "a string"
                self.warnings.append(f"{origin[5:]}: {where} must be {wanted}; ignored")
                continue
            self.origins[where] = origin

    def _preset(self, where: str, table: Mapping[str, Any], origin: str) -> Preset:
        own: dict[str, str] = {}
        sampling: dict[str, Any] = {}
        for leaf, value in table.items():
            key = KEYS.get(f"sampling.{leaf}")
            if leaf in ("system", "model") and isinstance(value, str):
                own[leaf] = value
            elif key is None:
                self.warnings.append(f"{origin[5:]}: {where}.{leaf} is not a string, or not a key of a preset; ignored")
            else:
                try:
                    sampling[key.attribute] = replace(key, path=f"{where}.{leaf}").parse(value, origin)
                except ConfigError as error:
                    self.warnings.append(f"{error.message}; ignored")
        return Preset(**own, sampling=SamplingConfig(**sampling))

    def config(self) -> UserConfig:
        held: dict[str, dict[str, Any]] = {name: {} for name in ("", *SECTIONS)}
        for path, value in self.values.items():
            key = KEYS[path]
            held[key.section][key.attribute] = value
        sections = {name: holder(**held[name]) for name, holder in SECTIONS.items()}
        rest: dict[str, Any] = {**self.tables, "mcp_servers": self.mcp_servers}
        rest |= {"origins": self.origins, "broken": self.broken, "unknown": tuple(self.unknown)}
        return UserConfig(**held[""], **sections, **rest, warnings=(*self.warnings, *self.unknown))

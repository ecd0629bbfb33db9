"""This machine: Show and change settings"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from localllm.cli.frame.command import Env, command
from localllm.cli.frame.console import picked
from localllm.config import KEYS, Key, find_key, load_config, reference, set_key, settings_file, unset_key
from localllm.config.keys import TABLES, Preset
from localllm.errors import ConfigError, did_you_mean, nearest
from localllm.terminal import clean_line

ACTIONS = ("list", "get", "set", "unset", "path", "edit", "schema")


@command(
    "localllm config list --origin",
    "localllm config set sampling.temperature 0.2",
    "localllm config get engine.ctx",
    "localllm config edit",
)
def config(
    env: Env,
    action: Annotated[str, Argument(metavar="list|get|set|unset|path|edit|schema", help="What to do.")] = "list",
    key: Annotated[str | None, Argument(metavar="[KEY]", help="A setting, such as engine.ctx.")] = None,
    value: Annotated[str | None, Argument(metavar="[VALUE]", help="The new value, for set.")] = None,
    origin: Annotated[bool, Option("--origin", help="Show where each value comes from.")] = False,
) -> int:
    """Show and change settings. Flags override environment variables, variables the file, and the file the defaults."""
    if action not in ACTIONS:
        raise _no_action(action, key)
    wanted = {"get": 1, "unset": 1, "set": 2}.get(action, 0)
    given = sum(part is not None for part in (key, value))
    if given != wanted:
        names = " ".join(("KEY", "VALUE")[:wanted])
        raise ConfigError(
            f"config {action} takes {names or 'no arguments'}", f"localllm config {action} {names}".rstrip()
        )
    file = env.options.config or settings_file()
    told: dict[str, Any] = {"file": str(file), "action": action}
    if action == "list":
        told = _list(env, origin, file)
    elif action == "get":
        told = _get(env, str(key), origin)
    elif action in ("set", "unset"):
        _change(env, str(key), value, file)
        told["key"] = key
    elif action == "edit":
        _edit(env, file)
    elif action == "schema":
        told["keys"] = [_described(known) for known in KEYS.values()]
        env.console.line(reference().removesuffix("\n"))
    else:
        env.console.line(str(file))
    env.console.emit("config/1", told)
    return 0


def _no_action(action: str, key: str | None) -> ConfigError:
    """Guess what was meant: a key alone is to be read, a key with a value to be written."""
    if action in KEYS or action.split(".")[0] in TABLES:
        meant = f"localllm config set {action} {key}" if key is not None else f"localllm config get {action}"
        return ConfigError(f"config {clean_line(action)}: say get, set or unset first", meant)
    near = nearest(action, ACTIONS)
    known = f"did you mean {near}?" if near else f"the action must be one of {', '.join(ACTIONS)}"
    return ConfigError(f"config {clean_line(action)}: {known}", f"localllm config {near or 'list'}")


def _described(key: Key) -> dict[str, Any]:
    return picked(key, "default meaning env") | {"key": key.path, "takes": key.kind.expects}


def _list(env: Env, origin: bool, file: Path) -> dict[str, Any]:
    found = env.config
    rows = [(path, found.get(path)) for path in KEYS]
    for table in TABLES:
        rows += [(f"{table}.{name}", value) for name, value in getattr(found, table).items()]
    shown = 3 if origin else 2
    cells = [(path, _text(path, value), found.origin(path))[:shown] for path, value in rows]
    env.console.table(("KEY", "VALUE", "ORIGIN")[:shown], cells)
    return {"file": str(file), "settings": {p: {"value": v, "origin": found.origin(p)} for p, v in rows}}


def _text(path: str, value: Any) -> str:
    if value is None:
        return "(model default)" if path.startswith("sampling.") else ""
    if path in KEYS:
        return KEYS[path].kind.show(value)
    if isinstance(value, Preset):
        words = {"system": value.system, "model": value.model, **value.sampling.given()}
        return ", ".join(
            f"{name} {one!r}" if isinstance(one, str) else f"{name} {one}"
            for name, one in words.items()
            if one is not None
        )
    return str(value)


def _get(env: Env, key: str, origin: bool) -> dict[str, Any]:
    value = env.config.get(key)
    where = env.config.origin(key)
    env.console.line(clean_line(_text(key, value)) + (f"   ({where})" if origin else ""))
    return {"settings": {key: {"value": value, "origin": where}}}


def _change(env: Env, key: str, value: str | None, file: Path) -> None:
    """Set a key; without a value, remove it."""
    if value is not None:
        if key.startswith("keys."):
            _check_binding(key.removeprefix("keys."), value)
        parsed = set_key(key, value, file)
        env.console.say(f"{clean_line(key)} = {clean_line(_text(key, parsed))} in {file}")
        where = load_config(path=file).origin(key)
        if where.startswith("env "):
            env.console.warn(f"{where[4:]} is set and overrides the file")
    elif unset_key(key, file):
        env.console.say(f"{clean_line(key)} removed from {file}")
    else:
        if key.split(".")[0] not in TABLES:
            find_key(key)
        env.console.say(f"{clean_line(key)} was not set in {file}")


def _check_binding(name: str, keys: str) -> None:
    """Raise ConfigError for an action or a key that the interface does not know."""
    from localllm.tui.keymap import KEYS as ACTIONS_BOUND
    from localllm.tui.keymap import is_key

    if name not in ACTIONS_BOUND:
        meant = did_you_mean(nearest(name, ACTIONS_BOUND))
        raise ConfigError(f"keys.{clean_line(name)} is not a key binding{meant}", "localllm chat --list-keys")
    for key in keys.split(","):
        if key.strip() and not is_key(key.strip()):
            raise ConfigError(f"{clean_line(key.strip())!r} is not a key", f"localllm config set keys.{name} ctrl+x")


def _edit(env: Env, file: Path) -> None:
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or ""
    if not editor:
        raise ConfigError("neither VISUAL nor EDITOR is set", f"`export EDITOR=nano`, or edit {file} directly")
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        file.write_text("# `localllm config schema` lists every key\n", encoding="utf-8")
    try:
        code = subprocess.run([*shlex.split(editor), str(file)], check=False).returncode
    except OSError as error:
        raise ConfigError(f"{editor}: {error.strerror}", "set EDITOR to an editor that is installed") from None
    if code:
        raise ConfigError(f"{editor} exited with code {code}", f"edit {file} directly")
    for warning in load_config(path=file).warnings:
        env.console.warn(warning)

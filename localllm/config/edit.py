"""Changes one setting in the user's file, keeping its comments and order."""

from __future__ import annotations

import contextlib
import errno
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from localllm import paths
from localllm.errors import ConfigError, did_you_mean

from .keys import KEYS, TABLES, Key, SamplingConfig, find_key, nearest_key
from .load import read_toml, settings_file


def set_key(path: str, text: str, file: Path | None = None) -> Any:
    """Set a key, an alias (`aliases.NAME`) or a key binding to `text`; return the parsed value.

    Raises ConfigError for an unknown key, a wrong value, or a file that cannot be read or written; the file is then
    unchanged.
    """
    parts, key = _split(path)
    value: Any = text if key is None else key.parse(text, "command line")
    _change(file, parts, _stored(text, value))
    return value


def unset_key(path: str, file: Path | None = None) -> bool:
    """Remove a key or a whole preset (`presets.NAME`) from the file; return False when it was not there.

    Raises ConfigError as `set_key` does.
    """
    table, *names = path.split(".")
    whole = table == "presets" and len(names) == 1 and names[0]
    return _change(file, [table, *names] if whole else _split(path)[0], None)


def _change(file: Path | None, parts: list[str], value: Any) -> bool:
    """Write a value, or remove it when None; return False when there is nothing to remove."""
    import tomlkit

    file = file or settings_file()
    read_toml(file)  # the same checks and errors as when reading
    document = tomlkit.parse(file.read_text(encoding="utf-8")) if file.exists() else tomlkit.document()
    table: Any = document
    for part in parts[:-1]:
        if not isinstance(table.get(part), dict):
            if value is None:
                return False
            table[part] = tomlkit.table()
        table = table[part]
    if value is not None:
        table[parts[-1]] = value
    elif table.pop(parts[-1], None) is None:
        return False
    elif parts[0] == "presets" and len(parts) == 3 and not table.as_string().strip():  # drop a preset without keys
        del document[parts[0]][parts[1]]
    _write(file, document.as_string())
    return True


def _split(path: str) -> tuple[list[str], Key | None]:
    first, _, rest = path.partition(".")
    if first not in TABLES:
        return path.split("."), find_key(path)
    if first == "presets":
        name, _, leaf = rest.rpartition(".")
        if not name or not leaf:
            raise ConfigError(
                f"{path!r} names no setting of a preset", "localllm config set presets.NAME.temperature 0.2"
            )
        if leaf in ("system", "model"):
            return [first, name, leaf], None
        if (key := KEYS.get(f"sampling.{leaf}")) is None:
            known = {"system": None, "model": None} | dict.fromkeys(f.name for f in fields(SamplingConfig))
            raise ConfigError(
                f"unknown setting {path!r}{did_you_mean(nearest_key(leaf, known))}",
                f"a preset can set {', '.join(known)}",
                context={"key": path},
            )
        return [first, name, leaf], replace(key, path=path)
    if not rest:
        raise ConfigError(f"{path!r} is a table, not a setting", f"localllm config set {first}.NAME VALUE")
    return [first, rest], None


def _stored(text: str, value: Any) -> Any:
    """The value to store: numbers and switches as such; 32k, 30m and 32GiB as typed."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, (bool, str)):
        return value
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return text


def _write(file: Path, text: str) -> None:
    """Replace the file atomically, following links; readers see either the old text or the new."""
    target = file.resolve()
    try:
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o644
        paths.replace_file(target, text, mode=mode)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "free some space on its disk" if full else f"make {target.parent} writable"
        raise ConfigError(f"{file} cannot be written: {error.strerror}", hint) from None

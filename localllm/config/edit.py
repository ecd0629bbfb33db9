"""Changes one setting in the user's file and leaves its comments and order as they are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm import paths
from localllm.errors import ConfigError

from .keys import TABLES, Key, find_key
from .load import read_toml, settings_file

if TYPE_CHECKING:
    from tomlkit import TOMLDocument


def set_key(path: str, text: str, file: Path | None = None) -> Any:
    """Write `text` as the value of a key, an alias (`aliases.NAME`) or a key binding; returns the parsed value.

    Raises ConfigError for an unknown key, a wrong value, or a file that cannot be read or written; nothing is changed
    then.
    """
    file = file or settings_file()
    parts, key = _split(path)
    value: Any = text if key is None else key.parse(text, "given here")
    document = _document(file)
    table: Any = document
    for part in parts[:-1]:
        if not isinstance(table.get(part), dict):
            import tomlkit

            table[part] = tomlkit.table()
        table = table[part]
    table[parts[-1]] = _stored(text, value)
    _write(file, document.as_string())
    return value


def unset_key(path: str, file: Path | None = None) -> bool:
    """Remove a key from the file; False when it was not there. Raises ConfigError as `set_key` does."""
    file = file or settings_file()
    parts, _ = _split(path)
    document = _document(file)
    table: Any = document
    for part in parts[:-1]:
        table = table.get(part)
        if not isinstance(table, dict):
            return False
    if parts[-1] not in table:
        return False
    del table[parts[-1]]
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
        return [first, name, leaf], None if leaf in ("system", "model") else find_key(f"sampling.{leaf}")
    if not rest:
        raise ConfigError(f"{path!r} is a table, not a setting", f"localllm config set {first}.NAME VALUE")
    return [first, rest], None


def _stored(text: str, value: Any) -> Any:
    """What stands in the file: numbers and switches as themselves; 32k, 30m and 32GiB as they were typed."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, (bool, str)):
        return value
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            return text


def _document(file: Path) -> TOMLDocument:
    import tomlkit

    read_toml(file)  # the same checks and messages as for reading
    return tomlkit.parse(file.read_text(encoding="utf-8")) if file.exists() else tomlkit.document()


def _write(file: Path, text: str) -> None:
    """Replace the file in one step, through a link to the file it names; a reader sees the old text or the new one."""
    target = file.resolve()
    try:
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o644
        paths.replace_file(target, text, mode=mode)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}", f"make {target.parent} writable") from None

"""docs/configuration.md, made from the keys themselves: `localllm config schema` prints it, a test compares."""

from __future__ import annotations

from collections.abc import Iterable

from .keys import ENVIRONMENT, KEYS, PROJECT_FILE, SECTIONS

_HEAD = f"""# Settings

Every setting is optional. The highest of these wins: a flag, the environment variable, `{PROJECT_FILE}` in the working
folder (read only with `LOCALLLM_PROJECT=1`), `~/.config/localllm/config.toml`, the default.
`localllm config list --origin` shows each value and where it came from; `localllm config set KEY VALUE` changes one and
keeps the file's comments. A wrong value or an unknown key in a file is a warning, and the default holds.
This page is made from the program's own list: `localllm config schema > docs/configuration.md`.
"""


_OWN_TABLES = f"""## Your own tables

`[aliases]` gives models short names: `work = "Qwen/Qwen3-30B-A3B:int4"`. `[presets.NAME]` holds `system`, `model` and
any key of `[sampling]`. `[keys]` binds keys of the interface: `"chat.stop" = "escape"`.

`[mcp.servers.NAME]` is an MCP server whose tools a chat may call: `command`, `args`, `env` and `cwd` of a program, or
`url` and `headers`; also `timeout` in seconds and `disabled`. Values may name variables: `"${{GITHUB_TOKEN}}"`. The
entries are those of `mcpServers` in Claude Desktop and LM Studio; a project's file cannot have them.

## Environment

Each key above: `LOCALLLM_` + its path in capitals, as `{KEYS["engine.ctx"].env}`. And:
"""


def reference() -> str:
    """The whole page, as Markdown."""
    parts = [_HEAD]
    for section, holder in {"": None, **SECTIONS}.items():
        meaning = (holder.__doc__ or "").partition("\n")[0] if holder else ""
        parts.append(f"## [{section}]\n\n{meaning}\n" if section else "## Top of the file\n")
        keys = [(key, key.kind.show(key.default)) for key in KEYS.values() if key.section == section]
        rows = [(f"`{key.path}`", f"`{d}`" if d else "unset", key.kind.expects, key.meaning) for key, d in keys]
        parts.append(_table(("key", "default", "takes", "meaning"), rows))
    parts.append(_OWN_TABLES)
    parts.append(_table(("name", "meaning"), [(f"`{name}`", meaning) for name, meaning in ENVIRONMENT.items()]))
    return "\n".join(parts)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)

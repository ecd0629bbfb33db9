"""docs/configuration.md, generated from the keys: `localllm config schema` prints it, a test checks it."""

from __future__ import annotations

from collections.abc import Iterable

from .keys import ENVIRONMENT, KEYS, PROJECT_FILE, SECTIONS

_HEAD = f"""# Settings

Every setting is optional. In order of precedence: a flag, the environment variable, `{PROJECT_FILE}` in the working
folder (read only with `LOCALLLM_PROJECT=1`), `~/.config/localllm/config.toml`, the default.
`localllm config list --origin` shows each value and where it comes from; `localllm config set KEY VALUE` changes one
and keeps the file's comments. A wrong value or an unknown key in a file is a warning, and the default applies.
This page is generated from the program's own list: `localllm config schema > docs/configuration.md`.
"""


_OWN_TABLES = f"""## Your own tables

`[aliases]` gives models short names: `work = "Qwen/Qwen3-30B-A3B:int4"`. `[presets.NAME]` holds `system`, `model` and
any key of `[sampling]`. `[keys]` changes the key bindings of the interface: `"chat.stop" = "escape"`.

`[mcp.servers.NAME]` is an MCP server whose tools a chat may call: `command`, `args`, `env` and `cwd` of a program, or
`url` and `headers`; also `timeout` in seconds and `disabled`. Values may use variables: `"${{GITHUB_TOKEN}}"`. The
entries are the same as in `mcpServers` of Claude Desktop and LM Studio; a project file cannot have them.

## Environment

Each key above can be set by `LOCALLLM_` + its path in capitals, such as `{KEYS["engine.ctx"].env}`. Other variables:
"""


def reference() -> str:
    """The whole page as Markdown."""
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

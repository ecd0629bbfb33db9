"""Imports chats: a ChatGPT export (zip or conversations.json), an Open WebUI export, our own JSON.

The files are untrusted: sizes are bounded, broken links between messages are repaired, and unreadable chats are counted
instead of failing the import. Ids are derived from the source's, so importing twice changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import time
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.errors import ConfigError

from .records import SavedChat, SavedMessage

MAX_BYTES = 512 << 20  # per JSON file, unpacked
MAX_MESSAGES = 100_000  # per chat


@dataclass(frozen=True, slots=True)
class Imported:
    """The contents of an export."""

    source: str  # ChatGPT | Open WebUI | localllm
    chats: list[tuple[SavedChat, list[SavedMessage]]]
    num_skipped: int


def read_export(path: Path) -> Imported:
    """Read an export. Raises ConfigError for any other file."""
    chats: list[tuple[SavedChat, list[SavedMessage]]] = []
    skipped, source = 0, ""
    for entry in _entries(path):
        try:
            source, chat, messages = _read(entry)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError):
            skipped += 1
            continue
        if messages:
            chats.append((chat, messages))
        else:
            skipped += 1
    if not chats:
        raise ConfigError(
            f"{path.name} contains no readable chats",
            "pass the .zip or conversations.json of a ChatGPT export, or the .json of an Open WebUI export",
        )
    return Imported(source, chats, skipped)


def _entries(path: Path) -> Iterator[Mapping[str, Any]]:
    for text in _texts(path):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            where = f" in line {error.lineno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else ""
            raise ConfigError(f"{path.name} is not valid JSON{where}", "export it again") from None
        yield from (entry for entry in (value if isinstance(value, list) else [value]) if isinstance(entry, dict))


def _texts(path: Path) -> Iterator[bytes]:
    try:
        if not path.is_file():
            wrong = "is not a file" if path.exists() else "does not exist"
            raise ConfigError(f"{path} {wrong}", "pass an export file")
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                names = [
                    i for i in archive.infolist()
                    if i.filename.rsplit("/", 1)[-1].startswith("conversations") and i.filename.endswith(".json")
                ]  # fmt: skip
                for info in names:
                    with archive.open(info) as file:
                        yield _bounded(file.read(MAX_BYTES + 1), path)
            return
        with path.open("rb") as plain:
            yield _bounded(plain.read(MAX_BYTES + 1), path)
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        what = getattr(error, "strerror", None) or type(error).__name__
        raise ConfigError(f"{path.name} cannot be read: {what}", "export it again") from None


def _bounded(data: bytes, path: Path) -> bytes:
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path.name} is larger than {MAX_BYTES >> 20} MiB", "split the export")
    return data


def _read(entry: Mapping[str, Any]) -> tuple[str, SavedChat, list[SavedMessage]]:
    if isinstance(entry.get("mapping"), dict):
        return "ChatGPT", *_chatgpt(entry)
    if isinstance(entry.get("chat"), dict):
        return "Open WebUI", *_open_webui(entry, entry["chat"])
    if "leaf_id" in entry:
        return "localllm", *_own(entry)
    raise ValueError("unknown chat format")


# --- the three formats: each collects the fields of kept messages and the parents of all messages -------------------


def _chatgpt(entry: Mapping[str, Any]) -> tuple[SavedChat, list[SavedMessage]]:
    mapping: dict[str, Any] = entry["mapping"]
    created = _time(entry.get("create_time"))
    kept: dict[str, dict[str, Any]] = {}
    model, system = "", ""
    for key, node in list(mapping.items())[:MAX_MESSAGES]:
        message = node.get("message") if isinstance(node, dict) else None
        if not isinstance(message, dict):
            continue
        role = str((message.get("author") or {}).get("role", ""))
        content = message.get("content") or {}
        parts = content.get("parts")
        text = str(content.get("text") or "")
        if isinstance(parts, list):
            text = "\n".join(part if isinstance(part, str) else "[not text]" for part in parts)
        if role == "system":
            system = system or text
        if role not in ("user", "assistant") or not text.strip():
            continue
        model = str((message.get("metadata") or {}).get("model_slug") or model)
        when = _time(message.get("create_time"), created)
        kept[key] = {"role": role, "content": text, "model": model if role == "assistant" else "", "created": when}
    parents = {key: node.get("parent") for key, node in mapping.items() if isinstance(node, dict)}
    source = f"chatgpt:{entry.get('conversation_id') or entry.get('id') or entry.get('title')}"
    about = {"model": model, "system": system, "created": created, "updated": _time(entry.get("update_time"), created)}
    return _tree(source, kept, parents, entry.get("current_node"), entry.get("title"), about)


def _open_webui(entry: Mapping[str, Any], inner: Mapping[str, Any]) -> tuple[SavedChat, list[SavedMessage]]:
    history = inner.get("history") or {}
    nodes = history.get("messages") or {str(m["id"]): m for m in inner.get("messages") or () if "id" in m}
    created = _time(entry.get("created_at") or inner.get("timestamp"))
    kept: dict[str, dict[str, Any]] = {}
    parents: dict[str, Any] = {}
    for key, node in list(nodes.items())[:MAX_MESSAGES]:
        if not isinstance(node, dict) or node.get("role") not in ("user", "assistant"):
            continue
        content = node.get("content")
        parents[key] = node.get("parentId")
        kept[key] = {
            "role": str(node["role"]), "content": content if isinstance(content, str) else "",
            "model": str(node.get("model") or ""), "created": _time(node.get("timestamp"), created),
        }  # fmt: skip
    about = {
        "model": str((inner.get("models") or [""])[0]), "system": str((inner.get("params") or {}).get("system") or ""),
        "created": created, "updated": _time(entry.get("updated_at"), created),
    }  # fmt: skip
    title = inner.get("title") or entry.get("title")
    source = f"open-webui:{entry.get('id') or inner.get('id') or inner.get('title')}"
    return _tree(source, kept, parents, history.get("currentId"), title, about)


def _own(entry: Mapping[str, Any]) -> tuple[SavedChat, list[SavedMessage]]:
    created = _time(entry.get("created"))
    kept: dict[str, dict[str, Any]] = {}
    parents: dict[str, Any] = {}
    for node in entry["messages"][:MAX_MESSAGES]:
        key = str(node["id"])
        parents[key] = node.get("parent_id")
        if node["role"] not in ("user", "assistant", "system"):
            continue
        kept[key] = {"role": str(node["role"]), "content": str(node["content"])}
        kept[key] |= {name: str(node.get(name) or "") for name in ("reasoning", "model")}
        kept[key] |= {name: dict(node.get(name) or {}) for name in ("params", "stats")}
        kept[key]["created"] = _time(node.get("created"), created)
    about: dict[str, Any] = {name: str(entry.get(name) or "") for name in ("model", "system")}
    about |= {"created": created, "updated": _time(entry.get("updated"), created)}
    return _tree(f"localllm:{entry['id']}", kept, parents, entry.get("leaf_id"), entry.get("title"), about)


def _tree(
    source: str, kept: dict[str, dict[str, Any]], parents: Mapping[str, Any], leaf: Any, title: Any,
    about: Mapping[str, Any],
) -> tuple[SavedChat, list[SavedMessage]]:  # fmt: skip
    """Build messages with their parents; gaps left by dropped messages are bridged, cycles are cut.

    source   names the program and its chat; ids are derived from it
    about    fields of `SavedChat`
    """
    chat_id = _digest(source).hex()[:12]
    ids = {key: int.from_bytes(_digest(f"{source}\0{key}")[:8], "big") >> 2 or 1 for key in kept}
    above = _kept_parents(kept, parents)
    messages = []
    for place, (key, fields) in enumerate(kept.items()):
        parent = above[key]
        fields["created"] += place * 1e-6  # keeps the source's order where times are equal
        messages.append(SavedMessage(ids[key], chat_id, ids[parent] if parent else None, **fields))
    for _ in parents:
        if leaf is None or str(leaf) in kept:
            break
        leaf = parents.get(str(leaf))
    name = " ".join(str(title or "").split())[:200] or "Imported chat"
    chat = SavedChat(chat_id, name, **about, leaf_id=ids.get(str(leaf)), num_messages=len(messages))
    return chat, messages


def _kept_parents(kept: Mapping[str, Any], parents: Mapping[str, Any]) -> dict[str, str | None]:
    """The nearest kept ancestor of each kept message."""
    above: dict[str, str | None] = {}
    for start in kept:
        walked: dict[str, None] = {}
        at: Any = start
        while at is not None and str(at) not in above and str(at) not in walked:
            walked[str(at)] = None
            at = parents.get(str(at))
        found: str | None = None  # at the root, and where a cycle closes
        if at is not None and str(at) in above:
            found = str(at) if str(at) in kept else above[str(at)]
        for one in reversed(walked):
            above[one] = found
            if one in kept:
                found = one
    return above


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()


def _time(value: Any, otherwise: float | None = None) -> float:
    """Seconds since the epoch; some programs store milliseconds or nanoseconds."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e23:
        return time.time() if otherwise is None else otherwise
    seconds = float(value)
    while seconds > 1e11:
        seconds /= 1000
    return seconds

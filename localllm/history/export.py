"""A chat as Markdown, JSON or one HTML page: the visible branch, or in JSON the whole tree.

The HTML runs and loads nothing: a model's raw HTML is shown as text, its images become links, and links may only be
http, https or mailto. Attached pictures are embedded in the page.
"""

from __future__ import annotations

import html
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from string import Template
from typing import Any

from localllm.terminal import counted

from .formulas import keep_formulas
from .records import PICTURE_URL, SavedChat, SavedMessage, active_path

FORMATS = ("md", "json", "html")
_PLAIN = re.compile(r"[\[\]\s]")
_NAMES = {"user": "You", "assistant": "Assistant", "system": "System"}


def as_markdown(
    chat: SavedChat, messages: Sequence[SavedMessage], *, reasoning: bool = False, pictures: bool = True
) -> str:
    """The visible branch, with one heading per message; pictures as data: URLs, or by name."""
    path = active_path(messages, chat.leaf_id)
    parts = [f"# {_title(chat)}\n\n{_meta(chat, path, messages)}\n"]
    if chat.system:
        parts.append(f"## System\n\n{chat.system}\n")
    for message in path:
        parts.append(f"## {_NAMES.get(message.role, message.role)}\n")
        for name, url in _attached(message):
            shown = f"![{_PLAIN.sub('_', name)}]({url})" if url and pictures else f"Attached: {name}"
            parts.append(f"{shown}\n")
        for said, calls in _rounds(message):
            parts += [f"{said}\n"] if said else []
            parts += [f"{head}\n\n{_fenced(arguments)}\n\n{_fenced(result)}\n" for head, arguments, result in calls]
        if reasoning and message.reasoning:
            parts.append("\n".join(f"> {line}" for line in message.reasoning.strip().split("\n")) + "\n")
        parts.append(message.content.rstrip() + "\n")
    return "\n".join(parts)


def as_json(chat: SavedChat, messages: Sequence[SavedMessage]) -> dict[str, Any]:
    """The whole tree, as written by `localllm logs export --format json`."""
    rows = [_values(message, "chat_id") for message in messages]
    return _values(chat, "num_messages") | {"messages": rows}


def _values(record: SavedChat | SavedMessage, left_out: str) -> dict[str, Any]:
    values = {field.name: getattr(record, field.name) for field in fields(record) if field.name != left_out}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}


def as_html(chat: SavedChat, messages: Sequence[SavedMessage]) -> str:
    """One page that loads nothing."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).disable("image")
    keep_formulas(parser)
    parser.validateLink = lambda url: url.strip().lower().startswith(("http://", "https://", "mailto:", "#"))  # type: ignore[method-assign]
    path, body = active_path(messages, chat.leaf_id), []
    if chat.system:
        body.append(f'<section class="system"><p class="meta">System</p>{parser.render(chat.system)}</section>')
    for message in path:
        thought = f'<div class="text">{html.escape(message.reasoning)}</div>'
        parts = [
            f'<section class="{message.role if message.role in _NAMES else "other"}">',
            f'<p class="meta">{html.escape(_NAMES.get(message.role, message.role))}</p>',
            *(
                f'<p class="meta">Attached: {html.escape(name)}</p>' + (f'<img alt="" src="{url}">' if url else "")
                for name, url in _attached(message)
            ),
            f"<details><summary>Thinking</summary>{thought}</details>" if message.reasoning else "",
            *(_round(parser.render(said), calls) for said, calls in _rounds(message)),
            f"{parser.render(message.content)}</section>",
        ]
        body.append("".join(parts))
    page = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return page.substitute(
        title=html.escape(_title(chat)), meta=html.escape(_meta(chat, path, messages)), body="\n".join(body)
    )


def render(chat: SavedChat, messages: Sequence[SavedMessage], kind: str) -> str:
    """Render in one of FORMATS."""
    if kind == "json":
        return json.dumps(as_json(chat, messages), ensure_ascii=False, indent=2) + "\n"
    return as_html(chat, messages) if kind == "html" else as_markdown(chat, messages)


def _title(chat: SavedChat) -> str:
    return " ".join(chat.title.split()) or "Chat"


def _meta(chat: SavedChat, path: Sequence[SavedMessage], messages: Sequence[SavedMessage]) -> str:
    """Date, model and number of messages; if there are other branches, also the total number."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(chat.created))
    here, everywhere = (sum(one.role != "system" for one in some) for some in (path, messages))
    how_much = counted(here, "message") if here == everywhere else f"{here} of {counted(everywhere, 'message')}"
    return " · ".join(part for part in (when, chat.model, how_much) if part)


def _rounds(message: SavedMessage) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Yield the text before each set of tool calls, and for each call (heading, arguments, result)."""
    rounds = message.params.get("rounds")
    for one in rounds if isinstance(rounds, list) else ():
        calls = one.get("calls") if isinstance(one, dict) else None
        found = [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
        heads = [f"Tool call: {call.get('name', '')}{' (failed)' if call.get('failed') else ''}" for call in found]
        texts = [(str(call.get("arguments") or ""), str(call.get("result") or "")) for call in found]
        if found:
            yield str(one.get("text") or "").strip(), [(head, *text) for head, text in zip(heads, texts, strict=True)]


def _fenced(text: str) -> str:
    """A code block whose fence is longer than any in the text."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text.rstrip()}\n{fence}"


def _round(said: str, calls: Sequence[tuple[str, str, str]]) -> str:
    """A round as HTML; `said` is HTML already."""
    texts = [tuple(map(html.escape, call)) for call in calls]
    return said + "".join(
        f"<details><summary>{head}</summary><pre>{arguments}</pre><pre>{result}</pre></details>"
        for head, arguments, result in texts
    )


def _attached(message: SavedMessage) -> Iterator[tuple[str, str]]:
    """(name, data: URL of a picture or "") of each attachment of a message."""
    files = message.params.get("attachments")
    for one in files if isinstance(files, list) else ():
        if isinstance(one, dict):
            url = one.get("image")
            yield str(one.get("name", "")), url if isinstance(url, str) and PICTURE_URL.fullmatch(url) else ""

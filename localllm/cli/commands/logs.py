"""Talk: Search, show and export saved chats"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from localllm.cli.chats import find
from localllm.cli.frame.command import Env, command
from localllm.cli.frame.console import counted, iso, picked
from localllm.errors import ConfigError
from localllm.terminal import clean, clean_line, fit

if TYPE_CHECKING:
    from localllm.history.records import SavedChat
    from localllm.history.store import History

ACTIONS = ("list", "search", "show", "export", "import", "rm")
SHOWN_ID = 6


@command(
    "localllm logs",
    'localllm logs search "cuda graph"',
    "localllm logs export 7f3a -o fix.md",
    "localllm logs import conversations.json",
)
def logs(
    env: Env,
    action: Annotated[str, Argument(metavar="list|search|show|export|import|rm", help="What to do.")] = "list",
    what: Annotated[
        list[str] | None, Argument(metavar="[ID|WORDS|FILE...]", help="Which chats, or what to look for.")
    ] = None,
    limit: Annotated[int, Option("-n", "--limit", metavar="N", min=1, help="Rows at most.")] = 20,
    form: Annotated[str, Option("--format", metavar="md|json|html", help="Of an export.")] = "md",
    output: Annotated[
        Path | None, Option("-o", "--output", metavar="FILE", help="Where to write; - is stdout.")
    ] = None,
    reasoning: Annotated[bool, Option("--reasoning", help="Show the thinking too.")] = False,
) -> int:
    """List, search, show, export and remove saved chats; import those of ChatGPT and Open WebUI.

    A chat is named by the beginning of its id; `last` is the one changed last.
    """
    from localllm.history.store import History

    if action not in ACTIONS:
        raise ConfigError(f"logs {action}: there is {', '.join(ACTIONS)}", "localllm logs list")
    words = list(what or [])
    if action != "list" and not words:
        raise ConfigError(f"logs {action} needs {'words' if action == 'search' else 'an id'}", "localllm logs list")
    with History() as history:
        if history.notice:
            env.console.warn(history.notice)
        if action == "list":
            return _list(env, history, " ".join(words), limit)
        if action == "search":
            return _search(env, history, " ".join(words), limit)
        if action == "import":
            return _import(env, history, [Path(word) for word in words])
        chats = [find(history, word) for word in words]
        if action == "show":
            return _show(env, history, chats, reasoning)
        if action == "rm":
            return _remove(env, history, chats)
        return _export(env, history, chats, form, output, reasoning)


def row(chat: SavedChat) -> dict[str, Any]:
    """A chat in JSON."""
    times = {"created": iso(chat.created), "updated": iso(chat.updated)}
    return picked(chat, "id title model") | times | {"messages": chat.num_messages}


def _list(env: Env, history: History, query: str, limit: int) -> int:
    chats = history.chats(limit, query)
    console = env.console
    if console.as_json:
        console.emit("logs/1", {"chats": [row(chat) for chat in chats]})
        return 0
    if not chats:
        console.say("no saved chats yet: localllm chat")
        return 0
    cells = [
        (chat.id[:SHOWN_ID], _when(chat.updated), fit(clean_line(chat.title) or "untitled", 60), str(chat.num_messages))
        + (fit(clean_line(chat.model), 30),)
        for chat in chats
    ]
    console.table(("ID", "CHANGED", "TITLE", "MESSAGES", "MODEL"), cells, right=("MESSAGES",))
    console.say("Continue: localllm chat -c      Show: localllm logs show ID")
    return 0


def _search(env: Env, history: History, query: str, limit: int) -> int:
    hits = history.search(query, limit)
    console = env.console
    if console.as_json:
        rows = [
            {
                "chat_id": hit.chat_id,
                "title": hit.title,
                "role": hit.role,
                "snippet": hit.snippet.replace("\x02", "").replace("\x03", ""),
                "created": iso(hit.created),
            }
            for hit in hits
        ]
        console.emit("logs/1", {"query": query, "hits": rows})
        return 0
    if not hits:
        console.say(f"nothing found for {clean_line(query)}")
        return 0
    for hit in hits:
        head = f"{hit.chat_id[:SHOWN_ID]}  {_when(hit.created)}  {fit(clean_line(hit.title), 60)}"
        console.line(console.style(head, "dim"))
        console.line(f"  {'❯' if hit.role == 'user' else ' '} {_marked(env, hit.snippet)}")
    return 0


def _marked(env: Env, snippet: str) -> str:
    """The words that were found in bold."""
    parts = []
    for number, piece in enumerate(snippet.split("\x02")):
        found, _, rest = piece.partition("\x03") if number else ("", "", piece)
        parts.append(env.console.style(_flat(found), "bold") + _flat(rest))
    return "".join(parts).strip()


def _flat(text: str) -> str:
    return clean(text).replace("\n", " ")


def _show(env: Env, history: History, chats: list[SavedChat], reasoning: bool) -> int:
    from localllm.history.export import as_json, as_markdown

    for chat in chats:
        messages = history.messages(chat.id)
        if env.console.as_json:
            env.console.emit("logs/1", {"chat": as_json(chat, messages)})
        else:
            env.console.answer(as_markdown(chat, messages, reasoning=reasoning))
    return 0


def _export(env: Env, history: History, chats: list[SavedChat], form: str, output: Path | None, reasoning: bool) -> int:
    from localllm.history.export import FORMATS, as_markdown, render

    if form not in FORMATS:
        raise ConfigError(f"--format is {form!r}, it can be {', '.join(FORMATS)}", "--format md")
    pages = []
    for chat in chats:
        messages = history.messages(chat.id)
        page = as_markdown(chat, messages, reasoning=reasoning) if form == "md" else render(chat, messages, form)
        pages.append(page)
    text = "\n".join(pages)
    if output is None or str(output) == "-":
        env.console.answer(text)
        return 0
    target = output.expanduser()
    if target.exists() and not env.options.yes:
        raise ConfigError(f"{target} is there already", f"choose another name, or pass -y to replace {target}")
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}", "choose another place") from None
    env.console.say(f"written to {clean_line(str(target))}")
    return 0


def _import(env: Env, history: History, files: list[Path]) -> int:
    from localllm.history.importing import read_export

    for file in files:
        found = read_export(file.expanduser())
        for chat, messages in found.chats:
            history.save(chat, messages)
        skipped = f", {found.num_skipped} could not be read" if found.num_skipped else ""
        env.console.say(f"{counted(len(found.chats), 'chat')} from {found.source}{skipped}")
    env.console.say("Next: localllm logs list")
    return 0


def _remove(env: Env, history: History, chats: list[SavedChat]) -> int:
    for chat in chats:
        title = fit(clean_line(chat.title) or "untitled", 60)
        if not env.console.confirm(f"Remove “{title}” ({chat.num_messages} messages)?", default=False):
            env.console.say("kept")
            continue
        history.remove(chat.id)
        env.console.say(f"removed “{title}”")
    return 0


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))

"""Talk: Search, show and export saved chats"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from localllm.cli.frame.command import Env, command
from localllm.cli.frame.console import columns, iso, one_of, picked
from localllm.errors import ConfigError
from localllm.terminal import clean, clean_line, counted, fit

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
    limit: Annotated[int, Option("-n", "--limit", metavar="N", min=1, help="Maximum number of rows.")] = 20,
    form: Annotated[str, Option("--format", metavar="md|json|html", help="Export format.")] = "md",
    output: Annotated[Path | None, Option("-o", "--output", metavar="FILE", help="File to write; - is stdout.")] = None,
    reasoning: Annotated[bool, Option("--reasoning", help="Include the reasoning.")] = False,
) -> int:
    """List, search, show, export and remove saved chats; import chats from ChatGPT and Open WebUI.

    Refer to a chat by the first characters of its id; `last` is the one changed last.
    """
    from localllm.history.store import History

    if action not in ACTIONS:
        raise ConfigError(f"logs {action}: the action must be one of {', '.join(ACTIONS)}", "localllm logs list")
    words = list(what or [])
    if action != "list" and not any(word.strip() for word in words):
        needed = {"search": "words", "import": "a file"}.get(action, "an id")
        raise ConfigError(f"logs {action} needs {needed}", "localllm logs -h")
    with History() as history:
        if history.notice:
            env.console.warn(history.notice)
        chats = [history.find(word) for word in words] if action in ("show", "export", "rm") else []
        if action == "list":
            _list(env, history, " ".join(words), limit)
        elif action == "search":
            _search(env, history, " ".join(words), limit)
        elif action == "import":
            _import(env, history, words)
        elif action == "show":
            _show(env, history, chats, reasoning)
        elif action == "rm":
            _remove(env, history, chats)
        else:
            _export(env, history, chats, form, output, reasoning)
    return 0


def row(chat: SavedChat) -> dict[str, Any]:
    """A chat as JSON."""
    times = {"created": iso(chat.created), "updated": iso(chat.updated)}
    return picked(chat, "id title model") | times | {"messages": chat.num_messages}


def _list(env: Env, history: History, query: str, limit: int) -> None:
    chats = history.chats(limit, query)
    console = env.console
    if console.emit("logs/1", {"chats": [row(chat) for chat in chats]}):
        return
    if not chats:
        console.say(f"no chat matches {clean_line(query)}" if query else "no saved chats yet: localllm chat")
        return
    room = max(20, columns(console.out_tty) - 27)  # beside id and time
    cells = [
        (chat.id[:SHOWN_ID], _when(chat.updated), fit(_title(chat), room), str(chat.num_messages), _model(chat))
        for chat in chats
    ]
    head = ("ID", "CHANGED", "TITLE", "MESSAGES", "MODEL")
    console.table(head, cells, right=("MESSAGES",), spare=("MODEL", "MESSAGES"))
    console.say("Continue: localllm chat -c      Show: localllm logs show ID")


def _title(chat: SavedChat) -> str:
    return fit(clean_line(chat.title) or "untitled", 60)


def _model(chat: SavedChat) -> str:
    return fit(clean_line(chat.model), 30)


def _search(env: Env, history: History, query: str, limit: int) -> None:
    hits = history.search(query, limit)
    console = env.console
    rows = [
        picked(hit, "chat_id title role")
        | {"snippet": re.sub("[\x02\x03]", "", hit.snippet), "created": iso(hit.created)}
        for hit in hits
    ]
    if console.emit("logs/1", {"query": query, "hits": rows}):
        return
    if not hits:
        console.say(f"no message matches {clean_line(query)}")
    for hit in hits:
        head = f"{hit.chat_id[:SHOWN_ID]}  {_when(hit.created)}  {fit(clean_line(hit.title), 60)}"
        console.line(console.style(head, "dim"))
        console.line(f"  {'❯' if hit.role == 'user' else ' '} {_marked(env, hit.snippet)}")


def _marked(env: Env, snippet: str) -> str:
    """The snippet with the matching words in bold."""
    parts = (clean(part).replace("\n", " ") for part in re.split("[\x02\x03]", snippet))
    return "".join(env.console.style(part, "bold") if n % 2 else part for n, part in enumerate(parts)).strip()


def _show(env: Env, history: History, chats: list[SavedChat], reasoning: bool) -> None:
    from localllm.history.export import as_json, as_markdown

    if env.console.as_json and len(chats) > 1:
        raise ConfigError("--json shows one chat at a time", "localllm logs show ID --json")
    for chat in chats:
        messages = history.messages(chat.id)
        if not env.console.emit("logs/1", {"chat": as_json(chat, messages)}):
            env.console.answer(as_markdown(chat, messages, reasoning=reasoning, pictures=False))


def _export(
    env: Env, history: History, chats: list[SavedChat], form: str, output: Path | None, reasoning: bool
) -> None:
    from localllm.history.export import FORMATS, as_markdown, render

    one_of("--format", form, FORMATS, "--format md")
    to_stdout = output is None or str(output) == "-"
    if form != "md" and len(chats) > 1:
        raise ConfigError(f"--format {form} exports one chat at a time", "export them one by one, or use --format md")
    if env.console.as_json and to_stdout:
        raise ConfigError("the export and --json both write to stdout", "`localllm logs show ID --json`, or -o FILE")
    pages = []
    for chat in chats:
        messages = history.messages(chat.id)
        page = as_markdown(chat, messages, reasoning=reasoning) if form == "md" else render(chat, messages, form)
        pages.append(page)
    text = "\n".join(pages)
    if output is None or to_stdout:
        env.console.answer(text)
        return
    target = output.expanduser()
    if target.is_dir():
        raise ConfigError(f"{target} is a folder", "pass the name of a file")
    if target.exists() and not env.options.yes:
        raise ConfigError(f"{target} already exists", f"choose another name, or pass -y to replace {target}")
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}", "choose another path") from None
    if not env.console.emit("logs/1", {"output": str(target)}):
        env.console.say(f"wrote {clean_line(str(target))}")


def _import(env: Env, history: History, files: list[str]) -> None:
    from localllm.history.importing import read_export

    imported = 0
    for file in files:
        found = read_export(Path(file).expanduser())
        imported += len(found.chats)
        for chat, messages in found.chats:
            history.save(chat, messages)
        skipped = f", {found.num_skipped} unreadable" if found.num_skipped else ""
        env.console.say(f"{counted(len(found.chats), 'chat')} from {found.source}{skipped}")
    if not env.console.emit("logs/1", {"imported": imported}):
        env.console.say("Next: localllm logs list")


def _remove(env: Env, history: History, chats: list[SavedChat]) -> None:
    removed = []
    for chat in {chat.id: chat for chat in chats}.values():
        title = _title(chat)
        if not env.console.confirm(f"Remove “{title}” ({counted(chat.num_messages, 'message')})?", default=False):
            env.console.say("kept")
            continue
        history.remove(chat.id)
        removed.append(chat.id)
        env.console.say(f"removed “{title}”")
    env.console.emit("logs/1", {"removed": removed})


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))

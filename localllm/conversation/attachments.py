"""Attachments of a message: the named files and folders, and how much of them fits in the window."""

from __future__ import annotations

import json
import mimetypes
import os
import shlex
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from localllm.conversation.documents import PICTURES, Document, num_tokens, read_document, select
from localllm.conversation.tree import Conversation, Exchange
from localllm.errors import ConfigError
from localllm.interface import Facts
from localllm.request import Message, ToolUse, num_images, text_of
from localllm.terminal import clean_line, tokens_short

MAX_FILES = 20
MIN_ROOM = 256  # tokens: with less room the user is asked what to leave out
ANSWER_TOKENS = 1024  # reserved for an answer without a stated length, if the window is large
IMAGE_TOKENS = 1024  # per picture, when the model does not say
TEMPLATE_TOKENS = 128  # reserved for what the chat template adds to one message,
TURN_TOKENS = 6  # and to each earlier message


def read_documents(typed: str) -> list[Document]:
    """Read what `/attach a.txt "b c.pdf" *.py src/` names, with a shell's quotes and wildcards. Raises ConfigError."""
    import glob

    try:
        words = shlex.split(typed)
    except ValueError:
        words = typed.split()
    names = [name for word in words for name in sorted(glob.glob(os.path.expanduser(word))) or [word]]
    if not names:
        raise ConfigError("/attach needs the path of a file or folder", "/attach notes.txt")
    if len(names) > MAX_FILES:
        raise ConfigError(f"{len(names)} files; the limit per message is {MAX_FILES}", "attach fewer, or their folder")
    return [read_document(name) for name in names]


def mentioned(text: str) -> list[Document]:
    """Read what `@path` in a message names. Raises ConfigError for a path that exists but cannot be attached."""
    return [read_document(word) for word in _words(text) if _is_there(word)]


def missing(text: str) -> str:
    """A notice about what `@path` in a message seems to name, by its ending, and that is not there; "" for none."""
    known = mimetypes.MimeTypes()  # without the system's table, where .com is a program
    names = [clean_line(word) for word in _words(text) if known.guess_type(word)[0] and not _is_there(word)]
    if not names:
        return ""
    words = "no such file: {}; the name is sent as text" if len(names) == 1 else "no such files: {}; sent as text"
    return words.format(", ".join(names[:MAX_FILES]))


def _words(text: str) -> list[str]:
    words = (word[1:].rstrip(".,;:!?)\"'") for word in text.split() if word.startswith("@"))
    return [word for word in dict.fromkeys(words) if word]


def dropped(pasted: str) -> str:
    """The picture whose path was pasted, as terminals do for a dropped file; "" for any other text."""
    try:
        words = shlex.split(pasted) if len(pasted) < 4096 and "\n" not in pasted.strip() else []
    except ValueError:
        return ""
    path = urllib.parse.unquote(words[0].removeprefix("file://")) if words and "://" in words[0] else "".join(words[:1])
    return path if len(words) == 1 and path.lower().endswith(PICTURES) and _is_there(path) else ""


def refuse_pictures(documents: Iterable[Document], facts: Facts) -> None:
    """Raise ConfigError for a picture when the model is known to read text only."""
    found = [one for one in documents if one.picture]
    if found and facts.model and (facts.image_tokens == 0 or not facts.has_chat_template):
        raise ConfigError(
            f"{clean_line(found[0].name)} is an image, and {clean_line(facts.model)} reads text only",
            "use a model with an image encoder (Gemma 3 and 4, Qwen3.5), or remove the image",
        )


def _is_there(word: str) -> bool:
    try:
        path = Path(word).expanduser()
        return path.is_file() or path.is_dir()
    except (OSError, ValueError, RuntimeError):  # too long for a path; an unknown user's home
        return False


def room_for(messages: Sequence[Message], facts: Facts, max_tokens: int | None, count: Callable[[str], int]) -> int:
    """Tokens left in the window for documents, next to these messages and an answer."""
    ctx, pictures = facts.ctx, num_images(messages) * picture_tokens(facts)
    used = pictures + sum(num_tokens(text_of(message.get("content")), count) for message in messages)
    return ctx - used - reserved(len(messages), ctx, max_tokens)


def reserved(num_messages: int, ctx: int, max_tokens: int | None) -> int:
    """Tokens reserved for an answer and for what the chat template adds."""
    template = min(TEMPLATE_TOKENS, ctx // 8) + TURN_TOKENS * max(0, num_messages - 1)
    return min(max_tokens or ANSWER_TOKENS, ctx // 4) + template


def picture_tokens(facts: Facts) -> int:
    """Maximum tokens of a picture; an estimate when the model does not say."""
    return IMAGE_TOKENS if facts.image_tokens is None else facts.image_tokens


def room_in(
    talk: Conversation, question: Exchange, facts: Facts, count: Callable[[str], int], tools: ToolUse | None
) -> int:
    """`room_for` a question in a conversation, including its tools."""
    asked = question.user + (json.dumps(tools.tools) if tools is not None else "")
    messages = [*talk.messages_above(question), Message(role="user", content=asked)]
    return room_for(messages, facts, talk.sampling.get("max_tokens"), count)


def fitting(
    documents: Sequence[Document], question: str, room: int, facts: Facts, count: Callable[[str], int]
) -> tuple[tuple[Document, ...] | None, list[str]]:
    """Choose what to send of the documents, and what to say about it first. Pictures are sent whole.

    Without any room the choice is None, meaning everything: the engine refuses it, and the user is asked what to drop.
    """
    said = [f"{', '.join(clean_line(one.name) for one in documents)}: {budget(documents, room, facts, count)}"]
    said += [f"{clean_line(one.name)}: {note}" for one in documents for note in one.notes]
    pictures = tuple(one for one in documents if one.picture)
    texts = [one for one in documents if not one.picture]
    room -= len(pictures) * picture_tokens(facts)
    if room < MIN_ROOM or not texts:
        return None, said
    chosen = select(texts, question, room, count)
    return (*pictures, *chosen.documents), [*said, *chosen.notices]


def fit(
    talk: Conversation, exchange: Exchange, facts: Facts, count: Callable[[str], int], tools: ToolUse | None = None
) -> list[str]:
    """Choose what to send of a question's documents; returns what to say about it. Takes a while."""
    if not exchange.attachments or not facts.ctx or exchange.sent is not None:
        return []
    room = room_in(talk, exchange, facts, count, tools)
    exchange.sent, said = fitting(exchange.attachments, exchange.user, room, facts, count)
    return said


def budget(documents: Sequence[Document], room: int, facts: Facts, count: Callable[[str], int]) -> str:
    """'310k tokens, 27k free: sending the parts that match the question best'; without `room`, the first number."""
    texts = [one for one in documents if not one.picture]
    pictures = (len(documents) - len(texts)) * picture_tokens(facts)
    total = pictures + sum(num_tokens(document.block, count) for document in texts)
    if not room:
        return f"{tokens_short(total)} tokens"
    chooses = texts and room - pictures >= MIN_ROOM and room < total
    rest = ": sending the parts that match the question best" if chooses else ""
    return f"{tokens_short(total)} tokens, {tokens_short(max(0, room))} free{rest}"


def matching_files(prefix: str, limit: int = 8) -> list[str]:
    """Paths that start as typed, folders with a trailing slash; hidden ones only when a dot was typed."""
    folder, _, start = prefix.rpartition("/")
    base = Path(folder + "/" if prefix.startswith("/") and not folder else folder or ".").expanduser()
    found = []
    try:
        with os.scandir(base) as entries:
            for entry in entries:
                if not entry.name.lower().startswith(start.lower()) or (entry.name.startswith(".") and not start):
                    continue
                if entry.name.isprintable():
                    found.append((f"{folder}/" if "/" in prefix else "") + entry.name + ("/" if entry.is_dir() else ""))
                if len(found) >= 500:
                    break
    except OSError:
        return []
    return sorted(found, key=str.casefold)[:limit]

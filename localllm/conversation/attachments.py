"""What goes with a message: the files and folders that were named, and as much of them as the window has room for."""

from __future__ import annotations

import json
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
MIN_ROOM = 256  # tokens: with less the message waits for an answer to the question what to leave out
ANSWER_TOKENS = 1024  # kept for an answer of no stated length, where the window is large
IMAGE_TOKENS = 1024  # of a picture, where the model does not say
TEMPLATE_TOKENS = 128  # kept for what the chat template adds to one message,
TURN_TOKENS = 6  # and to each that comes before it


def read_documents(typed: str) -> list[Document]:
    """What `/attach a.txt "b c.pdf" *.py src/` names, quotes and wildcards as in a shell. Raises ConfigError."""
    import glob

    try:
        words = shlex.split(typed)
    except ValueError:
        words = typed.split()
    names = [name for word in words for name in sorted(glob.glob(os.path.expanduser(word))) or [word]]
    if not names:
        raise ConfigError("/attach needs the path of a file or a folder", "/attach notes.txt")
    if len(names) > MAX_FILES:
        raise ConfigError(f"{len(names)} files; a message takes at most {MAX_FILES}", "name fewer, or their folder")
    return [read_document(name) for name in names]


def mentioned(text: str) -> list[Document]:
    """What `@path` in a message names. Raises ConfigError for what is there and cannot be attached."""
    words = [word[1:].rstrip(".,;:!?)\"'") for word in text.split() if word.startswith("@")]
    return [read_document(word) for word in dict.fromkeys(words) if word and _is_there(word)]


def dropped(pasted: str) -> str:
    """The picture whose path was pasted, as terminals do it for a file that is dropped on them; "" for other texts."""
    try:
        words = shlex.split(pasted) if len(pasted) < 4096 and "\n" not in pasted.strip() else []
    except ValueError:
        return ""
    path = urllib.parse.unquote(words[0].removeprefix("file://")) if words and "://" in words[0] else "".join(words[:1])
    return path if len(words) == 1 and path.lower().endswith(PICTURES) and _is_there(path) else ""


def refuse_pictures(documents: Iterable[Document], facts: Facts) -> None:
    """Raise ConfigError for a picture to a model that is known to read text only."""
    found = [one for one in documents if one.picture]
    if found and facts.model and (facts.image_tokens == 0 or not facts.has_chat_template):
        raise ConfigError(
            f"{clean_line(found[0].name)} is a picture, and {clean_line(facts.model)} reads text only",
            "use a model with an image tower in safetensors files (Gemma 3 and 4, Qwen3.5), or leave the picture out",
        )


def _is_there(word: str) -> bool:
    try:
        path = Path(word).expanduser()
        return path.is_file() or path.is_dir()
    except (OSError, ValueError, RuntimeError):  # too long for a path; the home of nobody
        return False


def room_for(messages: Sequence[Message], facts: Facts, max_tokens: int | None, count: Callable[[str], int]) -> int:
    """Tokens of the window that documents may take beside these messages and room for an answer."""
    ctx, pictures = facts.ctx, num_images(messages) * picture_tokens(facts)
    used = pictures + sum(num_tokens(text_of(message.get("content")), count) for message in messages)
    return ctx - used - reserved(len(messages), ctx, max_tokens)


def reserved(num_messages: int, ctx: int, max_tokens: int | None) -> int:
    """Tokens of the window that are kept for an answer, and for what the chat template adds."""
    template = min(TEMPLATE_TOKENS, ctx // 8) + TURN_TOKENS * max(0, num_messages - 1)
    return min(max_tokens or ANSWER_TOKENS, ctx // 4) + template


def picture_tokens(facts: Facts) -> int:
    """Tokens that a picture takes at most; an estimate where the model does not say."""
    return IMAGE_TOKENS if facts.image_tokens is None else facts.image_tokens


def room_in(
    talk: Conversation, question: Exchange, facts: Facts, count: Callable[[str], int], tools: ToolUse | None
) -> int:
    """The same for a question in a conversation, with the tools that go with it."""
    asked = question.user + (json.dumps(tools.tools) if tools is not None else "")
    messages = [*talk.messages_above(question), Message(role="user", content=asked)]
    return room_for(messages, facts, talk.sampling.get("max_tokens"), count)


def fitting(
    documents: Sequence[Document], question: str, room: int, facts: Facts, count: Callable[[str], int]
) -> tuple[tuple[Document, ...] | None, list[str]]:
    """What is sent of the documents, and what to say about it before that. Pictures are sent whole.

    Without any room it is None, all of them: the engine refuses that, and the user is asked what to leave out.
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
    """Choose what is sent of a question's documents; returns what to say about it. Takes a while."""
    if not exchange.attachments or not facts.ctx or exchange.sent is not None:
        return []
    room = room_in(talk, exchange, facts, count, tools)
    exchange.sent, said = fitting(exchange.attachments, exchange.user, room, facts, count)
    return said


def budget(documents: Sequence[Document], room: int, facts: Facts, count: Callable[[str], int]) -> str:
    """'310k tokens, 27k free: the parts that suit the question best are sent'; without `room` the first number."""
    texts = [one for one in documents if not one.picture]
    pictures = (len(documents) - len(texts)) * picture_tokens(facts)
    total = pictures + sum(num_tokens(document.block, count) for document in texts)
    if not room:
        return f"{tokens_short(total)} tokens"
    chooses = texts and room - pictures >= MIN_ROOM and room < total
    rest = ": the parts that suit the question best are sent" if chooses else ""
    return f"{tokens_short(total)} tokens, {tokens_short(max(0, room))} free{rest}"


def matching_files(prefix: str, limit: int = 8) -> list[str]:
    """Paths that begin as typed, folders with a slash at the end; hidden ones only when asked for."""
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

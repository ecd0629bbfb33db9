"""What `run` does with a prompt besides sending it: constrain the answer, cut long input, save both as a chat."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.cli.frame.options import bounded, read_text
from localllm.conversation.answer import Answer
from localllm.errors import ConfigError, ConstraintUnmet, ContextTooLong
from localllm.request import Constraint, Message, text_of
from localllm.terminal import clean_line

from .session import Sampling
from .start import load_chat

if TYPE_CHECKING:
    from localllm.conversation.documents import Document
    from localllm.conversation.tools import Toolbox
    from localllm.conversation.tree import Conversation, Exchange
    from localllm.history.records import SavedMessage

TRUNCATE = ("never", "head", "middle")


def constraint_of(schema: str | None, grammar: Path | None) -> Constraint | None:
    """Parse `--schema FILE|JSON` or `--grammar FILE`. Raises ConfigError; the engine checks if it can be enforced."""
    if schema is not None and grammar is not None:
        raise ConfigError("--schema and --grammar cannot be combined", "drop one of them")
    if grammar is not None:
        text = read_text(grammar, "--grammar")
        if not text.strip():
            raise ConfigError(f"--grammar: {clean_line(str(grammar))} is empty", "write a Lark or GBNF grammar into it")
        return Constraint("grammar", text, param="--grammar")
    if schema is None:
        return None
    inline = schema.lstrip().startswith(("{", "["))
    text = schema if inline else read_text(Path(schema), "--schema")
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--schema is not valid JSON: {error}", "pass a file, or JSON that starts with {") from None
    if value is not True and not isinstance(value, dict):
        raise ConfigError(
            f"--schema must be a JSON object, not {type(value).__name__}",
            'pass a schema such as \'{"type": "object"}\'',
        )
    return Constraint("json_schema", value, param="--schema")


@dataclass
class Job:
    """One prompt, and how to show its answer."""

    messages: list[Message]
    sampling: Sampling
    constraint: Constraint | None = None
    truncate: str = "never"
    documents: tuple[Document, ...] = ()  # put before the question, as far as they fit
    extract: str | None = None  # language of the code block to extract; "" for any
    tools: Toolbox | None = None  # tools that may be called without asking
    chat: KeptChat | None = None  # where question and answer are saved
    resumed: str = ""  # the model of the resumed chat
    template: dict[str, Any] = field(default_factory=dict)  # chat template variables about reasoning
    place: str = "auto"  # a running server that has the model, `off`, or a server's address
    stream: bool = False
    show_thinking: bool = False
    stats: bool = False
    trace: bool = False  # report how long each phase of the start took
    markdown: bool = False
    strict: bool = False


def messages_of(system: str, text: str) -> list[Message]:
    """A conversation of one question."""
    return [*([Message(role="system", content=system)] if system else []), Message(role="user", content=text)]


def gather_prompt(words: Sequence[str], files: Sequence[Path]) -> str:
    """Join standard input, files and words with blank lines. Raises ConfigError when all are empty."""
    parts = [piped_text(), *map(_file_text, files)]
    if list(words) != ["-"]:
        parts.append(" ".join(words))
    text = "\n\n".join(part.rstrip("\n") for part in parts if part.strip())
    if not text:
        hint = "`localllm run MODEL 'Hello'` answers one prompt; in a terminal, `localllm chat MODEL` starts a chat"
        raise ConfigError("no prompt, neither as an argument nor on standard input", hint)
    return text


def _file_text(path: Path) -> str:
    text = read_text(path, "-f")
    if "\0" in text[:8192] or text.startswith("%PDF-"):
        raise ConfigError(f"-f: {clean_line(str(path))} is not text", "pass a text file")
    return text


def piped_text() -> str:
    """Text piped in; "" from a terminal or a closed stream. Raises ConfigError for too much."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return ""
    binary = getattr(sys.stdin, "buffer", None)
    text = bounded(binary, "standard input") if binary is not None else sys.stdin.read()
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else text


def shortened(
    messages: Sequence[Message],
    ctx: int,
    max_tokens: int | None,
    side: str,
    count: Callable[[str], int],
    pictures: int = 0,
) -> tuple[list[Message], int, int]:
    """Cut the last message so that the conversation and an answer fit in `ctx`; return its tokens before and after.

    pictures  tokens of the pictures in the messages
    side      head drops the beginning, middle the middle: the words of the command line come last, and stay

    Raises ContextTooLong when even an empty last message does not fit.
    """
    from localllm.conversation.attachments import reserved

    content = messages[-1]["content"]
    text, parts = text_of(content), [] if isinstance(content, str) else content[:-1]  # the text comes last
    above = sum(count(text_of(message.get("content"))) for message in messages[:-1])
    room = ctx - reserved(len(messages), ctx, max_tokens) - pictures - above
    before = count(text)
    if before <= room:
        return list(messages), before, before
    keep = len(text)
    while True:
        kept = count(cut := _without(text, keep, side))
        if kept <= room:
            made = [*parts, {"type": "text", "text": cut}] if parts else cut
            return [*messages[:-1], Message(**messages[-1] | {"content": made})], before, kept
        if keep == 0:
            raise ContextTooLong(
                f"the messages before the question leave {max(room, 0):,} of {ctx:,} tokens for it",
                "use a larger --ctx, a shorter --system, or a new chat",
            )
        keep = min(keep - 1, int(keep * max(room, 0) / kept))


def _without(text: str, keep: int, side: str) -> str:
    """Keep `keep` characters of a text, with a mark where others were cut."""
    if keep >= len(text):
        return text
    mark = f"[... {len(text) - keep:,} characters left out ...]\n"
    if side == "head":
        return mark + text[len(text) - keep :]
    first = keep // 2
    return text[:first] + "\n" + mark + text[len(text) - (keep - first) :]


def code_block(text: str, language: str) -> str:
    """The first fenced block of a text, or the first in `language`. Raises ConstraintUnmet."""
    from localllm.conversation.markdown import fenced_blocks

    for mark, block in fenced_blocks(text):
        if not language or mark.split(" ")[0].casefold() == language.casefold():
            return block
    what = f"{language} code block" if language else "code block"
    raise ConstraintUnmet(f"the answer has no {what}", "drop -x to print the whole answer")


class KeptChat:
    """The saved chat that a question continues (`-c`) or starts (`--log`)."""

    def __init__(self, talk: Conversation, text: str) -> None:
        self.talk = talk
        self._exchange: Exchange = talk.ask(text)

    @classmethod
    def open(cls, system: str, text: str, sampling: dict[str, Any], resumed: str | None) -> KeptChat:
        """Open a chat; `sampling` is filled in with the resumed chat's values. Raises ChatNotFound, HistoryError."""
        if resumed is None:
            from localllm.conversation.tree import Conversation

            return cls(Conversation(system, sampling), text)
        given = dict(sampling)
        talk = load_chat(resumed, sampling)
        sampling.update(given)
        talk.system = system or talk.system
        return cls(talk, text)

    def attach(self, documents: Sequence[Document], sent: tuple[Document, ...] | None) -> None:
        """Record the documents that were put before the question."""
        self._exchange.attachments, self._exchange.sent = tuple(documents), sent

    @property
    def messages(self) -> list[Message]:
        return self.talk.messages(self._exchange)

    def save(self, answers: Sequence[Answer], model: str) -> str:
        """Save the question and its answers, one branch each. Returns the chat's id. Raises HistoryError."""
        from localllm.conversation.storage import saved_chat, saved_messages
        from localllm.history.store import History

        self.talk.model = model
        exchanges = [self._exchange]
        exchanges += [self.talk.again(self._exchange) for _ in answers[1:]]
        messages: dict[int, SavedMessage] = {}
        for exchange, answer in zip(exchanges, answers, strict=True):
            exchange.text, exchange.reasoning, exchange.stop = answer.text, answer.reasoning, answer.stop
            exchange.rounds = answer.rounds
            exchange.usage, exchange.timing, exchange.model = answer.usage, answer.timing, model
            messages |= {one.id: one for one in saved_messages(exchange)}
        chat = saved_chat(self.talk)
        with History() as history:
            history.save(chat, [replace(one, chat_id=chat.id) for one in messages.values()])
        return chat.id

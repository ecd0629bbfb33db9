"""What `run` does with its question besides asking it: bind the answer, cut what is too long, keep both in a chat."""

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
    """`--schema FILE|JSON` or `--grammar FILE`. Raises ConfigError; whether it can be enforced is seen later."""
    if schema is not None and grammar is not None:
        raise ConfigError("--schema and --grammar cannot be combined", "leave one of them out")
    if grammar is not None:
        return Constraint("grammar", read_text(grammar, "--grammar"), param="--grammar")
    if schema is None:
        return None
    inline = schema.lstrip().startswith(("{", "["))
    text = schema if inline else read_text(Path(schema), "--schema")
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--schema is not valid JSON: {error}", "give a file, or JSON that begins with {") from None
    if value is not True and not isinstance(value, dict):
        raise ConfigError(f"--schema is {type(value).__name__}, a JSON schema is an object", "give an object")
    return Constraint("json_schema", value, param="--schema")


@dataclass
class Job:
    """One prompt and how its answer is shown."""

    messages: list[Message]
    sampling: Sampling
    constraint: Constraint | None = None
    truncate: str = "never"
    documents: tuple[Document, ...] = ()  # sent before the question, as much as there is room for
    extract: str | None = None  # the language of the code block that is the answer; "" for any
    tools: Toolbox | None = None  # what may be called without a question
    chat: KeptChat | None = None  # where question and answer are kept
    resumed: str = ""  # the model of the chat that goes on
    template: dict[str, Any] = field(default_factory=dict)  # what the chat template is told about reasoning
    place: str = "auto"  # a running server that has the model, `off`, or a server's address
    stream: bool = False
    show_thinking: bool = False
    stats: bool = False
    trace: bool = False  # tell how long each phase of the start took
    markdown: bool = False
    strict: bool = False


def messages_of(system: str, text: str) -> list[Message]:
    """A conversation of one question."""
    return [*([Message(role="system", content=system)] if system else []), Message(role="user", content=text)]


def gather_prompt(words: Sequence[str], files: Sequence[Path]) -> str:
    """Standard input, then files, then the words, with a blank line between. Raises ConfigError when all are empty."""
    parts = [piped_text(), *map(_file_text, files)]
    if list(words) != ["-"]:
        parts.append(" ".join(words))
    text = "\n\n".join(part.rstrip("\n") for part in parts if part.strip())
    if not text:
        raise ConfigError(
            "there is nothing to say: no prompt, and nothing on standard input", 'localllm run MODEL "Hello"'
        )
    return text


def _file_text(path: Path) -> str:
    text = read_text(path, "-f")
    if "\0" in text[:8192] or text.startswith("%PDF-"):
        raise ConfigError(f"-f: {clean_line(str(path))} is not text", "name a text file")
    return text


def piped_text() -> str:
    """What was piped in; nothing from a terminal or a closed stream. Raises ConfigError for too much."""
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
    """The messages with the last one cut so that `ctx` tokens hold them and an answer; its tokens before and after.

    pictures  tokens of those in the messages
    side      head leaves the beginning out, middle the middle: the words of the command line come last, and stay

    Raises ContextTooLong when there is no room even without it.
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
                f"what comes before the question leaves {max(room, 0):,} of {ctx:,} tokens for it",
                "a larger --ctx, a shorter --system, or a new chat",
            )
        keep = min(keep - 1, int(keep * max(room, 0) / kept))


def _without(text: str, keep: int, side: str) -> str:
    """`keep` characters of a text, with a mark where the others were."""
    if keep >= len(text):
        return text
    mark = f"[... {len(text) - keep:,} characters left out ...]\n"
    if side == "head":
        return mark + text[len(text) - keep :]
    first = keep // 2
    return text[:first] + "\n" + mark + text[len(text) - (keep - first) :]


def code_block(text: str, language: str) -> str:
    """The first fenced block of a text; with `language` the first that is marked so. Raises ConstraintUnmet."""
    from localllm.conversation.markdown import fenced_blocks

    for mark, block in fenced_blocks(text):
        if not language or mark.split(" ")[0].casefold() == language.casefold():
            return block
    what = f"{language} code block" if language else "code block"
    raise ConstraintUnmet(f"the answer has no {what}", "without -x the whole answer is printed")


class KeptChat:
    """The saved chat that a question goes on with (`-c`), or begins (`--log`)."""

    def __init__(self, talk: Conversation, text: str) -> None:
        self.talk = talk
        self._exchange: Exchange = talk.ask(text)

    @classmethod
    def open(cls, system: str, text: str, sampling: dict[str, Any], resumed: str | None) -> KeptChat:
        """`sampling` gets what the resumed chat had set and it has not. Raises ChatNotFound, HistoryError."""
        if resumed is None:
            from localllm.conversation.tree import Conversation

            return cls(Conversation(system, sampling), text)
        given = dict(sampling)
        talk = load_chat(resumed, sampling)
        sampling.update(given)
        talk.system = system or talk.system
        return cls(talk, text)

    def attach(self, documents: Sequence[Document], sent: tuple[Document, ...] | None) -> None:
        """What went before the question."""
        self._exchange.attachments, self._exchange.sent = tuple(documents), sent

    @property
    def messages(self) -> list[Message]:
        return self.talk.messages(self._exchange)

    def save(self, answers: Sequence[Answer], model: str) -> str:
        """Write the question and its answers, each a branch. Returns the chat's id. Raises HistoryError."""
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

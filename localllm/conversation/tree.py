"""A conversation: a tree of questions and answers, the visible branch, instructions and sampling.

An `Exchange` is a question with one of its answers: answering again makes a sibling with the same question, editing
the question makes a sibling with another one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from localllm.config import KEYS, Preset
from localllm.conversation.answer import Answer
from localllm.conversation.documents import Document, question
from localllm.errors import ConfigError
from localllm.history.records import new_chat_id, new_message_id
from localllm.interface import Facts
from localllm.request import Message, text_of
from localllm.terminal import counted

THINK = ("auto", "off", "on", "low", "medium", "high")
TITLE_CHARS = 60
BYTES_PER_TOKEN = 4  # of most texts


@dataclass(slots=True, eq=False)
class Exchange(Answer):
    """A question and its answer.

    forgotten   the user agreed to drop it from the context because the window is full
    sent        the parts chosen from attachments that do not fit; None: they are sent whole
    chosen      the child whose branch was visible last
    """

    user: str = ""
    parent: Exchange | None = None
    attachments: tuple[Document, ...] = ()
    sent: tuple[Document, ...] | None = None
    forgotten: bool = False
    model: str = ""
    thought_s: float = 0.0
    question_id: int = field(default_factory=new_message_id)
    answer_id: int = field(default_factory=new_message_id)
    asked_at: float = field(default_factory=time.time)
    children: list[Exchange] = field(default_factory=list)
    chosen: Exchange | None = None

    @property
    def counts(self) -> bool:
        """Whether the model sees it in later turns: a question without an answer is dropped."""
        return bool(self.text or self.rounds) and not self.forgotten

    @property
    def content(self) -> str | list[dict[str, Any]]:
        """The question as the model sees it, after its files."""
        return question(self.attachments if self.sent is None else self.sent, self.user)


class Conversation:
    """The turns so far, the instructions, and the user's sampling.

    sampling       the same dictionary that the backend's defaults read, so /set takes effect with the next turn
    exchanges      the visible branch; `roots` are the first turns of all branches
    titles_itself  an untitled chat is named after its first question
    summary_text   the model's summary of dropped turns
    removed        ids of messages to delete from disk
    """

    def __init__(self, system: str = "", sampling: dict[str, Any] | None = None, think: str = "auto") -> None:
        self.system = system
        self.sampling = sampling if sampling is not None else {}
        self.think = think
        self.id = new_chat_id()
        self.title = ""
        self.titles_itself = True
        self.model = ""
        self.summary_text = ""
        self.created = time.time()
        self.roots: list[Exchange] = []
        self.exchanges: list[Exchange] = []
        self.removed: list[int] = []

    # --- turns -------------------------------------------------------------------------------------------------------

    def ask(self, text: str, attachments: tuple[Document, ...] = ()) -> Exchange:
        """Add a question at the end of the branch."""
        return self._add(Exchange(text, self.exchanges[-1] if self.exchanges else None, attachments))

    def again(self, exchange: Exchange) -> Exchange:
        """Ask the same question again, as a branch next to its answer; later turns leave the screen."""
        return self._add_sibling(exchange, exchange.user, question_id=exchange.question_id, asked_at=exchange.asked_at)

    def edited(self, exchange: Exchange, text: str) -> Exchange:
        """Replace a question, as a branch next to it."""
        return self._add_sibling(exchange, text)

    def rewritten(self, exchange: Exchange, text: str) -> Exchange:
        """The user's version of an answer, as a branch next to the model's."""
        other = self.again(exchange)
        other.text, other.stop, other.model = text, "edited", exchange.model
        return other

    def numbered(self, text: str) -> Exchange:
        """The exchange of answer n, or the last one. Raises ConfigError."""
        if not self.exchanges:
            raise ConfigError("this chat is empty", "")
        if text and (not text.isdigit() or not 1 <= int(text) <= len(self.exchanges)):
            raise ConfigError(f"{text}: this chat has {counted(len(self.exchanges), 'question')}", "")
        return self.exchanges[int(text) - 1 if text else -1]

    @property
    def cut_short(self) -> Exchange:
        """The last exchange, if its answer can be continued. Raises ConfigError."""
        last = self.numbered("")
        if not last.text or last.stop not in ("length", "abort", "partial", "edited", "error"):
            raise ConfigError("the last answer is complete", "/regen answers again")
        return last

    def undo(self) -> None:
        """Remove the last question and its answer from the branch; they stay as another branch. Raises ConfigError."""
        self.exchanges = self._above(self.numbered(""))

    def cut_after(self, exchange: Exchange) -> None:
        """Continue after this exchange; later turns stay as another branch."""
        self.exchanges = [*self._above(exchange), exchange]

    def _add_sibling(self, exchange: Exchange, text: str, **question: Any) -> Exchange:
        self.exchanges = self._above(exchange)
        return self._add(Exchange(text, exchange.parent, exchange.attachments, **question))

    def _add(self, exchange: Exchange) -> Exchange:
        self._siblings(exchange).append(exchange)
        if exchange.parent is not None:
            exchange.parent.chosen = exchange
        self.exchanges.append(exchange)
        return exchange

    def _siblings(self, exchange: Exchange) -> list[Exchange]:
        return exchange.parent.children if exchange.parent is not None else self.roots

    @staticmethod
    def _above(exchange: Exchange) -> list[Exchange]:
        path = []
        at = exchange.parent
        while at is not None:
            path.append(at)
            at = at.parent
        return path[::-1]

    # --- branches ----------------------------------------------------------------------------------------------------

    def _branches(self, exchange: Exchange, of_question: bool) -> list[Exchange]:
        """The answers to this question, or one exchange per question asked at this place (this one for its own)."""
        siblings = self._siblings(exchange)
        if not of_question:
            return [one for one in siblings if one.question_id == exchange.question_id]
        found: dict[int, Exchange] = {}
        for one in siblings:
            found.setdefault(one.question_id, one)
        return list((found | {exchange.question_id: exchange}).values())

    def place(self, exchange: Exchange, of_question: bool) -> tuple[int, int]:
        """(index from 1, count) among the branches at this place; (1, 1) for a removed exchange."""
        branches = self._branches(exchange, of_question)
        if exchange not in branches:  # its message is about to leave the screen
            return 1, 1
        return branches.index(exchange) + 1, len(branches)

    def step(self, exchange: Exchange, step: int, of_question: bool) -> Exchange:
        """Show the next (1) or previous (-1) branch at this place, with its later turns. Returns it."""
        branches = self._branches(exchange, of_question)
        other = branches[(branches.index(exchange) + step) % len(branches)]
        self.show(other)
        return other

    def show(self, exchange: Exchange) -> None:
        """Make the branch through `exchange` visible, down to where it was left."""
        path = [*self._above(exchange), exchange]
        for above, below in pairwise(path):
            above.chosen = below
        while children := path[-1].children:
            chosen = path[-1].chosen
            path.append(chosen if chosen in children else children[-1])
        self.exchanges = path

    def remove(self, exchange: Exchange) -> None:
        """Delete a question and everything after it; a sibling branch takes its place."""
        siblings = self._siblings(exchange)
        if exchange not in siblings:
            return
        siblings.remove(exchange)
        keeps_question = any(one.question_id == exchange.question_id for one in siblings)
        self.removed += [i for one in walked([exchange]) for i in (one.question_id, one.answer_id)]
        if keeps_question:
            self.removed.remove(exchange.question_id)
        if exchange.parent is not None and exchange.parent.chosen is exchange:
            exchange.parent.chosen = None
        if exchange in self.exchanges:
            self.exchanges = self._above(exchange)
            if siblings:
                self.show(siblings[-1])

    def take_out(self, exchange: Exchange) -> list[Exchange]:
        """Delete a question alone. Those after it in the branch then follow what is before it; returns them."""
        later = self.exchanges[self.exchanges.index(exchange) + 1 :]
        for one in later[:1]:
            exchange.children.remove(one)
        self.remove(exchange)
        for one in later[:1]:
            one.parent = self.exchanges[-1] if self.exchanges else None
            self._add(one)
        self.exchanges += later[1:]
        return later

    def clear(self) -> None:
        """Start a new chat; instructions and sampling stay."""
        self.roots.clear()
        self.exchanges.clear()
        self.removed.clear()
        self.id, self.title, self.summary_text, self.created = new_chat_id(), "", "", time.time()

    # --- what the model sees -----------------------------------------------------------------------------------------

    def messages(self, exchange: Exchange) -> list[Message]:
        """The messages to send for `exchange`: instructions, earlier turns, its question, its calls so far."""
        asked = Message(role="user", content=exchange.content)
        return [*self.messages_above(exchange), asked, *exchange.round_messages()]

    def messages_above(self, exchange: Exchange) -> list[Message]:
        """The instructions and the turns before a question."""
        system = self.instructions
        messages = [Message(role="system", content=system)] if system else []
        for earlier in self._above(exchange):
            if earlier.counts:
                if earlier.user or earlier.attachments:
                    messages.append(Message(role="user", content=earlier.content))
                messages += earlier.round_messages()
                # some chat templates refuse a question right after a tool result
                messages.append(Message(role="assistant", content=earlier.text or "(stopped)"))
        return messages

    @property
    def instructions(self) -> str:
        """The system message, with the summary of dropped turns."""
        summary = f"Summary of the conversation so far:\n{self.summary_text}" if self.summary_text else ""
        return "\n\n".join(part for part in (self.system, summary) if part)

    @property
    def template_values(self) -> dict[str, Any]:
        """The chat template's variables about reasoning."""
        return template_values(self.think)

    def oldest_half(self, exchange: Exchange) -> list[Exchange]:
        """The turns that may be dropped before `exchange`: half of those that count, at least one."""
        counting = [e for e in self._above(exchange) if e.counts]
        return counting[: (len(counting) + 1) // 2]

    def use(self, preset: Preset) -> None:
        """Take over a preset's instructions and sampling."""
        if preset.system is not None:
            self.system = preset.system
        self.sampling.clear()
        self.sampling.update(preset.sampling.given())

    @property
    def used_tokens(self) -> int:
        """Context tokens up to the last counted answer of the branch, and an estimate for later ones, which ended
        without being counted, as an interrupted one does."""
        estimate = 0
        for one in reversed(self.exchanges):
            if one.usage.prompt_tokens:
                return one.usage.prompt_tokens + one.usage.completion_tokens + estimate
            if one.counts and one.stop:
                said = [message.get("content") for message in one.round_messages()]
                estimate += sum(estimated_tokens(text_of(text)) for text in (one.content, *said, one.text))
        return estimate

    @property
    def summary(self) -> str:
        """'3 turns · 120 tokens · 90 tok/s avg'; empty before the first answer."""
        done = [one.usage.completion_tokens for one in self.exchanges if one.usage.completion_tokens]
        if not done:
            return ""
        rates = [one.timing.decode_tps for one in self.exchanges if one.timing.decode_tps]
        rate = f" · {sum(rates) / len(rates):.0f} tok/s avg" if rates else ""
        return f"{counted(len(done), 'turn')} · {counted(sum(done), 'token')}{rate}"

    def attach(self, exchange: Exchange) -> None:
        """Add a saved turn to the tree; the visible branch stays."""
        self._siblings(exchange).append(exchange)

    @property
    def shown_title(self) -> str:
        """The title, else the first line of the first question."""
        if self.title or not self.titles_itself or not self.exchanges:
            return self.title
        line = " ".join(self.exchanges[0].user.strip().split("\n")[0].split())
        if len(line) <= TITLE_CHARS:
            return line
        cut = line[: TITLE_CHARS - 1]
        word = cut.rfind(" ")
        return (cut[:word] if word > TITLE_CHARS // 2 else cut) + "…"  # some languages have no spaces


def estimated_tokens(text: str) -> int:
    """Roughly the tokens of a text, without a tokenizer."""
    return -(-len(text.encode(errors="replace")) // BYTES_PER_TOKEN)


def template_values(think: str) -> dict[str, Any]:
    """The chat template's variables for one of THINK."""
    if think == "auto":
        return {}
    effort = {"reasoning_effort": think} if think in ("low", "medium", "high") else {}
    return {"enable_thinking": think != "off", **effort}


def sampling_keys() -> list[str]:
    """The names that /set accepts."""
    return [path.removeprefix("sampling.") for path in KEYS if path.startswith("sampling.")]


def effective_sampling(facts: Facts, given: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """The parameters in effect: name -> (value, source)."""
    stated = {name: (value, why) for name, value, why in facts.sampling}
    return stated | {name: (value, "set") for name, value in given.items()}


def sampling_line(values: Mapping[str, tuple[Any, str]]) -> str:
    """'temperature 0.6, top_p 0.9 (generation_config.json), seed 7 (set)'."""
    by_source: dict[str, list[str]] = {}
    for name, (value, why) in values.items():
        by_source.setdefault(why, []).append(f"{name} {number(value)}")
    return ", ".join(f"{', '.join(shown)} ({why})" for why, shown in by_source.items())


def number(value: Any) -> str:
    """Format a setting's value: 0.3, 0, 42."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def parse_sampling(name: str, text: str) -> Any:
    """Parse the value of a sampling key. Raises ConfigError."""
    kind = KEYS[f"sampling.{name}"].kind
    try:
        return kind.parse(text)
    except (ValueError, TypeError, OverflowError):
        raise ConfigError(f"{name} must be {kind.expects}, not {text!r}", "") from None


def walked(exchanges: Iterable[Exchange]) -> Iterator[Exchange]:
    """These exchanges and all below them, parents before children."""
    waiting = list(exchanges)[::-1]
    while waiting:
        one = waiting.pop()
        yield one
        waiting += reversed(one.children)

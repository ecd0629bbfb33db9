"""What a program asks of a model, and that what calls begin with alike is read once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from localllm.errors import Aborted, InvalidRequest
from localllm.request import Message, SamplingParams, Usage

if TYPE_CHECKING:
    from .expressions import Gen


@dataclass(frozen=True)
class Written:
    """What the model reads before it goes on: text, or a conversation.

    is_open   the last message is the assistant's and not at its end
    """

    text: str
    messages: tuple[Message, ...]
    is_open: bool = False

    def followed_by(self, text: str) -> Written:
        """With some more."""
        if not self.messages:
            return Written(self.text + text, ())
        if not self.is_open:
            return Written("", (*self.messages, {"role": "assistant", "content": text}), is_open=True)
        last = self.messages[-1]
        return Written("", (*self.messages[:-1], {**last, "content": last["content"] + text}), is_open=True)


@dataclass(frozen=True)
class Sampled:
    """How a run samples.

    params  None: as the model recommends
    place   of a fork among all of its program: each has another seed
    """

    params: SamplingParams | None = None
    place: int = 0


@dataclass(frozen=True)
class Answer:
    """What `gen` made."""

    text: str
    finish_reason: str
    usage: Usage


class Calls:
    """The calls of a run that are under way, all of which `stop` ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[int, Callable[[], None]] = {}
        self.is_stopped = False

    @contextmanager
    def running(self, end: Callable[[], None]) -> Iterator[None]:
        """While a call is under way, that `end` ends. Raises Aborted once all are stopped."""
        with self._lock:
            self._ends[id(end)] = end
        try:
            if self.is_stopped:
                end()
                raise Aborted("the program was stopped")
            yield
        finally:
            with self._lock:
                del self._ends[id(end)]

    def stop(self) -> None:
        """End all, and those that would begin later."""
        with self._lock:
            self.is_stopped = True
            ends = list(self._ends.values())
        for end in ends:
            end()


class Model(Protocol):
    """A model that programs run on. Both block until they have the answer, and raise what ended it."""

    def generate(self, written: Written, gen: Gen, how: Sampled, calls: Calls) -> Answer:
        """What the model writes next."""

    def score(self, written: Written, choices: Sequence[str], calls: Calls) -> tuple[list[list[float]], Usage]:
        """Of each choice the log-probabilities of its tokens behind what is written."""


class Prefixes:
    """Which beginnings of prompts were read, in pieces of `size`, so that none is read twice at the same time."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        self._read: set[int] = set()
        self._being_read: set[int] = set()

    def begin(self, prompt: Sequence[Any]) -> Callable[[], None]:
        """Wait until nobody else reads what this prompt goes on with. To be called when the prompt is read, or failed:
        what is returned.
        """
        names = self._names(prompt)
        with self._changed:
            while True:
                new = [name for name in names if name not in self._read]
                if not new or new[0] not in self._being_read:
                    break
                self._changed.wait()
            mine = [name for name in new if name not in self._being_read]
            self._being_read.update(mine)

        def end() -> None:
            with self._changed:
                self._being_read.difference_update(mine)
                self._read.update(mine)
                self._changed.notify_all()

        return end

    def was_read(self, prompt: Sequence[Any]) -> bool:
        """But for its last piece."""
        with self._changed:
            return self._read.issuperset(self._names(prompt)[:-1])

    def add(self, prompt: Sequence[Any]) -> None:
        """It was read, or made by the model."""
        with self._changed:
            self._read.update(self._names(prompt))

    def _names(self, prompt: Sequence[Any]) -> list[int]:
        """A number for each whole piece and all before it."""
        names, last = [], 0
        for at in range(self._size, len(prompt), self._size):
            last = hash((last, tuple(prompt[at - self._size : at])))
            names.append(last)
        return names


def shared_tokens(before: Sequence[int], options: Sequence[Sequence[int]]) -> int:
    """How many tokens all options begin with, of those before them. Raises InvalidRequest where there are none.

    The last ones before a choice may be others with it: a tokenizer joins what belongs together.
    """
    count = min(
        next((at for at, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), min(len(before), len(ids)))
        for ids in options
    )
    if count == 0:
        raise InvalidRequest("select(...) stands at the beginning: nothing is given that choices depend on",
                             "add some text before it")  # fmt: skip
    return count

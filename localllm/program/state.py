"""A program's text so far, and the calls that extend it, which run in a thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, overload

from localllm.errors import InvalidRequest
from localllm.request import Message, SamplingParams, Usage

from .calls import Calls, Model, Sampled, Written
from .expressions import Expression, Gen, Joined, Select, Turn, checked

MAX_FORKS = 256


@dataclass(frozen=True, slots=True)
class Tokens:
    """The cost of a run.

    computed   prompt tokens computed
    reused     prompt tokens from the cache
    generated  answer tokens
    """

    computed: int = 0
    reused: int = 0
    generated: int = 0

    def plus(self, usage: Usage) -> Tokens:
        read = usage.prompt_tokens - usage.cached_tokens
        return Tokens(self.computed + read, self.reused + usage.cached_tokens, self.generated + usage.completion_tokens)


class Run:
    """One run of a program, shared by its states."""

    def __init__(self, model: Model, params: SamplingParams | None) -> None:
        self.model, self.params = model, params
        self.calls = Calls()
        self.tokens = Tokens()
        self.states: list[State] = []
        self._lock = threading.Lock()

    def count(self, usage: Usage) -> None:
        with self._lock:
            self.tokens = self.tokens.plus(usage)


class State:
    """What a program adds to with `+=`. Calls run in the background; reading waits for them.

    `state["name"]` is the output of the `gen` or `select` with that name, `text()` is all of it, `tokens` the cost.
    """

    def __init__(self, run: Run, parent: State | None = None, place: int = 0) -> None:
        self.ret_value: Any = None  # return value of the program's function
        self._run, self._place = run, place
        self._text: str = parent._text if parent else ""
        self._messages: list[Message] = list(parent._messages) if parent else []
        self._is_open = False  # whether the last message is still being written
        self._variables: dict[str, Any] = dict(parent._variables) if parent else {}
        self._meta: dict[str, dict[str, Any]] = dict(parent._meta) if parent else {}
        self._queue: deque[str | Expression] = deque()
        self._is_busy = False
        self._error: Exception | None = None
        self._changed = threading.Condition()
        run.states.append(self)

    # --- writing -----------------------------------------------------------------------------------------------------

    def __iadd__(self, added: str | Expression) -> State:
        added = checked(added)
        with self._changed:
            if self._error is not None or self._is_busy:
                self._queue.append(added)
                return self
            if isinstance(added, str):
                self._do(added)
                return self
            self._queue.append(added)
            self._is_busy = True
        threading.Thread(target=self._work, name="program", daemon=True).start()
        return self

    def fork(self, size: int = 1) -> Forks:
        """Make `size` states that continue from here independently, at the same time."""
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_FORKS:
            raise InvalidRequest(f"fork({size!r:.40}): the size must be 1 to {MAX_FORKS}", "fork fewer", param="size")
        self.sync()
        return Forks(self, [State(self._run, self, self._place * size + number) for number in range(size)])

    def sync(self) -> None:
        """Wait until everything added is written. Raises the error of a failed call."""
        with self._changed:
            while self._is_busy:
                self._changed.wait()
            if self._error is not None:
                raise self._error

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._queue or self._error is not None:
                    self._queue.clear()
                    self._is_busy = False
                    self._changed.notify_all()
                    return
                added = self._queue.popleft()
            try:
                self._do(added)
            except Exception as error:
                self._error = error

    def _do(self, added: str | Expression) -> None:
        if isinstance(added, str):
            self._write(added)
        elif isinstance(added, Joined):
            for one in added.parts:
                self._do(one)
        elif isinstance(added, Turn):
            self._take_turn(added)
        elif isinstance(added, Gen):
            self._generate(added)
        elif isinstance(added, Select):
            self._select(added)

    def _write(self, text: str) -> None:
        if not self._messages:
            self._text += text
        elif self._is_open:
            self._messages[-1]["content"] += text
        elif text:
            raise InvalidRequest(f"{text!r:.60} is outside of any message", "put it into user(...) or assistant(...)")

    def _take_turn(self, turn: Turn) -> None:
        if self._text:
            raise InvalidRequest(
                f"{turn.role}(...) follows text outside of any message: {self._text!r:.60}", "start with a message"
            )
        self._messages.append({"role": turn.role, "content": ""})
        self._is_open = True
        for one in turn.parts:
            self._do(one)
        self._is_open = False

    def _generate(self, gen: Gen) -> None:
        how = Sampled(self._run.params, self._place)
        answer = self._run.model.generate(self._written("gen"), gen, how, self._run.calls)
        self._run.count(answer.usage)
        usage = answer.usage
        self._name(gen.name, answer.text, {
            "finish_reason": answer.finish_reason, "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens, "completion_tokens": usage.completion_tokens,
        })  # fmt: skip
        self._write(answer.text)

    def _select(self, select: Select) -> None:
        logprobs, usage = self._run.model.score(self._written("select"), select.choices, self._run.calls)
        self._run.count(usage)
        chosen = select.choices[select.best(logprobs)]
        self._name(select.name, chosen, {
            "choices": select.choices, "logprobs": [sum(row) for row in logprobs],
            "num_tokens": [len(row) for row in logprobs], "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
        })  # fmt: skip
        self._write(chosen)

    def _name(self, name: str, value: str, meta: dict[str, Any]) -> None:
        if name:
            self._variables[name], self._meta[name] = value, meta

    def _written(self, what: str) -> Written:
        if not self._messages:
            return Written(self._text, ())
        if not self._is_open:
            raise InvalidRequest(f"{what}(...) is outside of any message", "put it into assistant(...)")
        *before, last = self._messages
        if not last["content"]:
            return Written("", tuple(before))
        return Written("", (*before, {**last}), is_open=True)

    # --- reading -----------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        return self._lookup(self._variables, name)

    def __contains__(self, name: object) -> bool:
        self.sync()
        return name in self._variables

    def __setitem__(self, name: str, value: Any) -> None:
        self.sync()
        self._variables[name] = value

    def get_meta_info(self, name: str) -> dict[str, Any]:
        """For `gen`: finish_reason, prompt_tokens, cached_tokens, completion_tokens. For `select`: the choices, and for
        each the sum of its log-probabilities and its num_tokens.
        """
        meta: dict[str, Any] = self._lookup(self._meta, name)
        return meta

    @property
    def variables(self) -> dict[str, Any]:
        self.sync()
        return dict(self._variables)

    def text(self) -> str:
        """The whole text; for a conversation, one paragraph per message."""
        self.sync()
        return "\n\n".join(f"{one['role']}: {one['content']}" for one in self._messages) or self._text

    def messages(self) -> list[Message]:
        """The conversation; empty without messages."""
        self.sync()
        return [{**message} for message in self._messages]

    @property
    def tokens(self) -> Tokens:
        """The cost of the whole run so far, including its forks."""
        return self._run.tokens

    def _lookup(self, where: dict[str, Any], name: str) -> Any:
        self.sync()
        if name not in where:
            has = ", ".join(map(repr, where)) or "none"
            raise InvalidRequest(
                f"the program has no variable {name!r:.60}; it has: {has:.200}", "use the name of a gen or select"
            )
        return where[name]


class Forks:
    """The states made by `fork`. `+=` adds to each; `forks["name"]` lists their variables."""

    def __init__(self, parent: State, states: list[State]) -> None:
        self._parent, self._states = parent, states

    def __iadd__(self, added: str | Expression) -> Forks:
        for state in self._states:
            state += added
        return self

    def __iter__(self) -> Iterator[State]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    @overload
    def __getitem__(self, key: int) -> State: ...
    @overload
    def __getitem__(self, key: str) -> list[Any]: ...
    def __getitem__(self, key: int | str) -> State | list[Any]:
        return [state[key] for state in self._states] if isinstance(key, str) else self._states[key]

    def __setitem__(self, number: int, state: State) -> None:
        """Supports `forks[0] += ...`, which assigns the same state back."""
        if state is not self._states[number]:
            raise InvalidRequest("a fork cannot be replaced", "add to it: forks[0] += ...")

    def join(self) -> None:
        """Wait for all forks. Their variables become lists in the parent state, in fork order."""
        known = self._parent.variables
        all_of = [state.variables for state in self._states]
        for name in dict.fromkeys(name for one in all_of for name in one):
            if any(name in one and one[name] is not known.get(name) for one in all_of):
                self._parent[name] = [one.get(name) for one in all_of]

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self.join()

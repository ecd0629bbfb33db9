"""What a program adds to its state: text, `gen`, `select`, and messages of these."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from localllm.errors import InvalidRequest
from localllm.request import Constraint, SamplingParams

MAX_TOKENS = 128  # of a `gen` that names no number
Method = Literal["token_length_normalized", "likelihood"]
_ADDED = "text, gen(...), select(...), or a message of these: system(...), user(...), assistant(...)"


class Expression:
    """What is neither text nor empty; + puts things one after the other."""

    def __add__(self, other: str | Expression) -> Joined:
        return Joined((*_parts(self), *_parts(checked(other))))

    def __radd__(self, other: str) -> Joined:
        return Joined((*_parts(checked(other)), *_parts(self)))


@dataclass(frozen=True)
class Joined(Expression):
    """Several, in order."""

    parts: tuple[str | Expression, ...]


@dataclass(frozen=True)
class Gen(Expression):
    """See `gen`."""

    name: str
    max_tokens: int
    stop: tuple[str, ...]
    temperature: float | None
    constraint: Constraint | None

    def params(self, usual: SamplingParams, place: int) -> SamplingParams:
        """How it is sampled in the fork at `place`, whose seed is another one."""
        asked: dict[str, Any] = {} if self.temperature is None else {"temperature": self.temperature}
        seed = None if usual.seed is None else usual.seed + place
        asked |= {"n": 1, "logprobs": None, "prompt_logprobs": None, "seed": seed}
        return replace(usual, max_tokens=self.max_tokens, stop=(*usual.stop, *self.stop), **asked)


@dataclass(frozen=True)
class Select(Expression):
    """See `select`."""

    name: str
    choices: tuple[str, ...]
    choices_method: Method

    def best(self, logprobs: Sequence[Sequence[float]]) -> int:
        """The number of the choice, by what its tokens have."""
        sums = [sum(row) for row in logprobs]
        if self.choices_method == "token_length_normalized":
            sums = [total / len(row) for total, row in zip(sums, logprobs, strict=True)]
        return max(range(len(sums)), key=sums.__getitem__)


@dataclass(frozen=True)
class Turn(Expression):
    """A message."""

    role: str
    parts: tuple[str | Expression, ...]


def gen(
    name: str = "",
    max_tokens: int = MAX_TOKENS,
    stop: str | Sequence[str] = (),
    temperature: float | None = None,
    regex: str | None = None,
    json_schema: Mapping[str, Any] | str | None = None,
) -> Expression:
    """Let the model write here. The text goes to the state, and to its variable `name` if there is one.

    stop         strings that end it and are left out
    temperature  None: as `run` says, else as the model recommends
    regex        what all of the text matches
    json_schema  what the text is an instance of, as JSON; a dict, or a schema's text

    Raises InvalidRequest.
    """
    if regex is not None and json_schema is not None:
        raise InvalidRequest(f"gen({name!r}) has a regex and a json_schema", "give one of them", param="regex")
    constraint = None
    if regex is not None:
        constraint = Constraint("regex", regex, param="regex")
    elif json_schema is not None:
        constraint = Constraint("json_schema", _schema(json_schema), param="json_schema")
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    return Gen(name, max_tokens, stops, temperature, constraint)


def select(name: str, choices: Sequence[str], choices_method: Method = "token_length_normalized") -> Expression:
    """Put the likeliest of the choices here. `name` becomes a variable.

    All are scored: the log-probability of each of their tokens, given the text so far, which is computed once.

    choices_method  token_length_normalized: the best mean over a choice's tokens; likelihood: the best sum, which
                    favours short ones

    Raises InvalidRequest.
    """
    listed = tuple(choices)
    if isinstance(choices, str) or not listed or not all(isinstance(one, str) and one for one in listed):
        raise InvalidRequest(
            f"select({name!r}) has the choices {str(choices)[:80]!r}: they must be texts that are not empty",
            'give a list, as ["yes", "no"]', param="choices",
        )  # fmt: skip
    if len(set(listed)) < len(listed):
        raise InvalidRequest(f"select({name!r}) has a choice twice", "name each once", param="choices")
    if choices_method not in get_args(Method):
        known = " or ".join(get_args(Method))
        raise InvalidRequest(f"choices_method is {choices_method!r}, it must be {known}", f"give {known}")
    return Select(name, listed, choices_method)


def system(*parts: str | Expression) -> Expression:
    """The message that says what the assistant is."""
    return _turn("system", parts)


def user(*parts: str | Expression) -> Expression:
    """A message of the user's."""
    return _turn("user", parts)


def assistant(*parts: str | Expression) -> Expression:
    """The answer: text that is given, and what `gen` and `select` make."""
    return _turn("assistant", parts)


def checked(added: Any) -> str | Expression:
    """Raises InvalidRequest for what no program can add."""
    if isinstance(added, str | Expression):
        return added
    raise InvalidRequest(f"a program cannot add {added!r:.80} to its state", f"add {_ADDED}")


def _turn(role: str, parts: Sequence[str | Expression]) -> Turn:
    flat = tuple(one for part in parts for one in _parts(checked(part)))
    for one in flat:
        if isinstance(one, Turn):
            raise InvalidRequest(f"a message stands within {role}(...)", "add one after the other")
        if role != "assistant" and not isinstance(one, str):
            made = "gen" if isinstance(one, Gen) else "select"
            hint = f"put {made}(...) into assistant(...), and add its text to the next message"
            raise InvalidRequest(f"{role}(...) holds {made}(...), which only the assistant does", hint)
    return Turn(role, flat)


def _parts(one: str | Expression) -> tuple[str | Expression, ...]:
    return one.parts if isinstance(one, Joined) else (one,)


def _schema(given: Mapping[str, Any] | str) -> Any:
    try:
        return json.loads(given) if isinstance(given, str) else dict(given)
    except ValueError as error:
        raise InvalidRequest(f"json_schema is no JSON: {error}", "give a dict", param="json_schema") from error

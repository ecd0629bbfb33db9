"""What a program can add to its state: text, `gen`, `select`, and messages made of these."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from localllm.errors import InvalidRequest
from localllm.request import Constraint, SamplingParams

MAX_TOKENS = 128  # default of `gen`
Method = Literal["token_length_normalized", "likelihood"]
_ADDED = "text, gen(...), select(...), or a message of these: system(...), user(...), assistant(...)"


class Expression:
    """Something other than text; + concatenates."""

    def __add__(self, other: str | Expression) -> Joined:
        return Joined((*_parts(self), *_parts(checked(other))))

    def __radd__(self, other: str) -> Joined:
        return Joined((*_parts(checked(other)), *_parts(self)))


@dataclass(frozen=True)
class Joined(Expression):
    """A concatenation."""

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
        """The sampling parameters in the fork at `place`, which has its own seed."""
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
        """The index of the best choice, given the log-probabilities of its tokens."""
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
    """Let the model write here. The text is added to the state, and stored as its variable `name`, if given.

    stop         strings that end the text; they are not included
    temperature  None: as `run` says, else as the model recommends
    regex        the whole text matches this
    json_schema  the text is JSON that matches this schema; a dict, or a schema's text

    Raises InvalidRequest.
    """
    if regex is not None and json_schema is not None:
        raise InvalidRequest(
            f"gen({name!r}) has both a regex and a json_schema", "pass only one of them", param="regex"
        )
    constraint = None
    if regex is not None:
        constraint = Constraint("regex", regex, param="regex")
    elif json_schema is not None:
        constraint = Constraint("json_schema", _schema(json_schema), param="json_schema")
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    return Gen(name, max_tokens, stops, temperature, constraint)


def select(name: str, choices: Sequence[str], choices_method: Method = "token_length_normalized") -> Expression:
    """Put the likeliest choice here and store it as the variable `name`.

    All choices are scored by the log-probabilities of their tokens, given the text so far, which is computed once.

    choices_method  token_length_normalized: the best mean over a choice's tokens; likelihood: the best sum, which
                    favors short choices

    Raises InvalidRequest.
    """
    listed = tuple(choices)
    if isinstance(choices, str) or not listed or not all(isinstance(one, str) and one for one in listed):
        raise InvalidRequest(
            f"the choices of select({name!r}) must be non-empty strings, not {str(choices)[:80]!r}",
            'pass a list such as ["yes", "no"]', param="choices",
        )  # fmt: skip
    if len(set(listed)) < len(listed):
        raise InvalidRequest(f"select({name!r}) has a duplicate choice", "list each choice once", param="choices")
    if choices_method not in get_args(Method):
        known = " or ".join(get_args(Method))
        raise InvalidRequest(f"choices_method must be {known}, not {choices_method!r}", f"pass {known}")
    return Select(name, listed, choices_method)


def system(*parts: str | Expression) -> Expression:
    """The system message."""
    return _turn("system", parts)


def user(*parts: str | Expression) -> Expression:
    """A user message."""
    return _turn("user", parts)


def assistant(*parts: str | Expression) -> Expression:
    """An assistant message: given text, and the output of `gen` and `select`."""
    return _turn("assistant", parts)


def checked(added: Any) -> str | Expression:
    """Return `added`. Raises InvalidRequest for anything a program cannot add."""
    if isinstance(added, str | Expression):
        return added
    raise InvalidRequest(f"a program cannot add {added!r:.80} to its state", f"add {_ADDED}")


def _turn(role: str, parts: Sequence[str | Expression]) -> Turn:
    flat = tuple(one for part in parts for one in _parts(checked(part)))
    for one in flat:
        if isinstance(one, Turn):
            raise InvalidRequest(f"{role}(...) contains another message", "add messages one after the other")
        if role != "assistant" and not isinstance(one, str):
            made = "gen" if isinstance(one, Gen) else "select"
            hint = f"put {made}(...) into assistant(...), and add its text to the next message"
            raise InvalidRequest(f"{role}(...) contains {made}(...), which is only allowed in assistant(...)", hint)
    return Turn(role, flat)


def _parts(one: str | Expression) -> tuple[str | Expression, ...]:
    return one.parts if isinstance(one, Joined) else (one,)


def _schema(given: Mapping[str, Any] | str) -> Any:
    try:
        return json.loads(given) if isinstance(given, str) else dict(given)
    except ValueError as error:
        raise InvalidRequest(f"json_schema is not valid JSON: {error}", "pass a dict", param="json_schema") from error

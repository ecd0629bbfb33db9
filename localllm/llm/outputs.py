"""The events of one request -> text: pieces while it runs, a `RequestOutput` at the end.

Nothing here decides where an answer ends: the engine does (through `StopCheck`); this only turns ids into the text up
to there, and splits reasoning from content.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from localllm.errors import LocalLLMError
from localllm.request import FinishReason, SamplingParams, Timing, TokenEvent, TokenLogprob, Usage
from localllm.tokenizer.detokenizer import IncrementalDetokenizer
from localllm.tokenizer.tokenizer import Tokenizer


class Splitter(Protocol):
    """What separates reasoning from content in streamed text (`chat.parser.ReasoningParser`)."""

    def push(self, text: str) -> list[tuple[str, str]]:
        """Pieces as (kind, text), kind content or reasoning"""
        ...

    def finish(self) -> list[tuple[str, str]]:
        """What was held back"""
        ...


@dataclass(slots=True)
class OutputDelta:
    """A step of one answer. `parts` is new text by kind; the last piece of an answer has a `finish_reason`."""

    index: int
    parts: list[tuple[str, str]] = field(default_factory=list)
    """(kind, text), kind content | reasoning | tool_call; the text of a tool_call is the JSON of a delta: {"index",
    "id", "name", "arguments"}, id and name in the first of an index, arguments a piece of JSON text"""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prefill: tuple[int, int] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    usage: Usage | None = None
    timing: Timing | None = None
    error: LocalLLMError | None = None

    @property
    def text(self) -> str:
        """The new content."""
        return "".join(text for kind, text in self.parts if kind == "content")


@dataclass(slots=True)
class CompletionOutput:
    """One finished answer."""

    index: int
    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, str]] = field(default_factory=list)
    """{"id", "name", "arguments"} each, arguments as JSON text"""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    timing: Timing = field(default_factory=Timing)


@dataclass(slots=True)
class RequestOutput:
    """All answers to one prompt."""

    prompt_token_ids: list[int]
    completions: list[CompletionOutput]
    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)
    """of the first answer"""
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def text(self) -> str:
        """The first answer's content."""
        return self.completions[0].text

    def take(self, piece: OutputDelta) -> None:
        """Add a piece. Raises the error that ended an answer."""
        if piece.error is not None:
            raise piece.error
        one = self.completions[piece.index]
        for kind, text in piece.parts:
            if kind == "reasoning":
                one.reasoning += text
            elif kind == "tool_call":
                add_tool_call(one.tool_calls, json.loads(text))
            else:
                one.text += text
        one.token_ids += piece.token_ids
        one.logprobs += piece.logprobs
        if piece.prompt_logprobs is not None:
            self.prompt_logprobs = piece.prompt_logprobs
        if piece.finish_reason is None:
            return
        one.finish_reason, one.stop_reason = piece.finish_reason, piece.stop_reason
        if piece.timing is not None:
            one.timing = piece.timing
            self.timing = piece.timing if piece.index == 0 else self.timing
        if piece.usage is not None:
            self.usage = add_usage(self.usage, piece.usage)


def add_tool_call(calls: list[dict[str, str]], delta: Mapping[str, Any]) -> None:
    """Add a delta to the calls it belongs to."""
    while len(calls) <= int(delta["index"]):
        calls.append({"id": "", "name": "", "arguments": ""})
    call = calls[int(delta["index"])]
    for name in ("id", "name"):
        call[name] = delta.get(name) or call[name]
    call["arguments"] += delta.get("arguments") or ""


def add_usage(total: Usage, one: Usage) -> Usage:
    """The prompt counts once, the answers add up."""
    return Usage(
        one.prompt_tokens,
        max(total.cached_tokens, one.cached_tokens),
        total.completion_tokens + one.completion_tokens,
        total.reasoning_tokens + one.reasoning_tokens,
    )


class AnswerText:
    """One answer's ids -> text."""

    def __init__(self, emitter: IncrementalDetokenizer, splitter: Splitter | None) -> None:
        self._emitter = emitter
        self._splitter = splitter
        self._num_reasoning_tokens = 0

    def take(self, event: TokenEvent) -> OutputDelta:
        """Turn one event into a piece."""
        text = self._emitter.push(event.token_ids) if event.token_ids else ""
        if event.finish_reason is not None:
            text += self._emitter.finish(event.keep_chars)
        parts = self._split(text, event.finish_reason is not None)
        if parts and all(kind == "reasoning" for kind, _ in parts):
            self._num_reasoning_tokens += len(event.token_ids)
        error = event.error if isinstance(event.error, LocalLLMError) else None
        usage = event.usage
        if usage is not None:
            usage = Usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, self._num_reasoning_tokens)
        return OutputDelta(
            event.index, parts, event.token_ids, event.logprobs, event.finish_reason, event.stop_reason, event.prefill,
            event.prompt_logprobs, usage, event.timing, error,
        )  # fmt: skip

    def _split(self, text: str, last: bool) -> list[tuple[str, str]]:
        if self._splitter is None:
            return [("content", text)] if text else []
        parts = self._splitter.push(text) if text else []
        return [*parts, *self._splitter.finish()] if last else parts


@dataclass(frozen=True, slots=True)
class Shown:
    """How ids become text."""

    continuing: bool = False
    """the text goes on from the prompt's, so a first word keeps its leading space"""
    keep_ids: frozenset[int] = frozenset()
    """control tokens that are shown all the same"""


class TurnText:
    """All answers of one request."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        new_splitter: Callable[[], Splitter] | None = None,
        shown: Shown | None = None,
    ) -> None:
        shown = shown or Shown()
        self._answers = [
            AnswerText(
                IncrementalDetokenizer(
                    tokenizer,
                    params.stop,
                    params.min_tokens,
                    params.include_stop,
                    continuing=shown.continuing,
                    keep_ids=shown.keep_ids,
                ),
                new_splitter() if new_splitter else None,
            )
            for _ in range(params.n)
        ]

    def take(self, event: TokenEvent) -> OutputDelta:
        """Turn one event into a piece."""
        return self._answers[event.index].take(event)


class ResponseStream:
    """A request in flight, as its caller sees it: iterate its pieces, or wait for the `RequestOutput`."""

    def __init__(self, stream: Any, text: TurnText) -> None:
        self._stream = stream
        self._text = text

    @property
    def request_id(self) -> str:
        """The engine's name for it."""
        return str(self._stream.request.request_id)

    @property
    def num_answers(self) -> int:
        """How many answers it has."""
        return int(self._stream.request.params.n)

    @property
    def prompt_token_ids(self) -> list[int]:
        """What was asked."""
        return list(self._stream.request.prompt_token_ids)

    def __iter__(self) -> Iterator[OutputDelta]:
        try:
            for event in self._stream:
                yield self._text.take(event)
        finally:
            if not self._stream.is_done:
                self.abort()

    def abort(self) -> None:
        """End it now; the last pieces say "abort"."""
        self._stream.abort()

    def answer(self) -> RequestOutput:
        """Wait for the end. Raises the error if it failed; ends the request if the wait is interrupted."""
        answer = RequestOutput(self.prompt_token_ids, [CompletionOutput(i) for i in range(self.num_answers)])
        try:
            for event in self._stream.gathered():
                answer.take(self._text.take(event))
        except BaseException:
            self.abort()
            raise
        return answer

"""Turns the events of a request into text: one `OutputDelta` per step, and a `RequestOutput` at the end.

The engine decides where an answer ends (with stop strings through `StopCheck`, which also decodes the ids). This module
decodes all other ids and splits reasoning and tool calls from content.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

from localllm.chat.parser import Splitter
from localllm.errors import InternalError, LocalLLMError
from localllm.request import FinishReason, SamplingParams, Timing, TokenEvent, TokenLogprob, TokenMask, Usage
from localllm.tokenizer.detokenizer import IncrementalDetokenizer
from localllm.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """Rules for the output of one request; made by `OutputRules.spec`.

    mask          the tokens allowed next; forked for every request
    new_splitter  creates the splitter for one answer's text
    continuing    the text continues the prompt, so the first word keeps its leading space
    keep_ids      control tokens that are kept in the text
    """

    mask: TokenMask | None = None
    new_splitter: Callable[[], Splitter] | None = None
    continuing: bool = False
    keep_ids: frozenset[int] = frozenset()


@dataclass(slots=True)
class OutputDelta:
    """One step of answer number `index`: new text by kind. The last delta of an answer has a `finish_reason`.

    parts  (kind, text), kind content | reasoning | tool_call; the text of a tool_call is the JSON of a delta: {"index",
           "id", "name", "arguments"}, id and name only in the first of an index, arguments a piece of JSON text
    """

    index: int
    parts: list[tuple[str, str]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prefill: tuple[int, int] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    usage: Usage | None = None
    timing: Timing | None = None
    error: LocalLLMError | None = None
    cached_tokens: int | None = None  # prompt tokens from the prefix cache; only in the first delta

    @property
    def text(self) -> str:
        return "".join(text for kind, text in self.parts if kind == "content")


@dataclass(slots=True)
class CompletionOutput:
    """One finished answer. Each of `tool_calls` is {"id", "name", "arguments"}, arguments as JSON text."""

    index: int
    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, str]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    timing: Timing = field(default_factory=Timing)


@dataclass
class RequestOutput:
    """All `n` answers to one prompt."""

    prompt_token_ids: list[int]
    n: InitVar[int] = 1
    completions: list[CompletionOutput] = field(init=False)
    usage: Usage = field(default_factory=Usage)
    prompt_logprobs: list[TokenLogprob | None] | None = None

    def __post_init__(self, n: int) -> None:
        self.completions = [CompletionOutput(index) for index in range(n)]

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def timing(self) -> Timing:
        return self.completions[0].timing

    def take(self, delta: OutputDelta) -> None:
        """Add a delta. Raises the error that ended an answer."""
        if delta.error is not None:
            raise delta.error
        one = self.completions[delta.index]
        for kind, text in delta.parts:
            if kind == "reasoning":
                one.reasoning += text
            elif kind == "tool_call":
                add_tool_call(one.tool_calls, json.loads(text))
            else:
                one.text += text
        one.token_ids += delta.token_ids
        one.logprobs += delta.logprobs
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        if delta.finish_reason is not None:
            one.finish_reason, one.stop_reason = delta.finish_reason, delta.stop_reason
            one.timing = delta.timing or one.timing
            self.usage = add_usage(self.usage, delta.usage) if delta.usage is not None else self.usage


def add_tool_call(calls: list[dict[str, str]], delta: Mapping[str, Any]) -> None:
    """Add a tool call delta to the call it belongs to."""
    while len(calls) <= int(delta["index"]):
        calls.append({"id": "", "name": "", "arguments": ""})
    call = calls[int(delta["index"])]
    for name in ("id", "name"):
        call[name] = delta.get(name) or call[name]
    call["arguments"] += delta.get("arguments") or ""


def add_usage(total: Usage, one: Usage) -> Usage:
    """Sum the usage of several answers; the prompt counts once."""
    return Usage(
        one.prompt_tokens,
        max(total.cached_tokens, one.cached_tokens),
        total.completion_tokens + one.completion_tokens,
        total.reasoning_tokens + one.reasoning_tokens,
    )


class OutputProcessor:
    """Turns the ids of a request's answers into text by kind; with stop strings, `stop_check` decodes in the engine."""

    def __init__(self, tokenizer: Tokenizer, spec: OutputSpec, params: SamplingParams = SamplingParams()) -> None:
        n, stops = params.n, (params.stop, params.min_tokens, params.include_stop)
        detokenizer = IncrementalDetokenizer(tokenizer, *stops, continuing=spec.continuing, keep_ids=spec.keep_ids)
        self.stop_check = detokenizer if params.stop else None
        self._detokenizers = [detokenizer.fork() for _ in range(n)]
        self._splitters = [spec.new_splitter() if spec.new_splitter else None for _ in range(n)]
        self._num_reasoning_tokens = [0] * n
        self._num_unshown = [0] * n  # tokens whose text is held back: an incomplete character, or perhaps a tag

    def take(self, event: TokenEvent) -> OutputDelta:
        index, last = event.index, event.finish_reason is not None
        text = event.text
        if text is None:
            text = self._detokenizers[index].push(event.token_ids, last) if event.token_ids or last else ""
        splitter = self._splitters[index]
        if splitter is None:
            parts = [("content", text)] if text else []
        else:
            parts = splitter.push(text) if text else []
            parts = [*parts, *splitter.finish()] if last else parts
        self._num_unshown[index] += len(event.token_ids)
        if parts:
            if all(kind == "reasoning" for kind, _ in parts):
                self._num_reasoning_tokens[index] += self._num_unshown[index]
            self._num_unshown[index] = 0
        usage = event.usage
        if usage is not None:
            usage = replace(usage, reasoning_tokens=self._num_reasoning_tokens[index])
        error = event.error if isinstance(event.error, LocalLLMError) else None
        return OutputDelta(
            index, parts, event.token_ids, event.logprobs, event.finish_reason, event.stop_reason, event.prefill,
            event.prompt_logprobs, usage, event.timing, error, event.cached_tokens,
        )  # fmt: skip

    def listener(self, tell: Callable[[OutputDelta], None], abort: Callable[[], None]) -> Callable[[TokenEvent], None]:
        """Make a listener that passes events on as deltas; an answer that cannot be decoded ends with an error."""
        failed: set[int] = set()

        def on_event(event: TokenEvent) -> None:
            if event.index in failed:
                return
            try:
                delta = self.take(event)
            except Exception:
                log.exception("an answer could not be decoded to text")
                failed.add(event.index)
                error = InternalError("the answer could not be decoded to text", "see the log")
                delta = OutputDelta(event.index, finish_reason=FinishReason.ERROR, error=error)
                abort()
            tell(delta)

        return on_event


class ResponseStream:
    """The caller's handle on a running request: iterate over its deltas, or wait for the `RequestOutput`."""

    def __init__(self, stream: Any, processor: OutputProcessor) -> None:
        self._stream = stream
        self._processor = processor
        self.request_id: str = stream.request.request_id
        self.prompt_token_ids: list[int] = stream.request.prompt_token_ids
        self.n: int = stream.request.params.n

    def __iter__(self) -> Iterator[OutputDelta]:
        try:
            for event in self._stream:
                yield self._processor.take(event)
        finally:
            if not self._stream.is_done:
                self.abort()

    def abort(self) -> None:
        """End the request now; the last deltas have the finish reason "abort"."""
        self._stream.abort()

    def answer(self) -> RequestOutput:
        """Wait for the result. Raises the request's error; aborts the request if the wait is interrupted."""
        output = RequestOutput(self.prompt_token_ids, self.n)
        try:
            for event in self._stream.gathered():
                output.take(self._processor.take(event))
        except BaseException:
            self.abort()
            raise
        return output

"""Programs on an `LLM` in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from localllm.errors import Aborted
from localllm.request import FinishReason, Usage

from .calls import Answer, Calls, Prefixes, Sampled, Written, shared_tokens
from .expressions import Gen

if TYPE_CHECKING:
    from localllm.llm.llm import LLM


class InProcess:
    """See `calls.Model`."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._prefixes = Prefixes(llm.plan.page_size if llm.plan.prefix_cache else llm.plan.ctx + 1)

    def generate(self, written: Written, gen: Gen, how: Sampled, calls: Calls) -> Answer:
        from localllm.llm.outputs import RequestOutput

        llm, prompt = self._llm, self._encoded(written)
        begins = bool(written.messages) and not written.is_open  # a new answer, which may start with reasoning
        spec = llm.output_rules.spec(prompt, chat=begins, constraint=gen.constraint)
        params = gen.params(how.params or llm.default_params(), how.place)
        call = _Call(self._prefixes.begin(prompt))
        with call.beginning():
            stream = llm.submit(prompt, params, splits_reasoning=begins, spec=spec, listener=call.hear)
        with calls.running(stream.abort):
            deltas = call.wait()
        output = RequestOutput(prompt)
        for delta in deltas:
            output.take(delta)
        (one,) = output.completions
        self._prefixes.add([*prompt, *one.token_ids])
        return Answer(one.text, str(one.finish_reason), output.usage)

    def score(self, written: Written, choices: Sequence[str], calls: Calls) -> tuple[list[list[float]], Usage]:
        prompts = [self._encoded(written.followed_by(choice)) for choice in choices]
        start = shared_tokens(self._encoded(written), prompts)
        waiting: list[_Call] = []
        ends: list[Callable[[], None]] = []

        def end() -> None:
            for one in ends:
                one()

        with calls.running(end):
            try:
                for prompt in prompts:
                    waiting.append(_Call(self._prefixes.begin(prompt[:start])))
                    with waiting[-1].beginning():
                        ends.append(self._llm.begin_logprobs(prompt, start, waiting[-1].hear))
                lasts = [call.wait()[-1] for call in waiting]
            except BaseException:
                end()
                raise
        usages = [last.usage for last in lasts]
        total = Usage(sum(usage.prompt_tokens for usage in usages), sum(usage.cached_tokens for usage in usages))
        return [[one.logprob for one in last.prompt_logprobs[1:]] for last in lasts], total

    def _encoded(self, written: Written) -> list[int]:
        if not written.messages:
            return self._llm.encode_prompt(written.text)
        return self._llm.encode_chat(written.messages, continue_final=written.is_open)


class _Call:
    """A request in progress.

    end_reading   called when its prompt has been read, or it has ended
    """

    def __init__(self, end_reading: Callable[[], None]) -> None:
        self._end_reading = end_reading
        self._is_reading = True
        self._ended = threading.Event()
        self._events: list[Any] = []

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """Wraps the submission: if it fails, nothing will be read."""
        try:
            yield
        except BaseException:
            self._end_reading()
            raise

    def hear(self, event: Any) -> None:
        """Called by the engine's thread with every `OutputDelta` or `TokenEvent`."""
        self._events.append(event)
        if self._is_reading and (event.token_ids or event.finish_reason is not None):
            self._is_reading = False
            self._end_reading()
        if event.finish_reason is not None:
            self._ended.set()

    def wait(self) -> list[Any]:
        """Wait for the end and return all events. Raises the error that ended the request, or Aborted."""
        self._ended.wait()
        last = self._events[-1]
        if last.error is not None:
            raise last.error
        if last.finish_reason is FinishReason.ABORT:
            raise Aborted("the program was stopped")
        return self._events

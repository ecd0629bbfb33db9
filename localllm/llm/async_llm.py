"""`AsyncLLM`: the `LLM` facade for asyncio. Nothing here blocks the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from localllm.llm.llm import LLM, Pooled, Pooling, Prompt
from localllm.llm.outputs import OutputDelta, RequestOutput, ResponseStream
from localllm.request import Constraint, Message, SamplingParams, ToolUse

if TYPE_CHECKING:
    import numpy as np

Submit = Callable[..., ResponseStream]  # accepts a `listener`


class AsyncLLM:
    """One loaded model. An async context manager that loads on entry; takes the arguments of `LLM`.

    Concurrent requests are batched. Cancelling a task aborts its request.
    """

    def __init__(self, name_or_path: str, *args: Any, **settings: Any) -> None:
        """Store the arguments; loads nothing yet."""
        self._cancel: threading.Event = settings.setdefault("cancel", threading.Event())
        self._load = partial(LLM, name_or_path, *args, **settings)
        self._llm: LLM | None = None

    async def __aenter__(self) -> AsyncLLM:
        """Load the model in a thread. Raises the errors of `LLM`. If cancelled, a model that loads is closed again."""
        loading = asyncio.ensure_future(asyncio.to_thread(self._loaded))
        try:
            self._llm = await asyncio.shield(loading)
        except asyncio.CancelledError:
            self._cancel.set()
            loading.add_done_callback(partial(_undone, LLM.close))
            raise
        return self

    def _loaded(self) -> LLM:
        llm = self._load()
        if self._cancel.is_set():  # here, as the event loop may be closed by now
            llm.close()
        return llm

    async def __aexit__(self, *error: object) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.close)

    @property
    def llm(self) -> LLM:
        """The loaded model. Raises RuntimeError outside the context."""
        if self._llm is None:
            raise RuntimeError("the model is not loaded: use `async with AsyncLLM(name) as llm`")
        return self._llm

    async def chat(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: ToolUse | Sequence[Mapping[str, Any]] | None = None,
        constraint: Constraint | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        adapter: str = "",
    ) -> RequestOutput:
        """Answer a conversation or a single question; see `LLM.chat`."""
        return await _whole(
            partial(self.llm.begin_chat, messages, params, tools, constraint, template_kwargs, adapter=adapter)
        )

    def chat_stream(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: ToolUse | Sequence[Mapping[str, Any]] | None = None,
        constraint: Constraint | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        adapter: str = "",
    ) -> AsyncIterator[OutputDelta]:
        """Stream the answer of `chat`. If the loop is left early, closing the iterator aborts the request."""
        return _deltas(
            partial(self.llm.begin_chat, messages, params, tools, constraint, template_kwargs, adapter=adapter)
        )

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        constraint: Constraint | None = None,
        adapter: str = "",
    ) -> RequestOutput:
        """Complete one text; see `LLM.generate`. Use `asyncio.gather` to batch several."""
        return await _whole(partial(self.llm.begin_completion, prompt, params, constraint, adapter=adapter))

    def generate_stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        constraint: Constraint | None = None,
        adapter: str = "",
    ) -> AsyncIterator[OutputDelta]:
        """Stream the text of `generate`."""
        return _deltas(partial(self.llm.begin_completion, prompt, params, constraint, adapter=adapter))

    async def embed(
        self, texts: Sequence[Prompt], *, pooling: Pooling | None = None, normalize: bool = True
    ) -> np.ndarray:
        """See `LLM.embed`."""
        submitting = asyncio.ensure_future(asyncio.to_thread(self.llm.begin_embed, texts, pooling))
        try:
            waiting = await asyncio.shield(submitting)
        except asyncio.CancelledError:
            submitting.add_done_callback(partial(_undone, Pooled.abort))
            raise
        try:
            rows = [await asyncio.wrap_future(future) for future in waiting.rows]
        except BaseException:
            waiting.abort()
            raise
        return waiting.array(rows, normalize)


async def _whole(submit: Submit) -> RequestOutput:
    stream, arrived = await _submitted(submit)
    output = RequestOutput(stream.prompt_token_ids, stream.n)
    async for delta in _until_done(stream, arrived):
        output.take(delta)
    return output


async def _deltas(submit: Submit) -> AsyncIterator[OutputDelta]:
    stream, arrived = await _submitted(submit)
    async for delta in _until_done(stream, arrived):
        yield delta


async def _submitted(submit: Submit) -> tuple[ResponseStream, asyncio.Queue[OutputDelta]]:
    """Tokenize and queue a request in a thread; its deltas arrive in the returned queue."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[OutputDelta] = asyncio.Queue()

    def listener(delta: OutputDelta) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is waiting
            loop.call_soon_threadsafe(arrived.put_nowait, delta)

    submitting = asyncio.ensure_future(asyncio.to_thread(submit, listener=listener))
    try:
        return await asyncio.shield(submitting), arrived
    except asyncio.CancelledError:
        submitting.add_done_callback(partial(_undone, ResponseStream.abort))
        raise


def _undone(undo: Callable[[Any], None], work: asyncio.Future[Any]) -> None:
    """Undo what a thread has done for a cancelled task."""
    if not work.cancelled() and work.exception() is None:
        undo(work.result())


async def _until_done(stream: ResponseStream, arrived: asyncio.Queue[OutputDelta]) -> AsyncIterator[OutputDelta]:
    """Yield deltas until all answers have ended; aborts the request if the consumer leaves early."""
    left = stream.n
    try:
        while left:
            delta = await arrived.get()
            left -= delta.finish_reason is not None
            yield delta
    finally:
        if left:
            stream.abort()

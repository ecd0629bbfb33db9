"""One loaded model behind the routes: ids, turns as async streams, the JSON shapes of log-probabilities and usage."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from localllm.answer import Answer, Completion, Piece, Turn
from localllm.llm import LLM
from localllm.request import FinishReason, TokenLogprob, Usage

from .errors import ApiError

T = TypeVar("T")


STALL_S = 15.0
"""a step older than this means that nothing is being answered"""


class Service:
    """The model the server answers for.

    llm     loaded
    names   the ids a client may use; the first is the one we state
    """

    def __init__(self, llm: LLM, names: tuple[str, ...]) -> None:
        self.llm = llm
        self.names = names
        self.created = int(time.time())
        self.is_draining = False

    def check_model(self, asked: str | None) -> str:
        """The id to state in the answer. Raises 404 for another model's."""
        if asked is None or asked in self.names:
            return self.names[0]
        raise ApiError(
            404,
            f"The model {asked[:100]!r} is not served here; {self.names[0]!r} is.",
            code="model_not_found",
            param="model",
        )

    def check_ready(self) -> None:
        """Raise 503 when nothing new is taken."""
        if self.is_draining:
            raise ApiError(503, "The server is shutting down.", "unavailable_error", "shutting_down")
        if self.llm.engine.step_age_s > STALL_S:
            raise ApiError(503, "The engine is stuck in a step.", "unavailable_error", "engine_stalled")
        if self.llm.engine.is_dead:
            raise ApiError(503, "The engine stopped; restart the server.", "server_error", "engine_dead")

    def submit(self, start: Callable[[Callable[[Piece], None]], Turn]) -> AsyncTurn:
        """Start a turn whose pieces arrive in this event loop."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Piece] = asyncio.Queue()

        def listener(piece: Piece) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(queue.put_nowait, piece)

        return AsyncTurn(start(listener), queue)

    # --- shapes ------------------------------------------------------------------------------------------------------

    def token_text(self, token: int) -> tuple[str, list[int]]:
        """A token as text and as bytes."""
        data = self.llm.tokenizer.token_bytes(token)
        return data.decode("utf-8", "replace"), list(data)

    def chat_logprobs(self, entries: list[TokenLogprob]) -> dict[str, Any]:
        """{"content": [...], "refusal": null}"""
        content = []
        for entry in entries:
            text, data = self.token_text(entry.token_id)
            top = []
            for token, logprob in entry.top:
                other, other_data = self.token_text(token)
                top.append({"token": other, "logprob": logprob, "bytes": other_data})
            content.append({"token": text, "logprob": entry.logprob, "bytes": data, "top_logprobs": top})
        return {"content": content, "refusal": None}

    def text_logprobs(self, entries: list[TokenLogprob | None], ids: list[int], offset: int) -> dict[str, Any]:
        """The shape of /v1/completions; `ids` are the tokens, since the first prompt token has no entry."""
        tokens, offsets = [], []
        for token in ids:
            text, _ = self.token_text(token)
            tokens.append(text)
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": [None if e is None else e.logprob for e in entries],
            "top_logprobs": [None if e is None else {self.token_text(t)[0]: p for t, p in e.top} for e in entries],
            "text_offset": offsets,
        }


class AsyncTurn:
    """A turn seen from the event loop."""

    def __init__(self, turn: Turn, queue: asyncio.Queue[Piece]) -> None:
        self.turn = turn
        self._queue = queue
        self._open = turn.num_answers
        self._first: Piece | None = None

    async def admitted(self) -> None:
        """Wait for the first piece. Raises its error, so that it still gets a status of its own."""
        if self._first is None:
            self._first = await self._queue.get()
        if self._first.error is not None:
            raise self._first.error

    async def pieces(self) -> AsyncIterator[Piece]:
        """All pieces; leaving early ends the request."""
        try:
            while self._open > 0:
                piece = self._first or await self._queue.get()
                self._first = None
                self._open -= piece.finish_reason is not None
                yield piece
        finally:
            if self._open > 0:
                self.turn.abort()

    async def answer(self) -> Answer:
        """Everything at once. Raises the error that ended it."""
        answer = Answer(self.turn.prompt_token_ids, [Completion(i) for i in range(self.turn.num_answers)])
        async for piece in self.pieces():
            answer.take(piece)
        return answer


async def unless_left(request: Request, work: Coroutine[Any, Any, T], *turns: AsyncTurn) -> T:
    """The result of `work`, unless the client leaves first: then, or when it fails, the turns end."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "The client left.", code="client_closed_request")
        return task.result()
    except BaseException:
        for turn in turns:
            turn.turn.abort()
        raise
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def finish_name(reason: FinishReason | None) -> str | None:
    """OpenAI's word for it."""
    return None if reason is None else "length" if reason is FinishReason.LENGTH else "stop"


def usage_json(usage: Usage) -> dict[str, Any]:
    """The usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens, "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0, "audio_tokens": 0,
        },
    }  # fmt: skip


def new_id(prefix: str) -> str:
    """chatcmpl-…, cmpl-…"""
    return f"{prefix}-{uuid.uuid4().hex}"

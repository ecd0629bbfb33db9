"""POST /v1/embeddings, /v1/score and /rerank: pooled last hidden states of any model, and their cosine similarity.

Embedding models use the pooling they were trained with. Since most other models were not trained for embeddings, the
response names the `pooling`, and for scores the `method`.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, StrictBool, StrictInt, StrictStr
from starlette.requests import Request
from starlette.responses import Response

from localllm.errors import LocalLLMError
from localllm.llm.outputs import OutputDelta
from localllm.request import FinishReason, SamplingParams, TokenEvent
from localllm.server.errors import ApiError, invalid
from localllm.server.metrics import RequestMeter
from localllm.server.openai.output import new_id
from localllm.server.openai.reading import split_prompts
from localllm.server.openai.schemas import TEXTS_OR_IDS, Body, Name
from localllm.server.pool import settle
from localllm.server.reply import unless_left, with_rows
from localllm.server.service import Reservation, Service, service_of

Pooling = Literal["mean", "cls", "last"]
Vectors = list[np.ndarray]
METHOD = "cosine of pooled hidden states"
MAX_TEXTS = 2048
Texts = StrictStr | Annotated[list[StrictStr], Field(fail_fast=True, min_length=1, max_length=MAX_TEXTS)]


class Pooled(Body):
    """Fields shared by all routes. `pooling`, our extension, overrides the model's default pooling."""

    model: StrictStr | None = None
    pooling: Pooling | None = None
    user: Name | None = None


class EmbeddingRequest(Pooled):
    """POST /v1/embeddings"""

    # str | [str] | [int] | [[int]], validated in `split_prompts`
    input: Annotated[Any, Field(json_schema_extra={"anyOf": TEXTS_OR_IDS})]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[StrictInt, Field(ge=1, le=65536)] | None = None
    normalize: StrictBool | None = None  # our extension; by default, vectors have length 1


class ScoreRequest(Pooled):
    """POST /v1/score, with vLLM's text_1 and text_2, or queries and documents."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None


class Document(Body):
    """A document of a rerank request."""

    text: StrictStr


class RerankRequest(Pooled):
    """POST /rerank, as in the APIs of Cohere and Jina."""

    query: StrictStr
    documents: Annotated[list[StrictStr | Document], Field(fail_fast=True, min_length=1, max_length=MAX_TEXTS)]
    top_n: Annotated[StrictInt, Field(ge=0)] | None = None
    return_documents: StrictBool | None = None


async def embeddings(request: Request, body: EmbeddingRequest) -> Response:
    """Embed each text as a vector."""
    texts = split_prompts(body.input, "input", MAX_TEXTS)
    vectors, facts = await _vectors(request, body, texts, "input")

    def row(index: int) -> dict[str, Any]:
        short = vectors[index][: body.dimensions]
        short = short if body.normalize is False else unit(short)
        coded = base64.b64encode(short.astype("<f4").tobytes()).decode() if body.encoding_format == "base64" else None
        return {"object": "embedding", "index": index, "embedding": coded or short.tolist()}

    return await with_rows({"object": "list", **facts}, "data", map(row, range(len(vectors))), len(vectors))


async def score(request: Request, body: ScoreRequest) -> dict[str, Any]:
    """Score the similarity of pairs of texts, or of one text with many."""
    for one, other in (("text_1", "queries"), ("text_2", "documents")):
        if getattr(body, one) is not None and getattr(body, other) is not None:
            raise invalid(f"{one} and {other} cannot be combined.", other)
    first_name = "text_1" if body.queries is None else "queries"
    second_name = "text_2" if body.documents is None else "documents"
    first, second = _list(getattr(body, first_name), first_name), _list(getattr(body, second_name), second_name)
    if len(first) != 1 and len(first) != len(second):
        raise invalid(f"{len(first)} texts cannot be paired with {len(second)}.", first_name)
    vectors, facts = await _vectors(request, body, [*first, *second], second_name)
    ones, others = vectors[: len(first)], vectors[len(first) :]
    scores = [_cosine(ones[0 if len(ones) == 1 else i], other) for i, other in enumerate(others)]
    data = [{"index": i, "object": "score", "score": value} for i, value in enumerate(scores)]
    head = {"id": new_id("score"), "object": "list", "created": int(time.time())}
    return {**head, "data": data, "method": METHOD, **facts}


async def rerank(request: Request, body: RerankRequest) -> dict[str, Any]:
    """Rank documents by similarity to a query, most similar first."""
    texts = [d.text if isinstance(d, Document) else d for d in body.documents]
    vectors, facts = await _vectors(request, body, [body.query, *texts], "documents")
    scores = [_cosine(vectors[0], other) for other in vectors[1:]]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or None]
    results = [
        {"index": i, "relevance_score": scores[i]}
        | ({"document": {"text": texts[i]}} if body.return_documents is not False else {})
        for i in order
    ]
    return {"id": new_id("rerank"), "results": results, "method": METHOD, **facts}


async def _vectors(
    request: Request, body: Pooled, texts: Sequence[str | list[int]], param: str
) -> tuple[Vectors, dict[str, Any]]:
    """Return (a vector per text, fields of every response). `param`: the field to name if a text is too long."""
    service = service_of(request)
    service.refuse_adapter(body.model)
    async with unless_left(request.receive), service.reserve(request, body.model, user=body.user or "") as reservation:
        pooling, size = body.pooling or reservation.llm.default_pooling, reservation.llm.facts.embedding_size
        if isinstance(body, EmbeddingRequest) and body.dimensions is not None and body.dimensions > size:
            raise invalid(f"dimensions is {body.dimensions}; this model has {size}.", "dimensions")
        vectors, num_tokens = await pooled_texts(service, reservation, texts, pooling, param)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return vectors, {"model": reservation.model.name, "pooling": pooling, "usage": usage}


def _list(value: str | list[str] | None, param: str) -> list[str]:
    if value is None:
        raise invalid(f"{param} is missing.", param, "missing_required_parameter")
    return [value] if isinstance(value, str) else value


async def pooled_texts(
    service: Service, reservation: Reservation, texts: Sequence[str | list[int]], pooling: Pooling, param: str, *,
    truncate: bool = False,
) -> tuple[Vectors, int]:  # fmt: skip
    """Return (a float32 vector per text, prompt tokens). Each text waits its turn, to not hold up other requests."""
    llm = reservation.llm
    limit = llm.plan.ctx if truncate else None  # longer texts are truncated to the context window, not rejected
    size = sum(len(text) for text in texts if isinstance(text, str))
    prompts = await service.text_work(size, lambda: [llm.encode_text(text, limit) for text in texts])
    try:
        for prompt in prompts:
            llm.check_prompt(prompt, SamplingParams(max_tokens=1), pooling)
    except LocalLLMError as error:
        error.param = param
        raise
    asking = asyncio.Lock()
    tasks = [asyncio.ensure_future(_pooled(service, reservation, prompt, pooling, asking)) for prompt in prompts]
    try:
        vectors = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return vectors, sum(map(len, prompts))


async def _pooled(
    service: Service, reservation: Reservation, ids: list[int], pooling: Pooling, asking: asyncio.Lock
) -> np.ndarray:
    result: Future[np.ndarray] = Future()
    meter = RequestMeter(service.metrics, reservation.model.name, SamplingParams(), reservation.exchange)

    def on_event(event: TokenEvent) -> None:
        if event.finish_reason is None:
            return
        meter.take(OutputDelta(0, finish_reason=event.finish_reason, usage=event.usage, timing=event.timing))
        pooled = event.pooled if event.finish_reason is FinishReason.STOP else None
        if pooled is None:
            ended = ApiError(503, "The request was aborted.", "unavailable_error", "shutting_down")
        settle(result, (event.error or ended) if pooled is None else pooled)

    part = reservation.ticket.part()
    try:
        async with asking:  # only one text of a request waits in the queue at a time
            await part.granted()
        abort = reservation.llm.pool(ids, pooling, on_event)
        try:
            return await asyncio.wrap_future(result)
        except asyncio.CancelledError:
            abort()
            raise
    finally:
        part.release()


def unit(vector: np.ndarray) -> np.ndarray:
    """Normalize a vector to length 1."""
    length = float(np.linalg.norm(vector))
    return vector / length if length else vector


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.dot(unit(a), unit(b)))

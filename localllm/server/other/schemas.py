"""What the routes about text accept: tokens, embeddings, scores."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr

from localllm.server.openai.schemas import MAX_MESSAGES, TEXTS_OR_IDS, Body, ChatMessage, Name

MAX_TEXTS = 2048
MAX_TOKENS = 1 << 20

Texts = StrictStr | Annotated[list[StrictStr], Field(fail_fast=True, min_length=1, max_length=MAX_TEXTS)]


class TokenizeRequest(Body):
    """POST /tokenize, in vLLM's dialect (prompt or messages) or llama.cpp's (content)."""

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)] | None = None
    content: StrictStr | None = None
    add_special_tokens: StrictBool | None = None
    add_special: StrictBool | None = None
    add_generation_prompt: StrictBool | None = None
    return_token_strs: StrictBool | None = None
    with_pieces: StrictBool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Body):
    """POST /detokenize"""

    model: StrictStr | None = None
    tokens: Annotated[list[StrictInt], Field(fail_fast=True, max_length=MAX_TOKENS)]


class EmbeddingRequest(Body):
    """POST /v1/embeddings"""

    model: StrictStr | None = None
    # str | [str] | [int] | [[int]], checked by hand
    input: Annotated[Any, Field(json_schema_extra={"anyOf": TEXTS_OR_IDS})]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[StrictInt, Field(ge=1, le=65536)] | None = None
    pooling: Literal["mean", "last"] | None = None  # ours: how token vectors become one; mean by default
    normalize: StrictBool | None = None  # ours: to length 1, which is the default
    user: Name | None = None


class ScoreRequest(Body):
    """POST /v1/score: vLLM's text_1 and text_2, or queries and documents."""

    model: StrictStr | None = None
    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    pooling: Literal["mean", "last"] | None = None
    user: Name | None = None


class Document(Body):
    """A document of a rerank request."""

    text: StrictStr


class RerankRequest(Body):
    """POST /rerank: Cohere's and Jina's."""

    model: StrictStr | None = None
    query: StrictStr
    documents: Annotated[list[StrictStr | Document], Field(fail_fast=True, min_length=1, max_length=MAX_TEXTS)]
    top_n: Annotated[StrictInt, Field(ge=0)] | None = None
    return_documents: StrictBool | None = None
    pooling: Literal["mean", "last"] | None = None
    user: Name | None = None

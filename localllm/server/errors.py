"""Errors in the shape of the API that was called, with the right status and no internal details.

The shape is OpenAI's, always with all four keys, except Anthropic's under `/v1/messages` and Ollama's under `/api/`.
Under `/v1/models`, which both have, Anthropic's clients get its shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.responses import JSONResponse

from localllm.errors import ContextTooLong, LocalLLMError

Headers = Iterable[tuple[bytes, bytes]]

RETRY_AFTER_S = 2
ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
# memory addresses, and paths other than those of our routes
_INTERNALS = re.compile(r"(?<=0x)[0-9a-fA-F]{4,}|(?<![\w:/.<])(?!/(?:v1|api)/)(?:~?/[\w.@+%-]+){2,}")


class ApiError(LocalLLMError):
    """An HTTP error: kind, code and param (a dotted path) are OpenAI's; `retry_after` is in seconds."""

    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error", code: str | None = None,
        param: str | None = None, *, retry_after: int = RETRY_AFTER_S, details: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message, param=param)
        self.details = details  # shown only in Anthropic's errors
        self.status, self.kind, self.api_code, self.retry_after = status, kind, code, retry_after


class ClientLeft(Exception):
    """The client has disconnected."""


def invalid(message: str, param: str | None, code: str | None = None) -> ApiError:
    """400 for a field with an invalid value."""
    return ApiError(400, message, code=code, param=param)


def not_text(what: str, kind: object, param: str) -> ApiError:
    """400 for content of a kind that this model cannot read."""
    if kind is None:
        return invalid(f"{what} must have a type.", f"{param}.type", "missing_required_parameter")
    message = f"{what} of type {str(kind)[:40]!r} is not supported: this model reads text."
    return invalid(message, param, "unsupported_value")


def unsupported(what: str, param: str) -> ApiError:
    """400 for a feature that this version or model lacks."""
    return ApiError(400, what, "not_supported_error", "unsupported_feature", param)


def bug() -> ApiError:
    """500 for an internal error; the details are only in the log."""
    return ApiError(500, "The server failed to process this request; see its log.", "server_error", "internal_error")


def shutting_down() -> ApiError:
    """503 for requests that arrive or wait during shutdown."""
    return ApiError(503, "The server is shutting down.", "unavailable_error", "shutting_down", retry_after=5)


def openai_body(error: LocalLLMError) -> dict[str, Any]:
    """{"error": {message, type, param, code}}"""
    message = error.message
    if too_long := _too_long(error):  # clients parse this wording, with the numbers as plain digits
        have, most = too_long
        spare = ", and the answer needs one" if have <= most else ""
        message = (
            f"This model's maximum context length is {most} tokens. However, your messages resulted in {have} tokens"
            f"{spare}"
        )
    shown = {"message": _sentence(message), "type": error.kind, "param": error.param, "code": error.api_code}
    return {"error": shown}


def anthropic_body(error: LocalLLMError) -> dict[str, Any]:
    """{"type": "error", "error": {type, message}}; the param, which has no key of its own, goes into the message."""
    kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    where = f"{error.param}: " if error.param and not error.message.startswith(error.param) else ""
    shown = {"type": kind, "message": _sentence(where + error.message)}
    if too_long := _too_long(error):  # as above
        have, most = too_long
        shown["message"] = f"prompt is too long: {have} tokens > {min(most, have - 1)} maximum"
    details = getattr(error, "details", None)
    return {"type": "error", "error": shown | ({"details": details} if details else {})}


def _too_long(error: LocalLLMError) -> tuple[int, int] | None:
    """(tokens of the prompt, tokens that fit)"""
    if not isinstance(error, ContextTooLong) or "prompt_tokens" not in error.context:
        return None
    return error.context["prompt_tokens"], error.context["max_context"]


def error_text(error: LocalLLMError) -> str:
    """An error as Ollama's plain text: with its field, or with the prefix that clients parse for a missing model."""
    where = f"{error.param}: " if error.param and error.param not in error.message else ""
    lost = "model not found: " if error.api_code == "model_not_found" else ""
    return _sentence(f"{lost or where}{error.message}")


def _sentence(message: str) -> str:
    return sanitize(message if message.endswith(".") else f"{message}.")


def error_body(error: LocalLLMError, path: str, request_id: str | None = None, headers: Headers = ()) -> dict[str, Any]:
    """The body in the shape of the API that `path` belongs to."""
    if is_ollama(path):
        return {"error": error_text(error)}
    if is_anthropic(path) or (_within(path, "/v1/models") and asks_as_anthropic(headers)):
        return anthropic_body(error) | {"request_id": request_id}
    return openai_body(error)


def is_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's API alone."""
    return _within(path, "/v1/messages")


def asks_as_anthropic(headers: Headers) -> bool:
    """Whether an Anthropic client asks, on a route that both APIs have: those clients send their API version."""
    return any(name == b"anthropic-version" for name, _ in headers)


def _within(path: str, route: str) -> bool:
    return path == route or path.startswith(f"{route}/")


def is_ollama(path: str) -> bool:
    """Whether a path belongs to Ollama's API."""
    return path.startswith("/api/")


def respond(error: LocalLLMError, path: str, request_id: str | None = None, asked: Headers = ()) -> JSONResponse:
    """Build the error response, with the headers that its status requires; `asked` are those of the request."""
    headers: dict[str, str] = {}
    if error.status in (429, 503):
        seconds = getattr(error, "retry_after", RETRY_AFTER_S)
        headers |= {"Retry-After": str(seconds), "retry-after-ms": str(1000 * seconds)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error, path, request_id, asked), error.status, headers)


def sanitize(message: str) -> str:
    """Remove memory addresses, absolute paths and control characters."""
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in _INTERNALS.sub("…", message))

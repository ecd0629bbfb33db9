"""Errors in the shape of the API that was called, whatever fails: the right status, nothing of our insides.

OpenAI's shape has all four keys always; below `/v1/messages` it is Anthropic's.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from starlette.responses import JSONResponse

from localllm.errors import LocalLLMError

RETRY_AFTER_S = 2
ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
_PATHS = re.compile(r"(?<![\w:/.<])(?:~?/[\w.@+%-]+){2,}")


class ApiError(Exception):
    """An answer that is an error.

    status       HTTP status
    message      one sentence
    kind         OpenAI's error.type
    code         OpenAI's error.code, or None
    param        dotted path of the field, or None
    retry_after  seconds, for 429 and 503
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        *,
        retry_after: int = RETRY_AFTER_S,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.code, self.param = status, message, kind, code, param
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """{"error": {message, type, param, code}}"""
        return {
            "error": {
                "message": sanitize(self.message), "type": self.kind, "param": self.param, "code": self.code,
            }
        }  # fmt: skip

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """{"type": "error", "error": {type, message}}"""
        kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        where = f"{self.param}: " if self.param and not self.message.startswith(self.param) else ""
        return {"type": "error", "error": {"type": kind, "message": sanitize(where + self.message)}}


class ClientLeft(Exception):
    """Nobody waits for this answer any more."""


def gone() -> ApiError:
    """What is answered to a client that left; nobody reads it."""
    return ApiError(499, "The client left.", code="client_closed_request")


def invalid(message: str, param: str | None, code: str | None = None) -> ApiError:
    """A field that cannot be so."""
    return ApiError(400, message, code=code, param=param)


def not_text(what: str, kind: object, param: str) -> ApiError:
    """Content of a kind that this model cannot read."""
    message = f"{what} of type {str(kind)[:40]!r} is not supported: this model reads text."
    return invalid(message, param, "unsupported_value")


def unsupported(what: str, param: str) -> ApiError:
    """A feature this version or model does not have, refused by name."""
    return ApiError(400, what, "not_supported_error", "unsupported_feature", param)


Rename = Callable[[str | None], str | None]


@contextlib.contextmanager
def renaming(rename: Rename) -> Iterator[None]:
    """Errors name the field as the API calls it that the request came through."""
    try:
        yield
    except (ApiError, LocalLLMError) as error:
        error.param = rename(error.param)
        raise


def from_error(error: LocalLLMError) -> ApiError:
    """One of our errors as an API error."""
    message = error.message if error.message.endswith(".") else f"{error.message}."
    return ApiError(error.status, message, error.kind, error.api_code, error.param)


def bug() -> ApiError:
    """What a client learns of a fault of ours."""
    return ApiError(500, "The server failed on this request; see its log.", "server_error", "internal_error")


def error_body(error: ApiError, path: str) -> dict[str, Any]:
    """The body in the shape of the API that `path` belongs to."""
    return error.anthropic_body if is_anthropic(path) else error.body


def is_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def respond(error: ApiError, path: str) -> JSONResponse:
    """The error as a response, with the headers its status asks for."""
    headers: dict[str, str] = {}
    if error.status in (429, 503):
        headers |= {"Retry-After": str(error.retry_after), "retry-after-ms": str(1000 * error.retry_after)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error, path), error.status, headers)


def sanitize(message: str) -> str:
    """Without memory addresses, absolute paths and control characters."""
    message = re.sub(r"0x[0-9a-fA-F]{4,}", "0x…", message)
    message = _PATHS.sub("…", message)
    if message.isprintable():
        return message
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in message)

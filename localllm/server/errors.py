"""Errors in the OpenAI shape, whatever fails: all four keys, the right status, nothing of our insides."""

from __future__ import annotations

import re
from typing import Any

from starlette.responses import JSONResponse

from localllm.errors import LocalLLMError

RETRY_AFTER_S = "2"


class ApiError(Exception):
    """An answer that is an error.

    status    HTTP status
    message   one sentence
    kind      OpenAI's error.type
    code      OpenAI's error.code, or None
    param     dotted path of the field, or None
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.code, self.param = status, message, kind, code, param

    @property
    def body(self) -> dict[str, Any]:
        """{"error": {message, type, param, code}}"""
        return {
            "error": {
                "message": sanitize(self.message), "type": self.kind, "param": self.param, "code": self.code,
            }
        }  # fmt: skip


def from_error(error: LocalLLMError) -> ApiError:
    """One of our errors as an API error: its message, and its hint where that helps a client."""
    message = error.message if error.message.endswith(".") else f"{error.message}."
    return ApiError(error.status, message, error.kind, error.api_code, error.param)


def respond(error: ApiError) -> JSONResponse:
    """The error as a response, with the headers its status asks for."""
    headers: dict[str, str] = {}
    if error.status in (429, 503):
        headers["Retry-After"] = RETRY_AFTER_S
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error.body, error.status, headers)


def sanitize(message: str) -> str:
    """Without memory addresses, absolute paths and control characters (ERR-01)."""
    message = re.sub(r"0x[0-9a-fA-F]{4,}", "0x…", message)
    message = re.sub(r"(?<![\w:/.])(?:/[\w.@+-]+){2,}", "…", message)
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in message)

"""Every failure a user can cause, with what, value and limit, and the next command.

    LocalLLMError
    ├── ConfigError            exit 2    a setting or flag that cannot be
    ├── InvalidRequest         exit 2    a request outside its limits                 HTTP 400
    │   └── InvalidConstraint  exit 2    a schema or grammar that cannot be enforced  HTTP 400
    ├── ModelNotFound          exit 3    no such model, or not downloaded             HTTP 404
    ├── AuthRequired           exit 4    a token or an accepted license is needed
    ├── DoesNotFit             exit 5    memory or disk is too small                  HTTP 503
    │   └── OutOfMemory        exit 5    memory ran out during use
    ├── DeviceError            exit 6    the device is missing, unusable or broken    HTTP 503
    ├── DownloadError          exit 7    the network or the hub failed
    ├── ServerError            exit 8    port busy, no server, server refused
    ├── ContextTooLong         exit 9    more tokens than the window holds            HTTP 400
    ├── ConstraintUnmet        exit 10   the output broke its schema or length
    ├── BadModelFile           exit 12   damaged, truncated or hostile model files
    │   ├── UnsupportedModel   exit 12   an architecture this version cannot run
    │   └── UnsupportedFormat  exit 12   a stored format this version cannot read
    ├── Aborted                exit 130  stopped by the user
    ├── HistoryError           exit 1    the database of chats (localllm.history)
    └── InternalError          exit 1    our own fault

`cli/frame/console.py` turns one into a panel and an exit code, the server's dialects into their own error bodies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# the hint for a damaged file of a model whose name is not known where the damage is found
REPAIR = "fetch it again (localllm pull NAME --repair), or use another copy of the model"


class LocalLLMError(Exception):
    """Base of all errors shown to users.

    message   what, value and limit, in one sentence
    hint      the next command or step, in one sentence
    why       optional: where the number comes from
    fixes     optional: (command, note) pairs, each runnable
    context   optional: the values, for the JSON twin
    """

    exit_code = 1
    number = 1
    status = 500
    kind = "server_error"
    api_code: str | None = "internal_error"

    def __init__(
        self,
        message: str,
        hint: str = "",
        *,
        why: str = "",
        fixes: Sequence[tuple[str, str]] = (),
        context: Mapping[str, Any] | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.why = why
        self.fixes = tuple(fixes)
        self.context = dict(context or {})
        self.param = param

    @property
    def code(self) -> str:
        """The stable code, `E` + exit code + two digits: E301, E1203."""
        return f"E{self.exit_code}{self.number:02d}"


class InternalError(LocalLLMError):
    """Our own fault; the log holds the traceback."""


class ConfigError(LocalLLMError):
    """Invalid setting, flag or combination."""

    exit_code, number, status, kind, api_code = 2, 1, 400, "invalid_request_error", None


class InvalidRequest(LocalLLMError):
    """A request outside its documented limits."""

    exit_code, number, status, kind, api_code = 2, 2, 400, "invalid_request_error", "invalid_value"


class InvalidConstraint(InvalidRequest):
    """A schema, regular expression or grammar that is wrong, too complex, or beyond what can be enforced."""

    number, api_code = 3, "invalid_json_schema"


class ModelNotFound(LocalLLMError):
    """No such model, or it is not on this machine and may not be downloaded now."""

    exit_code, number, status, kind, api_code = 3, 1, 404, "invalid_request_error", "model_not_found"


class AuthRequired(LocalLLMError):
    """The hub wants a token, or a license to be accepted."""

    exit_code, number, status, kind, api_code = 4, 1, 401, "authentication_error", None


class DoesNotFit(LocalLLMError):
    """Memory or disk is too small for what was asked."""

    exit_code, number, status, kind, api_code = 5, 1, 503, "unavailable_error", "does_not_fit"


class OutOfMemory(DoesNotFit):
    """Memory ran out during use."""

    number = 2


class DeviceError(LocalLLMError):
    """The device is missing, unusable or broken."""

    exit_code, number, status, kind, api_code = 6, 1, 503, "server_error", "engine_dead"


class DownloadError(LocalLLMError):
    """The network or the hub failed, or what arrived is not what was promised."""

    exit_code, number, status, kind, api_code = 7, 1, 502, "server_error", None


class ServerError(LocalLLMError):
    """Port busy, no server running, or the server refused."""

    exit_code, number, status, kind, api_code = 8, 1, 503, "unavailable_error", None


class ServerGone(ServerError):
    """The server that was used no longer answers."""

    number = 2


class ContextTooLong(LocalLLMError):
    """More tokens than the context window holds."""

    exit_code, number, status, kind, api_code = 9, 1, 400, "invalid_request_error", "context_length_exceeded"


class ConstraintUnmet(LocalLLMError):
    """The output does not meet the schema, grammar or length that was demanded."""

    exit_code, number, status, kind, api_code = 10, 1, 400, "invalid_request_error", "constraint_unmet"


class BadModelFile(LocalLLMError):
    """A model file that is damaged, truncated or hostile."""

    exit_code, number, status, kind, api_code = 12, 1, 400, "invalid_request_error", None

    def __init__(self, message: str, hint: str = REPAIR, **rest: Any) -> None:
        super().__init__(message, hint, **rest)

    def about(self, file: str, name: str = "") -> BadModelFile:
        """The same error, naming the file where it does not yet, and in its hint the model where `pull` knows it.

        file  the name of the model's file or folder
        name  what `localllm pull` calls the model; "" for one that has only a path
        """
        named = "file" in self.context or file in self.message
        hint = self.hint
        if name:
            hint = f"localllm pull {name} --repair" if hint == REPAIR else hint.replace("NAME", name)
        return type(self)(
            self.message if named else f"{file}: {self.message}",
            hint,
            why=self.why,
            fixes=self.fixes,
            context={"file": file, **self.context},
            param=self.param,
        )


class UnsupportedModel(BadModelFile):
    """An architecture or feature this version cannot run."""

    number = 2


class UnsupportedFormat(BadModelFile):
    """A stored format this version cannot read."""

    number = 3


class Aborted(LocalLLMError):
    """Stopped by the user."""

    exit_code, number, status, kind, api_code = 130, 1, 499, "invalid_request_error", None

"""Every failure a user can cause: what happened, the value, the limit, and the next command.

    LocalLLMError
    ├── ConfigError            exit 2    an invalid setting or flag
    ├── InvalidRequest         exit 2    a request outside its limits                 HTTP 400
    │   └── InvalidConstraint  exit 2    a schema or grammar that cannot be enforced  HTTP 400
    ├── ModelNotFound          exit 3    no such model, or not downloaded             HTTP 404
    ├── AuthRequired           exit 4    a token or an accepted license is needed
    ├── DoesNotFit             exit 5    too little memory or disk space              HTTP 503
    │   └── OutOfMemory        exit 5    memory ran out during use
    ├── DeviceError            exit 6    the device is missing, unusable or broken    HTTP 503
    ├── DownloadError          exit 7    the network or the hub failed
    ├── ServerError            exit 8    port in use, no server, or server refused
    ├── ContextTooLong         exit 9    more tokens than the window holds            HTTP 400
    ├── ConstraintUnmet        exit 10   the output broke its schema or length
    ├── BadModelFile           exit 12   damaged, truncated or hostile model files
    │   ├── UnsupportedModel   exit 12   an architecture this version cannot run
    │   └── UnsupportedFormat  exit 12   a stored format this version cannot read
    ├── Aborted                exit 130  stopped by the user
    ├── HistoryError           exit 1    the database of chats (localllm.history)
    └── InternalError          exit 1    a bug in localllm

`cli/frame/console.py` turns an error into a message and an exit code; the server turns it into each API's error body.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# the hint for a damaged file where the model's name is not known
REPAIR = "download it again (localllm pull NAME --repair), or use another copy of the model"
# why a model of another architecture is refused
SUPPORTED = "`localllm catalog` lists models that run here, docs/models.md all architectures"


class LocalLLMError(Exception):
    """Base of all errors shown to users.

    message   what happened, the value and the limit, in one sentence
    hint      the next command or step, in one sentence
    why       optional: where the limit comes from
    fixes     optional: (command, note) pairs, each ready to run
    context   optional: the values, for the JSON form
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
    """A bug in localllm; the log has the traceback."""


class ConfigError(LocalLLMError):
    """An invalid setting, flag or combination of them."""

    exit_code, number, status, kind, api_code = 2, 1, 400, "invalid_request_error", None


class InvalidRequest(LocalLLMError):
    """A request outside its documented limits."""

    exit_code, number, status, kind, api_code = 2, 2, 400, "invalid_request_error", "invalid_value"


class InvalidConstraint(InvalidRequest):
    """A schema, regular expression or grammar that is wrong, too complex, or beyond what can be enforced."""

    number, api_code = 3, "invalid_json_schema"


class ModelNotFound(LocalLLMError):
    """The model does not exist, or is not on this machine and may not be downloaded now."""

    exit_code, number, status, kind, api_code = 3, 1, 404, "invalid_request_error", "model_not_found"


class AuthRequired(LocalLLMError):
    """The hub requires a token, or the license must be accepted first."""

    exit_code, number, status, kind, api_code = 4, 1, 401, "authentication_error", None


class DoesNotFit(LocalLLMError):
    """There is too little memory or disk space."""

    exit_code, number, status, kind, api_code = 5, 1, 503, "unavailable_error", "does_not_fit"


class OutOfMemory(DoesNotFit):
    """Memory ran out during use."""

    number = 2


class DeviceError(LocalLLMError):
    """The device is missing, unusable or broken."""

    exit_code, number, status, kind, api_code = 6, 1, 503, "server_error", "engine_dead"


class DownloadError(LocalLLMError):
    """The network or the hub failed, or the download does not match its checksum."""

    exit_code, number, status, kind, api_code = 7, 1, 502, "server_error", None


class ServerError(LocalLLMError):
    """The port is in use, no server is running, or the server refused."""

    exit_code, number, status, kind, api_code = 8, 1, 503, "unavailable_error", None


class ServerGone(ServerError):
    """The server stopped answering."""

    number = 2


class ContextTooLong(LocalLLMError):
    """The input has more tokens than the context window holds."""

    exit_code, number, status, kind, api_code = 9, 1, 400, "invalid_request_error", "context_length_exceeded"


class ConstraintUnmet(LocalLLMError):
    """The output does not meet the required schema, grammar or length."""

    exit_code, number, status, kind, api_code = 10, 1, 400, "invalid_request_error", "constraint_unmet"


class BadModelFile(LocalLLMError):
    """A model file that is damaged, truncated or hostile."""

    exit_code, number, status, kind, api_code = 12, 1, 400, "invalid_request_error", None

    def __init__(self, message: str, hint: str = REPAIR, **rest: Any) -> None:
        super().__init__(message, hint, **rest)

    def about(self, file: str, name: str = "") -> BadModelFile:
        """Return the error with the file's name in its message, and the model's name in its hint if `pull` knows it.

        file  the name of the model's file or folder
        name  the model's name for `localllm pull`; "" when it has only a path
        """
        named = "file" in self.context or file in self.message
        hint = self.hint
        if name:
            hint = f"localllm pull {name} --repair" if hint == REPAIR else hint.replace("NAME", name)
        elif hint == REPAIR:  # `pull` repairs names only
            hint = "use another copy of the model, or download it again"
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


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The known word that was probably meant; "" when none is close."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(word, known, 1, cutoff)), "")


def did_you_mean(near: str) -> str:
    """The end of a message about an unknown name; `near` is the one that was probably meant, or ""."""
    return f"; did you mean {near}?" if near else ""

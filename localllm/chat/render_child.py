"""The parent's side of `render.py`: one child process, its deadline, and its restart. No Jinja here."""

from __future__ import annotations

import atexit
import json
import os
import re
import select
import struct
import subprocess
import sys
import threading
import time
from functools import cache
from typing import Any

from localllm.errors import BadModelFile, InternalError, InvalidRequest, LocalLLMError

DEADLINE_S = 1.8
"""of one rendering, so that the error is out within two seconds"""
START_S = 30.0
"""for Python to start on a busy machine; usually 0.1"""
MAX_REQUEST_BYTES = 64 << 20
MAX_ANSWER_BYTES = 64 << 20  # 4 MB of text, every character of it escaped as JSON does at worst
_HEADER = struct.Struct("<I")
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b.?")
# what a template's process may know of its surroundings: no tokens, no keys
_ENVIRONMENT = frozenset(
    "PATH HOME LANG LANGUAGE TZ TMPDIR VIRTUAL_ENV LD_LIBRARY_PATH "  # noqa: SIM905 - one line reads better
    "PYTHONPATH PYTHONHOME PYTHONSAFEPATH PYTHONUTF8 PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX".split()
)


class _Ended(Exception):
    """The child closed its pipe."""


class _Late(Exception):
    """The deadline is over."""


class RenderChild:
    """One child, started when first needed or by `start`, restarted when it dies. Safe to share between threads."""

    def __init__(self) -> None:
        """Starts nothing."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False

    @property
    def pid(self) -> int | None:
        """The child's process id, None while there is none."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the child, and do not wait for it."""
        with self._lock:
            self._ensure()

    def close(self) -> None:
        """End the child. It starts again when asked to render."""
        with self._lock:
            self._end()

    def render(self, template: str, variables: dict[str, Any], *, of_model: bool = True) -> str:
        """The text of a template.

        `of_model`: the template is the model's own, so a broken one is a BadModelFile; else it came with the request.
        Raises InvalidRequest for messages that the template refuses or fails on, and for limits: 1.8 s, 192 MiB, 4 MB.
        """
        try:
            body = json.dumps({"template": template, "variables": variables}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"the messages are not plain data: {clean(str(error))}", "send JSON values") from error
        if len(body) > MAX_REQUEST_BYTES:
            limit = f"{MAX_REQUEST_BYTES:,}"
            raise InvalidRequest(f"the messages have {len(body):,} bytes, the limit is {limit}", "send less text")
        answer = self._exchange(_HEADER.pack(len(body)) + body)
        if "text" in answer:
            return str(answer["text"])
        raise _error(str(answer.get("error")), clean(str(answer.get("message", ""))), of_model)

    # --- the process -------------------------------------------------------------------------------------------------

    def _exchange(self, request: bytes) -> dict[str, Any]:
        with self._lock:
            for attempt in (1, 2):
                self._ensure()
                try:
                    if not self._ready:
                        self._read(_HEADER.size, time.monotonic() + START_S)
                        self._ready = True
                    deadline = time.monotonic() + DEADLINE_S
                    self._write(request, deadline)
                    (size,) = _HEADER.unpack(self._read(_HEADER.size, deadline))
                    if size > MAX_ANSWER_BYTES:
                        raise _Late
                    answer = json.loads(self._read(size, deadline + 1.0))  # done: only the pipe is left
                    return answer if isinstance(answer, dict) else {}
                except _Ended:
                    # killed from outside, perhaps: once more with a new child
                    self._end()
                    if attempt == 2:
                        return {"error": "limit", "message": "the renderer died"}
                except _Late:
                    was_ready = self._ready
                    self._end()
                    self._ensure()
                    if not was_ready:
                        message = f"the process that renders chat templates did not start in {START_S:.0f} s"
                        raise InternalError(message, "try again when the machine is less busy") from None
                    return {"error": "limit", "message": f"over {DEADLINE_S} s"}
                except BaseException:
                    self._end()  # interrupted in the middle of an exchange: its answer belongs to nobody
                    raise
        raise AssertionError("unreachable")

    def _ensure(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        kept = {k: v for k, v in os.environ.items() if k in _ENVIRONMENT or k.startswith("LC_")}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "localllm.chat.render"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=kept,
            bufsize=0,
        )
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)

    def _end(self) -> None:
        process, self._process, self._ready = self._process, None, False
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()

    def _write(self, data: bytes, deadline: float) -> None:
        assert self._process is not None and self._process.stdin is not None
        descriptor, rest = self._process.stdin.fileno(), memoryview(data)
        while rest:
            _wait(descriptor, select.POLLOUT, deadline)
            try:
                rest = rest[os.write(descriptor, rest) :]
            except BrokenPipeError:
                raise _Ended from None
            except BlockingIOError:
                continue

    def _read(self, count: int, deadline: float) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        descriptor, data = self._process.stdout.fileno(), bytearray()
        while len(data) < count:
            _wait(descriptor, select.POLLIN, deadline)
            try:
                piece = os.read(descriptor, min(count - len(data), 1 << 16))
            except BlockingIOError:
                continue
            if not piece:
                raise _Ended
            data += piece
        return bytes(data)


@cache
def shared_child() -> RenderChild:
    """The child that everything in this process renders with; it ends with the process."""
    child = RenderChild()
    atexit.register(child.close)
    return child


def clean(text: str, limit: int = 300) -> str:
    """Text of a stranger for an error message: no escape sequences, one line, not too long."""
    text = _ESCAPES.sub("", text[: 10 * limit])
    text = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _wait(descriptor: int, event: int, deadline: float) -> None:
    """Until the descriptor is ready or closed; `_Late` when the deadline comes first."""
    poll = select.poll()
    poll.register(descriptor, event)
    left = deadline - time.monotonic()
    if left <= 0 or not poll.poll(left * 1000):
        raise _Late


def _error(kind: str, message: str, of_model: bool) -> LocalLLMError:
    broken: type[LocalLLMError] = BadModelFile if of_model else InvalidRequest
    again = (
        "fetch it again (localllm pull NAME --repair), or give another template"
        if of_model
        else "send a valid template"
    )
    if kind == "raised":
        return InvalidRequest(f"the chat template refuses these messages: {message}", "change the messages")
    if kind == "syntax":
        return broken(f"the chat template is not valid, {message}", again)
    if kind == "security":
        return broken(f"the chat template does what a template may not: {message}", again)
    if kind == "size":
        return InvalidRequest("the chat template makes more than 4 MB of text", "send fewer or shorter messages")
    if kind == "limit":
        return broken(f"the chat template needs more than it may have (1.8 s, 192 MiB): {message}", again)
    return InvalidRequest(f"the chat template fails on these messages: {message}", "change the messages")

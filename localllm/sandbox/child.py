"""A child process that answers requests over pipes, with deadlines, and is restarted after it dies.

For work that cannot be interrupted in this process: rendering chat templates, compiling grammars, measuring a card.
A message is a little-endian uint32 length followed by that many bytes; the child signals readiness with an empty one.
"""

from __future__ import annotations

import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time

from localllm.errors import InternalError

START_S = 30.0  # for Python to start on a busy machine; usually 0.1
MAX_ANSWER_BYTES = 64 << 20
DYING_S = 0.5  # for a child to exit after its pipe closed, so that its exit code is known
HEADER = struct.Struct("<I")
# what ends a child whose work exhausts its stack, memory or time; other deaths may come from outside
_OWN_SIGNALS = frozenset((signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGPROF))
# environment variables that the child may see: no tokens, no keys
_ENVIRONMENT = frozenset(
    "PATH HOME LANG LANGUAGE TZ TMPDIR VIRTUAL_ENV LD_LIBRARY_PATH "  # noqa: SIM905 - one line reads better
    "PYTHONPATH PYTHONHOME PYTHONSAFEPATH PYTHONUTF8 PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX".split()
)


class ChildDied(Exception):
    """The child closed its pipe; the next request starts a new one. `code` is its exit code, or minus the signal."""

    def __init__(self, code: int = 0) -> None:
        super().__init__(f"code {code}")
        self.code = code


class ChildLate(Exception):
    """The deadline passed; the child was killed."""


class Child:
    """One child, started on first use or by `start`. Safe to share between threads, which take turns."""

    def __init__(self, module: str, what: str, *, trusted: bool = False) -> None:
        """Start nothing yet.

        module   run as `python -P -m module`
        what     name for errors: "the process that renders chat templates"
        trusted  pass on the whole environment
        """
        self._module = module
        self._what = what
        self._trusted = trusted
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False

    @property
    def pid(self) -> int | None:
        """The child's process id, None while there is none."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the child without waiting for it."""
        with self._lock:
            self._ensure()

    def close(self) -> None:
        """End the child. The next request starts it again."""
        with self._lock:
            self._end()

    def exchange(self, request: bytes, deadline_s: float) -> bytes:
        """Send one request and return the answer. Raises ChildDied or ChildLate; InternalError if it cannot start."""
        with self._lock:
            self._ensure()
            try:
                if not self._ready:
                    self._read(HEADER.size, time.monotonic() + START_S)
                    self._ready = True
                deadline = time.monotonic() + deadline_s
                self._write(HEADER.pack(len(request)) + request, deadline)
                (size,) = HEADER.unpack(self._read(HEADER.size, deadline))
                if size > MAX_ANSWER_BYTES:
                    raise ChildLate
                return self._read(size, deadline + 1.0)  # the work is done: only the pipe is left
            except ChildDied:
                raise ChildDied(self._end(DYING_S)) from None
            except ChildLate:
                was_ready = self._ready
                self._end()
                self._ensure()
                if not was_ready:
                    message = f"{self._what} did not start in {START_S:.0f} s"
                    raise InternalError(message, "try again when the machine is less busy") from None
                raise
            except BaseException:
                self._end()  # interrupted during an exchange: the pending answer must not reach the next request
                raise

    def insist(self, request: bytes, deadline_s: float) -> bytes:
        """`exchange`, and once more with a new child if the first was perhaps killed from outside."""
        try:
            return self.exchange(request, deadline_s)
        except ChildDied as died:
            if -died.code in _OWN_SIGNALS:
                raise
        return self.exchange(request, deadline_s)

    def _ensure(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        environment = {k: v for k, v in os.environ.items() if self._trusted or k in _ENVIRONMENT or k.startswith("LC_")}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            bufsize=0,
        )
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)

    def _end(self, wait_s: float = 0.0) -> int:
        """End the child. Returns its exit code, or 0 if it was still running after `wait_s`."""
        process, self._process, self._ready = self._process, None, False
        if process is None:
            return 0
        with process:  # closes the pipes and waits on exit
            try:
                return process.wait(wait_s)
            except subprocess.TimeoutExpired:
                process.kill()
                return 0

    def _write(self, data: bytes, deadline: float) -> None:
        assert self._process is not None and self._process.stdin is not None
        descriptor, rest = self._process.stdin.fileno(), memoryview(data)
        while rest:
            _wait(descriptor, select.POLLOUT, deadline)
            try:
                rest = rest[os.write(descriptor, rest) :]
            except BrokenPipeError:
                raise ChildDied from None
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
                raise ChildDied
            data += piece
        return bytes(data)


def _wait(descriptor: int, event: int, deadline: float) -> None:
    """Wait until the descriptor is ready or closed. Raises ChildLate at the deadline."""
    poll = select.poll()
    poll.register(descriptor, event)
    left = deadline - time.monotonic()
    if left <= 0 or not poll.poll(left * 1000):
        raise ChildLate

"""The single exit path of every command: a failure becomes a message, a log line and an exit code."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import typer

from localllm.cli.frame import logs
from localllm.cli.frame.console import Console
from localllm.errors import Aborted, DoesNotFit, InternalError, LocalLLMError, OutOfMemory

LOG = logging.getLogger("localllm")


def exit_code(console: Console, body: Callable[[], Any]) -> int:
    """Run the body of a command; every failure becomes a message and an exit code."""
    try:
        result = body()
        console.stdout.flush()
        return result if isinstance(result, int) else 0
    except LocalLLMError as error:
        LOG.debug("command failed", exc_info=True)
        return interrupted(console, error) if isinstance(error, Aborted) else _fail(console, error)
    except (KeyboardInterrupt, EOFError):
        return interrupted(console)
    except BrokenPipeError:
        return broken_pipe()
    except (typer.Exit, SystemExit):
        raise
    except Exception as error:
        return _fail(console, explain(error))


def interrupted(console: Console, error: Aborted | None = None) -> int:
    """Ctrl+C: say so at once; a second Ctrl+C ends the process without waiting."""
    with contextlib.suppress(ValueError):  # outside the main thread, in tests
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    if console.as_json:
        return console.fail(error or Aborted("stopped by Ctrl+C"))
    said = error.message if error else "stopped"
    if console.as_events:
        console.event({"event": "note", "message": said})
        return 130
    console.stderr.write(f"\n{said}\n" if console.err_tty else f"{said}\n")
    console.stderr.flush()
    return 130


def broken_pipe() -> int:
    """The reader of stdout went away: stay quiet, even when the interpreter flushes on exit."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    return 141


def leave_now(code: int) -> NoReturn:
    """Exit without waiting for a thread that loads or runs a model: tearing the interpreter down would abort it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def explain(error: Exception) -> LocalLLMError:
    """Turn an unexpected exception into an error with advice; the traceback goes to the log."""
    if isinstance(error, MemoryError):
        return OutOfMemory("memory ran out", "close other programs, or use a smaller model or --ctx")
    if isinstance(error, OSError) and error.strerror and error.errno:
        where = f" ({error.filename})" if error.filename else ""
        if error.errno == errno.ENOSPC:
            return DoesNotFit(f"no space left on the disk{where}", "free some space, then run the same command again")
        LOG.error("operating system error", exc_info=error)
        return LocalLLMError(f"{error.strerror}{where}", "check the path, its permissions and the disk")
    LOG.error("unexpected error", exc_info=error)
    first = str(error).strip().splitlines()
    what = f"{type(error).__name__}: {first[0][:200]}" if first else type(error).__name__
    return InternalError(f"unexpected error: {what}", f"see {logs.path()} for details; `localllm doctor` may help")


def _fail(console: Console, error: LocalLLMError) -> int:
    try:
        code = console.fail(error)
        if console.verbose >= 2:
            import traceback

            traceback.print_exception(error.__cause__ or error, file=console.stderr)
        return code
    except BrokenPipeError:
        return broken_pipe()

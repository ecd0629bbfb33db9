"""Where log lines go: a rotating file, and stderr with -v. The file is created with its first line."""

from __future__ import annotations

import logging
import logging.handlers
import sys
from pathlib import Path
from typing import Any

from localllm.errors import ConfigError
from localllm.paths import log_dir
from localllm.terminal import clean

MAX_BYTES = 2 << 20  # of one log file; three are kept


class _Lines(logging.Formatter):
    """One line per record, with an indented traceback; control characters of foreign text never reach the file."""

    def format(self, record: logging.LogRecord) -> str:
        trace = record.exc_info
        record.exc_info, record.exc_text = None, None
        try:
            line = clean(super().format(record)).replace("\n", "\\n")
        finally:
            record.exc_info = trace
        if trace:
            line += "\n    " + clean(self.formatException(trace)).replace("\n", "\n    ")
        return line


class _LazyFile(logging.handlers.RotatingFileHandler):
    """Creates its folder on first use; a file that later cannot be written costs the log, not the command."""

    def _open(self):  # type: ignore[no-untyped-def]  # the type is typeshed's own detail
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def path() -> Path:
    """The log file in use."""
    return next((Path(one.baseFilename) for one in _ours() if isinstance(one, _LazyFile)), log_dir() / "localllm.log")


def start(file: Path | None = None, verbose: int = 0) -> None:
    """Send all loggers to the file, including library warnings; with `verbose`, also to stderr.

    Raises ConfigError when `file` cannot be opened. The default file is opened with its first line.
    """
    stop()
    target = file or log_dir() / "localllm.log"
    limits: dict[str, Any] = {"maxBytes": MAX_BYTES, "backupCount": 2, "encoding": "utf-8", "errors": "replace"}
    try:
        to_file = _LazyFile(target, delay=file is None, **limits)
    except OSError as error:
        message = f"--log-file: {target} cannot be written: {error.strerror}"
        raise ConfigError(message, "choose a file in a writable folder") from None
    handlers: dict[logging.Handler, str] = {to_file: "%(asctime)s %(levelname)s %(name)s: %(message)s"}
    if verbose:
        handlers[logging.StreamHandler(sys.stderr)] = "%(levelname)s %(name)s: %(message)s"
    for handler, form in handlers.items():
        handler.setFormatter(_Lines(form))
        logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.DEBUG if verbose >= 2 else logging.INFO)
    for noisy in ("httpx", "httpcore", "filelock", "markdown_it", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.captureWarnings(True)


def no_stderr() -> None:
    """Take log lines off stderr, before a full-screen interface opens."""
    for handler in _ours():
        if not isinstance(handler, _LazyFile):
            logging.getLogger().removeHandler(handler)


def stop() -> None:
    """Remove what `start` added."""
    for handler in _ours():
        logging.getLogger().removeHandler(handler)
        handler.close()
    logging.captureWarnings(False)


def _ours() -> list[logging.Handler]:
    return [handler for handler in logging.getLogger().handlers if isinstance(handler.formatter, _Lines)]

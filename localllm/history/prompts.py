"""The prompt history, one JSON line per prompt: append-only, so that concurrent chats do not overwrite each other."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from pathlib import Path

from localllm.paths import state_dir

log = logging.getLogger(__name__)

KEPT = 1000  # lines that are read, and kept when the file is trimmed
MAX_BYTES = 4 << 20
MAX_PROMPT = 100_000  # characters; a longer one is a pasted attachment


class PromptHistory:
    """The prompts of all chats, oldest first. An unusable file costs the history, not the chat."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or state_dir() / "history.jsonl"

    def load(self) -> list[str]:
        """The last prompts; broken lines are skipped."""
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, self.path.stat().st_size - MAX_BYTES))
                lines = file.read(MAX_BYTES).decode("utf-8", "replace").splitlines()
        except OSError:
            return []
        found: list[str] = []
        for line in lines[-KEPT:]:
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError):
                continue
            if isinstance(text, str) and found[-1:] != [text]:
                found.append(text)
        return found

    def add(self, text: str) -> None:
        if not text.strip() or len(text) > MAX_PROMPT:
            return
        line = json.dumps({"t": int(time.time()), "text": text}) + "\n"
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                if os.fstat(handle).st_size > MAX_BYTES:
                    self._cut(handle)
                os.write(handle, line.encode())
            finally:
                os.close(handle)
        except OSError as error:
            log.warning("the prompt history cannot be written: %s", error)

    def _cut(self, handle: int) -> None:
        """Keep the last lines, in place, because other processes hold the file open."""
        os.lseek(handle, 0, os.SEEK_SET)
        with os.fdopen(os.dup(handle), "rb") as file:
            lines = file.read().splitlines(keepends=True)[-KEPT:]
        os.ftruncate(handle, 0)
        os.write(handle, b"".join(lines))

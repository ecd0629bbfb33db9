"""Text files that go with a message: read, bounded, told apart from what is not text."""

from __future__ import annotations

import os
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import ConfigError
from localllm.terminal import clean_line, gib

MAX_BYTES = 4 << 20
MAX_FILES = 20


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file's name and its text."""

    name: str
    text: str

    @property
    def label(self) -> str:
        """'notes.txt · 1.2 KiB', safe to show."""
        return f"{clean_line(self.name)} · {gib(len(self.text.encode('utf-8', 'replace')))}"

    @property
    def block(self) -> str:
        """As the model sees it."""
        fence = "```"
        while fence in self.text:
            fence += "`"
        return f"{self.name}:\n{fence}\n{self.text.rstrip()}\n{fence}"


def read_attachment(path: str | Path) -> Attachment:
    """One file. Raises ConfigError when it is not there, is not a regular file, is too large, or is not text."""
    file = Path(path).expanduser()
    shown = clean_line(str(path))
    try:
        # a FIFO or a device would block or never end
        handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as opened:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{shown} is not a file", "attach text files")
            if found.st_size > MAX_BYTES:
                raise ConfigError(f"{shown} is {gib(found.st_size)}; the limit is {gib(MAX_BYTES)}", "shorten it")
            data = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{shown} cannot be read: {error.strerror}", "check the path") from None
    if b"\0" in data[:8192]:
        raise ConfigError(f"{shown} is not text", "attach text files; images are not supported")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    return Attachment(file.name, text)


def read_attachments(typed: str) -> list[Attachment]:
    """The files of `/attach a.txt "b c.txt" *.py`, quotes and wildcards as in a shell."""
    import glob

    try:
        words = shlex.split(typed)
    except ValueError:
        words = typed.split()
    names = [name for word in words for name in sorted(glob.glob(os.path.expanduser(word))) or [word]]
    if not names:
        raise ConfigError("/attach needs the path of a file", "/attach notes.txt")
    if len(names) > MAX_FILES:
        raise ConfigError(f"{len(names)} files; a message takes at most {MAX_FILES}", "name fewer")
    return [read_attachment(name) for name in names]


def mentioned(text: str) -> list[Attachment]:
    """The files behind `@path` in a message. Raises ConfigError for one that is there and cannot be attached."""
    words = [word[1:].rstrip(".,;:!?)\"'") for word in text.split() if word.startswith("@") and len(word) > 1]
    return [read_attachment(word) for word in dict.fromkeys(words) if Path(word).expanduser().is_file()]


def matching_files(prefix: str, limit: int = 8) -> list[str]:
    """Paths that begin as typed, folders with a slash at the end; hidden ones only when asked for."""
    folder, _, start = prefix.rpartition("/")
    base = Path(folder + "/" if prefix.startswith("/") and not folder else folder or ".").expanduser()
    found = []
    try:
        with os.scandir(base) as entries:
            for entry in entries:
                if not entry.name.lower().startswith(start.lower()) or (entry.name.startswith(".") and not start):
                    continue
                if entry.name.isprintable():
                    found.append((f"{folder}/" if "/" in prefix else "") + entry.name + ("/" if entry.is_dir() else ""))
                if len(found) >= 500:
                    break
    except OSError:
        return []
    return sorted(found, key=str.casefold)[:limit]

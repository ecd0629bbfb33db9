"""What a model name may look like, and which strings from a hub may become paths: pure functions, no file is touched.

Everything that arrives from outside and ends in a path (repository ids, revisions, file names, digests) passes here
first, so that there is one place to check and one place to test. Called by every other module of this folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from localllm.errors import BadModelFile, DownloadError, InvalidRequest

MAX_FILES = 20_000  # files of one repository; real ones stay below a few hundred

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REPO = re.compile(rf"{_PART}/{_PART}", re.ASCII)
_QUANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", re.ASCII)  # Ollama's tags, too
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}", re.ASCII)
_SEGMENT = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_PLAIN = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})?", re.ASCII)
_HUBS = ("hf.co/", "huggingface.co/")  # what Ollama's users write before a repository
# models of other programs (`foreign.py`), and repositories as Ollama writes them
_ELSEWHERE = re.compile(rf"(?:ollama|lmstudio|llama\.cpp|hf|hf\.co|huggingface\.co)(?:/{_SEGMENT}){{1,4}}", re.ASCII)


class ModelName(NamedTuple):
    """`NAME[:QUANT][@REVISION]`, taken apart."""

    base: str
    quant: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        quant = f":{self.quant}" if self.quant else ""
        return f"{self.base}{quant}{f'@{self.revision}' if self.revision else ''}"


def shown(text: str, limit: int = 80) -> str:
    """Foreign text for a message: control and invisible characters escaped, shortened."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def parse_name(text: str) -> ModelName:
    """Take a name apart that is not a path. Raises InvalidRequest; nothing has been asked or opened by then."""
    if text.startswith(("/", "./", "../", "~")):
        raise InvalidRequest(
            f"{shown(text)!r} is a path; this takes the name of a model",
            "`localllm ls` lists the models on this machine",
            param="model",
        )
    base, _, revision = text.partition("@")
    base, _, quant = base.partition(":")
    elsewhere = _ELSEWHERE.fullmatch(base)
    if not (elsewhere or _PLAIN.fullmatch(base)) or ".." in base:
        raise InvalidRequest(
            f"{shown(text)!r} is not a model name: it takes a path, org/repo or an alias of letters, digits, - _ and .",
            "`localllm ls` lists the models on this machine; a path starts with ./ or /",
            param="model",
        )
    if "/" in base and not elsewhere:
        check_repo_id(base)
    if ":" in text.partition("@")[0] and not _QUANT.fullmatch(quant):
        raise InvalidRequest(f"{shown(quant)!r} in {shown(text)!r} is not a quant, such as Q4_K_M", param="model")
    if "@" in text:
        check_revision(revision)
    return ModelName(base, quant or None, revision or None)


def bare(base: str) -> str:
    """A repository without the hub's address before it."""
    return next((base.removeprefix(hub) for hub in _HUBS if base.startswith(hub)), base)


def is_repo_id(text: str) -> bool:
    """`org/repo`"""
    return bool(_REPO.fullmatch(text)) and "--" not in text and ".." not in text and not text.endswith(".git")


def check_repo_id(repo: str) -> str:
    """`org/repo`, or InvalidRequest."""
    if not is_repo_id(repo):
        raise InvalidRequest(
            f"{shown(repo)!r} is not a repository id: two parts of at most 96 letters, digits, - _ and ., as org/repo",
            "for a file or folder, start with ./ or /",
            param="model",
        )
    return repo


def check_revision(revision: str) -> str:
    """A branch, tag or commit, or InvalidRequest."""
    parts = revision.split("/")
    if not _REVISION.fullmatch(revision) or ".." in revision or any(not p or p.startswith(".") for p in parts):
        raise InvalidRequest(
            f"{shown(revision)!r} is not a revision: a branch, a tag or a commit of at most 128 characters",
            param="model",
        )
    return revision


def check_digest(text: object, hex_digits: int = 64) -> str:
    """A lower-case hex digest of exactly that length, the only strings that become blob and snapshot names.

    64 digits are a SHA-256, 40 a git object id. Raises DownloadError: the hub is broken or hostile.
    """
    if isinstance(text, str) and re.fullmatch(rf"[0-9a-f]{{{hex_digits}}}", text, re.ASCII):
        return text
    raise DownloadError(
        f"the hub states {shown(str(text), 40)!r} where a digest of {hex_digits} hex digits belongs",
        "check HF_ENDPOINT, or try again later",
    )


def check_file_names(names: Sequence[str], repo: str) -> None:
    """Refuse a listing in which any name could leave its folder or hide what it is (BadModelFile)."""
    if len(names) > MAX_FILES:
        raise BadModelFile(f"{repo} lists {len(names):,} files, the limit is {MAX_FILES:,}", _SUSPECT)
    for name in names:
        problems = {
            "leaves its folder": any(part in ("", ".", "..") for part in name.split("/")),
            "has a backslash or a colon": "\\" in name or ":" in name,
            "is longer than 255 characters": len(name.encode(errors="replace")) > 255,
            "has control characters": not name.isprintable(),
        }
        problem = next((problem for problem, is_so in problems.items() if is_so), None)
        if problem:
            message = f"{repo} lists the file {shown(name)!r}, which {problem}; nothing was downloaded"
            raise BadModelFile(message, _SUSPECT)


_SUSPECT = "the repository is damaged or hostile: use another one"


def check_no_collision(names: Iterable[str], repo: str) -> None:
    """Refuse two names that are one file where upper and lower case are the same (BadModelFile)."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(name.casefold(), name)
        if other != name:
            raise BadModelFile(
                f"{repo} lists {shown(other)!r} and {shown(name)!r}, which differ in case only", _SUSPECT
            )

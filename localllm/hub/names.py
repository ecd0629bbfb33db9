"""Validates model names, and the strings from a hub that become paths. Pure functions; touches no file.

All outside input that ends up in a path (repository ids, revisions, file names, digests) is checked here first. Used by
every other module of this package.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from localllm.errors import BadModelFile, DownloadError, InvalidRequest
from localllm.terminal import escaped

MAX_FILES = 20_000  # files per repository; real ones have at most a few hundred

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REPO = re.compile(rf"{_PART}/{_PART}", re.ASCII)
_QUANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", re.ASCII)  # Ollama's tags, too
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}", re.ASCII)
_SEGMENT = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_PLAIN = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})?", re.ASCII)
_PAGE = re.compile(rf"https?://(?:hf|huggingface)\.co/({_PART}/{_PART})(?:/tree/main)?/?", re.ASCII)
_HUBS = ("hf.co/", "huggingface.co/")  # prefixes that Ollama's users put before a repository
# models of other programs (`foreign.py`), and repositories with Ollama's prefixes
_ELSEWHERE = re.compile(rf"(?:ollama|lmstudio|llama\.cpp|hf|hf\.co|huggingface\.co)(?:/{_SEGMENT}){{1,4}}", re.ASCII)


class ModelName(NamedTuple):
    """The parts of `NAME[:QUANT][@REVISION]`."""

    base: str
    quant: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        quant = f":{self.quant}" if self.quant else ""
        return f"{self.base}{quant}{f'@{self.revision}' if self.revision else ''}"


def shown(text: str, limit: int = 80) -> str:
    """Make untrusted text safe for a message: escape control and invisible characters, and shorten it."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return escaped(cut)


def parse_name(text: str) -> ModelName:
    """Parse a model name that is not a path. Raises InvalidRequest; opens no file and sends no request."""
    if text.startswith(("/", "./", "../", "~")):
        raise InvalidRequest(
            f"{shown(text)!r} is a path, not a model name",
            "`localllm ls` lists the models on this machine",
            param="model",
        )
    if page := _PAGE.fullmatch(text):
        text = page[1]
    elif "://" in text:
        what = f"{shown(text)!r} is not the page of a model on huggingface.co"
        raise InvalidRequest(what, "give org/repo, as the hub names the model", param="model")
    base, _, revision = text.partition("@")
    base, _, quant = base.partition(":")
    elsewhere = _ELSEWHERE.fullmatch(base)
    if not (elsewhere or _PLAIN.fullmatch(base)) or ".." in base:
        raise InvalidRequest(
            f"{shown(text)!r} is not a model name: use a path, org/repo, or an alias of letters, digits, - _ and .",
            "`localllm ls` lists the models on this machine; a path starts with ./ or /",
            param="model",
        )
    if "/" in base and not elsewhere:
        check_repo_id(base)
    if ":" in text.partition("@")[0] and not _QUANT.fullmatch(quant):
        what = f"{shown(quant)!r} in {shown(text)!r} is not a quant such as Q4_K_M"
        raise InvalidRequest(what, "put a quant after a colon: org/repo:Q4_K_M", param="model")
    if "@" in text:
        check_revision(revision)
    return ModelName(base, quant or None, revision or None)


def bare(base: str) -> str:
    """The repository name without a leading hub address."""
    return next((base.removeprefix(hub) for hub in _HUBS if base.startswith(hub)), base)


def is_repo_id(text: str) -> bool:
    """True for a valid `org/repo`."""
    return bool(_REPO.fullmatch(text)) and "--" not in text and ".." not in text and not text.endswith(".git")


def check_repo_id(repo: str) -> str:
    """Return a valid `org/repo` unchanged, else raise InvalidRequest."""
    if not is_repo_id(repo):
        raise InvalidRequest(
            f"{shown(repo)!r} is not a repository id: org/repo, each part up to 96 letters, digits, - _ and .",
            "for a file or folder, start with ./ or /",
            param="model",
        )
    return repo


def check_revision(revision: str) -> str:
    """Return a valid branch, tag or commit unchanged, else raise InvalidRequest."""
    parts = revision.split("/")
    if not _REVISION.fullmatch(revision) or ".." in revision or any(not p or p.startswith(".") for p in parts):
        raise InvalidRequest(
            f"{shown(revision)!r} is not a revision: a branch, tag or commit of up to 128 characters",
            "put a revision after an @: org/repo@main",
            param="model",
        )
    return revision


def check_digest(text: object, hex_digits: int = 64) -> str:
    """Return a lower-case hex digest of exactly that length; only such strings become blob and snapshot names.

    64 digits are a SHA-256, 40 a git object id. Raises DownloadError for anything else from the hub.
    """
    if isinstance(text, str) and re.fullmatch(rf"[0-9a-f]{{{hex_digits}}}", text, re.ASCII):
        return text
    raise DownloadError(
        f"the hub sent {shown(str(text), 40)!r} instead of a digest of {hex_digits} hex digits",
        "check HF_ENDPOINT, or try again later",
    )


def check_file_names(names: Sequence[str], repo: str) -> None:
    """Raise BadModelFile if any listed name could leave its folder or disguise itself."""
    if len(names) > MAX_FILES:
        raise BadModelFile(f"{repo} lists {len(names):,} files; the limit is {MAX_FILES:,}", _SUSPECT)
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


_SUSPECT = "the repository is damaged or malicious: use another one"


def check_no_collision(names: Iterable[str], repo: str) -> None:
    """Raise BadModelFile for two names that would be one file on a case-insensitive file system."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(name.casefold(), name)
        if other != name:
            raise BadModelFile(
                f"{repo} lists {shown(other)!r} and {shown(name)!r}, which differ only in case", _SUSPECT
            )

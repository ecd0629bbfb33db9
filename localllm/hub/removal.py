"""Removes models from this machine: snapshot links, unshared blobs, partial downloads."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from localllm.errors import ModelNotFound

from . import cache, local
from .names import parse_name, shown

SHARED_NOTE = "the Hugging Face cache is also used by other tools (transformers, vLLM, llama.cpp)"


@dataclass(frozen=True, slots=True)
class Removal:
    """The files removed, or the files to remove in a dry run."""

    names: tuple[str, ...]
    paths: tuple[Path, ...]
    num_bytes: int
    revisions: tuple[str, ...] = ()
    note: str = ""
    done: bool = False


def remove(name: str, *, dry_run: bool = False, derived_only: bool = False) -> Removal:
    """Remove a model by name: all revisions unless the name gives one, and all quants unless it gives one.

    derived_only   instead remove all models that `localllm quantize` made and whose names contain `name`

    Raises ModelNotFound when no local model has that name or several do, ConfigError when the folder is read-only or
    another program keeps the model.
    A process that has the model loaded keeps running; its mapped pages stay until it exits.
    """
    parsed = parse_name(name)
    found = _derived(name) if derived_only else local.need_one(parsed, every_revision=True)
    if found[0].is_foreign:
        raise found[0].refusal()
    if found[0].source == "hub":
        return _remove_from_cache(found, found[0].revision if parsed.revision else "", dry_run)
    gone = [f.folder / n for f in found for n in f.files]
    gone += [p for path in gone if path.suffix == ".gguf" and (p := path.with_name(path.name + ".json")).exists()]
    size = sum(f.size_bytes for f in found)
    if not dry_run:
        for folder in dict.fromkeys(f.folder for f in found):
            with cache.writing(folder):
                for path in gone:
                    if path.is_relative_to(folder):
                        path.unlink(missing_ok=True)
                if not [p for p in folder.iterdir() if p.name != ".lock"]:
                    shutil.rmtree(folder)
    return Removal(tuple(f.name for f in found), tuple(gone), size, done=not dry_run)


def _derived(name: str) -> list[local.LocalModel]:
    parsed = parse_name(name)
    part = parsed.base.rpartition("/")[2]
    found = [f for f in local.find_part(parsed._replace(base=part)) if f.derived]
    if not found:
        raise ModelNotFound(f"no model here was quantized from {shown(name)} with localllm", "localllm ls")
    return found


def _remove_from_cache(found: list[local.LocalModel], revision: str, dry_run: bool) -> Removal:
    repo, quants = found[0].repo, {f.quant for f in found}
    here = [f for f in local.scan() if f.repo == repo and revision in ("", f.revision)]
    every = {f.name for f in here} == {f.name for f in found}
    wanted = None if every else {n for f in here if f.quant in quants for n in f.files}
    names = tuple(dict.fromkeys(f.name for f in found))
    if dry_run:
        return _planned(repo, names, wanted, revision)
    with cache.repo_lock(repo):
        planned = _planned(repo, names, wanted, revision)
        _carry_out(repo, planned)
    return replace(planned, done=True)


def _planned(repo: str, names: tuple[str, ...], wanted: set[str] | None, only: str) -> Removal:
    """Plan the removal of a model's files (every file when `wanted` is None) from all snapshots or `only` one.

    Blobs that other names still link to are kept.
    """
    links: list[Path] = []
    kept: set[Path] = set()
    blobs: set[Path] = set()
    revisions: list[str] = []
    for revision in cache.snapshots(cache.repo_dir(repo)):
        folder = cache.repo_dir(repo) / "snapshots" / revision
        for name in cache.files_in(folder):
            path = folder / name
            blob = _blob_behind(path, cache.repo_dir(repo))
            if only in ("", revision) and (wanted is None or name in wanted):
                links.append(path)
                blobs |= {blob} if blob else set()
                revisions += [revision] if revision not in revisions else []
            elif blob:
                kept.add(blob)
    if wanted is None and not only:
        blobs.update(cache.blobs_of(cache.repo_dir(repo)))  # including unlinked ones
    doomed = sorted(blobs - kept)
    num_bytes = sum(cache.num_bytes(p) for p in [*doomed, *links] if not p.is_symlink())
    return Removal(names, (*links, *doomed), num_bytes, tuple(revisions), SHARED_NOTE)


def _blob_behind(path: Path, repo_dir: Path) -> Path | None:
    if not path.is_symlink():
        return None
    target = Path(os.path.normpath(path.parent / os.readlink(path)))
    return target if target.parent == repo_dir / "blobs" else None


def _carry_out(repo: str, planned: Removal) -> None:
    """Remove the planned files, then empty snapshots and dangling refs. The caller holds the repository's lock."""
    folder = cache.repo_dir(repo)
    with cache.writing(folder):
        for path in planned.paths:
            cache.clear(path)
        for revision in cache.snapshots(folder):
            snapshot = folder / "snapshots" / revision
            if not cache.files_in(snapshot):
                shutil.rmtree(snapshot)
        left = set(cache.snapshots(folder))
        for ref in [p for p in (folder / "refs").rglob("*") if p.is_file()]:
            if ref.read_text(encoding="utf-8", errors="replace").strip() not in left:
                ref.unlink()
        if not left:
            for place, _, _ in os.walk(folder, topdown=False):
                with contextlib.suppress(OSError):  # not empty: a download has just started, or someone's own files
                    os.rmdir(place)


def remove_partials(*, dry_run: bool = False) -> Removal:
    """Remove the files of interrupted downloads, including complete blobs that no snapshot links to.

    Files of downloads in progress are kept.
    """
    locks, models = cache.hub_dir() / ".locks", cache.models_dir()
    found = {p: locks / p.parents[1].name / f"{p.name.partition(cache.PARTIAL)[0]}.lock" for p in cache.partials()}
    found |= {p: p.parent / ".lock" for p in sorted(models.glob("*/.fetch-*"))}
    found |= {p: p.with_name(f"{p.name}.lock") for p in sorted(models.glob(".*.partial"))}  # from quantize and cp
    whole = {p: locks / p.parents[1].name / f"{p.name}.lock" for p in cache.unlinked_blobs()}
    sizes = {path: cache.num_bytes(path) for path in found | whole}
    gone = [path for path, lock in found.items() if dry_run or _remove_idle(path, lock)]
    growing = {p.parent for p in cache.partials()}  # those left belong to downloads in progress
    gone += [p for p, lock in whole.items() if dry_run or (p.parent not in growing and _remove_idle(p, lock))]
    note = SHARED_NOTE if whole else ""
    return Removal(tuple(p.name for p in gone), tuple(gone), sum(sizes[p] for p in gone), note=note, done=not dry_run)


def _remove_idle(path: Path, lock_path: Path) -> bool:
    """Delete a partial file or folder unless a running process holds its lock. Returns True if it was deleted."""
    from filelock import FileLock, Timeout

    with cache.writing(path.parent):
        lock_path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(lock_path, mode=0o664).acquire(timeout=0):
                cache.clear(path)
        except Timeout:
            return False
    return True

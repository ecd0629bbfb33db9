"""Takes models off this machine: links, blobs nobody else needs, partial downloads."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import ModelNotFound

from . import cache, local
from .names import parse_name, shown

SHARED_NOTE = "the Hugging Face cache is also used by other tools (transformers, vLLM, llama.cpp)"


@dataclass(frozen=True, slots=True)
class Removal:
    """What was, or would be, removed."""

    names: tuple[str, ...]
    paths: tuple[Path, ...]
    num_bytes: int
    revisions: tuple[str, ...] = ()
    note: str = ""
    done: bool = False


def remove(name: str, *, dry_run: bool = False, derived_only: bool = False) -> Removal:
    """Remove a model by its name, all its revisions; without a quant all quants of a repository.

    derived_only   instead all models that `localllm quantize` made and whose names contain that one

    Raises ModelNotFound when no local model goes by that name or several do, ConfigError when the folder is read-only.
    A process that has the model loaded keeps running: its pages stay until it ends.
    """
    found = _derived(name) if derived_only else local.need_one(parse_name(name))
    if found[0].source == "hub":
        return _remove_from_cache(found, dry_run)
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


def _derived(name: str) -> list[local.Found]:
    parsed = parse_name(name)
    part = parsed.base.rpartition("/")[2]
    found = [f for f in local.find_part(parsed._replace(base=part)) if f.derived]
    if not found:
        raise ModelNotFound(f"nothing here was quantized from {shown(name)} by localllm", "localllm ls")
    return found


def _remove_from_cache(found: list[local.Found], dry_run: bool) -> Removal:
    repo, quants = found[0].repo, {f.quant for f in found}
    every = {f.name for f in local.scan() if f.repo == repo} == {f.name for f in found}
    files = {n for f in local.scan() if f.repo == repo and f.quant in quants for n in f.files}

    def wanted(file: str) -> bool:
        return every or file in files

    if dry_run:
        plan = cache.plan_removal(repo, wanted)
    else:
        with cache.repo_lock(repo):
            plan = cache.plan_removal(repo, wanted)
            cache.remove_planned(repo, plan)
    names = tuple(dict.fromkeys(f.name for f in found))
    gone = (*plan.links, *plan.blobs)
    return Removal(names, gone, plan.num_bytes, tuple(plan.revisions), SHARED_NOTE, done=not dry_run)


def remove_partials(*, dry_run: bool = False) -> Removal:
    """Remove what interrupted downloads left; files that are arriving right now stay."""
    found = [(p, _bytes(p), cache.blob_lock_of(p)) for p in cache.partials()]
    models = cache.models_dir()
    found += [(p, _bytes(p), p.parent / ".lock") for p in sorted(models.glob("*/.fetch-*"))]
    found += [(p, _bytes(p), p.with_name(f"{p.name}.lock")) for p in sorted(models.glob(".*.partial"))]  # quantize
    gone = [(path, size) for path, size, lock in found if dry_run or _remove_idle(path, lock)]
    taken = tuple(path for path, _ in gone)
    return Removal(tuple(p.name for p in taken), taken, sum(size for _, size in gone), done=not dry_run)


def _bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(p.stat().st_size for p in files if p.is_file())


def _remove_idle(path: Path, lock_path: Path) -> bool:
    """Delete a partial file or folder unless a running process holds its lock. True when it is gone."""
    from filelock import FileLock, Timeout

    with cache.writing(path.parent):
        lock_path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(lock_path, mode=0o664)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return False
        try:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        finally:
            lock.release()
    return True

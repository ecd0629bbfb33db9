"""Copies a local model to a new name: a folder in the models folder that shares the model's files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from localllm.errors import ConfigError, ModelNotFound

from . import cache, local
from .local_model import LocalModel
from .names import parse_name, shown
from .selection import safetensors_names


def copy(source: str, target: str) -> Path:
    """Create the model `target` from the files of `source`: hard links where possible, so either can be removed.

    Raises ModelNotFound unless `source` names exactly one local model; ConfigError when another program keeps it, when
    `target` is not a plain name or is taken, or when the folder cannot be written; DoesNotFit when the disk is full.
    """
    found = exact(source)
    if found.is_foreign:
        raise found.refusal("cp")
    name = parse_name(target)
    if name.quant or name.revision or "/" in name.base:
        raise ConfigError(f"{shown(target)!r} cannot name a copy: it contains / : or @", "choose a plain name")
    folder = cache.models_dir() / name.base
    if local.find(name) or folder.exists():
        raise ConfigError(f"a model {name.base} already exists", f"`localllm rm {name.base}`, or choose another name")
    whole = found.path.is_dir()
    root = found.path if whole else found.folder
    files = _files(found) if whole else found.files
    partial = folder.with_name(f".{folder.name}.partial")
    with cache.writing(folder.parent), cache.file_lock(_lock(partial), lambda: None):
        cache.clear(partial)
        try:
            for file in files:
                _share(Path(os.path.realpath(root / file)), partial / (file if whole else Path(file).name))
            partial.rename(folder)
        except BaseException:
            cache.clear(partial)
            raise
    return folder


def exact(name: str) -> LocalModel:
    """Return the one local model with exactly that name. Raises ModelNotFound."""
    parsed = parse_name(name)
    found = local.find(parsed)
    if len(found) > 1:
        raise local.ambiguous(parsed, found)
    if not found:
        raise ModelNotFound(f"{shown(name)} is not on this machine", "`localllm ls` lists the models on this machine")
    return found[0]


def _files(found: LocalModel) -> list[str]:
    """The files of a safetensors folder, without any GGUF models in it."""
    names = cache.files_in(found.path)
    weights = set(safetensors_names(names))
    return [n for n in names if n in weights or not n.endswith((".safetensors", ".gguf"))]


def _lock(partial: Path) -> Path:
    partial.parent.mkdir(parents=True, exist_ok=True)
    return partial.with_name(f"{partial.name}.lock")


def _share(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another disk, or a file system without hard links
        size = source.stat().st_size
        cache.check_disk(target.parent, size, target.name, "`localllm rm NAME` frees space")
        shutil.copyfile(source, target)

"""Models that other programs keep on this machine: Ollama, LM Studio, llama.cpp, other Hugging Face caches.

They are read in place and never changed. The contents of these folders are not trusted: names are made typable and
unique, directory walks are bounded, and an unreadable entry is skipped or listed with its problem.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from localllm.errors import LocalLLMError

from . import cache
from .local_model import LocalModel, models_in, sets_in, with_size
from .names import shown

ENVIRONMENT = "LOCALLLM_STORES"  # "none" hides other programs' models
MAX_ENTRIES = 2000  # per folder
MAX_MODELS = 2000  # per program
MAX_MANIFEST = 1 << 20  # bytes; real ones have about 1 KiB
_MODEL = "application/vnd.ollama.image.model"
# layers in Ollama's manifests that change the model's output
_UNSUPPORTED_LAYERS = {
    "application/vnd.ollama.image.adapter": "it has a LoRA adapter, which localllm does not apply",
    "application/vnd.ollama.image.tensor": "it is stored as separate tensors, which only Ollama can read",
}
_CACHED = re.compile(r"([^_]+)_(.+?-GGUF)_.+", re.IGNORECASE)  # llama.cpp: org_repo_file


def scan(taken: set[str]) -> list[LocalModel]:
    """List the models of other programs, renamed where they would clash with `taken` (names in lower case)."""
    if os.environ.get(ENVIRONMENT, "").casefold() == "none":
        return []
    found: list[LocalModel] = []
    for models in (_ollama(), _lm_studio(), _llama_cpp(), _hugging_face()):
        with suppress(OSError, LocalLLMError):
            found += itertools.islice(models, MAX_MODELS)
    return list(_unique(found, set(taken)))


def _unique(models: Iterable[LocalModel], taken: set[str]) -> Iterator[LocalModel]:
    """Yield the models with a number added to every duplicate name."""
    for model in models:
        name, number = model.name, 1
        while name.casefold() in taken:
            number += 1
            base, _, quant = model.name.partition(":")
            name = f"{base}-{number}:{quant}" if quant else f"{base}-{number}"
        taken.add(name.casefold())
        yield replace(model, name=name)


# --- Ollama ----------------------------------------------------------------------------------------------------------


def _ollama() -> Iterator[LocalModel]:
    places = [os.environ.get("OLLAMA_MODELS", ""), "~/.ollama/models", "/usr/share/ollama/.ollama/models"]
    for root in _folders(places):
        for host in _entries(root / "manifests"):
            for space in _entries(host):
                for model in _entries(space):
                    for tag in _entries(model):
                        yield _from_manifest(root, tag)


def _from_manifest(root: Path, manifest: Path) -> LocalModel:
    host, space, model, tag = manifest.parts[-4:]
    parts = [space, model] if host == "registry.ollama.ai" else [host, space, model]
    parts = parts[1:] if parts[0] == "library" else parts
    quant = _typable(tag)[:80]
    name = f"ollama/{'/'.join(map(_typable, parts))}:{quant}"
    remove = _command("ollama", "rm", f"{'/'.join(parts)}:{tag}")
    path, size, problem = _weights(root, _read_json(manifest))
    return LocalModel(name, path, "ollama", quant=quant, size_bytes=size, problem=problem, remove_with=remove)


def _weights(root: Path, manifest: Any) -> tuple[Path, int, str]:
    """Return (the GGUF that a manifest names, its size in bytes, its problem or "")."""
    layers = manifest.get("layers") if isinstance(manifest, dict) else None
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for layer in layers if isinstance(layers, list) else []:
        if isinstance(layer, dict):
            by_kind.setdefault(str(layer.get("mediaType")).partition(";")[0], []).append(layer)
    nowhere = root / "blobs"
    if not by_kind:
        return nowhere, 0, "its manifest cannot be read or names no files"
    for kind, why in _UNSUPPORTED_LAYERS.items():
        if kind in by_kind:
            return nowhere, 0, why
    models = by_kind.get(_MODEL, [])
    if len(models) != 1:
        return nowhere, 0, f"its manifest names {len(models)} weight files, expected one"
    digest, stated = str(models[0].get("digest")), models[0].get("size")
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest, re.ASCII):
        return nowhere, 0, "its manifest names a file without a SHA-256 digest"
    path = root / "blobs" / digest.replace(":", "-")
    try:
        found = path.stat()
    except OSError as error:
        return path, 0, f"{path.name[:19]}…: {(error.strerror or 'cannot be read').lower()}"
    if not stat.S_ISREG(found.st_mode):
        return path, 0, f"{path.name[:19]}… is not a file"
    lies = isinstance(stated, int) and stated != found.st_size
    problem = f"{path.name[:19]}… has {found.st_size:,} bytes; its manifest says {stated:,}" if lies else ""
    return path, found.st_size, problem


# --- LM Studio, llama.cpp, Hugging Face ------------------------------------------------------------------------------


def _lm_studio() -> Iterator[LocalModel]:
    """List `models/<publisher>/<model>/<files>`; LM Studio's settings may have moved the folder."""
    pointer = _read(os.path.expanduser("~/.lmstudio-home-pointer")).decode(errors="replace").strip()
    homes = _folders([pointer, "~/.lmstudio", "~/.cache/lm-studio"])
    settings = [_read_json(home / "settings.json") for home in homes]
    moved = [str(one["downloadsFolder"]) for one in settings if isinstance(one, dict) and one.get("downloadsFolder")]
    for root in _folders([*moved, *(str(home / "models") for home in homes)]):
        for publisher in _entries(root):
            for folder in _entries(publisher):
                base = f"lmstudio/{_typable(publisher.name)}/{_typable(folder.name)}"
                remove = "in LM Studio: My Models, then Delete"
                yield from _with_typable_quants(
                    models_in(folder, cache.files_in(folder), base, "lmstudio", remove_with=remove)
                )


def _llama_caches() -> list[str]:
    cached = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return [os.environ.get("LLAMA_CACHE", ""), os.path.join(cached, "llama.cpp")]


def _llama_cpp() -> Iterator[LocalModel]:
    """List the flat folder that llama.cpp used before it adopted the Hugging Face cache layout."""
    for root in _folders(_llama_caches()):
        names = [path.name for path in _entries(root)]
        for group in sets_in(names, "llama.cpp"):
            first = root / group.files[0]
            parts = _CACHED.fullmatch(first.stem)
            base = "/".join(map(_typable, parts.groups() if parts else [first.stem]))
            name = f"llama.cpp/{base}:{group.label}" if parts and group.label else f"llama.cpp/{base}"
            remove = _command("rm", *(str(root / file) for file in group.files))
            quant = name.partition(":")[2]
            one = LocalModel(name, first, "llama.cpp", quant=quant, files=group.files, remove_with=remove)
            yield with_size(one, root)


def _hugging_face() -> Iterator[LocalModel]:
    home, cached = os.environ.get("HF_HOME"), os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    places = [os.path.join(home, "hub") if home else "", os.environ.get("TRANSFORMERS_CACHE", "")]
    places += [os.path.join(cached, "huggingface/hub"), "~/.cache/huggingface/hub", *_llama_caches()]
    ours = os.path.realpath(cache.hub_dir())
    for root in _folders(places):
        if os.path.realpath(root) == ours:
            continue
        for folder in _entries(root):
            if not folder.name.startswith("models--"):
                continue
            repo = folder.name.removeprefix("models--").replace("--", "/")
            remove = _command("hf", "cache", "rm", f"model/{repo}", "--cache-dir", str(root))
            base = "hf/" + "/".join(map(_typable, repo.split("/")[:2]))
            for revision in cache.snapshots(folder)[:1]:
                snapshot = folder / "snapshots" / revision
                yield from _with_typable_quants(
                    models_in(snapshot, cache.files_in(snapshot), base, "hf", remove_with=remove)
                )


# --- folders that are not ours ---------------------------------------------------------------------------------------


def _folders(places: Iterable[str]) -> list[Path]:
    """The existing folders among these places, without duplicates."""
    found: dict[str, Path] = {}
    for place in places:
        path = Path(os.path.expanduser(os.path.expandvars(place)))
        with suppress(OSError, ValueError):
            if place and path.is_absolute() and path.is_dir():
                found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def _entries(folder: Path) -> list[Path]:
    """The sorted entries of a folder without hidden ones; [] if it is not a folder or no longer exists."""
    with suppress(OSError, ValueError), os.scandir(folder) as entries:
        names = [entry.name for entry in itertools.islice(entries, MAX_ENTRIES)]
        return [folder / name for name in sorted(names) if not name.startswith(".")]
    return []


def _read(path: Path | str) -> bytes:
    """Read a small regular file; b"" for anything else. Never blocks, as reading a FIFO would."""
    with suppress(OSError, ValueError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            content = file.read(MAX_MANIFEST + 1) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
        return content if len(content) <= MAX_MANIFEST else b""
    return b""


def _read_json(path: Path) -> Any:
    with suppress(ValueError, RecursionError):
        return json.loads(_read(path))
    return None


def _command(*words: str) -> str:
    return shown(shlex.join(words), 1000)


def _typable(text: str) -> str:
    """Reduce another program's name to the characters allowed in ours."""
    plain = re.sub(r"[^A-Za-z0-9._-]|\.{2,}", "-", text)[:120].rstrip(".-")
    return plain if plain[:1].isalnum() else f"x{plain}"


def _with_typable_quants(models: Iterable[LocalModel]) -> Iterator[LocalModel]:
    """Yield the models with a typable quant; a GGUF without a label uses its file name."""
    for model in models:
        quant = _typable(model.quant)[:80] if model.quant else ""
        yield replace(model, quant=quant, name=f"{model.base}:{quant}" if quant else model.base)

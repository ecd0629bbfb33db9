"""What is on this machine already: models in the Hugging Face cache and those from a package index. No network.

`scan` looks at names only (milliseconds); `list_local` opens every file for its facts and shows a broken one as broken.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from localllm import paths
from localllm.errors import BadModelFile, ConfigError, LocalLLMError, ModelNotFound, UnsupportedFormat, UnsupportedModel
from localllm.hub import catalog

from . import cache
from .names import ModelName, shown
from .selection import GgufSet, gguf_sets, safetensors_names

if TYPE_CHECKING:
    from localllm.models.architectures import ModelFacts

STARTER = "smollm2"  # what a new user talks to first

QUANTIZED = "localllm-quantize.json"  # lies beside the weights that `localllm quantize` wrote

Source = Literal["hub", "index", "folder"]


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on disk: what its names tell, and, after `describe`, what its files do."""

    name: str  # as one would type it: "Qwen/Qwen3-8B", "org/repo:Q4_K_M", "smollm2"
    path: Path  # what to open: a .gguf file (the first split) or a folder
    # "hub": the Hugging Face cache; "index": from the package index; "folder": put into the models folder by hand
    source: Source
    repo: str = ""
    quant: str = ""
    revision: str = ""
    # weight files, relative to the snapshot or model folder; all files of a folder of the models folder
    files: tuple[str, ...] = ()
    size_bytes: int = 0
    problem: str = ""  # why it cannot be whole, "" when no name speaks against it

    format: str = ""
    architecture: str = ""
    params: int = 0
    max_context: int = 0
    license: str = ""
    chat: bool = False  # has a chat template
    supported: bool = True  # this version can run it
    broken: bool = False  # its files are damaged or incomplete
    reason: str = ""  # why it is broken or not supported
    last_used: float | None = None  # seconds since the epoch
    facts: ModelFacts | None = None

    @property
    def base(self) -> str:
        return self.name.partition(":")[0]

    @property
    def folder(self) -> Path:
        """What `files` are relative to, for models of the models folder."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def derived(self) -> bool:
        """`localllm quantize` made it from another model."""
        return self.source == "folder" and (self.folder / QUANTIZED).is_file()


def scan() -> list[LocalModel]:
    """All models on this machine by name, package-index ones first. Never raises for what a folder holds."""
    return [*_from_models_dir(), *(f for repo, revisions in cache.cached_repos() for f in _from_repo(repo, revisions))]


def list_local() -> list[LocalModel]:
    """All models on this machine with their facts, in the order of `scan`."""
    used = _state().get("used", {})
    return [describe(f, used.get(f.name) if isinstance(used, dict) else None) for f in scan()]


def describe(found: LocalModel, last_used: object = None) -> LocalModel:
    """Open one model for its facts; what is wrong with it becomes a field, not an exception."""
    row = replace(found, last_used=last_used if isinstance(last_used, int | float) else None)
    if found.problem:
        return replace(row, broken=True, supported=False, reason=found.problem)
    try:
        from localllm.models.architectures import open_model

        with open_model(found.path) as checkpoint:
            facts = checkpoint.facts
    except LocalLLMError as error:
        is_broken = not isinstance(error, UnsupportedModel | UnsupportedFormat)
        return replace(row, broken=is_broken, supported=False, reason=error.message)
    return replace(
        row,
        format=facts.stored_format,
        architecture=facts.architecture,
        params=facts.num_params,
        max_context=facts.max_context,
        license=facts.license,
        chat=facts.has_chat_template,
        facts=facts,
    )


def find(name: ModelName) -> list[LocalModel]:
    """Models with exactly that name; without a quant all quants of it, without a revision the newest."""
    base, quant = name.base.casefold(), (name.quant or "").casefold()
    found = [f for f in scan() if base == f.base.casefold() and quant in ("", f.quant.casefold())]
    if name.revision:
        commit = (cache.read_ref(found[0].repo, name.revision) if found and found[0].repo else None) or name.revision
        return [f for f in found if f.revision == commit]
    newest = {f.repo: f.revision for f in reversed(found)}
    return [f for f in found if newest[f.repo] == f.revision]


def find_part(name: ModelName) -> list[LocalModel]:
    """Models whose name contains the given one; the newest revision of each."""
    part, quant = name.base.casefold(), (name.quant or "").casefold()
    found = {f.name: f for f in reversed(scan()) if part in f.name.casefold() and quant in ("", f.quant.casefold())}
    return list(reversed(found.values()))


def need_one(name: ModelName) -> list[LocalModel]:
    """The local model a user means, as all its quants; ModelNotFound when there is none or the name is ambiguous."""
    found = find(name) or find_part(name)
    bases = list(dict.fromkeys(f.base for f in found))
    if len(bases) == 1:
        return found
    if not found:
        raise ModelNotFound(f"{shown(str(name))} is not on this machine", "localllm ls lists what is")
    raise ambiguous(name, found)


def ambiguous(name: ModelName, found: list[LocalModel]) -> ModelNotFound:
    """Several models go by that part of a name."""
    names = [f.name for f in found]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ModelNotFound(
        f"{shown(str(name))} could be {', '.join(names[:8])}{more}",
        f"localllm chat {names[0]}",
        context={"names": names},
    )


def _from_repo(repo: str, revisions: list[str]) -> list[LocalModel]:
    main = cache.read_ref(repo, "main")
    return [f for revision in sorted(revisions, key=lambda r: r != main) for f in _from_snapshot(repo, revision)]


def _from_snapshot(repo: str, revision: str) -> list[LocalModel]:
    folder = cache.repo_dir(repo) / "snapshots" / revision
    names = cache.files_in(folder)
    found = []
    tensors = safetensors_names(names)
    if tensors:
        missing = _missing_shards(folder, names) if "config.json" in names else "config.json is missing"
        found.append(LocalModel(repo, folder, "hub", repo, "", revision, tuple(tensors), problem=missing))
    for group in _sets(names, repo):
        quant = group.label or Path(group.files[0]).stem
        found.append(LocalModel(f"{repo}:{quant}", folder / group.files[0], "hub", repo, quant, revision, group.files))
    return [_with_size(one, folder) for one in found]


def _sets(names: list[str], where: str) -> list[GgufSet]:
    """GGUF sets; where a split is missing, the parts that are there, to be shown as broken."""
    try:
        return gguf_sets(names, where)
    except BadModelFile:
        return [GgufSet("", (n,)) for n in names if n.endswith(".gguf")]


def _with_size(found: LocalModel, folder: Path) -> LocalModel:
    """With the bytes of its files in that folder, and what is wrong with them."""
    size, problem = 0, found.problem
    for file in found.files:
        try:
            size += (folder / file).stat().st_size
        except OSError as error:
            problem = problem or f"{file}: {(error.strerror or 'cannot be read').lower()}"
    return replace(found, size_bytes=size, problem=problem)


def _missing_shards(folder: Path, names: list[str]) -> str:
    """What an index names and the folder lacks. A damaged index is left for the reader to explain."""
    index = folder / "model.safetensors.index.json"
    if index.name not in names:
        return ""
    try:
        shards = set(paths.read_json(index, 32 << 20)["weight_map"].values())
        missing = sorted(str(s) for s in shards if s not in names)
    except (TypeError, KeyError, AttributeError):
        return ""
    return f"{len(missing)} of {len(shards)} weight files are missing, first {shown(missing[0])}" if missing else ""


def _from_models_dir() -> list[LocalModel]:
    try:
        folders = sorted(p for p in cache.models_dir().iterdir() if p.is_dir() and not p.name.startswith("."))
    except (OSError, ConfigError):
        return []
    found = []
    for folder in folders:
        names = cache.files_in(folder)
        if safetensors_names(names) and "config.json" in names:
            missing = _missing_shards(folder, names)
            found.append(
                _with_size(LocalModel(folder.name, folder, "folder", files=tuple(names), problem=missing), folder)
            )
        sets = _sets(names, folder.name)
        starter = catalog.starters().get(folder.name)
        for group in sets:
            own = starter is not None and group.files == (starter.file,)
            name = folder.name if len(sets) == 1 or own else f"{folder.name}:{group.label or group.files[0]}"
            source: Source = "index" if own else "folder"
            one = LocalModel(name, folder / group.files[0], source, quant=group.label, files=group.files)
            item = _with_size(one, folder)
            if own and starter and not item.problem and item.size_bytes != starter.size:
                item = replace(item, problem=f"{item.size_bytes:,} bytes, it should have {starter.size:,}")
            found.append(item)
    return found


def remember_model(name: str) -> None:
    """Record that a model was used now. A state folder that cannot be written must not fail a chat."""
    state = _state()
    used = state.get("used")
    try:
        times = (used if isinstance(used, dict) else {}) | {name: time.time()}
        paths.replace_file(_state_file(), json.dumps({"last": name, "used": times}), mode=0o600)
    except OSError:
        return


def default_model(fits: Callable[[LocalModel], tuple[bool, float]]) -> str:
    """The name for a chat that gives none: the model used last; else the largest local chat model that fits at 10
    tokens per second or more; else the starter.
    """
    names = {f.name for f in scan() if not f.problem}
    last = _state().get("last")
    if isinstance(last, str) and (last in names or os.path.exists(last)):
        return last
    chats = [(m, *fits(m)) for m in list_local() if m.chat and m.supported and not m.broken]
    usable = [m for m, runs, tps in chats if runs and tps >= 10]
    return max(usable, key=lambda m: m.params).name if usable else STARTER


def _state_file() -> Path:
    return paths.state_dir() / "models.json"


def _state() -> dict[str, object]:
    return paths.read_json(_state_file())

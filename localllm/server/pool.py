"""Pool of loaded models within one memory plan: load on demand, unload the least recently used, pin, sleep, wake.

A request calls `acquire` and holds a `Lease` until its response is sent; a model is unloaded or put to sleep only when
no lease on it is held. After a model has waited `PATIENCE_S` for memory, the models that could free it accept no new
requests until it is loaded; their running requests finish normally. A single thread loads and unloads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from localllm.errors import Aborted, DeviceError, LocalLLMError, ModelNotFound
from localllm.request import LoadProgress

from .errors import shutting_down
from .served_model import Lease, Loader, PoolEntry, PoolOptions, ServedModel, State, with_freed, without_promised

if TYPE_CHECKING:
    from localllm.device import MachineFacts
    from localllm.llm.llm import LLM

log = logging.getLogger(__name__)

PATIENCE_S = 10.0  # how long a model waits for memory before the models that hold it stop accepting requests
LIST_S = 5.0  # how long a list of local models stays valid
RESTART_S = 60.0  # an engine that dies again within this time is not restarted
RECOVERY_S = 0.1  # pause of the loader thread after a failed step


class ModelPool:
    """Pool of loaded models.

    list_models  returns the local models; called again when its result is older than `LIST_S`
    loader       see `Loader`; with None, the pool holds only the model it was created with
    machine      returns the facts of this machine; called before each load
    """

    def __init__(
        self, list_models: Callable[[], Sequence[ServedModel]], loader: Loader | None,
        machine: Callable[[], MachineFacts], options: PoolOptions | None = None,
    ) -> None:  # fmt: skip
        self._list_models, self._loader, self._machine = list_models, loader, machine
        self._options = options or PoolOptions()
        self._changed = threading.Condition()
        self._entries: dict[str, PoolEntry] = {}
        self._blocked: set[str] = set()  # models that did not fit; retried when the pool changes
        self._models: tuple[ServedModel, ...] = ()
        self._models_at = -LIST_S
        self._closing = False
        self._cancel = threading.Event()
        self._thread = threading.Thread(target=self._work, name="models", daemon=True)
        self._thread.start()

    @classmethod
    def holding(cls, llm: LLM, names: Sequence[str]) -> ModelPool:
        """Pool of one loaded, pinned model that its owner closes: `names[0]` is its id, the others are aliases."""
        model = ServedModel.of(llm, names)
        made = cls(lambda: [model], None, lambda: llm.machine, PoolOptions(None, (model.name,)))
        now = time.monotonic()
        made._entries[model.name] = PoolEntry(model, True, State.READY, llm, loaded_at=time.time(), last_used=now)
        return made

    # --- called from any thread --------------------------------------------------------------------------------------

    def models(self) -> tuple[ServedModel, ...]:
        """Every model that requests may name. May read the disk."""
        now = time.monotonic()
        if now - self._models_at >= LIST_S:
            found = tuple(self._list_models())
            with self._changed:
                self._models, self._models_at = found, now
        return self._models

    def restart_dead(self) -> None:
        """Have dead engines restarted or given up: one that dies while it is idle has no request to report it."""
        with self._changed:
            if any(entry.has_died for entry in self._entries.values()):
                self._changed.notify_all()

    def look_again(self) -> None:
        """Drop the cached list, because the models on this machine have changed."""
        self._models_at = -LIST_S

    def known(self, name: str) -> ServedModel | None:
        """Look a name or alias up in the cached list, without reading the disk."""
        plain = name.removesuffix(":latest")  # added by Ollama clients
        names = {name, plain}
        found = next((m for m in self._models if names.intersection(m.ids)), None)
        return found or next((m for m in self._models if names.intersection(m.also)), None)

    @property
    def only(self) -> ServedModel | None:
        """The single model of the cached list; None if it has none or several."""
        return self._models[0] if len(self._models) == 1 else None

    def find(self, name: str) -> ServedModel:
        """Return the model with that name or alias. May read the disk; raises ModelNotFound."""
        model = self.known(name)
        if model is None:
            self.models()
            model = self.known(name)
        if model is None:
            names = ", ".join([name for m in self._models for name in m.ids][:8]) or "none"
            raise ModelNotFound(
                f"The model {name[:100]!r} is not served here; available: {names}", "localllm ls", param="model"
            )
        return model

    def acquire(self, model: ServedModel) -> Future[Lease]:
        """Return a future lease, done at once if the model is ready, else when it is loaded or loading failed."""
        future: Future[Lease] = Future()
        with self._changed:
            if self._closing:
                future.set_exception(_closing())
                return future
            entry = self._entries.get(model.name)
            if entry is None:
                pinned = model.name in self._options.pinned
                entry = self._entries[model.name] = PoolEntry(model, pinned, ttl_s=self._options.ttl_s)
            if not self._grant(entry, future):
                entry.waiting.append(future)
                if entry.waits_since is None:
                    entry.waits_since = time.monotonic()
                self._changed.notify_all()
        return future

    def loaded(self) -> list[PoolEntry]:
        """Copies of the loaded, loading and sleeping entries, most recently used first: the rows of `localllm ps`."""
        with self._changed:
            entries = [replace(e) for e in self._entries.values() if e.state is not State.ABSENT]
        return sorted(entries, key=lambda e: -e.last_used)

    def llm_of(self, name: str) -> LLM | None:
        """The loaded model of that name; None if it is not loaded."""
        return next((row.llm for row in self.loaded() if row.name == name), None)

    def awake(self) -> list[tuple[str, LLM]]:
        """(name, model) of every loaded model that is not asleep."""
        return [(row.name, row.llm) for row in self.loaded() if row.llm is not None and row.llm.is_awake]

    def keep(self, name: str, ttl_s: float | None) -> bool:
        """Set the idle seconds after which the model is unloaded: None never, 0 at once. False if it is pinned."""
        with self._changed:
            entry = self._entries.get(name)
            if entry is not None and not entry.pinned:
                entry.ttl_s = ttl_s
                self._changed.notify_all()
        return entry is None or not entry.pinned

    @property
    def is_lent(self) -> bool:
        """Whether the only model belongs to who started the server (`holding`), who alone may unload it."""
        return self._loader is None

    def unload(self, name: str) -> Future[bool]:
        """Unload a model, pinned or not, as soon as its requests have ended; False when it is not loaded."""
        return self._command(name, self._unload)

    def sleep(self, name: str) -> Future[bool]:
        """Put a model to sleep as soon as its requests have ended; the next request wakes it."""
        return self._command(name, self._put_to_sleep)

    def refuse_waiting(self) -> None:
        """Fail every request that waits for a model: the server is shutting down."""
        with self._changed:
            futures = [future for entry in self._entries.values() for future in entry.waiting]
            for entry in self._entries.values():
                entry.waiting, entry.waits_since = [], None
        for future in futures:
            settle(future, shutting_down())

    @property
    def is_loading(self) -> bool:
        return any(entry.state is State.LOADING for entry in list(self._entries.values()))

    @property
    def broken(self) -> str:
        """Why a model's engine is dead for good; "" when none is."""
        return next((entry.broken for entry in list(self._entries.values()) if entry.broken), "")

    def close(self, wait_s: float | None = None) -> bool:
        """Stop loading and free every model; requests still running end with "abort".

        A download stops at once, but reading weights does not: returns False if that took longer than `wait_s`.
        """
        with self._changed:
            self._closing = True
            self._cancel.set()
            self._changed.notify_all()
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    # --- bookkeeping, under the lock ---------------------------------------------------------------------------------

    def _grant(self, entry: PoolEntry, future: Future[Lease]) -> bool:
        """Grant a lease if the model is ready and accepts requests; the thread first restarts a dead engine."""
        llm = entry.llm
        if entry.state is not State.READY or llm is None or entry.commands or self._must_make_room(entry):
            return False
        if entry.has_died:
            return False
        if not future.set_running_or_notify_cancel():
            return True
        entry.users += 1
        entry.last_used = time.monotonic()
        future.set_result(Lease(llm, partial(self._release, entry)))
        return True

    def _release(self, entry: PoolEntry) -> None:
        with self._changed:
            entry.users -= 1
            entry.last_used = time.monotonic()
            if entry.users == 0:
                self._blocked.clear()
                self._changed.notify_all()

    def _must_make_room(self, entry: PoolEntry) -> bool:
        """Whether another model has waited too long for memory that this one may hold."""
        limit = time.monotonic() - PATIENCE_S
        return not entry.pinned and any(
            other.waits_since is not None and other.waits_since < limit and other is not entry
            for other in self._entries.values()
            if other.state is State.ABSENT
        )

    def _command(self, name: str, action: Callable[[PoolEntry], None]) -> Future[bool]:
        future: Future[bool] = Future()
        with self._changed:
            entry = self._entries.get(name)
            if entry is None or entry.state is State.ABSENT or self.is_lent:
                future.set_result(False)
            else:
                entry.commands.append((action, future))
                self._changed.notify_all()
        return future

    # --- the thread that loads ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._closing:
            try:
                self._step()
            except Exception:  # this thread must survive: no other one loads or frees models
                log.exception("a task of the model loader thread failed")
                with self._changed:
                    self._changed.wait(RECOVERY_S)
        self._shut_down()

    def _step(self) -> None:
        """Run the next job, or wait until one is due."""
        with self._changed:
            job = None if self._closing else self._next_job()
            if job is None:
                if not self._closing:
                    self._changed.wait(self._pause())
                return
        job()

    def _pause(self) -> float | None:
        """Seconds until the next expiry or the end of a waiting model's patience; None if there is neither."""
        now = time.monotonic()
        due = [expiry for entry in self._entries.values() if (expiry := entry.expiry) is not None]
        patient = [e.waits_since + PATIENCE_S for e in self._entries.values() if e.waits_since is not None]
        due += [until for until in patient if until > now]
        return max(0.01, min(due) - now) if due else None

    def _next_job(self) -> Callable[[], None] | None:
        now = time.monotonic()
        loaded = [entry for entry in self._entries.values() if entry.llm is not None]
        for entry in loaded:
            if entry.has_died:
                return partial(self._restart, entry)
        for entry in self._entries.values():
            if entry.commands and not entry.users and (entry.llm is not None or entry.state is State.ABSENT):
                return partial(self._run_commands, entry)
        for entry in loaded:
            if entry.expiry is not None and entry.expiry <= now and entry.waits_since is None:
                return partial(self._unload, entry)
        asked = [entry for entry in self._entries.values() if entry.waits_since is not None]
        for entry in sorted(asked, key=lambda e: e.waits_since or 0.0):
            entry.waiting = [future for future in entry.waiting if not future.cancelled()]
            while entry.waiting and self._grant(entry, entry.waiting[0]):
                entry.waiting.pop(0)
            if not entry.waiting:
                entry.waits_since = None
                return lambda: None  # models that held back for this one may accept requests again
            if entry.state is State.ASLEEP and not entry.commands:
                return partial(self._wake, entry)
            if entry.state is State.ABSENT and entry.name not in self._blocked:
                return partial(self._try_to_load, entry)
        return None

    def _try_to_load(self, entry: PoolEntry) -> None:
        """Take the next step towards a model: load it, unload an idle one first, or leave it waiting."""
        doing = "planning"
        try:
            found = self._find_room(entry)
            if found is not None and not isinstance(found, PoolEntry):
                doing = "loading"
                self._load(entry, found)
        except Exception as error:
            self._fail(entry, entry.explained(doing, error))
            return
        if isinstance(found, PoolEntry):
            self._unload(found)

    def _find_room(self, entry: PoolEntry) -> MachineFacts | PoolEntry | None:
        """Return the machine to load it on, the idle model to unload first, or None if it must wait for busy ones."""
        if self._loader is None:
            raise ModelNotFound(f"{entry.name} was unloaded", "restart the server")
        loaded = [e for e in list(self._entries.values()) if e.llm is not None]
        others = [e for e in loaded if not e.pinned]
        machine = without_promised(self._machine(), loaded)
        now = self._loader.plan(entry.model, machine)
        best = self._loader.plan(entry.model, with_freed(machine, others)) if others else now
        idle = sorted((e for e in others if not e.users), key=lambda e: e.last_used)
        if now.fits and (now.ctx >= best.ctx or not idle):
            return machine
        if not (others and best.fits):
            raise now.error(entry.name)
        if idle:
            return idle[0]
        with self._changed:
            if all(e.users for e in others):
                self._blocked.add(entry.name)
        return None

    def _load(self, entry: PoolEntry, machine: MachineFacts) -> None:
        assert self._loader is not None
        self._set_state(entry, State.LOADING)
        started, name = time.monotonic(), entry.name
        on_progress = self._options.on_progress
        tell = partial(on_progress, name) if on_progress else lambda _: None
        try:
            llm = self._loader.load(entry.model, machine, tell, self._cancel)
        except BaseException:
            tell(LoadProgress("failed"))
            raise
        try:
            self._report_loaded(entry.model, llm)
        except BaseException:
            llm.close()
            raise
        entry.llm, entry.loaded_at, entry.last_used = llm, time.time(), time.monotonic()
        entry.ttl_s, entry.broken = self._options.ttl_s, ""
        log.info("loaded %s in %.1f s", name, time.monotonic() - started)
        self._set_state(entry, State.READY)

    def _report_loaded(self, model: ServedModel, llm: LLM) -> None:
        """Report a new engine, whose prefix cache is empty."""
        if self._options.on_loaded is not None:
            self._options.on_loaded(model, llm)

    def _fail(self, entry: PoolEntry, error: LocalLLMError) -> None:
        if not isinstance(error, Aborted):
            log.warning("could not load %s: %s", entry.name, error.message)
        with self._changed:
            entry.state = State.ABSENT
            futures, entry.waiting, entry.waits_since = entry.waiting, [], None
        for future in futures:
            settle(future, error)

    def _run_commands(self, entry: PoolEntry) -> None:
        was_loaded = entry.llm is not None
        for action, future in list(entry.commands):
            outcome: bool | LocalLLMError = was_loaded
            try:
                if entry.llm is not None:
                    action(entry)
            except Exception as failed:  # reported to the caller, not retried
                outcome = entry.explained("putting to sleep", failed)
            with self._changed:
                entry.commands.remove((action, future))
            settle(future, outcome)

    def _put_to_sleep(self, entry: PoolEntry) -> None:
        if entry.state is State.READY and entry.llm is not None:
            try:
                entry.llm.sleep()
            except Exception:
                self._unload(entry)  # it is neither awake nor asleep; the next request loads it again
                raise
            self._set_state(entry, State.ASLEEP)

    def _wake(self, entry: PoolEntry) -> None:
        assert entry.llm is not None
        try:
            entry.llm.wake()
            self._report_loaded(entry.model, entry.llm)
        except Exception as error:
            self._fail(entry, entry.explained("waking", error))
            self._unload(entry)
            return
        entry.last_used = time.monotonic()
        self._set_state(entry, State.READY)

    def _unload(self, entry: PoolEntry) -> None:
        with self._changed:
            if entry.users:
                return  # a request took a lease in the meantime
            entry.state = State.ENDING
            llm, entry.llm = entry.llm, None
        if llm is not None:
            entry.free(llm)
            log.info("unloaded %s", entry.name)
        self._set_state(entry, State.ABSENT)

    def _restart(self, entry: PoolEntry) -> None:
        """Start a new engine over the same weights, once; a GPU whose context is poisoned cannot be used again."""
        assert entry.llm is not None
        now, stopped = time.monotonic(), f"the engine of {entry.name} stopped"
        again = entry.restarted_at is not None and now - entry.restarted_at < RESTART_S
        if again or entry.llm.plan.device != "cpu":
            entry.broken = f"{stopped}: {why}" if (why := entry.llm.why_dead) else stopped
        else:
            entry.restarted_at = now
            self._set_state(entry, State.LOADING)
            log.error("%s; restarting it", stopped)
            try:
                entry.llm.sleep()
                entry.llm.wake()
                self._report_loaded(entry.model, entry.llm)
            except Exception:
                log.exception("the engine of %s could not be restarted", entry.name)
                entry.broken = stopped
        self._set_state(entry, State.READY)

    def _set_state(self, entry: PoolEntry, state: State) -> None:
        with self._changed:
            entry.state = state
            self._blocked.clear()
            self._changed.notify_all()

    def _shut_down(self) -> None:
        """Fail every waiting request and command, and free every loaded model."""
        for entry in self._entries.values():
            for future in entry.waiting:
                settle(future, _closing())
            for _, done in entry.commands:
                settle(done, False)
            if entry.llm is not None and self._loader is not None:
                entry.free(entry.llm)
            entry.llm, entry.state = None, State.ABSENT


def settle(future: Future[Any], outcome: object) -> None:
    """Set a result, or an exception, unless the future was cancelled."""
    if future.set_running_or_notify_cancel():
        future.set_exception(outcome) if isinstance(outcome, Exception) else future.set_result(outcome)


def _closing() -> DeviceError:
    return DeviceError("the server is unloading its models", "retry later")

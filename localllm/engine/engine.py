"""The engine loop: submit, abort, step, stats. Token ids in, `TokenEvent`s out; one thread owns the model.

Every accepted request ends with exactly one terminal event per answer, whatever fails. `stepper` decides which failures
end a request and which end a batch; an exception that escapes a step stops the engine and ends all requests.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace

import torch

from localllm.errors import DeviceError, InternalError, InvalidRequest, LocalLLMError, OutOfMemory
from localllm.request import FinishReason, Request, embeds_only

from .adapters import Adapter, Residents
from .failures import device_lost, explained, forget_frames, is_device_lost, is_out_of_memory
from .kv_events import KVEvents
from .kv_events import Listener as Listening
from .kv_store import KVStore
from .metrics import EngineStats
from .page_files import PageFiles
from .pages import Pages, Slots
from .pins import PinBoard
from .publisher import Listener, Publisher, RequestStream
from .runner import Runner
from .scheduler import Scheduler, SchedulerLimits
from .sequence import Sequence
from .speculation import Speculation
from .stepper import Stepper

log = logging.getLogger(__name__)

IDLE_GRACE_S = 0.5  # time without work before an idle job starts
IDLE_S = 0.002  # polling interval while every running request is paused


IdleJob = Callable[[Callable[[], bool]], bool]  # (must it stop?) -> is it finished?


class Inbox(deque[Callable[[], None]]):
    """Calls for the engine's thread; none once it has ended, as they would keep the engine."""

    is_closed = False


def asker(wake: threading.Condition, inbox: Inbox) -> Callable[[Callable[[], None]], None]:
    """A function that queues a call for the engine's thread, to run before the next step.

    It keeps no reference to the engine.
    """

    def ask(call: Callable[[], None]) -> None:
        with wake:
            if not inbox.is_closed:
                inbox.append(call)
                wake.notify()

    return ask


class Engine:
    """Continuous batching over one model, in its own thread.

    num_pages         pages per cache group from the plan; the cache may have scratch pages on top
    max_context       maximum tokens per sequence
    largest_context   largest context possible on this machine, for the error of a longer prompt
    speculation       speculative decoding; None turns it off
    check_invariants  verify all page and slot counts after every step
    """

    def __init__(
        self,
        runner: Runner,
        num_pages: Many[int],
        max_context: int,
        limits: SchedulerLimits = SchedulerLimits(),
        *,
        largest_context: int = 0,
        prefix_cache: bool = True,
        speculation: Speculation | None = None,
        check_invariants: bool = False,
    ) -> None:
        self.runner = runner
        self.adapters: Residents | None = None  # adapters that requests may name; set before `start`
        self.max_context, self._largest_context = max_context, largest_context
        facts = runner.model.facts
        self._embeds = facts.name if facts.pooling else ""
        self.limits = limits  # before `Pressure` lowers them
        self.check_invariants = check_invariants
        cache = runner.cache
        windows = [group.window for group in cache.groups]
        slots = Slots(limits.num_slots, cache.copy_slot) if limits.num_slots else None
        self._pages = Pages(num_pages, windows, cache.page_size, prefix_cache, slots)
        self.scheduler = Scheduler(self._pages, limits)
        self._publisher = Publisher(self.scheduler)
        self.stepper = Stepper(runner, self.scheduler, self._publisher, speculation)
        self.pressure = self.stepper.pressure
        self._streams = self._publisher.streams
        self._inbox = Inbox()
        self._wake = threading.Condition()
        self._ask = asker(self._wake, self._inbox)
        self._closing = False
        self._dead: Exception | None = None
        self.between_steps: Callable[[], None] | None = None  # called after every step until it raises
        self._thread: threading.Thread | None = None
        self._idle_jobs: deque[IdleJob] = deque()
        self._step_started = 0.0
        self._is_idling = False  # running an idle job
        self._counter = 0
        self.store: KVStore | None = None
        self.pins = PinBoard(self._pages, self._ask)
        self._events = KVEvents(self._pages.tree, runner.cache.device.type.upper().replace("CUDA", "GPU"))

    def keep_on_disk(self, files: PageFiles) -> None:
        """Persist prefixes in files for later engines. Call before `start`."""
        engine = weakref.ref(self)  # no reference cycles: the pages are freed with the last reference to the engine

        def when_idle(job: IdleJob) -> None:
            if (alive := engine()) is not None:
                alive.when_idle(job)

        self.store = KVStore(files, self.runner.cache, self._pages, self._ask, when_idle)

    # --- called from any thread --------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, listener: Listener | None = None) -> RequestStream:
        """Queue a request. Raises what `check` raises, and DeviceError if the engine has stopped."""
        self.check(request)
        adapter = self._adapter_of(request)
        with self._wake:
            if self._dead is not None or self._closing:
                raise DeviceError("the engine is not running", "restart localllm") from self._dead
            self._counter += 1
            if not request.request_id:
                request.request_id = f"r{self._counter}"
            if request.request_id in self._streams:
                raise LocalLLMError(f"request id {request.request_id!r} is in use", "choose another request id")
            stream = RequestStream(request, self.abort, listener)
            self._streams[request.request_id] = stream
            if self._is_idling:
                self._step_started = self._step_started or time.monotonic()  # a job that hangs is a step that hangs
            self._ask(lambda: self._accept(stream, adapter))
        return stream

    def check(self, request: Request) -> None:
        """Raise InvalidRequest, ContextTooLong, ModelNotFound or OutOfMemory for a request that can never run."""
        if self._embeds and not request.pooling:
            raise embeds_only(self._embeds)
        request.check(self.runner.vocab_size, self.max_context, self._largest_context)
        self._adapter_of(request)
        if not self._pages.fits_ever(len(request.prompt_token_ids) + 1, self.limits.prefill_budget):
            raise OutOfMemory(
                f"the prompt has {len(request.prompt_token_ids):,} tokens, more than the whole KV cache can hold",
                "start with a smaller --ctx for other requests, or with --kv bf16",
            )

    def _adapter_of(self, request: Request) -> Adapter | None:
        """The adapter that a request names. Raises ModelNotFound, or InvalidRequest if the model has no adapters."""
        if not request.adapter:
            return None
        if self.adapters is None:
            raise InvalidRequest("this model has no adapters", "use the model's name alone", param="model")
        return self.adapters.find(request.adapter)

    def abort(self, request_id: str) -> None:
        """Abort a request; unknown and finished ids are ignored."""
        self._ask(lambda: self._publisher.abort(request_id))

    def fail(self, error: Exception) -> None:
        """Stop the engine and end every request with this error, because something it depends on is gone."""

        def end() -> None:
            raise error

        self.stepper.lost = error
        self._ask(end)

    def clear_prefix_cache(self) -> None:
        """Evict all cached prefixes that no sequence uses, before the next step."""
        self._ask(self._pages.tree.clear)

    def watch_pages(self, listener: Listening) -> Callable[[], None]:
        """Subscribe to changes of the prefix cache (`KVEvents`), starting with its present contents.

        Returns a function that unsubscribes.
        """
        self._ask(lambda: self._events.add(listener))
        return lambda: self._ask(lambda: self._events.drop(listener))

    def when_idle(self, job: IdleJob, first: bool = False) -> None:
        """Run `job` in the engine's thread while it is idle, after the first answer; `first` puts it ahead of others.

        The job is called with a function that returns True once it must stop because work came in, and returns whether
        it is finished. An unfinished job is called again when the engine is next idle; one that raises is dropped.
        """
        with self._wake:
            (self._idle_jobs.appendleft if first else self._idle_jobs.append)(job)
            self._wake.notify()

    def stats(self) -> EngineStats:
        """A snapshot of the counters, at most one step old."""
        pool, tree, scheduler, stepper = self._pages.pools[0], self._pages.tree, self.scheduler, self.stepper
        return replace(
            stepper.stats,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            pages_total=pool.num_usable,
            pages_free=pool.num_free,
            pages_cached=pool.num_reclaimable,
            num_preemptions=scheduler.num_preemptions,
            num_relieved=stepper.pressure.num_relieved,
            prefix_query_tokens=tree.num_query_tokens,
            prefix_hit_tokens=tree.num_hit_tokens,
            fastest_tps=self._publisher.fastest_tps,
            **({} if self.store is None else self.store.facts()),
            used_tokens=sum(s.num_computed_tokens for s in list(scheduler.running)),
        )

    @property
    def step_age_s(self) -> float:
        """Seconds since the current step started, or since a request waits for an idle job to stop; 0 otherwise."""
        started = self._step_started
        return time.monotonic() - started if started else 0.0

    @property
    def is_dead(self) -> bool:
        return self._dead is not None

    @property
    def failure(self) -> str:
        """The error that stopped the engine; "" while it runs."""
        return str(self._dead or "")

    @property
    def is_idle(self) -> bool:
        """True if no request is waiting or running and nothing is queued for the engine's thread."""
        return not (self._inbox or self.stepper.has_work)

    def close(self) -> None:
        """Abort all requests and stop the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self.join()

    def join(self, timeout: float | None = None) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    # --- the engine's thread -----------------------------------------------------------------------------------------

    @torch.inference_mode()  # entered only once, because entering takes about 50 us, which would delay every step
    def _loop(self) -> None:
        try:
            if (device := self.runner.cache.device).type == "cuda":
                torch.cuda.set_device(device)  # the current device is per thread
            while True:
                with self._wake:
                    while not self._has_work():
                        if not (self._idle_jobs and self.stepper.stats.num_prompt_tokens):
                            self._wake.wait()
                        elif not self._wake.wait(IDLE_GRACE_S):
                            break
                    if self._closing:
                        break
                if self._has_work():
                    self._run_once()
                else:
                    self.run_idle()
        except BaseException as error:
            log.exception("the engine stopped")
            self._dead = error if isinstance(error, Exception) else InternalError(repr(error))
            if is_device_lost(self._dead) or is_out_of_memory(self._dead):
                self._dead = explained(self._dead)
            forget_frames(error)
        self._end_all()
        with self._wake:
            self._inbox.is_closed = True
            self._inbox.clear()

    def _has_work(self) -> bool:
        """True if there is anything to do besides idle jobs."""
        return self._closing or not self.is_idle

    def run_idle(self) -> None:
        """Run one idle job until it is finished or work comes in."""
        with self._wake:
            job, self._is_idling = self._idle_jobs.popleft(), True
        try:
            if not job(self._has_work):
                self._idle_jobs.appendleft(job)
        except Exception as error:  # a failed idle job affects no request unless the device is lost
            if is_device_lost(error):
                raise device_lost(error) from error
            log.exception("an idle job failed")
        finally:
            with self._wake:
                self._is_idling, self._step_started = False, 0.0

    @torch.inference_mode()
    def run_once(self) -> None:
        """Process the inbox and run one step: the body of the loop, for callers without a thread."""
        self._run_once()

    def _run_once(self) -> None:
        self._take_inbox()
        if self.stepper.has_work:
            self._publisher.hold_back_readers()
            if self.adapters is not None and (self.scheduler.waiting or self.adapters.has_news):
                self.adapters.settle(self.scheduler.waiting, self.scheduler.running, self._publisher.fail)
            self._step_started = time.monotonic()
            if not self.stepper.step():
                time.sleep(IDLE_S)  # every running request waits for its reader
            stats = self.stepper.stats
            step_s = time.monotonic() - self._step_started
            stats.longest_step_s = max(stats.longest_step_s, step_s)
            self._step_started = 0.0
            if self.store is not None and not self.stepper.runs_ahead:  # else copies would wait behind the next step
                self.store.after_step(step_s)
            if self.between_steps is not None:
                self._do_between_steps(self.between_steps)
        self._events.flush()
        if self.check_invariants:
            self.scheduler.check_integrity()

    def _do_between_steps(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # affects no request, like a failed idle job
            if is_device_lost(error):
                raise device_lost(error) from error
            log.exception("a job between steps failed")
            self.between_steps = None

    def _take_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()
        self._publisher.publish()

    def _accept(self, stream: RequestStream, adapter: Adapter | None) -> None:
        try:
            self._schedule(stream, adapter)
        except Exception as error:  # no sequence exists yet that could end the request
            log.exception("a request was not accepted")
            self._publisher.refuse(stream, explained(error))

    def _schedule(self, stream: RequestStream, adapter: Adapter | None) -> None:
        request, params = stream.request, stream.request.params
        room = max(1, self.max_context - len(request.prompt_token_ids))  # `Request.check` ensures at least one token
        seed = params.seed if params.seed is not None else random.SystemRandom().getrandbits(62)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        sequence = Sequence(request, 0, len(self._pages.pools), seed, max_tokens)
        sequence.submit_time = stream.submit_time
        sequence.adapter = adapter
        sequence.pending_forks = 0 if request.only_reads else params.n - 1
        if self.store is not None:
            self.store.begin(sequence)
        self.scheduler.add(sequence)

    def _end_all(self) -> None:
        self.stepper.masks.close()
        if self.adapters is not None:
            self.adapters.close()
        with self._wake:
            self._closing = True
        while self._inbox:
            with contextlib.suppress(Exception):
                self._inbox.popleft()()
        for sequence in self.scheduler.sequences():
            with contextlib.suppress(Exception):  # its pages may be inconsistent after the failure
                self._end(sequence)
        self._publisher.publish()
        self._events.end()
        if self.store is not None:  # last, because no request is waiting any more
            self.store.close(flush=self._dead is None)

    def _end(self, sequence: Sequence) -> None:
        if self._dead is None:
            self._publisher.finish(sequence, FinishReason.ABORT)
            return
        hint = self._dead.hint if isinstance(self._dead, DeviceError) else ""
        error = DeviceError(f"the engine stopped: {self._dead}", hint or "restart localllm; see the log")
        self._publisher.fail(sequence, error)

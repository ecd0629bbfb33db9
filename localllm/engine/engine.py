"""The loop: submit, abort, step, stats. Token ids in, `TokenEvent`s out; one thread owns the model.

Every accepted request ends in exactly one terminal event per answer, whatever fails: an exception of one request
(sampling, mask, stop check) ends that request, an exception in a forward pass ends the requests of that batch, an
exception outside both makes the engine dead and ends all of them.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Any

import torch

from localllm.errors import DeviceError, InternalError, LocalLLMError, OutOfMemory
from localllm.request import FinishReason, Request, TokenEvent, Usage

from .batch import BatchBuilder, row_range
from .invariant import InvariantViolated, violated
from .limits import check_request
from .masks import Filling, MaskFiller
from .metrics import EngineStats, StepTokens, timing_of, usage_of
from .pages import GroupPages, Pages
from .pressure import Pressure, is_out_of_memory
from .request_stream import Listener, RequestStream
from .runner import ForwardOutput, Runner
from .sampled_tokens import RowResult, SampledTokens
from .sampler import token_logprob
from .scheduler import MAX_DECODE_TOKENS, Scheduled, Scheduler, SchedulerLimits, Step
from .sequence import Sequence, SequenceState

log = logging.getLogger(__name__)

UNREAD_PIECES = 2
"""pieces of scores that may wait for their reader before the request pauses"""
IDLE_GRACE_S = 0.5
"""without work before an idle job begins"""
IDLE_S = 0.002
"""between looks whether a paused request may go on"""


IdleJob = Callable[[Callable[[], bool]], bool]
"""(has it to stop?) -> is it finished?"""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an engine is built with."""

    max_context: int
    """tokens a sequence may hold"""
    page_size: int = 16
    prefix_cache: bool = True
    limits: SchedulerLimits = SchedulerLimits()
    check_invariants: bool = False
    """verify every page and count after every step"""
    runs_ahead: bool = False
    """launch a step before the tokens of the one before are on the host: keeps a GPU busy, delays tokens on a CPU"""


@dataclass(slots=True)
class PendingStep:
    """A step that was launched; its tokens are being sampled, or will be when those of the step before are known."""

    step: Step
    output: ForwardOutput | None = None
    sampled: SampledTokens | None = None
    masks: Filling | None = None
    error: Exception | None = None
    """why it came to nothing"""


class Engine:
    """Continuous batching over one model.

    groups  the page budget of each cache group, as the plan gives it
    fault   tests: called with the step number before each forward; may raise
    """

    def __init__(
        self,
        runner: Runner,
        groups: tuple[GroupPages, ...],
        options: EngineOptions,
        device: torch.device,
        fault: Callable[[int], None] | None = None,
    ) -> None:
        self.options = options
        self._runner = runner
        self._device = device
        self._pages = Pages(groups, options.page_size, options.prefix_cache)
        self.scheduler = Scheduler(self._pages, options.limits)
        self.pressure = Pressure(self.scheduler)
        self._masks = MaskFiller(runner.vocab_size)
        self.builder = BatchBuilder(len(groups), options.page_size, device)
        self._fault = fault
        self._streams: dict[str, RequestStream] = {}
        self._inbox: deque[tuple[str, Any]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._dead: Exception | None = None
        self._thread: threading.Thread | None = None
        self._idle_jobs: deque[IdleJob] = deque()
        self._pending: PendingStep | None = None
        """the step that was launched ahead"""
        self._num_steps = 0
        self._num_ahead = 0
        self._step_started = 0.0
        self._longest_step_s = 0.0
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._step_tokens = StepTokens()
        self._counter = 0

    # --- called from any thread --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread that owns the model."""
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, listener: Listener | None = None) -> RequestStream:
        """Queue a request. Raises InvalidRequest, ContextTooLong, or DeviceError when the engine is dead."""
        self.check(request)
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
            self._inbox.append(("submit", request))
            self._wake.notify()
        return stream

    def check(self, request: Request) -> None:
        """Raise InvalidRequest, ContextTooLong or OutOfMemory for a request that can never run."""
        check_request(request, self._runner.vocab_size, self.options.max_context)
        if not self._pages.fits_ever(len(request.prompt_token_ids) + 1, self.options.limits.prefill_budget):
            raise OutOfMemory(
                f"the prompt has {len(request.prompt_token_ids):,} tokens, more than the key/value cache can ever hold",
                "start with a smaller --ctx for other requests, or with --kv bf16",
            )

    def abort(self, request_id: str) -> None:
        """End a request; unknown or finished ids are ignored."""
        with self._wake:
            self._inbox.append(("abort", request_id))
            self._wake.notify()

    def clear_prefix_cache(self) -> None:
        """Forget the prefixes nobody uses; takes effect before the next step."""
        with self._wake:
            self._inbox.append(("clear", None))
            self._wake.notify()

    def when_idle(self, job: IdleJob) -> None:
        """Run `job` in the engine's thread when there is nothing else to do, after the first answer.

        It is called with a function that says whether it has to stop, because work came in, and returns whether it is
        finished; one that is not is called again at the next idle moment. A job that fails is dropped.
        """
        with self._wake:
            self._idle_jobs.append(job)
            self._wake.notify()

    def pin_prefix(self, token_ids: Many[int]) -> None:
        """Evict the pages of this prefix (of prompts without a salt) last; takes effect before the next step."""
        with self._wake:
            self._inbox.append(("pin", list(token_ids)))
            self._wake.notify()

    def stats(self) -> EngineStats:
        """A snapshot of counters; may be a step old."""
        pool = self._pages.pools[0]
        scheduler = self.scheduler
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            pages_total=pool.num_usable,
            pages_free=pool.num_free,
            pages_cached=pool.num_reclaimable,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_ahead=self._num_ahead,
            num_relieved=self.pressure.num_relieved,
            prefix_query_tokens=self._pages.tree.num_query_tokens,
            prefix_hit_tokens=self._pages.tree.num_hit_tokens,
            used_tokens=sum(s.num_computed_tokens for s in list(scheduler.running)),
            step_tokens=self._step_tokens,
            longest_step_s=self._longest_step_s,
        )

    @property
    def step_age_s(self) -> float:
        """How long the present step has been running; 0 between steps."""
        started = self._step_started
        return time.monotonic() - started if started else 0.0

    @property
    def is_dead(self) -> bool:
        """Whether an error outside any request stopped the loop."""
        return self._dead is not None

    def close(self) -> None:
        """End every request with "abort" and stop the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # --- the engine's thread -----------------------------------------------------------------------------------------

    @torch.inference_mode()  # entered once: each time takes some 50 us between two steps
    def _loop(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a thread's own: streams and kernels go there
            while True:
                with self._wake:
                    while not self._is_wanted():
                        if not self._may_idle:
                            self._wake.wait()
                        elif not self._wake.wait(IDLE_GRACE_S):
                            break
                    if self._closing:
                        break
                if self._is_wanted():
                    self._run_once()
                else:
                    self.run_idle()
        except BaseException as error:
            log.exception("the engine stopped")
            self._dead = error if isinstance(error, Exception) else InternalError(repr(error))
        self._end_all()

    def _is_wanted(self) -> bool:
        """Whether there is anything to do but idle jobs."""
        return bool(self._inbox) or self._closing or self._has_work

    @property
    def _may_idle(self) -> bool:
        return bool(self._idle_jobs) and self._num_output_tokens > 0

    def run_idle(self) -> None:
        """One idle job, until it is finished or work comes in."""
        job = self._idle_jobs.popleft()
        try:
            if not job(self._is_wanted):
                self._idle_jobs.appendleft(job)
        except Exception:  # what is done on the side ends no request
            log.exception("an idle job failed")

    @torch.inference_mode()
    def run_once(self) -> None:
        """Take what came in, then one step: the loop's body, for those who have no thread."""
        self._run_once()

    def _run_once(self) -> None:
        while self._inbox:
            kind, value = self._inbox.popleft()
            if kind == "submit":
                self._accept(value)
            elif kind == "abort":
                self._abort(value)
            elif kind == "pin":
                self._pages.tree.pin(value)
            else:
                self._pages.tree.clear()
        if self._has_work:
            self._hold_back_readers()
            self._step_started = time.monotonic()
            if not self.step():
                time.sleep(IDLE_S)  # all that runs waits for its reader
            self._longest_step_s = max(self._longest_step_s, time.monotonic() - self._step_started)
            self._step_started = 0.0
        if self.options.check_invariants:
            try:
                self.scheduler.check_integrity()
            except InvariantViolated as error:
                violated(error)
                raise

    def _hold_back_readers(self) -> None:
        """Pause score requests whose reader is behind: a piece can be 64 MB."""
        for sequence in self.scheduler.running:
            if sequence.request.score:
                stream = self._streams.get(sequence.request.request_id)
                sequence.is_paused = stream is not None and stream.num_unread_pieces > UNREAD_PIECES

    @property
    def _has_work(self) -> bool:
        return self._pending is not None or self.scheduler.has_work

    def step(self) -> bool:
        """schedule, build, forward, sample, commit, publish. False when there was nothing to compute.

        Running ahead, the forward pass of the next step is launched before this one's tokens are on the host, and
        sampled after they were committed: what samples it (masks, penalties) knows every token before.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            step = self.scheduler.schedule()
            for sequence in step.out_of_pages:
                self._end_out_of_pages(sequence)
            if not step.scheduled:
                return bool(step.out_of_pages)
            pending = self._launch(step, None)
            if pending.error is None:
                self._sample(pending)
        ahead = self._launch_ahead(pending) if self.options.runs_ahead and pending.error is None else None
        fed = [part.sequence for part in ahead.step.scheduled] if ahead is not None else []
        for sequence in fed:
            sequence.is_fed = True
        self._commit(pending)
        for sequence in fed:
            sequence.is_fed = False
        if ahead is not None and ahead.error is None:
            self._sample(ahead)
        if ahead is not None and ahead.error is not None:
            self._give_up(ahead)
        else:
            self._pending = ahead
        return True

    def _launch(self, step: Step, before: PendingStep | None) -> PendingStep:
        """Build and forward. `before` is the step that samples the tokens of a step that is ahead."""
        started = time.monotonic()
        for part in step.scheduled:
            part.sequence.start_time = part.sequence.start_time or started
        self._num_steps += 1
        pending = PendingStep(step)
        try:
            if self._fault is not None:
                self._fault(self._num_steps)
            sampled = before.sampled if before is not None else None
            if before is None:  # else their last tokens are not known yet
                pending.masks = self._masks.begin(part.sequence for part in step.scheduled if part.is_last_chunk)
            pending.output = self._runner.forward(self.builder, step, sampled)
        except Exception as error:
            pending.error = error
            if pending.masks is not None:
                pending.masks.wait()
        return pending

    def _launch_ahead(self, pending: PendingStep) -> PendingStep | None:
        step = self.scheduler.schedule_ahead(pending.step)
        if step is None:
            return None
        self._num_ahead += 1
        return self._launch(step, pending)

    def _give_up(self, pending: PendingStep) -> None:
        """A step failed: try it again smaller where memory ran out, else end its requests. The loop goes on.

        Raises DeviceError for what leaves the device unusable.
        """
        error = pending.error
        assert error is not None
        if is_device_lost(error):
            raise DeviceError(f"the GPU failed: {str(error).splitlines()[0]}", "restart localllm") from error
        if is_out_of_memory(error) and self.pressure.relieve(pending.step):
            return
        log.error("a step failed", exc_info=error)
        for part in pending.step.scheduled:
            if part.sequence.state is not SequenceState.FINISHED:
                self._fail(part.sequence, _explain(error))

    def _accept(self, request: Request) -> None:
        params = request.params
        room = self.options.max_context - len(request.prompt_token_ids)
        seed = params.seed if params.seed is not None else random.SystemRandom().getrandbits(62)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        sequence = Sequence(request, 0, len(self._pages.pools), seed, max_tokens)
        stream = self._streams.get(request.request_id)
        sequence.submit_time = stream.submit_time if stream is not None else sequence.submit_time
        sequence.pending_forks = 0 if request.only_reads else params.n - 1
        self.scheduler.add(sequence)

    def _abort(self, request_id: str) -> None:
        for sequence in [s for s in self.scheduler.sequences() if s.request.request_id == request_id]:
            self._finish(sequence, FinishReason.ABORT)

    def _sample(self, pending: PendingStep) -> None:
        """Split off the children of finished prompts and sample one token for every sequence at its end."""
        sequences: list[Sequence] = []
        rows: list[int] = []
        start = row = 0
        assert pending.output is not None
        if pending.masks is not None:
            pending.masks.wait()
        try:
            for part in pending.step.scheduled:
                count = len(row_range(part, start))
                if part.sequence.wants_all_rows and part.start < part.sequence.num_prompt_tokens:
                    self._take_rows(part, pending.output, row)
                ended = part.sequence.state is SequenceState.FINISHED  # while its part was under way
                jumped = part.start + part.num_tokens < part.sequence.num_tokens  # or what follows became known
                if part.is_last_chunk and not part.sequence.request.only_reads and not ended and not jumped:
                    family = [part.sequence, *self._children(part.sequence)]
                    sequences += family
                    rows += [row + count - 1] * len(family)
                start += part.num_tokens
                row += count
            if pending.masks is None:
                self._masks.fill(sequences)
            pending.sampled = self._runner.sample(pending.output, rows, sequences)
        except Exception as error:
            pending.error = error
        for sequence in sequences:
            sequence.mask_row = None

    def _children(self, parent: Sequence) -> list[Sequence]:
        children = []
        for index in range(1, parent.pending_forks + 1):
            child = Sequence(parent.request, index, len(self._pages.pools), parent.seed + index, parent.max_tokens)
            child.submit_time, child.start_time = parent.submit_time, parent.start_time
            child.stop_check = parent.request.stop_check.fork() if parent.request.stop_check else None
            child.token_mask = parent.token_mask.fork() if parent.token_mask else None
            child.mask_row = parent.mask_row
            children.append(child)
        return children

    def _take_rows(self, part: Scheduled, output: ForwardOutput, row: int) -> None:
        """Log-probabilities of prompt rows: published (score) or kept for the first token's event (prompt logprobs)."""
        sequence = part.sequence
        skip = max(0, sequence.num_rows_done - part.start)  # done before a preemption
        if skip >= part.num_tokens or sequence.num_rows_done >= sequence.num_prompt_tokens:
            return
        at = part.start + skip
        prompt = sequence.token_ids
        if sequence.request.pooling:
            self._pool(sequence, output, row + skip, row + part.num_tokens)
            sequence.num_rows_done = part.start + part.num_tokens
            return
        for logits in output.pieces(row + skip, row + part.num_tokens, self._runner.vocab_size):
            if sequence.request.score:
                scores = torch.log_softmax(logits, -1).cpu().numpy()
                progress = (at + len(scores), sequence.num_prompt_tokens)
                self._publish(sequence, TokenEvent(sequence.request.request_id, scores=scores, prefill=progress))
            else:
                wanted = sequence.params.prompt_logprobs or 0
                for offset in range(logits.shape[0]):
                    if at + offset + 1 < sequence.num_prompt_tokens:
                        target = prompt[at + offset + 1]
                        sequence.prompt_logprobs.append(token_logprob(logits[offset], target, wanted))
            at += logits.shape[0]
        sequence.num_rows_done = max(sequence.num_rows_done, at)

    @staticmethod
    def _pool(sequence: Sequence, output: ForwardOutput, start: int, end: int) -> None:
        """Add rows [start, end) to the mean of a sequence, or keep the last of them."""
        rows = output.normed(start, end)
        if sequence.request.pooling == "last":
            sequence.pooled = rows[-1].clone()
        else:
            total = rows.sum(0)
            sequence.pooled = total if sequence.pooled is None else sequence.pooled + total

    @staticmethod
    def _pooled_event(sequence: Sequence) -> TokenEvent:
        event = TokenEvent(sequence.request.request_id, sequence.index)
        if sequence.pooled is not None:
            count = sequence.num_prompt_tokens if sequence.request.pooling == "mean" else 1
            event.pooled = (sequence.pooled / count).cpu().numpy()
        return event

    def _commit(self, pending: PendingStep) -> None:
        """Wait for the tokens of a step, count it, and publish."""
        try:
            results = pending.sampled.results() if pending.sampled is not None else []
        except Exception as error:  # what a GPU computes fails when it is waited for
            pending.error = error
        if pending.error is not None:
            self._give_up(pending)
            return
        assert pending.sampled is not None
        sequences = pending.sampled.sequences
        self.scheduler.commit(pending.step)
        self.pressure.count_good()
        self._step_tokens.observe(sum(part.num_tokens for part in pending.step.scheduled))
        now = time.monotonic()
        for part in pending.step.scheduled:
            sequence = part.sequence
            if sequence.state is SequenceState.FINISHED:
                continue
            self._num_prompt_tokens += max(
                0, min(part.start + part.num_tokens, sequence.num_prompt_tokens) - part.start
            )
            if part.is_last_chunk or sequence.num_uncomputed_tokens == 0:
                sequence.prefill_time = sequence.prefill_time or now
            if sequence.request.only_reads and sequence.num_uncomputed_tokens == 0:
                sequence.last_token_time = now
                self._finish(sequence, FinishReason.STOP, self._pooled_event(sequence))
            elif sequence.num_uncomputed_tokens > 0 and sequence.num_output_tokens == 0:
                progress = (sequence.num_computed_tokens, sequence.num_prompt_tokens)
                self._publish(sequence, TokenEvent(sequence.request.request_id, sequence.index, prefill=progress))
        parents = {s.request.request_id: s for s in sequences if s.index == 0}
        for sequence in sequences:
            if sequence.index > 0 and sequence.num_computed_tokens == 0:
                self.scheduler.add_fork(sequence, parents[sequence.request.request_id])
                sequence.prefill_time = now
        for sequence, result in zip(sequences, results, strict=True):
            if sequence.state is not SequenceState.FINISHED:  # it ended while its token was under way
                sequence.pending_forks = 0
                self._advance(sequence, result, now)

    def _advance(self, sequence: Sequence, result: RowResult, now: float) -> None:
        if isinstance(result, Exception):
            self._fail(sequence, _explain(result))
            return
        token, logprob = result
        event = TokenEvent(sequence.request.request_id, sequence.index)
        try:
            self._append(sequence, token, event)
        except Exception as error:  # a stop check or mask that fails ends its own request only
            if not isinstance(error, LocalLLMError):
                log.exception("a request failed")
            self._fail(sequence, _explain(error))
            return
        self._num_output_tokens += len(event.token_ids)
        had = sequence.num_output_tokens - len(event.token_ids)
        sequence.first_token_time = sequence.first_token_time or now
        sequence.last_token_time = now
        if logprob is not None:
            event.logprobs = [logprob]
        if had == 0 and sequence.index == 0 and sequence.params.prompt_logprobs is not None:
            event.prompt_logprobs = [None, *sequence.prompt_logprobs]
        if sequence.finish_reason is None:
            self._publish(sequence, event)
        else:
            self._finish(sequence, sequence.finish_reason, event)

    def _append(self, sequence: Sequence, token: int, event: TokenEvent) -> None:
        """Append the token that was sampled and what can only follow it: the next forward pass reads all of it at once.

        A token that is not in a forward pass yet gives way to others of the same text, where with what follows it the
        tokenizer would spell it so: text that comes back in a later prompt has the same tokens.
        """
        ids, mask = [token], sequence.token_mask
        if mask is not None:
            mask.accept(token)
            if sequence.params.logprobs is None:  # what is not sampled has no log-probability
                ids = [token, *mask.jump_forward()] if sequence.is_fed else mask.jump_forward(token)
            if ids[0] != token:
                mask.rollback(1)
                mask.accept(ids[0])
        for number, index in enumerate(ids[:MAX_DECODE_TOKENS]):
            if number and mask is not None:
                mask.accept(index)
            sequence.append(index)
            event.token_ids.append(index)
            sequence.check_stop(index)
            if sequence.finish_reason is not None:
                return

    def _finish(self, sequence: Sequence, reason: FinishReason, event: TokenEvent | None = None) -> None:
        """Take a sequence off and publish its terminal event, and those of children it never split off."""
        self.scheduler.remove(sequence)
        event = event or TokenEvent(sequence.request.request_id, sequence.index)
        event.finish_reason = reason
        event.stop_reason, event.keep_chars = sequence.stop_reason, sequence.keep_chars
        event.usage, event.timing = usage_of(sequence), timing_of(sequence)
        forks, sequence.pending_forks = sequence.pending_forks, 0
        self._publish(sequence, event)
        for index in range(1, forks + 1):
            self._publish(sequence, replace(event, index=index, token_ids=[], usage=replace(event.usage or Usage())))

    def _fail(self, sequence: Sequence, error: LocalLLMError) -> None:
        if sequence.finish_reason is FinishReason.ERROR:
            return
        sequence.finish_reason = FinishReason.ERROR
        self._finish(sequence, FinishReason.ERROR, TokenEvent(sequence.request.request_id, sequence.index, error=error))

    def _end_out_of_pages(self, sequence: Sequence) -> None:
        """Not a page left for it though it is alone: what it has is its answer, if it has any."""
        if sequence.num_output_tokens:
            self._finish(sequence, FinishReason.LENGTH)
        else:
            message = f"the key/value cache has no room for {sequence.num_tokens:,} tokens"
            self._fail(sequence, OutOfMemory(message, "use a larger --ctx, or a smaller prompt"))

    def _publish(self, sequence: Sequence, event: TokenEvent) -> None:
        stream = self._streams.get(event.request_id)
        if stream is None:
            return
        try:
            stream.put(event)
        except Exception:  # a listener's fault ends its own request
            log.exception("a listener failed")
            self._inbox.append(("abort", event.request_id))
        if stream.is_done:
            self._streams.pop(event.request_id, None)

    def _end_all(self) -> None:
        self._masks.close()
        with self._wake:
            self._closing = True
            submitted = [value for kind, value in self._inbox if kind == "submit"]
            self._inbox.clear()
        for request in submitted:
            self._accept(request)
        for sequence in self.scheduler.sequences():
            if self._dead is None:
                self._finish(sequence, FinishReason.ABORT)
            else:
                self._fail(sequence, DeviceError(f"the engine stopped: {self._dead}", "restart localllm; see the log"))


def is_device_lost(error: BaseException) -> bool:
    """Whether a GPU's context is unusable after this failure: every later call would fail, too."""
    from localllm.kernels.verify.trial import is_device_lost as context_is_lost

    lost = getattr(torch, "AcceleratorError", ())
    return not is_out_of_memory(error) and (isinstance(error, lost) or context_is_lost(error))


def _explain(error: Exception) -> LocalLLMError:
    """An error that a user can be shown."""
    if isinstance(error, LocalLLMError):
        return error
    if is_out_of_memory(error):
        wrapped: LocalLLMError = OutOfMemory("memory ran out during this step", "use a smaller --ctx or fewer requests")
    else:
        wrapped = InternalError(f"the request failed inside the engine: {type(error).__name__}", "see the log")
    wrapped.__cause__ = error
    return wrapped

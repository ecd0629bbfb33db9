"""Runs the engine's steps: schedule, build, forward, sample, commit, publish.

An exception of one request (sampling, mask, stop check) ends that request, and an exception in a forward pass ends the
requests of that batch. An exception that escapes stops the engine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from concurrent.futures import Future
from dataclasses import dataclass, field

from localllm.errors import LocalLLMError, OutOfMemory
from localllm.request import FinishReason, TokenEvent

from .batch import row_range
from .device_sampler import can_look_ahead
from .failures import device_lost, explained, forget_frames, is_device_lost, is_out_of_memory
from .masks import MaskFiller
from .metrics import EngineStats
from .pressure import Pressure
from .prompt_rows import pooled_event, take_rows
from .publisher import Publisher
from .runner import ForwardOutput, Runner
from .sampled_tokens import RowResult, SampledTokens
from .scheduler import Scheduled, Scheduler, Step
from .sequence import MAX_DECODE_TOKENS, Sequence, SequenceState
from .speculation import Speculation

log = logging.getLogger(__name__)


@dataclass(slots=True)
class PendingStep:
    """A launched step whose tokens are being sampled, or will be once those of the previous step are known."""

    step: Step
    output: ForwardOutput | None = None
    sampled: SampledTokens | None = None
    masks: Future[None] | None = None
    # number of a sequence with draft tokens -> its part, and the row from which its first token is sampled
    drafted: dict[int, tuple[Scheduled, int]] = field(default_factory=dict)
    # number of a sequence whose draft rows were sampled together with the first rows -> their results
    behind: dict[int, list[RowResult]] = field(default_factory=dict)
    error: Exception | None = None  # why the step failed


class Stepper:
    """Continuous batching over one model; `speculation` None turns off speculative decoding."""

    def __init__(
        self, runner: Runner, scheduler: Scheduler, publisher: Publisher, speculation: Speculation | None = None
    ) -> None:
        self.runner = runner
        self.speculation = speculation
        # launch a step before the previous tokens are on the host: keeps a GPU busy, but would delay tokens on a CPU
        self.runs_ahead = runner.cache.device.type == "cuda"
        self.fault: Callable[[int], None] | None = None  # for tests: called with each step's number; may raise
        self.lost: Exception | None = None  # why the engine is about to end; set by any thread
        self.pressure = Pressure(scheduler)
        self.masks = MaskFiller(runner.vocab_size)
        self._scheduler = scheduler
        self._publisher = publisher
        self._ahead: PendingStep | None = None  # the step launched ahead, if any
        self.stats = EngineStats()  # only the counters of steps and tokens are kept here

    @property
    def has_work(self) -> bool:
        return self._ahead is not None or self._scheduler.has_work

    def step(self) -> bool:
        """Run one step; False if there was nothing to compute.

        When running ahead, the forward pass of the next step is launched before this step's tokens are on the host. It
        is sampled after they are committed, so masks and penalties see every earlier token.
        """
        started = time.monotonic()
        pending, self._ahead = self._ahead, None
        if pending is None:
            step = self._scheduler.schedule()
            self._end_out_of_pages(step)
            if not step.scheduled:
                self._publisher.publish()
                return bool(step.out_of_pages)
            self._add_drafts(step)
            pending = self._launch(step)
            self._sample(pending)
        ahead = self._launch_ahead(pending)
        self._commit(pending)
        self._publisher.publish()
        if (
            ahead is not None and pending.error is None
        ):  # otherwise its tokens would follow ones that are computed again
            self._sample(ahead)
            if ahead.error is None:
                self._ahead = ahead
            else:
                self._handle_failure(ahead)
                self._publisher.publish()
        if self.speculation is not None and pending.error is None:
            self.speculation.note(pending.step, time.monotonic() - started)
        return True

    def _add_drafts(self, step: Step) -> None:
        """Add draft tokens to a step. If a drafter fails, speculation is turned off; no request is affected."""
        if self.speculation is None:
            return
        try:
            self.runner.copy_pages(step)  # drafters read them, and write behind their last token
            most = self._scheduler.most_drafts(step)
            self._scheduler.add_drafts(step, self.speculation.choose(step, most))
            step.drafter = self.speculation.name
        except Exception as error:
            if is_device_lost(error):
                raise device_lost(error) from error
            log.error("speculation is off: drafting failed", exc_info=error)
            self._stop_speculation()

    def _stop_speculation(self) -> None:
        self.speculation = self.runner.listener = None

    def _launch(self, step: Step, before: PendingStep | None = None) -> PendingStep:
        """Build the batch and launch its forward pass. `before` provides the input tokens of a step that runs ahead."""
        started = time.monotonic()
        for part in step.scheduled:
            part.sequence.start_time = part.sequence.start_time or started
        self.stats.num_steps += 1
        pending = PendingStep(step)
        try:
            if self.fault is not None:
                self.fault(self.stats.num_steps)
            if before is None:  # otherwise the last tokens are not known yet
                pending.masks = self.masks.begin(part.sequence for part in step.scheduled if part.is_last_chunk)
            pending.output = self.runner.forward(step, before.sampled if before is not None else None)
        except Exception as error:
            pending.error = error
            if pending.masks is not None:
                pending.masks.result()
        return pending

    def _launch_ahead(self, pending: PendingStep) -> PendingStep | None:
        if not self.runs_ahead or pending.error is not None:
            return None
        if self.speculation is not None and self.speculation.wants(
            pending.step, self._scheduler.most_drafts(pending.step)
        ):
            return None  # the next step will have draft tokens
        step = self._scheduler.schedule_ahead(pending.step)
        if step is None:
            return None
        self.stats.num_ahead += 1
        return self._launch(step, pending)

    def _sample(self, pending: PendingStep) -> None:
        """Fork the children of finished prompts, and sample a token for every sequence that is fully computed."""
        if pending.error is not None:
            return
        sequences: list[Sequence] = []
        rows: list[int] = []
        start = row = 0
        assert pending.output is not None
        if pending.masks is not None:
            pending.masks.result()
        try:
            for part in pending.step.scheduled:
                count = len(row_range(part, start))
                if part.sequence.wants_all_rows and part.start < part.sequence.num_prompt_tokens:
                    for event in take_rows(part, pending.output, row, self.runner.vocab_size):
                        self._publisher.add(event)
                ended = part.sequence.state is SequenceState.FINISHED  # during the forward pass
                jumped = part.start + part.num_tokens < part.sequence.num_tokens  # a grammar forced further tokens
                if part.is_last_chunk and not part.sequence.request.only_reads and not ended and not jumped:
                    family = [part.sequence, *part.sequence.children()]
                    sequences += family
                    first = row + count - 1 - len(part.drafts)
                    rows += [first] * len(family)
                    if part.drafts:
                        pending.drafted[part.sequence.number] = part, first
                start += part.num_tokens
                row += count
            if pending.masks is None:
                self.masks.fill(sequences)
            ahead = [0] * len(sequences)
            for part, first in pending.drafted.values() if self.runner.samples_ahead(pending.output) else ():
                if can_look_ahead(part.sequence):
                    pending.behind[part.sequence.number] = []
                    for number in range(1, len(part.drafts) + 1):
                        sequences.append(part.sequence)
                        rows.append(first + number)
                        ahead.append(number)
            pending.sampled = self.runner.sample(pending.output, rows, sequences, ahead)
        except Exception as error:
            pending.error = error
        for sequence in sequences:
            sequence.mask_row = None

    def _commit(self, pending: PendingStep) -> None:
        """Wait for the tokens of a step, update all sequences and counters, and queue the events."""
        try:
            results = pending.sampled.results() if pending.sampled is not None else []
        except Exception as error:  # asynchronous GPU errors surface here
            pending.error = error
        if self.lost is not None:  # what was computed without a rank means nothing
            raise self.lost
        if pending.error is not None:
            self._handle_failure(pending)
            return
        assert pending.sampled is not None
        sequences = pending.sampled.sequences
        count = len(sequences) - sum(len(pending.drafted[number][0].drafts) for number in pending.behind)
        for sequence, result in zip(sequences[count:], results[count:], strict=True):
            pending.behind[sequence.number].append(result)
        del sequences[count:], results[count:]
        self._scheduler.commit(pending.step)
        self.pressure.count_good()
        self.stats.step_tokens.observe(sum(part.num_tokens for part in pending.step.scheduled))
        now = time.monotonic()
        self._commit_prompts(pending.step, now)
        parents = {s.request.request_id: s for s in sequences if s.index == 0}
        for sequence in sequences:
            if sequence.index > 0 and sequence.num_computed_tokens == 0:
                self._scheduler.add_fork(sequence, parents[sequence.request.request_id])
                sequence.prefill_time = now
        for sequence, result in zip(sequences, results, strict=True):
            if sequence.state is not SequenceState.FINISHED:  # otherwise it ended while its token was being sampled
                sequence.pending_forks = 0
                before = sequence.num_tokens
                part, row = pending.drafted.get(sequence.number, (None, 0))
                drafts, drafter = part.drafts if part is not None else (), pending.step.drafter
                self._count(sequence, drafter, checked=len(drafts))
                self._advance(sequence, result, now, drafter, drafts)
                if part is not None:
                    self._accept_drafts(pending, sequence, part, row, before, now)
                if self.speculation is not None:
                    self.speculation.learn(sequence, sequence.num_tokens - before)

    def _commit_prompts(self, step: Step, now: float) -> None:
        for part in step.scheduled:
            sequence, left = part.sequence, part.sequence.num_uncomputed_tokens
            if sequence.state is SequenceState.FINISHED:
                continue
            end = min(part.start + part.num_tokens, sequence.num_prompt_tokens)
            self.stats.num_prompt_tokens += max(0, end - part.start)
            if part.is_last_chunk or left == 0:
                sequence.prefill_time = sequence.prefill_time or now
            if sequence.request.only_reads and left == 0:
                sequence.last_token_time = now
                try:
                    event = pooled_event(sequence, self.runner.projected)
                except Exception as error:
                    self._fail(sequence, error)
                else:
                    self._publisher.finish(sequence, FinishReason.STOP, event)
            elif left > 0 and sequence.num_output_tokens == 0:
                progress = (sequence.num_computed_tokens, sequence.num_prompt_tokens)
                self._publisher.add(
                    TokenEvent(
                        sequence.request.request_id, sequence.index, prefill=progress,
                        cached_tokens=sequence.num_cached_tokens,
                    )
                )  # fmt: skip

    def _advance(self, sequence: Sequence, result: RowResult, now: float, drafter: str, drafts: Many[int]) -> None:
        """Append a sampled token to its sequence and queue its event.

        drafts  the tokens that `drafter` proposed from this position on
        """
        if isinstance(result, Exception):
            self._fail(sequence, result)
            return
        token, logprob = result
        had = sequence.num_output_tokens
        cached = None if had else sequence.num_cached_tokens
        event = TokenEvent(sequence.request.request_id, sequence.index, cached_tokens=cached)
        try:
            self._append(sequence, token, event)
            if sequence.stop_check is not None and sequence.finish_reason is None:
                event.text = sequence.stop_check.take()
        except Exception as error:  # a failed stop check or mask ends only its own request
            if not isinstance(error, LocalLLMError):
                log.exception("a request failed")
            sequence.stop_check = None
            self._publisher.fail(sequence, explained(error))
            return
        self.stats.num_output_tokens += len(event.token_ids)
        self._count(sequence, drafter, right=_num_equal(event.token_ids, drafts))
        sequence.first_token_time = sequence.first_token_time or now
        sequence.last_token_time = now
        if logprob is not None:
            event.logprobs = [logprob]
        if had == 0 and sequence.index == 0 and sequence.params.prompt_logprobs is not None:
            event.prompt_logprobs = [None, *sequence.prompt_logprobs]
        if sequence.finish_reason is None:
            self._publisher.add(event)
        else:
            self._publisher.finish(sequence, sequence.finish_reason, event)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        """End a sequence with an error of its own. Raises DeviceError if the device is unusable."""
        if is_device_lost(error):
            raise device_lost(error) from error
        self._publisher.fail(sequence, explained(error))

    def _accept_drafts(
        self, pending: PendingStep, sequence: Sequence, part: Scheduled, row: int, before: int, now: float
    ) -> None:
        """Accept draft tokens as long as they match, and discard the rest.

        While the tokens from `before` on equal the draft, each further row is sampled as in a step of its own.
        """
        assert pending.output is not None
        while sequence.state is not SequenceState.FINISHED:
            new = sequence.token_ids[before:]
            num_right = _num_equal(new, part.drafts)
            self._scheduler.settle_drafts(part, num_right)
            if num_right < len(new):
                self._scheduler.end_drafts(part, num_right)
                return
            if sequence.number in pending.behind:
                result = pending.behind[sequence.number][num_right - 1]
            else:
                result = self._sample_one(pending.output, row + num_right, sequence)
            self._advance(sequence, result, now, pending.step.drafter, part.drafts[num_right:])

    def _sample_one(self, output: ForwardOutput, row: int, sequence: Sequence) -> RowResult:
        self.masks.fill([sequence])
        try:
            return self.runner.sample(output, [row], [sequence]).results()[0]
        except Exception as error:
            return error
        finally:
            sequence.mask_row = None

    def _count(self, sequence: Sequence, drafter: str, checked: int = 0, right: int = 0) -> None:
        """Count draft tokens: verified ones once per step, accepted ones at once, since one may end the answer."""
        if not (checked or right):
            return
        stats = self.stats
        stats.num_drafts += checked > 0
        stats.num_draft_tokens += checked
        stats.num_accepted_tokens += right
        before = stats.guesses.get(drafter, (0, 0))
        stats.guesses[drafter] = before[0] + checked, before[1] + right
        sequence.num_draft_tokens += checked
        sequence.num_accepted_tokens += right
        sequence.drafters[drafter] = None

    def _append(self, sequence: Sequence, token: int, event: TokenEvent) -> None:
        """Append the sampled token and the tokens that a grammar forces after it; the next step computes them together.

        The token may be replaced: together with the forced text, the tokenizer may encode it differently, and the
        answer should have the same tokens as in a later prompt. Not where steps run ahead: whether the token is in a
        forward pass by now depends on other requests and on drafts, and they must not change an answer.
        """
        ids, mask = [token], sequence.token_mask
        if mask is not None:
            mask.accept(token)
            if sequence.params.logprobs is None:  # forced tokens have no log-probability
                ids = [token, *mask.jump_forward()] if self.runs_ahead else mask.jump_forward(token)
            if ids[0] != token:
                mask.rollback(1)
                mask.accept(ids[0])
                sequence.num_respelled += 1
        for number, index in enumerate(ids[:MAX_DECODE_TOKENS]):
            if number and mask is not None:
                mask.accept(index)
            sequence.append(index)
            event.token_ids.append(index)
            sequence.check_stop(index)
            if sequence.finish_reason is not None:
                return

    def _handle_failure(self, pending: PendingStep) -> None:
        """Handle a failed step: retry with lower limits if it ran out of memory, otherwise end its requests.

        Raises DeviceError if the device is unusable.
        """
        error = pending.error
        assert error is not None
        if is_device_lost(error):
            raise device_lost(error) from error
        guessed = [part.sequence for part in pending.step.scheduled if part.drafts]
        for sequence in guessed:
            self._scheduler.pages.trim(sequence)
        if is_out_of_memory(error):
            pending.output = None
            forget_frames(error)
            if self.pressure.relieve(pending.step):
                self._scheduler.restart(pending.step)
                return
        if guessed:  # speculation is optional, so retry without it
            log.error("speculation is off: a step failed", exc_info=error)
            forget_frames(error)
            self._stop_speculation()
            self._scheduler.restart(pending.step)
            return
        log.error("a step failed", exc_info=error)
        forget_frames(error)
        for part in pending.step.scheduled:
            if part.sequence.state is not SequenceState.FINISHED:
                self._publisher.fail(part.sequence, explained(error))

    def _end_out_of_pages(self, step: Step) -> None:
        """End sequences that run alone and still get no page: with "length" if they have any output, else an error."""
        for sequence in step.out_of_pages:
            if sequence.num_output_tokens:
                self._publisher.finish(sequence, FinishReason.LENGTH)
            else:
                message = f"the KV cache has no room for {sequence.num_tokens:,} tokens"
                self._publisher.fail(sequence, OutOfMemory(message, "use a larger --ctx, or a smaller prompt"))


def _num_equal(tokens: Many[int], guessed: Many[int]) -> int:
    """Length of the common prefix of two token lists."""
    pairs = enumerate(zip(tokens, guessed, strict=False))
    return next((number for number, (token, guess) in pairs if token != guess), min(len(tokens), len(guessed)))

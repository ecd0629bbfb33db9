"""The scheduler: decides what each step computes, within token and page budgets. Integers only, no torch.

In each step, every decoding sequence first gets a slot for its next token, copying a shared page or preempting the
latest arrival if needed. Sequences in prefill then get chunks within the token budget, and waiting ones are admitted by
priority, then age. Preemption is by recomputation: the pages are freed, the tokens stay.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace

from localllm.request import MOST_DRAFTS

from .invariant import violated
from .pages import PageCopy, Pages, SlotCopy
from .sequence import Sequence, SequenceState


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Budgets of one step."""

    max_parallel: int = 4  # sequences running at once
    prefill_budget: int = 512  # prompt tokens per step, over all sequences
    score_rows: int = 256  # prompt tokens per step of a sequence that needs the logits of all rows
    drafts: int = MOST_DRAFTS  # draft tokens per step, over all sequences
    draft_rows: int = 0  # tokens of a step with drafts, as many as a captured step has room for; 0: no limit
    num_slots: int = 0  # state slots for sequences and checkpoints, for models with recurrent layers
    whole: bool = False  # never split a prompt into chunks, because its tokens attend to each other in both directions
    preempt_every: int = 0  # for tests: preempt the latest sequence every N steps; 0 is never


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A sequence's part in a step: tokens [start, start + num_tokens)."""

    sequence: Sequence
    start: int
    num_tokens: int
    is_ahead: bool = False  # its only token is still being sampled by the previous step
    saves: SlotCopy | None = None  # copies the state after this part to a checkpoint
    drafts: tuple[int, ...] = ()  # draft tokens at the end of the part, after the sequence's own

    @property
    def num_known(self) -> int:
        """Tokens of the part without the draft."""
        return self.num_tokens - len(self.drafts)

    @property
    def is_last_chunk(self) -> bool:
        """True if the part computes all remaining tokens of the sequence, so that a new one is sampled."""
        return self.is_ahead or self.start + self.num_known == self.sequence.num_tokens


@dataclass(slots=True)
class Step:
    """The work of one forward pass."""

    scheduled: list[Scheduled] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)
    # sequences that got no page although they run alone; the engine ends them
    out_of_pages: list[Sequence] = field(default_factory=list)
    drafter: str = ""  # name of the drafter of the draft tokens


class Scheduler:
    """Schedules waiting and running sequences over one `Pages`."""

    def __init__(self, pages: Pages, limits: SchedulerLimits) -> None:
        self.pages = pages
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._arrivals = 0
        self._steps = 0
        # the waiting sequence that did not fit, and the pages available then
        self._refused: tuple[Sequence, list[int]] | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def sequences(self) -> list[Sequence]:
        return [*self.running, *self.waiting]

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence after those of the same priority."""
        sequence.order = self._arrivals
        self._arrivals += 1
        self._enqueue(sequence)

    def add_fork(self, child: Sequence, parent: Sequence) -> None:
        """Run a forked child at once if `max_parallel` allows it, sharing its parent's pages; otherwise queue it.

        A queued child of a model with recurrent layers holds no state slot and restarts from the prefix cache.
        """
        child.order, child.num_cached_tokens = parent.order, parent.num_cached_tokens
        runs = len(self.running) < self.limits.max_parallel
        if (runs or self.pages.slots is None) and self.pages.fork(parent, child) and runs:
            child.state = SequenceState.RUNNING
            self.running.append(child)
        else:
            self._enqueue(child)

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.WAITING
        insort(self.waiting, sequence, key=_rank)

    def schedule(self) -> Step:
        """Schedule the next step; empty if nothing can run."""
        step = Step()
        self._steps += 1
        every = self.limits.preempt_every
        if every and self._steps % every == 0 and len(self.running) > 1:
            self.preempt_latest()
        self._schedule_decodes(step)
        budget = self._schedule_prefills(step)
        self._admit(step, budget)
        return step

    def add_drafts(self, step: Step, drafts: Many[tuple[int, ...]]) -> None:
        """Append draft tokens to each part of a step, if there are pages for them.

        With recurrent layers, drafts end before the next checkpoint, which is taken at the end of a step.
        """
        for place, (part, guesses) in enumerate(zip(step.scheduled, drafts, strict=True)):
            end = part.start + part.num_tokens
            due = self.pages.answer_checkpoint_after(part.sequence, end)
            guessed = guesses if due is None else guesses[: due - end - 1]
            if part.saves is not None or not guessed or not self.pages.extend(part.sequence, end + len(guessed)):
                continue
            if self.pages.set_aside(part.sequence):
                step.scheduled[place] = replace(part, num_tokens=part.num_tokens + len(guessed), drafts=guessed)

    def most_drafts(self, step: Step) -> int:
        """How many draft tokens may be added to a step."""
        more = sum(part.num_known - 1 for part in step.scheduled)  # tokens forced by a grammar, or recomputed
        room = self.limits.draft_rows - len(step.scheduled) if self.limits.draft_rows else self.limits.drafts
        return max(0, min(self.limits.drafts, room) - more)

    def settle_drafts(self, part: Scheduled, num_right: int) -> None:
        """Count the first `num_right` draft tokens as computed, after they were appended to the sequence."""
        part.sequence.num_computed_tokens = part.start + part.num_known + num_right
        if part.sequence.spare < 0:  # otherwise its state may still be rolled back
            self.pages.commit(part.sequence)

    def end_drafts(self, part: Scheduled, num_right: int) -> None:
        """Finish a verified draft of which the first `num_right` tokens were accepted.

        If some were rejected, recurrent states are rolled back and the next step recomputes the accepted tokens.
        """
        goes_back = num_right < len(part.drafts)
        if goes_back and part.sequence.spare >= 0:
            part.sequence.num_computed_tokens = part.start
        self.pages.end_aside(part.sequence, goes_back)
        self.pages.commit(part.sequence)
        self.pages.trim(part.sequence, part.sequence.num_tokens - 1)  # a drafter has keys and values of all of these

    def schedule_ahead(self, launched: Step) -> Step | None:
        """Schedule the step after `launched` before its tokens are known; None if that step cannot be predicted.

        It can if all running sequences are in `launched` and get a token there, no waiting one could be admitted, and
        pages suffice without preemption. Sequences that reach `max_tokens` in `launched` are left out; the part of a
        sequence that ends there unexpectedly is dropped.
        """
        if self.limits.preempt_every or (self.waiting and len(self.running) < self.limits.max_parallel):
            return None
        parts = {id(part.sequence): part for part in launched.scheduled}
        going: list[Scheduled] = []
        for sequence in self.running:
            part = parts.get(id(sequence))
            if part is None or not part.is_last_chunk or sequence.pending_forks or sequence.request.only_reads:
                return None
            if part.drafts or part.start + part.num_tokens < sequence.num_tokens:
                return None  # the number of accepted tokens is unknown, or forced tokens follow and nothing is sampled
            if sequence.num_output_tokens + 1 < sequence.max_tokens:
                going.append(Scheduled(sequence, part.start + part.num_tokens, 1, is_ahead=True))
        if not going or not self._has_room(going):
            return None
        step = Step()
        for part in going:
            copies = self.pages.own_tail(part.sequence, part.start)
            extended = self.pages.extend(part.sequence, part.start + 1)
            assert copies is not None and extended, "`_has_room` counted the pages"
            step.copies.extend(copies)
            after = part.start + 1
            is_due = after == self.pages.answer_checkpoint_after(part.sequence, part.start)
            saves = self.pages.begin_checkpoint(part.sequence, after) if is_due else None
            step.scheduled.append(replace(part, saves=saves))
        return step

    def _has_room(self, parts: list[Scheduled]) -> bool:
        """True if every part is sure to get its slot: per group, at most one new page and one copy of a shared page."""
        return all(
            pool.num_available >= sum(self.pages.num_needed(p.sequence, group, p.start + 1) + 1 for p in parts)
            for group, pool in enumerate(self.pages.pools)
        )

    def _schedule_decodes(self, step: Step) -> None:
        for sequence in [s for s in self.running if s.is_decoding]:
            if sequence.state is not SequenceState.RUNNING:
                continue  # preempted earlier in this loop
            # more than one where a grammar forced some, or after a preemption: a window group has no room for more
            self._take_slots(step, sequence, self._chunk(sequence, self.limits.prefill_budget))

    def _schedule_prefills(self, step: Step) -> int:
        budget = self.limits.prefill_budget
        for sequence in [s for s in self.running if not s.is_decoding]:
            if budget <= 0 or sequence.state is not SequenceState.RUNNING or sequence.is_paused:
                continue
            count = self._chunk(sequence, budget)
            if count:
                budget -= self._take_slots(step, sequence, count)
        return budget

    def _admit(self, step: Step, budget: int) -> None:
        while budget > 0 and len(self.running) < self.limits.max_parallel:
            sequence = next((one for one in self.waiting if not (one.is_loading or one.waits_for_adapter)), None)
            if sequence is None:
                return
            if self._refused is not None and self._refused == (sequence, self.pages.available) and self.running:
                return  # no page was freed since
            fresh = not any(sequence.block_tables)
            if fresh:
                cached = self.pages.attach_prefix(sequence)
                if sequence.num_preemptions == 0 and not sequence.num_output_tokens:  # a fork's prompt was computed
                    sequence.num_cached_tokens = min(cached, sequence.num_prompt_tokens)
            count = self._chunk(sequence, budget)
            if not count:
                if fresh:
                    self._detach(sequence)
                return
            if not self.pages.can_admit(sequence, sequence.num_computed_tokens + count):
                if fresh:
                    self._detach(sequence)
                if not self.running and not step.scheduled:
                    if self._release_waiting():
                        continue
                    self._end_out_of_pages(step, sequence)
                self._refused = (sequence, self.pages.available)
                return
            self.pages.take_slot(sequence)
            if fresh and sequence.num_preemptions == 0 and self.pages.looks_up(sequence):
                self.pages.tree.num_query_tokens += sequence.num_tokens
                self.pages.tree.num_hit_tokens += sequence.num_computed_tokens
            self.waiting.remove(sequence)
            sequence.state = SequenceState.RUNNING
            self.running.append(sequence)
            taken = self._take_slots(step, sequence, count)
            if not taken:
                return
            budget -= taken

    def _detach(self, sequence: Sequence) -> None:
        """Release the cached prefix of a sequence that is not admitted."""
        self.pages.release(sequence)
        sequence.num_computed_tokens = 0

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """Number of tokens to compute in this step; 0 if an unsplittable prompt or image exceeds the budget left."""
        if self.limits.whole:  # batched with others within the budget; a longer one runs alone
            count = sequence.num_uncomputed_tokens
            return count if count <= budget or budget == self.limits.prefill_budget else 0
        count = min(sequence.num_uncomputed_tokens, budget)
        if sequence.request.score:
            count = min(count, sequence.request.score_chunk)
        count = min(count, self.limits.score_rows) if sequence.wants_all_rows else count
        count = sequence.whole_images(sequence.num_computed_tokens, count)
        return count if count <= budget or budget == self.limits.prefill_budget else 0

    def _take_slots(self, step: Step, sequence: Sequence, count: int) -> int:
        """Schedule the next `count` tokens, at most up to the next checkpoint, preempting later arrivals if needed.

        Returns the number scheduled; 0 if `sequence` itself was preempted.
        """
        start = sequence.num_computed_tokens
        after = self.pages.checkpoint_after(sequence)
        if after is not None:
            count = min(count, after - start)
        while True:
            copies = self.pages.own_tail(sequence, start)
            if copies is not None:
                step.copies.extend(copies)
                if self.pages.extend(sequence, start + count):
                    saves = self.pages.begin_checkpoint(sequence, start + count) if start + count == after else None
                    step.scheduled.append(Scheduled(sequence, start, count, saves=saves))
                    return count
            victim = self._victim()
            if len(self.running) > 1 or victim is not sequence:
                self._preempt(victim)
                step.scheduled = [part for part in step.scheduled if part.sequence is not victim]
                if victim is sequence:
                    return 0
            elif not self._release_waiting():
                self._end_out_of_pages(step, sequence)
                return 0

    def _release_waiting(self) -> bool:
        """Release the pages of a waiting fork; True if there was one."""
        for sequence in reversed(self.waiting):
            if any(sequence.block_tables):
                self.pages.release(sequence)
                sequence.num_computed_tokens = 0
                return True
        return False

    def _victim(self) -> Sequence:
        return max(self.running, key=_rank)

    def preempt_latest(self) -> None:
        """Preempt the latest arrival of the lowest priority: free its pages and requeue it with its tokens."""
        self._preempt(self._victim())

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pages.release(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(sequence)

    def restart(self, step: Step) -> None:
        """After a failed step, preempt its sequences if they have recurrent states, which may be half updated."""
        for part in step.scheduled:
            if self.pages.slots is not None and part.sequence.state is SequenceState.RUNNING:
                self._preempt(part.sequence)

    def _end_out_of_pages(self, step: Step, sequence: Sequence) -> None:
        step.out_of_pages.append(sequence)
        self.remove(sequence)

    def commit(self, step: Step) -> None:
        """Count the step's tokens as computed and commit their pages, except for sequences that have ended."""
        for part in step.scheduled:
            if part.sequence.state is SequenceState.FINISHED:
                continue
            part.sequence.num_computed_tokens = part.start + part.num_known
            if part.sequence.spare < 0:  # otherwise its state may still be rolled back
                self.pages.commit(part.sequence)

    def remove(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
        elif sequence.state is SequenceState.WAITING and sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.state = SequenceState.FINISHED
        self.pages.release(sequence)

    def check_integrity(self) -> None:
        """Raise InvariantViolated unless every page and every count is accounted for."""
        self.pages.check_integrity(self.sequences())
        for sequence in self.running:
            if sequence.state is not SequenceState.RUNNING:
                violated(f"a running sequence has state {sequence.state.name}")
            for group, table in enumerate(sequence.block_tables):
                have = len(table) * self.pages.page_size
                if have < sequence.num_computed_tokens:
                    violated(f"group {group}: {have} slots, {sequence.num_computed_tokens} computed")
        for sequence in self.waiting:
            if sequence.state is not SequenceState.WAITING:
                violated(f"a waiting sequence has state {sequence.state.name}")


def _rank(sequence: Sequence) -> tuple[int, int, int]:
    """Sort key for admission; preemption takes the last."""
    return -sequence.request.priority, sequence.order, sequence.index

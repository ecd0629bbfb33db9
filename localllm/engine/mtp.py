"""The model's own head guesses (MTP): from its hidden state at a position and the token behind it, the token after.

What the head keeps of tokens lies in the model's pages, as one more layer would: it follows prefixes, forks and
preemption by itself. A slot there belongs to a hidden state and is written when the token behind it is known. The last
one of a page that is shared is of the sequence that wrote it last: a guess may be worse for it, never an answer.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from localllm.models.inputs import ForwardBatch, ImageRows
from localllm.models.predictor import predict, predicted_logits

from .batch import BatchBuilder
from .runner import Runner
from .sampled_tokens import from_host
from .scheduler import Scheduled, Step
from .sequence import Sequence

MOST_KEPT = 64  # hidden states of a sequence that wait until the head is asked: more are read at once


@dataclass(slots=True)
class Heard:
    """Hidden states of a sequence that the head has not read.

    at      the position of the first; it has read those before
    rows    [hidden] each, of successive positions
    known   so many of them are of the sequence's own tokens, the others of `drafts`
    epoch   preemptions of the sequence at that time: its pages are others afterwards
    """

    at: int
    epoch: int
    rows: list[Tensor] = field(default_factory=list)
    known: int = 0
    drafts: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.at + len(self.rows)

    def settle(self, sequence: Sequence) -> None:
        """Drop the hidden states of guesses that turned out wrong."""
        came = sequence.token_ids[self.at + self.known :]
        for token, guess in zip(came, self.drafts, strict=False):
            if token != guess:
                break
            self.known += 1
        self.drafts = ()
        del self.rows[self.known :]


class HeadDrafter:
    """A `PaidDrafter` over the head of a runner's model, which tells it of every forward pass.

    share   as of `PaidDrafter`
    """

    name = "mtp"
    deep = 1
    kept_bytes = 0  # its pages are the model's

    def __init__(self, runner: Runner, vocab_size: int, share: float) -> None:
        self.share = share
        self._model, self._cache, self._vocab_size = runner.model, runner.cache, vocab_size
        cache = runner.cache
        self._builder = BatchBuilder(len(cache.groups), cache.page_size, cache.device)

    def hear(self, step: Step, hidden: Tensor) -> None:
        """A step was computed. `hidden`: of all of its tokens, before the last norm, valid until the next step."""
        row, full = 0, []
        is_small = hidden.shape[0] <= MOST_KEPT
        hidden = hidden.clone() if is_small else hidden
        for part in step.scheduled:
            sequence, rows = part.sequence, hidden[row : row + part.num_tokens]
            row += part.num_tokens
            heard: Heard | None = sequence.heard
            if heard is not None:
                heard.settle(sequence)
            if heard is None or heard.epoch != sequence.num_preemptions or heard.end < part.start:
                heard = sequence.heard = Heard(part.start, sequence.num_preemptions)
            read = max(0, heard.at - part.start)  # tokens that are computed again
            del heard.rows[max(0, part.start - heard.at) :]
            heard.rows += rows[read:].unbind(0)
            heard.known, heard.drafts = max(0, part.start + part.num_known - heard.at), part.drafts
            if part.start < sequence.num_prompt_tokens or len(heard.rows) > MOST_KEPT:
                full.append(sequence)
        self._read(full)
        for part in () if is_small else step.scheduled:
            heard = part.sequence.heard
            new = min(part.num_tokens, len(heard.rows))
            heard.rows[len(heard.rows) - new :] = [row.clone() for row in heard.rows[len(heard.rows) - new :]]

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> list[tuple[int, ...]]:
        """The likeliest tokens; none for a sequence whose last hidden states it has not heard."""
        found: dict[int, list[int]] = {sequence.number: [] for sequence in sequences}
        asked = []
        for sequence, count in zip(sequences, counts, strict=True):
            heard: Heard | None = sequence.heard
            if not count or heard is None or heard.epoch != sequence.num_preemptions:
                continue
            heard.settle(sequence)
            if heard.known and heard.at + heard.known == sequence.num_tokens - 1:
                asked.append((sequence, count))
        hidden = self._read([sequence for sequence, _ in asked])
        assert self._model.predictor is not None
        size, group = self._cache.page_size, self._model.predictor.view[0]
        while asked:
            best = predicted_logits(self._model, hidden)[:, : self._vocab_size].argmax(-1).tolist()
            left, parts, ids, rows = [], [], [], []
            for row, ((sequence, count), token) in enumerate(zip(asked, best, strict=True)):
                guesses = found[sequence.number]
                guesses.append(token)
                place = sequence.num_tokens - 2 + len(guesses)
                if len(guesses) < count and place < len(sequence.block_tables[group]) * size:
                    left.append((sequence, count))
                    parts.append(Scheduled(sequence, place, 1))
                    ids.append(token)
                    rows.append(row)
            asked = left
            if asked:
                hidden = predict(self._model, self._cache, self._batch(parts, ids), hidden[rows], None)
        return [tuple(found[sequence.number]) for sequence in sequences]

    def _read(self, sequences: Many[Sequence]) -> Tensor:
        """Read what was heard of these, as far as the token behind is known: hidden states after the last of each."""
        parts: list[Scheduled] = []
        ids: list[int] = []
        rows: list[Tensor] = []
        for sequence in sequences:
            heard: Heard = sequence.heard
            count = min(heard.known, sequence.num_tokens - 1 - heard.at)
            if count > 0:
                parts.append(Scheduled(sequence, heard.at, count))
                ids += sequence.token_ids[heard.at + 1 : heard.at + 1 + count]
                rows += heard.rows[:count]
                del heard.rows[:count]
                heard.at, heard.known = heard.at + count, heard.known - count
        if not parts:
            return torch.empty(0)
        batch = self._batch(parts, ids)
        last = batch.cu_query_lens[1:].long() - 1
        return predict(self._model, self._cache, batch, self._model.normed(torch.stack(rows)), last)

    def _batch(self, parts: list[Scheduled], ids: list[int]) -> ForwardBatch:
        """At the places of `parts`, the tokens behind them."""
        batch = self._builder.build(Step(parts))
        images, row = [], 0
        for index, part in enumerate(parts):
            for image in part.sequence.request.images:
                first = max(image.start, part.start + 1)
                end = min(image.end, part.start + 1 + part.num_tokens)
                if first < end:
                    vectors = image.vectors[first - image.start : end - image.start]
                    images.append(ImageRows(index, row + first - part.start - 1, first, vectors))
            row += part.num_tokens
        tokens = from_host(ids, torch.int64, self._cache.device)
        return replace(batch, token_ids=tokens, images=tuple(images))

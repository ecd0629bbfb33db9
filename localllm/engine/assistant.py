"""A drafter that reads the model's own pages: see `models.assistant`. It keeps nothing but hidden states."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localllm.models.assistant import AssistantModel, draft, pages_of
from localllm.models.inputs import ForwardBatch

from .batch import BatchBuilder
from .cuda_graph import Captured, DecodeGraphs, Run, shapes_of
from .decode_inputs import DecodeInputs
from .drafter import ANY_LENGTH
from .mtp import rows_of
from .runner import Runner
from .sampled_tokens import from_host
from .scheduler import Scheduled, Step
from .sequence import Sequence


@dataclass(slots=True)
class _Heard:
    """Hidden states of the last known token of a step and of the drafts behind it.

    at      position of the first
    epoch   preemptions of the sequence at that time
    rows    [1 + len(drafts), hidden]
    """

    at: int
    epoch: int
    rows: Tensor
    drafts: tuple[int, ...]

    def row_before(self, sequence: Sequence) -> Tensor | None:
        """The hidden state that the last token was sampled from, if it was computed for the sequence's own tokens."""
        place = sequence.num_tokens - 2 - self.at
        if self.epoch != sequence.num_preemptions or not 0 <= place <= len(self.drafts):
            return None
        came = sequence.token_ids[self.at + 1 : self.at + 1 + place]
        return self.rows[place] if tuple(came) == self.drafts[:place] else None


class AssistantDrafter:
    """A `PaidDrafter` over the cache of a runner's model, which tells it of every forward pass.

    share   as of `PaidDrafter`
    """

    name = "draft"
    deep = 4
    at_once = False
    reach = ANY_LENGTH
    taps = None
    kept_bytes = 0  # the pages it reads are the model's

    def __init__(self, runner: Runner, own: AssistantModel, vocab_size: int, share: float) -> None:
        self.share = share
        self._model, self._cache, self._own, self._vocab_size = runner.model, runner.cache, own, vocab_size
        self._kept = pages_of(own, runner.cache)
        self._builder = BatchBuilder(len(self._cache.groups), self._cache.page_size, self._cache.device)
        self._graphs: DecodeGraphs | None = None
        self._hidden = torch.empty(0)  # what graphs read, float32 [tokens, hidden]

    def hear(self, step: Step, hidden: Tensor) -> None:
        """A step was computed. `hidden`: of all of its tokens, before the last norm, valid until the next step."""
        ends, row = [], 0
        for part in step.scheduled:
            row += part.num_tokens
            ends.append(row)
        wanted = [
            row
            for part, end in zip(step.scheduled, ends, strict=True)
            for row in range(end - 1 - len(part.drafts), end)
        ]
        kept = hidden.index_select(0, from_host(wanted, torch.int64, self._cache.device))
        rows = kept.split([1 + len(part.drafts) for part in step.scheduled])
        for part, own in zip(step.scheduled, rows, strict=True):
            last_known = part.start + part.num_known - 1
            part.sequence.heard = _Heard(last_known, part.sequence.num_preemptions, own, part.drafts)

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> list[tuple[int, ...]]:
        """The likeliest tokens; none for a sequence whose last hidden state it has not heard."""
        found: dict[int, list[int]] = {sequence.number: [] for sequence in sequences}
        asked, states = [], []
        for sequence, count in zip(sequences, counts, strict=True):
            row = None if sequence.heard is None or not count else sequence.heard.row_before(sequence)
            if row is not None:
                asked.append((sequence, count))
                states.append(row)
        if not asked:
            return [()] * len(sequences)
        hidden = self._model.normed(torch.stack(states))
        tokens: list[int] | Tensor = [sequence.token_ids[-1] for sequence, _ in asked]
        rounds: list[tuple[list[tuple[Sequence, int]], Tensor]] = []
        while asked:
            parts = [Scheduled(sequence, sequence.num_tokens - 2, 1) for sequence, _ in asked]
            hidden, tokens = self._pass(parts, tokens, hidden)
            rounds.append((asked, tokens))  # they stay on the device until the last ones are computed
            rows = [row for row, (_, count) in enumerate(asked) if len(rounds) < count]
            asked = [asked[row] for row in rows]
            hidden, tokens = rows_of(hidden, rows), rows_of(tokens, rows)
        drafts = iter(torch.cat([best for _, best in rounds]).tolist())
        for of_round, _ in rounds:
            for sequence, _ in of_round:
                found[sequence.number].append(next(drafts))
        return [tuple(self._known(found[sequence.number])) for sequence in sequences]

    def _known(self, drafts: list[int]) -> list[int]:
        """As many as are tokens of the model's vocabulary."""
        unknown = next((index for index, token in enumerate(drafts) if token >= self._vocab_size), len(drafts))
        return drafts[:unknown]

    def _pass(self, parts: list[Scheduled], ids: list[int] | Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        bucket = self._graphs.bucket(parts) if self._graphs is not None else None
        if self._graphs is not None and bucket is not None:
            self._hidden[: hidden.shape[0]].copy_(hidden)
            states, best = self._graphs.replay(bucket, parts, ids=ids)
            return states[: len(parts)].clone(), best[: len(parts)].clone()
        tokens = ids if isinstance(ids, Tensor) else from_host(ids, torch.int64, self._cache.device)
        return self._drafted(replace(self._builder.build(Step(parts)), token_ids=tokens, images=()), hidden)

    def _drafted(self, batch: ForwardBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return draft(self._own, self._model, self._cache, self._kept, batch, hidden)

    def graphs(self, inputs: DecodeInputs, sizes: Many[int], capture: Callable[[Run], Captured]) -> DecodeGraphs:
        """Of passes for so many sequences, replayed as soon as they are captured.

        inputs   those of the model's own graphs, or others
        """
        self._own.reserve_positions(inputs.max_context + 1)
        self._hidden = torch.zeros((inputs.most, self._model.facts.hidden_size), device=self._cache.device)

        def compute(batch: ForwardBatch) -> tuple[Tensor, Tensor]:
            return self._drafted(batch, self._hidden[: batch.token_ids.shape[0]])

        self._graphs = DecodeGraphs(compute, inputs, shapes_of(sizes, (), False), capture)
        return self._graphs

"""A drafter that fills a block of masks in one pass: see `models.dflash`.

Its keys and values are in pages of the model's block tables, so they follow prefixes, forks and preemption. A pass
needs pages for a whole block, which `extend` takes for it; those behind the verified tokens are given back after the
step.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from localllm.models.dflash import DFlashModel, draft, kept_by, store
from localllm.models.inputs import ForwardBatch
from localllm.models.model import Taps
from localllm.request import CAPTURED_BLOCKS, READ_AT_ONCE

from .batch import BatchBuilder
from .cuda_graph import Captured, DecodeGraphs, Run, Shape
from .decode_inputs import DecodeInputs
from .runner import Runner
from .sampled_tokens import from_host
from .scheduler import Scheduled, Step
from .sequence import Sequence

MOST_FEW = 64  # tokens of a step whose hidden states may wait


@dataclass(slots=True)
class _Heard:
    """Hidden states of a sequence that have not been read.

    at      position of the first one; keys and values before it are stored
    epoch   preemptions of the sequence at that time
    rows    [taps * hidden] each, of consecutive tokens; the last ones are of `drafts`, which may prove wrong
    """

    at: int
    epoch: int
    rows: list[Tensor] = field(default_factory=list)
    drafts: tuple[int, ...] = ()
    first: int = 0  # position of the first of `drafts`

    @property
    def end(self) -> int:
        return self.at + len(self.rows)

    def reaches(self, sequence: Sequence) -> bool:
        """Whether they were computed for the sequence's own tokens, up to the one before the last."""
        came = sequence.token_ids[self.first : -1]
        return self.epoch == sequence.num_preemptions and tuple(came) == self.drafts[: len(came)]


class DFlashDrafter:
    """A `PaidDrafter` over a DFlash model; it is the `Listener` of the runner.

    inputs    memory for passes of some blocks, up to the model's longest context
    captured  most tokens of a captured step of the model
    share     as of `PaidDrafter`
    """

    name = "draft"
    at_once = True
    kept_bytes = 0  # its pages are the model's

    def __init__(self, runner: Runner, own: DFlashModel, inputs: DecodeInputs, captured: int, share: float) -> None:
        assert own.facts.dflash is not None
        self.share = share
        self._own, self._block, self._mask = own, own.facts.dflash.block, own.facts.dflash.mask
        self.deep = self._block - 1
        self.reach = inputs.max_context - self.deep
        self._model, self._cache = runner.model, runner.cache
        self._inputs, self._kept = inputs, kept_by(own, self._cache)
        places = torch.arange(inputs.most, dtype=torch.int32, device=self._cache.device)
        self._behind = self.deep - places % self._block
        self._builder = BatchBuilder(len(self._cache.groups), self._cache.page_size, self._cache.device)
        self._graphs: DecodeGraphs | None = None
        # takes pages for the first tokens of a sequence, as `Pages.extend`
        self.extend: Callable[[Sequence, int], bool] = lambda *_: False
        hidden, dtype = self._model.facts.hidden_size, self._model.embedding.dtype
        few = max(captured, MOST_FEW), len(own.taps), hidden
        self.taps = Taps(own.taps, torch.zeros(few, dtype=dtype, device=self._cache.device))

    def hear(self, step: Step, hidden: Tensor) -> None:
        """A step was computed. Its hidden states are read at once if they fill a page, which others may then share, and
        those of prompts; else they wait, because reading few takes as long as reading many.
        """
        count, row, full = hidden.shape[0], 0, []
        rows = self.taps.rows(count).flatten(1)
        for part in step.scheduled:
            sequence, end = part.sequence, part.start + part.num_tokens
            heard: _Heard | None = sequence.heard
            same = heard is not None and heard.epoch == sequence.num_preemptions
            if heard is None or not same or not heard.at <= part.start <= heard.end:
                heard = sequence.heard = _Heard(part.start, sequence.num_preemptions)
            del heard.rows[part.start - heard.at :]
            own = rows[row : row + part.num_tokens]
            heard.rows += (own.clone() if count <= MOST_FEW else own).unbind(0)
            heard.drafts, heard.first = part.drafts, part.start + part.num_known
            row += part.num_tokens
            fills = part.start // self._cache.page_size < end // self._cache.page_size
            if fills or count > MOST_FEW or part.start < sequence.num_prompt_tokens:
                full.append((sequence, len(heard.rows)))
        self._read(full)
        self.taps.many = None

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> list[tuple[int, ...]]:
        """Draft greedily; empty for sequences whose hidden states are missing, or that have no room for a block."""
        found: dict[int, tuple[int, ...]] = {}
        ready = [one for one in zip(sequences, counts, strict=True) if one[1] and self._is_ready(one[0])]
        self._read([(sequence, max(0, sequence.num_tokens - 1 - sequence.heard.at)) for sequence, _ in ready])
        most = self._inputs.most // self._block
        for first in range(0, len(ready), most):
            some = ready[first : first + most]
            tokens = self._pass([sequence for sequence, _ in some], max(count for _, count in some))
            for (sequence, count), drafts in zip(some, tokens, strict=True):
                found[sequence.number] = tuple(drafts[:count])
        return [found.get(sequence.number, ()) for sequence in sequences]

    def _is_ready(self, sequence: Sequence) -> bool:
        heard: _Heard | None = sequence.heard
        if heard is None or not heard.reaches(sequence) or sequence.num_tokens > self.reach:
            return False
        return self.extend(sequence, sequence.num_tokens + self.deep)

    def _read(self, heard: Many[tuple[Sequence, int]]) -> None:
        """Store keys and values of the first tokens that each of these sequences has heard."""
        parts: list[Scheduled] = []
        rows: list[Tensor] = []
        for sequence, count in heard:
            own: _Heard = sequence.heard
            near = min(count, self._inputs.max_context - own.at)  # nothing is drafted from the others
            if near > 0:
                parts.append(Scheduled(sequence, own.at, near))
                rows += own.rows[:near]
            del own.rows[:count]
            own.at += count
        row = 0
        for some in _pieces(parts):
            count = sum(part.num_tokens for part in some)
            batch = replace(self._builder.build(Step(some)), images=())
            store(self._own, self._cache, batch, torch.stack(rows[row : row + count]))
            row += count

    def _pass(self, sequences: Many[Sequence], count: int) -> list[list[int]]:
        """At least `count` drafts for each."""
        parts = [Scheduled(sequence, sequence.num_tokens - 1, self._block) for sequence in sequences]
        ids = [token for one in sequences for token in (one.token_ids[-1], *[self._mask] * (self._block - 1))]
        bucket = self._graphs.bucket(parts) if self._graphs is not None else None
        if self._graphs is not None and bucket is not None:
            (best,) = self._graphs.replay(bucket, parts, ids=ids, blocks=True)
            return best[: len(parts) * self.deep].view(len(parts), -1).tolist()
        self._inputs.load(parts, rows=len(ids), ids=ids, blocks=True)
        best = self._drafted(self._inputs.batch(len(ids)), count)
        return best.view(len(parts), -1).tolist()

    def _drafted(self, batch: ForwardBatch, count: int) -> Tensor:
        """The first `count` drafts of each block: int64 [blocks * count]."""
        return self._best(batch, self._masks(batch.token_ids.shape[0], count))

    def _best(self, batch: ForwardBatch, wanted: Tensor) -> Tensor:
        behind = self._behind[: batch.token_ids.shape[0]]
        return draft(self._own, self._model, self._kept, batch, behind, wanted)

    def _masks(self, rows: int, count: int) -> Tensor:
        """The rows of the first `count` masks of each block, int64."""
        places = [start + place for start in range(0, rows, self._block) for place in range(1, count + 1)]
        return from_host(places, torch.int64, self._cache.device)

    def graphs(self, capture: Callable[[Run], Captured]) -> DecodeGraphs:
        """Graphs of passes for one and two sequences, used once they are captured."""
        self._own.reserve_positions(self._inputs.max_context)
        with torch.inference_mode():  # compile what stores keys and values; these go to the scratch page
            for count in (1, self._block):
                self._inputs.load((), rows=count)
                store(self._own, self._cache, self._inputs.batch(count), self.taps.rows(count).flatten(1))
        sizes = [blocks * self._block for blocks in CAPTURED_BLOCKS if blocks * self._block <= self._inputs.most]
        wanted = {size: self._masks(size, self.deep) for size in sizes}

        def compute(batch: ForwardBatch) -> tuple[Tensor, ...]:
            return (self._best(batch, wanted[batch.token_ids.shape[0]]),)

        self._graphs = DecodeGraphs(compute, self._inputs, tuple(map(Shape, sizes)), capture)
        return self._graphs


def _pieces(parts: Many[Scheduled]) -> list[list[Scheduled]]:
    """Parts of at most READ_AT_ONCE tokens in total each, in order."""
    pieces: list[list[Scheduled]] = [[]]
    left = READ_AT_ONCE
    for part in parts:
        start, end = part.start, part.start + part.num_tokens
        while start < end:
            count = min(left, end - start)
            pieces[-1].append(Scheduled(part.sequence, start, count))
            start, left = start + count, left - count
            if not left:
                pieces.append([])
                left = READ_AT_ONCE
    return [piece for piece in pieces if piece]

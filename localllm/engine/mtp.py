"""Drafts by the model's MTP head or an EAGLE-3 drafter, which predict the token after next from a hidden state and the
next token.

The head's keys and values are in the model's pages, like those of an extra layer, so they follow prefixes, forks and
preemption automatically. A slot belongs to a hidden state and is written once the next token is known. The last slot of
a shared page comes from the sequence that wrote it last; that can make a draft worse, but never an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from localllm.models.eagle3 import Eagle3Head
from localllm.models.inputs import ForwardBatch, ImageRows
from localllm.models.model import Taps
from localllm.models.predictor import MtpHead

from .batch import BatchBuilder
from .cuda_graph import Captured, DecodeGraphs, Run, shapes_of
from .decode_inputs import DecodeInputs
from .drafter import ANY_LENGTH
from .runner import Runner
from .sampled_tokens import from_host
from .scheduler import Scheduled, Step
from .sequence import Sequence

EAGLE_DEEP = 3  # draft tokens in mode "always"; published drafters are trained on three to seven
MOST_KEPT = 64  # hidden states per sequence that may wait for the next draft; with more, the head reads them at once


@dataclass(slots=True)
class Heard:
    """Hidden states of a sequence that the head has not read yet.

    at      position of the first one; earlier ones have been read
    rows    [hidden] each, of consecutive positions
    known   number of rows of the sequence's own tokens; the others belong to `drafts`
    epoch   the sequence's preemption count at that time, since a preemption changes its pages
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
        """Drop the hidden states of rejected draft tokens."""
        came = sequence.token_ids[self.at + self.known :]
        for token, guess in zip(came, self.drafts, strict=False):
            if token != guess:
                break
            self.known += 1
        self.drafts = ()
        del self.rows[self.known :]


class HeadDrafter:
    """A `PaidDrafter` over a head for a runner's model; it is the runner's `Listener`.

    captured  most tokens of a captured step of the model
    share     as in `PaidDrafter`
    """

    at_once = False
    reach = ANY_LENGTH
    kept_bytes = 0  # its pages are the model's

    def __init__(self, runner: Runner, head: MtpHead | Eagle3Head, share: float, captured: int = 0) -> None:
        self.name, self.deep = ("draft", EAGLE_DEEP) if head.taps else ("mtp", 1)
        self.share, self._head, self._cache = share, head, runner.cache
        cache, model = runner.cache, runner.model
        self._builder = BatchBuilder(len(cache.groups), cache.page_size, cache.device)
        self._graphs: DecodeGraphs | None = None
        self._hidden = torch.empty(0)  # input of the graphs, float32 [tokens, hidden]
        # the pages of tokens that left a window are gone
        self._most = min([MOST_KEPT, *(group.window - 1 for group in cache.groups if group.window)])
        few = max(captured, MOST_KEPT), len(head.taps), model.facts.hidden_size
        zeros = torch.zeros(few, dtype=model.embedding.dtype, device=cache.device)
        self.taps = Taps(head.taps, zeros) if head.taps else None

    def hear(self, step: Step, hidden: Tensor) -> None:
        """Store the hidden states of a step: of all its tokens, before the final norm, valid until the next step."""
        if self.taps is not None:
            hidden = self.taps.rows(hidden.shape[0]).flatten(1)
            self.taps.many = None
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
            read = max(0, heard.at - part.start)  # recomputed tokens that the head has already read
            del heard.rows[max(0, part.start - heard.at) :]
            heard.rows += rows[read:].unbind(0)
            heard.known, heard.drafts = max(0, part.start + part.num_known - heard.at), part.drafts
            if part.start < sequence.num_prompt_tokens or len(heard.rows) > self._most:
                full.append(sequence)
        self._read(full)
        for part in () if is_small else step.scheduled:
            heard = part.sequence.heard
            new = min(part.num_tokens, len(heard.rows))
            heard.rows[len(heard.rows) - new :] = [row.clone() for row in heard.rows[len(heard.rows) - new :]]

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> list[tuple[int, ...]]:
        """Draft greedily; empty for sequences whose latest hidden states are missing."""
        found: dict[int, list[int]] = {sequence.number: [] for sequence in sequences}
        asked = []
        for sequence, count in zip(sequences, counts, strict=True):
            heard: Heard | None = sequence.heard
            if not count or heard is None or heard.epoch != sequence.num_preemptions:
                continue
            heard.settle(sequence)
            if heard.known and heard.at + heard.known == sequence.num_tokens - 1:
                asked.append((sequence, count))
        if not asked:
            return [()] * len(sequences)
        hidden, best = self._read([sequence for sequence, _ in asked], guesses=True)
        size, group = self._cache.page_size, self._head.group
        rounds = [(asked, best)]  # tokens stay on the device until all rounds are done
        while True:
            depth = len(rounds)
            ahead = depth - 2  # offset from the end of the sequence at which the next pass reads
            rows = [
                row
                for row, (sequence, count) in enumerate(asked)
                if depth < count and sequence.num_tokens + ahead < len(sequence.block_tables[group]) * size
            ]
            if not rows:
                break
            asked = [asked[row] for row in rows]
            parts = [Scheduled(sequence, sequence.num_tokens + ahead, 1) for sequence, _ in asked]
            hidden, best = self._pass(parts, rows_of(best, rows), rows_of(hidden, rows), guesses=True)
            rounds.append((asked, best))
        tokens = iter(torch.cat([best for _, best in rounds]).tolist())
        for of_round, _ in rounds:
            for sequence, _ in of_round:
                found[sequence.number].append(next(tokens))
        return [tuple(found[sequence.number]) for sequence in sequences]

    def _read(self, sequences: Many[Sequence], guesses: bool = False) -> tuple[Tensor, Tensor]:
        """Let the head read stored hidden states of these sequences, up to the last known token. Returns as `_pass`."""
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
            return torch.empty(0), torch.empty(0)
        return self._pass(parts, ids, self._head.read(torch.stack(rows)), guesses)

    def _pass(
        self, parts: list[Scheduled], ids: list[int] | Tensor, hidden: Tensor, guesses: bool
    ) -> tuple[Tensor, Tensor]:
        """Run the head on tokens `ids` at the positions of `parts`, with the hidden states before them.

        Returns the head's hidden state after each part, [parts, hidden], valid until the next pass, and with `guesses`
        the most likely tokens, int64 [parts].
        """
        ends = list(accumulate(part.num_tokens for part in parts))
        last = [end - 1 for end in ends]
        behind_prompts = all(part.start + 1 >= part.sequence.num_prompt_tokens for part in parts)
        bucket = self._graphs.bucket(parts) if self._graphs is not None and behind_prompts else None
        if self._graphs is not None and bucket is not None:
            self._hidden[: hidden.shape[0]].copy_(hidden)
            states, best = self._graphs.replay(bucket, parts, ids=ids)
            return rows_of(states, last), rows_of(best, last).clone()
        batch = self._batch(parts, ids)
        wanted = from_host(last, torch.int64, self._cache.device)
        states = self._head.states(batch, hidden, wanted)
        return states, self._head.best(states) if guesses else torch.empty(0)

    def graphs(self, inputs: DecodeInputs, sizes: Many[int], capture: Callable[[Run], Captured]) -> DecodeGraphs:
        """Graphs of the head for these numbers of tokens, used once they are captured.

        inputs   may be shared with the model's own graphs
        """
        self._head.reserve_positions(inputs.max_context)
        self._hidden = torch.zeros((inputs.most, self._head.hidden_size), device=self._cache.device)

        def compute(batch: ForwardBatch) -> tuple[Tensor, Tensor]:
            hidden = self._hidden[: batch.token_ids.shape[0]]
            states = self._head.states(batch, hidden, None)
            return states, self._head.best(states)

        self._graphs = DecodeGraphs(compute, inputs, shapes_of(sizes, (), False), capture)
        return self._graphs

    def _batch(self, parts: list[Scheduled], ids: list[int] | Tensor) -> ForwardBatch:
        """The batch at the positions of `parts`, with the tokens that follow them as input."""
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
        tokens = ids if isinstance(ids, Tensor) else from_host(ids, torch.int64, self._cache.device)
        return replace(batch, token_ids=tokens, images=tuple(images))


def rows_of(values: Tensor, rows: list[int]) -> Tensor:
    """Those rows of `values`: a view where they are the first ones."""
    if rows == list(range(len(rows))):
        return values[: len(rows)]
    return values.index_select(0, from_host(rows, torch.int64, values.device))

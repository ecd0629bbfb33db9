"""The sampler on the device: parameters of every row in fixed buffers, one op, and no sync before the next step.

Rows that only the host can sample (typical-p, DRY, XTC) get their token from the host sampler and the same logits,
without affecting the other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from localllm.kernels.sampling import (
    IN_PROMPT,
    MASK,
    MAX_BIAS,
    NOT_A_NUMBER,
    NOTHING_LEFT,
    NUM_BIAS,
    POSITION,
    SEED,
    SLOT,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    Sampled,
    SampleOp,
    SamplingInputs,
    top_logprobs,
)
from localllm.kernels.token_choice import NotANumber
from localllm.request import TokenLogprob

from .cuda_graph import Bucket, Captured, Run, Shape
from .sampled_tokens import RowResult, SampledTokens, ToHost, from_host
from .sampler import banned_stops, counts_tokens, sample_row, token_logprob
from .sequence import Sequence

NUMBERS = attrgetter("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
IDLE_NUMBERS = (0.0, 1.0, 0.0, 1.0, 0.0, 0.0)
IDLE_INTEGERS = (0, 0, 0, -1, 0, -1)  # for padding rows: greedy, no token counts


def has_device_form(sequence: Sequence) -> bool:
    """True if the op supports all sampling parameters of a sequence."""
    params = sequence.params
    return (
        params.typical_p == 1
        and params.dry_multiplier == 0
        and params.xtc_probability == 0
        and len(params.logit_bias) + len(params.stop_token_ids) + len(sequence.request.eos_token_ids) <= MAX_BIAS
    )


def can_look_ahead(sequence: Sequence) -> bool:
    """True if the parameters of later tokens do not depend on the next one, so draft rows can be sampled at once."""
    params = sequence.params
    return (
        has_device_form(sequence)
        and sequence.token_mask is None
        and not counts_tokens(params)
        and sequence.num_output_tokens >= params.min_tokens
    )


class DeviceSampler:
    """Samples up to `most` sequences at once, and more of them in pieces.

    rows   rows of the largest graph, if more than `most`
    """

    def __init__(self, op: SampleOp, most: int, vocab_size: int, device: torch.device, rows: int = 0) -> None:
        self._op = op
        self._most = most
        self._vocab = vocab_size
        self._device = device
        rows = max(most, rows)
        self.inputs = SamplingInputs.empty(rows, most, vocab_size, device)
        self._numbers = self._idle_numbers = np.array([IDLE_NUMBERS] * rows, dtype=np.float32)
        self._integers = self._idle_integers = np.array([IDLE_INTEGERS] * rows, dtype=np.int64)
        # per row of token counts: (sequence, its number of tokens after this step, its number of respelled tokens)
        self._slots: list[tuple[int, int, int]] = [(0, 0, 0)] * most
        # (shape, with cuts) -> (logits that the graph reads, its outputs, its replay)
        self._graphs: dict[tuple[Shape, bool], tuple[Tensor, Sampled, Callable[[], None]]] = {}

    def capture(self, buckets: tuple[Bucket, ...], capture: Callable[[Run], Captured]) -> None:
        """Capture missing graphs for every bucket's logits, with and without top-k/top-p cuts.

        Raises what the capture raises.
        """
        logits = {bucket.shape: bucket.outputs[1] for bucket in buckets}
        known = {key: graph for key, graph in self._graphs.items() if logits.get(key[0]) is graph[0]}
        self._graphs = {}
        self._load([], [], [])
        for shape in sorted(logits, reverse=True):
            for cuts in (True, False):
                if (shape, cuts) in known:
                    continue

                def run(logits: Tensor = logits[shape], cuts: bool = cuts) -> tuple[Tensor, ...]:
                    return tuple(self._op(logits, self.inputs, cuts))

                outputs, replay = capture(run)
                known[shape, cuts] = logits[shape], Sampled(*outputs), replay
        self._graphs = known

    def sample(
        self,
        logits: Tensor,
        rows: list[int],
        sequences: list[Sequence],
        shape: Shape | None = None,
        ahead: Many[int] = (),
    ) -> SampledTokens:
        """Sample a token for each of `sequences`.

        logits   float32 [n, vocab]
        rows     the row of each sequence; several may share one
        shape    shape of the graph that produced `logits`; None without a graph
        ahead    per sequence, the number of draft tokens before this one (`can_look_ahead`); () for none
        """
        ahead = ahead or [0] * len(sequences)
        if shape is not None and len(set(rows)) == len(rows) and (shape, True) in self._graphs:
            return self._piece(logits, rows, sequences, ahead, shape)
        pieces = []
        for at in range(0, len(sequences), self._most):
            here = slice(at, at + self._most)
            pieces.append(self._piece(self._select(logits, rows[here]), None, sequences[here], ahead[here]))
        if len(pieces) == 1:
            return pieces[0]
        return SampledTokens(sequences, lambda: [result for piece in pieces for result in piece.results()])

    def _select(self, logits: Tensor, rows: list[int]) -> Tensor:
        """Select rows. Indexing with a list would copy it to the device synchronously."""
        first = rows[0]
        if rows == list(range(first, first + len(rows))):
            return logits[first : first + len(rows)]
        return logits.index_select(0, from_host(rows, torch.int64, self._device))

    def _piece(
        self,
        logits: Tensor,
        rows: list[int] | None,
        sequences: list[Sequence],
        ahead: Many[int],
        shape: Shape | None = None,
    ) -> SampledTokens:
        places = list(range(len(sequences))) if rows is None else rows
        here = [has_device_form(s) and not isinstance(s.mask_row, Exception) for s in sequences]
        cuts = self._load([p if ok else -1 for p, ok in zip(places, here, strict=True)], sequences, ahead)
        if shape is not None:
            _, out, replay = self._graphs[shape, cuts]
            replay()
        else:
            out = self._op(logits, self.inputs, cuts)
        tops = max((s.params.logprobs or 0 for s in sequences), default=0)
        best = top_logprobs(logits, out.log_sum[: logits.shape[0]], tops) if tops else ()
        sent = ToHost(out.token_ids, out.logprobs, out.status, *best)
        known = [
            None if ok else self._on_host(logits, place, sequence)
            for ok, place, sequence in zip(here, places, sequences, strict=True)
        ]
        for place, result in zip(places, known, strict=True):
            if isinstance(result, tuple):
                out.token_ids[place] = result[0]

        def wait() -> list[RowResult]:
            ids, logprobs, status, *top = (part.tolist() for part in sent.wait())
            found: list[RowResult] = []
            for place, sequence, result in zip(places, sequences, known, strict=True):
                if result is not None:
                    found.append(result)
                    continue
                if status[place] & NOT_A_NUMBER:
                    found.append(NotANumber("NaN or infinity"))
                    continue
                if status[place] & NOTHING_LEFT:
                    found.append(ValueError("no token has a finite probability"))
                    continue
                entry = None
                if sequence.params.logprobs is not None:
                    count = sequence.params.logprobs
                    pairs = zip(top[0][place][:count], top[1][place][:count], strict=True) if count else ()
                    entry = TokenLogprob(ids[place], logprobs[place], tuple(pairs))
                found.append((ids[place], entry))
            return found

        return SampledTokens(sequences, wait, out.token_ids, rows)

    def _on_host(self, logits: Tensor, place: int, sequence: Sequence) -> RowResult:
        """Sample a row on the host; returns the exception if it fails."""
        try:
            row = logits[place].to("cpu", copy=True)
            token = sample_row(row.clone(), sequence)
            wanted = sequence.params.logprobs
            return token, None if wanted is None else token_logprob(row, token, wanted)
        except Exception as error:
            return error

    # --- buffers -----------------------------------------------------------------------------------------------------

    def _load(self, places: list[int], sequences: list[Sequence], ahead: Many[int]) -> bool:
        """Write the parameters of rows (-1 for none) into the buffers; True if any row uses top-k or top-p."""
        numbers, integers = self._idle_numbers.copy(), self._idle_integers.copy()
        mine = {s.number for s in sequences}
        for place, sequence, more in zip(places, sequences, ahead, strict=True):
            if place >= 0:
                self._row(numbers[place], integers[place], place, sequence, mine)
                integers[place, POSITION] += more
        # noted after the copies: one that fails is repeated with the step
        if not np.array_equal(numbers, self._numbers):
            self.inputs.numbers.copy_(from_host(numbers, torch.float32, self._device), non_blocking=True)
            self._numbers = numbers
        if not np.array_equal(integers, self._integers):
            self.inputs.integers.copy_(from_host(integers, torch.int64, self._device), non_blocking=True)
            self._integers = integers
        return bool((integers[:, TOP_K] > 0).any() or (numbers[:, TOP_P] < 1).any())

    def _row(self, numbers: np.ndarray, integers: np.ndarray, place: int, sequence: Sequence, mine: set[int]) -> None:
        params = sequence.params
        numbers[:] = NUMBERS(params)
        if numbers[TEMPERATURE] > 0:
            integers[TOP_K] = params.top_k if 0 < params.top_k < self._vocab else 0
            integers[SEED] = (sequence.seed + (1 << 63)) % (1 << 64) - (1 << 63)
            integers[POSITION] = sequence.num_tokens
        else:
            numbers[TOP_P], numbers[2] = 1.0, 0.0
        if counts_tokens(params):
            integers[SLOT] = self._slot(sequence, mine)
        bias = dict(params.logit_bias) | dict.fromkeys(banned_stops(sequence, self._vocab), -np.inf)
        if bias:
            integers[NUM_BIAS] = len(bias)
            ids = from_host(list(bias), torch.int32, self._device)
            self.inputs.bias_ids[place, : len(bias)].copy_(ids, non_blocking=True)
            values = from_host(list(bias.values()), torch.float32, self._device)
            self.inputs.bias_values[place, : len(bias)].copy_(values, non_blocking=True)
        if sequence.mask_row is not None:
            integers[MASK] = place
            self.inputs.masks[place].copy_(from_host(sequence.mask_row, torch.int32, self._device), non_blocking=True)

    def _slot(self, sequence: Sequence, mine: set[int]) -> int:
        """The row with a sequence's token counts. The op counts what it samples; other changes rewrite the row."""
        numbers = [number for number, _, _ in self._slots]
        if sequence.number in numbers:
            slot = numbers.index(sequence.number)
        else:
            slot = next(i for i, number in enumerate(numbers) if number not in mine)
        if self._slots[slot] != (sequence.number, sequence.num_tokens, sequence.num_respelled):
            row = np.bincount(sequence.token_ids[sequence.num_prompt_tokens :], minlength=self._vocab).astype(np.int32)
            row[sequence.token_ids[: sequence.num_prompt_tokens]] |= IN_PROMPT
            self.inputs.history[slot].copy_(from_host(row, torch.int32, self._device), non_blocking=True)
        self._slots[slot] = (sequence.number, sequence.num_tokens + 1, sequence.num_respelled)
        return slot

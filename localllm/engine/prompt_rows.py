"""Outputs of prompt rows: scores, prompt log-probabilities and pooled hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from localllm.request import TokenEvent

from .runner import ForwardOutput
from .sampler import token_logprob
from .scheduler import Scheduled
from .sequence import Sequence


def take_rows(part: Scheduled, output: ForwardOutput, row: int, vocab_size: int) -> Iterator[TokenEvent]:
    """Yield events with scores; collect pooled states and prompt log-probabilities in the sequence for later events.

    row  the first row of `part` in `output`
    """
    sequence = part.sequence
    skip = max(0, sequence.num_rows_done - part.start)  # rows taken before a preemption
    if skip >= part.num_tokens or sequence.num_rows_done >= sequence.num_prompt_tokens:
        return
    at, end = part.start + skip, row + part.num_tokens
    if sequence.request.pooling:
        rows = output.normed(row + skip, end)
        if sequence.request.pooling == "last":
            sequence.pooled = rows[-1].clone()
        elif sequence.request.pooling == "cls":
            sequence.pooled = rows[0].clone() if sequence.pooled is None else sequence.pooled
        else:  # a sum, divided into the mean by `pooled_event`
            sequence.pooled = rows.sum(0) if sequence.pooled is None else sequence.pooled + rows.sum(0)
        sequence.num_rows_done = part.start + part.num_tokens
        return
    for logits in output.pieces(row + skip, end, vocab_size):
        if sequence.request.score:
            scores = torch.log_softmax(logits, -1).cpu().numpy()
            progress = (at + len(scores), sequence.num_prompt_tokens)
            sequence.num_rows_done = at + len(scores)  # before a later piece can fail: the step is then retried
            yield TokenEvent(sequence.request.request_id, scores=scores, prefill=progress)
        else:
            wanted = sequence.params.prompt_logprobs or 0
            targets = sequence.token_ids[at + 1 : min(at + 1 + logits.shape[0], sequence.num_prompt_tokens)]
            rows = zip(logits, targets, strict=False)
            sequence.prompt_logprobs += [token_logprob(one, target, wanted) for one, target in rows]
        at += logits.shape[0]
        sequence.num_rows_done = at


def pooled_event(sequence: Sequence, projected: Callable[[Tensor], Tensor]) -> TokenEvent:
    """The final event of a request without output tokens, with its embedding if requested.

    projected   the model's projection of a pooled vector
    """
    event = TokenEvent(sequence.request.request_id, sequence.index)
    if sequence.pooled is not None:
        count = sequence.num_prompt_tokens if sequence.request.pooling == "mean" else 1
        event.pooled = projected(sequence.pooled / count).cpu().numpy()
    return event

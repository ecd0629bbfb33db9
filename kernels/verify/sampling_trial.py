"""Self-test of the sampling op against its reference: one row per sampling option, over the model's vocabulary."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .. import sampling
from ..sampling import SampleOp, SamplingInputs, sample
from .cases import seeded
from .trial import compare, first_error

GREEDY_ROWS = 4  # plain, biased, masked, penalized
RANDOM = (  # temperature, top_p, min_p, top_k
    (0.7, 1.0, 0.0, 0),
    (1.0, 0.9, 0.0, 0),
    (1.3, 1.0, 0.05, 0),
    (0.8, 0.95, 0.0, 40),
    (1.0, 1.0, 0.0, 5),
    (5.0, 0.5, 0.0, 1000),
)
TIES = 1  # random rows that may draw a different token because two scores are almost equal
TOLERANCE = 1e-3


def _inputs(vocab: int, device: str) -> tuple[Tensor, SamplingInputs]:
    rows = GREEDY_ROWS + len(RANDOM)
    generator = seeded(23)
    logits = torch.randn((rows, vocab), generator=generator) * 3
    inputs = SamplingInputs.empty(rows, 2, vocab, "cpu")
    numbers, integers = inputs.numbers, inputs.integers
    best = int(logits[1].argmax())
    inputs.bias_ids[1, :2] = torch.tensor([best, (best + 1) % vocab])
    inputs.bias_values[1, :2] = torch.tensor([-torch.inf, 3.0])
    integers[1, sampling.NUM_BIAS] = 2
    inputs.masks[2] = torch.randint(-(2**31), 2**31, inputs.masks[2].shape, generator=generator).int()
    integers[2, sampling.MASK] = 2
    inputs.history[1] = torch.randint(0, 3, (vocab,), generator=generator).int()
    integers[3, sampling.SLOT] = 1
    numbers[3, [sampling.REPETITION, sampling.PRESENCE, sampling.FREQUENCY]] = torch.tensor([1.4, 0.5, 0.2])
    for row, (temperature, top_p, min_p, top_k) in enumerate(RANDOM, GREEDY_ROWS):
        numbers[row, [sampling.TEMPERATURE, sampling.TOP_P, sampling.MIN_P]] = torch.tensor([temperature, top_p, min_p])
        integers[row, [sampling.TOP_K, sampling.SEED, sampling.POSITION]] = torch.tensor(
            [top_k, 7 - 2**62 * (row % 2), 1000 + row]
        )
    return logits.to(device), SamplingInputs(*(part.to(device) for part in inputs))


def sampler_error(run: SampleOp, vocab: int, device: str) -> str:
    """Return "" if `run` agrees with `sampling.sample`, else how it differs."""

    def differs(cuts: bool, rows: int) -> str:
        with torch.inference_mode():
            (logits, ours), (_, theirs) = _inputs(vocab, device), _inputs(vocab, device)
            found, wanted = run(logits[:rows], ours, cuts), sample(logits[:rows], theirs, cuts)
        same = (found.token_ids == wanted.token_ids).tolist()
        if not all(same[:GREEDY_ROWS]):
            return f"greedy rows gave {found.token_ids[:GREEDY_ROWS].tolist()}"
        if same[GREEDY_ROWS:].count(False) > TIES:
            return f"{same[GREEDY_ROWS:].count(False)} of {rows - GREEDY_ROWS} random rows drew a different token"
        if bool((ours.history[1] != theirs.history[1]).any()) or bool((found.status != wanted.status).any()):
            return "token counts or row status are wrong"
        equal = found.token_ids == wanted.token_ids
        return compare(found.logprobs[equal], wanted.logprobs[equal], TOLERANCE)

    def damaged() -> str:
        """With NaN logits (damaged weights), token ids must stay in range and the status must report them."""
        (logits, ours), (_, theirs) = _inputs(vocab, device), _inputs(vocab, device)
        logits[0], logits[GREEDY_ROWS] = torch.nan, torch.nan
        logits[1, 1:], logits[GREEDY_ROWS + 1, vocab // 2 :] = torch.nan, torch.nan
        with torch.inference_mode():
            found, wanted = run(logits, ours, True), sample(logits, theirs, True)
        if bool((found.status != wanted.status).any()):
            return f"status {found.status.tolist()} instead of {wanted.status.tolist()}"
        inside = (found.token_ids >= 0) & (found.token_ids < vocab)
        return "" if bool(inside.all()) else f"token ids {found.token_ids.tolist()} are out of range"

    rows = GREEDY_ROWS + len(RANDOM)
    cases = (
        ("rows with top-k and top-p", partial(differs, True, rows)),
        ("rows without top-k and top-p", partial(differs, False, GREEDY_ROWS)),
        ("rows with NaN", damaged),
    )
    return first_error(cases)

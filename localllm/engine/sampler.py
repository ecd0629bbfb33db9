"""The sampler on the host: logits and parameters -> one token per row, with log-probabilities.

Every row is sampled on its own, so that the batch cannot change its result. Random numbers are counter-based: they
depend only on (seed, position). `request.SamplingParams` documents the order of the operations. Only plain greedy rows
share one argmax over the batch.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from localllm.kernels import token_choice
from localllm.request import SamplingParams, TokenLogprob

from .sampled_tokens import RowResult, SampledTokens, ToHost
from .sequence import Sequence

# candidates to select first when only top-p limits them: sorting 262k logits takes 20 ms on two cores, topk 2 ms
FIRST_CUT = 1024
DRY_WINDOW = 2048  # tokens that DRY looks back
DRY_EXPONENT = 80.0  # natural logarithm of the largest penalty; float32 overflows at e^88
COLDEST = 1e-5  # lower temperatures count as greedy, because dividing logits by them overflows float32
_MASK = (1 << 64) - 1


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """A number in [0, 1) determined by (seed, position, stream): SplitMix64's finalizer, applied twice."""
    z = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + stream * 0x8CB92BA72F3D8DD7) & _MASK
    for _ in range(2):
        z = (z + 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
    return (z >> 11) / float(1 << 53)


def is_plain_greedy(params: SamplingParams) -> bool:
    """True for greedy sampling without penalties or biases: the argmax of the raw logits is the token."""
    return params.temperature == 0 and not changes_logits(params)


def changes_logits(params: SamplingParams) -> bool:
    """True if a penalty or a bias changes the logits."""
    return counts_tokens(params) or bool(params.logit_bias) or params.dry_multiplier != 0


def counts_tokens(params: SamplingParams) -> bool:
    """True if a penalty depends on how often a token occurred."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0 or params.frequency_penalty != 0


def sample_batch(logits: Tensor, sequences: list[Sequence], best: list[int] | None = None) -> SampledTokens:
    """Sample a token per row of logits [num_rows, vocab] float32 on any device; `best` as in `sample`."""
    if (
        best is None
        and logits.device.type != "cpu"
        and all(s.params.temperature == 0 and is_untouched(s) and s.params.logprobs is None for s in sequences)
    ):
        ids = logits.argmax(-1)
        copy = ToHost(ids)
        return SampledTokens(sequences, lambda: [(token, None) for token in copy.wait()[0].tolist()], ids)
    results = sample(logits, sequences, best)
    return SampledTokens(sequences, lambda: results)


def sample(logits: Tensor, sequences: list[Sequence], best: list[int] | None = None) -> list[RowResult]:
    """Sample a token per row.

    logits     [num_rows, vocab] float32, left unchanged
    sequences  the sequence of each row
    best       if known, index of the first largest logit of each row, -1 for rows with NaN
    returns    (token id, log-probabilities if requested), or the exception raised by this row alone
    """
    if best is None and logits.device.type != "cpu" and any(is_plain_greedy(s.params) for s in sequences):
        best = logits.argmax(-1).tolist()
    results: list[RowResult] = []
    for row, sequence in enumerate(sequences):
        try:
            largest = -1
            if is_plain_greedy(sequence.params):
                largest = best[row] if best is not None else -1
                if largest < 0:  # not known, or the row contains NaN, which raises here
                    largest = token_choice.argmax(logits[row : row + 1])[0]
            if largest >= 0 and _takes_largest(sequence, largest):
                token = largest
            else:
                token = sample_row(logits[row].to("cpu", copy=not is_untouched(sequence)), sequence)
            wanted = sequence.params.logprobs
            results.append((token, None if wanted is None else token_logprob(logits[row], token, wanted)))
        except Exception as error:  # a failure must not affect other rows
            results.append(error)
    return results


def is_untouched(sequence: Sequence) -> bool:
    """True if nothing modifies the logits before sampling."""
    return not changes_logits(sequence.params) and sequence.mask_row is None and not _bans_stop(sequence)


def sample_row(logits: Tensor, sequence: Sequence) -> int:
    """Sample a token from one row of logits [vocab] on the CPU, which is overwritten unless the row `is_untouched`.

    Raises NotANumber for NaN logits, ValueError if no token is left, and the exception of its mask, if any.
    """
    params = sequence.params
    if isinstance(sequence.mask_row, Exception):
        raise sequence.mask_row
    if sequence.mask_row is not None:
        banned = ~_allowed(sequence.mask_row, logits.numel())
        np.copyto(logits.numpy(), -np.inf, where=banned)  # 15 us for 49k logits; masked_fill_ takes 50, indexing 100
    stops = banned_stops(sequence, logits.numel())
    if stops:
        logits[stops] = -torch.inf
    _penalise(logits, sequence)
    if params.temperature < COLDEST:
        return token_choice.argmax(logits.unsqueeze(0))[0]
    position = sequence.num_tokens
    if not sorts(params, logits.numel()) and params.min_p == 0:
        return token_choice.draw(logits, params.temperature, uniform(sequence.seed, position))
    ids, probs = candidates(logits, params, uniform(sequence.seed, position, 1))
    cumulative = torch.cumsum(probs, -1, dtype=torch.float64)
    if not 0 < float(cumulative[-1]) < math.inf:
        if bool(logits.isnan().any() or logits.isposinf().any()):
            raise token_choice.NotANumber("NaN or infinity")
        raise ValueError("no token has a finite probability")
    draw = uniform(sequence.seed, position) * float(cumulative[-1])
    index = int(torch.searchsorted(cumulative, torch.tensor(draw, dtype=torch.float64), right=True))
    index = min(index, probs.numel() - 1)
    return int(ids[index]) if ids is not None else index


def sorts(params: SamplingParams, vocab_size: int) -> bool:
    """True if sampling is limited to the most likely tokens, which requires sorting."""
    cuts = params.top_p < 1 or params.typical_p < 1 or params.xtc_probability > 0
    return cuts or 0 < params.top_k < vocab_size


def candidates(logits: Tensor, params: SamplingParams, chance: float) -> tuple[Tensor | None, Tensor]:
    """The candidate tokens after top-k, top-p, min-p, typical-p and XTC.

    logits   [vocab] float32, with penalties, before temperature
    chance   number in [0, 1) that decides whether XTC applies
    returns  (ids, unnormalized probabilities), most likely first; ids is None for the whole vocabulary in order
    """
    vocab = logits.numel()
    top_k = params.top_k if 0 < params.top_k < vocab else vocab
    if not sorts(params, vocab):
        probs = torch.softmax(logits / params.temperature, -1)
        if params.min_p > 0:
            probs = torch.where(probs >= params.min_p * probs.max(), probs, torch.zeros_like(probs))
        return None, probs
    first = FIRST_CUT if top_k == vocab and params.typical_p == 1 else top_k
    values, ids = token_choice.top_probabilities(logits, min(top_k, first, vocab), params.temperature)
    if values.numel() < top_k and not (params.top_p < 1 and float(values.sum(dtype=torch.float64)) >= params.top_p):
        values, ids = token_choice.top_probabilities(logits, top_k, params.temperature)
    if top_k < vocab:
        values = values / values.sum()
    if params.top_p < 1:
        before = torch.cumsum(values, -1, dtype=torch.float64) - values
        keep = max(1, int((before < params.top_p).sum()))
        values, ids = values[:keep], ids[:keep]
    if params.min_p > 0:
        keep = max(1, int((values >= params.min_p * values[0]).sum()))
        values, ids = values[:keep], ids[:keep]
    if params.typical_p < 1:
        values, ids = _typical(values, ids, params.typical_p)
    if params.xtc_probability > 0 and chance < params.xtc_probability:
        above = int((values / values.sum() >= params.xtc_threshold).sum())
        if above > 1:  # drop all tokens above the threshold except the least likely of them
            values, ids = values[above - 1 :], ids[above - 1 :]
    return ids, values


def _typical(values: Tensor, ids: Tensor, mass: float) -> tuple[Tensor, Tensor]:
    """Keep the tokens whose surprise is closest to the entropy, up to `mass` (Meister et al., 2022)."""
    probs = values / values.sum()
    surprise = -torch.log(probs.clamp(min=1e-38))
    order = torch.argsort((surprise - (probs * surprise).sum()).abs(), stable=True)
    before = torch.cumsum(probs[order], -1) - probs[order]
    kept = order[: max(1, int((before < mass).sum()))].sort().values
    return values[kept], ids[kept]


def _penalise(logits: Tensor, sequence: Sequence) -> None:
    params = sequence.params
    if params.repetition_penalty != 1.0:
        seen = torch.frombuffer(sequence.seen_ids(), dtype=torch.int64)
        picked = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(picked > 0, picked / penalty, picked * penalty)
    if (params.presence_penalty or params.frequency_penalty) and sequence.output_counts:
        ids = torch.tensor(list(sequence.output_counts))
        counts = torch.tensor(list(sequence.output_counts.values()), dtype=torch.float32)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * counts
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias))
        logits[ids] += torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
    if params.dry_multiplier > 0:
        most = DRY_EXPONENT / math.log(params.dry_base) if params.dry_base > 1 else DRY_WINDOW
        for token, length in repeats(sequence.token_ids[-DRY_WINDOW:], params).items():
            logits[token] -= params.dry_multiplier * params.dry_base ** min(length - params.dry_allowed_length, most)


def repeats(tokens: list[int], params: SamplingParams) -> dict[int, int]:
    """DRY: token -> length of the longest suffix of `tokens` that occurred earlier, followed by this token.

    Only lengths of at least `dry_allowed_length`, not across a breaker. One pass with the Z function on the reverse.
    """
    reverse = tokens[::-1]
    limit = next((i for i, t in enumerate(reverse) if t in params.dry_breakers), len(reverse))
    z = [0] * len(reverse)
    left = right = 0
    found: dict[int, int] = {}
    for i in range(1, len(reverse)):
        if i < right:
            z[i] = min(right - i, z[i - left])
        while i + z[i] < len(reverse) and reverse[z[i]] == reverse[i + z[i]]:
            z[i] += 1
        if i + z[i] > right:
            left, right = i, i + z[i]
        length = min(z[i], limit)
        if length >= params.dry_allowed_length and reverse[i - 1] not in params.dry_breakers:
            follower = reverse[i - 1]
            found[follower] = max(found.get(follower, 0), length)
    return found


def _bans_stop(sequence: Sequence) -> bool:
    return sequence.num_output_tokens < sequence.params.min_tokens


def banned_stops(sequence: Sequence, vocab_size: int) -> list[int]:
    """Stop tokens banned by min_tokens; none if the mask allows only stop tokens.

    A grammar that is complete takes precedence over min_tokens.
    """
    if not _bans_stop(sequence):
        return []
    stops = [t for t in (*sequence.request.eos_token_ids, *sequence.params.stop_token_ids) if t < vocab_size]
    if isinstance(sequence.mask_row, np.ndarray):
        allowed = _allowed(sequence.mask_row, vocab_size)
        allowed[stops] = False
        if not allowed.any():
            return []
    return stops


def _takes_largest(sequence: Sequence, token: int) -> bool:
    """True if a plain greedy row can take its largest logit: no stop token is banned, and the mask allows it."""
    row = sequence.mask_row
    if _bans_stop(sequence) or isinstance(row, Exception):
        return False
    return row is None or bool(row[token // 32] >> (token % 32) & 1)


def _allowed(row: np.ndarray, vocab_size: int) -> np.ndarray:
    """The bits of a mask row as a new bool array [vocab_size]."""
    return np.unpackbits(row.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)


def token_logprob(logits: Tensor, token: int, num_top: int) -> TokenLogprob:
    """The raw log-probability of `token` and of the `num_top` most likely tokens, from one row of logits [vocab]."""
    logprobs = torch.log_softmax(logits, -1)
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        values, ids = torch.topk(logprobs, min(num_top, logprobs.numel()))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), top)

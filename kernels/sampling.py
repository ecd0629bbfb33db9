"""On-device sampling, one token per row of logits: inputs and outputs of the op, and its reference in plain PyTorch.

Rows are independent: each row's parameters are one row of fixed buffers (`SamplingInputs`), so the op can be captured
in a CUDA graph and is batch-invariant. Order, as in `request.SamplingParams`: mask, penalties and bias, temperature,
top-k, top-p, min-p, draw.

draw    Gumbel-max: argmax over the kept tokens of logit / temperature - log(e), e ~ Exp(1). Random bits come only from
        Philox 4x32-10 with the row's seed as key and (token id, position) as counter.
cuts    top-k and top-p compare a token's distance from the row's maximum after temperature, in steps of 2^-17 up to
        32. Tokens in the same step as the last one kept are kept too (so are ties); tokens 32 below are never drawn.

Typical-p, DRY and XTC are not supported here; the engine's eager sampler handles them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)  # columns of `SamplingInputs.numbers`
TOP_K, SEED, POSITION, SLOT, NUM_BIAS, MASK = range(6)  # columns of `SamplingInputs.integers`
MAX_BIAS = 320  # bias entries per row: the API's limit of 300, plus stop tokens banned by min_tokens
COLDEST = 1e-5  # lower temperatures are greedy
# history entry: this bit is set if the token is in the prompt; the bits below count how often it was generated
IN_PROMPT = 1 << 24
STEPS = 1 << 17  # steps per unit of distance
LEVEL = 2048  # the cut is found in two levels of 2048 buckets: 4,194,304 steps in all, a distance of 32
MASS = 1 << 38  # fixed-point value of probability 1 in the sums of top-p: integer sums do not depend on their order
NOT_A_NUMBER, NOTHING_LEFT = 1, 2  # bits of a row's status


class SamplingInputs(NamedTuple):
    """Sampling parameters of all rows, on the device of the logits.

    numbers      float32 [rows, 6]      temperature (0: greedy), top_p (1: off), min_p (0: off), repetition penalty,
                                        presence penalty, frequency penalty
    integers     int64 [rows, 6]        top_k (0: off), seed, position of the new token, row of `history` or -1,
                                        number of bias entries, row of `masks` or -1
    bias_ids     int32 [rows, MAX_BIAS]
    bias_values  float32 [rows, MAX_BIAS]   added to logits; -inf bans a token
    masks        int32 [rows, ceil(vocab / 32)]   bit i of word w: token 32 w + i is allowed
    history      int32 [slots, vocab]   IN_PROMPT and the generated count of each token; the op adds the sampled token
    """

    numbers: Tensor
    integers: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    masks: Tensor
    history: Tensor

    @classmethod
    def empty(cls, rows: int, slots: int, vocab: int, device: torch.device | str) -> SamplingInputs:
        """Buffers for greedy rows without penalties, bias or masks."""
        numbers = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 0.0]).repeat(rows, 1)
        integers = torch.tensor([0, 0, 0, -1, 0, -1]).repeat(rows, 1)
        words = -(-vocab // 32)
        return cls(
            numbers.to(device),
            integers.to(device),
            torch.zeros((rows, MAX_BIAS), dtype=torch.int32, device=device),
            torch.zeros((rows, MAX_BIAS), dtype=torch.float32, device=device),
            torch.zeros((rows, words), dtype=torch.int32, device=device),
            torch.zeros((slots, vocab), dtype=torch.int32, device=device),
        )

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(t.nbytes for t in self)


class Sampled(NamedTuple):
    """Sampled tokens.

    token_ids  int64 [rows]
    logprobs   float32 [rows]   log-probabilities of the tokens under the raw logits
    log_sum    float32 [rows]   logsumexp of the raw logits: logit - log_sum is a log-probability
    status     int32 [rows]     0, or NOT_A_NUMBER: a logit is NaN or inf, or NOTHING_LEFT: no token has a finite logit
    """

    token_ids: Tensor
    logprobs: Tensor
    log_sum: Tensor
    status: Tensor


SampleOp = Callable[[Tensor, SamplingInputs, bool], Sampled]


def sample(logits: Tensor, inputs: SamplingInputs, cuts: bool = True) -> Sampled:
    """Sample one token per row and count it in `inputs.history`.

    logits   float32 [rows, vocab], not modified
    cuts     False if no row uses top-k or top-p: saves launches
    """
    count, vocab = logits.shape
    ids = torch.arange(vocab, device=logits.device)
    numbers, integers = inputs.numbers[:count], inputs.integers[:count]
    penalized = logits.clone()
    for row in torch.nonzero((integers[:, [SLOT, MASK]] >= 0).any(1) | (integers[:, NUM_BIAS] > 0)).flatten().tolist():
        penalized[row] = _penalize(row, penalized[row], inputs)
    temperature = numbers[:, TEMPERATURE, None]
    greedy = temperature < COLDEST
    scaled = penalized / torch.where(greedy, 1.0, temperature)
    top = scaled.amax(-1, keepdim=True)
    shifted = scaled - torch.where(top.isfinite(), top, 0.0)
    shares = shifted.exp()
    shares = shares / shares.sum(-1, keepdim=True)
    keep = shares >= numbers[:, MIN_P, None] * shares.amax(-1, keepdim=True)
    if cuts:
        steps = ((-shifted).clamp(max=31.99) * STEPS).to(torch.int64)
        keep &= _kept(steps, shares, scaled.isfinite(), numbers, integers)
    keep &= scaled.isfinite()
    bits = philox(integers[:, SEED, None], ids, integers[:, POSITION, None])
    score = torch.where(greedy, scaled, scaled - exponential(bits).log())
    tokens = torch.where((keep | greedy) & ~score.isnan(), score, -torch.inf).argmax(-1)
    log_sum = logits.logsumexp(-1)
    broken = ~log_sum.isfinite() & ~(logits == -torch.inf).all(-1) | scaled.isnan().any(-1)
    empty = ~scaled.isfinite().any(-1)
    status = broken.int() * NOT_A_NUMBER | empty.int() * NOTHING_LEFT
    for row, slot in enumerate(integers[:, SLOT].tolist()):
        if slot >= 0:
            inputs.history[slot, tokens[row]] += 1
    return Sampled(tokens, logits.gather(1, tokens[:, None])[:, 0] - log_sum, log_sum, status)


def top_logprobs(logits: Tensor, log_sum: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(ids, log-probabilities) of the `count` most likely tokens of raw logits [rows, vocab], best first."""
    values, ids = torch.topk(logits, min(count, logits.shape[-1]))
    return ids, values - log_sum[:, None]


def _penalize(row: int, x: Tensor, inputs: SamplingInputs) -> Tensor:
    numbers, integers = inputs.numbers[row].tolist(), inputs.integers[row].tolist()
    if integers[MASK] >= 0:
        words = inputs.masks[integers[MASK]].long()
        bits = words[:, None] >> torch.arange(32, device=x.device) & 1
        x[bits.flatten()[: x.shape[0]] == 0] = -torch.inf
    if integers[SLOT] >= 0:
        history = inputs.history[integers[SLOT]]
        repetition = numbers[REPETITION]
        x = torch.where(history != 0, torch.where(x > 0, x / repetition, x * repetition), x)
        times = history & (IN_PROMPT - 1)
        x = torch.where(times > 0, x - (numbers[PRESENCE] + numbers[FREQUENCY] * times.float()), x)
    used = integers[NUM_BIAS]
    return x.index_add(0, inputs.bias_ids[row, :used].long(), inputs.bias_values[row, :used])


def _kept(steps: Tensor, shares: Tensor, real: Tensor, numbers: Tensor, integers: Tensor) -> Tensor:
    """Tokens kept by top-k followed by top-p, bool [rows, vocab]."""
    keep = torch.ones_like(real)
    masses = (shares.float() * MASS).to(torch.int64)
    for row in range(steps.shape[0]):
        top_k, top_p = int(integers[row, TOP_K]), float(numbers[row, TOP_P])
        here = steps[row][real[row]]
        if 0 < top_k < steps.shape[1] and top_k <= here.numel():
            keep[row] &= steps[row] <= here.sort().values[top_k - 1]
        if top_p < 1:
            among = real[row] & keep[row]
            order = steps[row][among].sort()
            sums = masses[row][among][order.indices].cumsum(0)
            if sums.numel():
                target = max(1, int(top_p * float(sums[-1])))
                last = order.values[min(int((sums < target).sum()), sums.numel() - 1)]
                keep[row] &= steps[row] <= last
    return keep


def philox(seed: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """First output word of Philox 4x32-10 with key `seed` (64 bits) and counter (first, second, second >> 32, 0).

    All int64, broadcast against each other; returns int64 in [0, 2^32).
    """
    word = 0xFFFFFFFF
    seed, first, second = torch.broadcast_tensors(seed, first, second)
    c0, c1, c2, c3 = first & word, second & word, second >> 32 & word, torch.zeros_like(first)
    k0, k1 = seed & word, seed >> 32 & word
    for _ in range(10):
        high, low = 0xCD9E8D57 * c2, 0xD2511F53 * c0
        c0, c2 = (high >> 32 & word) ^ c1 ^ k0, (low >> 32 & word) ^ c3 ^ k1
        c1, c3 = high & word, low & word
        k0, k1 = k0 + 0x9E3779B9 & word, k1 + 0xBB67AE85 & word
    return c0


def exponential(bits: Tensor) -> Tensor:
    """Words in [0, 2^32) -> float32 Exp(1) variates -log(1 - u); small ones, which win the draw, at full precision."""
    u = (bits.float() + 0.5) * 2.0**-32
    series = u * (1.0 + u * (0.5 + u * (1 / 3 + u * 0.25)))
    return torch.where(u < 0.015625, series, -torch.log((1.0 - u).clamp(min=2.0**-25)))

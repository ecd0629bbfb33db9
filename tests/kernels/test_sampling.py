"""The reference of device sampling against the engine's eager sampler: the same cuts, the same chances."""

from __future__ import annotations

import pytest
import torch

from localllm.engine.sampler import candidates, sample_row
from localllm.engine.sequence import Sequence
from localllm.kernels import sampling
from localllm.kernels.sampling import SamplingInputs
from localllm.request import Request, SamplingParams

VOCAB, DRAWS = 60, 1500


def inputs_for(params: SamplingParams, rows: int, seed: int = 5) -> SamplingInputs:
    """Rows that want the same, at positions 0, 1, 2, ..."""
    inputs = SamplingInputs.empty(rows, 1, VOCAB, "cpu")
    wanted = (params.temperature, params.top_p, params.min_p, params.repetition_penalty)
    inputs.numbers[:] = torch.tensor([*wanted, params.presence_penalty, params.frequency_penalty])
    inputs.integers[:, sampling.TOP_K], inputs.integers[:, sampling.SEED] = params.top_k, seed
    inputs.integers[:, sampling.POSITION] = torch.arange(rows)
    return inputs


CUTS = [
    SamplingParams(),
    SamplingParams(temperature=0.6, top_k=10, top_p=0.9),
    SamplingParams(temperature=2.0, top_p=0.7),
    SamplingParams(top_k=3),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.8, min_p=0.05),
]


@pytest.mark.parametrize("params", CUTS, ids=range(len(CUTS)))
def test_chances_are_those_of_the_eager_sampler(params: SamplingParams) -> None:
    logits = torch.randn(VOCAB) * 2
    ids, weights = candidates(logits, params, 0.0)
    expected = torch.zeros(VOCAB).index_add(0, torch.arange(VOCAB) if ids is None else ids, weights / weights.sum())
    drawn = sampling.sample(logits.expand(DRAWS, -1), inputs_for(params, DRAWS)).token_ids
    counts = torch.bincount(drawn, minlength=VOCAB).float()
    assert bool((counts[expected == 0] == 0).all()), "a token that was cut off"
    common = expected * DRAWS > 5
    surprise = ((counts - expected * DRAWS) ** 2 / (expected * DRAWS))[common].sum()
    assert float(surprise) < 2 * int(common.sum()) + 20, "chi square far beyond its expectation"


def test_greedy_with_penalties_is_the_eager_sampler() -> None:
    params = SamplingParams(
        temperature=0,
        repetition_penalty=1.4,
        presence_penalty=0.7,
        frequency_penalty=0.4,
        logit_bias={3: 2.0, 50: -100.0},
    )
    for trial in range(20):
        logits = torch.randn(VOCAB) * 2
        prompt, output = torch.randint(VOCAB, (9,)).tolist(), torch.randint(VOCAB, (6,)).tolist()
        sequence = Sequence(Request(prompt, params), 0, 1, trial, 99)
        for token in output:
            sequence.append(token)
        inputs = inputs_for(params, 1)
        inputs.integers[0, sampling.SLOT] = 0
        inputs.history[0, prompt] = sampling.IN_PROMPT
        inputs.history[0].index_add_(0, torch.tensor(output), torch.ones(6, dtype=torch.int32))
        inputs.integers[0, sampling.NUM_BIAS] = 2
        inputs.bias_ids[0, :2], inputs.bias_values[0, :2] = torch.tensor([3, 50]), torch.tensor([2.0, -100.0])
        counted = inputs.history.clone()
        token = int(sampling.sample(logits[None], inputs).token_ids)
        assert token == sample_row(logits.clone(), sequence)
        counted[0, token] += 1
        assert torch.equal(inputs.history, counted)


def test_philox_gives_its_published_word() -> None:
    """The known answer of Random123 for key and counter zero."""
    assert int(sampling.philox(*(torch.tensor([0]) for _ in range(3)))) == 0x6627E8D5


def test_log_probabilities() -> None:
    logits = torch.randn(3, VOCAB)
    sampled = sampling.sample(logits, inputs_for(SamplingParams(temperature=0), 3))
    expected = torch.log_softmax(logits, -1)
    torch.testing.assert_close(sampled.logprobs, expected.amax(-1))
    ids, values = sampling.top_logprobs(logits, sampled.log_sum, 4)
    torch.testing.assert_close(values, expected.gather(1, ids))
    assert torch.equal(ids[:, 0], sampled.token_ids)

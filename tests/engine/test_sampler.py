import math

import pytest
import torch

from localllm.engine.sampler import candidates, repeats, sample, sample_row, token_logprob, uniform
from localllm.engine.sequence import Sequence
from localllm.kernels.token_choice import NotANumber
from localllm.request import Request, SamplingParams


def sequence(seed=0, prompt=(1, 2, 3), output=(), **params):
    one = Sequence(Request(list(prompt), SamplingParams(**params)), 0, 1, seed, 100)
    for token in output:
        one.append(token)
    return one


def logits_of(probs):
    return torch.log(torch.tensor(probs, dtype=torch.float32))


def left(probs, chance=0.5, **params):
    ids, values = candidates(logits_of(probs), SamplingParams(**params), chance)
    if ids is None:
        return {i for i, v in enumerate(values.tolist()) if v > 0}
    return set(ids.tolist())


PROBS = [0.4, 0.3, 0.15, 0.1, 0.05]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": -1}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.4}, {0}),
        ({"top_p": 0.41}, {0, 1}),
        ({"top_p": 1e-9}, {0}),
        ({"min_p": 0.3}, {0, 1, 2}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "top_p": 0.5}, {0, 1}),
        ({"top_k": 4, "min_p": 0.5}, {0, 1}),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.12}, {2, 3, 4}),
        ({"xtc_probability": 0.4, "xtc_threshold": 0.12}, {0, 1, 2, 3, 4}),
        ({"typical_p": 0.2}, {1}),
    ],
)
def test_cuts(params, kept):
    assert left(PROBS, **params) == kept


def test_a_greedy_token_is_never_taken_from_what_is_not_a_number():
    """Whatever changes the logits first."""
    for params in ({}, {"logit_bias": {1: 1.0}}, {"repetition_penalty": 1.2}, {"min_tokens": 5}):
        (result,) = sample(torch.tensor([[0.0, math.nan, 1.0, 2.0]]), [sequence(temperature=0, **params)])
        assert isinstance(result, NotANumber), params


def test_top_p_beyond_the_first_cut_is_exact():
    probs = torch.full((5000,), 1 / 5000)
    ids, values = candidates(torch.log(probs), SamplingParams(top_p=0.9), 0.5)
    assert abs(values.numel() - 4500) <= 2


def test_top_p_counts_over_all_that_top_k_left():
    probs = 1 / torch.arange(1, 60_001, dtype=torch.float64)
    probs = (probs / probs.sum()).float()
    for top_k in (5_000, 50_000):
        kept = probs[:top_k].double() / probs[:top_k].sum()
        want = int((kept.cumsum(0) - kept < 0.6).sum())
        ids, _ = candidates(torch.log(probs), SamplingParams(top_k=top_k, top_p=0.6), 0.5)
        assert abs(ids.numel() - want) <= 1


def test_the_coldest_temperatures_are_greedy():
    for temperature in (1e-40, 1e-12, 1e-6):
        assert sample_row(logits_of(PROBS), sequence(temperature=temperature)) == 0


def test_nothing_left_is_an_error_not_a_token():
    with pytest.raises(ValueError, match="finite"):
        sample_row(torch.full((5,), -torch.inf), sequence(temperature=1.0))


def test_long_repetitions_do_not_overflow():
    row = sequence(prompt=[1] * 1500, temperature=0, dry_multiplier=1.0, dry_base=100.0)
    assert sample_row(torch.tensor([0.0, 5.0, 1.0]), row) == 2


def test_typical_keeps_the_mass_nearest_to_the_entropy():
    probs = torch.tensor(PROBS)
    surprise = -probs.log()
    order = (surprise - (probs * surprise).sum()).abs().argsort()
    assert left(PROBS, typical_p=0.44) == set(order[:2].tolist())


def test_draws_follow_the_distribution():
    counts = torch.zeros(5)
    for seed in range(4000):
        counts[sample_row(logits_of(PROBS), sequence(seed))] += 1
    chi2 = float(((counts - 4000 * torch.tensor(PROBS)) ** 2 / (4000 * torch.tensor(PROBS))).sum())
    assert chi2 < 23.5  # 99.99 % of chi-squared with 4 degrees of freedom


def test_temperature_zero_is_argmax_and_large_is_flat():
    assert sample_row(logits_of(PROBS), sequence(temperature=0)) == 0
    _, probs = candidates(logits_of(PROBS), SamplingParams(temperature=100.0), 0.5)
    assert float(probs.max() - probs.min()) < 0.01


def test_penalties():
    logits = torch.tensor([2.0, -1.0, 0.5, 0.0])
    row = sequence(prompt=(0, 1), temperature=0, repetition_penalty=2.0)
    out = logits.clone()
    from localllm.engine.sampler import _penalise

    _penalise(out, row)
    assert out.tolist() == [1.0, -2.0, 0.5, 0.0]
    row = sequence(prompt=(3,), output=(0, 0, 2), presence_penalty=1.0, frequency_penalty=0.5)
    out = logits.clone()
    _penalise(out, row)
    assert out.tolist() == [0.0, -1.0, -1.0, 0.0]
    row = sequence(logit_bias={3: 50.0}, temperature=0)
    assert sample_row(logits.clone(), row) == 3


def brute_force(tokens, allowed):
    found = {}
    for end in range(1, len(tokens)):
        length = 0
        while length < end and tokens[end - 1 - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        if length >= allowed:
            found[tokens[end]] = max(found.get(tokens[end], 0), length)
    return found


def test_dry_equals_brute_force():
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        tokens = torch.randint(0, 3, (40,), generator=generator).tolist()
        assert repeats(tokens, SamplingParams(dry_allowed_length=2)) == brute_force(tokens, 2)


def test_dry_stops_at_breakers():
    tokens = [1, 2, 3, 9, 1, 2, 3]
    assert repeats(tokens, SamplingParams(dry_allowed_length=2)) == {9: 3}
    assert repeats(tokens, SamplingParams(dry_allowed_length=2, dry_breakers=(2,))) == {}
    assert repeats(tokens, SamplingParams(dry_allowed_length=2, dry_breakers=(9,))) == {}


def test_logprobs_are_raw():
    value = token_logprob(logits_of(PROBS), 3, 2)
    assert math.isclose(value.logprob, math.log(0.1), rel_tol=1e-5)
    assert [t for t, _ in value.top] == [0, 1]


def test_a_row_does_not_depend_on_its_neighbours():
    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(1))
    rows = [sequence(seed, temperature=0.8, top_p=0.9, top_k=50, logprobs=1) for seed in range(8)]
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], [rows[i]])[0] for i in range(8)]


def test_uniform_is_uniform_and_depends_on_everything():
    values = [uniform(s, p) for s in range(50) for p in range(200)]
    assert min(values) >= 0 and max(values) < 1
    assert abs(sum(values) / len(values) - 0.5) < 0.01
    assert len(set(values)) == len(values)
    assert uniform(1, 2, 0) != uniform(1, 2, 1)
    assert uniform(-3, 2) == uniform(-3, 2)

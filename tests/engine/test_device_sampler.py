"""Sampling from fixed buffers against the eager sampler, and its captured form against the direct one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from localllm.engine import device_sampler
from localllm.engine.cuda_graph import Bucket, Captured, Run, Shape
from localllm.engine.device_sampler import DeviceSampler, has_device_form
from localllm.engine.failures import explained
from localllm.engine.sampler import sample
from localllm.engine.sequence import Sequence
from localllm.errors import BadModelFile
from localllm.kernels.sampling import sample as reference
from localllm.kernels.token_choice import NotANumber
from localllm.request import Request, SamplingParams

VOCAB = 70


def rerun(run):
    """In place of a capture where there is no GPU: a replay runs again and writes into the outputs of the first run."""
    outputs = run()

    def replay():
        for kept, new in zip(outputs, run(), strict=True):
            kept.copy_(new)

    return outputs, replay


def sequence_of(prompt=(1, 2, 3), output=(), eos=(), mask=None, **params) -> Sequence:
    request = Request(list(prompt), SamplingParams(**({"temperature": 0} | params)), eos_token_ids=frozenset(eos))
    sequence = Sequence(request, 0, 1, params.get("seed") or 0, 100)
    for token in output:
        sequence.append(token)
    if mask is not None:
        row = np.zeros(-(-VOCAB // 32), dtype=np.int32)
        for token in mask:
            row.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        sequence.mask_row = row
    return sequence


def sampler(most: int = 8) -> DeviceSampler:
    return DeviceSampler(reference, most, VOCAB, torch.device("cpu"))


GREEDY = {
    "plain": {},
    "repetition": {"repetition_penalty": 1.9, "output": (5, 6, 6)},
    "presence": {"presence_penalty": 1.5, "frequency_penalty": -0.7, "output": (7, 7, 8, 9)},
    "bias": {"logit_bias": {3: -100.0, 11: 40.0, 12: 1.0}},
    "min_tokens": {"min_tokens": 5, "eos": tuple(range(40)), "stop_token_ids": (50, 51)},
    "mask": {"mask": (0, 33, 69)},
    "mask at its end": {"mask": (4,), "min_tokens": 5, "eos": (4,)},
    "logprobs": {"logprobs": 3, "repetition_penalty": 1.3, "output": (1,)},
    "logprob alone": {"logprobs": 0},
}


@pytest.mark.parametrize("seed", range(3))
def test_greedy_wishes_give_the_tokens_of_the_eager_sampler(seed: int) -> None:
    torch.manual_seed(seed)
    sequences = [sequence_of(**wishes) for wishes in GREEDY.values()]
    logits = torch.randn(len(sequences), VOCAB) * 2
    expected = sample(logits, sequences)
    device = sampler(most=4)  # more rows than at once
    found = device.sample(logits, list(range(len(sequences))), sequences).results()
    assert [token for token, _ in found] == [token for token, _ in expected]
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
            assert [i for i, _ in ours.top] == [i for i, _ in theirs.top]


def test_penalties_follow_a_sequence_through_steps_jumps_and_other_rows() -> None:
    """The op counts what it samples; a token that came otherwise, or another row in between, is seen, too."""
    device = sampler(most=2)
    torch.manual_seed(0)
    many = [sequence_of(repetition_penalty=2.5, presence_penalty=1.0, prompt=(i, i + 1)) for i in range(4)]
    for step in range(12):
        picked = [many[step % 4], many[(step + 1) % 4]]
        logits = torch.randn(2, VOCAB)
        expected = [token for token, _ in sample(logits, picked)]
        assert [token for token, _ in device.sample(logits, [0, 1], picked).results()] == expected
        for sequence, token in zip(picked, expected, strict=True):
            sequence.append(token)
        if step % 3 == 0:
            picked[0].append(60)  # a grammar forced it


def test_penalties_are_of_the_token_that_a_grammar_spelt_in_place_of_the_sampled_one() -> None:
    device, one = sampler(), sequence_of(presence_penalty=2.0)
    logits = torch.zeros(1, VOCAB)
    logits[0, 8], logits[0, 9] = 3.0, 4.0
    assert device.sample(logits, [0], [one]).results()[0][0] == 9
    one.append(8)
    one.num_respelled += 1
    assert device.sample(logits, [0], [one]).results()[0][0] == 9


def test_random_rows_depend_on_seed_and_position_alone() -> None:
    logits = torch.randn(1, VOCAB).repeat(3, 1)
    one = sequence_of(temperature=1.2, top_p=0.9, top_k=20, seed=5)
    others = [sequence_of(temperature=0.7, seed=9), sequence_of(repetition_penalty=2.0)]
    alone = sampler().sample(logits[:1], [0], [one]).results()[0][0]
    assert sampler().sample(logits, [0, 1, 2], [*others, one]).results()[2][0] == alone
    tokens = {
        sampler().sample(logits[:1], [0], [sequence_of(temperature=1.5, seed=s)]).results()[0][0] for s in range(40)
    }
    assert len(tokens) > 10
    best = int(logits[0].argmax())
    assert sampler().sample(logits[:1], [0], [sequence_of(temperature=5.0, top_k=1, seed=-3)]).results()[0][0] == best
    extreme = sequence_of(temperature=1.0, seed=2**63 - 1)
    extreme.seed += 5  # the sixth answer of a request
    assert 0 <= sampler().sample(logits[:1], [0], [extreme]).results()[0][0] < VOCAB


def test_what_only_the_host_can_do_is_done_there_and_disturbs_nobody() -> None:
    logits = torch.randn(4, VOCAB)
    broken = sequence_of()
    broken.mask_row = ValueError("a grammar that cannot go on")
    dry = sequence_of(dry_multiplier=2.0, output=(1, 2), logprobs=1)
    sequences = [sequence_of(), dry, broken, sequence_of(typical_p=0.5, temperature=1.0, seed=1)]
    assert [has_device_form(s) for s in sequences] == [True, False, True, False]
    sampled = sampler().sample(logits, [0, 1, 2, 3], sequences)
    found, expected = sampled.results(), sample(logits, sequences)
    assert isinstance(found[2], ValueError)
    assert [f for i, f in enumerate(found) if i != 2] == [e for i, e in enumerate(expected) if i != 2]
    assert sampled._ids is not None and sampled._ids[1] == found[1][0]  # the next step reads it there


def test_damaged_weights_are_named() -> None:
    logits = torch.randn(2, VOCAB)
    logits[0, 7] = torch.nan
    first, second = sampler().sample(logits, [0, 1], [sequence_of(temperature=1.0, seed=1), sequence_of()]).results()
    assert isinstance(first, NotANumber) and isinstance(explained(first), BadModelFile)
    assert second[0] == int(logits[1].argmax())


def test_only_buckets_that_were_captured_anew_get_other_graphs() -> None:
    """An idle moment captures some of them, and a request that waits for it does not wait for all samplers."""
    device, captured = sampler(most=4), []

    def capture(run: Run) -> Captured:
        captured.append(run)
        return rerun(run)

    def bucket(rows: int) -> Bucket:
        logits = torch.empty(rows, VOCAB)
        return Bucket(Shape(rows), (logits, logits), lambda: None)

    first, second = bucket(2), bucket(4)
    device.capture((first, second), capture)
    assert len(captured) == 4
    device.capture((first, bucket(4)), capture)
    assert len(captured) == 6
    device.capture((first,), capture)
    assert len(captured) == 6 and {shape for shape, _ in device._graphs} == {Shape(2)}


def test_captured_buckets_sample_the_rows_that_are_left() -> None:
    """A step that ran ahead: one of its sequences ended meanwhile, a row of the bucket is empty."""
    logits = torch.empty(4, VOCAB)
    bucket = Bucket(Shape(4), (logits, logits), lambda: None)
    device, direct = sampler(most=4), sampler(most=4)
    device.capture((bucket,), rerun)
    sequences = [
        sequence_of(temperature=1.0, top_p=0.8, seed=3),
        sequence_of(repetition_penalty=1.8, output=(3,)),
        sequence_of(temperature=0.6, seed=4),
    ]
    for rows in ([0, 1, 2], [0, 2], [1], [0, 1, 2]):
        logits.copy_(torch.randn(4, VOCAB))
        live = [sequences[row] for row in rows]
        expected = direct.sample(logits[rows], list(range(len(rows))), live).results()
        sampled = device.sample(logits[:3], rows, live, Shape(4))
        assert sampled.results() == expected
        ids = torch.zeros(4, dtype=torch.int64)
        from localllm.engine.scheduler import Scheduled

        sampled.fill(ids, [Scheduled(s, 0, 1) for s in live])
        assert ids[: len(rows)].tolist() == [token for token, _ in expected]
        for sequence, (token, _) in zip(live, expected, strict=True):
            sequence.append(token)


@pytest.mark.parametrize("fails", ["numbers", "integers"])
def test_a_copy_that_found_no_room_is_repeated_with_its_step(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the retry samples with the parameters of an earlier step, greedily if there was none."""
    mine, real, given = sampler(1), device_sampler.from_host, []

    def from_host(values, dtype, device):
        given.append(dtype)
        if dtype is (torch.float32 if fails == "numbers" else torch.int64) and given.count(dtype) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(values, dtype, device)

    monkeypatch.setattr(device_sampler, "from_host", from_host)
    logits = torch.zeros(1, VOCAB)
    with pytest.raises(torch.OutOfMemoryError):
        mine.sample(logits, [0], [sequence_of(temperature=0.8, seed=7)])
    mine.sample(logits, [0], [sequence_of(temperature=0.8, seed=7)])
    assert mine.inputs.numbers[0, device_sampler.TEMPERATURE] == pytest.approx(0.8)
    assert int(mine.inputs.integers[0, device_sampler.SEED]) == (7 + (1 << 63)) % (1 << 64) - (1 << 63)

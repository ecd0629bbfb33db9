"""The sampling kernels against their reference: the same token from the same row, whatever it wants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.engine.sampled_tokens import copied_storages
from localllm.kernels import sampling as reference
from localllm.kernels.sampling import SamplingInputs
from localllm.kernels.triton import sampling
from localllm.plan.memory import SAMPLED_BYTES

VOCAB = 1000


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them a row, the last one not full."""
    monkeypatch.setattr(sampling, "PIECE", 512)


def inputs_of(rows: list[dict[str, Any]], device: torch.device, vocab: int = VOCAB) -> SamplingInputs:
    """Buffers of rows that want what their names say."""
    inputs = SamplingInputs.empty(len(rows), 2, vocab, "cpu")
    for row, wants in enumerate(rows):
        for column, name in enumerate(("temperature", "top_p", "min_p", "repetition", "presence", "frequency")):
            if name in wants:
                inputs.numbers[row, column] = wants[name]
        for column, name in ((0, "top_k"), (1, "seed"), (2, "position")):
            inputs.integers[row, column] = wants.get(name, 0)
        bias = wants.get("bias", {})
        inputs.integers[row, reference.NUM_BIAS] = len(bias)
        inputs.bias_ids[row, : len(bias)] = torch.tensor(list(bias), dtype=torch.int32)
        inputs.bias_values[row, : len(bias)] = torch.tensor(list(bias.values()))
        if "history" in wants:
            inputs.integers[row, reference.SLOT] = wants["history"]
        if "allowed" in wants:
            inputs.integers[row, reference.MASK] = row
            for token in wants["allowed"]:
                word = int(inputs.masks[row, token // 32]) & 0xFFFFFFFF | 1 << token % 32
                inputs.masks[row, token // 32] = word - (word >> 31 << 32)
    inputs.history[0, ::3] = reference.IN_PROMPT
    inputs.history[0, 5::7] += 2
    inputs.history[1, 1::2] = 1
    return SamplingInputs(*(t.to(device) for t in inputs))


def both(logits: Tensor, rows: list[dict[str, Any]], cuts: bool = True) -> tuple[reference.Sampled, reference.Sampled]:
    """(kernels, reference), which agree in everything."""
    inputs = inputs_of(rows, logits.device, logits.shape[1])
    other = SamplingInputs(*(t.clone() for t in inputs))
    before = logits.clone()
    found, expected = sampling.sample(logits, inputs, cuts), reference.sample(logits, other, cuts)
    assert torch.equal(logits, before)
    assert torch.equal(found.token_ids, expected.token_ids)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.log_sum, expected.log_sum, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.status, expected.status)
    assert torch.equal(inputs.history, other.history)
    return found, expected


WANTS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.5, "top_k": 3},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 3.0, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 0.01},
    {"temperature": 0.9, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 0.05, "top_k": 40},
    {"temperature": 100.0, "top_k": 400, "top_p": 0.9},
    {"repetition": 1.5, "history": 0},
    {"temperature": 1.0, "repetition": 0.8, "presence": 0.5, "frequency": -0.25, "history": 1},
    {"temperature": 1.0, "bias": {7: 100.0, 8: 100.0, 999: 100.0}},
    {"bias": {0: 50.0, 3: -torch.inf}},
    {"temperature": 1.0, "allowed": [1, 31, 32, 255, 256, 998]},
    {"allowed": [700]},
    {"temperature": 1.0, "allowed": [63], "top_k": 5, "top_p": 0.5},
]


def test_every_wish_in_one_batch(device: torch.device) -> None:
    logits = (torch.randn(len(WANTS), VOCAB) * 4).to(device)
    rows = [wants | {"seed": 11 + i, "position": 5 * i} for i, wants in enumerate(WANTS)]
    found, _ = both(logits, rows)
    assert int(found.token_ids[0]) == int(logits[0].argmax()) and int(found.token_ids[4]) == int(logits[4].argmax())
    assert int(found.token_ids[13]) in (7, 8, 999) and int(found.token_ids[14]) == 0
    assert int(found.token_ids[16]) == 700 and int(found.token_ids[17]) == 63


@pytest.mark.parametrize("spread", [0.004, *(pytest.param(one, marks=pytest.mark.slow) for one in (0.3, 2.0))])
def test_cuts_that_end_in_one_bucket_or_in_two(spread: float, device: torch.device) -> None:
    """A bucket is 1/64 wide: with the smallest spread all tokens are in two, with the largest each in its own."""
    logits = (torch.randn(1, VOCAB) * spread).expand(36, -1).contiguous().to(device)
    rows = [
        {"temperature": 1.0, "top_k": top_k, "top_p": top_p, "seed": 7 * position, "position": position}
        for top_k in (0, 3, 300)
        for top_p in (0.02, 0.7, 1.0)
        for position in range(4)
    ]
    found, _ = both(logits, rows)
    ranks = logits[0].argsort(descending=True).argsort()[found.token_ids]
    assert bool((ranks[12:24] < 3 + 997 * (spread < 0.01)).all()) and ranks.unique().numel() > 4
    assert not sampling.counters(device, sampling.COUNTERS).any()


def test_rows_do_not_depend_on_their_batch(device: torch.device) -> None:
    logits = (torch.randn(3, VOCAB) * 3).to(device)
    rows = [{"temperature": 1.0, "seed": i, "position": 9, "top_p": 0.9} for i in range(3)]
    whole = sampling.sample(logits, inputs_of(rows, device))
    for row in (0, 2):
        alone = sampling.sample(logits[row : row + 1], inputs_of(rows[row : row + 1], device))
        assert torch.equal(alone.token_ids, whole.token_ids[row : row + 1])
        assert torch.equal(alone.logprobs, whole.logprobs[row : row + 1])


def test_equal_logits_and_large_seeds(device: torch.device) -> None:
    """Ties at the cut stay; seeds and positions use all their bits."""
    logits = torch.zeros(6, 300, device=device)
    logits[:, 10:40] = 2.0
    rows = [{"temperature": 1.0, "top_k": 5, "seed": (1 << 62) + i, "position": (1 << 33) + i} for i in range(6)]
    found, _ = both(logits, rows)
    assert bool(((found.token_ids >= 10) & (found.token_ids < 40)).all())
    assert found.token_ids.unique().numel() > 1


def test_without_cuts(device: torch.device) -> None:
    logits = torch.randn(2, 77).to(device)
    both(logits, [{"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "min_p": 0.5}], cuts=False)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_damaged_rows_are_marked(device: torch.device) -> None:
    """NaN and infinity, and a row of which nothing is allowed."""
    logits = torch.randn(4, 300).to(device)
    logits[0, 7], logits[1, 299] = torch.nan, torch.inf
    rows = [{"temperature": 1.0}, {}, {"temperature": 1.0, "bias": {}, "allowed": []}, {"temperature": 1.0}]
    status = sampling.sample(logits, inputs_of(rows, device, 300)).status.tolist()
    assert status[0] & reference.NOT_A_NUMBER and status[1] & reference.NOT_A_NUMBER
    assert status[2] == reference.NOTHING_LEFT and status[3] == 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("vocab", [300, pytest.param(38 * 512 - 7, marks=pytest.mark.slow)])
def test_rows_of_nothing_but_nan_give_a_token_all_the_same(device: torch.device, vocab: int) -> None:
    """The next step looks it up before anybody reads that it is none: it must be one of the vocabulary."""
    logits = torch.full((4, vocab), torch.nan).to(device)
    logits[2, 5], logits[3, vocab - 1] = 1.0, 1.0
    rows = [{}, {"temperature": 1.0, "top_k": 5}, {}, {}]
    inputs = inputs_of(rows, device, vocab)
    found = sampling.sample(logits, inputs)
    assert all(status & reference.NOT_A_NUMBER for status in found.status.tolist())
    assert found.token_ids.tolist()[0] == 0 and found.token_ids.tolist()[2:] == [5, vocab - 1]
    assert 0 <= int(found.token_ids[1]) < vocab
    assert reference.sample(logits, inputs).token_ids.tolist()[2:] == [5, vocab - 1]


def test_strided_rows_and_refusals(device: torch.device) -> None:
    logits = torch.randn(2, 600).to(device)
    rows = [{"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "top_k": 7}]
    both(logits[:, :500], rows)
    with pytest.raises(TypeError, match="float16"):
        sampling.sample(logits.half(), inputs_of(rows, device, 600))


def test_the_plan_counts_the_sums_of_cuts() -> None:
    assert SAMPLED_BYTES == (sampling.TABLES * reference.LEVEL + sampling.CUTS) * 8


def test_what_a_step_samples_comes_to_the_host_in_one_copy() -> None:
    """What lies in one storage; log-probabilities of other tokens are copied with it, not instead."""
    inputs = SamplingInputs.empty(3, 3, 70, torch.device("cpu"))
    out = sampling.sample(torch.randn(3, 70), inputs, False)
    other, sizes = torch.randn(3, 8)[:, ::2], []

    def new(size: int) -> torch.Tensor:
        sizes.append(size)
        return torch.empty(size, dtype=torch.uint8)

    values = (out.token_ids, out.logprobs, out.status, other)
    copies = copied_storages(values, new)
    assert sizes == [4 * 24, 3 * 8 * 4]
    assert all((part.data_ptr() - out.token_ids.data_ptr()) % 16 == 0 for part in out)
    for copied, value in zip(copies, values, strict=True):
        assert torch.equal(copied, value) and copied.dtype is value.dtype and copied.data_ptr() != value.data_ptr()

"""The largest, the most likely and one drawn at random, in C against plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from localllm.kernels import token_choice
from localllm.kernels.cpu import build

SIZES = [1, 5, 33, 4096, 4097, 49_152, 70_001]


def without_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the reference."""
    monkeypatch.setattr(token_choice, "library", lambda: build.Library(None, "none", "none"))


@pytest.mark.parametrize("n", SIZES)
def test_argmax(isa: str, n: int) -> None:
    logits = torch.randn(3, n)
    logits[1] = -torch.inf
    logits[2, n // 2 :] = logits[2].max() + 1  # equals: the first one counts
    assert token_choice.argmax(logits) == [int(logits[0].argmax()), 0, n // 2]
    logits[0, n // 3] = torch.inf
    assert token_choice.argmax(logits[:1]) == [n // 3]
    logits[0, n - 1] = torch.nan
    with pytest.raises(token_choice.NotANumber):
        token_choice.argmax(logits)


@pytest.mark.parametrize("n", SIZES)
def test_the_most_likely(isa: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [torch.randn(n) * 3, torch.randn(n).round(), torch.zeros(n), torch.full((n,), -torch.inf)]
    cases[3][:: max(1, n // 4)] = torch.randn(len(cases[3][:: max(1, n // 4)]))
    cases.append(torch.randn(n) * 1e30)
    for logits in cases:
        for k, temperature in ((1, 1.0), (40, 0.7), (1024, 1.5), (n, 0.01)):
            if k > 5000:
                continue
            values, ids = token_choice.top_probabilities(logits, min(k, n), temperature)
            with monkeypatch.context() as patch:
                without_c(patch)
                expected, order = token_choice.top_probabilities(logits, min(k, n), temperature)
            assert torch.equal(ids, order)
            torch.testing.assert_close(values, expected, rtol=3e-5, atol=1e-12)


def test_sorting_all_of_a_row(isa: str) -> None:
    logits = torch.randn(9000).round(decimals=1)
    values, ids = token_choice.top_probabilities(logits, 9000, 1.0)
    assert torch.equal(ids, torch.argsort(logits, descending=True, stable=True))
    assert float(values.sum()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("n", SIZES)
def test_drawing(isa: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(n) * 3
    logits[n // 2] = -torch.inf if n > 1 else 0.0
    chances = [0.0, 0.3, 0.5, 0.99, 1 - 2.0**-53]
    found = [token_choice.draw(logits, 0.8, chance) for chance in chances]
    without_c(monkeypatch)
    expected = [token_choice.draw(logits, 0.8, chance) for chance in chances]
    cumulative = torch.softmax(logits.double() / 0.8, -1).cumsum(-1)
    for place, other, chance in zip(found, expected, chances, strict=True):
        low, high = float(cumulative[place - 1]) if place else 0.0, float(cumulative[place])
        assert low - 1e-6 <= chance <= high + 1e-6 and high > low, (place, other)
    assert found[0] == expected[0]


def test_what_is_drawn_is_spread_as_the_probabilities(isa: str) -> None:
    logits = torch.tensor([0.0, 1.0, -torch.inf, 2.0])
    drawn = torch.tensor([token_choice.draw(logits, 1.0, (i + 0.5) / 4000) for i in range(4000)])
    shares = torch.bincount(drawn, minlength=4) / 4000
    torch.testing.assert_close(shares, torch.softmax(logits, -1), rtol=0, atol=5e-4)


@pytest.mark.parametrize("plain", [False, True])
def test_rows_without_an_answer(isa: str, plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if plain:
        without_c(monkeypatch)
    not_a_number, nothing_left = token_choice.NotANumber, token_choice.NothingLeft
    for bad, error in ((torch.nan, not_a_number), (torch.inf, not_a_number), (None, nothing_left)):
        logits = torch.full((5000,), -torch.inf)
        if bad is not None:
            logits[4500] = bad
        with pytest.raises(error):
            token_choice.draw(logits, 1.0, 0.5)
        with pytest.raises(error):
            token_choice.top_probabilities(logits, 3, 1.0)

"""Index scores with Triton, against the reference."""

from __future__ import annotations

import pytest
import torch

from localllm.kernels import reference
from localllm.kernels.triton.token_index import index_scores


def made(count: int, num_keys: int, heads: int, dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count + num_keys)
    q = torch.randn(count, heads, dim, generator=generator).to(device)
    return q, torch.randn(num_keys, dim, generator=generator).to(device)


@pytest.mark.parametrize("kinds", [("float32", "float32"), ("float16", "float16"), ("float16", "float32")])
@pytest.mark.parametrize(
    ("count", "num_keys", "heads", "dim"),
    [(1, 1, 4, 128), (5, 65, 4, 128), (2, 700, 9, 12), (17, 63, 1, 2), (3, 33, 3, 300), (1, 70, 70, 20)],
)
def test_index_scores(
    count: int, num_keys: int, heads: int, dim: int, kinds: tuple[str, str], device: torch.device
) -> None:
    q, keys = (
        x.to(getattr(torch, kind)) for x, kind in zip(made(count, num_keys, heads, dim, device), kinds, strict=True)
    )
    found, wanted = index_scores(q, keys), reference.index_scores(q, keys)
    assert found.shape == (count, num_keys)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


def test_a_score_depends_on_no_other_query_and_no_other_key(device: torch.device) -> None:
    q, keys = made(21, 200, 4, 128, device)
    whole = index_scores(q, keys)
    # the interpreter multiplies with NumPy, whose BLAS adds some rows of a product in another order than others
    near = 0.0 if device.type == "cuda" else 1e-6
    for row, count in ((0, 1), (6, 77), (20, 199)):
        found = index_scores(q[row : row + 1], keys[:count])[0]
        torch.testing.assert_close(found, whole[row, :count], rtol=near, atol=near)


@pytest.mark.parametrize(("heads", "dim"), [(4, 128), (3, 20), (70, 20)])
def test_queries_with_keys_of_their_own(heads: int, dim: int, device: torch.device) -> None:
    """Bit for bit as in a product with the same keys in their order; places without a key have a score of 0."""
    q, keys = made(3, 90, heads, dim, device)
    places = torch.full((3, 70), -1, dtype=torch.int32)
    for row, count in enumerate((70, 0, 33)):
        places[row, :count] = torch.randperm(90)[:count]
    places = places.to(device)
    found = index_scores(q, keys, places)
    torch.testing.assert_close(found, reference.index_scores(q, keys, places), rtol=1e-4, atol=1e-3)
    near = 0.0 if device.type == "cuda" else 1e-5
    for row, count in enumerate((70, 0, 33)):
        alone = index_scores(q[row : row + 1], keys[places[row, :count].long()])[0] if count else found[row, :0]
        torch.testing.assert_close(found[row, :count], alone, rtol=near, atol=near)
        assert not found[row, count:].any()


@pytest.mark.filterwarnings("ignore:invalid value")
def test_scores_that_are_no_numbers_are_0(device: torch.device) -> None:
    q, keys = made(2, 3, 4, 20, device)
    q[0, 1, 3], keys[1, 0] = float("nan"), float("inf")
    found, wanted = index_scores(q, keys), reference.index_scores(q, keys)
    assert found[0].tolist() == [0.0] * 3
    torch.testing.assert_close(found, wanted)

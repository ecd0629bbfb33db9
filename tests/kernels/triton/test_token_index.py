"""Index scores with Triton, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from localllm.kernels import OpFacts, sparse
from localllm.kernels.triton import token_index as ours
from localllm.kernels.triton.token_index import index_scores
from localllm.kernels.verify.cases import ModelShapes
from localllm.kernels.verify.trial import op_error


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
    found, wanted = index_scores(q, keys), sparse.index_scores(q, keys)
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
def test_queries_with_pages_of_their_own(heads: int, dim: int, device: torch.device) -> None:
    """Bit for bit as in a product with the same keys in their order; pages that are not there have scores of 0."""
    q, keys = made(3, 96, heads, dim, device)
    table = torch.full((3, 12), -1, dtype=torch.int32)
    counts = 9, 0, 5
    for row, count in enumerate(counts):
        table[row, :count] = torch.randperm(12)[:count]
    table, pages = table.to(device)[:, :11], keys.unflatten(0, (12, 8))
    found = index_scores(q, pages, table)
    torch.testing.assert_close(found, sparse.index_scores(q, pages, table), rtol=1e-4, atol=1e-3)
    near = 0.0 if device.type == "cuda" else 1e-5
    for row, count in enumerate(counts):
        own = pages[table[row, :count].long()].flatten(0, 1)
        alone = index_scores(q[row : row + 1], own)[0] if count else found[row, :0]
        torch.testing.assert_close(found[row, : 8 * count], alone, rtol=near, atol=near)
        assert not found[row, 8 * count :].any()


SHAPES = ModelShapes(44, 70, OpFacts(num_heads=6, num_kv_heads=2, head_dim=20, kv_format="bf16"))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("op", ["index_write", "index_pool", "index_scores", "choose_blocks"])
def test_ops_agree_with_their_references(op: str, device: torch.device) -> None:
    """As on the user's card: long and short sequences, equal scores, blocks begun and completed in one step; scores of
    queries whose heads have weights, which may be below 0.
    """
    shapes = replace(SHAPES, facts=replace(SHAPES.facts, device=device.type))
    assert op_error(op, getattr(ours, op), shapes) == ""


@pytest.mark.slow
def test_more_scores_than_a_program_reads_at_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal scores in several tiles, of which only some are chosen, scores below 0, and -0, which is 0."""
    monkeypatch.setattr(ours, "CHOICE", 64)
    scores = (torch.rand(4, 900, generator=torch.Generator().manual_seed(4)) * 5 - 2).floor().to(device)
    scores[1], scores[2] = 0.0, -0.0
    scores[3, :5] = torch.tensor([float("-inf"), -3e38, -1e-45, 3e38, float("inf")])
    table = torch.arange(225, dtype=torch.int32, device=device).flip(0).expand(4, -1)
    lens = torch.tensor([3600, 3599, 1801, 79], dtype=torch.int32, device=device)
    for top in (1, 20, 63, 64, 300):
        found = ours.choose_blocks(scores, table, lens, 4, top, 4, 3)
        wanted = sparse.choose_blocks(scores.clone(), table, lens, 4, top, 4, 3)
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True)), top


@pytest.mark.filterwarnings("ignore:invalid value")
def test_scores_that_are_no_numbers_are_0(device: torch.device) -> None:
    q, keys = made(2, 3, 4, 20, device)
    q[0, 1, 3], keys[1, 0] = float("nan"), float("inf")
    found, wanted = index_scores(q, keys), sparse.index_scores(q, keys)
    assert found[0].tolist() == [0.0] * 3
    torch.testing.assert_close(found, wanted)

"""Compressed attention in kernels against the reference: entries, with an index or without, formats, prompts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from localllm.kernels.segments import REFERENCES
from localllm.kernels.table import implementations
from localllm.kernels.triton import compressed
from localllm.kernels.triton.cards import Card
from localllm.kernels.triton.launch import recording
from localllm.kernels.verify.trial import compare

from ..compressed_layers import HIDDEN, copied, layer, pages_of, parts_of, views_of
from .test_latent import SLOW

IMPL = next(impl for impl in implementations("linear") if impl.name == "triton")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("ratio", "kv_format", "lengths"),
    [
        pytest.param(4, "fp16", [(1, 20), (1, 64)], marks=SLOW),
        (4, "fp8", [(3, 28), (1, 5)]),
        (32, "int8", [(1, 64)]),
        *(pytest.param(ratio, "bf16", [(1, 7)], marks=SLOW) for ratio in (0, 4, 32)),
        *(pytest.param(4, name, [(1, 100), (1, 4), (1, 3)], marks=SLOW) for name in ("bf16", "int8", "fp8", "fp16")),
        *(pytest.param(ratio, "fp16", [(20, 20), (2, 70), (1, 33)], marks=SLOW) for ratio in (0, 4, 32)),
        pytest.param(4, "fp16", [(70, 150)], marks=SLOW),
        pytest.param(32, "fp16", [(70, 150)], marks=SLOW),
    ],
)
@pytest.mark.parametrize("by_token", [False, pytest.param(True, marks=SLOW)])
def test_the_segment(
    ratio: int, kv_format: str, lengths: list[tuple[int, int]], by_token: bool, device: torch.device
) -> None:
    torch.manual_seed(9)
    weights = layer(ratio, device, IMPL)
    pages = pages_of(kv_format, weights, device)
    view, of_entries, *bounds = views_of(lengths, device)
    x = torch.randn(len(view[0]), HIDDEN).half().to(device)

    def composed(*_: object) -> Tensor:
        raise AssertionError("the composed segment was called")

    found, wanted = copied(pages), copied(pages)
    ours = compressed.compressed_attention(
        composed, x.clone(), weights, found, view, of_entries, *bounds, by_token=by_token
    )
    theirs = REFERENCES["compressed_attention"](x.clone(), weights, wanted, view, of_entries, *bounds)
    for own, other in zip(parts_of(found), parts_of(wanted), strict=True):
        assert float((own.float() - other.float()).abs().max()) <= (
            1 if own.dtype in (torch.int8, torch.uint8) else 0.04
        )
    off = (ours.float() - theirs.float()).abs().amax(1)
    alike = off < 0.1  # of 150 tokens' choices one has scores that are equal but for rounding
    assert int((~alike).sum()) <= (weights.index is not None and len(x) > 20)
    assert compare(ours[alike].float(), theirs[alike].float(), 4e-3 if kv_format == "fp16" else 2e-2) == ""


def test_no_more_programs_than_keep_the_card_busy(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Mock(return_value=1)
    monkeypatch.setattr(compressed, "side_by_side", asked)
    weights = layer(4, device, IMPL)
    pages, x = pages_of("fp16", weights, device), torch.randn(1, HIDDEN).half().to(device)
    with recording(Card(90, 132)):
        compressed.compressed_attention(lambda *_: pytest.fail(), x, weights, pages, *views_of([(1, 64)], device))
    asked.assert_called_once()


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [4, pytest.param(32, marks=SLOW)])
def test_no_chunk_changes_a_bit_of_a_token(ratio: int, device: torch.device) -> None:
    """A prompt at once, and its last token alone after the others."""
    torch.manual_seed(6)
    weights, lengths = layer(ratio, device, IMPL), [(3, 64)]
    pages, x = pages_of("fp16", weights, device), torch.randn(3, HIDDEN).half().to(device)
    run = partial(compressed.compressed_attention, lambda *_: pytest.fail("composed"), by_token=True)
    whole, parts = copied(pages), copied(pages)
    together = run(x.clone(), weights, whole, *views_of(lengths, device))
    for part, chunk in ((slice(0, 2), [(2, 63)]), (slice(2, 3), [(1, 64)])):
        apart = run(x[part].clone(), weights, parts, *views_of(chunk, device))
    assert compare(apart.float(), together[2:].float(), 1e-3) == ""
    for own, other in zip(parts_of(whole), parts_of(parts), strict=True):
        assert float((own.float() - other.float()).abs().max()) < 0.01


@pytest.mark.slow
def test_several_tokens_of_a_sequence_take_rows_of_their_own(device: torch.device) -> None:
    """As draft tokens do in captured steps: each row is a sequence, and its entries are made of those before it."""
    torch.manual_seed(7)
    weights = layer(4, device, IMPL)
    pages = pages_of("fp16", weights, device)
    view, of_entries, starts, seen = views_of([(3, 64)], device)
    x = torch.randn(3, HIDDEN).half().to(device)
    run = partial(compressed.compressed_attention, lambda *_: pytest.fail("composed"))
    wanted = run(x.clone(), weights, copied(pages), view, of_entries, starts, seen)
    rows = [(*one[:2], one[2].expand(3, -1).contiguous(), one[3]) for one in (view, of_entries)]
    each = (
        torch.arange(4, dtype=torch.int32, device=device),
        torch.tensor([62, 63, 64], dtype=torch.int32, device=device),
    )
    found = run(x.clone(), weights, copied(pages), *rows, *each)
    assert compare(found.float(), wanted.float(), 1e-3) == ""


@pytest.mark.slow
def test_a_padding_row_of_a_captured_step_stores_nothing(device: torch.device) -> None:
    weights = layer(4, device, IMPL)
    pages = pages_of("fp16", weights, device)
    kept, views = copied(pages), views_of([(1, 20)], device)
    nowhere = torch.tensor([-1], device=device)
    padding = [(*view[:3], nowhere) for view in views[:2]]
    x = torch.ones(1, HIDDEN, device=device).half()
    compressed.compressed_attention(lambda *_: pytest.fail("composed"), x, weights, pages, *padding, *views[2:])
    assert all(map(torch.equal, parts_of(pages), parts_of(kept)))


def test_layers_with_other_options_are_composed(device: torch.device) -> None:
    weights = layer(32, device, IMPL)
    pages, views = pages_of("fp16", weights, device), views_of([(1, 20)], device)
    x = torch.ones(1, HIDDEN, device=device).half()
    changed = replace(weights, interleaved=False)
    assert compressed.compressed_attention(lambda *_: "composed", x, changed, pages, *views) == "composed"


def test_index_keys_of_odd_size_are_composed(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels rotate pairs."""
    monkeypatch.setattr(f"{layer.__module__}.INDEX", 17)
    weights = layer(4, device, IMPL)
    pages, views = pages_of("fp16", weights, device), views_of([(1, 40)], device)
    x = torch.ones(1, HIDDEN, device=device).half()
    assert compressed.compressed_attention(lambda *_: "composed", x, weights, pages, *views) == "composed"

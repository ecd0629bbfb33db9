"""Attention over latents in splits against the reference: every format, prompts and single tokens, many heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from localllm.kernels import kv_codes, reference
from localllm.kernels.kv_pages import KVPages
from localllm.kernels.triton import latent

SLOW = pytest.mark.slow
PAGE, COUNT = 16, 12


def pages_of(kv_format: str, rank: int, turned: int, device: torch.device, layer: bool) -> KVPages:
    """Pages full of random latents."""
    pages = KVPages.empty(kv_format, COUNT, 1, PAGE, rank, turned)
    if layer:
        pages = pages._replace(k_scales=torch.tensor([0.013]), v_scales=torch.tensor([0.009]))
    kept, pieces = torch.randn(COUNT * PAGE, 1, rank), torch.randn(COUNT * PAGE, 1, turned)
    reference.kv_write(kept, pieces, pages, torch.arange(COUNT * PAGE))
    return KVPages(*(None if part is None else part.to(device) for part in pages))


def step(lengths: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """block_table, cu_query_lens and seq_lens of sequences of (new tokens, tokens); pages in no order."""
    wide, free = max(-(-length // PAGE) for _, length in lengths), [(7 * i + 3) % COUNT for i in range(COUNT)]
    rows = []
    for _, length in lengths:
        used = -(-length // PAGE)
        rows.append([*free[:used], *[-1] * (wide - used)])
        free = free[used:]
    starts = torch.tensor([0, *(new for new, _ in lengths)]).cumsum(0).int()
    seen = torch.tensor([length for _, length in lengths], dtype=torch.int32)
    return torch.tensor(rows, dtype=torch.int32).to(device), starts.to(device), seen.to(device)


@pytest.mark.parametrize(
    ("kv_format", "lengths", "heads"),
    [
        ("fp8", [(1, 20)], 3),
        *(pytest.param(name, [(1, 150), (1, 7)], 3, marks=SLOW) for name in ("bf16", "fp16", "int8", "fp8")),
        pytest.param("fp16", [(2, 20), (1, 5)], 33, marks=SLOW),
        pytest.param("fp8 layer", [(2, 20), (1, 33)], 17, marks=SLOW),
    ],
)
@pytest.mark.parametrize("by_token", [pytest.param(False, marks=SLOW), True])
def test_attend(
    kv_format: str, lengths: list[tuple[int, int]], heads: int, by_token: bool, device: torch.device
) -> None:
    torch.manual_seed(5)
    name, _, layer = kv_format.partition(" ")
    pages, where = pages_of(name, 24, 8, device, bool(layer)), step(lengths, device)
    q = torch.randn(int(where[1][-1]), heads, 32).to(device)
    found = latent.attend(q, pages, *where, 0.2, by_token=by_token)
    limit = 1e-5 if device.type == "cpu" else 2e-2
    torch.testing.assert_close(found, reference.latent_attention(q, pages, *where, 0.2), rtol=limit, atol=limit)


def test_queries_of_rotated_latents_turn_a_few_at_a_time(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once they took three times what the plan counts."""
    torch.manual_seed(7)
    pages, where, turned = pages_of("int8", 24, 8, device, False), step([(3, 20), (2, 5)], device), []

    def hadamard(x: Tensor) -> Tensor:
        turned.append(x.shape[0])
        return kv_codes.hadamard(x)

    monkeypatch.setattr(latent, "hadamard", hadamard)
    monkeypatch.setattr(latent, "PART_BYTES", 2 * 3 * (1 + latent.ROTATING) * 26 * 4)
    q = torch.randn(5, 3, 32).to(device)
    found = latent.attend(q, pages, *where, 0.2)
    assert turned == [2, 2, 2, 2, 1, 1]
    limit = 1e-5 if device.type == "cpu" else 2e-2
    torch.testing.assert_close(found, reference.latent_attention(q, pages, *where, 0.2), rtol=limit, atol=limit)


@SLOW
def test_no_chunk_changes_a_bit_of_a_token(device: torch.device) -> None:
    """A prompt at once, and its last token alone; keys of two splits."""
    torch.manual_seed(6)
    pages, q = pages_of("fp16", 24, 8, device, False), torch.randn(2, 3, 32).to(device)
    whole = latent.attend(q, pages, *step([(2, 150)], device), 0.2, by_token=True)
    alone = latent.attend(q[1:], pages, *step([(1, 150)], device), 0.2, by_token=True)
    assert torch.equal(whole[1:], alone)

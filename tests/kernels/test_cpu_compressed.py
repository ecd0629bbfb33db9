"""Compressed attention in one C call against the reference: entries, with an index or without, every format."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from localllm.kernels.cpu import segments as cpu
from localllm.kernels.layer_weights import CompressedWeights
from localllm.kernels.segments import REFERENCES
from localllm.kernels.table import implementations
from localllm.kernels.verify.trial import compare

from .compressed_layers import HIDDEN, copied, layer, pages_of, parts_of, views_of

pytestmark = pytest.mark.usefixtures("isa")
SLOW = pytest.mark.slow
IMPL = next(impl for impl in implementations("linear") if impl.name.startswith("c"))
CPU = torch.device("cpu")


def run(x: Tensor, weights: CompressedWeights, *given: object) -> Tensor:
    return cpu.compressed_attention(lambda *_: pytest.fail("composed"), x.clone(), weights, *given)  # type: ignore


@pytest.mark.parametrize("ratio", [0, 4, 32])
@pytest.mark.parametrize("kv_format", ["f32", "bf16", *(pytest.param(n, marks=SLOW) for n in ("fp16", "int8", "fp8"))])
@pytest.mark.parametrize("lengths", [[(1, 20), (1, 64), (1, 3)], [(20, 20), (2, 70), (1, 33)], [(70, 150)]])
def test_the_segment(ratio: int, kv_format: str, lengths: list[tuple[int, int]]) -> None:
    torch.manual_seed(9)
    weights = layer(ratio, CPU, IMPL)
    pages, views = pages_of(kv_format, weights, CPU), views_of(lengths, CPU)
    x = torch.randn(len(views[0][0]), HIDDEN)
    found, wanted = copied(pages), copied(pages)
    ours = run(x, weights, found, *views)
    theirs = REFERENCES["compressed_attention"](x.clone(), weights, wanted, *views)
    for own, other in zip(parts_of(found), parts_of(wanted), strict=True):
        most = 1 if own.dtype in (torch.int8, torch.uint8) else 1e-3 if own.dtype is torch.float32 else 0.04
        assert float((own.float() - other.float()).abs().max()) <= most
    alike = (ours - theirs).abs().amax(1) < 0.1  # scores that are equal but for rounding choose other entries
    assert int((~alike).sum()) <= (weights.index is not None and len(x) > 20)
    assert compare(ours[alike], theirs[alike], 1e-3 if kv_format in ("f32", "fp16") else 1e-2) == ""


@pytest.mark.parametrize("ratio", [0, 4, 32])
def test_no_chunk_and_no_company_changes_a_bit(ratio: int) -> None:
    torch.manual_seed(6)
    weights = layer(ratio, CPU, IMPL)
    pages, x = pages_of("bf16", weights, CPU), torch.randn(70, HIDDEN)
    whole, parts = copied(pages), copied(pages)
    together = run(x, weights, whole, *views_of([(70, 150)], CPU))
    apart = [run(x[:33], weights, parts, *views_of([(33, 113)], CPU))]
    apart += [run(x[33:69], weights, parts, *views_of([(36, 149)], CPU))]
    apart += [run(x[69:], weights, parts, *views_of([(1, 150)], CPU))]
    assert torch.equal(torch.cat(apart), together)
    assert all(map(torch.equal, parts_of(whole), parts_of(parts)))
    other = torch.randn(1, HIDDEN)
    both = run(torch.cat([x[69:], other]), weights, copied(whole), *views_of([(1, 150), (1, 20)], CPU))
    assert torch.equal(both[:1], apart[2])

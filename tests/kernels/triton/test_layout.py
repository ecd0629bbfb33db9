"""The layout of the product kernels gives back every weight bit for bit, whatever its shape."""

from __future__ import annotations

import pytest
import torch

from localllm.kernels.dequant import dequantize
from localllm.kernels.triton.layout import CODES, prepare
from localllm.kernels.triton.product import rows
from localllm.kernels.weight import Weight

from .weights import FORMS, SMALLEST_K, make

GROWTH = {"gguf-Q4_K": 0.125, "gguf-Q5_K": 0.125, "gguf-Q3_K": 0.125, "gguf-IQ4_XS": 0.0625}
"""bits a weight that the layout adds to what the file stores"""


def shapes(form: str) -> list[tuple[int, int]]:
    k = SMALLEST_K.get(form, SMALLEST_K.get(form.partition("-")[0], 64))
    return [(1, 3 * k), (70, k)]


QUICK = ("dense-f32", *FORMS[::3])


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "form", [*QUICK, *(pytest.param(form, marks=pytest.mark.slow) for form in FORMS if form not in QUICK)]
)
def test_values_come_back(form: str) -> None:
    for n, k in shapes(form):
        weight = make(form, n, k)
        prepared = prepare(weight)
        assert torch.equal(rows(prepared, torch.arange(prepared.shape[0])), dequantize(weight))
        ids = torch.tensor([n - 1, 0, n // 2])
        assert torch.equal(rows(prepared, ids), dequantize(weight)[ids])


@pytest.mark.parametrize("form", FORMS)
def test_weights_keep_their_size(form: str) -> None:
    """A quarter of a bit and the row scale are the most that kernels with simple scales may cost."""
    n, k = 64, 1024
    weight = make(form, n, k)
    bits = (prepare(weight).nbytes - weight.nbytes) * 8 / (n * k)
    assert bits <= GROWTH.get(form, 0.0) + 32 / k


def test_columns_that_end_within_a_chunk() -> None:
    for code, k in (("bf16", 100), ("int4g", 72), ("int8", 24)):
        weight = {
            "bf16": make("dense-bf16", 5, k),
            "int4g": make("int4g-whole", 5, k),
            "int8": make("int8-row", 5, k),
        }[code]
        prepared = prepare(weight)
        assert prepared.low.shape[1] % 8 == 0
        assert torch.equal(rows(prepared, torch.arange(prepared.shape[0])), dequantize(weight))


def test_input_order_and_scale_are_undone() -> None:
    weight = make("int4g-32", 6, 64)._replace(perm=torch.randperm(64).int(), pre_scale=torch.rand(64) + 0.5)
    assert torch.equal(rows(prepare(weight), torch.arange(6)), dequantize(weight))


def test_a_nan_makes_its_row_nan() -> None:
    """Kernels decode NaN bytes as 480; the row's scale says it instead, and its product is NaN either way."""
    for form in ("fp8-row", "fp8-block", "fp8mx"):
        weight = make(form, 130, 128)
        codes = weight.qweight.view(torch.uint8).clone()
        codes[7, 5] = 0x7F
        weight = weight._replace(qweight=codes.view(torch.float8_e4m3fn))
        values = rows(prepare(weight), torch.arange(130))
        assert values[7].isnan().all()
        others = torch.arange(130) != 7
        assert torch.equal(values[others], dequantize(weight)[others])


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(ValueError, match="form odd"):
        prepare(Weight("odd", (1, 8), torch.zeros(1, 8)))
    with pytest.raises(ValueError, match="Q8_1"):
        prepare(Weight("gguf", (1, 32), torch.zeros(1, 36, dtype=torch.uint8), block_type="Q8_1"))
    with pytest.raises(ValueError, match="fp8 scales"):
        prepare(make("fp8-row", 4, 64)._replace(scales=torch.ones(2, 2)))


def test_chunks_are_sixteen_bytes() -> None:
    for kind in CODES.values():
        assert kind.chunk * kind.low == 128 and kind.planes * kind.low == 16

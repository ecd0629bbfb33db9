"""Products in whole numbers: their assembly instruction by instruction, and what is left of x."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from localllm.kernels.gguf_blocks import E2M1
from localllm.kernels.layer_weights import Norm
from localllm.kernels.triton import fixed
from localllm.kernels.triton import product as products
from localllm.kernels.triton.layout import prepare
from localllm.kernels.triton.product import Extras

from .ptx import execute
from .weights import error, exact_product, make, on

WORDS = np.random.default_rng(0).integers(0, 1 << 32, (4, 4096), dtype=np.uint32)
CHOICE = {"rows": 4, "chunks": 32, "warps": 1, "fixed": 1}


def bytes_of(words: np.ndarray, kind: type = np.uint8) -> np.ndarray:
    """int64 [.., 4], the low one first."""
    return words[..., None].view(kind).astype(np.int64)


def test_bytes_of_four_words() -> None:
    given = {f"${i + 1}": words for i, words in enumerate(WORDS)}
    for place in (0, 1):
        found = bytes_of(execute(fixed.gather_text(place), given))
        assert np.array_equal(found, np.stack([bytes_of(words)[:, place] for words in WORDS], -1))


@pytest.mark.parametrize("part", [0, 1])
def test_every_e2m1_half(part: int) -> None:
    halves = np.arange(1 << 16, dtype=np.uint32)
    others = np.random.default_rng(part).permutation(halves)
    words = halves | others << 16 if part == 0 else halves << 16 | others
    tables = {f"${i + 2}": np.full_like(words, table) for i, table in enumerate(fixed.E2M1_TABLES)}
    found = bytes_of(execute(fixed.e2m1_bytes_text(part), {"$1": words} | tables)) - 192
    codes = np.stack([halves >> (4 * i) & 15 for i in range(4)], -1).astype(np.int64)
    assert np.array_equal(found / 2, np.array(E2M1)[codes])


def test_tables_on_every_lane() -> None:
    lanes = np.arange(32, dtype=np.uint32)
    masks = {"%lanemask_eq": np.uint32(1) << lanes, "%lanemask_lt": (np.uint32(1) << lanes) - np.uint32(1)}
    for i, table in enumerate(fixed.E2M1_TABLES):
        assert (execute(fixed.table_text(i), {"$1": lanes} | masks) == table).all()


@pytest.mark.parametrize(("signed", "kind"), [(False, np.uint8), (True, np.int8)])
def test_dots(signed: bool, kind: type) -> None:
    codes, x, before, _ = WORDS
    found = execute(fixed.dot_text(signed), {"$1": codes, "$2": x, "$3": before}).view(np.int32)
    expected = (bytes_of(codes) * bytes_of(x, kind)).sum(-1) + before
    assert np.array_equal(found, expected.astype(np.uint32).view(np.int32))


def launched(x: torch.Tensor, prepared: products.Prepared, extras: Extras = products.PLAIN) -> torch.Tensor:
    n = prepared.shape[0] // (2 if extras.gate else 1)
    out = torch.empty(1, n, dtype=torch.float32, device=x.device)
    products.launch_gemv(x, prepared, out, extras, CHOICE)
    return out


FORMS = ["int4g-32", "int4g-whole", "int4g-zeros-64", "gguf-Q4_K", "fp4g16", "fp4g32"]
QUICK = [form if form in FORMS[::2] else pytest.param(form, marks=pytest.mark.slow) for form in FORMS]


@pytest.mark.parametrize("form", QUICK)
def test_bfloat16_keeps_its_bits(form: str, device: torch.device) -> None:
    """Where no element of a chunk is 2^7 times smaller than the largest, only the order of float32 sums is left."""
    weight = make(form, 6, 512)
    x = torch.randn(1, 512).clamp(0.05, 4.0).mul(torch.randint(0, 2, (1, 512)) * 2 - 1).bfloat16().to(device)
    assert error(launched(x, prepare(on(device, weight))), exact_product(x, weight)) < 1e-6


@pytest.mark.one_in(3)
@pytest.mark.parametrize("form", QUICK)
@pytest.mark.parametrize("largest", [pytest.param(1.0, marks=pytest.mark.slow), 300.0])
def test_what_is_rounded(form: str, largest: float, device: torch.device) -> None:
    """Also beside elements hundreds of times larger; 1,152 columns: the last round of the loop is part empty."""
    weight = make(form, 5, 1280 if form == "gguf-Q4_K" else 1152)
    x = torch.randn(1, weight.shape[1])
    x[0, ::97] *= largest
    x = x.half().to(device)
    assert error(launched(x, prepare(on(device, weight))), exact_product(x, weight)) < 2e-4


@pytest.mark.slow
def test_norm_gate_and_bias(device: torch.device) -> None:
    weight, gain, bias = make("fp4g16", 12, 192), torch.rand(192), torch.randn(12)
    x = (torch.randn(1, 192) * 3).bfloat16().to(device)
    wide = x.double().cpu()
    normed = wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt() * gain
    exact = exact_product(normed, weight) + bias
    extras = Extras(bias.to(device), Norm(gain.to(device), 1e-5))
    prepared = prepare(on(device, weight))
    assert error(launched(x, prepared, extras), exact) < 5e-5
    gate, up = (exact - bias).chunk(2, 1)
    y = launched(x, prepared, extras._replace(bias=None, gate="silu"))
    assert error(y, torch.nn.functional.silu(gate) * up) < 1e-4


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.parametrize(
    "bad", [float("nan"), *(pytest.param(sign * float("inf"), marks=pytest.mark.slow) for sign in (1, -1))]
)
def test_what_is_not_finite_stays_so(bad: float, device: torch.device) -> None:
    weight = make("int4g-32", 5, 128)
    x = torch.randn(1, 128).bfloat16()
    x[0, 70] = bad
    assert not launched(x.to(device), prepare(on(device, weight))).isfinite().any()
    x[0] = 0.0
    assert (launched(x.to(device), prepare(on(device, weight))) == 0).all()
    x[0, 3] = 1e37
    assert launched(x.to(device), prepare(on(device, weight))).isfinite().all()

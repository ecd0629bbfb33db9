"""The learned activation of Apertus, and the numbers that it is stored as."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers.activations import XIELUActivation

from localllm.errors import BadModelFile
from localllm.kernels.reference import xielu
from localllm.models.architectures import open_model

from .test_gguf_models import write_gguf

FIRST = "model.layers.0.mlp.act_fn.alpha_p"


def test_xielu_is_that_of_transformers_and_the_same_in_every_batch() -> None:
    reference = XIELUActivation(0.9, 0.7, 0.4, -1e-3, dtype=torch.float64)
    x = torch.cat([torch.linspace(-90, 20, 997), torch.tensor([0.0, -1e-4, -1e-3, 1e-6, -1e30])])
    found, wanted = xielu(x, (0.9, 0.7, 0.4, -1e-3)), reference._xielu_python(x.double()).detach()
    torch.testing.assert_close(found, wanted.float(), rtol=2e-6, atol=1e-7)
    for start in (1, 3, 14):
        assert torch.equal(xielu(x[start:], (0.9, 0.7, 0.4, -1e-3)), found[start:])
    assert xielu(torch.tensor([float("nan")]), (0.9, 0.7, 0.4, -1e-3)).isnan().all()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "the tensor is missing"),
        (torch.tensor([float("nan")]), "is not a finite number"),
        (torch.tensor([1.0, 2.0]), r"F32 of shape \[2\], expected one number"),
        (torch.tensor([3]), r"I64 of shape \[1\], expected one number"),
        (torch.tensor([4e4]), "must be within ±1,000"),
    ],
)
def test_numbers_that_are_none(value: torch.Tensor | None, words: str, tiny: Callable, tmp_path: Path) -> None:
    folder = tiny("apertus").save(tmp_path / "model", tensors={FIRST: value})
    with open_model(folder) as checkpoint, pytest.raises(BadModelFile, match=words) as caught:
        _ = checkpoint.facts
    assert caught.value.hint


def test_half_precision_numbers_are_read(tiny: Callable, tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        value = torch.tensor([0.3]).to(dtype)
        folder = tiny("apertus").save(tmp_path / str(dtype), tensors={FIRST: value})
        with open_model(folder) as checkpoint:
            curve: Any = checkpoint.facts.layers[0].ffn.curve
        assert curve.rising == pytest.approx(float(torch.nn.functional.softplus(value.float())))


@pytest.mark.parametrize("values", [[0.5], [0.5, float("inf"), 0.5], [1, 2, 3]])
def test_numbers_of_a_gguf_file_that_are_none(values: list[float], tiny: Callable, tmp_path: Path) -> None:
    model = tiny("apertus")
    path = write_gguf(tmp_path / "a.gguf", model.config, model.tensors, gguf.GGMLQuantizationType.F32)
    with open_model(path) as checkpoint:
        checkpoint.metadata["xielu.beta"] = np.array(values)
        with pytest.raises(BadModelFile, match=r"xielu\.beta: must hold 3 numbers"):
            _ = checkpoint.facts

"""Loading a model tries its kernels: a planted wrong one is caught, named, and not used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.kernels import Impl, table
from localllm.kernels.cpu import linear as cpu_linear
from localllm.kernels.cpu import ops as cpu_ops
from localllm.kernels.registry import fits_always
from localllm.kernels.verify.selftest import SelfTest
from localllm.models.architectures import open_model
from localllm.models.loader import LoadOptions, load_model


def load(tiny: Callable, folder: Path, name: str = "gemma3") -> tuple[Any, SelfTest]:
    test = SelfTest()
    with open_model(tiny(name).save(folder)) as checkpoint:
        return load_model(checkpoint, LoadOptions(kv_format="bf16", selftest=test)), test


@pytest.mark.parametrize("name", ["llama", "llama-bias", "qwen3", "gemma3"])
def test_a_model_whose_kernels_are_right_keeps_them(tiny: Callable, tmp_path: Path, name: str) -> None:
    model, test = load(tiny, tmp_path, name)
    assert test.failures == []
    assert test.num_run > 8
    assert model.kernels["decoder"] == "c"


@pytest.mark.parametrize("segment", ["step", "decoder", "mlp", "attn_out", "attention", "attn_in"])
def test_a_wrong_fused_segment_is_caught(
    segment: str, tiny: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(composed: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
        out = composed(*arguments)
        changed = out[1] if segment == "step" else out
        changed[-1] += 1.0
        return out

    planted = {segment: (Impl(segment, "planted", fits_always, wrong),)}
    larger = {"step", "decoder"} - {segment}  # what is made of it, and has it in C
    in_c = {name: impls for name, impls in cpu_ops.IMPLS.items() if name not in larger}
    monkeypatch.setattr(table, "BACK_ENDS", (planted, in_c, table.PLAIN))
    model, test = load(tiny, tmp_path)
    assert [failure.name for failure in test.failures] == [f"{segment}:planted"]
    assert model.kernels[segment] == "c"
    assert dict(model.table.ops)[segment] == "c"


def test_a_wrong_product_is_replaced_while_loading(
    tiny: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = cpu_linear.IMPLS[-1]

    def run(x: torch.Tensor, prepared: Any, bias: torch.Tensor | None) -> torch.Tensor:
        out = right.run(x, prepared, bias)
        return out if x.shape[0] == 1 else out.roll(1, 0)

    planted = replace(right, name="planted", run=run)
    monkeypatch.setattr(table, "BACK_ENDS", ({"linear": (planted, *cpu_linear.IMPLS)}, *table.BACK_ENDS))
    model, test = load(tiny, tmp_path, "qwen3")
    assert [failure.name for failure in test.failures] == ["linear:planted"]
    assert "3 tokens" in test.failures[0].reason
    assert model.kernels["qkv"] == "c_float32"

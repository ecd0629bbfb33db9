"""K2-Horizon: transformers' Llama with norms over groups."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor, nn

from localllm.errors import LocalLLMError
from localllm.models.architectures import open_model
from localllm.models.loader import LoadOptions, load_model
from localllm.models.model import Model

from .test_decode_graphs import answers, engine_of, requests
from .test_gguf_models import write_gguf
from .test_nanbeige import prompt

GROUPS = 3


class GroupNorm(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        parts = x.view(*x.shape[:-1], GROUPS, -1)
        return (parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + self.eps)).flatten(-2) * self.weight


def horizon(model: Any) -> Any:
    stated = {"model_type": "k2_horizon", "architectures": ["K2HorizonForCausalLM"], "layernorm_num_groups": GROUPS}
    inner = copy.deepcopy(model.reference)
    for layer in inner.model.layers:
        layer.input_layernorm = GroupNorm(layer.input_layernorm)
        layer.post_attention_layernorm = GroupNorm(layer.post_attention_layernorm)
    inner.model.norm = GroupNorm(inner.model.norm)
    return replace(model, config=model.config | stated, reference=inner)


def loaded(place: Path) -> Model:
    with open_model(place) as checkpoint:
        return load_model(checkpoint, LoadOptions(exact=True))


def test_logits_match_transformers(tiny: Callable, paged: Any, tmp_path: Path) -> None:
    """Whole, in chunks, and from GGUF; with steps of the engine."""
    model, ids = horizon(tiny("llama")), prompt()
    with torch.no_grad():
        wanted = model.reference(torch.tensor([ids]), use_cache=False).logits[0]
        plain = tiny("llama").reference(torch.tensor([ids]), use_cache=False).logits[0]
    assert float((wanted - plain).norm() / plain.norm()) > 0.05
    path = write_gguf(tmp_path / "k2.gguf", model.config, model.tensors, gguf.GGMLQuantizationType.F32)
    for place in (model.save(tmp_path / "folder"), path):
        for chunks in ([40], [17, 1, 22]):
            assert torch.allclose(paged(loaded(place)).all_logits(ids, chunks), wanted, atol=2e-4, rtol=1e-4)
    found = answers(engine_of(loaded(path)), requests(1))
    assert answers(engine_of(loaded(path), (1, 2, 4)), requests(1)) == found
    request, tokens = requests(1)[3], found[3]
    with torch.no_grad():
        given = torch.tensor([request.prompt_token_ids + tokens[:-1]])
        best = model.reference(given, use_cache=False).logits[0, len(request.prompt_token_ids) - 1 :].argmax(-1)
    assert best.tolist() == tokens


def test_mixtures_and_other_options_are_refused(tiny: Callable, tmp_path: Path) -> None:
    cases = {
        "mixture of experts, or of values": {"num_experts": 4}, "with query_key_norm": {"query_key_norm": True},
        "with attention_gate_func": {"attention_gate_func": "softplus"},
        "RoPE on a part of each head": {"rope_head_dim": 4},
        "42 hidden units cannot be split into 4 groups": {"layernorm_num_groups": 4},
    }  # fmt: skip
    for number, (words, changes) in enumerate(cases.items()):
        folder = horizon(tiny("llama")).save(tmp_path / str(number), **changes)
        with open_model(folder) as checkpoint, pytest.raises(LocalLLMError, match=words):
            _ = checkpoint.facts

"""Experts in host memory: the CPU stands in for the device, so that both sides must give what one side gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.boot.boot import Boot
from localllm.config import EngineOptions
from localllm.kernels.host_experts import HostExperts
from localllm.kernels.layer_weights import ExpertsWeights
from localllm.kernels.verify.selftest import SelfTest
from localllm.models.architectures import Experts, open_model
from localllm.models.loader import LoadOptions, load_model
from localllm.models.model import Model
from localllm.models.placement import uniform
from localllm.models.sleep import tensors_of
from localllm.plan.planner import Planner
from localllm.request import Request, SamplingParams

OTHERS = ("qwen3-moe-mixed", "glm4-moe", "glm4-moe-groups", "mixtral", "granitemoe", "qwen3.5-moe")
IDS = list(range(3, 40))
COMPOSED = frozenset({"experts:c", "decoder:c", "step:c"})


def load(folder: Path, count: int = 0, disabled: frozenset[str] = frozenset()) -> Model:
    with open_model(folder) as checkpoint:
        placed = uniform(checkpoint.facts, count)
        return load_model(checkpoint, LoadOptions(exact=True, host_experts=placed, disabled=disabled))


def hosts(model: Model) -> list[HostExperts]:
    ffns = (layer.ffn for layer in model.layers)
    return [ffn.host for ffn in ffns if isinstance(ffn, ExpertsWeights) and ffn.host is not None]


@pytest.mark.parametrize("name", ["gpt-oss", *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS)])
def test_logits_are_equal_wherever_experts_lie(tiny: Callable, paged: Any, tmp_path: Path, name: str) -> None:
    folder = tiny(name).save(tmp_path)
    whole = load(folder, disabled=COMPOSED)
    expected = paged(whole).all_logits(IDS, [20, 1, 16])
    fused = paged(load(folder)).all_logits(IDS, [20, 1, 16])
    for count in (2, 99):
        model = load(folder, count)
        assert torch.equal(paged(model).all_logits(IDS, [20, 1, 16]), expected), count
        assert torch.allclose(expected, fused, atol=1e-4)
        moved = sum(one.nbytes for one in hosts(model))
        assert moved and model.weight_bytes + moved == whole.weight_bytes


def test_bytes_go_over_as_the_choices_say(tiny: Callable, paged: Any, tmp_path: Path) -> None:
    """A layer's rows go over once where an expert there has any, and each of its results comes back."""
    model = load(tiny("qwen3-moe").save(tmp_path), 2)
    paged(model).all_logits(IDS, [len(IDS)])
    facts = model.facts
    ffn = facts.layers[0].ffn
    assert isinstance(ffn, Experts)
    for one in hosts(model):
        assert int(one.uses.sum()) == len(IDS) * ffn.top_k
        theirs = int(one.uses[-2:].sum())
        assert one.to_device == theirs * facts.hidden_size * 4
        assert one.to_host == (len(IDS) * facts.hidden_size * 4 if theirs else 0)
        used = sum(bool(count) for count in one.uses[-2:])
        assert one.read == used * one.nbytes // 2


def test_an_engine_answers_the_same_and_says_where_experts_lie(
    tiny: Callable, tmp_path: Path, empty_home: Path
) -> None:
    folder = tiny("qwen3-moe").save(tmp_path)
    planner = Planner.here(EngineOptions(device="cpu", ctx=128, dtype="float32", kv="f32"))
    answers = []
    for count in (0, 3):
        model = load(folder, count)
        boot = Boot(model, replace(planner.plan(model.facts), host_experts=count), planner, SelfTest())
        boot.engine.start()
        try:
            stream = boot.engine.submit(Request(IDS, SamplingParams(temperature=0, max_tokens=12)))
            answers.append([token for event in stream for token in event.token_ids])
        finally:
            boot.engine.close()
        assert ("3 of 7 experts a layer on the CPU" in boot.facts_line) is bool(count)
    assert answers[0] == answers[1] and len(answers[0]) == 12
    first, *_, last = (int(one.uses.sum()) for one in hosts(model))
    assert first >= (len(IDS) + 11) * 3 and last >= 12 * 3, "every token counts for its experts"


def test_experts_in_host_memory_stay_there_when_a_model_sleeps(tiny: Callable, tmp_path: Path) -> None:
    model = load(tiny("qwen3-moe").save(tmp_path), 3)
    moved = {id(tensor) for tensor in tensors_of(model)}
    gate_up = [one.gate_up[6] for one in hosts(model)]
    assert gate_up and not moved & {id(tensor) for one in gate_up for tensor in tensors_of(one.parts[0].prepared)}
    ffn = model.layers[0].ffn
    assert isinstance(ffn, ExpertsWeights) and id(ffn.gate_up[0].parts[0].prepared.data) in moved

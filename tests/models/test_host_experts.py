"""Experts in host memory: the CPU stands in for the device, so that both sides must give what one side gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from localllm.boot.boot import Boot
from localllm.config import EngineOptions
from localllm.kernels.host_experts import HostExperts
from localllm.kernels.layer_weights import ExpertsWeights
from localllm.kernels.verify.selftest import SelfTest
from localllm.models import placement
from localllm.models.architectures import Experts, open_model
from localllm.models.loader import LoadOptions, load_model
from localllm.models.model import Model
from localllm.models.placement import LOOK_CHOICES, Mover, uniform, wanted
from localllm.models.sleep import tensors_of
from localllm.plan.planner import Planner
from localllm.request import Request, SamplingParams

OTHERS = ("qwen3-moe-mixed", "glm4-moe", "glm4-moe-groups", "mixtral", "granitemoe", "qwen3.5-moe", "llama4")
OTHERS += ("qwen4-exp", "glm5-next", "deepseek-v4")
MOVED = ("qwen3-moe-mixed", "gpt-oss", "mixtral", "glm4-moe-groups", "nemotron-h", "llama4-published", "qwen4-exp")
IDS = list(range(3, 40))
COMPOSED = frozenset({"experts:c", "decoder:c", "step:c"})


def load(folder: Path, count: int = 0, disabled: frozenset[str] = frozenset()) -> Model:
    with open_model(folder) as checkpoint:
        placed = uniform(checkpoint.facts, count)
        return load_model(checkpoint, LoadOptions(exact=True, host_experts=placed, disabled=disabled))


@contextmanager
def opened(folder: Path, count: int, stream_rows: int = 0) -> Iterator[Model]:
    """A model whose files stay open, so that experts can be read anew."""
    with open_model(folder) as checkpoint:
        placed = uniform(checkpoint.facts, count)
        yield load_model(checkpoint, LoadOptions(exact=True, host_experts=placed, stream_rows=stream_rows))


def exchanging(model: Model) -> Iterator[tuple[int, HostExperts]]:
    for index, layer in enumerate(model.layers):
        if isinstance(layer.ffn, ExpertsWeights) and layer.ffn.host is not None:
            yield index, layer.ffn.host


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


def test_experts_in_host_memory_have_the_same_limits(tiny: Callable, paged: Any, tmp_path: Path) -> None:
    with open_model(tiny("glm4-moe").save(tmp_path)) as checkpoint:
        facts = checkpoint.facts

        def logits(count: int, **limits: float) -> torch.Tensor:
            ffns = [replace(one.ffn, **limits) if isinstance(one.ffn, Experts) else one.ffn for one in facts.layers]
            layers = tuple(replace(one, ffn=ffn) for one, ffn in zip(facts.layers, ffns, strict=True))
            checkpoint.facts = replace(facts, layers=layers)
            options = LoadOptions(exact=True, host_experts=uniform(facts, count), disabled=COMPOSED)
            return paged(load_model(checkpoint, options)).all_logits(IDS, [20, 1, 16])

        expected = logits(0, limit=0.02, shared_limit=0.05)
        for count in (2, 99):
            assert torch.equal(logits(count, limit=0.02, shared_limit=0.05), expected), count
        for fewer in ({"limit": 0.02}, {"shared_limit": 0.05}):
            assert not torch.allclose(logits(99, **fewer), expected, atol=1e-3), fewer


def test_bytes_go_over_as_the_choices_say(tiny: Callable, paged: Any, tmp_path: Path) -> None:
    """A layer's rows go over once where an expert there has any, and each of its results comes back."""
    model = load(tiny("qwen3-moe").save(tmp_path), 2)
    paged(model).all_logits(IDS, [len(IDS)])
    facts = model.facts
    ffn = facts.layers[0].ffn
    assert isinstance(ffn, Experts)
    for one in hosts(model):
        assert int(one.uses.sum()) == len(IDS) * ffn.top_k
        theirs, moved = int(one.uses[-2:].sum()), one.moved
        assert moved.to_device == theirs * facts.hidden_size * 4
        assert moved.to_host == (len(IDS) * facts.hidden_size * 4 if theirs else 0)
        used = sum(bool(count) for count in one.uses[-2:])
        assert moved.read == used * one.nbytes // 2
        assert moved.chosen == len(IDS) * ffn.top_k and moved.on_device == moved.chosen - theirs
        assert not moved.streamed and not moved.exchanged


@pytest.mark.parametrize("name", ["qwen3-moe", *(pytest.param(one, marks=pytest.mark.slow) for one in MOVED)])
def test_logits_are_equal_while_experts_are_streamed_and_change_places(
    tiny: Callable, paged: Any, tmp_path: Path, name: str
) -> None:
    folder = tiny(name).save(tmp_path)
    expected = paged(load(folder, disabled=COMPOSED)).all_logits(IDS, [20, 1, 16])
    with opened(folder, 3, stream_rows=4) as model:
        held = model.weight_bytes, sum(one.nbytes for one in hosts(model))
        sequence = paged(model)
        logits = [sequence.all_logits(IDS[:20], [20])]
        for layer, one in exchanging(model):
            last = max(one.gate_up)
            model.exchange(layer, last, 0)
            assert 0 in one.gate_up and last not in one.gate_up
            assert one.moved.exchanged == 2 * one.nbytes // 3
        again = paged(model).all_logits(IDS, [20, 1, 16])
        assert torch.equal(logits[0], expected[:20]) and torch.equal(again, expected)
        assert held == (model.weight_bytes, sum(one.nbytes for one in hosts(model)))
        assert all(one.moved.streamed for one in hosts(model))


def test_steps_with_adapters_run_experts_that_changed_places(tiny: Callable, paged: Any, tmp_path: Path) -> None:
    """Adapters have calls of their own, which would keep the expert that went and miss the one that came."""
    with opened(tiny("qwen3-moe").save(tmp_path), 3) as model:
        held = model.hold_adapters(torch.device("cpu"))

        def logits() -> torch.Tensor:
            sequence, none = paged(model), np.full(len(IDS), -1, dtype=np.int32)
            batch = replace(sequence.batch({0: IDS}), places=(none, none))
            with torch.inference_mode():
                return model.logits(model.forward(batch, sequence.cache))

        expected = logits()
        for layer, one in exchanging(model):
            model.exchange(layer, max(one.gate_up), 0)
            for call in (held.calls[layer], held._plain[layer]):
                assert call[1].gate_up is model.layers[layer].ffn.gate_up  # type: ignore[union-attr]
        torch.testing.assert_close(logits(), expected)


def test_an_expert_is_streamed_from_so_many_rows_on(tiny: Callable, paged: Any, tmp_path: Path) -> None:
    """Its weights go over for every step in which it has them, and what it has fewer rows of is computed here."""
    with opened(tiny("qwen3-moe").save(tmp_path), 3, stream_rows=12) as model:
        paged(model).all_logits(IDS, [len(IDS)])
        for one in hosts(model):
            counts = one.uses[-3:].tolist()
            there, here = [n for n in counts if n >= 12], [n for n in counts if 0 < n < 12]
            assert one.moved.streamed == len(there) * one.nbytes // 3
            assert one.moved.read == len(here) * one.nbytes // 3
            assert one.moved.to_device == sum(here) * model.facts.hidden_size * 4
            assert bool(one.moved.to_host) is bool(here)
        assert any(one.moved.streamed for one in hosts(model)) and any(one.moved.read for one in hosts(model))


def test_what_is_wanted_follows_from_the_counts() -> None:
    def layer(*heat: float, away: tuple[int, ...]) -> HostExperts:
        empty: dict[int, Any] = dict.fromkeys(away)
        made = HostExperts(empty, dict(empty), torch.relu, lambda *_: (None, None), torch.zeros(len(heat)))
        made.heat = torch.tensor(heat, dtype=torch.float64)
        return made

    calm = layer(90, 100, 91, 99, away=(2, 3))
    assert wanted([calm]) is None, "what is used about as much stays where it is"
    assert wanted([layer(0, 7, away=(1,))]) is None, "so do a few uses"
    warm, hot = layer(10, 60, 50, away=(1, 2)), layer(30, 5, 200, 200, away=(2, 3))
    assert wanted([calm, warm, hot]) == (2, 2, 1) and wanted([warm, calm]) == (0, 1, 0)
    assert wanted([layer(5, 500, away=(0, 1))]) is None, "no place on the device"


def test_experts_move_so_many_bytes_a_second_at_most(tiny: Callable, tmp_path: Path) -> None:
    with opened(tiny("qwen3-moe").save(tmp_path), 3) as model:
        layers, now = hosts(model), [0.0]
        pair = 2 * layers[0].nbytes // 3
        mover = Mover(model, bytes_s=pair / 2, clock=lambda: now[0])
        mover()
        for one in layers:
            one.heat.copy_(torch.arange(7) * 100)
            one.moved.chosen += LOOK_CHOICES
        moves = []
        for _ in range(40):
            now[0] += 0.25
            mover()
            moves.append(sum(one.moved.exchanged for one in layers) // pair)
        assert moves[0] == 1 and all(count <= now / 8 + 1 for now, count in enumerate(moves, 1))
        assert moves[-1] == 5
        assert sum(one.moved.exchanged for one in layers) == moves[-1] * pair
        first = next(one for one in layers if one.moved.exchanged)
        assert 6 not in first.gate_up


def test_an_engine_answers_the_same_and_says_where_experts_lie(
    tiny: Callable, tmp_path: Path, empty_home: Path
) -> None:
    folder = tiny("qwen3-moe").save(tmp_path)
    planner = Planner.here(EngineOptions(device="cpu", ctx=128, dtype="float32", kv="f32"))
    answers = []
    for count in (0, 3):
        model = load(folder, count)
        plan = replace(planner.plan(model.facts), host_experts=count, deterministic=not count)
        boot = Boot(model, plan, planner, SelfTest())
        assert isinstance(boot.engine.between_steps, Mover) is bool(count)
        boot.engine.start()
        try:
            stream = boot.engine.submit(Request(IDS, SamplingParams(temperature=0, max_tokens=12)))
            answers.append([token for event in stream for token in event.token_ids])
        finally:
            boot.engine.close()
        assert ("3 of 7 experts per layer on the CPU" in boot.facts_line) is bool(count)
        assert ("% of routed tokens hit the device" in boot.facts_line) is bool(count)
    assert answers[0] == answers[1] and len(answers[0]) == 12
    first, *_, last = (int(one.uses.sum()) for one in hosts(model))
    assert first >= (len(IDS) + 11) * 3 and last >= 12 * 3, "every token counts for its experts"


@pytest.mark.parametrize("closed", [False, True])
def test_answers_are_equal_while_experts_change_places_and_where_they_cannot(
    tiny: Callable, tmp_path: Path, empty_home: Path, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    """Files that can no longer be read cost no request anything: experts stay where they are."""
    monkeypatch.setattr(placement, "LOOK_CHOICES", 1)
    monkeypatch.setattr(placement, "LEAST_USES", 0.0)
    planner = Planner.here(EngineOptions(device="cpu", ctx=128, dtype="float32", kv="f32"))
    answers = []
    with opened(tiny("qwen3-moe").save(tmp_path), 3) as model:
        for _ in range(2):
            plan = replace(planner.plan(model.facts), host_experts=3, deterministic=bool(not answers))
            boot = Boot(model, plan, planner, SelfTest())
            engine = boot.engine
            if answers:
                assert isinstance(engine.between_steps, Mover)
                engine.between_steps.bytes_s = 1e15
                for one in hosts(model) if closed else ():
                    monkeypatch.setattr(one, "fetch", unreadable)
            stream = engine.submit(Request(IDS, SamplingParams(temperature=0, max_tokens=30)))
            while not engine.is_idle:
                engine.run_once()
            answers.append([token for event in stream for token in event.token_ids])
        assert answers[0] == answers[1] and len(answers[0]) == 30
        assert any(one.moved.exchanged for one in hosts(model)) is not closed
        assert (engine.between_steps is None) is closed
        assert ("of weights exchanged" in boot.facts_line) is not closed


def unreadable(*_: object) -> tuple[Any, Any]:
    raise OSError("the file is gone")


def test_experts_in_host_memory_stay_there_when_a_model_sleeps(tiny: Callable, tmp_path: Path) -> None:
    model = load(tiny("qwen3-moe").save(tmp_path), 3)
    moved = {id(tensor) for tensor in tensors_of(model)}
    gate_up = [one.gate_up[6] for one in hosts(model)]
    assert gate_up and not moved & {id(tensor) for one in gate_up for tensor in tensors_of(one.parts[0].prepared)}
    ffn = model.layers[0].ffn
    assert isinstance(ffn, ExpertsWeights) and id(ffn.gate_up[0].parts[0].prepared.data) in moved

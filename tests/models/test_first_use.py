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
from localllm.kernels.state_slots import PagesAndSlots, StateSlots
from localllm.kernels.verify.selftest import SelfTest
from localllm.kernels.verify.trial import layer_kind
from localllm.models.architectures import open_model
from localllm.models.loader import LoadOptions, load_model
from localllm.models.model import DecoderLayer
from localllm.models.samples import MAX_KINDS, layer_samples


def load(tiny: Callable, folder: Path, name: str = "gemma3") -> tuple[Any, SelfTest]:
    test = SelfTest()
    with open_model(tiny(name).save(folder)) as checkpoint:
        return load_model(checkpoint, LoadOptions(kv_format="bf16", selftest=test)), test


@pytest.mark.parametrize("name", ["llama", "llama-bias", "qwen3", "gemma3", "qwen3.5", "lfm2", "mimo"])
def test_a_model_whose_kernels_are_right_keeps_them(tiny: Callable, tmp_path: Path, name: str) -> None:
    model, test = load(tiny, tmp_path, name)
    assert test.failures == []
    assert test.num_run > 8
    assert model.kernels["decoder"] == "c"


@pytest.mark.slow
def test_every_architecture_keeps_its_kernels(tiny: Callable, tiny_names: tuple[str, ...], tmp_path: Path) -> None:
    assert not {name: found for name in tiny_names if (found := load(tiny, tmp_path / name, name)[1].failures)}


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


def rows(out: torch.Tensor, kept: StateSlots, used: int) -> None:
    out[-1] += 1.0


def state(out: torch.Tensor, kept: StateSlots, used: int) -> None:
    (kept.conv if kept.state is None else kept.state)[used] += 1.0


def another_slot(out: torch.Tensor, kept: StateSlots, used: int) -> None:
    kept.conv[-1, 0, 0] += 1e-3


WORDS = {rows: "relative error", state: "relative error", another_slot: "it changed the state of another sequence"}
RECURRENT = [
    ("gated_delta", "qwen3.5"),
    ("gated_delta", "kimi-linear"),
    ("mamba", "nemotron-h"),
    ("mamba", "falcon-h1"),
    ("short_conv", "lfm2"),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fault", [None, *WORDS])
@pytest.mark.parametrize(("segment", "name"), RECURRENT)
def test_a_wrong_recurrent_segment_is_caught(
    segment: str,
    name: str,
    fault: Callable[..., None] | None,
    tiny: Callable,
    loaded: Callable,
    paged: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The composed one replaces it; a right one stays."""
    expected, seen = paged(loaded(name)).all_logits(range(3, 30), [20]), []

    def fused(composed: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
        _, _, kept, slots, starts = arguments
        seen.append((slots.tolist(), starts.tolist()))
        out = composed(*arguments)
        if fault is not None:
            fault(out, kept, int(slots[-1]))
        return out

    planted = {segment: (Impl(segment, "planted", fits_always, fused),)}
    monkeypatch.setattr(table, "BACK_ENDS", (planted, table.PLAIN))
    model, test = load(tiny, tmp_path, name)
    assert seen and all(step == ([3, 2, 1], [0, 0, 1, 4]) for step in seen)
    assert (segment in dict(model.table.ops)) == (fault is None) == (not test.failures)
    if fault is not None:
        (said,) = map(str, test.failures)
        assert said.startswith(f"{segment}:planted failed its self-test (") and WORDS[fault] in said
    torch.testing.assert_close(paged(model).all_logits(range(3, 30), [20]), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("fault", [None, state, another_slot])
@pytest.mark.parametrize("segment", ["decoder", "step"])
@pytest.mark.parametrize("name", ["qwen3.5", "ling3", "nemotron-h", "falcon-h1"])
def test_states_of_all_layers_are_compared(
    name: str,
    segment: str,
    fault: Callable[..., None] | None,
    tiny: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where other layers treat tokens as sequences, some states of which may have no token."""
    empty = []  # whether recurrent layers had sequences of their own

    def fused(composed: Callable[..., Any], *arguments: Any) -> Any:
        caches = arguments[2 if segment == "decoder" else 4]
        if segment == "decoder":
            empty.append(arguments[-1] is not None)
        out = composed(*arguments)
        if fault is not None:
            slots = (cache.slots if isinstance(cache, PagesAndSlots) else cache for cache in caches)
            fault(out, next(one for one in slots if isinstance(one, StateSlots)), 1)
        return out

    monkeypatch.setattr(table, "BACK_ENDS", ({segment: (Impl(segment, "planted", fits_always, fused),)}, table.PLAIN))
    model, test = load(tiny, tmp_path, name)
    assert (segment in dict(model.table.ops)) == (fault is None) == (not test.failures)
    assert fault is None or WORDS[fault] in test.failures[0].reason
    assert segment == "step" or empty == [False, True][: 1 + (fault is None)]


def test_of_many_kinds_each_type_of_mixer_is_tried(loaded: Callable) -> None:
    for name, count in (("qwen3.5", 2), ("kimi-linear", 3), ("ling3", 3), ("nemotron-h", 3), ("granite-hybrid", 2)):
        model = loaded(name)
        samples = layer_samples(model.layers, [view for *_, view in model._calls])
        assert samples == list(model._calls[:count])
    (delta, ffn, _), (attention, *_), _ = loaded("qwen3.5")._calls
    mixers = [*(replace(attention, window=window) for window in range(1, 9)), None, delta]
    samples = layer_samples([DecoderLayer(mixer, ffn) for mixer in mixers], [*[0] * 8, -1, -1])
    assert [mixer for mixer, *_ in samples] == [*mixers[:4], None, delta] and len(samples) == MAX_KINDS


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3.5", {"tiled": True, "floor": -5.0, "sigmoid_gate": True, "conv": "cut", "dt_bias": "cut"}),
        ("olmo-hybrid", {"beta_scale": 1.0}),
        ("lfm2", {"bias": None, "conv": "cut"}),
        ("nemotron-h", {"conv_bias": None, "steps": (0.1, 0.5), "num_groups": 1, "state_size": 26}),
        ("ling3", {"gated": False}),
    ],
)
def test_each_option_of_a_layer_is_a_case_of_its_own(name: str, changes: dict[str, Any], loaded: Callable) -> None:
    mixer, *rest = next(call for call in loaded(name)._calls if hasattr(call[0], next(iter(changes))))
    sized = {option: getattr(mixer, option)[..., :1] if value == "cut" else value for option, value in changes.items()}
    others = [mixer, *(replace(mixer, **{option: value}) for option, value in sized.items())]
    assert len({layer_kind(other, *rest) for other in others}) == len(others)


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

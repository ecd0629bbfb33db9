"""OLMo Hybrid beside its arithmetic: names on the hub, layer patterns, rates up to 2 in every back end, refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.config import EngineOptions
from localllm.device.fake import MACHINES
from localllm.errors import BadModelFile, UnsupportedModel
from localllm.kernels.cpu import segments
from localllm.kernels.cpu.build import library
from localllm.kernels.segments import REFERENCES
from localllm.models.architectures import SplitDelta, open_model
from localllm.models.kv_cache import KVCache, StateGroup
from localllm.models.loader import LoadOptions, load_model
from localllm.plan.planner import Planner

LINEAR, FULL = "linear_attention", "full_attention"


def relative_error(ours: Tensor, reference: Tensor) -> float:
    return float((ours - reference).abs().max() / reference.abs().max())


def prompt(length: int) -> list[int]:
    return torch.randint(0, 99, (length,), generator=torch.Generator().manual_seed(5)).tolist()


def logits(folder: Path, paged: Any, ids: list[int]) -> Tensor:
    with open_model(folder) as checkpoint:
        return paged(load_model(checkpoint, LoadOptions(exact=True))).all_logits(ids, [40])


def test_as_the_hub_has_it(tiny: Callable, loaded: Callable, paged: Any, tmp_path: Path) -> None:
    """A convolution for each of queries, keys and values; attention layers name their norms as OLMo 2 does."""
    model, tensors = tiny("olmo-hybrid"), {}
    for layer in (0, 2):
        names = [f"model.layers.{layer}.linear_attn.{part}_conv1d.weight" for part in "qkv"]
        whole = torch.cat([model.tensors[name] for name in names])
        assert [len(model.tensors[name]) for name in names] == [40, 40, 40]
        tensors |= dict(zip(names, whole.split([30, 30, 60]), strict=True))
    name = "model.layers.1.feedforward_layer_norm.weight"
    tensors |= {name: None, name.replace("feedforward_layer_norm", "post_attention_layernorm"): model.tensors[name]}
    found = logits(model.save(tmp_path, tensors), paged, prompt(60))
    assert torch.equal(found, paged(loaded("olmo-hybrid")).all_logits(prompt(60), [40]))


def test_rates_up_to_1(tiny: Callable, paged: Any, tmp_path: Path) -> None:
    model, ids = tiny("olmo-hybrid"), prompt(60)
    deltas = [layer.linear_attn for layer in model.reference.model.layers if hasattr(layer, "linear_attn")]
    wanted = model.logits(ids)
    assert all(delta.allow_neg_eigval for delta in deltas)
    for delta in deltas:
        delta.allow_neg_eigval = False
    halved = model.logits(ids)
    for delta in deltas:
        delta.allow_neg_eigval = True
    found = logits(model.save(tmp_path, linear_allow_neg_eigval=False), paged, ids)
    assert relative_error(found, halved) < 1e-4 < 1e-2 < relative_error(wanted, halved)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds", [[FULL, LINEAR], [LINEAR, LINEAR, FULL], [LINEAR, *[FULL] * 2, LINEAR], [FULL, *[LINEAR] * 4], None, 4]
)
def test_layer_patterns(kinds: Any, tiny_of: Callable, paged: Any, tmp_path: Path) -> None:
    count = 3 if kinds is None else kinds if isinstance(kinds, int) else len(kinds)
    settings = {"num_hidden_layers": count, "vocab_size": 99, "pad_token_id": None, "eos_token_id": 2}
    settings |= {"layer_types": kinds if isinstance(kinds, list) else None}
    settings |= {"hidden_size": 36, "intermediate_size": 50, "num_attention_heads": 6, "num_key_value_heads": 2}
    settings |= {"linear_num_value_heads": 12, "linear_conv_kernel_dim": 2, "rope_parameters": {"rope_theta": None}}
    model = tiny_of("olmo_hybrid", settings)
    dropped = {} if isinstance(kinds, list) else {"layer_types": None}
    folder = model.save(tmp_path, **dropped, linear_num_key_heads=None, linear_key_head_dim=None)
    assert relative_error(logits(folder, paged, prompt(100)), model.logits(prompt(100))) < 1e-4


ROPES: list[tuple[dict[str, Any], str]] = [
    ({"rope_parameters": None, "rope_theta": None}, "off"),
    ({"rope_parameters": None}, "off"),
    ({"rope_parameters": {"rope_type": None}}, "off"),
    ({"rope_parameters": {"rope_theta": None, "rope_type": "default"}}, "off"),
    ({"rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default"}}, "none"),
    ({"rope_parameters": None, "rope_theta": 500_000.0}, "none"),
    ({"rope_parameters": {"rope_theta": 500_000.0, "rope_type": "linear", "factor": 2.0}}, "linear"),
]


@pytest.mark.parametrize(("change", "scaling"), ROPES, ids=[str(index) for index in range(len(ROPES))])
def test_attention_has_no_rope_if_its_base_is_null(
    change: dict[str, Any], scaling: str, tiny: Callable, tmp_path: Path
) -> None:
    with open_model(tiny("olmo-hybrid").save(tmp_path, **change)) as checkpoint:
        rope = checkpoint.facts.layers[1].mixer.rope
    assert rope.scaling == scaling and (scaling == "off" or rope.theta == 500_000.0)


@pytest.mark.skipif(bool(library().reason), reason="no C compiler")
@pytest.mark.parametrize("name", ["olmo-hybrid", pytest.param("olmo-hybrid-rope", marks=pytest.mark.slow)])
def test_c_gives_what_single_ops_give(name: str, loaded: Callable) -> None:
    model = loaded(name)
    weights, facts = model.layers[0].mixer, model.facts.layers[0].mixer
    assert isinstance(facts, SplitDelta) and weights.beta_scale == 1.0 + (name == "olmo-hybrid")
    x = torch.randn(75, model.facts.hidden_size, generator=torch.Generator().manual_seed(3))

    def run(segment: Callable[..., Tensor], lengths: Sequence[int], states: KVCache) -> Tensor:
        starts, out = torch.tensor([0, *lengths]).cumsum(0).int(), x[: sum(lengths)].clone()
        return segment(out, weights, states.layers[0], torch.tensor([3, 1, 0][: len(lengths)]), starts)

    def fused(*given: Any) -> Tensor:
        return segments.gated_delta(lambda *_: pytest.fail("composed"), *given)

    caches = []
    for which in (fused, REFERENCES["gated_delta"]):
        group = StateGroup((0,), facts.conv_shape, facts.state_shape)
        caches.append(KVCache((), (), states=[group], num_slots=4))
        found = [run(which, lengths, caches[-1]) for lengths in ([70, 0, 5], [1, 1, 1], [2])]
        caches[-1] = (*found, caches[-1].layers[0].state)
    assert all(relative_error(*pair) < 1e-4 for pair in zip(*caches, strict=True))


def test_the_plan_counts_its_states(tiny: Callable, tmp_path: Path) -> None:
    with open_model(tiny("olmo-hybrid").save(tmp_path)) as checkpoint:
        facts = checkpoint.facts
    assert facts.state_bytes == 2 * 4 * (120 * 3 + 3 * 20 * 10)
    made = Planner(MACHINES["cpu"], EngineOptions(ctx=256)).plan(facts)
    assert made.num_slots > 1 and made.kv_bytes > made.num_slots * facts.state_bytes


BAD = [
    ({"layer_types": [LINEAR] * 3}, "without a full-attention layer"),
    ({"layer_types": [LINEAR, FULL]}, "must list 3 layers"),
    ({"layer_types": [LINEAR, FULL, "sliding_attention"]}, "layers of type sliding_attention"),
    ({"linear_num_value_heads": 4}, "4 value heads cannot share 3 key heads evenly"),
    ({"linear_key_head_dim": 1}, "linear_key_head_dim"),
    ({"linear_key_head_dim": 11}, "expected \\["),
    ({"linear_conv_kernel_dim": 3}, "expected \\["),
    ({"linear_allow_neg_eigval": "yes"}, "linear_allow_neg_eigval"),
    ({"hidden_act": "gelu_pytorch_tanh"}, "with hidden_act gelu_pytorch_tanh"),
    ({"rope_parameters": 3}, "rope_parameters"),
    ({"is_causal": False}, "bidirectional attention"),
]


@pytest.mark.parametrize(("change", "words"), BAD, ids=[str(index) for index in range(len(BAD))])
def test_what_it_cannot_be_is_refused_by_name(
    change: dict[str, Any], words: str, tiny: Callable, tmp_path: Path
) -> None:
    with (
        open_model(tiny("olmo-hybrid").save(tmp_path, **change)) as checkpoint,
        pytest.raises((BadModelFile, UnsupportedModel), match=words) as caught,
    ):
        _ = checkpoint.facts
    assert caught.value.hint

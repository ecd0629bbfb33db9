"""An option of a layer that a fused kernel has never heard of keeps the layer away from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch

from localllm.kernels.cpu import segments as cpu
from localllm.kernels.layer_weights import (
    FUSED_ATTENTION,
    FUSED_MLP,
    AttentionWeights,
    HeadWeights,
    MlpWeights,
    has_only,
)
from localllm.kernels.triton import segments as triton
from localllm.models.kv_cache import KVCache


@dataclass(frozen=True)
class OddAttention(AttentionWeights):
    turned_over: float = 1.0


@dataclass(frozen=True)
class OddMlp(MlpWeights):
    turned_over: float = 1.0


@dataclass(frozen=True)
class OddHead(HeadWeights):
    turned_over: float = 1.0


def odd(kind: type, weights: Any, value: float) -> Any:
    return kind(**{field.name: getattr(weights, field.name) for field in fields(weights)}, turned_over=value)


def test_unknown_options_go_through_the_composed_segments(loaded: Callable) -> None:
    model = loaded("llama")
    layer, x = model.layers[0], torch.ones(1, 42)
    calls = {
        "attn_in": (OddAttention, layer.mixer, lambda run, w: run(lambda *_: "", x, w, x, x, None, x)),
        "attn_out": (OddAttention, layer.mixer, lambda run, w: run(lambda *_: "", x, x, w)),
        "mlp": (OddMlp, layer.ffn, lambda run, w: run(lambda *_: "", x, w)),
        "head": (OddHead, model.head, lambda run, w: run(lambda *_: "", x, w)),
    }
    for name, (kind, weights, call) in calls.items():
        for back_end in (cpu, triton):
            assert call(getattr(back_end, name), odd(kind, weights, 2.0)) == "", (back_end, name)
    assert cpu.attention(lambda *_: "", x.view(1, 6, 7), odd(OddAttention, layer.mixer, 2.0), None, x, x, x) == ""


@pytest.mark.parametrize(("value", "packed"), [(1.0, True), (2.0, False)])
def test_c_packs_layers_whose_options_it_knows(value: float, packed: bool, loaded: Callable) -> None:
    model = loaded("llama")
    layer = model.layers[0]
    assert (cpu.attention_layer(odd(OddAttention, layer.mixer, value)) is not None) is packed
    assert (cpu.mlp_layer(odd(OddMlp, layer.ffn, value)) is not None) is packed
    assert (cpu.head_layer(odd(OddHead, model.head, value)) is not None) is packed


def test_c_declines_layers_without_a_first_norm_or_with_another_activation(loaded: Callable) -> None:
    layer = loaded("llama").layers[0]
    assert cpu.attention_layer(replace(layer.mixer, norm=None)) is None
    assert cpu.attention_layer(replace(layer.mixer, whole_norms=True)) is None
    assert cpu.mlp_layer(replace(layer.ffn, norm=None)) is None
    assert cpu.mlp_layer(replace(layer.ffn, activation="relu2")) is None
    assert cpu.attention_layer(replace(layer.mixer, causal=False)) is None
    assert cpu.attention_layer(replace(layer.mixer, sum_norm=layer.mixer.norm)) is None


@pytest.mark.parametrize("place", ["norm", "post_norm"])
def test_layer_norms_reach_only_kernels_that_have_them(place: str, loaded: Callable) -> None:
    """They take one as the norm of a layer's input only; Triton also adds a block's output that has one."""
    model, x = loaded("llama"), torch.ones(1, 42)
    layer, head, ffn = model.layers[0], model.head, model.layers[0].ffn
    changed = {place: replace(layer.mixer.norm, bias=torch.zeros(42))}
    ffn, mixer = replace(ffn, **changed), replace(layer.mixer, **changed)
    if place == "norm":
        head = replace(head, **changed)
        assert all(has_only(one, known, "norm") for one, known in ((mixer, FUSED_ATTENTION), (ffn, FUSED_MLP)))
        made = cpu.attention_layer(mixer), cpu.mlp_layer(ffn), cpu.head_layer(head)
        assert all(one is not None and one.struct.norm.bias for one in made)
        return
    assert triton.mlp(lambda *_: "", x, ffn) == ""
    assert triton.attn_in(lambda *_: "", x, mixer, x, x, None, x) == ""
    assert cpu.mlp_layer(ffn) is None and cpu.attention_layer(mixer) is None
    assert cpu.mlp(lambda *_: "", x, ffn) == "" and cpu.attn_in(lambda *_: "", x, mixer, x, x, None, x) == ""
    calls, pages = ((mixer, layer.ffn, 0),), KVCache(model.groups, [2]).layers[:1]
    assert cpu.decoder(lambda *_: "", x, calls, pages, (), None, None) == ""

"""What the linear layers of a model see on a text: the sums of x xᵀ that quantization weighs errors by.

One layer is loaded, run and dropped at a time, so a model of any size passes with the memory of one layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from localllm.errors import UnsupportedModel
from localllm.kernels.layer_weights import AttentionWeights, Linear
from localllm.kernels.rope import RopeTable
from localllm.kernels.segments import REFERENCES

from .architectures import Attention, Dense, Experts, OpenModel
from .architectures.layers import GatedDelta, ShortConv, Stateful
from .kv_cache import CacheGroup, KVCache, StateGroup
from .layers import load_layer
from .loader import Loading, LoadOptions
from .model import DecoderLayer

PAGE_SIZE = 16
_SEGMENTS = {GatedDelta: "gated_delta", ShortConv: "short_conv"}


class Observed:
    """A linear layer that adds up what it is given: `total` float32 [K, K], the sum of x xᵀ over all rows."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear
        self.total: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        product = wide.T @ wide
        self.total = product if self.total is None else self.total.add_(product)
        return self.linear(x)


def hessians(source: OpenModel, sequences: Sequence[Sequence[int]], device: str = "cpu") -> Iterator[dict[str, Tensor]]:
    """For each layer in order: module name below `model.layers.{i}.` -> float32 [K, K]. Modules may share a tensor.

    sequences  token ids, each run for itself; what a layer hands on is computed with the stored weights in float32

    Raises BadModelFile or UnsupportedFormat as loading does, UnsupportedModel for a mixture of experts, ValueError
    without any sequence.
    """
    if not any(len(ids) for ids in sequences):
        raise ValueError("calibration needs at least one token")
    facts = source.facts
    if any(isinstance(layer.ffn, Experts) for layer in facts.layers):
        message = f"{facts.name} is a mixture of experts, which cannot be calibrated"
        raise UnsupportedModel(message, "quantize it with --calib none")
    loading = Loading(source, facts, LoadOptions(device=device, exact=True, context=max(map(len, sequences))))
    with torch.inference_mode():
        rows = loading.weight("model.embed_tokens", (facts.vocab_size, facts.hidden_size))
        embedding = loading.embedding(rows, None)
        streams = [embedding(torch.tensor(ids, device=device)) for ids in sequences if len(ids)]
        del rows, embedding
        rotations = {rope: loading.rope(rope) for rope in facts.ropes}
        for index in range(facts.num_layers):
            layer = load_layer(loading, index)
            mixer = facts.layers[index].mixer
            table = rotations[mixer.rope] if isinstance(mixer, Attention) else None
            seen: dict[tuple[str, ...], Observed] = {}
            ffn = facts.layers[index].ffn
            watched = DecoderLayer(_watched(layer.mixer, mixer, seen), _watched(layer.ffn, ffn, seen))
            streams = [_run(watched, mixer, x, table) for x in streams]
            yield {
                module: observed.total
                for modules, observed in seen.items()
                if observed.total is not None
                for module in modules
            }


def _watched(weights: Any, facts: Any, seen: dict[tuple[str, ...], Observed]) -> Any:
    """The same weights with products that add up what they are given, which come into `seen` by their modules."""
    modules = _modules(facts)
    found = {name: Observed(getattr(weights, name)) for name in modules}
    seen |= {modules[name]: observed for name, observed in found.items()}
    return dataclasses.replace(weights, **found)


def _modules(facts: Attention | Stateful | Dense) -> dict[str, tuple[str, ...]]:
    """Products of a layer's weights -> the modules that see what they are given."""
    if isinstance(facts, Attention):
        return {"qkv": facts.inputs, "out": ("self_attn.o_proj",)}
    if isinstance(facts, Dense):
        return {"gate_up": facts.inputs, "down": ("mlp.down_proj",)}
    if isinstance(facts, ShortConv):
        return {"inputs": ("conv.in_proj",), "out": ("conv.out_proj",)}
    return {
        "qkvz": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
        "ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
        "out": ("linear_attn.out_proj",),
    }


def _run(layer: DecoderLayer, facts: Attention | Stateful, x: Tensor, table: RopeTable | None) -> Tensor:
    """One layer over one sequence that starts at position 0: [num_tokens, hidden]."""
    bounds = torch.tensor([0, x.shape[0]], dtype=torch.int32, device=x.device)
    if isinstance(layer.mixer, AttentionWeights):
        x = _attend(layer.mixer, x, table, bounds)
    else:
        assert isinstance(facts, Stateful)
        states = StateGroup((0,), facts.conv_shape, facts.state_shape)
        kept = KVCache((), (), device=x.device, states=[states], num_slots=1).layers[0]
        x = REFERENCES[_SEGMENTS[type(facts)]](x, layer.mixer, kept, bounds[:1].long(), bounds)
    return REFERENCES["mlp"](x, layer.ffn)


def _attend(attention: AttentionWeights, x: Tensor, table: RopeTable | None, bounds: Tensor) -> Tensor:
    assert table is not None
    length, device = x.shape[0], x.device
    num_pages = -(-length // PAGE_SIZE)
    group = CacheGroup("calibration", attention.window, (0,), attention.num_kv_heads, attention.head_dim)
    pages = KVCache([group], [num_pages], PAGE_SIZE, "f32", device).layers[0]
    positions = torch.arange(length, device=device)
    cos, sin = table.rows(positions, length)
    block_table = torch.arange(num_pages, dtype=torch.int32, device=device).unsqueeze(0)
    q = REFERENCES["attn_in"](x, attention, cos, sin, pages, positions)
    attended = REFERENCES["attention"](q, attention, pages, block_table, bounds, bounds[1:])
    return REFERENCES["attn_out"](attended, x, attention)

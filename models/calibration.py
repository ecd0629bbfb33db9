"""What the linear layers of a model see on a text: the sums of x xᵀ that quantization weighs errors by.

One layer is loaded, run and dropped at a time, so a model of any size passes with the memory of one layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from localllm.kernels.layer_weights import Linear
from localllm.kernels.rope import RopeTable
from localllm.kernels.segments import REFERENCES

from .architectures import Dense, OpenModel
from .kv_cache import CacheGroup, KVCache
from .layers import load_layer
from .loader import Loading, LoadOptions
from .model import DecoderLayer

PAGE_SIZE = 16


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

    Raises BadModelFile or UnsupportedFormat as loading does, ValueError without any sequence.
    """
    if not any(len(ids) for ids in sequences):
        raise ValueError("calibration needs at least one token")
    facts = source.facts
    loading = Loading(source, facts, LoadOptions(device=device, exact=True, context=max(map(len, sequences))))
    with torch.inference_mode():
        rows = loading.weight("model.embed_tokens", (facts.vocab_size, facts.hidden_size))
        embedding = loading.embedding(rows, None)
        streams = [embedding(torch.tensor(ids, device=device)) for ids in sequences if len(ids)]
        del rows, embedding
        rotations = {rope: loading.rope(rope) for rope in facts.ropes}
        for index in range(facts.num_layers):
            layer = load_layer(loading, index)
            mixer, ffn = facts.layers[index].mixer, facts.layers[index].ffn
            parts = (layer.mixer, "qkv"), (layer.mixer, "out"), (layer.ffn, "gate_up"), (layer.ffn, "down")
            seen = {name: Observed(getattr(weights, name)) for weights, name in parts}
            watched = DecoderLayer(
                dataclasses.replace(layer.mixer, qkv=seen["qkv"], out=seen["out"]),  # type: ignore[arg-type]
                dataclasses.replace(layer.ffn, gate_up=seen["gate_up"], down=seen["down"]),  # type: ignore[arg-type]
            )
            streams = [_run(watched, x, rotations[mixer.rope], device) for x in streams]
            # the modules that see what a product is given
            modules = {"qkv": mixer.inputs, "out": ("self_attn.o_proj",)}
            modules |= {"gate_up": ffn.inputs if isinstance(ffn, Dense) else (), "down": ("mlp.down_proj",)}
            totals = {name: observed.total for name, observed in seen.items()}
            yield {module: total for name, total in totals.items() if total is not None for module in modules[name]}


def _run(layer: DecoderLayer, x: Tensor, table: RopeTable, device: str) -> Tensor:
    """One layer over one sequence that starts at position 0: [num_tokens, hidden]."""
    attention, length = layer.mixer, x.shape[0]
    num_pages = -(-length // PAGE_SIZE)
    group = CacheGroup("calibration", attention.window, (0,), attention.num_kv_heads, attention.head_dim)
    cache = KVCache([group], [num_pages], PAGE_SIZE, "f32", device)
    positions = torch.arange(length, device=device)
    cos, sin = table.rows(positions, length)
    block_table = torch.arange(num_pages, dtype=torch.int32, device=device).unsqueeze(0)
    bounds = torch.tensor([0, length], dtype=torch.int32, device=device)
    pages = cache.layers[0]
    q = REFERENCES["attn_in"](x, attention, cos, sin, pages, positions)
    attended = REFERENCES["attention"](q, attention, pages, block_table, bounds, bounds[1:])
    x = REFERENCES["attn_out"](attended, x, attention)
    return REFERENCES["mlp"](x, layer.ffn)

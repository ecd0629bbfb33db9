"""Calibration: collect the sums of x xᵀ over the inputs of a model's linear layers, which weight quantization errors.

Layers are loaded, run and dropped one at a time, so a model of any size needs the memory of one layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from localllm.errors import UnsupportedModel
from localllm.kernels.kv_pages import KVPages
from localllm.kernels.layer_weights import AttentionWeights, ExpertsWeights, Linear, MlpWeights
from localllm.kernels.rope import RopeTable
from localllm.kernels.segments import REFERENCES, STATEFUL
from localllm.kernels.streams import joined

from .architectures import Attention, Dense, Experts, GatedDelta, LatentAttention, LayerFacts, OpenModel
from .architectures.mixers import Mamba2, Paged, ShortConv, Stateful
from .architectures.sharding import Shard
from .kv_cache import CacheGroup, KVCache, StateGroup
from .layers import load_layer
from .loader import Loading, LoadOptions
from .model import DecoderLayer

PAGE_SIZE = 16


class Sum:
    """Accumulator of x xᵀ over all added rows: `total` is float32 [K, K], or None before the first row."""

    def __init__(self) -> None:
        self.total: Tensor | None = None

    def add(self, x: Tensor) -> None:
        wide = x.float()
        product = wide.T @ wide
        self.total = product if self.total is None else self.total.add_(product)


class Observed:
    """A linear layer that adds its inputs to a `Sum`."""

    def __init__(self, linear: Linear, into: Sum) -> None:
        self.linear = linear
        self.into = into

    def __call__(self, x: Tensor) -> Tensor:
        self.into.add(x)
        return self.linear(x)


Seen = dict[tuple[str, ...], Sum]  # keyed by the modules that share an input


@dataclass
class _Stream:
    """One sequence on its way through the layers."""

    x: Tensor  # [num_tokens, hidden], or [num_tokens, streams, hidden] with several residual streams
    inputs: Tensor | None  # per-layer inputs [num_tokens, layers, size]
    pages: dict[int, KVPages] = field(default_factory=dict)  # of layers whose keys and values other layers read


def hessians(source: OpenModel, sequences: Sequence[Sequence[int]], device: str = "cpu") -> Iterator[dict[str, Tensor]]:
    """Yield, for each layer in order, module name below `model.layers.{i}.` -> float32 [K, K]. Modules may share a
    tensor.

    In a mixture of experts, all gate and up products share one tensor and every down product has its own, which is
    absent if the text never reached that expert.

    sequences  token ids; sequences run independently, in float32 with the stored weights

    Raises BadModelFile or UnsupportedFormat like loading does, and ValueError without any token.
    """
    if not any(len(ids) for ids in sequences):
        raise ValueError("calibration needs at least one token")
    facts = source.facts
    if any(isinstance(layer.mixer, LatentAttention) for layer in facts.layers):
        message = f"{facts.name} has latent attention, which cannot be calibrated"
        raise UnsupportedModel(message, "quantize it with --calib none")
    if facts.hyper is not None or facts.loops > 1:
        what = "layers that run several times" if facts.hyper is None else "hyper-connections"
        message = f"{facts.name} has {what}, which cannot be calibrated"
        raise UnsupportedModel(message, "quantize it with --calib none")
    loading = Loading(source, Shard(facts), LoadOptions(device=device, exact=True, context=max(map(len, sequences))))
    with torch.inference_mode():
        streams = list(_streams(loading, sequences))
        rotations = {rope: loading.rope(rope) for rope in facts.ropes}
        read = {getattr(layer.mixer, "shares_kv_with", None) for layer in facts.layers}
        for index in range(facts.num_layers):
            layer, of_layer = load_layer(loading, index), facts.layers[index]
            table = rotations[of_layer.mixer.rope] if isinstance(of_layer.mixer, Attention) else None
            seen: Seen = {}
            mixer = layer.mixer and _observed(layer.mixer, _modules(of_layer.mixer), seen)
            if isinstance(mixer, AttentionWeights) and mixer.second is not None:
                mixer = replace(mixer, second=_observed(mixer.second, _modules(of_layer.second), seen))
            watched = DecoderLayer(mixer, layer.ffn and _observed_ffn(layer.ffn, of_layer.ffn, seen))
            for stream in streams:
                pages = _pages(watched.mixer, of_layer, stream) if table is not None else None
                stream.x = _run(watched, of_layer, stream, index, table, pages)
                if index in read and pages is not None:
                    stream.pages[index] = pages
            yield {
                module: observed.total
                for modules, observed in seen.items()
                if observed.total is not None
                for module in modules
            }


def _streams(loading: Loading, sequences: Sequence[Sequence[int]]) -> Iterator[_Stream]:
    facts = loading.facts
    embedding = loading.embedding(loading.weight("model.embed_tokens", (facts.vocab_size, facts.hidden_size)), None)
    if facts.inputs is not None:
        embedding = replace(embedding, inputs=loading.inputs(facts.inputs))
    for ids in (torch.tensor(ids, device=loading.device) for ids in sequences if len(ids)):
        x = embedding(ids)
        yield _Stream(x, embedding.layer_inputs(ids, x))


def _observed(weights: Any, modules: Mapping[str, tuple[str, ...]], seen: Seen) -> Any:
    """The same weights with products that record their inputs in `seen`.

    modules   field of the weights -> the modules that share its input
    """
    sums = {name: seen.setdefault(modules[name], Sum()) for name in modules}
    return replace(weights, **{name: Observed(getattr(weights, name), into) for name, into in sums.items()})


def _observed_ffn(weights: Any, facts: Dense | Experts | None, seen: Seen) -> Any:
    if weights.input is not None:
        own = {"gate": ("per_layer_input_gate",), "projection": ("per_layer_projection",)}
        weights = replace(weights, input=_observed(weights.input, own, seen))
    if isinstance(facts, Dense):
        return _observed(weights, {"gate_up": facts.inputs, "down": ("mlp.down_proj",)}, seen)
    assert facts is not None
    every = range(facts.num_experts)
    first = tuple(f"mlp.experts.{expert}.{name}" for expert in every for name in facts.inputs)
    into = seen.setdefault(first, Sum())
    last = [seen.setdefault((f"mlp.experts.{expert}.down_proj",), Sum()) for expert in every]
    weights = replace(
        weights,
        gate_up=tuple(Observed(one, into) for one in weights.gate_up),
        down=tuple(Observed(one, each) for one, each in zip(weights.down, last, strict=True)),
    )
    others: dict[str, tuple[str, ...]] = {}
    if facts.latent:
        others |= {name: (f"mlp.{name}",) for name in ("latent_in", "latent_out")}
    if facts.shared_inner:
        others["shared_gate_up"] = tuple(f"mlp.shared_expert.{name}" for name in facts.shared_inputs)
        others["shared_down"] = ("mlp.shared_expert.down_proj",)
    return _observed(weights, others, seen)


def _modules(facts: Paged | Stateful | None) -> dict[str, tuple[str, ...]]:
    """Products of a mixer -> the modules that share their input."""
    if isinstance(facts, Attention):
        return {"qkv": facts.inputs, "out": ("self_attn.o_proj",)}
    if isinstance(facts, Mamba2 | ShortConv):
        start = "mamba" if isinstance(facts, Mamba2) else "conv"
        return {"inputs": (f"{start}.in_proj",), "out": (f"{start}.out_proj",)}
    assert isinstance(facts, GatedDelta)
    return {"qkvz": facts.inputs, "ba": facts.rates, "out": ("linear_attn.out_proj",)}


def _run(
    layer: DecoderLayer,
    facts: LayerFacts,
    stream: _Stream,
    index: int,
    table: RopeTable | None,
    pages: KVPages | None,
) -> Tensor:
    """Run one layer over one whole sequence; the result has the form of `_Stream.x`."""
    ffn, x = layer.ffn, stream.x
    bounds = torch.tensor([0, x.shape[0]], dtype=torch.int32, device=x.device)
    if isinstance(layer.mixer, AttentionWeights):
        assert table is not None and pages is not None
        if layer.mixer.streams is not None:
            assert isinstance(ffn, MlpWeights) and ffn.input is not None and stream.inputs is not None
            streams, x, added = REFERENCES["streams_in"](x, layer.mixer)
            attended = _attention(layer.mixer, x, table, bounds, pages)
            x = REFERENCES["mlp"](joined(REFERENCES["attn_out"](attended, x, layer.mixer), added), ffn)
            return REFERENCES["streams_out"](streams, x, layer.mixer.streams, ffn.input, stream.inputs[:, index])
        attended = _attention(layer.mixer, x, table, bounds, pages)
        if layer.mixer.parallel:
            return REFERENCES["attn_out"](attended, _feed_forward(ffn, stream, x, index), layer.mixer)
        if layer.mixer.second is not None:
            x = _recurrence(layer.mixer.second, facts.second, x, bounds)
        x = REFERENCES["attn_out"](attended, x, layer.mixer)
    elif layer.mixer is not None:
        x = _recurrence(layer.mixer, facts.mixer, x, bounds)
    return _feed_forward(ffn, stream, x, index)


def _recurrence(weights: Any, facts: Paged | Stateful | None, x: Tensor, bounds: Tensor) -> Tensor:
    """`x` after a mixer that keeps a state."""
    assert isinstance(facts, Stateful)
    states = StateGroup((0,), facts.conv_shape, facts.state_shape)
    kept = KVCache((), (), device=x.device, states=[states], num_slots=1).layers[0]
    return REFERENCES[STATEFUL[type(weights)]](x, weights, kept, bounds[:1].long(), bounds)


def _feed_forward(ffn: Any, stream: _Stream, x: Tensor, index: int) -> Tensor:
    """`x` after the feed-forward layer."""
    if ffn is None:
        return x
    x = REFERENCES["experts" if isinstance(ffn, ExpertsWeights) else "mlp"](x, ffn)
    if ffn.input is None or stream.inputs is None:
        return x
    return REFERENCES["layer_input"](x, ffn.input, stream.inputs[:, index])


def _pages(attention: Any, facts: LayerFacts, stream: _Stream) -> KVPages:
    """The pages from which a layer reads the keys and values of a sequence."""
    source = getattr(facts.mixer, "shares_kv_with", None)
    if source is not None:
        return stream.pages[source]
    num_pages = -(-stream.x.shape[0] // PAGE_SIZE)
    group = CacheGroup("calibration", attention.window, (0,), *attention.kept)
    pages = KVCache([group], [num_pages], PAGE_SIZE, "f32", stream.x.device).layers[0]
    assert isinstance(pages, KVPages)
    return pages


def _attention(attention: AttentionWeights, x: Tensor, table: RopeTable, bounds: Tensor, pages: KVPages) -> Tensor:
    length, device = x.shape[0], x.device
    positions = torch.arange(length, device=device)
    cos, sin = table.rows(positions, length)
    block_table = torch.arange(pages.k.shape[0], dtype=torch.int32, device=device).unsqueeze(0)
    q = REFERENCES["attn_in"](x, attention, cos, sin, pages, positions)
    return REFERENCES["attention"](q, attention, pages, block_table, bounds, bounds[1:])

"""Input for the kernel self-test: a model's shapes, and one layer of each kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from localllm.kernels import OpFacts
from localllm.kernels.layer_weights import LayerCall
from localllm.kernels.verify.cases import ModelShapes
from localllm.kernels.verify.trial import layer_kind

from .architectures.facts import ModelFacts
from .architectures.mixers import Attention, CompressedAttention, GatedDelta, Mamba2, Paged, PooledIndex, Stateful
from .model import DecoderLayer

# layer kinds to test, at least as many as there are types of mixers: a mixed quantization can have a dozen, but their
# linear layers are tested separately
MAX_KINDS = 6
POSITIONS = 64  # the test sequences are shorter than this


def model_shapes(facts: ModelFacts, ops: OpFacts) -> ModelShapes:
    """Collect the sizes that kernels see in a model."""
    mixer = max(facts.attention, key=lambda one: one.head_dim)
    return ModelShapes(
        hidden=facts.hidden_size,
        intermediate=facts.intermediate_size,
        facts=ops,
        rotated=mixer.rope.dim,
        interleaved=mixer.rope.interleaved,
        eps=facts.rms_norm_eps,
        has_windows=any(window is not None for window in facts.windows),
        has_sinks=any(getattr(one, "sinks", False) for one in facts.attention),
        chunked=any(isinstance(mixer, Attention) and mixer.chunked for mixer in facts.attention),
        softcap=mixer.softcap,
        scale=mixer.scale,
        states=_state_sizes(facts),
    )


def _state_sizes(facts: ModelFacts) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The distinct (op, sizes) of the ops that only some layers have, for `ModelShapes.states`."""
    found: list[tuple[str, tuple[int, ...]]] = []
    for mixer in (mixer for layer in facts.layers for mixer in layer.mixers):
        if isinstance(mixer, Stateful):
            found.append(("causal_conv", (mixer.channels, mixer.conv_width)))
        if isinstance(mixer, Paged) and mixer.index is not None:
            op = "index_pool" if isinstance(mixer.index, PooledIndex) else "index_scores"
            found.append((op, (mixer.index.num_heads, mixer.index.dim, mixer.index.ratio)))
        if isinstance(mixer, CompressedAttention) and (own := mixer.entry_index) is not None:
            found.append(("index_scores", (own.num_heads, own.dim, mixer.ratio)))
        if isinstance(mixer, GatedDelta):
            sizes = mixer.num_k_heads, mixer.num_v_heads, mixer.k_dim, mixer.v_dim
            found.append(("delta_rule", (*sizes, int(mixer.tiled), int(mixer.channel_decay))))
        if isinstance(mixer, Mamba2):
            found.append(("state_space", (mixer.num_heads, mixer.num_groups, mixer.head_dim, mixer.state_size)))
    return tuple(dict.fromkeys(found))


def head_sizes(facts: ModelFacts, shapes: ModelShapes) -> list[ModelShapes]:
    """`shapes` once more for every other head size in the model; `shapes` itself has the largest."""
    sizes = dict.fromkeys(
        (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, mixer.rope) for mixer in facts.attention
    )
    others = [
        (replace(shapes.facts, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim), rope)
        for heads, kv_heads, dim, rope in sizes
        if dim != shapes.facts.head_dim
    ]
    return [replace(shapes, facts=ops, rotated=rope.dim) for ops, rope in others]


def layer_samples(layers: Sequence[DecoderLayer], views: Sequence[int]) -> list[LayerCall]:
    """One layer of each kind with its view, in model order. Of many kinds, first one per type of mixer, then one per
    types of mixer and feed-forward layer, then a second one of these types and so on.
    """
    found: dict[str, LayerCall] = {}
    for layer, view in zip(layers, views, strict=True):
        call = (layer.mixer, layer.ffn, view)
        found.setdefault(layer_kind(*call), call)
    kinds, mixers, pairs = list(found.values()), Counter[type](), Counter[tuple[type, type]]()
    ranks = []
    for index, (mixer, ffn, _) in enumerate(kinds):
        pair = type(mixer), type(ffn)
        ranks.append((mixers[pair[0]] > 0, pairs[pair], index))
        mixers[pair[0]] += 1
        pairs[pair] += 1
    return [kinds[index] for index in sorted(index for *_, index in sorted(ranks)[:MAX_KINDS])]

"""The frozen values that segments take: a layer's weights, and what the layers of one step share.

A fused implementation may look at `Linear.parts` to see by which implementation they were prepared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from .adapters import Additions
from .host_experts import HostExperts
from .kv_pages import KVPages
from .registry import Impl
from .state_slots import StateSlots


@dataclass(frozen=True, slots=True)
class LinearPart:
    """One prepared weight with the implementation that reads it."""

    impl: Impl
    prepared: Any
    bias: Tensor | None  # float32 [N]
    shape: tuple[int, int]  # (N, K)


@dataclass(frozen=True, slots=True)
class Module:
    """A stored module whose outputs are some of a product's."""

    names: tuple[str, ...]  # canonical, and as the file has it
    rows: int
    order: Tensor | None = None  # int64 [rows]: which of the outputs that Transformers gives each row is


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x Wᵀ + b. Several parts where weights could not be fused exactly; their outputs lie end to end.

    modules    whose outputs these are, in order; none where they are made of parts of modules
    additions  what adapters add, in the products of steps that have some
    """

    parts: tuple[LinearPart, ...]
    modules: tuple[Module, ...] = ()
    additions: Additions | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, K] -> [num_tokens, sum of N], dtype of x."""
        given = [part.impl.run(x, part.prepared, part.bias) for part in self.parts]
        y = given[0] if len(given) == 1 else torch.cat(given, -1)
        return y if self.additions is None else self.additions.add(x, y)

    @property
    def out_features(self) -> int:
        """Rows of all parts together."""
        return sum(part.shape[0] for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the prepared weights and biases."""
        biases = sum(part.bias.nbytes for part in self.parts if part.bias is not None)
        return biases + sum(part.prepared.nbytes for part in self.parts)

    @property
    def bias(self) -> Tensor | None:
        """float32 [N], zeros for parts without one; None where no part has one."""
        found = [part.bias for part in self.parts if part.bias is not None]
        if not found:
            return None
        zeros = (torch.zeros(part.shape[0], device=found[0].device) for part in self.parts)
        return torch.cat(
            [zero if p.bias is None else p.bias.float() for p, zero in zip(self.parts, zeros, strict=True)]
        )


class Join(Protocol):
    """Makes one result of what several ranks give, each with its part of a product."""

    def __call__(self, linear: Linear, x: Tensor) -> Tensor:
        """The product of what all ranks have of x [num_tokens, K], the same on all."""

    def total(self, given: Tensor) -> Tensor:
        """The sum of what all ranks give."""


def product(linear: Linear, x: Tensor, join: Join | None) -> Tensor:
    """x Wᵀ + b; of all ranks together where there are some."""
    return linear(x) if join is None else join(linear, x)


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm: weight [dim]; with a bias, which may be zeros, a LayerNorm."""

    weight: Tensor
    eps: float
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """What attention in one layer needs, besides its caches."""

    norm: Norm | None  # None: the residual stream as it is
    qkv: Linear  # rows: all query heads, then key heads, then value heads
    out: Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of q·k
    q_norm: Norm | None = None
    k_norm: Norm | None = None  # over head_dim, before RoPE
    late_norms: bool = False  # both are behind RoPE
    whole_norms: bool = False  # q_norm and k_norm are over all heads together
    post_norm: Norm | None = None  # on the output, before the residual
    window: int | None = None
    chunked: bool = False  # the window does not move: a query sees what lies in one of so many positions with it
    softcap: float | None = None
    interleaved: bool = False  # RoPE pairs (2j, 2j + 1) instead of (j, j + half)
    gate: bool = False  # after each query head in `qkv` comes its gate; its sigmoid multiplies what attention gives
    head_gates: bool = False  # gates are one number a head, which lie behind all queries in `qkv`
    softplus_gate: bool = False  # log(1 + exp(gate)) multiplies instead of the sigmoid
    v_norm: Norm | None = None  # over head_dim
    temperature: tuple[float, int] | None = None  # (b, n): queries at position p grow by 1 + b ln(1 + floor(p / n))
    temperature_offset: int = 0  # added to p
    sinks: Tensor | None = None  # float32 [num_heads]: a score more for every query of a head, without a value
    causal: bool = True  # False: a query sees what is behind it, too, with a window as far as before it
    sum_norm: Norm | None = None  # on the residual stream, once the output is added
    k_is_v: bool = False  # `qkv` has no rows for values: they are what its keys are, before their norm
    reads_only: bool = False  # `qkv` has rows for queries only: another layer stores keys and values
    parallel: bool = False  # what follows reads the residual stream before the output is added to it
    join: Join | None = None  # of `out`, where ranks have a part each
    streams: StreamWeights | None = None  # where a token has several residual streams

    @property
    def kept(self) -> tuple[int, int, int]:
        """Heads of its pages, elements of a key and of a value there."""
        return self.num_kv_heads, self.head_dim, self.head_dim


@dataclass(frozen=True, slots=True)
class StreamWeights:
    """How a layer predicts and corrects the residual streams of a token: see `streams`."""

    count: int
    router: Linear  # one row a stream
    router_norm: Norm
    predict: Tensor  # float32 [count * count, count]
    correct: Tensor  # float32 [count, count]
    scale: Tensor | None  # float32 [hidden]: of the first stream where the layer's own numbers are let in
    left: Linear  # LAuReL: to few numbers
    right: Linear  # and back
    laurel_norm: Norm
    widen: Linear | None = None  # of the first layer: all streams but the first, end to end
    narrow: tuple[Linear, ...] = ()  # of the last layer: of each stream but the first


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """What latent attention in one layer needs, besides its pages."""

    norm: Norm | None
    qkv: Linear  # rows: queries, or what they are made of; the latent; the piece of the key that turns
    q_up: Linear | None  # queries of what they are made of, by heads; of each first what does not turn
    q_norm: Norm | None  # before it
    kv_norm: Norm  # over the latent
    k_up: tuple[Linear, ...]  # of each head: what does not turn of a query, as it meets latents
    v_up: tuple[Linear, ...]  # of each head: values of latents
    out: Linear
    rank: int  # elements of a latent
    turned: int  # elements of a query, and of a key, that turn
    scale: float  # of q·k
    interleaved: bool = False  # RoPE pairs (2j, 2j + 1) instead of (j, j + half)
    post_norm: Norm | None = None  # on the output, before the residual
    temperature: tuple[float, int] | None = None  # as of `AttentionWeights`
    join: Join | None = None  # of `out`, where ranks have a part each

    @property
    def kept(self) -> tuple[int, int, int]:
        """Heads of its pages, elements of a key and of a value there."""
        return 1, self.rank, self.turned


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """What the gated delta rule in one layer needs, besides its states."""

    norm: Norm | None
    qkvz: Linear  # rows: query heads, key heads, value heads, then the gates of the outputs
    ba: Linear  # rows: of every value head how much it learns, then how much it forgets
    out: Linear
    conv: Tensor  # float32 [channels, width]
    decay: Tensor  # float32 [num_v_heads], below 0
    dt_bias: Tensor  # float32 [num_v_heads]
    out_norm: Norm  # over every value head, before its gate
    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    tiled: bool = False  # value head j goes with key head j % num_k_heads
    join: Join | None = None  # of `out`, where ranks have a part each


@dataclass(frozen=True, slots=True)
class ConvWeights:
    """What a gated short convolution in one layer needs, besides its states."""

    norm: Norm | None
    inputs: Linear  # rows: gates of the convolution's inputs, gates of its outputs, then the inputs
    out: Linear
    conv: Tensor  # float32 [channels, width]
    bias: Tensor | None = None  # float32 [channels]
    post_norm: Norm | None = None  # on the output, before the residual
    join: Join | None = None  # of `out`, where ranks have a part each


@dataclass(frozen=True, slots=True)
class InputWeights:
    """How a layer takes in the numbers that a token has for it alone: see `segments.layer_input`."""

    gate: Linear
    projection: Linear
    activation: str  # of the gate: silu | gelu_tanh
    norm: Norm  # before the residual
    scale: float = 1.0  # multiplies the result, residual stream included


@dataclass(frozen=True, slots=True)
class MambaWeights:
    """What a Mamba-2 mixer in one layer needs, besides its states."""

    norm: Norm | None
    inputs: Linear  # rows: gates of the outputs, then what goes through the convolution, then each head's time step
    out: Linear
    conv: Tensor  # float32 [channels, width]
    decay: Tensor  # float32 [num_heads], below 0
    skip: Tensor  # float32 [num_heads]: how much of its input a head gives on
    dt_bias: Tensor  # float32 [num_heads]
    out_norm: Norm  # over the gated outputs of a group of heads, without a weight
    gain: Tensor  # float32 [num_heads * head_dim], its weight
    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_bias: Tensor | None = None  # float32 [channels]
    steps: tuple[float, float] | None = None  # what time steps are cut off to
    join: Join | None = None  # of `out`, where ranks have a part each


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """A feed-forward layer, gated but with gelu and relu2."""

    norm: Norm | None  # None: the residual stream as it is
    gate_up: Linear  # rows: gate, then up; without a gate only up
    down: Linear
    activation: str  # silu | gelu_tanh | gelu | relu2
    post_norm: Norm | None = None
    sum_norm: Norm | None = None  # on the residual stream, once the output is added
    scale: float = 1.0  # multiplies the result, residual stream included
    input: InputWeights | None = None  # what follows
    join: Join | None = None  # of `down`, where ranks have a part each
    cut: float | None = None  # gate less its mean and so many deviations, and nothing below: see `segments.thinned`


@dataclass(frozen=True, slots=True)
class ApartNorms:
    """Norms of a mixture whose parts read the residual stream each for itself."""

    router: Norm
    shared: Norm
    after_shared: Norm
    after_experts: Norm


@dataclass(frozen=True, slots=True)
class ExpertsWeights:
    """A mixture of feed-forward layers, and what its router does: see `experts.route`."""

    norm: Norm | None
    router: Linear
    gate_up: tuple[Linear, ...]  # of each expert; rows: gate, then up; with relu2 only up
    down: tuple[Linear, ...]
    top_k: int
    router_kind: str  # softmax | softmax_topk | sigmoid | sigmoid_topk
    activation: str  # silu | gelu_tanh | swiglu_oai | relu2
    renormalise: bool = True
    scale: float = 1.0  # of what the chosen experts count
    choice_bias: Tensor | None = None  # float32 [num_experts]
    groups: int = 1
    group_top_k: int = 1
    shared_gate_up: Linear | None = None  # of the expert that every token goes through
    shared_down: Linear | None = None
    shared_gate: Linear | None = None  # one row: sigmoid of it multiplies what the shared expert gives
    limit: float | None = None
    post_norm: Norm | None = None
    apart: ApartNorms | None = None  # `norm` is then that of the experts alone
    expert_scales: Tensor | None = None  # float32 [num_experts]: of what each gives
    layer_scale: float = 1.0  # multiplies the result, residual stream included
    input: InputWeights | None = None  # what follows
    host: HostExperts | None = None  # those that the CPU computes: here their products are empty
    latent_in: Linear | None = None  # the chosen experts work on what it makes of a row
    latent_out: Linear | None = None  # and it takes their sum back
    join: Join | None = None  # of the sum, where ranks have a part of every expert
    # `gate_up` and `down` of all experts as one product each, where their weights lie one behind the other
    stacked: tuple[LinearPart, LinearPart] | None = None
    share_inputs: bool = False  # shares multiply what experts take, and not what they give


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The last norm and the projection to the vocabulary."""

    norm: Norm | None  # None: hidden states as they are
    linear: Linear
    softcap: float | None = None
    join: Join | None = None  # where ranks have some of the vocabulary each


# the fields that all fused segments know
FUSED_ATTENTION = frozenset(
    (
        *("norm", "qkv", "out", "num_heads", "num_kv_heads", "head_dim", "q_norm", "k_norm", "post_norm"),
        *("scale", "window", "chunked", "softcap", "interleaved", "sinks", "late_norms"),
    )
)
FUSED_LATENT = frozenset(
    (
        *("norm", "qkv", "q_up", "q_norm", "kv_norm", "k_up", "v_up", "out", "rank", "turned", "scale"),
        *("interleaved", "post_norm", "temperature"),
    )
)
FUSED_DELTA = frozenset(
    (
        *("norm", "qkvz", "ba", "out", "conv", "decay", "dt_bias", "out_norm"),
        *("num_k_heads", "num_v_heads", "k_dim", "v_dim", "tiled"),
    )
)
FUSED_CONV = frozenset(("norm", "inputs", "out", "conv", "bias", "post_norm"))
FUSED_MAMBA = frozenset(
    (
        *("norm", "inputs", "out", "conv", "conv_bias", "decay", "skip", "dt_bias", "out_norm", "gain"),
        *("num_heads", "head_dim", "num_groups", "state_size", "steps"),
    )
)
FUSED_MLP = frozenset(("norm", "gate_up", "down", "activation", "post_norm"))
FUSED_EXPERTS = frozenset(
    (
        *("norm", "router", "gate_up", "down", "top_k", "router_kind", "activation", "renormalise", "scale"),
        *("choice_bias", "groups", "group_top_k", "share_inputs", "shared_gate_up", "shared_down", "shared_gate"),
        *("limit", "post_norm"),
    )
)
FUSED_HEAD = frozenset(("norm", "linear", "softcap"))


def has_only(weights: Any, known: frozenset[str]) -> bool:
    """Whether every field outside of `known` has its default: a fused kernel declines what it has never heard of.

    None of them knows LayerNorms.
    """
    for field in fields(weights):
        value = getattr(weights, field.name)
        if isinstance(value, Norm) and value.bias is not None:
            return False
        if field.name not in known and value != field.default:
            return False
    return True


def linears_of(weights: Any) -> Iterator[Linear]:
    """The linear layers of a mixer or a feed-forward layer, in the order of its fields; none of one that is absent."""
    for field in () if weights is None else fields(weights):
        value = getattr(weights, field.name)
        if isinstance(value, InputWeights | StreamWeights):
            yield from linears_of(value)
        yield from (one for one in (value if isinstance(value, tuple) else (value,)) if isinstance(one, Linear))


def nbytes_of(weights: Any) -> int:
    """Bytes of the prepared weights, norms and other tensors of a mixer, a feed-forward layer or the head."""
    total = 0
    for field in () if weights is None else fields(weights):
        value = getattr(weights, field.name)
        if isinstance(value, (InputWeights, StreamWeights, ApartNorms)):
            total += nbytes_of(value)
        for one in value if isinstance(value, tuple) else (value,):
            total += one.nbytes if isinstance(one, (Linear, Tensor)) else 0
            total += one.weight.nbytes if isinstance(one, Norm) else 0
    return total


MixerWeights = AttentionWeights | LatentWeights | DeltaWeights | ConvWeights | MambaWeights
FeedForwardWeights = MlpWeights | ExpertsWeights
LayerCache = KVPages | StateSlots | None  # None: of a layer without a mixer
# a layer's weights, and which of the step's views it sees; -1: it keeps a state, or nothing
LayerCall = tuple[MixerWeights | None, FeedForwardWeights | None, int]
# cos, sin, block_table, slot_mapping: what the layers of one cache group share in a step
View = tuple[Tensor, Tensor, Tensor, Tensor]
# hidden [num_tokens, hidden], logits float32 [num_tokens, vocab], and where somebody looked int64 [num_tokens], the
# first place of the largest logit, -1 where one is NaN; all are valid until the next step
Stepped = tuple[Tensor, Tensor, Tensor | None]


def forget(prepared: Any, *, pages_only: bool = False) -> None:
    """Let go of what fused segments keep with a prepared weight: pages of the last call, and layers it is a part of."""
    let_go = getattr(prepared, "forget", None)
    if let_go is not None:
        let_go(pages_only)

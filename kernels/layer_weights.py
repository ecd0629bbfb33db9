"""Immutable arguments of segments: a layer's weights, and the tensors that the layers of a step share.

A fused implementation may inspect `Linear.parts` to see which implementation prepared each weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from .adapters import Additions
from .host_experts import HostExperts
from .kv_pages import CompressedPages, KVPages
from .registry import Impl
from .state_slots import PagesAndSlots, StateSlots


@dataclass(frozen=True, slots=True)
class LinearPart:
    """One prepared weight and the implementation that multiplies with it."""

    impl: Impl
    prepared: Any
    bias: Tensor | None  # float32 [N]
    shape: tuple[int, int]  # (N, K)


@dataclass(frozen=True, slots=True)
class Module:
    """A module of the checkpoint whose outputs are part of a fused linear layer's."""

    names: tuple[str, ...]  # canonical name, that in Transformers if it differs from the others, and that in the file
    rows: int
    order: Tensor | None = None  # int64 [rows]: index of each row among the module's outputs in Transformers
    factors: Tensor | None = None  # float32 [rows]: the weights' rows are those in the file times these


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x Wᵀ + b. Has several parts if weights could not be fused exactly; their outputs are concatenated.

    modules    checkpoint modules that produce these outputs, in order; empty if they use only parts of modules
    additions  adapter updates, in the layers used for steps with adapters
    """

    parts: tuple[LinearPart, ...]
    modules: tuple[Module, ...] = ()
    additions: Additions | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, K] -> [num_tokens, sum of N], dtype of x."""
        outputs = [part.impl.run(x, part.prepared, part.bias) for part in self.parts]
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        return y if self.additions is None else self.additions.add(x, y)

    @property
    def out_features(self) -> int:
        """Total output features of all parts."""
        return sum(part.shape[0] for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the prepared weights and biases."""
        biases = sum(part.bias.nbytes for part in self.parts if part.bias is not None)
        return biases + sum(part.prepared.nbytes for part in self.parts)

    @property
    def bias(self) -> Tensor | None:
        """float32 [N], zeros for parts without a bias; None if no part has one."""
        found = [part.bias for part in self.parts if part.bias is not None]
        if not found:
            return None
        zeros = (torch.zeros(part.shape[0], device=found[0].device) for part in self.parts)
        return torch.cat(
            [zero if p.bias is None else p.bias.float() for p, zero in zip(self.parts, zeros, strict=True)]
        )


class Join(Protocol):
    """Tensor parallelism: combines the partial results of all ranks."""

    def __call__(self, linear: Linear, x: Tensor) -> Tensor:
        """Apply a linear layer split over ranks to x [num_tokens, K]; every rank returns the full result."""

    def total(self, given: Tensor) -> Tensor:
        """All-reduce (sum) over the ranks."""


def product(linear: Linear, x: Tensor, join: Join | None) -> Tensor:
    """x Wᵀ + b, combined over all ranks if there is a `join`."""
    return linear(x) if join is None else join(linear, x)


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm with weight [dim]; with a bias (possibly zeros), a LayerNorm."""

    weight: Tensor
    eps: float
    bias: Tensor | None = None
    groups: int = 1  # of an RMSNorm: values are normed in as many groups, each by itself


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Weights of one attention layer."""

    norm: Norm | None  # None: no input norm
    qkv: Linear  # rows: all query heads, then key heads, then value heads
    out: Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of q·k
    q_norm: Norm | None = None
    k_norm: Norm | None = None  # over head_dim, before RoPE
    late_norms: bool = False  # apply q_norm and k_norm after RoPE
    whole_norms: bool = False  # q_norm and k_norm span all heads together
    post_norm: Norm | None = None  # on the output, before the residual
    window: int | None = None
    chunked: bool = False  # chunked attention: a query attends within its own chunk of `window` positions
    softcap: float | None = None
    interleaved: bool = False  # RoPE pairs (2j, 2j + 1) instead of (j, j + half)
    gate: bool = False  # each query head in `qkv` is followed by its gate; sigmoid(gate) multiplies attention's output
    head_gates: bool = False  # one gate per head, after all queries in `qkv`
    softplus_gate: bool = False  # softplus(gate) multiplies the output, not sigmoid(gate)
    v_norm: Norm | None = None  # over head_dim
    temperature: tuple[float, int] | None = None  # (b, n): queries at position p times 1 + b ln(1 + floor(p / n))
    temperature_offset: int = 0  # added to p
    sinks: Tensor | None = None  # float32 [num_heads]: attention sinks, an extra score per head without a value
    causal: bool = True  # False: bidirectional; a window extends equally far in both directions
    sum_norm: Norm | None = None  # on the residual stream after the output is added
    k_is_v: bool = False  # `qkv` has no value rows: values are the keys before their norm
    reads_only: bool = False  # `qkv` has only query rows: another layer writes keys and values
    value_dim: int = 0  # elements of a value head, followed by zeros in the pages; 0: head_dim
    value_scale: float = 1.0  # of values
    parallel: bool = False  # the feed-forward layer reads the residual stream before attention's output is added
    join: Join | None = None  # for `out`, with tensor parallelism
    streams: StreamWeights | None = None  # if a token has several residual streams
    hyper: HyperWeights | MixedWeights | None = None  # see `HyperWeights`
    index: IndexWeights | None = None  # sparse attention, see `token_index`
    second: MambaWeights | None = None  # reads the same residual stream; both outputs are added

    @property
    def kept(self) -> tuple[int, int, int]:
        """(KV heads, key dim, value dim) of its pages."""
        return self.num_kv_heads, self.head_dim, self.head_dim

    @property
    def values(self) -> int:
        """Elements of a value head in `qkv` and before `out`."""
        return self.value_dim or self.head_dim


@dataclass(frozen=True, slots=True)
class StreamWeights:
    """Weights that predict and correct a token's residual streams: see `streams`."""

    count: int
    router: Linear  # one row per stream
    router_norm: Norm
    predict: Tensor  # float32 [count * count, count]
    correct: Tensor  # float32 [count, count]
    scale: Tensor | None  # float32 [hidden]: multiplies the first stream before the per-layer inputs
    left: Linear  # LAuReL down projection
    right: Linear  # LAuReL up projection
    laurel_norm: Norm
    widen: Linear | None = None  # first layer only: all streams but the first, concatenated
    narrow: tuple[Linear, ...] = ()  # last layer only: one per stream but the first


@dataclass(frozen=True, slots=True)
class HyperWeights:
    """Hyper-connections around a block: see `hyper`. Such a block has no input norm, and its segments return its output
    alone instead of adding it to x.
    """

    count: int  # residual streams
    norm: Norm  # over each stream, with one weight for all: [count * hidden]
    down: Linear  # rows: the values between both matrices, then one per stream, the gain of the block's output
    up: Linear
    rank: int  # values between both matrices
    final: HyperWeights | None = None  # after the last block: reduces the streams to one vector

    @property
    def wide(self) -> int:
        """Elements of all streams."""
        return self.norm.weight.shape[0]


@dataclass(frozen=True, slots=True)
class MixedWeights:
    """Manifold-constrained hyper-connections (mHC) around a block: see `hyper`. Its segments return its output alone
    instead of adding it to x.
    """

    count: int  # residual streams
    fn: Tensor  # float32 [(2 + count) · count, count · hidden]
    base: Tensor  # float32 [(2 + count) · count]
    scale: Tensor  # float32 [3]: of the weights before the block, of those of its output, and of the matrix
    rounds: int  # of normalizing rows and columns of the matrix
    eps: float  # added to weights and sums
    norm_eps: float  # of the norm of all streams together
    last: bool = False  # the model's output is the mean of the streams after this block
    # or the sum of these, weighted as a block's input is: fn, base, scale of shapes [count, ...], [count] and [1]
    final: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def wide(self) -> int:
        """Elements of all streams."""
        return self.fn.shape[1]


@dataclass(frozen=True, slots=True)
class NGramWeights:
    """Weights that add n-gram embeddings to the residual streams of a layer: see `hyper.ngrams`."""

    key: Linear  # one row per channel of all streams
    value: Linear  # one row per channel of a stream
    key_norm: Norm  # over each stream, [channels]
    query_norm: Norm
    conv_norm: Norm
    conv: Tensor  # float32 [channels, width], with zeros between the taps of a dilated convolution


@dataclass(frozen=True, slots=True)
class IndexWeights:
    """Weights of the index of one sparse attention layer: see `token_index`."""

    linear: Linear  # rows: all query heads, then one key
    q_norm: Norm
    k_norm: Norm
    num_heads: int
    dim: int
    ratio: int  # tokens of a block
    top: int  # blocks that a query sees
    back: Tensor  # float32 [2, rotated / 2]: cosines and sines by which a rotation goes back ratio - 1 positions

    @property
    def kept(self) -> tuple[int, int, int]:
        """(elements per token, elements of a block's key, tokens of a block) in its pages."""
        return self.dim, self.dim, self.ratio

    @property
    def reach(self) -> int:
        """The longest sequence in which every query sees all tokens before it."""
        return (self.top + 1) * self.ratio - 1

    @property
    def key(self) -> Linear:
        """`linear` without the queries, if the file has them apart: its last `dim` outputs are the key."""
        last = self.linear.parts[-1]
        return Linear((last,)) if last.shape[0] == self.dim else self.linear


@dataclass(frozen=True, slots=True)
class PooledWeights:
    """Weights of the index of one latent attention layer: see `token_index`."""

    keys: Linear  # rows: the key of a token, then the logits of its weights in its block, per channel
    k_norm: Norm  # a LayerNorm over keys, before they are stored
    places: Tensor  # float32 [ratio, dim]: added to the logits of each of a block's tokens
    q_up: Linear  # query latent -> all index queries
    shares: Linear  # weights of the index heads
    num_heads: int
    dim: int
    ratio: int  # tokens of a block
    top: int  # blocks that a query sees

    @property
    def kept(self) -> tuple[int, int, int]:
        """As in `IndexWeights`."""
        return 2 * self.dim, self.dim, self.ratio

    @property
    def reach(self) -> int:
        """The longest sequence in which every query sees all tokens before it."""
        return (self.top + 1) * self.ratio - 1


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Weights of one latent attention (MLA) layer."""

    norm: Norm | None
    qkv: Linear  # rows: queries or query latents, the KV latent, the RoPE part of the key, then gates if `gated`
    q_up: Linear | None  # query latent -> queries by head, each with the part without RoPE first
    q_norm: Norm | None  # before `q_up`
    kv_norm: Norm  # over the latent
    k_up: tuple[Linear, ...]  # per head: query part without RoPE -> latent space
    v_up: tuple[Linear, ...]  # per head: latent -> value
    out: Linear
    rank: int  # latent dimension
    turned: int  # RoPE dimensions of queries and keys
    scale: float  # of q·k
    interleaved: bool = False  # RoPE pairs (2j, 2j + 1) instead of (j, j + half)
    post_norm: Norm | None = None  # on the output, before the residual
    temperature: tuple[float, int] | None = None  # as in `AttentionWeights`
    gated: bool = False  # one gate per head, whose sigmoid multiplies the head's output
    stacked: tuple[LinearPart, LinearPart] | None = None  # `k_up` and `v_up` as one part each, where layouts allow it
    join: Join | None = None  # for `out`, with tensor parallelism
    hyper: MixedWeights | None = None  # see `MixedWeights`
    index: PooledWeights | None = None  # sparse attention, see `token_index`

    @property
    def kept(self) -> tuple[int, int, int]:
        """(KV heads, key dim, value dim) of its pages."""
        return 1, self.rank, self.turned


@dataclass(frozen=True, slots=True)
class PoolWeights:
    """Weights that make entries of compressed attention, or their index keys: see `compressed`."""

    rows: Linear  # values of a token, then the logits of their weights; both twice if entries overlap
    places: Tensor  # float32 [ratio, width, or twice that]: added to the logits of each of an entry's tokens
    norm: Norm  # [width]


@dataclass(frozen=True, slots=True)
class EntryIndexWeights:
    """Weights of the index that chooses entries."""

    q_up: Linear  # query latent -> all index queries
    shares: Linear  # weights of the index heads
    num_heads: int
    top: int  # entries that a query sees


@dataclass(frozen=True, slots=True)
class CompressedWeights:
    """Weights of one layer of compressed attention: see `compressed`."""

    norm: Norm | None
    inputs: Linear  # rows: the query latent, then the values, which are the keys
    q_norm: Norm  # before `q_up`
    q_up: Linear
    head_norm: Norm  # of each query, without a weight
    kv_norm: Norm
    narrow: tuple[Linear, ...]  # per group of heads
    out: Linear
    sinks: Tensor  # float32 [num_heads]
    num_heads: int
    head_dim: int
    scale: float
    window: int
    interleaved: bool
    pools: tuple[PoolWeights, ...] = ()  # of entries, then of index keys; () without entries
    ratio: int = 0  # tokens of an entry
    overlaps: bool = False
    back: Tensor | None = None  # as in `IndexWeights`
    index: EntryIndexWeights | None = None
    entry_view: int = -1  # the view of the entries
    stacked: LinearPart | None = None  # `narrow` as one part, where layouts allow it
    hyper: MixedWeights | None = None  # see `MixedWeights`

    @property
    def kept(self) -> tuple[int, int, int]:
        """(KV heads, key dim, value dim) of the pages of its last tokens: keys are values."""
        return 1, self.head_dim, 0


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Weights of one gated delta rule layer."""

    norm: Norm | None
    qkvz: Linear  # rows: query heads, key heads, value heads, then output gates z
    ba: Linear  # rows: beta (write strength) of all value heads, then a (decay) of all value heads or key channels
    out: Linear
    conv: Tensor  # float32 [channels, width]
    decay: Tensor  # float32 [num_v_heads]: log decay = decay · softplus(a + dt_bias); below 0
    dt_bias: Tensor  # float32 [num_v_heads], or [num_v_heads · k_dim] with a decay per key channel
    out_norm: Norm  # over every value head, before its gate
    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    tiled: bool = False  # value head j uses key head j % num_k_heads
    floor: float | None = None  # below 0: log decay = floor · sigmoid(-decay · (a + dt_bias)) instead
    sigmoid_gate: bool = False  # gates are sigmoid(z), not silu(z)
    beta_scale: float = 1.0  # beta = beta_scale · sigmoid(b); above 1 the state may have negative eigenvalues
    a_up: Linear | None = None  # the last rows of `ba` -> a
    z_up: Linear | None = None  # the last rows of `qkvz` -> z
    join: Join | None = None  # for `out`, with tensor parallelism
    hyper: HyperWeights | MixedWeights | None = None  # see `HyperWeights`
    ngrams: NGramWeights | None = None  # applied before this layer


@dataclass(frozen=True, slots=True)
class ConvWeights:
    """Weights of one gated short convolution layer."""

    norm: Norm | None
    inputs: Linear  # rows: input gates, output gates, then inputs of the convolution
    out: Linear
    conv: Tensor  # float32 [channels, width]
    bias: Tensor | None = None  # float32 [channels]
    post_norm: Norm | None = None  # on the output, before the residual
    join: Join | None = None  # for `out`, with tensor parallelism


@dataclass(frozen=True, slots=True)
class InputWeights:
    """Weights that mix a token's per-layer input into the residual stream: see `segments.layer_input`."""

    gate: Linear
    projection: Linear
    activation: str  # of the gate: silu | gelu_tanh
    norm: Norm  # before the residual
    scale: float = 1.0  # multiplies the result, residual stream included


@dataclass(frozen=True, slots=True)
class MambaWeights:
    """Weights of one Mamba-2 layer."""

    norm: Norm | None
    inputs: Linear  # rows: output gates z, then inputs of the convolution, then one time step per head
    out: Linear
    conv: Tensor  # float32 [channels, width]
    decay: Tensor  # float32 [num_heads], below 0
    skip: Tensor  # float32 [num_heads]: D, the skip connection of each head
    dt_bias: Tensor  # float32 [num_heads]
    out_norm: Norm | None  # over the gated outputs of each group of heads, with unit weight
    gain: Tensor | None  # float32 [num_heads * head_dim], weight of `out_norm`
    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_bias: Tensor | None = None  # float32 [channels]
    steps: tuple[float, float] | None = None  # range that time steps are clamped to
    join: Join | None = None  # for `out`, with tensor parallelism


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """Weights of a feed-forward layer; gated, except with gelu, relu2 and xielu."""

    norm: Norm | None  # None: no input norm
    gate_up: Linear  # rows: gate, then up; only up if there is no gate
    down: Linear
    activation: str  # silu | silu_clamped | gelu_tanh | gelu_erf | gelu | relu2 | xielu
    post_norm: Norm | None = None
    sum_norm: Norm | None = None  # on the residual stream after the output is added
    scale: float = 1.0  # multiplies the result, residual stream included
    input: InputWeights | None = None  # per-layer input, applied after this layer
    join: Join | None = None  # for `down`, with tensor parallelism
    cut: float | None = None  # activation sparsity: threshold in standard deviations, see `segments.thinned`
    curve: tuple[float, float, float, float] | None = None  # for xielu: see `reference.xielu`
    limit: float | None = None  # as in `ExpertsWeights`
    hyper: HyperWeights | MixedWeights | None = None  # see `MixedWeights`


@dataclass(frozen=True, slots=True)
class ApartNorms:
    """Norms of a mixture whose router, shared expert and routed experts each normalize the residual stream."""

    router: Norm
    shared: Norm
    after_shared: Norm
    after_experts: Norm


@dataclass(frozen=True, slots=True)
class ExpertsWeights:
    """Weights of a mixture of experts and its router: see `experts.route`."""

    norm: Norm | None
    router: Linear
    gate_up: tuple[Linear, ...]  # per expert; rows: gate, then up; only up with relu2
    down: tuple[Linear, ...]
    top_k: int
    router_kind: str  # softmax | softmax_topk | sigmoid | sigmoid_topk | sqrt_softplus
    activation: str  # silu | silu_clamped | gelu_tanh | swiglu_oai | relu2
    renormalise: bool = True
    scale: float = 1.0  # multiplies the router's expert weights
    choice_bias: Tensor | None = None  # float32 [num_experts], added to scores for selection only
    groups: int = 1
    group_top_k: int = 1
    shared_gate_up: Linear | None = None  # shared expert, which every token goes through
    shared_down: Linear | None = None
    shared_gate: Linear | None = None  # one row; its sigmoid multiplies the shared expert's output
    shared_scale: float = 1.0  # multiplies the shared expert's output
    limit: float | None = None  # of the routed experts' activation, which clamps gates and ups
    shared_limit: float | None = None  # of the shared expert's
    post_norm: Norm | None = None
    apart: ApartNorms | None = None  # if set, `norm` applies to the routed experts only
    expert_scales: Tensor | None = None  # float32 [num_experts], multiplies each expert's weight
    layer_scale: float = 1.0  # multiplies the result, residual stream included
    input: InputWeights | None = None  # per-layer input, applied after this layer
    host: HostExperts | None = None  # experts computed by the CPU; their entries in gate_up and down are empty
    latent_in: Linear | None = None  # projects rows before the routed experts
    latent_out: Linear | None = None  # projects the experts' sum back
    join: Join | None = None  # for the sum, with tensor parallelism over every expert
    # `gate_up` and `down` of all experts as one part each, if their weights are contiguous
    stacked: tuple[LinearPart, LinearPart] | None = None
    share_inputs: bool = False  # expert weights multiply the inputs instead of the outputs
    table: Tensor | None = None  # int64 [vocab, top_k]: the experts of each token id, in place of the router's choice
    hyper: HyperWeights | MixedWeights | None = None  # see `HyperWeights`


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The final norm and the projection to the vocabulary."""

    norm: Norm | None  # None: no final norm
    linear: Linear
    softcap: float | None = None
    join: Join | None = None  # with a vocabulary split over ranks


# fields that all fused segments support
FUSED_ATTENTION = frozenset(
    (
        *("norm", "qkv", "out", "num_heads", "num_kv_heads", "head_dim", "q_norm", "k_norm", "post_norm"),
        *("scale", "window", "chunked", "softcap", "interleaved", "sinks", "late_norms"),
        *("gate", "head_gates", "softplus_gate", "parallel", "value_dim", "value_scale", "second"),
    )
)
FUSED_LATENT = frozenset(
    (
        *("norm", "qkv", "q_up", "q_norm", "kv_norm", "k_up", "v_up", "out", "rank", "turned", "scale"),
        *("interleaved", "post_norm", "temperature", "gated", "hyper", "index"),
    )
)
FUSED_COMPRESSED = frozenset(
    (
        *("norm", "inputs", "q_norm", "q_up", "head_norm", "kv_norm", "narrow", "out", "sinks", "num_heads"),
        *("head_dim", "scale", "window", "interleaved", "pools", "ratio", "overlaps", "back", "index", "entry_view"),
        *("stacked", "hyper"),
    )
)
FUSED_DELTA = frozenset(
    (
        *("norm", "qkvz", "ba", "out", "conv", "decay", "dt_bias", "out_norm"),
        *("num_k_heads", "num_v_heads", "k_dim", "v_dim", "tiled", "floor", "sigmoid_gate", "beta_scale"),
        *("a_up", "z_up"),
    )
)
FUSED_CONV = frozenset(("norm", "inputs", "out", "conv", "bias", "post_norm"))
FUSED_MAMBA = frozenset(
    (
        *("norm", "inputs", "out", "conv", "conv_bias", "decay", "skip", "dt_bias", "out_norm", "gain"),
        *("num_heads", "head_dim", "num_groups", "state_size", "steps"),
    )
)
FUSED_MLP = frozenset(("norm", "gate_up", "down", "activation", "post_norm", "limit", "hyper"))
FUSED_EXPERTS = frozenset(
    (
        *("norm", "router", "gate_up", "down", "top_k", "router_kind", "activation", "renormalise", "scale"),
        *("choice_bias", "groups", "group_top_k", "share_inputs", "shared_gate_up", "shared_down", "shared_gate"),
        *("limit", "shared_limit", "shared_scale", "post_norm"),
    )
)
FUSED_HEAD = frozenset(("norm", "linear", "softcap"))
FUSED_STREAMS = frozenset(("count", "norm", "down", "up", "rank", "final"))
# fields of blocks with hyper-connections, which the C segments also support
FUSED_HYPER = frozenset(("hyper", "ngrams", "index"))


def has_only(weights: Any, known: frozenset[str], layer_norm: str = "", grouped: bool = False) -> bool:
    """Whether every field outside `known` has its default, so that a fused kernel declines features it lacks.

    layer_norm   the norm that may be a LayerNorm
    grouped      whether norms over groups are supported
    """
    for field in fields(weights):
        value = getattr(weights, field.name)
        if isinstance(value, Norm) and value.bias is not None and field.name != layer_norm:
            return False
        if isinstance(value, Norm) and value.groups > 1 and not grouped:
            return False
        if field.name not in known and value != field.default:
            return False
    return True


def linears_of(weights: Any) -> Iterator[Linear]:
    """Yield the linear layers of a mixer or feed-forward layer in field order; nothing for None."""
    for field in () if weights is None else fields(weights):
        value = getattr(weights, field.name)
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, PARTS):
                yield from linears_of(one)
            if isinstance(one, Linear):
                yield one


def nbytes_of(weights: Any) -> int:
    """Bytes of the prepared weights, norms and other tensors of a mixer, a feed-forward layer or the head."""
    total = 0
    for field in () if weights is None else fields(weights):
        value = getattr(weights, field.name)
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, (*PARTS, ApartNorms)):
                total += nbytes_of(one)
            total += one.nbytes if isinstance(one, (Linear, Tensor)) else 0
            if isinstance(one, Norm):
                total += one.weight.nbytes + (0 if one.bias is None else one.bias.nbytes)
    return total


# weights within those of a block that have linear layers of their own
PARTS = (
    *(InputWeights, StreamWeights, HyperWeights, MixedWeights, NGramWeights, IndexWeights, PooledWeights),
    *(PoolWeights, EntryIndexWeights, MambaWeights),
)
MixerWeights = AttentionWeights | LatentWeights | CompressedWeights | DeltaWeights | ConvWeights | MambaWeights
FeedForwardWeights = MlpWeights | ExpertsWeights
LayerCache = KVPages | CompressedPages | StateSlots | PagesAndSlots | None  # None: layer without a mixer
# a layer's weights, and the index of its view; -1 for recurrent layers and layers without a mixer
LayerCall = tuple[MixerWeights | None, FeedForwardWeights | None, int]
# cos, sin, block_table, slot_mapping: shared by the layers of one cache group in a step
View = tuple[Tensor, Tensor, Tensor, Tensor]
# hidden [num_tokens, hidden], logits float32 [num_tokens, vocab], argmax int64 [num_tokens] if computed (ties go to the
# lower index, -1 if a logit is NaN); valid until the next step
Stepped = tuple[Tensor, Tensor, Tensor | None]


def linears_of_calls(calls: Iterable[LayerCall]) -> Iterator[Linear]:
    """Yield the linear layers of these layers."""
    return (linear for mixer, ffn, _ in calls for weights in (mixer, ffn) for linear in linears_of(weights))


def forget(linears: Iterable[Linear], *, pages_only: bool = False) -> None:
    """Drop the data that fused segments cache with prepared weights: pages of the last call, and layer structs."""
    for part in (part for linear in linears for part in linear.parts):
        let_go = getattr(part.prepared, "forget", None)
        if let_go is not None:
            let_go(pages_only)

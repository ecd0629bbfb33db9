"""Facts of token mixers (attention, recurrent, convolution): each gives its tensors' shapes, cache and work size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True)
class RopeFacts:
    """Rotary position embedding of one kind of layer: inv_freq = theta^(-2j/dim), modified by `scaling`."""

    theta: float
    dim: int  # rotated elements of a head, even; the rest passes through
    # none | linear (positions / factor) | llama3 | yarn | factors (inv_freq / tensor) | longrope (inv_freq / factors)
    # | off (no rotation) | proportional (only the first `turning` pairs rotate)
    scaling: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0  # tokens the model was trained on before scaling (llama3, yarn, longrope), else 0
    attention_factor: float = 1.0  # multiplies cos and sin (yarn, longrope); already computed from the factor
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    # True: pairs (2j, 2j + 1), as in GGUF files of the llama family with permuted Q and K rows; else (j, j + dim/2)
    interleaved: bool = False
    permuted: bool = False  # the file's Q and K rows are permuted relative to Transformers, for `interleaved`
    factors_tensor: str | None = None  # stored tensor [dim/2] that divides inv_freq; no other scaling applies then
    truncate: bool = True  # yarn: whether the ramp's ends are rounded to whole dimensions
    short_factors: tuple[float, ...] = ()  # longrope, [dim/2]: for contexts up to the original one
    long_factors: tuple[float, ...] = ()  # longrope, [dim/2]: for longer contexts
    turning: int = 0  # proportional: number of rotating pairs; the others have an angle of 0


@dataclass(frozen=True)
class TokenIndex:
    """Sparse attention: a query sees the `top` blocks of `ratio` tokens with the highest scores, and the last tokens,
    which do not fill a block. The key of a block is the mean of its tokens' index keys, normed and rotated.
    """

    num_heads: int  # of index queries; there is one key
    dim: int
    ratio: int
    top: int
    fused: bool = True  # queries and keys are stored as one module

    @property
    def kept(self) -> tuple[int, int, int]:
        """(elements per token, elements of a block's key, tokens of a block)."""
        return self.dim, self.dim, self.ratio

    @property
    def reach(self) -> int:
        """The longest sequence in which every query sees all tokens before it."""
        return (self.top + 1) * self.ratio - 1

    @property
    def launches(self) -> int:
        """Kernel launches per token with Triton: product, keys, norm, rotation, scores, the choice, row starts."""
        return 7

    def work(self, rows: int, ctx: int, kv_heads: int) -> int:
        """Bytes held while the last `rows` of `ctx` tokens choose blocks, besides their scores: the keys of all blocks
        twice, in 16 bits and in float32, and the chosen blocks of each KV head, with the sums that compute them.
        """
        if ctx <= self.reach:
            return 0
        return ctx // self.ratio * (6 * self.dim + 16) + rows * (self.top + 1) * (24 + 32 * kv_heads)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The input modules: queries, then keys."""
        names = ("index_qk_proj",) if self.fused else ("q_proj", "k_proj")
        return tuple(f"self_attn.indexer.{name}" for name in names)

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        queries = self.num_heads * self.dim
        rows = (queries + self.dim,) if self.fused else (queries, self.dim)
        return {name: (size, hidden) for name, size in zip(self.inputs, rows, strict=True)}

    def vectors(self) -> dict[str, tuple[int, ...]]:
        return {f"self_attn.indexer.{name}_layernorm.weight": (self.dim,) for name in "qk"}


_POOL_GATE, _SHARES = "self_attn.indexer.index_kpool_compress_gate", "self_attn.indexer.weights_proj"
_ENTRY_SHARES = "self_attn.compressor.indexer.weights_proj"
TOKEN_ROUTERS = (_POOL_GATE, _SHARES, _ENTRY_SHARES)  # small linear modules that choose what a query sees


@dataclass(frozen=True)
class PooledIndex(TokenIndex):
    """The index of a layer of latent attention (DSA). A score is a weighted sum over index heads, with weights that
    depend on the query. The key of a block is a mean of its tokens' keys, weighted per channel; nothing is rotated.
    """

    query_rank: int = 0  # elements of the query latent, from which index queries come

    @property
    def kept(self) -> tuple[int, int, int]:
        """As in `TokenIndex`; a token has a key and the logits of its weights in its block."""
        return 2 * self.dim, self.dim, self.ratio

    @property
    def launches(self) -> int:
        """As in `TokenIndex`: the norm, three products, the norm of keys, the write, scores, the choice."""
        return 10

    @property
    def inputs(self) -> tuple[str, ...]:
        """The modules of keys and of their logits."""
        return "self_attn.indexer.wk", _POOL_GATE

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        shapes = dict.fromkeys(self.inputs, (self.dim, hidden)) | {_SHARES: (self.num_heads, hidden)}
        return shapes | {"self_attn.indexer.wq_b": (self.num_heads * self.dim, self.query_rank)}

    def vectors(self) -> dict[str, tuple[int, ...]]:
        norm = {f"self_attn.indexer.k_norm.{part}": (self.dim,) for part in ("weight", "bias")}
        return norm | {"self_attn.indexer.index_kpool_compress_ape.weight": (self.ratio, self.dim)}


@dataclass(frozen=True)
class Attention:
    """Attention with a KV cache (MHA, MQA, GQA)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeFacts
    scale: float = 1.0
    window: int | None = None  # a query sees this many positions, including its own; None: all
    chunked: bool = False  # positions are split into fixed chunks of `window`, and a query sees only its own chunk
    softcap: float | None = None
    qk_norm: bool = False  # a norm over every query and key head before RoPE
    whole_norms: bool = False  # the norm spans all heads
    bare_norms: bool = False  # the norm has no weight
    late_norms: bool = False  # the norm comes after RoPE
    temperature: tuple[float, int] | None = None  # (b, n): scale queries at position p by 1 + b ln(1 + floor(p / n))
    temperature_offset: int = 0  # added to p
    qkv_bias: bool = False
    o_bias: bool = False
    fused: bool = False  # q, k and v are stored as one module
    sinks: bool = False  # attention sinks: an extra score per head, without a value
    # a head's output is multiplied by the sigmoid of its gate. "queries": the gates follow each query in q; "apart":
    # they are a separate module; "heads": a separate module with one number per head
    gate: Literal["", "queries", "apart", "heads"] = ""
    softplus_gate: bool = False  # softplus(gate) multiplies the output, not sigmoid(gate)
    causal: bool = True  # False: a query also sees later positions; a window then extends equally to both sides
    v_norm: bool = False  # values are also normed, without a weight
    k_is_v: bool = False  # keys and values come from the same projection
    kv_apart: bool = False  # keys and values are also computed without queries
    paired: bool = False  # its input is two vectors side by side
    # the earlier layer whose KV cache it reads; it has none of its own. -1: a layer of the model that it drafts for
    shares_kv_with: int | None = None
    index: TokenIndex | None = None
    value_dim: int = 0  # elements of a value head; the pages fill it up to head_dim with zeros. 0: head_dim
    value_scale: float = 1.0  # of values

    @property
    def kept(self) -> tuple[int, int, int]:
        """What a token stores in the pages: (KV heads, elements of a key, elements of a value)."""
        return self.num_kv_heads, self.head_dim, self.head_dim

    @property
    def beside(self) -> tuple[int, int, int] | None:
        """What the pages also store: (elements of a token, elements of a block, tokens of a block)."""
        return None if self.index is None else self.index.kept

    @property
    def values(self) -> int:
        """Elements of a value head before it is stored."""
        return self.value_dim or self.head_dim

    @property
    def inputs(self) -> tuple[str, ...]:
        """The input modules: queries, gates, keys and values, in this order; with `fused` gates come last."""
        if self.fused:
            return ("self_attn.qkv_proj", *["self_attn.gate_proj"] * (self.gate == "heads"))
        names = "q" if self.shares_kv_with is not None else "qk" if self.k_is_v else "qkv"
        first, *others = (f"self_attn.{name}_proj" for name in names)
        return (first, *["self_attn.gate_proj"] * (self.gate in ("apart", "heads")), *others)

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        rows = {"": [q], "queries": [2 * q], "apart": [q, q], "heads": [q, self.num_heads]}[self.gate]
        values = self.num_kv_heads * self.values
        sizes = (*rows, kv, values)[: len(self.inputs)]
        if self.fused:
            sizes = (q + kv + values, *rows[1:]) if self.gate == "heads" else (sum(rows) + kv + values,)
        width = 2 * hidden if self.paired else hidden
        shapes = {name: (size, width) for name, size in zip(self.inputs, sizes, strict=True)}
        shapes |= {} if self.index is None else self.index.linears(hidden)
        return shapes | {"self_attn.o_proj": (hidden, self.num_heads * self.values)}

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        sizes: dict[str, tuple[int, ...]] = {}
        if self.qk_norm and not self.bare_norms:
            heads = {"q": self.num_heads, "k": self.num_kv_heads}
            normed = "qk" if self.shares_kv_with is None else "q"
            sizes = {
                f"self_attn.{name}_norm.weight": (self.head_dim * (heads[name] if self.whole_norms else 1),)
                for name in normed
            }
        if self.sinks:
            sizes["self_attn.sinks"] = (self.num_heads,)
        if self.index is not None:
            sizes |= self.index.vectors()
        names = self.inputs * self.qkv_bias + ("self_attn.o_proj",) * self.o_bias
        shapes = self.linears(hidden)
        return sizes | {f"{name}.bias": shapes[name][:1] for name in names}

    def work(self, hidden: int) -> int:
        """Values held per token during RoPE, besides the residual stream and its norm."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        kv = kv if self.shares_kv_with is None else 0
        return 2 * q + (q + 2 * kv) + 2 * q + 3 * q * bool(self.gate) + 2 * hidden * self.paired


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (MLA): keys and values of all heads come from one latent vector per token. The cache
    holds only the latent and a rotated piece of the key that all heads share.
    """

    num_heads: int
    rank: int  # elements of a latent
    still_dim: int  # unrotated elements of a query or key; the `rope.dim` rotated ones follow
    value_dim: int
    rope: RopeFacts
    scale: float
    query_rank: int = 0  # elements of the query latent; 0: queries come from the residual stream
    bias: bool = False  # of the modules that compute the latents
    o_bias: bool = False
    # up projections are stored per head; those of keys are transposed: they map unrotated queries to the latent space
    by_head: bool = False
    temperature: tuple[float, int] | None = None  # as in `Attention`
    gated: bool = False  # a head's output is multiplied by the sigmoid of its gate, one number per head
    eps: float = 1e-6  # epsilon of the norms over latents
    index: PooledIndex | None = None
    # options that only `Attention` has
    window: ClassVar[None] = None
    softcap: ClassVar[None] = None
    shares_kv_with: ClassVar[None] = None
    temperature_offset: ClassVar[int] = 0

    @property
    def num_kv_heads(self) -> int:
        return 1

    @property
    def head_dim(self) -> int:
        """Elements of a query in the latent space."""
        return self.rank + self.rope.dim

    @property
    def kept(self) -> tuple[int, int, int]:
        """As in `Attention`, with the latent as the key and the rotated piece as the value."""
        return 1, self.rank, self.rope.dim

    @property
    def beside(self) -> tuple[int, int, int] | None:
        """As in `Attention`."""
        return None if self.index is None else self.index.kept

    @property
    def inputs(self) -> tuple[str, ...]:
        """The input modules: query (or its latent), the KV latent, then the gates."""
        first = "self_attn.q_a_proj" if self.query_rank else "self_attn.q_proj"
        return (first, "self_attn.kv_a_proj_with_mqa", *["self_attn.gate_proj"] * self.gated)

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        heads, queries = self.num_heads, self.num_heads * (self.still_dim + self.rope.dim)
        rows = (self.query_rank or queries, self.head_dim, heads)
        shapes = {name: (size, hidden) for name, size in zip(self.inputs, rows, strict=False)}
        if self.query_rank:
            shapes["self_attn.q_b_proj"] = (queries, self.query_rank)
        if self.by_head:
            for head in range(heads):
                shapes[f"self_attn.k_b_proj.{head}"] = (self.rank, self.still_dim)
                shapes[f"self_attn.v_b_proj.{head}"] = (self.value_dim, self.rank)
        else:
            shapes[EXPANDED] = (heads * (self.still_dim + self.value_dim), self.rank)
        shapes |= {} if self.index is None else self.index.linears(hidden)
        return shapes | {"self_attn.o_proj": (hidden, heads * self.value_dim)}

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        sizes: dict[str, tuple[int, ...]] = {"self_attn.kv_a_layernorm.weight": (self.rank,)}
        sizes |= {} if self.index is None else self.index.vectors()
        if self.query_rank:
            sizes["self_attn.q_a_layernorm.weight"] = (self.query_rank,)
        biased = self.inputs[not self.query_rank : 2] * self.bias + ("self_attn.o_proj",) * self.o_bias
        shapes = self.linears(hidden)
        return sizes | {f"{name}.bias": shapes[name][:1] for name in biased}

    def work(self, hidden: int) -> int:
        """As in `Attention`: queries before and after the latent projection, float32 sums of latents, values."""
        queries = self.num_heads * (self.still_dim + 2 * self.rope.dim + self.rank)
        latents = 2 * self.head_dim + self.query_rank + self.num_heads * (2 * self.rank + self.value_dim)
        return queries + latents + 5 * self.num_heads * self.gated

    def launches(self, ctx: int) -> int:
        """Kernel launches for one token after `ctx` others if PyTorch runs it.

        Each head has two products and a copy; each tile of 128 keys has two sums.
        """
        return 70 + 3 * self.num_heads + 2 * (ctx // 128)


EXPANDED = "self_attn.kv_b_proj"  # projects latents to keys and values; split by head while loading


_COMPRESSOR, _INDEXER = "self_attn.compressor", "self_attn.compressor.indexer"
ENTRY_TOKENS = 16  # most tokens that share a place for an entry in the pages: page sizes are multiples of this


@dataclass(frozen=True)
class Entries:
    """The pages of a layer's compressed entries, each of which stands for `ratio` tokens. They have a block table of
    their own, as they are kept for the whole sequence, and the layer's last tokens are not.
    """

    dim: int  # of an entry, and of its index key if it has one
    ratio: int
    rope: RopeFacts
    num_heads: ClassVar[int] = 1
    num_kv_heads: ClassVar[int] = 1
    head_dim: ClassVar[int] = 0
    scale: ClassVar[float] = 1.0
    kept: ClassVar[tuple[int, int, int]] = (1, 0, 0)
    window: ClassVar[None] = None
    softcap: ClassVar[None] = None
    shares_kv_with: ClassVar[None] = None
    index: ClassVar[None] = None
    causal: ClassVar[bool] = True

    @property
    def beside(self) -> tuple[int, int, int]:
        """As in `Attention`: an entry's place is that of its last token, and of those before it."""
        return 0, self.dim, min(self.ratio, ENTRY_TOKENS)

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        return {}

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        return {}

    def work(self, hidden: int) -> int:
        return 0


@dataclass(frozen=True)
class EntryIndex:
    """The index of compressed sparse attention: a query sees the `top` entries with the highest scores."""

    num_heads: int
    dim: int
    top: int


@dataclass(frozen=True)
class CompressedAttention:
    """Attention of DeepSeek V4: a query sees the last `window` tokens, whose keys are their values, and compressed
    entries of all tokens before it. All heads share them.

    An entry is a mean of its tokens' values, weighted per channel. With `overlaps` its tokens are the `ratio` tokens
    before its own as well, with other values. Without an index a query sees all entries.
    """

    num_heads: int
    head_dim: int
    window: int
    rope: RopeFacts  # of the last elements of a head; what a query has seen is rotated back
    scale: float
    query_rank: int
    groups: int  # of heads, each with a product that reduces its outputs
    out_rank: int  # elements of a group's result
    ratio: int = 0  # tokens of an entry; 0: there are none
    overlaps: bool = False
    entry_index: EntryIndex | None = None
    # options that only `Attention` has
    softcap: ClassVar[None] = None
    shares_kv_with: ClassVar[None] = None
    temperature_offset: ClassVar[int] = 0
    index: ClassVar[None] = None
    num_kv_heads: ClassVar[int] = 1
    causal: ClassVar[bool] = True

    @property
    def kept(self) -> tuple[int, int, int]:
        """As in `Attention`; keys are values."""
        return 1, self.head_dim, 0

    @property
    def widths(self) -> tuple[int, ...]:
        """Elements of an entry, then of its index key."""
        return (self.head_dim,) if self.entry_index is None else (self.head_dim, self.entry_index.dim)

    @property
    def beside(self) -> tuple[int, int, int] | None:
        """As in `Attention`: the values of a token for entries, and the logits of their weights."""
        if not self.ratio:
            return None
        return 2 * (1 + self.overlaps) * sum(self.widths), 0, ENTRY_TOKENS

    @property
    def entries(self) -> Entries | None:
        """The pages of the layer's entries."""
        return Entries(sum(self.widths), self.ratio, self.rope) if self.ratio else None

    @property
    def pools(self) -> tuple[str, ...]:
        """Where the modules are that make entries, then those of index keys."""
        return (_COMPRESSOR, _INDEXER)[: len(self.widths)] if self.ratio else ()

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        inner = self.num_heads * self.head_dim
        shapes = {
            "self_attn.q_a_proj": (self.query_rank, hidden),
            "self_attn.kv_proj": (self.head_dim, hidden),
            "self_attn.q_b_proj": (inner, self.query_rank),
            GROUPED_OUT: (self.groups * self.out_rank, inner // self.groups),
            "self_attn.o_b_proj": (hidden, self.groups * self.out_rank),
        }
        for start, width in zip(self.pools, self.widths, strict=False):
            shapes |= {f"{start}.{kind}_proj": ((1 + self.overlaps) * width, hidden) for kind in ("kv", "gate")}
        index = self.entry_index
        if index is not None:
            shapes[f"{_INDEXER}.q_b_proj"] = (index.num_heads * index.dim, self.query_rank)
            shapes[_ENTRY_SHARES] = (index.num_heads, hidden)
        return shapes

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        sizes: dict[str, tuple[int, ...]] = {"self_attn.sinks": (self.num_heads,)}
        sizes |= {"self_attn.q_a_norm.weight": (self.query_rank,), "self_attn.kv_norm.weight": (self.head_dim,)}
        for start, width in zip(self.pools, self.widths, strict=False):
            sizes[f"{start}.position_bias"] = (self.ratio, (1 + self.overlaps) * width)
            sizes[f"{start}.kv_norm.weight"] = (width,)
        return sizes

    def work(self, hidden: int) -> int:
        """As in `Attention`: queries before and after RoPE, float32 sums, and what is stored of a token."""
        made = self.query_rank + self.head_dim + (0 if self.beside is None else 2 * self.beside[0])
        of_index = 0 if self.entry_index is None else 3 * self.entry_index.num_heads * self.entry_index.dim
        return 10 * self.num_heads * self.head_dim + made + of_index + self.groups * self.out_rank

    @property
    def fused_launches(self) -> int:
        """Kernel launches per token with Triton; the index's: two products, rotation, entries, scores, choice.

        One more with 8-bit pages.
        """
        return 8 + 2 * len(self.pools) + 6 * (self.entry_index is not None)

    @property
    def launches(self) -> int:
        """Kernel launches per token without fused kernels: all of them PyTorch's, and those of products."""
        return 60 + self.groups + 50 * bool(self.ratio) + 40 * (self.entry_index is not None)


GROUPED_OUT = "self_attn.o_a_proj"  # one product per group of heads; split while loading


@dataclass(frozen=True)
class GatedDelta:
    """Gated delta rule: the state is one matrix per value head, and the last inputs of a short convolution."""

    num_k_heads: int
    num_v_heads: int  # a multiple of num_k_heads
    k_dim: int
    v_dim: int
    conv_width: int
    # value head j uses key head j % num_k_heads (llama.cpp's converter order), else j // (num_v_heads / num_k_heads)
    tiled: bool = False
    log_decay: bool = True  # the file stores A_log; False: -exp(A_log)
    grouped: bool = False  # inputs of convolution and gates are one module, grouped by key head
    grouped_rates: bool = False  # so are the learning and decay rates of the value heads
    sigmoid_gate: bool = False  # output gates are sigmoid(z), not silu(z)
    beta_scale: float = 1.0  # learning rates are this times sigmoid(b)
    norm_eps: float | None = None  # epsilon of the norm over the heads' outputs; None: the model's
    channel_decay: ClassVar[bool] = False  # a decay per key channel, not per head

    @property
    def inputs(self) -> tuple[str, ...]:
        """The input modules: queries, keys, values and gates, in this order."""
        return tuple(f"linear_attn.in_proj_{part}" for part in (("qkvz",) if self.grouped else ("qkv", "z")))

    @property
    def rates(self) -> tuple[str, ...]:
        """The modules of the value heads' learning rates (beta), then of their decay rates (alpha)."""
        return tuple(f"linear_attn.in_proj_{part}" for part in (("ba",) if self.grouped_rates else "ba"))

    @property
    def convs(self) -> dict[str, int]:
        """The weights of the convolution, in the order of its channels -> how many of these each has."""
        return {"linear_attn.conv1d.weight": self.channels}

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim

    @property
    def conv_shape(self) -> tuple[int, int]:
        return self.channels, self.conv_width - 1

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.num_v_heads, self.v_dim, self.k_dim

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        values, rates = self.num_v_heads * self.v_dim, self.num_v_heads * (1 + self.grouped_rates)
        rows = (self.channels + values,) if self.grouped else (self.channels, values)
        shapes = {name: (n, hidden) for name, n in zip(self.inputs, rows, strict=True)}
        return shapes | dict.fromkeys(self.rates, (rates, hidden)) | {"linear_attn.out_proj": (hidden, values)}

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        return {name: (rows, self.conv_width) for name, rows in self.convs.items()} | {
            "linear_attn.A_log": (self.num_v_heads,),
            "linear_attn.dt_bias": (self.num_v_heads,),
            "linear_attn.norm.weight": (self.v_dim,),
        }

    def work(self, hidden: int) -> int:
        """Values held per token besides the residual stream and its norm: inputs, the float32 convolution, and the
        heads' outputs with their gates.
        """
        return self.channels + 4 * self.channels + 6 * self.num_v_heads * self.v_dim


@dataclass(frozen=True)
class SplitDelta(GatedDelta):
    """A gated delta rule whose queries, keys, values, gates and rates are stored apart, as are its convolutions."""

    # channels in the stored convolutions of queries, keys and values, if cut elsewhere than between these; (): are not
    cuts: tuple[int, ...] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(f"linear_attn.{part}_proj" for part in "qkvg")

    @property
    def rates(self) -> tuple[str, ...]:
        return "linear_attn.b_proj", "linear_attn.a_proj"

    @property
    def convs(self) -> dict[str, int]:
        keys = self.num_k_heads * self.k_dim
        rows = self.cuts or (keys, keys, self.num_v_heads * self.v_dim)
        return {f"linear_attn.{part}_conv1d.weight": count for part, count in zip("qkv", rows, strict=True)}

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        keys, values = self.num_k_heads * self.k_dim, self.num_v_heads * self.v_dim
        rows = (keys, keys, values, values, self.num_v_heads, self.num_v_heads)
        shapes = {name: (size, hidden) for name, size in zip(self.inputs + self.rates, rows, strict=True)}
        return shapes | {"linear_attn.out_proj": (hidden, values)}


@dataclass(frozen=True)
class KimiDelta(SplitDelta):
    """Kimi Delta Attention (KDA): a gated delta rule with a decay per key channel, and sigmoid output gates.

    Each key head has one value head.
    """

    rank: int = 0  # decays and gates come from two matrices each, with this many values in between; 0: from one
    # a log decay is floor · sigmoid(exp(A_log) · x) and cannot be below this; None: -exp(A_log) · softplus(x)
    floor: float | None = None
    channel_decay: ClassVar[bool] = True

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(f"linear_attn.{part}_proj" for part in ("q", "k", "v", "g_a" if self.rank else "g"))

    @property
    def rates(self) -> tuple[str, ...]:
        """The modules of the heads' learning rates (beta), then of the channels' decays."""
        return "linear_attn.b_proj", "linear_attn.f_a_proj" if self.rank else "linear_attn.f_proj"

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        keys, values = self.num_k_heads * self.k_dim, self.num_v_heads * self.v_dim
        rows = (keys, keys, values, self.rank or values, self.num_v_heads, self.rank or keys)
        shapes = {name: (size, hidden) for name, size in zip(self.inputs + self.rates, rows, strict=True)}
        if self.rank:
            shapes |= {"linear_attn.f_b_proj": (keys, self.rank), "linear_attn.g_b_proj": (values, self.rank)}
        return shapes | {"linear_attn.out_proj": (hidden, values)}

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        return super().vectors(hidden) | {"linear_attn.dt_bias": (self.num_k_heads * self.k_dim,)}

    def work(self, hidden: int) -> int:
        return super().work(hidden) + 5 * self.num_k_heads * self.k_dim + 2 * self.rank


@dataclass(frozen=True)
class ShortConv:
    """A short convolution with gated inputs and outputs; the state is its last inputs."""

    channels: int  # the hidden size
    conv_width: int
    bias: bool = False

    @property
    def conv_shape(self) -> tuple[int, int]:
        return self.channels, self.conv_width - 1

    @property
    def state_shape(self) -> tuple[int, ...]:
        return ()

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        return {"conv.in_proj": (3 * self.channels, hidden), "conv.out_proj": (hidden, self.channels)}

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        sizes: dict[str, tuple[int, ...]] = {"conv.conv.weight": (self.channels, self.conv_width)}
        if self.bias:
            sizes["conv.conv.bias"] = (self.channels,)
            sizes |= {f"{name}.bias": shape[:1] for name, shape in self.linears(hidden).items()}
        return sizes

    def work(self, hidden: int) -> int:
        """Values held per token besides the residual stream and its norm: inputs, the gated input, and its float32
        copies during the convolution.
        """
        return 3 * self.channels + self.channels + 10 * self.channels


@dataclass(frozen=True)
class Mamba2:
    """Mamba-2: the state is one matrix per head, decaying by one factor per token, and a convolution's last inputs."""

    num_heads: int  # a multiple of num_groups
    head_dim: int
    num_groups: int  # groups of heads that share B and C and are normed together
    state_size: int
    conv_width: int
    eps: float  # of the norm over the outputs of a group's heads
    bias: bool = False  # of both projections
    conv_bias: bool = True
    log_decay: bool = True  # the file stores A_log; False: -exp(A_log)
    split_norm: bool = False  # the norm's weight is stored with one row per group
    normed: bool = True  # the gated outputs are normed
    steps: tuple[float, float] | None = None  # limits to which time steps (dt) are clamped

    @property
    def inner(self) -> int:
        """Elements of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: values (x), then B, then C."""
        return self.inner + 2 * self.num_groups * self.state_size

    @property
    def conv_shape(self) -> tuple[int, int]:
        return self.channels, self.conv_width - 1

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.num_heads, self.head_dim, self.state_size

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        rows = self.inner + self.channels + self.num_heads
        return {"mamba.in_proj": (rows, hidden), "mamba.out_proj": (hidden, self.inner)}

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        sizes: dict[str, tuple[int, ...]] = {"mamba.conv1d.weight": (self.channels, self.conv_width)}
        if self.normed:
            by_group = self.num_groups, self.inner // self.num_groups
            sizes["mamba.norm.weight"] = by_group if self.split_norm else (self.inner,)
        sizes |= {f"mamba.{name}": (self.num_heads,) for name in ("A_log", "D", "dt_bias")}
        if self.conv_bias:
            sizes["mamba.conv1d.bias"] = (self.channels,)
        if self.bias:
            sizes |= {f"{name}.bias": shape[:1] for name, shape in self.linears(hidden).items()}
        return sizes

    def work(self, hidden: int) -> int:
        """Values held per token besides the residual stream and its norm: inputs, the float32 convolution, and the
        heads' outputs with their gates.
        """
        return self.inner + self.channels + self.num_heads + 6 * self.channels + 6 * self.inner


# mixers with a state of constant size, independent of the number of tokens: `state_bytes`
Stateful = GatedDelta | ShortConv | Mamba2
# mixers that cache something for every token
Paged = Attention | LatentAttention | CompressedAttention | Entries

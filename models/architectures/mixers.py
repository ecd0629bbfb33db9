"""What mixes tokens in a decoder layer, in numbers; each says its tensors' shapes, what it keeps and its work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True)
class RopeFacts:
    """Rotary positions of one kind of layer: inv_freq = theta^(-2j/dim), changed by `scaling`."""

    theta: float
    dim: int  # rotated elements of a head, even; the rest passes through
    # none | linear (positions / factor) | llama3 | yarn | factors (inv_freq / tensor) | longrope (inv_freq / factors)
    # | off (nothing turns) | proportional (the first `turning` pairs turn)
    scaling: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0  # tokens the model was trained on before scaling (llama3, yarn, longrope), else 0
    attention_factor: float = 1.0  # multiplies cos and sin (yarn, longrope); already worked out from the factor
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    # True: pairs (2j, 2j + 1), GGUF of the llama family, whose Q and K rows are permuted; else (j, j + dim/2)
    interleaved: bool = False
    permuted: bool = False  # the file has rows of Q and K in another order than Transformers, for `interleaved`
    factors_tensor: str | None = None  # stored tensor [dim/2] that divides inv_freq; then no other scaling applies
    truncate: bool = True  # yarn: whether the ramp's ends are rounded to whole dimensions
    short_factors: tuple[float, ...] = ()  # longrope, [dim/2]: for contexts up to the original one
    long_factors: tuple[float, ...] = ()  # for longer ones
    turning: int = 0  # proportional: pairs that turn; the others have an angle of 0


@dataclass(frozen=True)
class Attention:
    """A mixer of tokens that keeps keys and values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeFacts
    scale: float = 1.0
    window: int | None = None  # a query sees this many positions, itself included; None = all
    chunked: bool = False  # the window does not move: a query sees what lies in one of so many positions with it
    softcap: float | None = None
    qk_norm: bool = False  # a norm over every query and key head before RoPE
    whole_norms: bool = False  # that norm is over all heads together
    bare_norms: bool = False  # it has no weight
    late_norms: bool = False  # it is behind RoPE
    temperature: tuple[float, int] | None = None  # (b, n): queries at position p grow by 1 + b ln(1 + floor(p / n))
    temperature_offset: int = 0  # added to p
    qkv_bias: bool = False
    o_bias: bool = False
    fused: bool = False  # q, k and v are stored as one module
    sinks: bool = False  # a score more for every head, without a value
    # what a head gives is multiplied with the sigmoid of its gate. "queries": gates follow each query in q; "apart":
    # they are a module of their own; "heads": of one number for each head
    gate: Literal["", "queries", "apart", "heads"] = ""
    softplus_gate: bool = False  # log(1 + exp(gate)) multiplies instead of the sigmoid
    causal: bool = True  # False: a query sees what is behind it, too, with a window as far as before it
    v_norm: bool = False  # values are normed, too, without a weight
    k_is_v: bool = False  # values are what keys are made of
    # the earlier layer whose keys and values it reads; it makes none itself. -1: one of the model that it drafts for
    shares_kv_with: int | None = None

    @property
    def kept(self) -> tuple[int, int, int]:
        """Heads of what a token leaves in the pages, and the elements of its keys and of its values."""
        return self.num_kv_heads, self.head_dim, self.head_dim

    @property
    def inputs(self) -> tuple[str, ...]:
        """The modules that queries, keys and values come from, in this order."""
        if self.fused:
            return ("self_attn.qkv_proj",)
        names = "q" if self.shares_kv_with is not None else "qk" if self.k_is_v else "qkv"
        first, *others = (f"self_attn.{name}_proj" for name in names)
        return (first, *["self_attn.gate_proj"] * (self.gate in ("apart", "heads")), *others)

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        rows = {"": [q], "queries": [2 * q], "apart": [q, q], "heads": [q, self.num_heads]}[self.gate]
        sizes = (sum(rows) + 2 * kv,) if self.fused else (*rows, kv, kv)[: len(self.inputs)]
        shapes = {name: (size, hidden) for name, size in zip(self.inputs, sizes, strict=True)}
        return shapes | {"self_attn.o_proj": (hidden, q)}

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
        names = self.inputs * self.qkv_bias + ("self_attn.o_proj",) * self.o_bias
        shapes = self.linears(hidden)
        return sizes | {f"{name}.bias": shapes[name][:1] for name in names}

    def work(self, hidden: int) -> int:
        """Values held for a token while queries and keys are turned, beside the residual stream and its norm."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        kv = kv if self.shares_kv_with is None else 0
        return 2 * q + (q + 2 * kv) + 2 * q + 3 * q * bool(self.gate)


@dataclass(frozen=True)
class LatentAttention:
    """A mixer that makes keys and values of all heads from one short vector a token, its latent, and keeps only that,
    beside a piece of the key that turns with the position and that all heads share.
    """

    num_heads: int
    rank: int  # elements of a latent
    still_dim: int  # elements of a query and of a key that do not turn; those that do, `rope.dim`, come behind them
    value_dim: int
    rope: RopeFacts
    scale: float
    query_rank: int = 0  # elements of what queries are made of; 0: they are made of the residual stream
    bias: bool = False  # of the modules that make latents
    o_bias: bool = False
    # keys and values are made by a module a head; those of keys take what does not turn of a query to the latents
    by_head: bool = False
    temperature: tuple[float, int] | None = None  # as of `Attention`
    # what `Attention` may have besides
    window: ClassVar[None] = None
    softcap: ClassVar[None] = None
    shares_kv_with: ClassVar[None] = None
    temperature_offset: ClassVar[int] = 0

    @property
    def num_kv_heads(self) -> int:
        return 1

    @property
    def head_dim(self) -> int:
        """Elements of a query that meets a latent."""
        return self.rank + self.rope.dim

    @property
    def kept(self) -> tuple[int, int, int]:
        """As of `Attention`: the latent stands for a key, what turns for a value."""
        return 1, self.rank, self.rope.dim

    @property
    def inputs(self) -> tuple[str, ...]:
        """The modules that take the residual stream: what queries are made of, and the latent."""
        return ("self_attn.q_a_proj" if self.query_rank else "self_attn.q_proj"), "self_attn.kv_a_proj_with_mqa"

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        heads, queries = self.num_heads, self.num_heads * (self.still_dim + self.rope.dim)
        first, latent = self.inputs
        shapes = {first: (self.query_rank or queries, hidden), latent: (self.head_dim, hidden)}
        if self.query_rank:
            shapes["self_attn.q_b_proj"] = (queries, self.query_rank)
        if self.by_head:
            for head in range(heads):
                shapes[f"self_attn.k_b_proj.{head}"] = (self.rank, self.still_dim)
                shapes[f"self_attn.v_b_proj.{head}"] = (self.value_dim, self.rank)
        else:
            shapes[EXPANDED] = (heads * (self.still_dim + self.value_dim), self.rank)
        return shapes | {"self_attn.o_proj": (hidden, heads * self.value_dim)}

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        sizes: dict[str, tuple[int, ...]] = {"self_attn.kv_a_layernorm.weight": (self.rank,)}
        if self.query_rank:
            sizes["self_attn.q_a_layernorm.weight"] = (self.query_rank,)
        biased = self.inputs[not self.query_rank :] * self.bias + ("self_attn.o_proj",) * self.o_bias
        shapes = self.linears(hidden)
        return sizes | {f"{name}.bias": shapes[name][:1] for name in biased}

    def work(self, hidden: int) -> int:
        """As of `Attention`: queries before and after they meet latents, float32 sums of latents, values."""
        queries = self.num_heads * (self.still_dim + 2 * self.rope.dim + self.rank)
        return queries + 2 * self.head_dim + self.query_rank + self.num_heads * (2 * self.rank + self.value_dim)

    def launches(self, ctx: int) -> int:
        """Kernels that PyTorch starts one by one for a token behind `ctx` others.

        Each head has two products and a copy, every tile of 128 keys two sums.
        """
        return 70 + 3 * self.num_heads + 2 * (ctx // 128)


EXPANDED = "self_attn.kv_b_proj"  # makes keys and values of latents: taken apart by heads while loading


@dataclass(frozen=True)
class GatedDelta:
    """A mixer that keeps a matrix a value head (the gated delta rule) and the last inputs of a short convolution."""

    num_k_heads: int
    num_v_heads: int  # a multiple of num_k_heads
    k_dim: int
    v_dim: int
    conv_width: int
    # value head j goes with key head j % num_k_heads (as llama.cpp's converter orders them), else j // (ratio of them)
    tiled: bool = False
    log_decay: bool = True  # A_log is stored; False: -exp of it
    grouped: bool = False  # what the convolution and the gates take is one module, key head by key head
    grouped_rates: bool = False  # so is how much value heads learn and forget

    @property
    def inputs(self) -> tuple[str, ...]:
        """The modules that queries, keys, values and gates come from, in this order."""
        return tuple(f"linear_attn.in_proj_{part}" for part in (("qkvz",) if self.grouped else ("qkv", "z")))

    @property
    def rates(self) -> tuple[str, ...]:
        """The modules that say how much value heads learn, then how much they forget."""
        return tuple(f"linear_attn.in_proj_{part}" for part in (("ba",) if self.grouped_rates else "ba"))

    @property
    def channels(self) -> int:
        """What goes through the convolution: queries, keys and values."""
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
        return {
            "linear_attn.conv1d.weight": (self.channels, self.conv_width),
            "linear_attn.A_log": (self.num_v_heads,),
            "linear_attn.dt_bias": (self.num_v_heads,),
            "linear_attn.norm.weight": (self.v_dim,),
        }

    def work(self, hidden: int) -> int:
        """Values held for a token beside the residual stream and its norm: what goes in, what the convolution makes of
        it in float32, and the heads' outputs with their gates.
        """
        return self.channels + 4 * self.channels + 6 * self.num_v_heads * self.v_dim


@dataclass(frozen=True)
class ShortConv:
    """A mixer that keeps the last inputs of a short convolution: a gated one, gated once more."""

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
        """Values held for a token beside the residual stream and its norm: what goes in, the gated input, and float32
        copies of it while the convolution sums.
        """
        return 3 * self.channels + self.channels + 10 * self.channels


@dataclass(frozen=True)
class Mamba2:
    """A mixer that keeps a matrix a head, which decays by a number a token, and the last inputs of a convolution."""

    num_heads: int  # a multiple of num_groups
    head_dim: int
    num_groups: int  # heads that share what is written to their states and what these are read by; normed together
    state_size: int
    conv_width: int
    eps: float  # of the norm over what the heads of a group give
    bias: bool = False  # of both projections
    conv_bias: bool = True
    log_decay: bool = True  # A_log is stored; False: -exp of it
    split_norm: bool = False  # the norm's weight is stored a row a group
    steps: tuple[float, float] | None = None  # what the lengths of time steps are cut off to

    @property
    def inner(self) -> int:
        """Values of all heads."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """What goes through the convolution: values, then what is written to states, then what reads them."""
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
        normed = (self.num_groups, self.inner // self.num_groups) if self.split_norm else (self.inner,)
        sizes: dict[str, tuple[int, ...]] = {
            "mamba.conv1d.weight": (self.channels, self.conv_width),
            "mamba.norm.weight": normed,
        }
        sizes |= {f"mamba.{name}": (self.num_heads,) for name in ("A_log", "D", "dt_bias")}
        if self.conv_bias:
            sizes["mamba.conv1d.bias"] = (self.channels,)
        if self.bias:
            sizes |= {f"{name}.bias": shape[:1] for name, shape in self.linears(hidden).items()}
        return sizes

    def work(self, hidden: int) -> int:
        """Values held for a token beside the residual stream and its norm: what goes in, what the convolution makes of
        it in float32, and the heads' outputs with their gates.
        """
        return self.inner + self.channels + self.num_heads + 6 * self.channels + 6 * self.inner


# mixers that keep a state of one size, however many tokens there were: `state_bytes`
Stateful = GatedDelta | ShortConv | Mamba2
Paged = Attention | LatentAttention  # mixers that keep something of every token

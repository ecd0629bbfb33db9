"""Facts of a decoder layer: feed-forward layers, experts, norms and additions; each gives its tensors' shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from .mixers import EXPANDED, TOKEN_ROUTERS, Attention, Mamba2, Paged, Stateful
from .names import CHOICE_BIAS


class Curve(NamedTuple):
    """Numbers of xIELU: see `reference.xielu`."""

    rising: float
    falling: float
    beta: float
    eps: float


@dataclass(frozen=True)
class Dense:
    """A feed-forward layer."""

    inner: int
    act: str = "silu"  # silu | silu_clamped | gelu_tanh | gelu_erf | gelu, relu2 and xielu (without a gate)
    bias: bool = False
    fused: bool = False  # gate and up are stored as one module
    gated: bool = True
    # activation sparsity: subtract from a token's gates their mean plus `cut` standard deviations, then clamp at 0
    cut: float | None = None
    curve: Curve | None = None  # for xielu
    limit: float | None = None  # as in `Experts`

    @property
    def inputs(self) -> tuple[str, ...]:
        """The input modules: gate and up, in this order."""
        if not self.gated:
            return ("mlp.up_proj",)
        return ("mlp.gate_up_proj",) if self.fused else ("mlp.gate_proj", "mlp.up_proj")

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        inner = 2 * self.inner if self.fused else self.inner
        return dict.fromkeys(self.inputs, (inner, hidden)) | {"mlp.down_proj": (hidden, self.inner)}

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.bias": shape[:1] for name, shape in self.linears(hidden).items() if self.bias}

    def work(self, hidden: int) -> int:
        """Values held per token besides the residual stream and its norm: gate, up and their product, or with `cut`
        the float32 temporaries of the threshold; with a curve those of the activation.
        """
        return (3 if self.cut is None and self.curve is None else 6) * self.inner


_EXPERT_ROUTERS = ("mlp.gate", "mlp.shared_expert_gate")
_STREAMS = (
    *("altup.modality_router", "altup.prediction_coefs", "altup.correction_coefs"),
    *("laurel.linear_left", "laurel.linear_right"),
)
_INJECT = tuple(f"{block}_hyper_connection.block_inject_weight" for block in ("attn", "mlp"))
_MIXED = ("hc_attn_fn", "hc_ffn_fn")
# small linear modules that choose or weight others: they keep their stored format when the others are quantized
ROUTERS = _EXPERT_ROUTERS + _STREAMS + _INJECT + _MIXED + TOKEN_ROUTERS
# modules that are not quantized -> why not
STAY_STORED = dict.fromkeys(_EXPERT_ROUTERS, "it chooses experts") | {EXPANDED: "it is split by head while loading"}
STAY_STORED |= dict.fromkeys(_STREAMS + _INJECT + _MIXED, "it is small, and all residual streams depend on it")
STAY_STORED |= dict.fromkeys(TOKEN_ROUTERS, "it chooses what a query sees")


EXPERT_TABLE = "mlp.gate.tid2eid"  # stored tensor: the experts of each token id
# norms before the experts, after the shared expert and after the experts, if `apart` is set
APART_NORMS = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: a router chooses some of many feed-forward layers per token and sums their outputs."""

    num_experts: int
    top_k: int  # experts per token
    inner: int  # of one expert
    # silu | silu_clamped | gelu_tanh | swiglu_oai (gate · sigmoid(1.702 gate) · (up + 1)) | relu2 (without a gate)
    act: str = "silu"
    # routing weights: softmax (over all) | softmax_topk (over the chosen) | sigmoid (per expert)
    # | sigmoid_topk (of the experts chosen by logit) | sqrt_softplus (per expert: the root of softplus(logit))
    router: str = "softmax"
    renormalise: bool = True  # divide the weights of the chosen experts by their sum; softmax_topk already does
    scale: float = 1.0  # factor on the weights after that
    choice_bias: bool = False  # a bias per expert that affects only the choice
    groups: int = 1  # experts are split into this many groups, and `group_top_k` groups are chosen first
    group_top_k: int = 1
    share_inputs: bool = False  # the routing weight multiplies an expert's input instead of its output
    shared_inner: int = 0  # width of the shared expert, which every token uses; 0: none
    shared_gate: bool = False  # the shared expert's output is multiplied by sigmoid(gate · x)
    shared_scale: float = 1.0  # factor on the shared expert's output
    bias: bool = False  # of router and experts
    # clamp gate from above, and up on both sides; the gate before swiglu_oai and silu_clamped, after other activations
    limit: float | None = None
    shared_limit: float | None = None  # the same for the shared expert
    # router, experts and shared expert each have their own input norm, and the outputs of the latter two are normed
    # before they are summed
    apart: bool = False
    scales: str = ""  # output scale per expert, stored with the "router" or with the "experts"; "": none
    gated: bool = True
    shared_fused: bool = False  # gate and up of the shared expert are stored as one module
    latent: int = 0  # size of the latent space in which experts work; 0: they work on the hidden state
    hashed: int = 0  # rows of a stored table with the experts of each token id, which the router only weights; 0: none

    @property
    def inputs(self) -> tuple[str, ...]:
        """The input modules of an expert: gate and up, in this order."""
        return ("gate_proj", "up_proj") if self.gated else ("up_proj",)

    @property
    def shared_inputs(self) -> tuple[str, ...]:
        """The input modules of the shared expert."""
        return ("gate_up_proj",) if self.shared_fused else self.inputs

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        size, shared = self.latent or hidden, self.shared_inner
        shapes = {"mlp.gate": (self.num_experts, hidden)}
        for expert in range(self.num_experts):
            shapes |= {f"mlp.experts.{expert}.{name}": (self.inner, size) for name in self.inputs}
            shapes[f"mlp.experts.{expert}.down_proj"] = (size, self.inner)
        if shared:
            rows = shared * (1 + self.shared_fused)
            shapes |= {f"mlp.shared_expert.{name}": (rows, hidden) for name in self.shared_inputs}
            shapes["mlp.shared_expert.down_proj"] = (hidden, shared)
        if self.latent:
            shapes |= {"mlp.latent_in": (self.latent, hidden), "mlp.latent_out": (hidden, self.latent)}
        if self.shared_gate:
            shapes["mlp.shared_expert_gate"] = (1, hidden)
        return shapes

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        sizes: dict[str, tuple[int, ...]] = {}
        if self.bias:
            of_all = {name: shape for name, shape in self.linears(hidden).items() if "shared" not in name}
            sizes = {f"{name}.bias": shape[:1] for name, shape in of_all.items()}
        if self.choice_bias:
            sizes[CHOICE_BIAS] = (self.num_experts,)
        if self.apart:
            sizes |= {f"{name}.weight": (hidden,) for name in APART_NORMS} | {"mlp.gate.scale": (hidden,)}
        if self.scales == "router":
            sizes["mlp.gate.per_expert_scale"] = (self.num_experts,)
        elif self.scales:
            sizes |= {f"mlp.experts.{expert}.down_proj.scale": () for expert in range(self.num_experts)}
        return sizes

    def work(self, hidden: int) -> int:
        """As in `Dense`: the outputs of every (token, expert) pair, or the gathered rows and result of one expert that
        all tokens chose, if experts run one by one; plus float32 sums.
        """
        taken = self.latent or hidden
        each = taken * (1 + self.share_inputs)
        pairs = self.top_k * (self.inner * (1 if self.gated else 3) + each + 8)  # 8 for their indices
        alone = 3 * max(self.inner, self.shared_inner) + 2 * hidden
        more = 3 * hidden * self.apart
        return 4 * self.num_experts + max(pairs, alone) + 4 * hidden + more

    @property
    def launches(self) -> int:
        """Kernel launches per token if PyTorch runs the experts one by one, with the choice read back to the host."""
        routed = (
            18 + 6 * (self.groups > 1) + 4 * self.router.startswith("sigmoid") + 4 * (self.router == "sqrt_softplus")
        )
        own = 7 + {"swiglu_oai": 8 + 2 * (self.limit is not None), "relu2": 2}.get(self.act, 0)
        return routed + self.top_k * own + 5 * bool(self.shared_inner) + 7 * self.shared_gate + 3 * bool(self.latent)


LOOP_NORM = "loop_norm"  # stands for the final norm where it follows a layer that is not the last one


@dataclass(frozen=True)
class Norms:
    """The norms of a layer, by canonical name below `model.layers.{i}.`.

    `after_*` norm a block's output before it is added, `over_*` the sum afterwards.
    """

    before_mixer: str | None = "input_layernorm"
    before_ffn: str | None = "post_attention_layernorm"
    after_mixer: str | None = None
    after_ffn: str | None = None
    over_mixer: str | None = None
    over_ffn: str | None = None
    after_eps: float | None = None  # epsilon of the `after_*` norms; None: the model's
    centred: bool = False  # LayerNorms instead of RMSNorms
    bias: bool = False  # they have a bias
    groups: int = 1  # values are normed in as many groups, each by itself


@dataclass(frozen=True)
class Entry:
    """Embeddings that an encoder adds to the word embedding before the first layer; a LayerNorm follows."""

    positions: int = 0  # rows of the learned position table; 0: none
    offset: int = 0  # row of the first position
    token_types: int = 0  # rows of the token type table, of which only the first is used; 0: none


@dataclass(frozen=True)
class LayerInput:
    """A per-layer input: an embedding of the token for this layer alone, gated and added at the layer's end."""

    size: int
    act: str = "gelu_tanh"  # of the gate

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        return {"per_layer_input_gate": (self.size, hidden), "per_layer_projection": (hidden, self.size)}

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"post_per_layer_input_norm.weight": (hidden,)}


@dataclass(frozen=True)
class Streams:
    """AltUp: a token has `count` residual streams; a layer computes the first, predicts all and corrects them. LAuReL:
    a low-rank product runs in parallel to attention.
    """

    count: int
    rank: int  # of LAuReL's matrices
    scaled: bool = True  # a stored vector scales the first stream as input of `LayerInput`

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        router, predict, correct, left, right = _STREAMS
        shapes = {router: (self.count, hidden), predict: (self.count**2, self.count), correct: (self.count,) * 2}
        return shapes | {left: (self.rank, hidden), right: (hidden, self.rank)}

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        names = ("altup.correct_output_scale", "altup.router_norm.weight", "laurel.post_laurel_norm.weight")
        return dict.fromkeys(names, (hidden,))

    @property
    def widen(self) -> tuple[str, ...]:
        """The modules that create the other streams before the first layer."""
        return tuple(f"model.altup_projections.{number}" for number in range(self.count - 1))

    @property
    def narrow(self) -> tuple[str, ...]:
        """The modules that project the other streams after the last layer."""
        return tuple(f"model.altup_unembed_projections.{number}" for number in range(self.count - 1))

    def outer(self, hidden: int) -> dict[str, tuple[int, int]]:
        """(N, K) of the modules outside the layers."""
        return dict.fromkeys(self.widen + self.narrow, (hidden, hidden))


@dataclass(frozen=True)
class HyperConnections:
    """A token has `count` residual streams. A block reads a gated mean of the normed streams; its output is added to
    each stream, multiplied by a gain per token.
    """

    count: int
    rank: int  # the gates come from two matrices with this many values in between

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        shapes: dict[str, tuple[int, int]] = {}
        for inject in _INJECT:
            start = inject.rpartition(".")[0]
            shapes |= self._gates(start, hidden) | {inject: (self.count, self.count * hidden)}
        return shapes

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        return {f"{one.rpartition('.')[0]}.hc_norm.weight": (self.count * hidden,) for one in _INJECT}

    def _gates(self, start: str, hidden: int) -> dict[str, tuple[int, int]]:
        wide = self.count * hidden
        return {f"{start}.input_mix_weight_down": (self.rank, wide), f"{start}.input_mix_weight_up": (wide, self.rank)}

    def outer(self, hidden: int) -> dict[str, tuple[int, int]]:
        """(N, K) of the modules that reduce the streams to one vector after the last layer."""
        return self._gates(MIXER, hidden)

    def outer_vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Shapes of their other tensors."""
        return {f"{MIXER}.hc_norm.weight": (self.count * hidden,)}

    @property
    def launches(self) -> int:
        """Kernel launches per block and token with Triton: norm, product, gates, product, mean, and the sum.

        Two more with weights of few bits, whose products convert their inputs first. Without Triton 30 + `count`.
        """
        return 6

    def work(self, hidden: int, width: int) -> int:
        """Bytes per token while a block's input is computed: the streams, normed as well, and three float32 copies."""
        return self.count * hidden * (2 * width + 12)


MIXER, HYPER_HEAD = "model.hyper_connection_mixer", "model.hc_head"


@dataclass(frozen=True)
class MixedConnections:
    """Manifold-constrained hyper-connections (mHC): a block reads a weighted sum of a token's residual streams. After
    it, these are mixed by a matrix whose rows and columns sum to 1, and its output is added with a weight for each.

    The model's output is the mean of the streams, or another weighted sum.
    """

    count: int
    rounds: int  # of normalizing the rows and columns of a matrix
    eps: float
    weighted: bool = False  # the model's output is a weighted sum of the streams, as a block's input is

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        return dict.fromkeys(_MIXED, ((2 + self.count) * self.count, self.count * hidden))

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        sizes = {"base": ((2 + self.count) * self.count,), "scale": (3,)}
        return {f"hc_{block}_{name}.weight": size for block in ("attn", "ffn") for name, size in sizes.items()}

    def outer(self, hidden: int) -> dict[str, tuple[int, int]]:
        """As in `HyperConnections`."""
        return {f"{HYPER_HEAD}_fn": (self.count, self.count * hidden)} if self.weighted else {}

    def outer_vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """As in `HyperConnections`."""
        sizes = {"base": (self.count,), "scale": (1,)}
        return {f"{HYPER_HEAD}_{name}.weight": size for name, size in sizes.items()} if self.weighted else {}

    @property
    def launches(self) -> int:
        """As in `HyperConnections`: partial products, the weights and the sum, then the streams after the block."""
        return 3

    def work(self, hidden: int, width: int) -> int:
        """As in `HyperConnections`: the streams once more, in float32 where PyTorch mixes them."""
        return self.count * hidden * (width + 8)


@dataclass(frozen=True)
class NGrams:
    """N-gram embeddings: table rows for a token and those before it are gated, go through a dilated convolution and are
    added to all residual streams.
    """

    channels: int  # of all streams
    size: int  # elements of the rows of a token together
    order: int  # tokens of the longest n-gram; also the dilation
    conv_width: int

    @property
    def conv_shape(self) -> tuple[int, int]:
        return self.channels, (self.conv_width - 1) * self.order

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The last tokens of a sequence, as id + 1; 0 for none."""
        return (self.order - 1,)

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        return {"ple.key_proj": (self.channels, self.size), "ple.value_proj": (hidden, self.size)}

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        norms = {f"ple.norm_{name}.weight": (self.channels,) for name in ("key", "query", "conv")}
        return norms | {"ple.conv1d.weight": (self.channels, self.conv_width)}

    def work(self, width: int) -> int:
        """Bytes per token while the rows are added: keys, and float32 copies of all streams."""
        return self.channels * (2 * width + 28)


@dataclass(frozen=True)
class NGramTable:
    """The table of `NGrams`, which stays in the file: a token reads a few of its rows.

    The row of head h is offsets[h] + (xor over distances d of multipliers[d] · token d back) mod sizes[h]. The first
    heads hash pairs, the last ones all `order` tokens. At the start of a text and up to `end`, tokens count as `end`.
    """

    shards: tuple[str, ...]  # stored tensors, whose rows follow one another
    rows: int
    dim: int
    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    end: int
    nbytes: int  # stored
    scale: str = ""  # stored tensor with one factor for all FP8 rows; "": none

    @property
    def width(self) -> int:
        """Elements of a token's rows."""
        return self.dim * len(self.sizes)


@dataclass(frozen=True)
class InputTable:
    """The source of `LayerInput`: a per-layer embedding table, plus a projection of the token embedding."""

    rows: int  # 0: the projection alone
    size: int  # of the input of one layer
    num_layers: int
    nbytes: int = 0  # stored bytes of the table; a token reads one row
    pad: int = 0  # the row for tokens without one of their own, such as image tokens

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.size * self.num_layers

    @property
    def values(self) -> int:
        """Elements of the table."""
        return self.rows * self.width

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        table = {"model.embed_tokens_per_layer": (self.rows, self.width)} if self.rows else {}
        return table | {"model.per_layer_model_projection": (self.width, hidden)}

    def vectors(self) -> dict[str, tuple[int, ...]]:
        return {"model.per_layer_projection_norm.weight": (self.size,)}


CLUSTERS = "masked_embedding.token_ordering"  # stored tensor: the token ids, cluster by cluster


@dataclass(frozen=True)
class Assistant:
    """What a small decoder has that drafts tokens for a larger model and reads keys and values of that one.

    Its input is the larger model's embedding of a token beside the hidden state before it; its output becomes the
    hidden state for the next draft.
    """

    hidden: int  # of the larger model
    clusters: int = 0  # of the vocabulary; 0: logits are computed for all tokens
    chosen: int = 0  # clusters whose tokens get a logit

    def picked(self, vocab_size: int) -> int:
        """Tokens of the chosen clusters, whose rows of the head are gathered for every draft."""
        return self.chosen * vocab_size // self.clusters if self.clusters else 0

    def linears(self, own: int) -> dict[str, tuple[int, int]]:
        shapes = {"pre_projection": (own, 2 * self.hidden), "post_projection": (self.hidden, own)}
        return shapes | ({"masked_embedding.centroids": (self.clusters, own)} if self.clusters else {})


@dataclass(frozen=True)
class DFlash:
    """What a DFlash drafter has: a small decoder that fills a block of masked tokens in one pass (block diffusion).

    Each of its layers computes keys and values of earlier tokens from hidden states of the larger model, whose
    embedding and head it uses.
    """

    taps: tuple[int, ...]  # layers of the larger model whose outputs it reads
    block: int  # tokens of a pass: the last known one and masks, which become drafts
    mask: int  # token id of a mask
    causal: tuple[bool, ...]  # of each layer: a token of the block sees only those before it, not the whole block
    hidden: int  # of the larger model
    num_layers: int = 0  # of the larger model; 0: not stated

    @property
    def width(self) -> int:
        """Elements of the hidden states of one token that it reads."""
        return len(self.taps) * self.hidden

    def taps_in(self, num_layers: int) -> tuple[int, ...]:
        """`taps`, or () if a model with so many layers does not fit. (In transformers the last output is normed.)"""
        return self.taps if self.taps[-1] < num_layers - 1 and self.num_layers in (0, num_layers) else ()

    @property
    def fitting(self) -> str:
        """The larger models that fit, in words."""
        return f"{self.num_layers} layers" if self.num_layers else f"more than {self.taps[-1] + 1} layers"

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        return {"fc": (hidden, self.width)}

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"hidden_norm.weight": (hidden,)}


D2T = "d2t"  # stored tensor: the token of each row of a drafter's head, in safetensors less the row's number


@dataclass(frozen=True)
class Eagle3:
    """What an EAGLE-3 drafter has: a decoder that predicts the token after next, as an MTP head does, from the next
    token and a projection of hidden states between the larger model's layers.

    Its first layer attends with two inputs side by side, the token's embedding and the hidden state, each normed.
    """

    hidden: int  # of the larger model
    stated: tuple[int, ...] = ()  # numbers of the layers whose hidden states it reads; (): the usual three
    outputs: bool = False  # they number the layers' outputs, not their inputs
    table: int = 0  # rows of its own embedding, if its hidden size is another; 0: it uses the larger model's
    head: int = 0  # rows of its own head; 0: it uses the larger model's
    mapped: bool = False  # `D2T` says which tokens these rows are
    norm_residual: bool = False  # the residual stream of the first layer begins with the normed hidden state
    norm_joined: bool = False  # the hidden states of a token are normed together before the projection
    norm_each: bool = False  # they are normed one by one
    norm_output: bool = False  # the next hidden state is the normed output

    @property
    def width(self) -> int:
        """As in `DFlash`."""
        return (len(self.stated) or 3) * self.hidden

    def taps_in(self, num_layers: int) -> tuple[int, ...]:
        """The layers whose outputs it reads in a model with so many layers, ascending; () if it does not fit.

        Published files number outputs (SpecForge, below `eagle_config`) or inputs (speculators, llama.cpp); NVIDIA's do
        either below `eagle_config`. The number of layers itself can only be an input's, that of the final norm.
        """
        numbers = self.stated or (2, num_layers // 2, num_layers - 3)
        back = 0 if self.outputs and max(numbers) < num_layers else 1
        taps = tuple(number - back for number in numbers)
        fits = taps == tuple(sorted(set(taps))) and taps[0] >= 0 and taps[-1] < num_layers
        return taps if fits else ()

    @property
    def fitting(self) -> str:
        """The larger models that fit, in words."""
        return f"at least {max(self.stated) if self.stated else 7} layers"

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        shapes = {"fc": (hidden, self.width)}
        shapes |= {"model.embed_tokens": (self.table, hidden)} if self.table else {}
        return shapes | ({"lm_head": (self.head, hidden)} if self.head else {})

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        if self.norm_each:
            return {f"fc_norm.{index}.weight": (self.hidden,) for index in range(self.width // self.hidden)}
        return {"input_norm.weight": (self.width,)} if self.norm_joined else {}


@dataclass(frozen=True)
class Paired:
    """The second norm of a layer whose attention has two inputs side by side."""

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        return {}

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"hidden_norm.weight": (hidden,)}


@dataclass(frozen=True)
class Fusion:
    """The parts of an MTP head around its decoder layer: norms and a projection of two concatenated vectors (the next
    token's embedding and the model's last hidden state), and a final norm.

    With residual streams, the model's streams are normed, each by itself or all as one vector; each is projected, and
    the projected embedding is added to all of them. After the layer they are reduced to one vector as the model's are,
    with matrices of the head's own; a norm follows where the model has one.
    """

    streams: HyperConnections | MixedConnections | None = None

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        if self.streams is None:
            return {"eh_proj": (hidden, 2 * hidden)}
        outer = self.streams.outer(hidden).items()
        return {"e_proj": (hidden, hidden), "h_proj": (hidden, hidden)} | {_below(name): size for name, size in outer}

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        outer = {} if self.streams is None else self.streams.outer_vectors(hidden)
        is_one = isinstance(self.streams, HyperConnections)
        sizes = {"enorm": hidden, "hnorm": self.wide(hidden) if is_one else hidden}
        sizes |= {} if is_one else {"shared_head.norm": hidden}
        return {_below(name): size for name, size in outer.items()} | {f"{n}.weight": (s,) for n, s in sizes.items()}

    def wide(self, hidden: int) -> int:
        """Elements of its hidden state."""
        return hidden if self.streams is None else self.streams.count * hidden


def _below(name: str) -> str:
    """The name of a module of the model that an MTP head has as well, below its layer."""
    return name.removeprefix("model.")


Runs = tuple[tuple[int, float], ...]  # consecutive rows of a module: how many, and their factor


@dataclass(frozen=True)
class LayerFacts:
    """One decoder layer: a token mixer, a feed-forward layer (either may be absent) and the norms around them."""

    mixer: Paged | Stateful | None
    ffn: Dense | Experts | None
    norms: Norms = Norms()
    scaled: bool = False  # a stored scalar multiplies the layer's output
    input: LayerInput | None = None
    parallel: bool = False  # attention and feed-forward layer read the same residual stream, and both are added
    fusion: Fusion | Paired | None = None
    streams: Streams | None = None
    hyper: HyperConnections | MixedConnections | None = None
    ngrams: NGrams | None = None
    second: Mamba2 | None = None  # reads what the mixer, an `Attention`, reads; the outputs of both are added
    factors: tuple[tuple[str, Runs], ...] = ()  # modules whose weights are multiplied while loading

    @property
    def blocks(self) -> tuple[Any, ...]:
        """The existing parts: mixers, feed-forward layer, input, fusion, streams, hyper-connections, n-grams."""
        found = (self.mixer, self.second, self.ffn, self.input, self.fusion, self.streams, self.hyper, self.ngrams)
        return tuple(block for block in found if block is not None)

    @property
    def states(self) -> tuple[Stateful | NGrams, ...]:
        """The parts with a state of constant size."""
        own = tuple(mixer for mixer in self.mixers if isinstance(mixer, Stateful))
        return own if self.ngrams is None else (*own, self.ngrams)

    @property
    def mixers(self) -> tuple[Paged | Stateful, ...]:
        return tuple(mixer for mixer in (self.mixer, self.second) if mixer is not None)

    def mixing(self, hidden: int) -> int:
        """Values held per token while the mixers run, as `work` of each; while the second runs, queries stay alive."""
        first = 0 if self.mixer is None else self.mixer.work(hidden)
        if self.second is None or not isinstance(self.mixer, Attention):
            return first
        return max(first, self.mixer.num_heads * self.mixer.head_dim + self.second.work(hidden))

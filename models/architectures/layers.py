"""What a decoder layer is, in numbers: mixers of tokens, what follows them, norms; each says its tensors' shapes."""

from __future__ import annotations

from dataclasses import dataclass

from .mixers import EXPANDED, Paged, Stateful


@dataclass(frozen=True)
class Dense:
    """A feed-forward layer."""

    inner: int
    act: str = "silu"  # silu | gelu_tanh | gelu_erf | gelu and relu2 (without a gate)
    bias: bool = False
    fused: bool = False  # gate and up are stored as one module
    gated: bool = True
    cut: float | None = (
        None  # of a token's gates so many deviations above their mean are taken off, and none are below 0
    )

    @property
    def inputs(self) -> tuple[str, ...]:
        """The modules that gate and up come from, in this order."""
        if not self.gated:
            return ("mlp.up_proj",)
        return ("mlp.gate_up_proj",) if self.fused else ("mlp.gate_proj", "mlp.up_proj")

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        inner = 2 * self.inner if self.fused else self.inner
        return dict.fromkeys(self.inputs, (inner, hidden)) | {"mlp.down_proj": (hidden, self.inner)}

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.bias": shape[:1] for name, shape in self.linears(hidden).items() if self.bias}

    def work(self, hidden: int) -> int:
        """Values held for a token beside the residual stream and its norm: gate and up beside their product, or beside
        what gates are cut with, float32.
        """
        return (3 if self.cut is None else 6) * self.inner


_CHOOSING = ("mlp.gate", "mlp.shared_expert_gate")
_STREAMS = (
    *("altup.modality_router", "altup.prediction_coefs", "altup.correction_coefs"),
    *("laurel.linear_left", "laurel.linear_right"),
)
# small linear modules that choose or weigh others: they keep their stored numbers whatever the others become
ROUTERS = _CHOOSING + _STREAMS
# modules that are not quantized -> why not
STAY_STORED = dict.fromkeys(_CHOOSING, "it chooses experts") | {EXPANDED: "it is split by head while loading"}
STAY_STORED |= dict.fromkeys(_STREAMS, "it is small, and all residual streams depend on it")


# before the experts, after the shared expert, after the experts: where they are `apart`
APART_NORMS = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")


@dataclass(frozen=True)
class Experts:
    """A mixture: of many feed-forward layers a router chooses some for each token, and sums what they give."""

    num_experts: int
    top_k: int  # experts chosen for a token
    inner: int  # of one expert
    act: str = "silu"  # silu | gelu_tanh | swiglu_oai (gate · sigmoid(1.702 gate) · (up + 1)) | relu2 (without a gate)
    # what an expert counts: softmax (over all) | softmax_topk (over those chosen) | sigmoid (each by itself)
    # | sigmoid_topk (of those chosen by their logits)
    router: str = "softmax"
    renormalise: bool = True  # the shares of those chosen are divided by their sum
    scale: float = 1.0  # then multiplied with this
    choice_bias: bool = False  # a number for each expert that is added for the choice only
    groups: int = 1  # experts lie in so many groups, of which `group_top_k` are chosen first
    group_top_k: int = 1
    share_inputs: bool = False  # what it counts multiplies what it takes, and not what it gives
    shared_inner: int = 0  # of the expert that every token goes through; 0: none
    shared_gate: bool = False  # its output is multiplied with sigmoid(gate · x)
    bias: bool = False  # of router and experts
    limit: float | None = None  # gate is cut off above it, up above and below
    # router, experts and shared expert norm the residual stream each for itself, and what the latter two give is normed
    # before it is summed
    apart: bool = False
    scales: str = ""  # of what each expert gives, stored with the "router" or with the "experts"; "": none
    gated: bool = True
    shared_fused: bool = False  # gate and up of the shared expert are stored as one module
    latent: int = 0  # experts work on so many numbers that the hidden state is projected to, and back; 0: on itself

    @property
    def inputs(self) -> tuple[str, ...]:
        """The modules of an expert that gate and up come from, in this order."""
        return ("gate_proj", "up_proj") if self.gated else ("up_proj",)

    @property
    def shared_inputs(self) -> tuple[str, ...]:
        """The same of the shared one."""
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
            sizes["mlp.gate.e_score_correction_bias"] = (self.num_experts,)
        if self.apart:
            sizes |= {f"{name}.weight": (hidden,) for name in APART_NORMS} | {"mlp.gate.scale": (hidden,)}
        if self.scales == "router":
            sizes["mlp.gate.per_expert_scale"] = (self.num_experts,)
        elif self.scales:
            sizes |= {f"mlp.experts.{expert}.down_proj.scale": () for expert in range(self.num_experts)}
        return sizes

    def work(self, hidden: int) -> int:
        """As of `Dense`: what each pair of a token and an expert gives, or, where experts run one by one, rows gathered
        and their result where all tokens take one; and float32 sums.
        """
        taken = self.latent or hidden
        each = taken * (1 + self.share_inputs)
        pairs = self.top_k * (self.inner * (1 if self.gated else 3) + each + 8)  # and where they lie
        alone = 3 * max(self.inner, self.shared_inner) + 2 * hidden
        more = 3 * hidden * self.apart
        return 4 * self.num_experts + max(pairs, alone) + 4 * hidden + more

    @property
    def launches(self) -> int:
        """Kernels that PyTorch starts one by one for a token where the host learns what is chosen."""
        routed = 18 + 6 * (self.groups > 1) + 4 * self.router.startswith("sigmoid")
        own = 7 + {"swiglu_oai": 8, "relu2": 2}.get(self.act, 0) + 2 * (self.limit is not None)
        return routed + self.top_k * own + 5 * bool(self.shared_inner) + 7 * self.shared_gate + 3 * bool(self.latent)


@dataclass(frozen=True)
class Norms:
    """The RMSNorms of a layer, by canonical name below `model.layers.{i}.`.

    `after_*` norm what is added, `over_*` the sum that it is added to.
    """

    before_mixer: str | None = "input_layernorm"
    before_ffn: str | None = "post_attention_layernorm"
    after_mixer: str | None = None
    after_ffn: str | None = None
    over_mixer: str | None = None
    over_ffn: str | None = None
    after_eps: float | None = None  # of those that norm what is added; None: the model's
    centred: bool = False  # they are LayerNorms: the mean is taken off first
    bias: bool = False  # and a stored bias is added


@dataclass(frozen=True)
class Entry:
    """What is added to a token's row of an encoder before the first layer, where a LayerNorm follows."""

    positions: int = 0  # rows of a table of learned positions; 0: none
    offset: int = 0  # the row of the first position
    token_types: int = 0  # rows of a table, of which the first counts; 0: none


@dataclass(frozen=True)
class LayerInput:
    """What a layer adds at its end: numbers that each token has for this layer alone, let in by a gate."""

    size: int
    act: str = "gelu_tanh"  # of the gate

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        return {"per_layer_input_gate": (self.size, hidden), "per_layer_projection": (hidden, self.size)}

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"post_per_layer_input_norm.weight": (hidden,)}


@dataclass(frozen=True)
class Streams:
    """AltUp: a token has `count` residual streams; a layer computes the first, predicts all and corrects them. LAuReL:
    a product of two narrow matrices goes beside attention.
    """

    count: int
    rank: int  # of LAuReL's matrices
    scaled: bool = True  # a stored vector multiplies the first stream where `LayerInput` reads it

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        router, predict, correct, left, right = _STREAMS
        shapes = {router: (self.count, hidden), predict: (self.count**2, self.count), correct: (self.count,) * 2}
        return shapes | {left: (self.rank, hidden), right: (hidden, self.rank)}

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        names = ("altup.correct_output_scale", "altup.router_norm.weight", "laurel.post_laurel_norm.weight")
        return dict.fromkeys(names, (hidden,))

    @property
    def widen(self) -> tuple[str, ...]:
        """The modules that make the other streams before the first layer."""
        return tuple(f"model.altup_projections.{number}" for number in range(self.count - 1))

    @property
    def narrow(self) -> tuple[str, ...]:
        """The modules that these go through behind the last one."""
        return tuple(f"model.altup_unembed_projections.{number}" for number in range(self.count - 1))

    def outer(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Those outside of the layers."""
        return dict.fromkeys(self.widen + self.narrow, (hidden, hidden))


@dataclass(frozen=True)
class InputTable:
    """Where the numbers of `LayerInput` come from: a second embedding, and a projection of the first."""

    rows: int
    size: int  # of what one layer gets
    num_layers: int
    nbytes: int = 0  # stored, of the embedding: of which a token reads a row
    pad: int = 0  # the row of tokens that have none of their own: those of images

    @property
    def width(self) -> int:
        """Of a row."""
        return self.size * self.num_layers

    @property
    def values(self) -> int:
        """Of the embedding."""
        return self.rows * self.width

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        return {
            "model.embed_tokens_per_layer": (self.rows, self.width),
            "model.per_layer_model_projection": (self.width, hidden),
        }

    def vectors(self) -> dict[str, tuple[int, ...]]:
        return {"model.per_layer_projection_norm.weight": (self.size,)}


@dataclass(frozen=True)
class Fusion:
    """What a head that predicts the token after next (MTP) has around its decoder layer: a projection of two vectors
    side by side, each normed, the next token's embedding and the model's last hidden state; and a last norm of its own.
    """

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        return {"eh_proj": (hidden, 2 * hidden)}

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}


@dataclass(frozen=True)
class LayerFacts:
    """One decoder layer: what mixes tokens, what follows, and the norms around them. Either may be absent."""

    mixer: Paged | Stateful | None
    ffn: Dense | Experts | None
    norms: Norms = Norms()
    scaled: bool = False  # a stored number multiplies what it gives
    input: LayerInput | None = None
    parallel: bool = False  # attention and the feed-forward layer read the same residual stream, and both are added
    fusion: Fusion | None = None
    streams: Streams | None = None

    @property
    def blocks(self) -> tuple[Paged | Stateful | Dense | Experts | LayerInput | Fusion | Streams, ...]:
        """Mixer, feed-forward layer and what is around them: those that are there."""
        found = (self.mixer, self.ffn, self.input, self.fusion, self.streams)
        return tuple(block for block in found if block is not None)

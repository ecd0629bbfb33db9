"""A model's hyper-parameters: `ModelFacts` with one `LayerFacts` per layer, and quantities derived from them.

No torch and no weights. Each family creates these facts; planning, listing and loading use them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from localllm.checkpoint.shards import BLOCK
from localllm.checkpoint.text_modules import Projection

from .layers import (
    LOOP_NORM,
    Assistant,
    DFlash,
    Eagle3,
    Entry,
    Experts,
    Fusion,
    HyperConnections,
    InputTable,
    LayerFacts,
    MixedConnections,
    NGrams,
    NGramTable,
    Streams,
)
from .mixers import EXPANDED, GROUPED_OUT, Attention, CompressedAttention, LatentAttention, Paged, RopeFacts, Stateful
from .vision import ImageFacts

KV_BYTES = {"f32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "int8": 1, "fp8": 1}


@dataclass(frozen=True)
class ModelFacts:
    """One model's hyper-parameters, within the limits of `checkpoint.fields`, and its files' usage metadata."""

    architecture: str  # the family's name: `Architecture.name`
    source_architecture: str  # the name in the file: LlamaForCausalLM, mistral, llama, ...
    name: str
    hidden_size: int
    vocab_size: int  # rows of the embedding
    max_context: int  # tokens
    rms_norm_eps: float
    layers: tuple[LayerFacts, ...]  # equal layers are the same object
    loops: int = 1  # how often the stored layers run; `layers` holds them once for each time
    norm_offset: float = 0.0  # added to every norm weight at load: 1.0 for Gemma's safetensors (GGUF has it baked in)
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    logit_scale: float = 1.0  # multiplies the logits
    tied_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    # temperature, top_k, top_p, min_p, ... that the files recommend
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    has_chat_template: bool = False
    license: str = ""
    stored_format: str = ""  # Q4_1, Q4_K_M, bf16, awq, gptq, nvfp4, fp8, ...
    num_params: int = 0
    weight_bytes: int = 0  # stored bytes of the text model's tensors
    extra_layers: int = 0  # stored after the last layer, for multi-token prediction (MTP)
    # the layer of the first MTP head; None if there is none or it is not used
    predictor: LayerFacts | None = None
    predictor_bytes: int = 0  # stored bytes of the MTP head
    predictor_flaw: str = ""  # why `predictor` is None although the configuration declares an MTP head
    # share of the weights read for one token; below 1 in a mixture of experts, above 1 where layers run several times
    active_share: float = 1.0
    pooling: str = ""  # of embedding models: mean | cls | last; "": the model generates text
    projections: tuple[Projection, ...] = ()  # dense layers applied to pooled vectors
    entry: Entry | None = None
    inputs: InputTable | None = None  # of models with per-layer inputs
    ngrams: NGramTable | None = None  # of models with n-gram embeddings; `num_params` and `weight_bytes` leave it out
    final_norm: bool = True  # whether a norm follows the last layer, of the same kind as in the layers
    final_offset: bool = True  # whether `norm_offset` is also added to the weight of the final norm
    residual_scale: float = 1.0  # the residual stream is divided by this
    embedding_norm: bool = False  # whether embedding rows are normed, without a weight
    assistant: Assistant | None = None  # of models that only draft for a larger one, whose KV cache they read
    # of models that only draft for a larger one, whose hidden states they read
    dflash: DFlash | None = None
    eagle3: Eagle3 | None = None
    drafting: tuple[LayerFacts, ...] = ()  # layers of such a drafter, whose keys and values are in this model's pages
    flaw: str = ""  # what the file lacks, so that answers are worse
    vision: ImageFacts | None = None  # the vision tower; None: the model reads text only
    vision_flaw: str = ""  # why there is none although an mmproj file is next to the model
    decoded_bytes: int = 0  # additional bytes of weights that are decoded to bfloat16 while loading

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def stored_layers(self) -> tuple[LayerFacts, ...]:
        """The layers with weights of their own."""
        return self.layers[: len(self.layers) // self.loops]

    @property
    def only_drafts(self) -> bool:
        """Whether the model cannot run without the larger one that it drafts for."""
        return self.assistant is not None or self.follower is not None

    @property
    def follower(self) -> DFlash | Eagle3 | None:
        """What a drafter has that reads the larger model's hidden states."""
        return self.dflash or self.eagle3

    @property
    def kind(self) -> str:
        """What a model that cannot chat is: an embedding model, a drafter or a base model; "" for one that can."""
        if self.pooling:
            return "embedding model"
        if self.only_drafts:
            return "drafter"
        return "" if self.has_chat_template else "base model"

    @property
    def causal(self) -> bool:
        """Whether attention is causal in every layer; otherwise a text must be processed in one step."""
        return all(getattr(layer.mixer, "causal", True) for layer in self.layers)

    @property
    def embedding_size(self) -> int:
        """Elements of a text embedding."""
        return self.projections[-1].outputs if self.projections else self.hidden_size

    @property
    def streams(self) -> Streams | None:
        """AltUp's residual streams, or None."""
        return self.layers[0].streams

    @property
    def hyper(self) -> HyperConnections | MixedConnections | None:
        """The hyper-connections between residual streams, or None."""
        return self.layers[0].hyper

    @cached_property
    def compresses(self) -> bool:
        return any(isinstance(mixer, CompressedAttention) for mixer in self.attention)

    @cached_property
    def composed(self) -> bool:
        """Whether no kernel runs whole steps: none adds n-gram embeddings or chooses what sparse attention sees."""
        return self.ngrams is not None or self.compresses or bool(self.sparse)

    @cached_property
    def entries(self) -> dict[int, LayerFacts]:
        """Layers with compressed entries -> what stands for the pages of these."""
        kinds = {
            id(layer): LayerFacts(pages, None)
            for layer, _ in self.kinds
            if isinstance(layer.mixer, CompressedAttention) and (pages := layer.mixer.entries) is not None
        }
        return {index: kinds[id(layer)] for index, layer in enumerate(self.layers) if id(layer) in kinds}

    @cached_property
    def keeping_layers(self) -> tuple[LayerFacts, ...]:
        """All that may have a cache: the model's layers, the MTP head's, compressed entries, a drafter's layers."""
        head = () if self.predictor is None else (self.predictor,)
        others = (*head, *self.entries.values(), *self.drafting)
        return (*self.layers, *others) if others else self.layers

    @property
    def head_width(self) -> int:
        """Elements of the hidden state that the MTP head takes."""
        fusion = None if self.predictor is None else self.predictor.fusion
        return fusion.wide(self.hidden_size) if isinstance(fusion, Fusion) else self.hidden_size

    @property
    def first_entries(self) -> int:
        """Where compressed entries begin in `keeping_layers`."""
        return len(self.layers) + (self.predictor is not None)

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The attention window of each layer; None for full attention."""
        return tuple(layer.mixer.window if isinstance(layer.mixer, Paged) else None for layer in self.layers)

    @cached_property
    def attention(self) -> tuple[Paged, ...]:
        """The mixers with a paged cache, in layer order."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, Paged))

    @cached_property
    def sparse(self) -> tuple[Paged, ...]:
        """One of each kind of mixer that has an index: a query sees only what that chooses."""
        return tuple(dict.fromkeys(mixer for mixer in self.attention if mixer.index is not None))

    @cached_property
    def gathers(self) -> bool:
        """Whether a GPU runs some of the attention in PyTorch, which gathers keys and values from the pages."""
        return not self.causal or any(isinstance(mixer, LatentAttention) for mixer in self.attention)

    @cached_property
    def ropes(self) -> tuple[RopeFacts, ...]:
        """The distinct rotations, in layer order."""
        return tuple(dict.fromkeys(mixer.rope for mixer in self.attention))

    # Queried repeatedly while planning, so computed once.

    @cached_property
    def kinds(self) -> tuple[tuple[LayerFacts, int], ...]:
        """The distinct layers with their counts; equal layers are usually the same object."""
        counts = Counter(map(id, self.layers))
        return tuple((layer, counts[key]) for key, layer in {id(layer): layer for layer in self.layers}.items())

    @cached_property
    def work(self) -> tuple[int, int]:
        """Work memory per token in values: the maximum over mixers, and over feed-forward layers."""
        mixers = (layer.mixing(self.hidden_size) for layer, _ in self.kinds)
        ffns = (layer.ffn.work(self.hidden_size) for layer, _ in self.kinds if layer.ffn is not None)
        return max(mixers, default=0), max(ffns, default=0)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of one slot: a sequence's float32 state in all stateful layers, independent of its length."""
        kept = ((part, times) for layer, times in self.kinds for part in layer.states)
        shapes = ((shape, times) for part, times in kept for shape in (part.conv_shape, part.state_shape) if shape)
        return 4 * sum(times * math.prod(shape) for shape, times in shapes)

    @cached_property
    def cache_layers(self) -> tuple[tuple[int, ...], ...]:
        """Layer numbers grouped by cache shape and window: full attention first, then the widest window.

        The MTP head counts as the layer after the last one, and a drafter's layers follow. A drafter that reads hidden
        states has none of its own: its layers are grouped with those of the larger model.
        """
        if self.follower is not None:
            return ()
        found: dict[tuple[Any, ...], list[int]] = {}
        for number, layer in enumerate(self.keeping_layers):
            mixer = layer.mixer
            if isinstance(mixer, Paged) and mixer.shares_kv_with is None:
                found.setdefault((mixer.window, *mixer.kept, mixer.beside), []).append(number)
        groups = sorted(found.items(), key=lambda group: (group[0][0] is not None, -(group[0][0] or 0)))
        return tuple(tuple(layers) for _, layers in groups)

    # Sizes of the largest layer, for display and for planning work memory.

    @cached_property
    def num_heads(self) -> int:
        return max((mixer.num_heads for mixer in self.attention), default=1)

    @cached_property
    def num_kv_heads(self) -> int:
        return max((mixer.num_kv_heads for mixer in self.attention), default=1)

    @cached_property
    def head_dim(self) -> int:
        return max((mixer.head_dim for mixer in self.attention), default=1)

    @cached_property
    def intermediate_size(self) -> int:
        return max((layer.ffn.inner for layer in self.layers if layer.ffn is not None), default=1)


def without_predictor(facts: ModelFacts) -> ModelFacts:
    """The same model without its MTP head."""
    return facts if facts.predictor is None else replace(facts, predictor=None, predictor_bytes=0)


def repeated(
    layer: LayerFacts, windows: Sequence[int | None], local_rope: RopeFacts | None = None
) -> tuple[LayerFacts, ...]:
    """`layer` repeated for each window; windowed layers use `local_rope` if given."""
    mixer, kinds = layer.mixer, {}
    assert isinstance(mixer, Attention)
    for window in set(windows):
        rope = mixer.rope if window is None or local_rope is None else local_rope
        kinds[window] = replace(layer, mixer=replace(mixer, window=window, rope=rope))
    return tuple(kinds[window] for window in windows)


def shared_layers(layers: Sequence[LayerFacts]) -> tuple[LayerFacts, ...]:
    """The layers, with equal ones as the same object."""
    known: dict[LayerFacts, LayerFacts] = {}
    return tuple(known.setdefault(layer, layer) for layer in layers)


def linear_shapes(layer: LayerFacts, hidden: int) -> dict[str, tuple[int, int]]:
    """(N, K) of a layer's linear modules, by canonical name below `model.layers.{i}.`."""
    return {name: shape for block in layer.blocks for name, shape in block.linears(hidden).items()}


def vector_shapes(layer: LayerFacts, hidden: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's other tensors (norms, biases), by canonical name below `model.layers.{i}.`."""
    norms = layer.norms
    names = (norms.before_mixer, norms.before_ffn, norms.after_mixer, norms.after_ffn, norms.over_mixer, norms.over_ffn)
    ends = ("weight", "bias") if norms.bias else ("weight",)
    sizes: dict[str, tuple[int, ...]] = {f"{name}.{end}": (hidden,) for name in names if name for end in ends}
    return sizes | {name: shape for block in layer.blocks for name, shape in block.vectors(hidden).items()}


def count_linear_params(facts: ModelFacts) -> int:
    """Elements of all layers' linear modules."""
    return sum(times * _linear_params(layer, facts.hidden_size) for layer, times in facts.kinds) // facts.loops


@lru_cache(maxsize=1024)  # a list of models is planned a thousand times, and a layer may have a thousand modules
def _linear_params(layer: LayerFacts, hidden: int) -> int:
    return sum(n * k for n, k in linear_shapes(layer, hidden).values())


def idle_experts(facts: ModelFacts) -> dict[str, int]:
    """Modules of each layer's first expert -> how many experts of that layer a token does not use."""
    return {
        f"model.layers.{index}.mlp.experts.0.{name}_proj": layer.ffn.num_experts - layer.ffn.top_k
        for index, layer in enumerate(facts.layers)
        if isinstance(layer.ffn, Experts)
        for name in ("gate", "up", "down")
    }


def expanded_modules(facts: ModelFacts) -> dict[str, tuple[int, int]]:
    """(N, K) of the modules that are split by head or group while loading; quantized ones are decoded for that."""
    found = {}
    for index, layer in enumerate(facts.layers):
        latent = isinstance(layer.mixer, LatentAttention) and not layer.mixer.by_head
        shares = isinstance(layer.mixer, CompressedAttention) and layer.mixer.out_rank % BLOCK
        if latent or shares:  # groups whose rows share a block of scales
            module = EXPANDED if latent else GROUPED_OUT
            found[f"model.layers.{index}.{module}"] = linear_shapes(layer, facts.hidden_size)[module]
    return found


def expert_counts(facts: ModelFacts) -> tuple[int, int]:
    """(experts, experts per token) of the layer with the most experts; (0, 0) if there are none."""
    found = ((layer.ffn.num_experts, layer.ffn.top_k) for layer, _ in facts.kinds if isinstance(layer.ffn, Experts))
    return max(found, default=(0, 0))


def expert_share(facts: ModelFacts) -> float:
    """The share of the stored bytes taken by all experts together."""
    count, top_k = expert_counts(facts)
    return (1 - facts.active_share) * count / (count - top_k) if count > top_k else 0.0


def count_params(facts: ModelFacts) -> int:
    """Count the parameters of the text model; a tied head counts once."""
    hidden = facts.hidden_size
    sizes = (shape for layer in facts.stored_layers for name, shape in vector_shapes(layer, hidden).items()
             if not name.startswith(LOOP_NORM))  # fmt: skip
    vectors = sum(math.prod(shape) for shape in sizes)
    tables = facts.vocab_size * facts.hidden_size * (1 if facts.tied_embeddings else 2)
    own = facts.follower
    if own is not None:
        shapes = (*own.linears(hidden).values(), *own.vectors(hidden).values())
        tables = sum(math.prod(shape) for shape in shapes)
    if facts.inputs is not None:
        tables += sum(n * k for n, k in facts.inputs.linears(hidden).values()) + facts.inputs.size
    if facts.assistant is not None:
        tables += sum(n * k for n, k in facts.assistant.linears(hidden).values())
    if facts.streams is not None:
        tables += sum(n * k for n, k in facts.streams.outer(hidden).values())
    if facts.hyper is not None:
        shapes = (*facts.hyper.outer(hidden).values(), *facts.hyper.outer_vectors(hidden).values())
        tables += sum(math.prod(shape) for shape in shapes)
    return count_linear_params(facts) + vectors + tables + facts.hidden_size * (facts.hyper is None or facts.final_norm)


def kv_bytes_per_token(layers: Iterable[LayerFacts], dtype: str) -> int:
    """KV cache bytes per token in `layers`; 8-bit formats store a float32 scale per head.

    Windowed layers keep only a window's worth of tokens: see `cache_layers`.
    """
    scale, wide = 4 if dtype in ("int8", "fp8") else 0, max(2, KV_BYTES[dtype])
    mixers = (layer.mixer for layer in layers)
    total = 0
    for mixer in (one for one in mixers if isinstance(one, Paged) and one.shares_kv_with is None):
        heads, keys, values = mixer.kept
        total += heads * ((keys + values) * KV_BYTES[dtype] + 2 * scale)
        if mixer.beside is not None:  # index keys and entries are never stored in 8 bits
            token, block, ratio = mixer.beside
            total += wide * (token - -block // ratio)
    return total


def kept_bytes(facts: ModelFacts, dtype: str) -> tuple[int, int]:
    """Cache bytes of a sequence: (per token in full-attention layers, fixed for windows and states)."""
    fixed = facts.state_bytes
    windowed = [(layer, window) for layer, window in zip(facts.layers, facts.windows, strict=True) if window]
    fixed += sum(kv_bytes_per_token([layer], dtype) * window for layer, window in windowed)
    whole = kv_bytes_per_token((*facts.layers, *facts.entries.values()), dtype)
    return whole - kv_bytes_per_token((layer for layer, _ in windowed), dtype), fixed


def layer_views(facts: ModelFacts) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
    """The distinct views (cache group, rotation), and the index of each layer's view; -1 for none."""
    group_of = {layer: index for index, group in enumerate(facts.cache_layers) for layer in group}
    pairs = [
        (group_of[kv_layer(index, layer.mixer)], facts.ropes.index(layer.mixer.rope))
        if isinstance(layer.mixer, Paged)
        else None
        for index, layer in enumerate(facts.layers)
    ]
    of_entries = [
        (group_of[number], facts.ropes.index(layer.mixer.rope))
        for number, layer in enumerate(facts.entries.values(), facts.first_entries)
        if isinstance(layer.mixer, Paged)
    ]
    views = tuple(dict.fromkeys(sorted((*filter(None, pairs), *of_entries))))
    return views, tuple(-1 if pair is None else views.index(pair) for pair in pairs)


def entry_views(facts: ModelFacts) -> dict[int, int]:
    """Layers with compressed entries -> the view of these."""
    group_of = {layer: index for index, group in enumerate(facts.cache_layers) for layer in group}
    views, of_layers = layer_views(facts)
    ropes = {layer: views[of_layers[layer]][1] for layer in facts.entries}
    return {
        layer: views.index((group_of[number], ropes[layer]))
        for number, layer in enumerate(facts.entries, facts.first_entries)
    }


def drafter_views(own: ModelFacts, target: ModelFacts) -> tuple[tuple[tuple[int, RopeFacts], ...], tuple[int, ...]]:
    """As `layer_views`, for a drafter whose layers are kept with those of `target`."""
    group_of = {layer: index for index, group in enumerate(target.cache_layers) for layer in group}
    first = len(target.keeping_layers) - own.num_layers
    pairs = [(group_of[first + index], mixer.rope) for index, mixer in enumerate(own.attention)]
    views = tuple(dict.fromkeys(pairs))
    return views, tuple(map(views.index, pairs))


def kv_layer(index: int, mixer: Paged) -> int:
    """The layer whose KV cache layer `index` reads."""
    return index if mixer.shares_kv_with is None else mixer.shares_kv_with


def read_layers(draft: ModelFacts, target: ModelFacts) -> tuple[int, ...] | None:
    """For each layer of an assistant, the layer of `target` whose keys and values it reads: the last that stores any of
    the same window and shape. None where `target` is not a model that it can draft for.
    """
    if draft.assistant is None or draft.assistant.hidden != target.hidden_size:
        return None
    stored = {
        (layer.mixer.window, *layer.mixer.kept): index
        for index, layer in enumerate(target.layers)
        if isinstance(layer.mixer, Attention) and layer.mixer.shares_kv_with is None
    }
    found = [stored.get((mixer.window, *mixer.kept)) for mixer in draft.attention]
    return None if None in found else tuple(index for index in found if index is not None)


def state_layers(facts: ModelFacts) -> tuple[tuple[tuple[int, ...], Stateful | NGrams], ...]:
    """Layer numbers grouped by the shapes of their states, with one of the parts that keep them."""
    found: dict[object, tuple[list[int], Stateful | NGrams]] = {}
    for index, layer in enumerate(facts.layers):
        for part in layer.states:
            key = isinstance(part, NGrams), part.conv_shape, part.state_shape
            found.setdefault(key, ([], part))[0].append(index)
    return tuple((tuple(layers), part) for layers, part in found.values())

"""What a model is, in numbers: `ModelFacts` with one `LayerFacts` a layer, and what follows from them by arithmetic.

No torch, no weights: plan, listing and loader all decide on these values. The families make them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from localllm.checkpoint.text_modules import Projection

from .layers import Assistant, Entry, Experts, InputTable, LayerFacts, Streams
from .mixers import EXPANDED, Attention, LatentAttention, Paged, RopeFacts, Stateful
from .vision import ImageFacts

KV_BYTES = {"f32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "int8": 1, "fp8": 1}


@dataclass(frozen=True)
class ModelFacts:
    """One model's hyper-parameters, within the limits of `checkpoint.fields`; what its files say about using it."""

    architecture: str  # the family's name: `Architecture.name`
    source_architecture: str  # as the file names it: LlamaForCausalLM, mistral, llama, ...
    name: str
    hidden_size: int
    vocab_size: int  # rows of the embedding
    max_context: int  # tokens
    rms_norm_eps: float
    layers: tuple[LayerFacts, ...]  # equal layers are the same object
    norm_offset: float = 0.0  # added to every norm weight at load: 1.0 for Gemma's safetensors (GGUF has it baked in)
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    logit_scale: float = 1.0  # multiplies the logits
    tied_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    # temperature, top_k, top_p, min_p, as far as the files recommend them
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    has_chat_template: bool = False
    license: str = ""
    stored_format: str = ""  # Q4_1, Q4_K_M, bf16, awq, gptq, nvfp4, fp8, ...
    num_params: int = 0
    weight_bytes: int = 0  # stored bytes of the text model's tensors
    extra_layers: int = 0  # stored behind the others, to predict tokens further ahead (MTP)
    # the first head that does, a layer behind the others; None where there is none, or where it is not used
    predictor: LayerFacts | None = None
    predictor_bytes: int = 0  # stored
    predictor_flaw: str = ""  # why there is none though the configuration states one
    active_share: float = 1.0  # of the weights, what is read for one token: less than all of a mixture of experts
    pooling: str = ""  # how a model that embeds text makes one vector: mean | cls | last; "": it generates text
    projections: tuple[Projection, ...] = ()  # what pooled vectors go through
    entry: Entry | None = None
    inputs: InputTable | None = None  # where layers have inputs of their own
    final_norm: bool = True  # whether a norm follows the last layer: of the kind that the layers have
    final_offset: bool = True  # whether `norm_offset` is added to its weight, too
    embedding_norm: bool = False  # rows of the embedding are normed, without a weight
    assistant: Assistant | None = (
        None  # of a model that can only draft for a larger one, whose keys and values it reads
    )
    vision: ImageFacts | None = None  # what reads images; None: the model reads text only
    vision_flaw: str = ""  # why there is none though an mmproj file lies beside the model
    decoded_bytes: int = 0  # what those of them take on top that are decoded to bfloat16 while loading

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def causal(self) -> bool:
        """Whether no token sees one behind it; else a text is computed in one step."""
        return all(getattr(layer.mixer, "causal", True) for layer in self.layers)

    @property
    def embedding_size(self) -> int:
        """Elements of a text's vector."""
        return self.projections[-1].outputs if self.projections else self.hidden_size

    @property
    def streams(self) -> Streams | None:
        """Where a token has several residual streams."""
        return self.layers[0].streams

    @cached_property
    def keeping_layers(self) -> tuple[LayerFacts, ...]:
        """All that keep something of tokens: the layers, and behind them the one of the head that predicts."""
        return self.layers if self.predictor is None else (*self.layers, self.predictor)

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """Per layer: the positions it sees, None for all."""
        return tuple(layer.mixer.window if isinstance(layer.mixer, Paged) else None for layer in self.layers)

    @cached_property
    def attention(self) -> tuple[Paged, ...]:
        """The mixers that keep something of every token, in the order of the layers."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, Paged))

    @cached_property
    def gathers(self) -> bool:
        """Whether there is attention that only PyTorch computes on a card, which gathers what it reads of the pages."""
        return not self.causal or any(isinstance(mixer, LatentAttention) for mixer in self.attention)

    @cached_property
    def ropes(self) -> tuple[RopeFacts, ...]:
        """The different rotations of the layers, each once, in the order of the layers."""
        return tuple(dict.fromkeys(mixer.rope for mixer in self.attention))

    # What plans ask for again and again: found once.

    @cached_property
    def kinds(self) -> tuple[tuple[LayerFacts, int], ...]:
        """The different layers, and how many there are of each: equal ones are mostly one object."""
        counts = Counter(map(id, self.layers))
        return tuple((layer, counts[key]) for key, layer in {id(layer): layer for layer in self.layers}.items())

    @cached_property
    def work(self) -> tuple[int, int]:
        """Values held for a token while a layer mixes tokens, and in its feed-forward layer, in the largest of each."""
        mixers = (layer.mixer.work(self.hidden_size) for layer, _ in self.kinds if layer.mixer is not None)
        ffns = (layer.ffn.work(self.hidden_size) for layer, _ in self.kinds if layer.ffn is not None)
        return max(mixers, default=0), max(ffns, default=0)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of one slot: what a sequence keeps in all stateful layers, float32, at any length."""
        kept = ((layer.mixer, times) for layer, times in self.kinds if isinstance(layer.mixer, Stateful))
        shapes = ((shape, times) for mixer, times in kept for shape in (mixer.conv_shape, mixer.state_shape) if shape)
        return 4 * sum(times * math.prod(shape) for shape, times in shapes)

    @cached_property
    def cache_layers(self) -> tuple[tuple[int, ...], ...]:
        """Layers that keep the same tokens in the same form, by number: those that see all, then the widest window.

        The head that predicts is the layer behind the last one.
        """
        found: dict[tuple[object, ...], list[int]] = {}
        for index, layer in enumerate(self.keeping_layers):
            mixer = layer.mixer
            if isinstance(mixer, Paged) and mixer.shares_kv_with is None:
                found.setdefault((mixer.window, *mixer.kept), []).append(index)
        windows = self.windows
        groups = sorted(found.values(), key=lambda group: (windows[group[0]] is not None, -(windows[group[0]] or 0)))
        return tuple(map(tuple, groups))

    # Sizes of the largest layer: what is shown, and what work memory is planned for.

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
    """The same model where nobody asks the head that predicts tokens."""
    return facts if facts.predictor is None else replace(facts, predictor=None, predictor_bytes=0)


def repeated(
    layer: LayerFacts, windows: Sequence[int | None], local_rope: RopeFacts | None = None
) -> tuple[LayerFacts, ...]:
    """`layer` once for each window; windowed layers turn by `local_rope` where there is one."""
    mixer, kinds = layer.mixer, {}
    assert isinstance(mixer, Attention)
    for window in set(windows):
        rope = mixer.rope if window is None or local_rope is None else local_rope
        kinds[window] = replace(layer, mixer=replace(mixer, window=window, rope=rope))
    return tuple(kinds[window] for window in windows)


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
    hidden = facts.hidden_size
    return sum(times * n * k for layer, times in facts.kinds for n, k in linear_shapes(layer, hidden).values())


def idle_experts(facts: ModelFacts) -> dict[str, int]:
    """A module of each layer's first expert -> how many such modules of the layer a token does not go through."""
    return {
        f"model.layers.{index}.mlp.experts.0.{name}_proj": layer.ffn.num_experts - layer.ffn.top_k
        for index, layer in enumerate(facts.layers)
        if isinstance(layer.ffn, Experts)
        for name in ("gate", "up", "down")
    }


def expanded_modules(facts: ModelFacts) -> dict[str, tuple[int, int]]:
    """(N, K) of the modules that are taken apart by heads while loading: quantized ones are decoded for it."""
    found = {}
    for index, layer in enumerate(facts.layers):
        if isinstance(layer.mixer, LatentAttention) and not layer.mixer.by_head:
            found[f"model.layers.{index}.{EXPANDED}"] = linear_shapes(layer, facts.hidden_size)[EXPANDED]
    return found


def expert_counts(facts: ModelFacts) -> tuple[int, int]:
    """(experts of a layer, how many of them a token goes through), of the layer that has most; (0, 0) for none."""
    found = ((layer.ffn.num_experts, layer.ffn.top_k) for layer, _ in facts.kinds if isinstance(layer.ffn, Experts))
    return max(found, default=(0, 0))


def expert_share(facts: ModelFacts) -> float:
    """The share of the stored bytes that all experts together take."""
    count, top_k = expert_counts(facts)
    return (1 - facts.active_share) * count / (count - top_k) if count > top_k else 0.0


def count_params(facts: ModelFacts) -> int:
    """Parameters of the text model, a tied head counted once."""
    hidden = facts.hidden_size
    sizes = ((times, shape) for layer, times in facts.kinds for shape in vector_shapes(layer, hidden).values())
    vectors = sum(times * math.prod(shape) for times, shape in sizes)
    tables = facts.vocab_size * facts.hidden_size * (1 if facts.tied_embeddings else 2)
    if facts.inputs is not None:
        tables += sum(n * k for n, k in facts.inputs.linears(hidden).values()) + facts.inputs.size
    if facts.assistant is not None:
        tables += sum(n * k for n, k in facts.assistant.linears(hidden).values())
    if facts.streams is not None:
        tables += sum(n * k for n, k in facts.streams.outer(hidden).values())
    return count_linear_params(facts) + vectors + tables + facts.hidden_size


def kv_bytes_per_token(layers: Iterable[LayerFacts], dtype: str) -> int:
    """KV cache bytes one token takes in `layers`; 8-bit forms keep a float32 scale per head.

    Windowed layers keep only a window's worth of tokens: see `cache_layers`.
    """
    scale = 4 if dtype in ("int8", "fp8") else 0
    mixers = (layer.mixer for layer in layers)
    kept = (mixer.kept for mixer in mixers if isinstance(mixer, Paged) and mixer.shares_kv_with is None)
    return sum(heads * ((keys + values) * KV_BYTES[dtype] + 2 * scale) for heads, keys, values in kept)


def kept_bytes(facts: ModelFacts, dtype: str) -> tuple[int, int]:
    """What a sequence keeps: bytes for each token in layers that see all, and at any length: windows and states."""
    fixed = facts.state_bytes
    windowed = [(layer, window) for layer, window in zip(facts.layers, facts.windows, strict=True) if window]
    fixed += sum(kv_bytes_per_token([layer], dtype) * window for layer, window in windowed)
    return kv_bytes_per_token(facts.layers, dtype) - kv_bytes_per_token((layer for layer, _ in windowed), dtype), fixed


def layer_views(facts: ModelFacts) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
    """What layers see of a step: the different (cache group, rotation), and which of them each layer sees; -1: none."""
    group_of = {layer: index for index, group in enumerate(facts.cache_layers) for layer in group}
    pairs = [
        (group_of[kv_layer(index, layer.mixer)], facts.ropes.index(layer.mixer.rope))
        if isinstance(layer.mixer, Paged)
        else None
        for index, layer in enumerate(facts.layers)
    ]
    views = tuple(dict.fromkeys(sorted(pair for pair in pairs if pair is not None)))
    return views, tuple(-1 if pair is None else views.index(pair) for pair in pairs)


def kv_layer(index: int, mixer: Paged) -> int:
    """The layer that keeps what layer `index` reads."""
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


def state_layers(facts: ModelFacts) -> tuple[tuple[int, ...], ...]:
    """Layers that keep states of the same shapes, by number."""
    found: dict[object, list[int]] = {}
    for index, layer in enumerate(facts.layers):
        if isinstance(layer.mixer, Stateful):
            found.setdefault((layer.mixer.conv_shape, layer.mixer.state_shape), []).append(index)
    return tuple(map(tuple, found.values()))

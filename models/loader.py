"""`load_model`: a checkpoint -> `Model`, one linear layer at a time: read, canonical form, choose, prepare, free.

So memory holds the prepared weights and the tensors of one layer class at any time. Nothing of the model stays in the
mapped files: one that is cut or written over while the model runs would end the process with SIGBUS, or change answers.
What is missing or has the wrong shape is a `BadModelFile`; tensors nobody asked for are ignored, unless they are known
to change the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from localllm.errors import BadModelFile, DeviceError, OutOfMemory, UnsupportedModel
from localllm.kernels import LinearFacts, OpFacts, Weight, choose, reference, rope
from localllm.kernels.embedding import Embedding, is_plain_table, weight_rows
from localllm.kernels.layer_weights import AttentionWeights, HeadWeights, Linear, LinearPart, MlpWeights, Norm
from localllm.kernels.table import implementations, kernel_table
from localllm.kernels.verify.selftest import KernelCrash, SelfTest
from localllm.quant import dequantize, fuse, load_weight, read_dense
from localllm.quant.encode import Target, encode

from .architectures import ModelFacts, OpenModel, RopeFacts
from .architectures.facts import linear_shapes
from .kv_cache import cache_groups
from .kv_scales import read_kv_scales
from .model import DecoderLayer, Model
from .samples import POSITIONS, layer_samples, model_shapes

_CHANGES_RESULT = {  # parts of tensor names -> what they belong to, none of which is implemented
    "lora_": "a LoRA adapter",
    "sinks": "attention sinks",
    "_exps.": "a mixture of experts",
    ".experts.": "a mixture of experts",
    "block_sparse_moe": "a mixture of experts",
    "ssm_": "recurrent layers",
    "altup": "AltUp layers",
    "score.weight": "a classification head",
}


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load: where to, in which precision, under which promises."""

    device: str = "cpu"
    dtype: str = "float32"  # of activations: float32 | bfloat16 | float16
    kv_format: str = "f32"  # of the cache: a key of `kernels.kv_pages.KV_DTYPES`
    page_size: int = 16  # tokens
    exact: bool = False  # the dtype was asked for by name: nothing may be rounded below it
    deterministic: bool = True  # a token's result does not depend on the rest of its batch
    # fp8 | nvfp4: where many rows are multiplied they may be rounded to it, on cards that multiply such numbers
    activations: str = ""
    # a target of `quant.encode`: what linear layers become while loading, however they are stored; "" keeps them
    weights: str = ""
    disabled: frozenset[str] = frozenset()  # keys ("op:name") of implementations that failed their self-test
    selftest: SelfTest | None = None  # tries every kernel that is chosen, on the shapes of this model; None trusts them
    progress: Callable[[int, int], None] | None = None  # called with (stored bytes done, of how many)


def load_model(checkpoint: OpenModel, options: LoadOptions | None = None) -> Model:
    """Load every weight of `checkpoint`, which may be closed afterwards.

    Raises BadModelFile, UnsupportedModel or UnsupportedFormat; OutOfMemory or DeviceError where the GPU gives up.
    """
    options = options or LoadOptions()
    try:
        return Loading(checkpoint, checkpoint.facts, options).model()
    except torch.OutOfMemoryError as error:
        said = str(error).split(". ")[0]
        raise OutOfMemory(
            f"{checkpoint.path.name}: the GPU's memory ran out while loading: {said}",
            "close what else uses the card (`localllm doctor`), or use --device cpu",
        ) from error
    except KernelCrash as error:
        raise DeviceError(str(error), "start again: that kernel is left out from now on") from error


class Loading:
    """One load in progress: what has been read, and which implementations were chosen."""

    def __init__(self, checkpoint: OpenModel, facts: ModelFacts, options: LoadOptions) -> None:
        self.checkpoint = checkpoint
        self.facts = facts
        self.options = options
        self.device = torch.device(options.device)
        self.capability = 0  # of a GPU as 90, 120
        self.shares_memory = False  # whether a GPU has no memory of its own (GB10, Jetson)
        if self.device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(self.device)
            self.capability = major * 10 + minor
            self.shares_memory = bool(getattr(torch.cuda.get_device_properties(self.device), "is_integrated", 0))
        self.selftest = options.selftest
        self.target = Target(options.weights) if options.weights else None
        self.chosen: dict[str, dict[str, None]] = {}
        self.done = 0

    def model(self) -> Model:
        facts, options = self.facts, self.options
        self._refuse_unknown_parts()
        shapes = model_shapes(facts, self.op_facts())
        if self.selftest is None:
            table = kernel_table(shapes.facts, options.disabled)
        else:
            table = self.selftest.table(shapes, options.disabled)
        vocabulary = (facts.vocab_size, facts.hidden_size)
        rows = self.weight("model.embed_tokens", vocabulary)
        if facts.tied_embeddings:
            linear = Linear((self.prepare("lm_head", rows, None),))
        else:
            linear = self.linear("lm_head", ("lm_head",), (vocabulary,))
        embedding = self.embedding(rows, linear if facts.tied_embeddings else None)
        del rows  # where the head's layout serves both, the canonical table goes
        layers = [self.layer(index) for index in range(facts.num_layers)]
        head = HeadWeights(self.norm("model.norm", facts.hidden_size), linear, facts.logit_softcap)
        ropes = [self.rope(rope) for rope in facts.ropes]
        groups = cache_groups(facts, read_kv_scales(self.checkpoint, self.checkpoint.names, facts.num_layers))
        if self.selftest is not None:
            samples = layer_samples(layers, groups)

            def turned(view: int, positions: Tensor) -> tuple[Tensor, Tensor]:
                return ropes[groups[view].rope].rows(positions, POSITIONS)

            table = self.selftest.segments(shapes, table, samples, embedding, head, turned, options.disabled)
            self.selftest.save()
        names = {layer_class: "+".join(found) for layer_class, found in self.chosen.items()}
        return Model(facts, groups, embedding, layers, head, ropes, table, names | dict(table.ops))

    def op_facts(self) -> OpFacts:
        """What decides which implementations of the ops are taken."""
        facts, options = self.facts, self.options
        return OpFacts(
            device=self.device.type,
            capability=self.capability,
            dtype=options.dtype,
            kv_format=options.kv_format,
            num_heads=facts.num_heads,
            num_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
            page_size=options.page_size,
            deterministic=options.deterministic,
        )

    @property
    def disabled(self) -> frozenset[str]:
        """Implementations that failed before, and what the self-test of this load has found so far."""
        return self.options.disabled | (self.selftest.disabled if self.selftest is not None else frozenset())

    def embedding(self, weight: Weight, head: Linear | None) -> Embedding:
        """The embedding; it reads rows of the tied head's prepared weight where that is possible."""
        dtype = getattr(torch, self.options.dtype)
        if head is not None:
            part = head.parts[0]
            shared = part.impl.rows(part.prepared)
            if shared is not None:
                return Embedding(shared, self.facts.embedding_scale, dtype, nbytes=0, prepared=part.prepared)
        weight = self.owned(weight)
        if is_plain_table(weight):  # one launch where there is nothing to scale
            rows = partial(reference.embedding, table=weight.qweight, scale=self.facts.embedding_scale, dtype=dtype)
            return Embedding(rows, 1.0, dtype, nbytes=weight.nbytes)
        return Embedding(weight_rows(weight), self.facts.embedding_scale, dtype, nbytes=weight.nbytes)

    def layer(self, index: int) -> DecoderLayer:
        hidden, facts = self.facts.hidden_size, self.facts.layers[index]
        mixer, ffn, norms = facts.mixer, facts.ffn, facts.norms
        shapes = linear_shapes(facts, hidden)

        def norm(name: str | None, size: int = hidden) -> Norm | None:
            return None if name is None else self.norm(f"model.layers.{index}.{name}", size)

        def linear(layer_class: str, *modules: str) -> Linear:
            names = [f"model.layers.{index}.{module}" for module in modules]
            return self.linear(layer_class, names, [shapes[module] for module in modules])

        attention = AttentionWeights(
            norm=self.norm(f"model.layers.{index}.{norms.before_mixer}", hidden),
            qkv=linear("qkv", *(f"self_attn.{name}_proj" for name in "qkv")),
            out=linear("o", "self_attn.o_proj"),
            num_heads=mixer.num_heads,
            num_kv_heads=mixer.num_kv_heads,
            head_dim=mixer.head_dim,
            scale=mixer.scale,
            q_norm=norm("self_attn.q_norm" if mixer.qk_norm else None, mixer.head_dim),
            k_norm=norm("self_attn.k_norm" if mixer.qk_norm else None, mixer.head_dim),
            post_norm=norm(norms.after_mixer),
            window=mixer.window,
            softcap=mixer.softcap,
            interleaved=mixer.rope.interleaved,
        )
        mlp = MlpWeights(
            norm=self.norm(f"model.layers.{index}.{norms.before_ffn}", hidden),
            gate_up=linear("gate_up", "mlp.gate_proj", "mlp.up_proj"),
            down=linear("down", "mlp.down_proj"),
            activation=ffn.act,
            post_norm=norm(norms.after_ffn),
        )
        return DecoderLayer(attention, mlp)

    def linear(self, layer_class: str, names: Sequence[str], shapes: Sequence[tuple[int, int]]) -> Linear:
        """Read linear modules and prepare them, as one weight if their forms allow it exactly."""
        weights = [self.weight(name, shape) for name, shape in zip(names, shapes, strict=True)]
        biases = [self.bias(name, shape[0]) for name, shape in zip(names, shapes, strict=True)]
        whole = fuse(weights)
        if whole is None:
            parts = zip(weights, biases, strict=True)
            return Linear(tuple(self.prepare(layer_class, weight, bias) for weight, bias in parts))
        bias = None
        if any(b is not None for b in biases):
            pairs = zip(biases, shapes, strict=True)
            bias = torch.cat([torch.zeros(n, device=self.device) if part is None else part for part, (n, _) in pairs])
        return Linear((self.prepare(layer_class, whole, bias),))

    def prepare(self, layer_class: str, weight: Weight, bias: Tensor | None) -> LinearPart:
        """Choose the implementation for a canonical weight and let it repack it."""
        facts = LinearFacts(
            form=weight.form,
            shape=weight.shape,
            group_size=weight.group_size,
            block_type=weight.block_type,
            device=self.device.type,
            capability=self.capability,
            dtype=self.options.dtype,
            exact=self.options.exact,
            deterministic=self.options.deterministic,
            activations=self.options.activations,
        )
        while True:
            impl = choose(implementations("linear"), facts, self.disabled).impl
            # the codes, nearly all of the bytes, are repacked almost always: they are copied only where they were kept
            prepared = self.owned(impl.prepare(self.owned(weight, but="qweight")))
            if self.selftest is None or self.selftest.linear_passed(impl, facts, weight, prepared):
                break
        self.chosen.setdefault(layer_class, {})[impl.name] = None
        return LinearPart(impl, prepared, bias, weight.shape)

    def owned(self, weight: Any, but: str = "") -> Any:
        """A weight, canonical or prepared, with copies of its tensors that are views of the mapped files."""
        if not isinstance(weight, tuple) or not hasattr(weight, "_asdict"):
            return weight
        views = {
            name: part
            for name, part in weight._asdict().items()
            if isinstance(part, Tensor) and name != but and part.device.type == "cpu" and part.layout is torch.strided
        }
        copies = {name: part.clone() for name, part in views.items() if self.checkpoint.maps(part.data_ptr())}
        return weight._replace(**copies) if copies else weight  # type: ignore[attr-defined]

    def weight(self, name: str, shape: tuple[int, int]) -> Weight:
        stored_as = self.checkpoint.names.source(name)
        weight = self.moved(load_weight(self.checkpoint, stored_as, self.checkpoint.formats[stored_as], shape))
        self.count(stored_as + ".")
        if self.shares_memory:  # GPU and host: let the system drop what it keeps of the files that were read
            for tensor in self.checkpoint.tensors:
                if tensor.startswith(stored_as + "."):
                    self.checkpoint.forget(tensor)
        if self.target is None or not name.startswith("model.layers.") or self.target.fits(*shape) is not None:
            return weight
        try:
            return encode(dequantize(weight), self.target)
        except ValueError as error:
            raise BadModelFile(f"{self.checkpoint.path.name}: {stored_as}: {error}") from error

    def moved(self, weight: Weight) -> Weight:
        """The same weight on the device: one module is in host memory at a time."""
        if self.device.type == "cpu":
            return weight
        parts = {name: part.to(self.device) for name, part in weight._asdict().items() if isinstance(part, Tensor)}
        return weight._replace(**parts)

    def bias(self, name: str, size: int) -> Tensor | None:
        """A linear module's bias, float32 [size]; None where there is none, or all are zero (as GPTQ files have it)."""
        stored = f"{self.checkpoint.names.source(name)}.bias"
        bias = self.vector(stored, size) if stored in self.checkpoint.tensors else None
        return bias.to(self.device) if bias is not None and bool(bias.any()) else None

    def norm(self, name: str, size: int) -> Norm:
        """A norm, its weight float32 with the model's offset added."""
        stored = f"{self.checkpoint.names.source(name)}.weight"
        weight = self.vector(stored, size).to(self.device)
        self.count(stored)
        return Norm(weight + self.facts.norm_offset if self.facts.norm_offset else weight, self.facts.rms_norm_eps)

    def vector(self, stored: str, size: int) -> Tensor:
        """A stored vector as float32 [size]."""
        shape = self.checkpoint.tensors[stored].shape
        if shape != (size,):
            raise BadModelFile(f"{self.checkpoint.path.name}: {stored} has shape {list(shape)}, expected [{size}]")
        return read_dense(self.checkpoint, stored).float().contiguous()

    def rope(self, facts: RopeFacts) -> rope.RopeTable:
        """The table of cosines and sines for one kind of layer."""
        inv_freq = rope.inverse_frequencies(facts.theta, facts.dim)
        if facts.factors_tensor is not None:
            inv_freq = inv_freq / self.vector(facts.factors_tensor, facts.dim // 2)
        elif facts.scaling == "linear":
            inv_freq = inv_freq / facts.factor
        elif facts.scaling == "llama3":
            low, high = facts.low_freq_factor, facts.high_freq_factor
            inv_freq = rope.scale_llama3(inv_freq, facts.factor, low, high, facts.original_context)
        elif facts.scaling == "yarn":
            ramp = facts.beta_fast, facts.beta_slow, facts.original_context, facts.truncate
            inv_freq = rope.scale_yarn(inv_freq, facts.theta, facts.factor, *ramp)
        return rope.RopeTable(inv_freq, facts.attention_factor, self.options.device)

    def count(self, prefix: str) -> None:
        if self.options.progress is not None:
            tensors = self.checkpoint.tensors
            self.done += sum(tensors[name].nbytes for name in tensors if name.startswith(prefix))
            self.options.progress(self.done, self.checkpoint.nbytes)

    def _refuse_unknown_parts(self) -> None:
        for name in self.checkpoint.tensors:
            for part, what in _CHANGES_RESULT.items():
                if part in name:
                    raise UnsupportedModel(
                        f"{self.checkpoint.path.name}: {name} belongs to {what}, which cannot be computed",
                        "choose another model (localllm ls, localllm pull)",
                    )

"""`load_model`: a checkpoint -> `Model`. Per linear layer: read, convert to canonical form, choose a kernel, prepare,
free.

Memory therefore holds the prepared weights plus the tensors of one layer class. The model keeps no reference to its
mapped files: truncating or overwriting one while the model runs would kill the process with SIGBUS, or change answers.
A missing tensor or a wrong shape raises `BadModelFile`; unknown tensors are ignored unless they are known to change the
result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from localllm.checkpoint.text_modules import Projection
from localllm.errors import DeviceError, OutOfMemory, UnsupportedModel
from localllm.kernels import OpFacts, Weight, reference
from localllm.kernels.embedding import Embedding, Entry, LayerInputs, is_plain_table, rows_within, weight_rows
from localllm.kernels.layer_weights import HeadWeights, Linear, MlpWeights
from localllm.kernels.registry import SEGMENTS
from localllm.kernels.rope import RopeTable
from localllm.kernels.table import PLAIN, KernelTable, implementations, kernel_table
from localllm.kernels.verify.cases import ModelShapes
from localllm.kernels.verify.selftest import KernelCrash
from localllm.quant import dequantize, load_weight

from .architectures import OpenModel
from .architectures.facts import layer_views, without_predictor
from .architectures.layers import Entry as EntryFacts
from .architectures.layers import InputTable
from .architectures.names import MTP
from .architectures.sharding import Shard, column_unit, shard
from .architectures.vision import GridFacts, ImageFacts, PatchFacts, PooledFacts, RowFacts
from .kv_cache import cache_groups
from .kv_scales import read_kv_scales
from .layers import load_layer
from .model import DecoderLayer, Model
from .ngram_table import open_ngrams
from .parallel import ParallelModel
from .predictor import load_predictor
from .ranks import Gathered, VocabularyRows
from .reader import LoadOptions, Reader
from .samples import POSITIONS, head_sizes, layer_samples, model_shapes
from .vision import load_tower
from .vision_grid import load_grid_tower
from .vision_pooled import AnyTower, load_patches, load_pooled_tower
from .vision_rows import load_row_tower

__all__ = ["LoadOptions", "Loading", "device_failures", "load_model"]

_CHANGES_RESULT = {  # part of a tensor name -> the feature it belongs to; refused if the architecture does not read it
    "lora_": "a LoRA adapter",
    "sinks": "attention sinks",
    "_exps.": "a mixture of experts",
    ".experts.": "a mixture of experts",
    "block_sparse_moe": "a mixture of experts",
    "ssm_": "recurrent layers",
    "altup": "AltUp layers",
    "score.weight": "a classification head",
}


def load_model(checkpoint: OpenModel, options: LoadOptions | None = None) -> Model:
    """Load every weight of `checkpoint`, which may be closed afterwards.

    Raises BadModelFile, UnsupportedModel or UnsupportedFormat, and OutOfMemory or DeviceError for GPU failures.
    """
    options = options or LoadOptions()
    with device_failures(checkpoint):
        facts = checkpoint.facts if options.predictor else without_predictor(checkpoint.facts)
        facts = replace(facts, drafting=options.drafting) if options.drafting else facts
        if options.ranks is None:
            return Loading(checkpoint, Shard(facts), options).model()
        found = shard(facts, options.ranks.share, partial(column_unit, checkpoint))
        return Loading(checkpoint, found, options).model()


@contextmanager
def device_failures(checkpoint: OpenModel) -> Iterator[None]:
    """Turn failures of the GPU while loading into OutOfMemory or DeviceError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        said = str(error).split(". ")[0]
        raise OutOfMemory(
            f"{checkpoint.path.name}: the GPU ran out of memory while loading: {said}",
            "close other programs on the GPU (see `localllm doctor`), or use --device cpu",
        ) from error
    except KernelCrash as error:
        raise DeviceError(str(error), "start again: that kernel is now disabled") from error


class Loading(Reader):
    """One load in progress, from checkpoint to `Model`."""

    def model(self) -> Model:
        facts, ranks = self.facts, self.options.ranks
        self._refuse_unknown_parts()
        shapes = model_shapes(facts, self.op_facts())
        table = self.op_table(shapes)
        embedding, linear = self.tables()
        layers = [load_layer(self, index) for index in range(*self.span)] if facts.loops == 1 else self.looped()
        norm = None
        if facts.final_norm:  # `logit_scale` is folded into its weight
            norm = self.norm("model.norm", facts.hidden_size, has_offset=facts.final_offset)
        norm = norm and replace(norm, weight=norm.weight * facts.logit_scale)
        join = (
            None
            if ranks is None or not self.shard.vocabulary
            else Gathered(ranks, tuple(map(len, self.shard.vocabulary)))
        )
        head = HeadWeights(norm, linear, facts.logit_softcap, join)
        ropes = [self.rope(rope) for rope in facts.ropes]
        groups = cache_groups(facts, read_kv_scales(self.checkpoint, self.checkpoint.names, facts.num_layers))
        if self.selftest is not None and ranks is None:  # fused segments do not support ranks
            seen, views = layer_views(facts)
            table = self.segments(shapes, table, layers, views, [ropes[rope] for _, rope in seen], embedding, head)
        if self.selftest is not None:
            self.selftest.save()
        parts = facts, groups, embedding, layers, head, ropes, table
        model = Model(*parts) if ranks is None else ParallelModel(*parts, ranks=ranks)
        model.kernels = {layer_class: "+".join(found) for layer_class, found in self.chosen.items()} | model.kernels
        if facts.predictor is not None:
            model.predictor = load_predictor(self, facts)
            if model.predictor.final is not None:
                model.keep_streams()
        if facts.ngrams is not None:
            model.ngrams = open_ngrams(self.checkpoint, facts)
        model.projections = [self.projection(one) for one in facts.projections]
        if ranks is not None and ranks.share.rank:
            return model  # only rank 0 reads images
        model.tower = None if facts.vision is None else self.tower(facts.vision)
        return model

    def looped(self) -> list[DecoderLayer]:
        """Load layers that run several times: one set of weights, with another norm where a loop ends."""
        facts = self.facts
        own = [load_layer(self, index) for index in range(len(facts.stored_layers))]
        last = own[-1]
        assert isinstance(last.ffn, MlpWeights)
        whole = replace(last, ffn=replace(last.ffn, sum_norm=None))
        return [whole if layer is last and of_layer.norms.over_ffn is None else layer
                for layer, of_layer in zip(own * facts.loops, facts.layers, strict=True)]  # fmt: skip

    def op_table(self, shapes: ModelShapes) -> KernelTable:
        """The fastest implementations of the ops that pass their self-tests."""
        disabled = self.options.disabled
        if self.selftest is None:
            return kernel_table(shapes.facts, disabled)
        for smaller in head_sizes(self.facts, shapes):  # a kernel that fails here is disabled for all head sizes
            self.selftest.table(smaller, disabled)
        return self.selftest.table(shapes, disabled)

    def composed_table(self, shapes: ModelShapes) -> KernelTable:
        """As `op_table`, without fused segments, for layers on which these are not tested."""
        self.op_table(shapes)
        fused = {impl.key for name in SEGMENTS for impl in implementations(name) if impl not in PLAIN[name]}
        return kernel_table(shapes.facts, self.disabled | fused)

    def segments(
        self,
        shapes: ModelShapes,
        table: KernelTable,
        layers: Sequence[DecoderLayer],
        views: Sequence[int],
        ropes: Sequence[RopeTable],
        embedding: Embedding,
        head: HeadWeights,
    ) -> KernelTable:
        """`table` without the fused segments that fail their self-tests on these layers. `ropes`: of each view."""
        assert self.selftest is not None

        def turned(view: int, positions: Tensor) -> tuple[Tensor, Tensor]:
            return ropes[view].rows(positions, POSITIONS)

        samples = layer_samples(layers, views)
        return self.selftest.segments(shapes, table, samples, embedding, head, turned, self.options.disabled)

    def tower(self, facts: ImageFacts) -> AnyTower:
        """Load the vision tower."""
        if isinstance(facts, GridFacts):
            return load_grid_tower(self, facts)
        if isinstance(facts, RowFacts):
            return load_row_tower(self, facts)
        if isinstance(facts, PooledFacts):
            return load_pooled_tower(self, facts)
        return load_patches(self, facts) if isinstance(facts, PatchFacts) else load_tower(self, facts)

    @property
    def span(self) -> tuple[int, int]:
        """The range of layers in this process."""
        ranks = self.options.ranks
        return (0, self.facts.num_layers) if ranks is None else ranks.span(self.facts.num_layers)

    def tables(self) -> tuple[Embedding, Linear]:
        """Load the embedding and the LM head; with layers split across ranks, only rank 0 has them."""
        facts, ranks = self.facts, self.options.ranks
        if ranks is not None and ranks.share.split == "layers" and ranks.share.rank:
            return Embedding(weight_rows, 1.0, getattr(torch, self.options.dtype), nbytes=0), Linear(())
        own = (
            facts.vocab_size
            if not self.shard.vocabulary or ranks is None
            else len(self.shard.vocabulary[ranks.share.rank])
        )
        vocabulary, table = (own, facts.hidden_size), "model.embed_tokens"
        kept = self.kept("lm_head", table, (table,), (vocabulary,)) if facts.tied_embeddings else None
        rows = self.weight(table, vocabulary) if kept is None else None
        if kept is not None or rows is None:
            linear = Linear(kept or ())
        elif facts.tied_embeddings:
            linear = Linear((self.prepare("lm_head", rows, None, table),))
            self.release((table,))
        else:
            linear = self.linear("lm_head", ("lm_head",), (vocabulary,))
        embedding = self.embedding(rows, linear if facts.tied_embeddings else None)
        if self.shard.vocabulary and ranks is not None:
            first = self.shard.vocabulary[ranks.share.rank].start
            embedding = replace(embedding, rows=VocabularyRows(ranks, embedding.rows, first, own), prepared=None)
        if facts.embedding_norm:
            embedding = replace(embedding, norm_eps=facts.rms_norm_eps, prepared=None)
        if facts.entry is not None:
            embedding = replace(embedding, entry=self.entry(facts.entry))
        if facts.inputs is not None:
            inputs = self.inputs(facts.inputs)
            embedding = replace(embedding, inputs=inputs, nbytes=embedding.nbytes + inputs.nbytes)
        return embedding, linear  # the canonical table is freed if the head's layout serves both

    def op_facts(self) -> OpFacts:
        """The facts by which implementations of the ops are chosen."""
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
            gated=any(getattr(one, "gate", "") for one in facts.attention),
        )

    def embedding(self, weight: Weight | None, head: Linear | None) -> Embedding:
        """Build the embedding. It reads rows of the tied head's prepared weight if that layout allows it, which it
        must if `weight` is None.
        """
        dtype = getattr(torch, self.options.dtype)
        if head is not None:
            part = head.parts[0]
            shared = part.impl.rows(part.prepared)
            if shared is not None:
                return Embedding(shared, self.facts.embedding_scale, dtype, nbytes=0, prepared=part.prepared)
        assert weight is not None
        weight = self.owned(weight)
        if is_plain_table(weight):  # no scales: a single kernel launch
            rows = partial(reference.embedding, table=weight.qweight, scale=self.facts.embedding_scale, dtype=dtype)
            return Embedding(rows, 1.0, dtype, nbytes=weight.nbytes)
        return Embedding(weight_rows(weight), self.facts.embedding_scale, dtype, nbytes=weight.nbytes)

    def entry(self, facts: EntryFacts) -> Entry:
        """Load an encoder's position and token type embeddings, and the norm that follows them."""
        hidden = self.facts.hidden_size
        table = torch.zeros(1, hidden, device=self.device)
        if facts.token_types:
            table = table + self.dense("model.token_type_embeddings", (facts.token_types, hidden))[:1]
        if facts.positions:
            table = table + self.dense("model.position_embeddings", (facts.positions, hidden))[facts.offset :]
        norm = self.norm("model.embedding_norm", hidden)
        assert norm.bias is not None
        return Entry(table, norm.weight, norm.bias, norm.eps)

    def inputs(self, facts: InputTable) -> LayerInputs:
        """Load the per-layer embedding table (if any), of which only rows are read, and the projection of the
        embedding.
        """
        *tables, (projection, other) = facts.linears(self.facts.hidden_size).items()
        linear = self.linear("input_model", (projection,), (other,))
        norm = self.norm("model.per_layer_projection_norm", facts.size)
        held, rows = linear.nbytes + norm.weight.nbytes, None
        for table, shape in tables:
            weight = self.owned(self.weight(table, shape))
            held, rows = held + weight.nbytes, weight_rows(weight)
            rows = rows if facts.rows >= self.facts.vocab_size else rows_within(facts.rows, rows)
        return LayerInputs(rows, linear, norm, getattr(torch, self.options.dtype), held)

    def dense(self, module: str, shape: tuple[int, int]) -> Tensor:
        """Read a table or matrix as float32, by canonical name."""
        return dequantize(self.weight(module, shape)).float()

    def projection(self, facts: Projection) -> tuple[Tensor, Tensor | None, str]:
        """Read a dense layer for pooled vectors: float32 weight and bias, and activation."""
        stored = self.checkpoint.formats[facts.name]
        weight = load_weight(self.checkpoint, facts.name, stored, (facts.outputs, facts.inputs))
        bias = self.vector(f"{facts.name}.bias", facts.outputs).to(self.device).clone() if facts.bias else None
        return dequantize(self.moved(weight, self.device)).float().clone(), bias, facts.activation

    def _refuse_unknown_parts(self) -> None:
        known: set[str] = set()
        spare = set(self.checkpoint.names.beyond(self.checkpoint.tensors, self.facts.num_layers))
        for name in (name for name in self.checkpoint.tensors if name not in spare and f".{MTP}" not in f".{name}"):
            for part, what in _CHANGES_RESULT.items():
                if part not in name:
                    continue
                known = known or self.checkpoint.stored_modules(self.facts)
                if name.rpartition(".")[0] not in known:
                    raise UnsupportedModel(
                        f"{self.checkpoint.path.name}: {name} belongs to {what}, not supported in this architecture",
                        "choose another model (localllm ls, localllm pull)",
                    )

"""Layers of a checkpoint -> `DecoderLayer`: one function per kind of mixer and of feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from localllm.errors import UnsupportedFormat
from localllm.kernels import Weight
from localllm.kernels.experts import Stack
from localllm.kernels.layer_weights import (
    ApartNorms,
    AttentionWeights,
    CompressedWeights,
    ConvWeights,
    DeltaWeights,
    EntryIndexWeights,
    ExpertsWeights,
    HyperWeights,
    IndexWeights,
    InputWeights,
    Join,
    LatentWeights,
    Linear,
    MambaWeights,
    MixedWeights,
    MlpWeights,
    Module,
    NGramWeights,
    Norm,
    PooledWeights,
    PoolWeights,
    StreamWeights,
)
from localllm.quant import dequantize
from localllm.quant.cut import rows_of

from .architectures.facts import entry_views, linear_shapes, vector_shapes
from .architectures.layers import (
    APART_NORMS,
    EXPERT_TABLE,
    HYPER_HEAD,
    MIXER,
    Dense,
    Experts,
    HyperConnections,
    MixedConnections,
    Norms,
)
from .architectures.mixers import (
    EXPANDED,
    GROUPED_OUT,
    Attention,
    CompressedAttention,
    GatedDelta,
    KimiDelta,
    LatentAttention,
    Mamba2,
    PooledIndex,
    RopeFacts,
    ShortConv,
    SplitDelta,
    TokenIndex,
)
from .model import DecoderLayer
from .placement import expert_of, split
from .reader import Reader

INDEX_EPS = 1e-6  # of the LayerNorm over index keys, in no configuration


class LayerReader:
    """Access to one layer's tensors by canonical name below `model.layers.{i}.`."""

    def __init__(self, reader: Reader, index: int) -> None:
        self.reader = reader
        self.index = index
        self.hidden = reader.facts.hidden_size
        self.facts = reader.facts.keeping_layers[index]
        self.norms: Norms = self.facts.norms
        self.start = f"model.layers.{index}."
        self.host = next(iter(reader.options.host_experts[index : index + 1]), frozenset())  # empty for the MTP layer
        self._shapes = linear_shapes(self.facts, self.hidden)
        self._sizes = vector_shapes(self.facts, self.hidden)

    def norm(self, name: str, size: int = 0) -> Norm:
        """Read a norm; `size` defaults to the hidden size."""
        return self.reader.norm(self.start + name, size or self.hidden)

    def plain_norm(self, size: int) -> Norm:
        """A norm without a weight."""
        return Norm(torch.ones(size, device=self.reader.device), self.reader.facts.rms_norm_eps)

    def scale(self, *, last: bool) -> float:
        """Read the factor on the layer's output. Some files store it without the `.weight` suffix.

        last   whether the caller is the per-layer input; the scale belongs to the layer's last block, the others get 1
        """
        if not self.facts.scaled or last is (self.facts.input is None):
            return 1.0
        checkpoint = self.reader.checkpoint
        name = checkpoint.names.source(f"{self.start}layer_scalar")
        return float(self.reader.vector(name if name in checkpoint.tensors else f"{name}.weight", 1))

    def input(self) -> InputWeights | None:
        """Read the weights of the layer's per-layer input, if it has one."""
        facts = self.facts.input
        if facts is None:
            return None
        return InputWeights(
            gate=self.linear("input_gate", "per_layer_input_gate"),
            projection=self.linear("input_projection", "per_layer_projection"),
            activation=facts.act,
            norm=self.norm("post_per_layer_input_norm"),
            scale=self.scale(last=True),
        )

    def streams(self) -> StreamWeights | None:
        """Read the AltUp and LAuReL weights of the layer, if tokens have several residual streams."""
        facts, reader, last = self.facts.streams, self.reader, self.index == self.reader.facts.num_layers - 1
        if facts is None:
            return None
        scale = self.vector("altup.correct_output_scale")
        square = (self.hidden, self.hidden)
        widen = None if self.index else reader.linear("streams", facts.widen, [square] * len(facts.widen))
        return StreamWeights(
            count=facts.count,
            router=self.linear("router", "altup.modality_router"),
            router_norm=self.norm("altup.router_norm"),
            predict=self.matrix("altup.prediction_coefs"),
            correct=self.matrix("altup.correction_coefs"),
            scale=scale if facts.scaled else None,
            left=self.linear("laurel", "laurel.linear_left"),
            right=self.linear("laurel", "laurel.linear_right"),
            laurel_norm=self.norm("laurel.post_laurel_norm"),
            widen=widen,
            narrow=tuple(reader.linear("streams", (name,), [square]) for name in facts.narrow) if last else (),
        )

    def hyper(self, block: str) -> HyperWeights | MixedWeights | None:
        """Read the hyper-connections around a block ("attn" or "mlp"), if there are any."""
        facts, last = self.facts.hyper, self.index == self.reader.facts.num_layers - 1
        if not isinstance(facts, HyperConnections):
            return self.mixed("ffn" if block == "mlp" else block)
        start, wide = f"{block}_hyper_connection", facts.count * self.hidden
        final = None
        if block == "mlp" and last:
            (down, down_shape), (up, up_shape) = facts.outer(self.hidden).items()
            final = HyperWeights(
                count=facts.count,
                norm=self.reader.norm(f"{MIXER}.hc_norm", wide),
                down=self.reader.linear("hyper_in", (down,), (down_shape,)),
                up=self.reader.linear("hyper_up", (up,), (up_shape,)),
                rank=facts.rank,
            )
        return HyperWeights(
            count=facts.count,
            norm=self.norm(f"{start}.hc_norm", wide),
            down=self.linear("hyper_in", f"{start}.input_mix_weight_down", f"{start}.block_inject_weight"),
            up=self.linear("hyper_up", f"{start}.input_mix_weight_up"),
            rank=facts.rank,
            final=final,
        )

    def mixed(self, block: str) -> MixedWeights | None:
        """Read the manifold-constrained hyper-connections around a block ("attn" or "ffn"), if there are any."""
        facts, last = self.facts.hyper, self.index == self.reader.facts.num_layers - 1
        if not isinstance(facts, MixedConnections):
            return None
        base, scale = (self.vector(f"hc_{block}_{name}.weight") for name in ("base", "scale"))
        final = None
        if block == "ffn" and last and facts.weighted:
            ((module, shape),), sizes = facts.outer(self.hidden).items(), facts.outer_vectors(self.hidden)
            vectors = (
                self.reader.tensor(f"{HYPER_HEAD}_{name}.weight", sizes[f"{HYPER_HEAD}_{name}.weight"])
                for name in ("base", "scale")
            )
            fn = dequantize(self.reader.weight(module, shape)).float().clone()
            final = (fn, *vectors)
        return MixedWeights(
            count=facts.count,
            fn=self.matrix(f"hc_{block}_fn"),
            base=base,
            scale=scale,
            rounds=facts.rounds,
            eps=facts.eps,
            norm_eps=self.reader.facts.rms_norm_eps,
            last=last and block == "ffn",
            final=final,
        )

    def ngrams(self) -> NGramWeights | None:
        """Read the weights that add n-gram embeddings before this layer, if it has any."""
        facts = self.facts.ngrams
        if facts is None:
            return None
        taps = self.vector("ple.conv1d.weight")
        conv = taps.new_zeros(facts.channels, (facts.conv_width - 1) * facts.order + 1)
        conv[:, :: facts.order] = taps
        return NGramWeights(
            key=self.linear("ngrams", "ple.key_proj"),
            value=self.linear("ngrams", "ple.value_proj"),
            key_norm=self.norm("ple.norm_key", facts.channels),
            query_norm=self.norm("ple.norm_query", facts.channels),
            conv_norm=self.norm("ple.norm_conv", facts.channels),
            conv=conv,
        )

    def token_index(self, facts: TokenIndex | None, rope: RopeFacts) -> IndexWeights | None:
        """Read the index of sparse attention, if there is one."""
        if facts is None:
            return None
        angles = self.reader.rope(rope).inv_freq.to(self.reader.device) * (facts.ratio - 1)
        return IndexWeights(
            linear=self.linear("index", *facts.inputs),
            q_norm=self.norm("self_attn.indexer.q_layernorm", facts.dim),
            k_norm=self.norm("self_attn.indexer.k_layernorm", facts.dim),
            num_heads=facts.num_heads,
            dim=facts.dim,
            ratio=facts.ratio,
            top=facts.top,
            back=torch.stack([angles.cos(), angles.sin()]),
        )

    def pooled_index(self, facts: PooledIndex | None) -> PooledWeights | None:
        """Read the index of sparse latent attention, if there is one."""
        if facts is None:
            return None
        name = "self_attn.indexer.k_norm"
        weight, bias = (self.vector(f"{name}.{part}") for part in ("weight", "bias"))
        return PooledWeights(
            keys=self.linear("index", *facts.inputs),
            k_norm=Norm(weight, INDEX_EPS, bias),
            places=self.vector("self_attn.indexer.index_kpool_compress_ape.weight"),
            q_up=self.linear("index", "self_attn.indexer.wq_b"),
            shares=self.linear("router", "self_attn.indexer.weights_proj"),
            num_heads=facts.num_heads,
            dim=facts.dim,
            ratio=facts.ratio,
            top=facts.top,
        )

    def matrix(self, module: str) -> Tensor:
        """Read a small linear module's weight as float32 [N, K]."""
        return dequantize(self.reader.weight(self.start + module, self._shapes[module])).float().clone()

    def norm_if(self, name: str | None, size: int = 0) -> Norm | None:
        return None if name is None else self.norm(name, size)

    def norm_after(self, name: str | None) -> Norm | None:
        """Read a norm over a block's output, which has its own epsilon in some models."""
        norm, eps = self.norm_if(name), self.norms.after_eps
        return norm if norm is None or eps is None else replace(norm, eps=eps)

    def vector(self, name: str) -> Tensor:
        """Read any other tensor of the layer as float32."""
        return self.reader.tensor(self.start + name, self._sizes[name])

    def table(self, facts: Experts) -> Tensor:
        """Read the experts of each token id. Raises BadModelFile if there is no such expert."""
        return self.reader.numbers(self.start + EXPERT_TABLE, (facts.hashed, facts.top_k), facts.num_experts)

    def joined(self, layer_class: str, module: str) -> dict[str, Any]:
        """Read an output projection as "out" or "down", with the "join" that combines the ranks' parts of it."""
        linear = self.linear(layer_class, module)
        name = "down" if layer_class == "down" else "out"
        return {name: linear, "join": self.join(module)}

    def join(self, module: str) -> Join | None:
        """`Reader.join` of a module that has been read."""
        return self.reader.join(self.start + module)

    def made(self, layer_class: str, module: str, matrix: Tensor) -> Linear:
        """Prepare a slice of a module, given as its values [N, K], as a module of its own."""
        weight = Weight("dense", (matrix.shape[0], matrix.shape[1]), matrix.contiguous())
        return self.part(layer_class, module, weight)

    def part(self, layer_class: str, module: str, weight: Weight) -> Linear:
        """Prepare some rows of a module as a module of its own."""
        weight = self.reader.encoded(self.start + module, weight)
        return Linear((self.reader.prepare(layer_class, weight, None),))

    def gated(self, facts: Attention) -> Linear:
        """Read queries, their gates, keys and values as one, where gates are a separate module."""
        names, shapes = ([self.start + one for one in facts.inputs], [self._shapes[one] for one in facts.inputs])
        return self.reader.gated("qkv", names, shapes, facts.head_dim)

    def with_gates(self, qkv: str, gate: str, queries: int) -> Linear:
        """Read queries, keys and values, stored as one module, with a gate per head behind the queries.

        Raises UnsupportedFormat if queries share scales with keys.
        """
        name, shape = self.start + qkv, self._shapes[qkv]
        weight, gates = self.reader.weight(name, shape), self.reader.weight(self.start + gate, self._shapes[gate])
        cut = [rows_of(weight, [rows]) for rows in (range(queries), range(queries, shape[0]))]
        if cut[0] is None or cut[1] is None:
            raise UnsupportedFormat(
                f"{self.reader.checkpoint.path.name}: the queries of {self.reader.checkpoint.names.source(name)} share"
                " scales with its keys",
                "choose another format of the same model (localllm ls, localllm pull)",
            )
        parts = [self.reader.prepare("qkv", part, None) for part in (cut[0], gates, cut[1])]
        bias, of_gates = (
            self.reader.bias(self.start + one, self._shapes[one][0], self.reader.device) for one in (qkv, gate)
        )
        own = (None if bias is None else bias[:queries], of_gates, None if bias is None else bias[queries:])
        # adapters cannot address the rows of a module that is split
        modules = (Module((), queries), Module(self.reader.checkpoint.names.every(self.start + gate), gates.shape[0]))
        parts = [replace(part, bias=bias) for part, bias in zip(parts, own, strict=True)]
        return Linear(tuple(parts), (*modules, Module((), shape[0] - queries)))

    def linear(
        self, layer_class: str, *modules: str, order: Tensor | None = None, on_host: bool | None = None
    ) -> Linear:
        """Read modules that share their input as one.

        order    row order of a single module's outputs
        on_host  whether to keep them in host memory; None: as planned
        """
        names, shapes = [self.start + module for module in modules], [self._shapes[module] for module in modules]
        if on_host is None:
            on_host = expert_of(modules[0]) in self.host
        return self.reader.linear(layer_class, names, shapes, on_host=on_host, order=order)


def _attention(layer: LayerReader, facts: Attention) -> AttentionWeights:
    keeps = facts.shares_kv_with is None

    def head_norm(name: str, heads: int) -> Norm | None:
        if not facts.qk_norm or facts.bare_norms:
            return layer.plain_norm(facts.head_dim) if facts.qk_norm else None
        return layer.norm(f"self_attn.{name}_norm", facts.head_dim * (heads if facts.whole_norms else 1))

    return AttentionWeights(
        norm=layer.norm_if(layer.norms.before_mixer),
        qkv=_qkv(layer, facts),
        **layer.joined("o", "self_attn.o_proj"),
        num_heads=facts.num_heads,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        scale=facts.scale,
        q_norm=head_norm("q", facts.num_heads),
        k_norm=head_norm("k", facts.num_kv_heads) if keeps else None,
        late_norms=facts.late_norms,
        whole_norms=facts.whole_norms,
        post_norm=layer.norm_after(layer.norms.after_mixer),
        window=facts.window,
        chunked=facts.chunked,
        softcap=facts.softcap,
        interleaved=facts.rope.interleaved,
        v_norm=layer.plain_norm(facts.head_dim) if facts.v_norm and keeps else None,
        k_is_v=facts.k_is_v and keeps,
        reads_only=not keeps,
        value_dim=facts.value_dim,
        value_scale=facts.value_scale,
        sinks=layer.vector("self_attn.sinks") if facts.sinks else None,
        gate=bool(facts.gate),
        head_gates=facts.gate == "heads",
        softplus_gate=facts.softplus_gate,
        temperature=_temperature(layer, facts),
        temperature_offset=facts.temperature_offset,
        causal=facts.causal,
        sum_norm=layer.norm_if(layer.norms.over_mixer),
        parallel=layer.facts.parallel,
        streams=layer.streams(),
        hyper=layer.hyper("attn"),
        index=layer.token_index(facts.index, facts.rope),
        second=None if layer.facts.second is None else _mamba(layer, layer.facts.second),
    )


def _qkv(layer: LayerReader, facts: Attention) -> Linear:
    """Queries, gates, keys and values; with `kv_apart`, keys and values are all parts but the first."""
    if facts.gate == "apart":
        return layer.gated(facts)
    if facts.fused and facts.gate == "heads":
        qkv, gate = facts.inputs
        return layer.with_gates(qkv, gate, facts.num_heads * facts.head_dim)
    if facts.kv_apart:
        first, *others = facts.inputs
        q, kv = layer.linear("qkv", first), layer.linear("qkv", *others)
        return Linear(q.parts + kv.parts, q.modules + kv.modules)
    return _with_file_order(layer.linear("qkv", *facts.inputs), facts)


def _temperature(layer: LayerReader, facts: Attention | LatentAttention) -> tuple[float, int] | None:
    """The attention temperature, or None if the context is too short for it to have an effect."""
    longest = layer.reader.context + facts.temperature_offset
    return facts.temperature if facts.temperature and longest > facts.temperature[1] else None


def _with_file_order(qkv: Linear, facts: Attention) -> Linear:
    """Record the row order of queries and keys if the file permutes them."""
    if not facts.rope.permuted:
        return qkv

    def ordered(module: Module) -> Module:
        if module.names[0].endswith("v_proj"):
            return module
        halves = torch.arange(module.rows).view(-1, 2, facts.head_dim // 2)
        return replace(module, order=halves.transpose(1, 2).flatten())

    return replace(qkv, modules=tuple(map(ordered, qkv.modules)))


def _latent_attention(layer: LayerReader, facts: LatentAttention) -> LatentWeights:
    stacks = Stack(facts.num_heads), Stack(facts.num_heads)
    for stack, ups in zip(stacks, _by_head(layer, facts), strict=True):
        for up in ups:
            stack.add(up)
    (k_up, all_k), (v_up, all_v) = (stack.finished() for stack in stacks)

    def norm(name: str, size: int) -> Norm:
        return replace(layer.norm(name, size), eps=facts.eps)

    return LatentWeights(
        norm=layer.norm_if(layer.norms.before_mixer),
        qkv=layer.linear("qkv", *facts.inputs),
        q_up=layer.linear("q_b", "self_attn.q_b_proj") if facts.query_rank else None,
        q_norm=norm("self_attn.q_a_layernorm", facts.query_rank) if facts.query_rank else None,
        kv_norm=norm("self_attn.kv_a_layernorm", facts.rank),
        k_up=k_up,
        v_up=v_up,
        **layer.joined("o", "self_attn.o_proj"),
        rank=facts.rank,
        turned=facts.rope.dim,
        scale=facts.scale,
        interleaved=facts.rope.interleaved,
        post_norm=layer.norm_if(layer.norms.after_mixer),
        temperature=_temperature(layer, facts),
        gated=facts.gated,
        hyper=layer.mixed("attn"),
        index=layer.pooled_index(facts.index),
        stacked=None if all_k is None or all_v is None else (all_k, all_v),
    )


def _by_head(layer: LayerReader, facts: LatentAttention) -> tuple[tuple[Linear, ...], tuple[Linear, ...]]:
    """Per head, the product that maps a query to the latent space, and the one that maps latents to values.

    If one module holds both for all heads, it is split, and the first half transposed. Unquantized weights keep their
    bits, others become bfloat16.
    """
    names = [f"self_attn.{kind}_b_proj" for kind in "kv"]
    heads = range(facts.num_heads)
    if facts.by_head:
        k_up, v_up = (tuple(layer.linear("kv_b", f"{name}.{head}") for head in heads) for name in names)
        return k_up, v_up
    rows = (facts.still_dim + facts.value_dim) * facts.num_heads
    weight = layer.reader.stored(layer.start + EXPANDED, (rows, facts.rank))
    values = weight.qweight if weight.form == "dense" else dequantize(weight).to(torch.bfloat16)
    by_head = values.view(facts.num_heads, -1, facts.rank)
    k_up = tuple(layer.made("kv_b", names[0], by_head[head, : facts.still_dim].T) for head in heads)
    return k_up, tuple(layer.made("kv_b", names[1], by_head[head, facts.still_dim :]) for head in heads)


def _compressed_attention(layer: LayerReader, facts: CompressedAttention) -> CompressedWeights:
    inner, index, angles = facts.num_heads * facts.head_dim // facts.groups, facts.entry_index, None
    weight = layer.reader.stored(layer.start + GROUPED_OUT, (facts.groups * facts.out_rank, inner))
    groups = [
        rows_of(weight, [range(first, first + facts.out_rank)]) for first in range(0, weight.shape[0], facts.out_rank)
    ]
    if None in groups:  # they share scales
        values = dequantize(weight).to(torch.bfloat16)
        groups = [Weight("dense", (facts.out_rank, inner), rows.contiguous()) for rows in values.split(facts.out_rank)]
    if facts.ratio:
        angles = layer.reader.rope(facts.rope).inv_freq.to(layer.reader.device) * (facts.ratio - 1)

    def pool(start: str, width: int) -> PoolWeights:
        rows = layer.linear("compressor", *(f"{start}.{kind}_proj" for kind in ("kv", "gate")))
        return PoolWeights(rows, layer.vector(f"{start}.position_bias"), layer.norm(f"{start}.kv_norm", width))

    stack = Stack(facts.groups)
    for group in groups:
        if group is not None:
            stack.add(layer.part("o", GROUPED_OUT, group))
    narrow, stacked = stack.finished()
    return CompressedWeights(
        norm=layer.norm_if(layer.norms.before_mixer),
        inputs=layer.linear("qkv", "self_attn.q_a_proj", "self_attn.kv_proj"),
        q_norm=layer.norm("self_attn.q_a_norm", facts.query_rank),
        q_up=layer.linear("q_b", "self_attn.q_b_proj"),
        head_norm=layer.plain_norm(facts.head_dim),
        kv_norm=layer.norm("self_attn.kv_norm", facts.head_dim),
        narrow=narrow,
        stacked=stacked,
        out=layer.linear("o", "self_attn.o_b_proj"),
        sinks=layer.vector("self_attn.sinks"),
        num_heads=facts.num_heads,
        head_dim=facts.head_dim,
        scale=facts.scale,
        window=facts.window,
        interleaved=facts.rope.interleaved,
        pools=tuple(pool(*one) for one in zip(facts.pools, facts.widths, strict=False)),
        ratio=facts.ratio,
        overlaps=facts.overlaps,
        back=None if angles is None else torch.stack([angles.cos(), angles.sin()]),
        index=None
        if index is None
        else EntryIndexWeights(
            q_up=layer.linear("index", f"{facts.pools[1]}.q_b_proj"),
            shares=layer.linear("router", f"{facts.pools[1]}.weights_proj"),
            num_heads=index.num_heads,
            top=index.top,
        ),
        entry_view=entry_views(layer.reader.facts).get(layer.index, -1),
        hyper=layer.mixed("attn"),
    )


def _by_part(heads: int, sizes: Sequence[int]) -> Tensor:
    """Row indices that regroup head-by-head rows by part: part 0 of all heads, then part 1, ... (`sizes` per head)."""
    rows = torch.arange(heads * sum(sizes)).view(heads, -1)
    return torch.cat([part.flatten() for part in rows.split(list(sizes), 1)])


def _gated_delta(layer: LayerReader, facts: GatedDelta) -> DeltaWeights:
    decay = layer.vector("linear_attn.A_log")
    eps = layer.reader.facts.rms_norm_eps if facts.norm_eps is None else facts.norm_eps
    heads, ratio = facts.num_k_heads, facts.num_v_heads // facts.num_k_heads
    parts = (facts.k_dim, facts.k_dim, ratio * facts.v_dim, ratio * facts.v_dim)
    return DeltaWeights(
        norm=layer.norm_if(layer.norms.before_mixer),
        qkvz=layer.linear("qkvz", *facts.inputs, order=_by_part(heads, parts) if facts.grouped else None),
        ba=layer.linear("ba", *facts.rates, order=_by_part(heads, (ratio, ratio)) if facts.grouped_rates else None),
        **layer.joined("o", "linear_attn.out_proj"),
        conv=torch.cat([layer.vector(name) for name in facts.convs]),
        decay=-decay.exp() if facts.log_decay else decay,
        dt_bias=layer.vector("linear_attn.dt_bias"),
        out_norm=Norm(layer.vector("linear_attn.norm.weight"), eps),  # no norm_offset here
        num_k_heads=facts.num_k_heads,
        num_v_heads=facts.num_v_heads,
        k_dim=facts.k_dim,
        v_dim=facts.v_dim,
        tiled=facts.tiled,
        sigmoid_gate=facts.sigmoid_gate,
        beta_scale=facts.beta_scale,
        hyper=layer.hyper("attn"),
        ngrams=layer.ngrams(),
    )


def _kimi_delta(layer: LayerReader, facts: KimiDelta) -> DeltaWeights:
    rate = layer.vector("linear_attn.A_log").flatten()
    a_up, z_up = (layer.linear("kda_up", f"linear_attn.{name}_b_proj") if facts.rank else None for name in ("f", "g"))
    return DeltaWeights(
        norm=layer.norm_if(layer.norms.before_mixer),
        qkvz=layer.linear("qkvz", *facts.inputs),
        ba=layer.linear("ba", *facts.rates),
        **layer.joined("o", "linear_attn.out_proj"),
        conv=torch.cat([layer.vector(name) for name in facts.convs]),
        decay=-(rate.exp() if facts.log_decay else rate.abs()),  # GGUF stores exp(A_log) with either sign
        dt_bias=layer.vector("linear_attn.dt_bias"),
        out_norm=Norm(layer.vector("linear_attn.norm.weight"), layer.reader.facts.rms_norm_eps),
        num_k_heads=facts.num_k_heads,
        num_v_heads=facts.num_v_heads,
        k_dim=facts.k_dim,
        v_dim=facts.v_dim,
        floor=facts.floor,
        sigmoid_gate=True,
        beta_scale=facts.beta_scale,
        a_up=a_up,
        z_up=z_up,
        hyper=layer.mixed("attn"),
    )


def _short_conv(layer: LayerReader, facts: ShortConv) -> ConvWeights:
    return ConvWeights(
        norm=layer.norm_if(layer.norms.before_mixer),
        inputs=layer.linear("conv_in", "conv.in_proj"),
        **layer.joined("o", "conv.out_proj"),
        post_norm=layer.norm_after(layer.norms.after_mixer),
        conv=layer.vector("conv.conv.weight"),
        bias=layer.vector("conv.conv.bias") if facts.bias else None,
    )


def _mamba(layer: LayerReader, facts: Mamba2) -> MambaWeights:
    decay = layer.vector("mamba.A_log")
    ones = torch.ones(facts.inner // facts.num_groups, device=layer.reader.device)
    return MambaWeights(
        norm=layer.norm_if(layer.norms.before_mixer),
        inputs=layer.linear("mamba_in", "mamba.in_proj"),
        **layer.joined("o", "mamba.out_proj"),
        conv=layer.vector("mamba.conv1d.weight"),
        decay=-decay.exp() if facts.log_decay else decay,
        skip=layer.vector("mamba.D"),
        dt_bias=layer.vector("mamba.dt_bias"),
        out_norm=Norm(ones, facts.eps) if facts.normed else None,
        gain=layer.vector("mamba.norm.weight").flatten() if facts.normed else None,
        num_heads=facts.num_heads,
        head_dim=facts.head_dim,
        num_groups=facts.num_groups,
        state_size=facts.state_size,
        conv_bias=layer.vector("mamba.conv1d.bias") if facts.conv_bias else None,
        steps=facts.steps,
    )


def _dense(layer: LayerReader, facts: Dense) -> MlpWeights:
    return MlpWeights(
        norm=layer.norm_if(layer.norms.before_ffn),
        gate_up=layer.linear("gate_up", *facts.inputs),
        **layer.joined("down", "mlp.down_proj"),
        activation=facts.act,
        post_norm=layer.norm_after(layer.norms.after_ffn),
        sum_norm=layer.norm_if(layer.norms.over_ffn),
        scale=layer.scale(last=False),
        input=layer.input(),
        cut=facts.cut,
        curve=facts.curve,
        limit=facts.limit,
        hyper=layer.mixed("ffn"),
    )


def _experts(layer: LayerReader, facts: Experts) -> ExpertsWeights:
    bias = "mlp.gate.e_score_correction_bias"
    shared = [f"mlp.shared_expert.{name}" for name in facts.shared_inputs]
    count = 0 if layer.host else facts.num_experts  # no stack if some experts are in host memory
    stacks = Stack(count), Stack(count)
    for number in range(facts.num_experts):
        for stack, linear in zip(stacks, _expert(layer, facts, number), strict=True):
            stack.add(linear)
    (gate_up, all_gate_up), (down, all_down) = (stack.finished() for stack in stacks)
    return ExpertsWeights(
        norm=layer.norm(APART_NORMS[0]) if facts.apart else layer.norm_if(layer.norms.before_ffn),
        router=layer.linear("router", "mlp.gate"),
        gate_up=gate_up,
        down=down,
        top_k=facts.top_k,
        router_kind=facts.router,
        activation=facts.act,
        renormalise=facts.renormalise,
        scale=facts.scale,
        choice_bias=layer.vector(bias) if facts.choice_bias else None,
        groups=facts.groups,
        group_top_k=facts.group_top_k,
        share_inputs=facts.share_inputs,
        table=layer.table(facts) if facts.hashed else None,
        shared_gate_up=layer.linear("gate_up", *shared) if facts.shared_inner else None,
        shared_down=layer.linear("down", "mlp.shared_expert.down_proj") if facts.shared_inner else None,
        shared_gate=layer.linear("router", "mlp.shared_expert_gate") if facts.shared_gate else None,
        shared_scale=facts.shared_scale,
        limit=facts.limit,
        shared_limit=facts.shared_limit,
        post_norm=layer.norm_if(layer.norms.after_ffn),
        apart=_apart(layer) if facts.apart else None,
        expert_scales=_expert_scales(layer, facts),
        layer_scale=layer.scale(last=False),
        input=layer.input(),
        latent_in=layer.linear("latent", "mlp.latent_in") if facts.latent else None,
        latent_out=layer.linear("latent", "mlp.latent_out") if facts.latent else None,
        join=layer.join("mlp.experts.0.down_proj"),
        hyper=layer.hyper("mlp"),
        stacked=None if all_gate_up is None or all_down is None else (all_gate_up, all_down),
    )


def _expert(layer: LayerReader, facts: Experts, number: int, on_host: bool | None = None) -> tuple[Linear, Linear]:
    """Read one expert: (gate and up, down)."""
    start = f"mlp.experts.{number}."
    gate_up = layer.linear("experts_gate_up", *(start + name for name in facts.inputs), on_host=on_host)
    return gate_up, layer.linear("experts_down", f"{start}down_proj", on_host=on_host)


def _apart(layer: LayerReader) -> ApartNorms:
    assert layer.norms.before_ffn is not None
    router = layer.vector("mlp.gate.scale") * layer.hidden**-0.5
    return ApartNorms(
        router=Norm(router, layer.reader.facts.rms_norm_eps),
        shared=layer.norm(layer.norms.before_ffn),
        after_shared=layer.norm(APART_NORMS[1]),
        after_experts=layer.norm(APART_NORMS[2]),
    )


def _expert_scales(layer: LayerReader, facts: Experts) -> Tensor | None:
    if facts.scales != "experts":
        return layer.vector("mlp.gate.per_expert_scale") if facts.scales else None
    each = [layer.vector(f"mlp.experts.{number}.down_proj.scale") for number in range(facts.num_experts)]
    return torch.stack(each)


_KINDS: dict[type, Callable[[LayerReader, Any], Any]] = {
    Attention: _attention,
    LatentAttention: _latent_attention,
    CompressedAttention: _compressed_attention,
    GatedDelta: _gated_delta,
    SplitDelta: _gated_delta,
    KimiDelta: _kimi_delta,
    ShortConv: _short_conv,
    Mamba2: _mamba,
    Dense: _dense,
    Experts: _experts,
    type(None): lambda *_: None,
}


def load_layer(reader: Reader, index: int) -> DecoderLayer:
    """Read layer `index` and choose an implementation for each of its products."""
    layer = LayerReader(reader, index)
    mixer, ffn = layer.facts.mixer, layer.facts.ffn
    weights = _KINDS[type(ffn)](layer, ffn)
    if isinstance(ffn, Experts) and layer.host:
        weights = split(weights, layer.host, reader, partial(_expert, layer, ffn))
    return DecoderLayer(_KINDS[type(mixer)](layer, mixer), weights)

"""How a model is split across ranks: the facts of a rank's layers, and its slices of the stored modules. No torch.

With tensor parallelism a rank has some of the heads of every mixer and some of the inner values of every feed-forward
layer: rows of the input projections and columns of the output projections, whose results the ranks add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from localllm.checkpoint.formats.gguf import CODEBOOK_TYPES
from localllm.checkpoint.gguf_types import TENSOR_TYPES
from localllm.errors import ConfigError

from .facts import ModelFacts, shared_layers, without_predictor
from .layers import Dense, Experts, LayerFacts
from .mixers import EXPANDED, Attention, GatedDelta, KimiDelta, LatentAttention, Mamba2, ShortConv
from .model import OpenModel

MOST_RANKS = 8
WIDEST_UNIT = 256  # split inner values at multiples of this if that is even: a multiple of every group and block size
Ranges = tuple[range, ...]


@dataclass(frozen=True)
class Share:
    """One rank's share of a model that several processes run together.

    split  tensor: it has a part of every layer; layers: it has the whole layers in `span`
    """

    rank: int = 0
    world: int = 1
    split: str = "tensor"
    span: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Cut:
    """A rank's slice of a stored module or vector.

    shape      of the whole
    rows       this rank's rows; () for all
    columns    the columns of all ranks, whose results are summed; () if each rank has all columns
    adds_bias  whether this rank adds the bias; one rank does in a sum
    module     the name of the whole, if it differs
    """

    shape: tuple[int, ...]
    rows: Ranges = ()
    columns: tuple[Ranges, ...] = ()
    adds_bias: bool = True
    module: str = ""


@dataclass(frozen=True)
class Shard:
    """A rank's part of a model. `cuts`: its slices by canonical name of module or vector; all others it has whole."""

    facts: ModelFacts
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    vocabulary: tuple[range, ...] = ()  # rows of embedding and head, for every rank


def pieces(count: int, world: int, unit: int = 1) -> tuple[range, ...]:
    """Split `count` into `world` ranges that start at multiples of `unit`, as evenly as possible, longer ones first."""
    units = -(-count // unit)
    share, more = divmod(units, world)
    starts = [unit * (rank * share + min(rank, more)) for rank in range(world)]
    return tuple(range(a, min(b, count)) for a, b in zip(starts, (*starts[1:], unit * units), strict=True))


def inner_pieces(count: int, world: int, unit: int) -> tuple[range, ...]:
    """Like `pieces`, but evenly at the widest multiples of `unit` if possible; `unit` must divide `count` or be 1."""
    wider = (unit * 2**n for n in range(9, -1, -1))
    even = (size for size in wider if size <= max(unit, WIDEST_UNIT) and count % (size * world) == 0)
    return pieces(count, world, next(even, unit))


def head_pieces(heads: int, kv_heads: int, world: int) -> tuple[tuple[range, range], ...]:
    """(query heads, their KV heads) of each rank; () if the heads cannot be split that way.

    If there are more ranks than KV heads, several ranks keep a copy of the same KV head.
    """
    ratio = heads // kv_heads
    if world <= kv_heads:
        return tuple((_scaled(kv, ratio), kv) for kv in pieces(kv_heads, world))
    sharing = world // kv_heads
    if world % kv_heads or sharing > ratio:
        return ()
    of_group = pieces(ratio, sharing)
    places = (divmod(rank, sharing) for rank in range(world))
    return tuple((_shifted(of_group[part], kv * ratio), range(kv, kv + 1)) for kv, part in places)


def _scaled(one: range, size: int) -> range:
    return range(one.start * size, one.stop * size)


def _shifted(one: range, by: int) -> range:
    return range(one.start + by, one.stop + by)


def refusal(facts: ModelFacts, world: int) -> str:
    """Why a model cannot be split across `world` ranks; "" if it can."""
    if facts.hyper is not None:
        return "hyper-connections, which mix all values of all residual streams"
    if facts.loops > 1:
        return "layers that run several times"
    for layer, _ in facts.kinds:
        found = "" if layer.second is None else "attention and Mamba-2 in one layer"
        found = found or _mixer_refusal(layer.mixer, world)
        inner = [] if layer.ffn is None else [layer.ffn.inner, getattr(layer.ffn, "shared_inner", 0)]
        if not found and getattr(layer.ffn, "cut", None) is not None:
            found = "feed-forward layers whose activation threshold depends on all values"
        if not found and (narrow := [size for size in inner if 0 < size < world]):
            found = f"a feed-forward layer of width {min(narrow)}"
        if found:
            return found
    return f"a vocabulary of {facts.vocab_size} tokens" if facts.vocab_size < world else ""


def _mixer_refusal(mixer: Any, world: int) -> str:
    if isinstance(mixer, Attention):
        if mixer.whole_norms:
            return "query and key norms that span all heads"
        if mixer.fused and mixer.gate == "heads":
            return "queries that are stored with keys and values, and gates apart"
        return "" if head_pieces(mixer.num_heads, mixer.num_kv_heads, world) else _heads(mixer)
    if isinstance(mixer, LatentAttention):
        return "" if world <= mixer.num_heads else f"{mixer.num_heads} heads"
    if isinstance(mixer, GatedDelta):
        return "" if world <= mixer.num_k_heads else f"{mixer.num_k_heads} key heads in recurrent layers"
    if isinstance(mixer, Mamba2):
        return "" if world <= mixer.num_groups else f"{mixer.num_groups} group(s) of heads in Mamba-2 layers"
    return "" if not isinstance(mixer, ShortConv) or world <= mixer.channels else f"{mixer.channels} conv channels"


def _heads(mixer: Attention) -> str:
    return f"{mixer.num_heads} heads that share {mixer.num_kv_heads} KV heads"


def is_even(facts: ModelFacts, world: int) -> bool:
    """Whether all ranks have the same number of heads."""
    mixers = [layer.mixer for layer, _ in facts.kinds]
    found = (head_pieces(m.num_heads, m.num_kv_heads, world) for m in mixers if isinstance(m, Attention))
    latent = all(m.num_heads % world == 0 for m in mixers if isinstance(m, LatentAttention))
    states = all(m.num_k_heads % world == 0 for m in mixers if isinstance(m, GatedDelta))
    return latent and states and all(len({len(q) for q, _ in ranks}) == 1 for ranks in found)


def check_world(facts: ModelFacts, world: int) -> None:
    """Raise ConfigError, with the numbers of ranks that work, if `world` does not."""
    found = refusal(facts, world)
    if not found:
        return
    others = _worlds(facts)
    in_layers = "--split layers" if facts.inputs is None and facts.hyper is None and facts.loops == 1 else "one GPU"
    raise ConfigError(
        f"tensor_parallel {world}: {facts.name} has {found}, which cannot be split across {world} ranks",
        f"use --tensor-parallel {' or '.join(others)}, or {in_layers}" if others else f"use {in_layers}",
        context={"tensor_parallel": world, "possible": others},
    )


def _worlds(facts: ModelFacts) -> list[str]:
    """The numbers of ranks across which a model can be split."""
    return [str(n) for n in range(2, MOST_RANKS + 1) if not refusal(facts, n)]


def check_span(facts: ModelFacts, span: tuple[int, int]) -> None:
    """Raise ConfigError if one of these layers needs data of another rank."""
    hint = "use --split tensor, or one GPU" if _worlds(facts) else "use one GPU"
    if facts.inputs is not None:
        raise ConfigError(f"split layers: all layers of {facts.name} need its per-layer embeddings", hint)
    if facts.hyper is not None:
        raise ConfigError(f"split layers: {facts.name} has several residual streams, which ranks do not exchange", hint)
    if facts.loops > 1:
        raise ConfigError(f"split layers: the layers of {facts.name} run several times with the same weights", hint)
    for index in range(*span):
        source = getattr(facts.layers[index].mixer, "shares_kv_with", None)
        if source is not None and source not in range(*span):
            what = f"layer {index} of {facts.name} shares the KV cache of layer {source}, which is on another rank"
            raise ConfigError(f"split layers: {what}", hint)


def column_unit(checkpoint: OpenModel, module: str) -> int:
    """How many inputs of a stored module share a scale or a block in its format."""
    stored = checkpoint.formats[checkpoint.names.source(module)]
    if stored.kind == "gguf":
        blocks = {name: size for name, size, _ in TENSOR_TYPES.values()}
        return 1 if stored.label in CODEBOOK_TYPES else blocks[stored.label]
    if stored.kind == "fp8":
        scales = checkpoint.tensors[f"{checkpoint.names.source(module)}.{stored.params['scale']}"].shape
        return 128 if len(scales) > 1 and scales[1] > 1 else 1
    size = int(stored.params.get("group_size", {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}.get(stored.kind, 1)))
    return 2 if size == stored.shape[1] else size  # one scale per row


def shard(facts: ModelFacts, share: Share, unit_of: Callable[[str], int] = lambda module: 1) -> Shard:
    """A rank's part of a model. Raises ConfigError if the model cannot be split.

    unit_of  canonical module name -> how many inputs share a scale and must stay together
    """
    facts = without_predictor(facts)
    if share.split == "layers":
        check_span(facts, share.span)
        return Shard(facts)
    check_world(facts, share.world)
    cuts: dict[str, Cut] = {}
    layers: list[LayerFacts] = []
    for index, layer in enumerate(facts.layers):
        start = f"model.layers.{index}."

        def unit(module: str, start: str = start) -> int:
            return unit_of(start + module)

        local, found = _layer(layer, facts.hidden_size, share, unit)
        layers.append(local)
        cuts |= {start + name: replace(cut, module=cut.module and start + cut.module) for name, cut in found.items()}
    vocabulary = inner_pieces(facts.vocab_size, share.world, 1)
    whole = facts.vocab_size, facts.hidden_size
    for module in ("model.embed_tokens", "lm_head"):
        cuts[module] = Cut(whole, (vocabulary[share.rank],))
    return Shard(replace(facts, layers=shared_layers(layers)), cuts, vocabulary)


def shard_facts(facts: ModelFacts, share: Share) -> ModelFacts:
    """The facts of `shard` without an open checkpoint: inner values may be split anywhere, the vocabulary is whole."""
    local = {id(kind): _layer(kind, facts.hidden_size, share, lambda module: 1)[0] for kind, _ in facts.kinds}
    return replace(facts, layers=tuple(local[id(layer)] for layer in facts.layers))


def _layer(
    layer: LayerFacts, hidden: int, share: Share, unit: Callable[[str], int]
) -> tuple[LayerFacts, dict[str, Cut]]:
    mixer, ffn = layer.mixer, layer.ffn
    cuts: dict[str, Cut] = {}
    if mixer is not None:
        mixer, found = _MIXERS[type(mixer)](mixer, hidden, share)
        cuts |= found
    if isinstance(ffn, Dense):
        ffn, found = _dense(ffn, hidden, share, unit)
        cuts |= found
    elif isinstance(ffn, Experts):
        ffn, found = _experts(ffn, hidden, share, unit)
        cuts |= found
    return replace(layer, mixer=mixer, ffn=ffn), cuts


def _cut(shapes: Mapping[str, tuple[int, ...]], rows: Mapping[str, Iterable[range]]) -> dict[str, Cut]:
    return {name: Cut(shapes[name], tuple(ranges)) for name, ranges in rows.items() if name in shapes}


def _output_cut(
    shapes: Mapping[str, tuple[int, ...]], module: str, columns: Sequence[Iterable[range]], share: Share
) -> dict[str, Cut]:
    return {module: Cut(shapes[module], (), tuple(map(tuple, columns)), share.rank == 0)}


def _attention(facts: Attention, hidden: int, share: Share) -> tuple[Attention, dict[str, Cut]]:
    ranks, dim = head_pieces(facts.num_heads, facts.num_kv_heads, share.world), facts.head_dim
    queries, kv = ranks[share.rank]
    wide = dim * (1 + (facts.gate == "queries"))
    q, k, v = _scaled(queries, wide), _scaled(kv, dim), _scaled(kv, facts.values)
    after_q, after_k = facts.num_heads * wide, facts.num_heads * wide + facts.num_kv_heads * dim
    rows = {
        "self_attn.q_proj": [q],
        "self_attn.gate_proj": [queries if facts.gate == "heads" else q],
        "self_attn.k_proj": [k],
        "self_attn.v_proj": [v],
        "self_attn.qkv_proj": [q, _shifted(k, after_q), _shifted(v, after_k)],
        "self_attn.sinks": [queries],
    }
    shapes = facts.linears(hidden)
    cuts = _cut(shapes | facts.vectors(hidden), rows)
    cuts |= _output_cut(shapes, "self_attn.o_proj", [[_scaled(one, facts.values)] for one, _ in ranks], share)
    return replace(facts, num_heads=len(queries), num_kv_heads=len(kv)), cuts


def _latent(facts: LatentAttention, hidden: int, share: Share) -> tuple[LatentAttention, dict[str, Cut]]:
    ranks = pieces(facts.num_heads, share.world)
    heads, shapes = ranks[share.rank], facts.linears(hidden)
    module = "self_attn.q_b_proj" if facts.query_rank else "self_attn.q_proj"
    own = {module: [_scaled(heads, facts.still_dim + facts.rope.dim)], "self_attn.gate_proj": [heads]}
    own[EXPANDED] = [_scaled(heads, facts.still_dim + facts.value_dim)]
    cuts = _cut(shapes, own)
    if facts.by_head:
        for local, head in enumerate(heads):
            for kind in "kv":
                name = f"self_attn.{kind}_b_proj."
                cuts[f"{name}{local}"] = Cut(shapes[f"{name}{head}"], module=f"{name}{head}")
    cuts |= _output_cut(shapes, "self_attn.o_proj", [[_scaled(one, facts.value_dim)] for one in ranks], share)
    return replace(facts, num_heads=len(heads)), cuts


def _gated_delta(facts: GatedDelta, hidden: int, share: Share) -> tuple[GatedDelta, dict[str, Cut]]:
    ratio = facts.num_v_heads // facts.num_k_heads

    def value_heads(keys: range) -> list[range]:
        if facts.tiled:
            return [_shifted(keys, turn * facts.num_k_heads) for turn in range(ratio)]
        return [_scaled(keys, ratio)]

    ranks = pieces(facts.num_k_heads, share.world)
    own = ranks[share.rank]
    heads = value_heads(own)
    values, keys = [_scaled(one, facts.v_dim) for one in heads], _scaled(own, facts.k_dim)
    of_keys = facts.num_k_heads * facts.k_dim
    mixed = [keys, _shifted(keys, of_keys), *(_shifted(one, 2 * of_keys) for one in values)]
    rows = {
        "linear_attn.in_proj_qkv": mixed,
        "linear_attn.in_proj_z": values,
        "linear_attn.in_proj_qkvz": [_scaled(own, 2 * facts.k_dim + 2 * ratio * facts.v_dim)],
        "linear_attn.in_proj_b": heads,
        "linear_attn.in_proj_a": heads,
        "linear_attn.in_proj_ba": [_scaled(own, 2 * ratio)],
        "linear_attn.conv1d.weight": mixed,
        "linear_attn.A_log": heads,
        "linear_attn.dt_bias": heads,
    }
    shapes = facts.linears(hidden)
    cuts = _cut(shapes | facts.vectors(hidden), rows)
    columns = [[_scaled(one, facts.v_dim) for one in value_heads(keys)] for keys in ranks]
    cuts |= _output_cut(shapes, "linear_attn.out_proj", columns, share)
    return replace(facts, num_k_heads=len(own), num_v_heads=len(own) * ratio), cuts


def _kimi_delta(facts: KimiDelta, hidden: int, share: Share) -> tuple[KimiDelta, dict[str, Cut]]:
    ranks, shapes = pieces(facts.num_k_heads, share.world), facts.linears(hidden)
    heads = ranks[share.rank]
    keys, values = _scaled(heads, facts.k_dim), _scaled(heads, facts.v_dim)
    of_keys = ("q_proj", "k_proj", "f_proj", "f_b_proj", "q_conv1d.weight", "k_conv1d.weight", "dt_bias")
    of_values = ("v_proj", "g_proj", "g_b_proj", "v_conv1d.weight")
    pairs = ((of_keys, keys), (of_values, values), (("b_proj", "A_log"), heads))
    rows = {f"linear_attn.{name}": [part] for names, part in pairs for name in names}
    cuts = _cut(shapes | facts.vectors(hidden), rows)
    columns = [[_scaled(one, facts.v_dim)] for one in ranks]
    cuts |= _output_cut(shapes, "linear_attn.out_proj", columns, share)
    return replace(facts, num_k_heads=len(heads), num_v_heads=len(heads)), cuts


def _mamba(facts: Mamba2, hidden: int, share: Share) -> tuple[Mamba2, dict[str, Cut]]:
    ranks, of_group = pieces(facts.num_groups, share.world), facts.num_heads // facts.num_groups
    groups = ranks[share.rank]
    heads, written = _scaled(groups, of_group), _scaled(groups, facts.state_size)
    values, size = _scaled(heads, facts.head_dim), facts.num_groups * facts.state_size
    mixed = [values, _shifted(written, facts.inner), _shifted(written, facts.inner + size)]
    steps = _shifted(heads, facts.inner + facts.channels)
    rows = {
        "mamba.in_proj": [values, *(_shifted(one, facts.inner) for one in mixed), steps],
        "mamba.conv1d.weight": mixed,
        "mamba.conv1d.bias": mixed,
        "mamba.norm.weight": [groups if facts.split_norm else values],
        **{f"mamba.{name}": [heads] for name in ("A_log", "D", "dt_bias")},
    }
    shapes = facts.linears(hidden)
    cuts = _cut(shapes | facts.vectors(hidden), rows)
    columns = [[_scaled(one, of_group * facts.head_dim)] for one in ranks]
    cuts |= _output_cut(shapes, "mamba.out_proj", columns, share)
    return replace(facts, num_heads=len(heads), num_groups=len(groups)), cuts


def _short_conv(facts: ShortConv, hidden: int, share: Share) -> tuple[ShortConv, dict[str, Cut]]:
    ranks = inner_pieces(facts.channels, share.world, 1)
    own = ranks[share.rank]
    rows = {
        "conv.in_proj": [_shifted(own, part * facts.channels) for part in range(3)],
        "conv.conv.weight": [own],
        "conv.conv.bias": [own],
    }
    shapes = facts.linears(hidden)
    cuts = _cut(shapes | facts.vectors(hidden), rows)
    cuts |= _output_cut(shapes, "conv.out_proj", [[one] for one in ranks], share)
    return replace(facts, channels=len(own)), cuts


_MIXERS: dict[type, Callable[[Any, int, Share], tuple[Any, dict[str, Cut]]]] = {
    Attention: _attention,
    LatentAttention: _latent,
    GatedDelta: _gated_delta,
    KimiDelta: _kimi_delta,
    Mamba2: _mamba,
    ShortConv: _short_conv,
}


def _ffn_cuts(
    start: str, inputs: Iterable[str], shapes: Mapping[str, tuple[int, ...]], ranks: Sequence[range], share: Share
) -> dict[str, Cut]:
    """The cuts of one feed-forward layer; a fused module has gate first, then up."""
    own, inner = ranks[share.rank], ranks[-1].stop
    rows = {start + name: [own, _shifted(own, inner)] if "gate_up" in name else [own] for name in inputs}
    down = f"{start}down_proj"
    return _cut(shapes, rows) | _output_cut(shapes, down, [[one] for one in ranks], share)


def _dense(facts: Dense, hidden: int, share: Share, unit: Callable[[str], int]) -> tuple[Dense, dict[str, Cut]]:
    ranks = _inner(facts.inner, share, unit("mlp.down_proj"))
    names = [name.removeprefix("mlp.") for name in facts.inputs]
    return replace(facts, inner=len(ranks[share.rank])), _ffn_cuts("mlp.", names, facts.linears(hidden), ranks, share)


def _experts(facts: Experts, hidden: int, share: Share, unit: Callable[[str], int]) -> tuple[Experts, dict[str, Cut]]:
    shapes = facts.linears(hidden)
    cuts: dict[str, Cut] = {}
    ranks = _inner(facts.inner, share, unit("mlp.experts.0.down_proj"))
    for number in range(facts.num_experts):
        cuts |= _ffn_cuts(f"mlp.experts.{number}.", facts.inputs, shapes, ranks, share)
    local = replace(facts, inner=len(ranks[share.rank]))
    if facts.shared_inner:
        ranks = _inner(facts.shared_inner, share, unit("mlp.shared_expert.down_proj"))
        cuts |= _ffn_cuts("mlp.shared_expert.", facts.shared_inputs, shapes, ranks, share)
        local = replace(local, shared_inner=len(ranks[share.rank]))
    return local, cuts


def _inner(count: int, share: Share, unit: int) -> tuple[range, ...]:
    ranks = inner_pieces(count, share.world, unit if count % unit == 0 else 1)
    if not all(ranks):
        raise ConfigError(
            f"tensor_parallel {share.world}: a feed-forward layer of width {count:,} has too few blocks of {unit}",
            f"use --tensor-parallel {count // unit} or less, or --split layers"
            if count >= 2 * unit
            else "use --split layers",
        )
    return ranks


def spans(sizes: Sequence[int], room: Sequence[float]) -> tuple[tuple[int, int], ...]:
    """Split layers of `sizes` bytes into consecutive spans, at least one layer per rank, in proportion to `room`."""
    world, whole = len(room), sum(sizes) or 1
    if len(sizes) < world:
        what = f"the model has {len(sizes)} layers, fewer than the {world} ranks"
        raise ConfigError(what, f"use --tensor-parallel {len(sizes)}")
    ends: list[int] = []
    done = at = 0
    for rank in range(world - 1):
        wanted = whole * sum(room[: rank + 1]) / (sum(room) or 1)
        last = len(sizes) - (world - 1 - rank)
        while at < last and (at <= (ends[-1] if ends else 0) or done + sizes[at] / 2 <= wanted):
            done += sizes[at]
            at += 1
        ends.append(at)
    return tuple(zip([0, *ends], [*ends, len(sizes)], strict=True))

"""Plans for a model divided over several ranks (processes): what each holds, and on which device.

Each rank gets the memory terms of its own part (see `sharding.shard`). The context is the largest that fits on every
rank, and each cache group has the same number of pages everywhere, because a single scheduler allocates them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, Self

from localllm.config import EngineOptions
from localllm.device import GpuFacts, MachineFacts
from localllm.errors import ConfigError, DeviceError, LocalLLMError
from localllm.models.architectures.facts import ModelFacts, count_params, without_predictor
from localllm.models.architectures.mixers import Paged
from localllm.models.architectures.sharding import (
    MOST_RANKS,
    Share,
    check_span,
    check_world,
    is_even,
    refusal,
    shard_facts,
    spans,
)
from localllm.plan.memory import MIB, Memory, table_bytes
from localllm.plan.placement import Placement, unusable
from localllm.plan.plan import Plan, RankPlan
from localllm.plan.profiles import of_ranks
from localllm.plan.speeds import Link, link_name
from localllm.terminal import gib

LINK_BYTES = 200 * MIB  # NCCL's buffers and kernels on a GPU
ANSWER = (1000, 300)  # prompt and answer tokens for which the faster split is chosen


class Chooser(Protocol):
    """The part of `Planner` that is used here."""

    @property
    def machine(self) -> MachineFacts: ...
    @property
    def options(self) -> EngineOptions: ...
    @property
    def measured(self) -> Any: ...
    def having(self, **options: Any) -> Self: ...
    def formats(self, where: Placement, facts: ModelFacts) -> Iterator[tuple[Memory, int]]: ...
    def with_memory(self, memory: Memory, largest: int, tightest: Memory | None = None) -> Plan: ...


class Ranks:
    """The parts of a model on the devices of its ranks."""

    def __init__(self, facts: ModelFacts, places: Sequence[Placement], split: str) -> None:
        self.places, self.split = tuple(places), split
        self.whole = without_predictor(facts)
        world = len(places)
        if split == "tensor":
            check_world(facts, world)
        self.spans = _spans(self.whole, places) if split == "layers" else ((0, 0),) * world
        for span in self.spans if split == "layers" else ():
            check_span(self.whole, span)
        self.facts = tuple(self._part(rank) for rank in range(world))

    def _part(self, rank: int) -> ModelFacts:
        facts, world = self.whole, len(self.places)
        if self.split == "tensor":
            local = shard_facts(facts, Share(rank, world))
            tables = table_params(facts)
            params = count_params(local) - tables + tables // world
            return _sized(local, params, int(facts.weight_bytes * params / max(1, count_params(facts))))
        first, end = self.spans[rank]
        local = replace(facts, layers=facts.layers[first:end])
        tables = min(facts.weight_bytes, table_bytes(facts) * (1 if facts.tied_embeddings else 2))
        own = count_params(local) - table_params(facts)
        inner = max(1, count_params(facts) - table_params(facts))
        held = int((facts.weight_bytes - tables) * own / inner) + tables * (rank == 0)
        return _sized(local, own + table_params(facts) * (rank == 0), held)


def _sized(facts: ModelFacts, params: int, nbytes: int) -> ModelFacts:
    share = nbytes / max(1, facts.weight_bytes)
    return replace(facts, num_params=params, weight_bytes=nbytes, decoded_bytes=int(facts.decoded_bytes * share))


def table_params(facts: ModelFacts) -> int:
    """Parameters of the embedding and the head."""
    return facts.vocab_size * facts.hidden_size * (1 if facts.tied_embeddings else 2)


def _spans(facts: ModelFacts, places: Sequence[Placement]) -> tuple[tuple[int, int], ...]:
    """Layer ranges in proportion to each device's free memory; rank 0 also holds the tables and the vision tower."""
    of_kind = {id(kind): count_params(replace(facts, layers=(kind,))) - table_params(facts) for kind, _ in facts.kinds}
    sizes = [of_kind[id(layer)] for layer in facts.layers]
    room = [1.0 if place.gpu is None else float(place.gpu.free_bytes) for place in places]
    first = table_params(facts)
    if facts.vision is not None:
        first += int((sum(sizes) + first) * facts.vision.nbytes / max(1, facts.weight_bytes))
    whole = sum(sizes) + first
    wanted = [whole * one / sum(room) for one in room]
    wanted[0] = max(wanted[0] - first, whole / 1000)
    return spans(sizes, wanted)


def cards(machine: MachineFacts, device: str, world: int) -> list[Placement]:
    """Devices for the ranks: the GPUs with the most free memory, or the CPU. Raises ConfigError or DeviceError."""
    usable = [(n, gpu) for n, gpu in enumerate(machine.gpus) if not unusable(machine, gpu)]
    if device == "cpu" or (device == "auto" and not usable):
        return [Placement("cpu", None)] * world
    if ":" in device:
        raise ConfigError(
            f"{device} is a single GPU, but tensor_parallel {world} needs {world}", "leave out --device, or use cuda"
        )
    if len(usable) < world:
        has = f"{len(usable)} usable GPU{'s' * (len(usable) != 1)}"
        raise DeviceError(
            f"tensor_parallel {world} needs {world} GPUs, but this machine has {has}", "use fewer, or --device cpu"
        )
    best = sorted(usable, key=lambda pair: -pair[1].free_bytes)[:world]
    return [Placement(f"cuda:{n}", gpu) for n, gpu in best]


def divided(chooser: Chooser, facts: ModelFacts) -> Plan | None:
    """The plan for the requested number of ranks; None for a single rank. "auto" takes the fewest that fit."""
    options, machine = chooser.options, chooser.machine
    _check_options(options)
    if options.tensor_parallel != "auto":
        places = cards(machine, options.device, options.tensor_parallel)
        return _quickest(chooser, facts, places)
    if options.device == "cpu" or ":" in options.device:
        return None
    best: Plan | None = None
    count = sum(not unusable(machine, gpu) for gpu in machine.gpus)
    for world in range(2, min(count, MOST_RANKS) + 1):
        uneven = refusal(facts, world) or not is_even(facts, world)
        splits = [one for one in _splits(options) if not (uneven if one == "tensor" else world > facts.num_layers)]
        if splits:
            best = _quickest(chooser, facts, cards(machine, options.device, world), splits)
            if best.fits:
                return best
    return best


def _splits(options: EngineOptions) -> tuple[str, ...]:
    return ("tensor", "layers") if options.split == "auto" else (options.split,)


def _quickest(chooser: Chooser, facts: ModelFacts, places: Sequence[Placement], splits: Sequence[str] = ()) -> Plan:
    """The fastest plan that fits among the ways to split a model. If none is possible, raises the first error."""
    found: list[Plan] = []
    refused: LocalLLMError | None = None
    for split in splits or _splits(chooser.options):
        try:
            found.append(_with(chooser, Ranks(facts, places, split)))
        except LocalLLMError as error:
            refused = refused or error
    if not found:
        assert refused is not None
        raise refused
    best = max(found, key=lambda one: (one.fits, -_answer_s(one)))
    if len(found) < 2:
        return (
            best
            if refused is None
            else replace(best, reasons=(*best.reasons, f"split {best.split}: {refused.message}"))
        )
    times = ", ".join(f"{one.split} ≈ {_answer_s(one):.2g} s" for one in found)
    why = f"split {best.split}: a prompt of {ANSWER[0]:,} tokens and an answer of {ANSWER[1]} take {times}"
    return replace(best, reasons=(*best.reasons, why))


def _answer_s(made: Plan) -> float:
    prompt, answer = ANSWER
    return (prompt / made.prefill_tps if made.prefill_tps else 0.0) + (
        answer / made.decode_tps if made.decode_tps else 0.0
    )


def _check_options(options: EngineOptions) -> None:
    """Raise ConfigError for options that do not work with several ranks."""
    asked = {
        "adapters": "adapters work on a single device only",
        "kv_store": "the KV store works with a single device only",
    }
    for name, why in asked.items():
        if getattr(options, name):
            flag = name.replace("_", "-")
            raise ConfigError(f"tensor_parallel and {name}: {why}", f"leave out --{flag}, or use --tensor-parallel 1")
    if options.experts == "host":
        raise ConfigError(
            "tensor_parallel and experts host: each rank holds a part of every expert, so none can stay in host memory",
            "leave out --experts or --tensor-parallel",
        )


def _with(chooser: Chooser, ranks: Ranks) -> Plan:
    """The plan with the best formats that leave every rank room for a useful context, else with the most context."""
    found: tuple[Memory, ...] = ()
    enough = 0
    choices = list(_choices(chooser, ranks))
    for memories, enough in choices:
        if not found or _largest(memories) > _largest(found):
            found = memories
        if _largest(memories) >= enough:
            found = memories
            break
    tightest = min(found, key=lambda memory: memory.max_ctx)
    largest = max(_largest(found), _largest(choices[-1][0]))
    made = chooser.having(graphs=False).with_memory(found[0], largest, tightest)
    pages = _pages(ranks, found, made.ctx)
    slots = [memory.num_slots(made.ctx) for memory in found if memory.slot_bytes]
    num_slots = min(slots, default=0)
    plans = tuple(_rank_plan(ranks, rank, memory, made.ctx, pages, num_slots) for rank, memory in enumerate(found))
    pace = _pace(chooser, ranks, found, made.ctx)
    first = plans[0]
    made = replace(
        made,
        num_pages=pages,
        num_slots=num_slots,
        kv_bytes=first.kv_bytes,
        threads=_threads(ranks, made.threads),
        ranks=plans,
        split=ranks.split,
        idle="",
        link_assumed=not link_of(chooser, ranks.places).is_measured,
        **pace,
    )
    return replace(made, reasons=(*_reasons(chooser, ranks, made), *made.reasons))


def _threads(ranks: Ranks, threads: int) -> int:
    """Threads of one rank: ranks that compute at the same time on the CPU share its cores."""
    at_once = len(ranks.places) if ranks.split == "tensor" and ranks.places[0].gpu is None else 1
    return max(1, threads // at_once)


def _largest(memories: Sequence[Memory]) -> int:
    return min(memory.max_ctx for memory in memories)


def _choices(chooser: Chooser, ranks: Ranks) -> Iterator[tuple[tuple[Memory, ...], int]]:
    """Like `Chooser.formats`, for all ranks together."""
    world = len(ranks.places)
    on_cpu = ranks.places[0].gpu is None
    machine = chooser.machine
    if on_cpu:  # the ranks share host memory
        machine = replace(
            machine,
            ram_total_bytes=machine.ram_total_bytes // world,
            ram_available_bytes=machine.ram_available_bytes // world,
        )
    chooser = chooser.having(graphs=False)  # steps with collectives are not captured
    profiles, device = chooser.measured.profiles, ranks.places[0].device
    learned = profiles.excess_bytes(of_ranks(ranks.whole, world, ranks.split), machine, device) if profiles else 0
    least = min((place.gpu.capability for place in ranks.places if place.gpu is not None), default=0)
    each = []
    for rank, (place, part) in enumerate(zip(ranks.places, ranks.facts, strict=True)):
        tables = 1 / world if ranks.split == "tensor" else float(rank == 0)
        link = 0 if place.gpu is None else LINK_BYTES
        gpu = None if place.gpu is None else replace(place.gpu, capability=least)  # what every GPU supports
        formats = chooser.formats(place._replace(gpu=gpu), part)
        each.append(
            [
                (replace(one, machine=machine, link_bytes=link, table_share=tables, excess_bytes=learned), enough)
                for one, enough in formats
            ]
        )
    for found in zip(*each, strict=True):
        first, *others = (memory for memory, _ in found)  # rank 0 alone drafts and reads images
        others = [replace(one, draft=None, facts=replace(one.facts, vision=None)) for one in others]
        yield (first, *others), found[0][1]


def _pages(ranks: Ranks, memories: Sequence[Memory], ctx: int) -> tuple[int, ...]:
    """Pages per cache group of the whole model: the least of the ranks that hold the group."""
    least: dict[object, int] = {}
    for memory in memories:
        for key, count in zip(_groups(memory.facts), memory.num_pages(ctx), strict=True):
            least[key] = min(count, least.get(key, count))
    if ranks.split == "tensor":
        return tuple(least.values())
    return tuple(least[key] for key in _groups(ranks.whole))


def _groups(facts: ModelFacts) -> list[object]:
    """Keys of a model's cache groups, in order. They leave out the number of heads, which differs between ranks."""
    mixers = (facts.keeping_layers[first].mixer for first, *_ in facts.cache_layers)
    return [(mixer.window, *mixer.kept[1:]) for mixer in mixers if isinstance(mixer, Paged)]


def _rank_plan(ranks: Ranks, rank: int, memory: Memory, ctx: int, pages: Sequence[int], num_slots: int) -> RankPlan:
    by_key = dict(zip(_groups(ranks.facts[rank] if ranks.split == "tensor" else ranks.whole), pages, strict=True))
    own = zip(_groups(memory.facts), memory.groups(ctx), strict=True)
    have, margin = memory.have_and_margin
    kept = sum(group.page_bytes * by_key[key] for key, group in own)
    work = memory.work_terms(ctx)
    return RankPlan(
        device=ranks.places[rank].device,
        weight_bytes=memory.weights_and_read[0],
        kv_bytes=kept + num_slots * memory.slot_bytes,
        work_bytes=sum(work.values()),
        margin_bytes=margin,
        have_bytes=have,
        span=ranks.spans[rank],
        work_terms=tuple(work.items()),
    )


def _pace(chooser: Chooser, ranks: Ranks, memories: Sequence[Memory], ctx: int) -> dict[str, Any]:
    """Expected speeds. Ranks add up when they share host memory or run layers in turn; otherwise the slowest counts."""
    found = [chooser.measured.speeds.expected(memory, ctx) for memory in memories]
    names = ("decode_tps", "decode_tps_full", "pace", "prefill_tps")
    in_turn = ranks.split == "layers" or ranks.places[0].gpu is None
    times = {name: [1 / one[name] if one[name] else 0.0 for one in found] for name in names}
    taken = {name: sum(each) if in_turn else max(each) for name, each in times.items()}
    link, rows = link_of(chooser, ranks.places), memories[0].rows
    moved = ranks.whole.hidden_size * (4 if memories[0].dtype == "float32" else 2)
    count = len(ranks.places) if ranks.split == "layers" else 2 * ranks.whole.num_layers
    more = {name: count * link.seconds(moved) for name in names} | {
        "prefill_tps": count * link.seconds(rows * moved) / rows
    }
    return {name: 1 / (seconds + more[name]) if seconds else 0.0 for name, seconds in taken.items()}


def link_of(chooser: Chooser, places: Sequence[Placement]) -> Link:
    """The link between the ranks, measured or assumed."""
    gpus = [place.gpu for place in places if place.gpu is not None]
    kind = "cpu" if not gpus else "far" if _far(chooser.machine, places) else "cuda"
    found: Link = chooser.measured.speeds.link(link_name(chooser.machine, gpus), kind)
    return found


def _far(machine: MachineFacts, places: Sequence[Placement]) -> str:
    """Why two of the GPUs lack peer-to-peer access; "" if all have it."""
    used = {machine.gpus.index(place.gpu) for place in places if place.gpu is not None}
    far = (link.p2p for link in machine.gpu_links if {link.first, link.second} <= used and link.p2p != "ok")
    return next(far, "")


def _reasons(chooser: Chooser, ranks: Ranks, made: Plan) -> Iterator[str]:
    world, link = len(ranks.places), link_of(chooser, ranks.places)
    far = _far(chooser.machine, ranks.places)
    what = "each holds a part of every layer" if ranks.split == "tensor" else "each holds some of the layers"
    yield f"{world} ranks: {what}; {_sizes(ranks, made)}"
    if ranks.split == "tensor" and not is_even(ranks.whole, world):
        yield f"the heads do not divide evenly among {world} ranks: every step waits for the rank with the most heads"
    if ranks.split == "tensor" and far:
        yield f"the GPUs have no peer-to-peer access ({far}): --split layers transfers less between them"
    basis = "measured" if link.is_measured else "assumed; `localllm doctor --deep` measures it"
    taken = f"{1e6 * link.sum_s:.0f} µs per all-reduce, {link.bytes_s / 1e9:.1f} GB/s for large ones"
    yield f"link: {taken}, {basis}"
    if ranks.places[0].gpu is not None:
        yield "no CUDA graphs: steps across ranks are not captured"


def _sizes(ranks: Ranks, made: Plan) -> str:
    parts = []
    for rank, plan in enumerate(made.ranks):
        name = "CPU" if ranks.places[rank].gpu is None else _name(ranks.places[rank].gpu, plan.device)
        layers = f" (layers {plan.span[0]} to {plan.span[1] - 1})" if ranks.split == "layers" else ""
        parts.append(f"{name}{layers} {gib(plan.need_bytes, 1)} of {gib(plan.have_bytes, 1)}")
    return ", ".join(parts)


def _name(gpu: GpuFacts | None, device: str) -> str:
    return f"{gpu.name if gpu is not None else ''} ({device})"

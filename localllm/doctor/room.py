"""Whether a model fits where another engine would run it, with how much context, and which file of several to take.

An estimate from sizes: weights, keys and values, and what the engine takes beside them. Our own plans count every byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from localllm.errors import DoesNotFit
from localllm.hub import catalog
from localllm.plan.placement import UNIFIED_SHARE
from localllm.plan.speeds import ETA
from localllm.terminal import GIB, gib

from .finding import Survey
from .model_kind import ModelKind, from_catalogue

MIN_CTX = 4096  # tokens: with less an engine is not worth starting
SPARE = 0.9  # of what the sum leaves for context, what is asked for
CPU_CTX = 16_384  # tokens: more are read too slowly where a CPU computes
UNIFIED_LEAST = 0.5  # of shared memory that an engine is given at least; no more than weights and context want
SEQUENCES = 2  # of which what a sequence keeps at any length is counted
Q8_0 = 34 / 64  # bytes of a value in Q8_0, by those in 16 bits
RECIPE_WORTH = 0.2  # of `catalog.worth`: that somebody ran it on this card
MOE_ETA = 0.5  # of the pace that bytes alone would allow, what a mixture of experts reaches
# kinds of weights by what suits a card best, for engines that read them all: (lowest compute capability, formats)
ORDERS = (
    (100, ("fp8", "nvfp4", "mxfp4", "int4", "bf16", "gguf")),
    (89, ("fp8", "int4", "mxfp4", "nvfp4", "bf16", "gguf")),
    (0, ("int4", "mxfp4", "bf16", "nvfp4", "fp8", "gguf")),
)


@dataclass(frozen=True, slots=True)
class Room:
    """What a model may take, and takes."""

    have_bytes: int
    need_bytes: int  # with the context below
    ctx: int
    share: float  # of a card's memory
    in_ram: int = 0  # bytes of weights that a CPU computes with

    @property
    def why(self) -> str:
        """Where the context comes from."""
        return f"what fits: {gib(self.need_bytes, 1)} of {gib(self.have_bytes, 1)}"


def room_of(engine: Mapping[str, Any], model: ModelKind, survey: Survey) -> Room:
    """The room there is. Raises DoesNotFit, with both numbers and with what would fit."""
    machine, gguf = survey.machine, engine["name"] == "llama.cpp"
    beside = int(engine["beside_gib"] * GIB) * max(1, len(machine.gpus))
    per_token = _kv(model) * (Q8_0 if gguf else _kv_share(engine["name"], model, survey))
    base = model.size_bytes + model.kv_fixed * SEQUENCES + beside
    own = model.context or CPU_CTX * 2
    ram = int(machine.ram_available_bytes * SPARE)
    share, cards = _card_room(engine, base + int(own * per_token), survey)
    have = cards
    if gguf and not any(gpu.unified for gpu in machine.gpus):
        have += ram
    least = base + int(min(MIN_CTX, own) * per_token)
    if least > have:
        raise _refusal(engine, model, least, have)
    in_ram = max(0, least - cards) if cards else 0
    have = have if in_ram or not cards else cards
    most = own if cards and not in_ram else min(own, CPU_CTX)
    fits = int((have - base) * SPARE / max(per_token, 1)) // 1024 * 1024
    ctx = min(most, max(fits, min(MIN_CTX, own)))
    return Room(have, base + int(ctx * per_token), ctx, share, min(in_ram, model.size_bytes))


def _card_room(engine: Mapping[str, Any], wanted: int, survey: Survey) -> tuple[float, int]:
    """(share of each card's memory that may be taken, bytes on all of them)"""
    gpus, share = survey.machine.gpus, float(engine["share"])
    if any(gpu.display for gpu in gpus):
        share = min(share, 0.92)
    if gpus and gpus[0].unified:
        steps = [UNIFIED_LEAST + 0.05 * n for n in range(8)]
        total = gpus[0].total_bytes
        share = round(next((one for one in steps if total * one >= wanted), UNIFIED_SHARE), 2)
    return share, sum(min(gpu.free_bytes, int(gpu.total_bytes * share)) for gpu in gpus)


def _kv(model: ModelKind) -> int:
    """Bytes of a token in 16 bits; guessed from the size where nothing says it."""
    if model.kv_per_token:
        return model.kv_per_token
    bits = {"bf16": 16, "fp8": 8.5}.get(model.format, 4.8)
    params = int(model.size_bytes * 8 / bits)
    return catalog.candidate_of(model.name, "", params, model.size_bytes, MIN_CTX).kv_bytes_per_token


def _kv_share(engine: str, model: ModelKind, survey: Survey) -> float:
    """What 8 bits make of keys and values, where the flags ask for them."""
    capability = max((gpu.capability for gpu in survey.machine.gpus), default=0)
    small = capability >= 89 or (capability >= 86 and model.format not in ("fp8",) and engine != "tensorrt-llm")
    return 0.5 if small and not (engine == "sglang" and capability in (90, 100, 103)) else 1.0


def _refusal(engine: Mapping[str, Any], model: ModelKind, need: int, have: int) -> DoesNotFit:
    return DoesNotFit(
        f"{model.name} needs {gib(need, 1)} with {MIN_CTX:,} tokens of context, {engine['title']} may take"
        f" {gib(have, 1)} here",
        f"localllm doctor --for {engine['name']}",
        fixes=((f"localllm doctor --for {engine['name']}", "a model that fits"), ("localllm plan", "what fits here")),
        why=f"weights {gib(model.size_bytes, 1)}, what runs beside them {engine['beside_gib']} GiB a card",
        context={"need_bytes": need, "have_bytes": have},
    )


def reads(engine: Mapping[str, Any], model: ModelKind, capability: int) -> bool:
    """Whether an engine opens this kind of checkpoint on such a card; yes where the kind is not known."""
    table = engine["reads"]
    least = table.get(f"{model.method} {model.format}", table.get(model.method))
    return model.method == "" or (least is not None and capability >= least)


def best_of(
    pool: Iterable[catalog.Candidate], engine: Mapping[str, Any], survey: Survey, recipes: Iterable[str] = ()
) -> ModelKind | None:
    """The file to start: read by the engine, with room; the most able that reaches the pace a chat wants.

    Where none reaches it, pace counts against ability; on memory that CPU and GPU share mixtures of experts come out
    first by that. Of one model's files the one with a recipe for this card wins, then what suits the card.
    """
    gpus = survey.machine.gpus
    capability = max((gpu.capability for gpu in gpus), default=0)
    wish = catalog.WISHES["gpu" if gpus else "cpu"]
    order = next(formats for least, formats in ORDERS if capability >= least)
    found = []
    for entry in pool:
        kind = from_catalogue(entry)
        if not reads(engine, kind, capability):
            continue
        try:
            room = room_of(engine, kind, survey)
        except DoesNotFit:
            continue
        pace = _pace(kind, room, survey)
        bits = entry.download_bytes * 8 / entry.params
        fine = RECIPE_WORTH if kind.name in recipes else 0.0
        fine += 0.05 * min(bits, 9) if kind.format == "gguf" else -0.08 * order.index(kind.format)
        found.append((pace >= wish.tps, catalog.worth(entry, pace, room.ctx, wish) + fine, kind))
    return max(found, key=lambda one: one[:2])[2] if found else None


def _pace(model: ModelKind, room: Room, survey: Survey) -> float:
    """Tokens per second, from the bytes read on the cards and in RAM."""
    machine = survey.machine
    active = model.size_bytes * model.active_share
    in_ram = active * room.in_ram / max(1, model.size_bytes) if machine.gpus else active
    speed = sum(gpu.bandwidth for gpu in machine.gpus) * ETA["cuda"]
    seconds = in_ram / (machine.cpu.bandwidth * ETA["cpu"] or 1) + ((active - in_ram) / speed if speed else 0.0)
    return (MOE_ETA if model.kind == "moe" else 1.0) / seconds if seconds else 0.0

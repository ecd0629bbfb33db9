"""Memory estimates for other engines: whether a model fits, with how much context, and which file to choose.

The estimate adds weights, KV cache and the engine's overhead. Plans for localllm itself count every byte instead.
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
from .model_kind import ModelKind, from_catalog

MIN_CTX = 4096  # tokens; with less context an engine is not worth starting
SPARE = 0.9  # fraction of the estimated room to use for context
CPU_CTX = 16_384  # tokens; longer prompts are too slow when the CPU computes
UNIFIED_LEAST = 0.5  # minimum share of unified memory for an engine; it gets more only if weights and context need it
SEQUENCES = 2  # sequences whose fixed-size state is counted
Q8_0 = 34 / 64  # size of Q8_0 relative to 16 bits
RECIPE_WORTH = 0.2  # `catalog.worth` gained by a file with a recipe for this GPU
MOE_ETA = 0.5  # fraction of the bandwidth-limited speed that MoE models reach
# (minimum compute capability, weight formats by preference), for engines that read all of them
ORDERS = (
    (100, ("fp8", "nvfp4", "mxfp4", "int4", "bf16", "gguf")),
    (89, ("fp8", "int4", "mxfp4", "nvfp4", "bf16", "gguf")),
    (0, ("int4", "mxfp4", "bf16", "nvfp4", "fp8", "gguf")),
)


@dataclass(frozen=True, slots=True)
class Room:
    """Memory available to a model, and memory it needs."""

    have_bytes: int
    need_bytes: int  # with `ctx` tokens of context
    ctx: int
    share: float  # fraction of each GPU's memory
    in_ram: int = 0  # weight bytes that stay in RAM for the CPU

    @property
    def why(self) -> str:
        """The reason for the context."""
        return f"needs {gib(self.need_bytes, 1)} of the {gib(self.have_bytes, 1)} available"


def room_of(engine: Mapping[str, Any], model: ModelKind, survey: Survey) -> Room:
    """Estimate the memory of a model in an engine. Raises DoesNotFit, with need, limit and alternatives."""
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
    """(fraction of each GPU's memory to use, bytes on all GPUs together)"""
    gpus, share = survey.machine.gpus, float(engine["share"])
    if any(gpu.display for gpu in gpus):
        share = min(share, 0.92)
    if gpus and gpus[0].unified:
        steps = [UNIFIED_LEAST + 0.05 * n for n in range(8)]
        total = gpus[0].total_bytes
        share = round(next((one for one in steps if total * one >= wanted), UNIFIED_SHARE), 2)
    return share, sum(min(gpu.free_bytes, int(gpu.total_bytes * share)) for gpu in gpus)


def _kv(model: ModelKind) -> int:
    """KV bytes per token in 16 bits; estimated from the model's size if not known."""
    if model.kv_per_token:
        return model.kv_per_token
    bits = {"bf16": 16, "fp8": 8.5}.get(model.format, 4.8)
    params = int(model.size_bytes * 8 / bits)
    return catalog.candidate_of(model.name, "", params, model.size_bytes, MIN_CTX).kv_bytes_per_token


def _kv_share(engine: str, model: ModelKind, survey: Survey) -> float:
    """Size of the KV cache relative to 16 bits: 0.5 if the flags select an 8-bit cache."""
    capability = max((gpu.capability for gpu in survey.machine.gpus), default=0)
    small = capability >= 89 or (capability >= 86 and model.format not in ("fp8",) and engine != "tensorrt-llm")
    return 0.5 if small and not (engine == "sglang" and capability in (90, 100, 103)) else 1.0


def _refusal(engine: Mapping[str, Any], model: ModelKind, need: int, have: int) -> DoesNotFit:
    return DoesNotFit(
        f"{model.name} needs {gib(need, 1)} with {MIN_CTX:,} tokens of context, but {engine['title']} can use"
        f" {gib(have, 1)} here",
        f"localllm doctor --for {engine['name']}",
        fixes=(
            (f"localllm doctor --for {engine['name']}", "suggests a model that fits"),
            ("localllm plan", "lists models that fit"),
        ),
        why=f"weights {gib(model.size_bytes, 1)}, overhead {engine['beside_gib']} GiB per GPU",
        context={"need_bytes": need, "have_bytes": have},
    )


def reads(engine: Mapping[str, Any], model: ModelKind, capability: int) -> bool:
    """True if an engine reads this checkpoint format at this compute capability, or the format is not known."""
    table = engine["reads"]
    least = table.get(f"{model.method} {model.format}", table.get(model.method))
    return model.method == "" or (least is not None and capability >= least)


def best_of(
    pool: Iterable[catalog.Candidate], engine: Mapping[str, Any], survey: Survey, recipes: Iterable[str] = ()
) -> ModelKind | None:
    """The best file that the engine can read and that fits: the most capable one that is fast enough for chat.

    If none is fast enough, speed is weighed against capability, which puts MoE models first on unified memory. Among
    files of one model, one with a recipe for this GPU wins, then the format that suits the GPU.
    """
    gpus = survey.machine.gpus
    capability = max((gpu.capability for gpu in gpus), default=0)
    wish = catalog.WISHES["gpu" if gpus else "cpu"]
    order = next(formats for least, formats in ORDERS if capability >= least)
    found = []
    for entry in pool:
        kind = from_catalog(entry)
        if not reads(engine, kind, capability):
            continue
        try:
            room = room_of(engine, kind, survey)
        except DoesNotFit:
            continue
        pace = _pace(kind, room, survey)
        bits = entry.weight_bytes * 8 / entry.params
        fine = RECIPE_WORTH if kind.name in recipes else 0.0
        fine += 0.05 * min(bits, 9) if kind.format == "gguf" else -0.08 * order.index(kind.format)
        found.append((pace >= wish.tps, catalog.worth(entry, pace, room.ctx, wish) + fine, kind))
    return max(found, key=lambda one: one[:2])[2] if found else None


def _pace(model: ModelKind, room: Room, survey: Survey) -> float:
    """Estimated tokens per second, from the bytes read per token on the GPUs and in RAM."""
    machine = survey.machine
    active = model.size_bytes * model.active_share
    in_ram = active * room.in_ram / max(1, model.size_bytes) if machine.gpus else active
    speed = sum(gpu.bandwidth for gpu in machine.gpus) * ETA["cuda"]
    seconds = in_ram / (machine.cpu.bandwidth * ETA["cpu"] or 1) + ((active - in_ram) / speed if speed else 0.0)
    return (MOE_ETA if model.kind == "moe" else 1.0) / seconds if seconds else 0.0

"""How fast a model decodes: the estimate, and what saved benches of this machine say.

`localllm bench` writes them below the data folder, and a chat or a server the pace of its answers; what another
machine measured, or cannot be read, is passed over. A measured model is marked so, and a bench corrects the
estimates of others.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm import paths
from localllm.device import GpuFacts, MachineFacts
from localllm.device.gpu_table import table_row
from localllm.models.architectures.facts import ModelFacts, expert_counts, expert_share
from localllm.models.architectures.layers import Experts
from localllm.models.architectures.mixers import LatentAttention
from localllm.plan.memory import Memory
from localllm.plan.plan import Plan

# share of the memory bandwidth that decoding reaches: gemma3-270m 0.78 on two EPYC cores that read 27 GB/s. An H100
# needs 0.75 (bfloat16) to 0.90 (NVFP4) of the time that these say for an 8B; others' memory gives less of its rate
ETA = {"cpu": 0.7, "cuda": 0.75}
MIXED_ETA = 0.5  # the same of a mixture on a card: an H100 needs 0.8 of the time this says for Qwen3-30B-A3B
# time per layer and token that no bandwidth explains: calls, norms, small products
LAYER_S = {"cpu": 30e-6, "cuda": 40e-6}
# a kernel that PyTorch starts by itself, where no fused one and no graph takes it along: assumed, not measured
LAUNCH_S = {"cpu": 0.0, "cuda": 5e-6}
# a layer's rows on their way to the CPU and back: one wait for the device and one copy each way, and PCIe 4.0 x8
CROSSING_S, LINK_BYTES_S = 60e-6, 12e9
# what a copy reaches of the lanes in use; of host memory's rate, which reads the stored weights and writes them
LINK_ETA, COPY_ETA = 0.8, 1 / 3
STREAM_S = 300e-6  # of an expert that is streamed, whatever its size: not measured on a card
# what reading a prompt reaches of a card's published 16-bit products: 4,096 tokens of an 8B on an H100 0.46 (NVFP4),
# 0.50 (INT4) and 0.69 (bfloat16)
PREFILL_ETA = 0.4
# Products and sums per second of a core while a prompt is read. Qwen3-1.7B and 4B, Q4_K_M, 256 tokens, two cores: AMX
# 350e9 to 660e9 as busy as tenants keep it; VNNI 130e9 there, 220e9 on a Cascade Lake, 265e9 on a Zen 4 (Q8_0 190e9);
# AVX-512 without it 110e9 to 135e9, AVX2 81e9 to 93e9. NEON was not measured.
CORE_FLOPS = {"amx": 350e9, "avx512_vnni": 180e9, "avx512": 100e9, "avx2": 75e9, "neon_dotprod": 40e9}
SLOW_CORE_FLOPS = 4e9
DEFAULT_VOTES = 2  # benches of so many models together do not change which model is recommended
ANSWERS = "answers"  # where a file comes from that no bench wrote
MAX_FILES = 200
MAX_FILE_BYTES = 1 << 20
MAX_TPS = 1e6
_DECODE = re.compile(r"tg\d+")
_PREFILL = re.compile(r"pp\d+")
_INSTANCE = re.compile(r" MIG (\d)[cg]\.")  # of the 7 parts that a cut card's arithmetic has, as its name says


def launches_of(facts: ModelFacts, ctx: int) -> int:
    """Kernels that PyTorch starts one by one for a token behind `ctx` others, where no graph takes them along."""
    mixed = sum(mixer.launches(ctx) for mixer in facts.attention if isinstance(mixer, LatentAttention))
    return mixed + sum(layer.ffn.launches * times for layer, times in facts.kinds if isinstance(layer.ffn, Experts))


def tps_of(bytes_s: float, read_bytes: int, rest_s: float) -> float:
    """Tokens per second when so many bytes are read for one, at that rate; 0 where the rate is not known.

    rest_s   what a token takes beside
    """
    return 1 / (read_bytes / bytes_s + rest_s) if bytes_s else 0.0


def rest_s_of(num_layers: int, launches: int, kind: str) -> float:
    """Seconds a token takes that no bandwidth explains."""
    return num_layers * LAYER_S[kind] + launches * LAUNCH_S[kind]


def bytes_s_of(tps: float, read_bytes: int, rest_s: float) -> float:
    """The rate that a measured pace means, by the same formula; 0 when it means none."""
    reading_s = 1 / tps - rest_s if tps > 0 else 0.0
    return read_bytes / reading_s if reading_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Measurement:
    """One bench: what was measured, where, and how fast it decoded for one person."""

    model: tuple[str, int, str, int]  # architecture, parameters, stored format, stored bytes
    device: str  # cpu, or the GPU's name
    tps: float
    bytes_s: float  # of weights read
    prefill_tps: float = 0.0


@dataclass(frozen=True, slots=True)
class Link:
    """How ranks reach each other.

    sum_s    that adding up what each has takes, however little it is
    bytes_s  of what is added up, beyond that
    """

    sum_s: float
    bytes_s: float
    is_measured: bool = False

    def seconds(self, nbytes: float) -> float:
        """For one sum of so much."""
        return self.sum_s + nbytes / self.bytes_s


# between processes: 100 to 400 us on two EPYC cores; between cards that reach each other or not: not measured
ASSUMED_LINKS = {"cpu": Link(200e-6, 1e9), "cuda": Link(25e-6, 10e9), "far": Link(40e-6, 5e9)}


@dataclass(frozen=True, slots=True)
class Speeds:
    """Measurements of one machine, newest first."""

    measured: tuple[Measurement, ...] = ()
    links: tuple[tuple[str, Link], ...] = ()  # between what, as `link_name` says it

    def link(self, name: str, kind: str) -> Link:
        """As measured, or what is assumed for a kind."""
        return dict(self.links).get(name) or ASSUMED_LINKS[kind]

    def bytes_s(self, facts: ModelFacts, device: str) -> float | None:
        """Weights read per second: the median of models stored alike, else of all."""
        there = [m for m in self.measured if m.device == device and m.bytes_s]
        alike = [m.bytes_s for m in there if m.model[2] == facts.stored_format] or [m.bytes_s for m in there]
        return statistics.median(alike) if alike else None

    def tps(self, facts: ModelFacts, device: str) -> float | None:
        """Tokens per second of this very model at the start of its context, as the newest bench has it."""
        wanted = model_key(facts)
        return next((m.tps for m in self.measured if m.device == device and m.model == wanted), None)

    def steady_eta(self, device: str, bandwidth: float, assumed: float) -> float:
        """The share of the bandwidth to choose with: a median in which what is assumed votes, too, and every measured
        model once, with its best bench, because what disturbs a bench makes it slower.
        """
        best: dict[tuple[str, int, str, int], float] = {}
        for m in self.measured:
            if m.device == device and m.bytes_s and bandwidth:
                best[m.model] = max(best.get(m.model, 0.0), m.bytes_s / bandwidth)
        return statistics.median([*best.values(), *[assumed] * DEFAULT_VOTES])

    def expected(self, memory: Memory, ctx: int) -> dict[str, Any]:
        """Fields of `Plan`: the pace at the start and the end of a context, measured or estimated from bandwidth."""
        facts, kind, gpu = memory.facts, memory.where.kind, memory.where.gpu
        bandwidth, name = (gpu.bandwidth, gpu.name) if gpu else (memory.machine.cpu.bandwidth, "cpu")
        reached, measured = self.bytes_s(facts, name), self.tps(facts, name)
        is_mixed = kind == "cuda" and any(isinstance(layer.ffn, Experts) for layer, _ in facts.kinds)
        assumed = MIXED_ETA if is_mixed else ETA[kind]
        eta = reached / bandwidth if reached and bandwidth else assumed
        steady = self.steady_eta(name, bandwidth, assumed)
        read = memory.weights_and_read[1] + 2 * memory.slot_bytes  # states are read and written
        full = read + memory.sequence_bytes(ctx)
        first, last = (0 if memory.captures else launches_of(facts, behind) for behind in (0, ctx))
        start, end, pace = (
            tps_of(share * bandwidth, count, rest_s_of(facts.num_layers, launches, kind))
            for share, count, launches in ((eta, read, first), (eta, full, last), (steady, read, first))
        )
        if memory.host_experts:  # what was measured here was measured with all of them on the card
            measured = None
            start, end, pace = (_with_host(tps, memory) for tps in (start, end, pace))
        basis = "measured" if measured else "estimate"
        if measured:
            start, end = measured, measured * end / start if start else end
        found = {"decode_tps": start, "decode_tps_full": end, "basis": basis, "eta": eta, "bandwidth": bandwidth}
        found["launches"] = first
        return found | {"pace": pace or start, "prefill_tps": self._prefill(memory, name)}

    def _prefill(self, memory: Memory, name: str) -> float:
        """Prompt tokens per second: measured for this very model, else products by what the processor computes."""
        facts, gpu, wanted = memory.facts, memory.where.gpu, model_key(memory.facts)
        found = next(
            (m.prefill_tps for m in self.measured if (m.device, m.model) == (name, wanted) and m.prefill_tps), 0.0
        )
        if found and not memory.host_experts:
            return found
        cpu = memory.machine.cpu
        if gpu is None:
            flops = cpu.cores_usable * CORE_FLOPS.get(cpu.isa, SLOW_CORE_FLOPS)
        else:
            row, cut = table_row(gpu.name), _INSTANCE.search(gpu.name)
            flops = row.tflops * 1e12 * PREFILL_ETA * (int(cut[1]) / 7 if cut else 1) if row else 0.0
        products = facts.num_params - facts.vocab_size * facts.hidden_size * (1 if facts.tied_embeddings else 2)
        own, away = memory.weights_and_read[1], memory.host_and_read[1]
        streamed = _streaming_s(memory)
        away = 0 if streamed else away
        share = away / max(1, own + away)  # of the products, what the CPU computes
        on_host = cpu.cores_usable * CORE_FLOPS.get(cpu.isa, SLOW_CORE_FLOPS)
        seconds = (1 - share) / flops + share / on_host if flops else 0.0
        computed = seconds * 2 * max(products, facts.num_params // 8) * facts.active_share
        return 1 / (computed + streamed) if computed else 0.0


def _with_host(tps: float, memory: Memory) -> float:
    """A pace on the device, with the time that the CPU takes for its experts and that activations are on their way."""
    bandwidth = memory.machine.cpu.bandwidth
    if not (tps and bandwidth):
        return 0.0
    layers = sum(isinstance(layer.ffn, Experts) for layer in memory.facts.layers)
    read = memory.host_and_read[1] / (ETA["cpu"] * bandwidth)
    return 1 / (1 / tps + read + sum(memory.moved_per_token) / LINK_BYTES_S + layers * CROSSING_S)


def _link_bytes_s(memory: Memory) -> float:
    """At which weights go from the mapped files to the device."""
    gpu, bandwidth = memory.where.gpu, memory.machine.cpu.bandwidth
    lanes = LINK_ETA * gpu.link_bytes_s if gpu and gpu.link_bytes_s else LINK_BYTES_S
    return min(lanes, COPY_ETA * bandwidth) if bandwidth else lanes


def stream_rows(memory: Memory) -> int:
    """From how many rows on an expert in host memory takes less time where it is streamed; 0: it never is.

    Not where a token's result must not depend on the others: both sides round otherwise.
    """
    cpu, gpu = memory.machine.cpu, memory.where.gpu
    if not memory.host_experts or gpu is None or memory.options.deterministic is True:
        return 0
    layers = sum(isinstance(layer.ffn, Experts) for layer in memory.facts.layers)
    values = memory.facts.num_params * expert_share(memory.facts) / (expert_counts(memory.facts)[0] * layers)
    row_s = 2 * values / (cpu.cores_usable * CORE_FLOPS.get(cpu.isa, SLOW_CORE_FLOPS))
    return max(2, math.ceil((memory.expert_bytes / _link_bytes_s(memory) + STREAM_S) / row_s))


def _streaming_s(memory: Memory) -> float:
    """Per token of a long prompt, the time that streaming takes; 0 where experts have too few rows of a step for it."""
    count, top_k = expert_counts(memory.facts)
    least = stream_rows(memory)
    if not least or memory.rows * top_k / count < least:
        return 0.0
    experts = memory.host_and_read[0] / max(1, memory.expert_bytes)
    return (memory.host_and_read[0] / _link_bytes_s(memory) + experts * STREAM_S) / memory.rows


def model_key(facts: ModelFacts) -> tuple[str, int, str, int]:
    """What makes two files the same model for a bench."""
    return facts.architecture, facts.num_params, facts.stored_format, facts.weight_bytes


def subject(facts: ModelFacts, made: Plan, machine: MachineFacts) -> dict[str, Any]:
    """What a bench writes down about what it measured, so that `load` finds it again."""
    architecture, params, stored_format, stored_bytes = model_key(facts)
    gpu = None if made.device == "cpu" else machine.gpus[int(made.device.removeprefix("cuda:"))]
    beside = " and the CPU" if made.host_experts else ""  # no other plan is calibrated by it
    return {
        "architecture": architecture,
        "params": params,
        "format": stored_format,
        "stored_bytes": stored_bytes,
        "layers": facts.num_layers,
        "launches": made.launches,
        "read_bytes": made.read_bytes,
        "kv": made.kv,
        "ctx": made.ctx,
        "device": gpu.name + beside if gpu else "cpu",
        "cpu": machine.cpu.name,
        "cores": machine.cpu.cores_usable,
    }


def remember(facts: ModelFacts, made: Plan, machine: MachineFacts, tps: float) -> None:
    """Keep the pace of answers for the next plan of this model; other models' estimates do not change."""
    what = subject(facts, made, machine)
    name = hashlib.sha256(repr((model_key(facts), what["device"])).encode()).hexdigest()[:16]
    rows = [{"test": "tg64", "tps": round(tps, 1)}]
    with contextlib.suppress(OSError):
        file = paths.data_dir() / "bench" / f"answers-{name}.json"
        paths.replace_file(file, json.dumps({"from": ANSWERS, "subject": what, "rows": rows}))


def load(machine: MachineFacts, folder: Path | None = None) -> Speeds:
    """The benches saved on this machine."""
    place = folder or paths.data_dir() / "bench"
    try:
        files = sorted((f for f in place.glob("*.json") if f.is_file()), key=lambda f: f.stat().st_mtime, reverse=True)
    except OSError:
        return Speeds()
    return Speeds(tuple(one for file in files[:MAX_FILES] if (one := _read(file, machine))), tuple(_links()))


def link_name(machine: MachineFacts, gpus: Iterable[GpuFacts]) -> str:
    """What is between cards of this kind; without any, between processes on this CPU."""
    return " + ".join(sorted({gpu.name for gpu in gpus})) or f"{machine.cpu.name} x {machine.cpu.cores_usable}"


def remember_link(name: str, link: Link) -> None:
    """Keep what was measured for the next plan."""
    kept = {at: [one.sum_s, one.bytes_s] for at, one in _links()} | {name: [link.sum_s, link.bytes_s]}
    with contextlib.suppress(OSError):
        paths.replace_file(_links_file(), json.dumps({"links": kept}))


def _links_file() -> Path:
    return paths.data_dir() / "links.json"


def _links() -> Iterator[tuple[str, Link]]:
    kept = paths.read_json(_links_file(), MAX_FILE_BYTES).get("links")
    for name, numbers in kept.items() if isinstance(kept, dict) else ():
        with contextlib.suppress(ValueError, TypeError):
            sum_s, bytes_s = map(float, numbers)
            if 0 < sum_s < 1 and 0 < bytes_s < math.inf:
                yield name, Link(sum_s, bytes_s, is_measured=True)


def _read(file: Path, machine: MachineFacts) -> Measurement | None:
    """What a file says of this machine; None where it says nothing, or cannot be read."""
    try:
        saved = paths.read_json(file, MAX_FILE_BYTES)
        what, rows = saved["subject"], saved["rows"]
        device = str(what["device"])
        here = (what["cpu"], what["cores"]) == (machine.cpu.name, machine.cpu.cores_usable)
        tps = next((float(row["tps"]) for row in rows if _DECODE.fullmatch(str(row["test"]))), 0.0)
        if not (here if device == "cpu" else device in {gpu.name for gpu in machine.gpus}) or not 0 < tps < MAX_TPS:
            return None
        model = (str(what["architecture"]), int(what["params"]), str(what["format"]), int(what["stored_bytes"]))
        kind = "cpu" if device == "cpu" else "cuda"
        prefill = next((float(row["tps"]) for row in rows if _PREFILL.fullmatch(str(row["test"]))), 0.0)
        rest_s = rest_s_of(int(what["layers"]), int(what.get("launches", 0)), kind)
        read = 0.0 if saved.get("from") == ANSWERS else bytes_s_of(tps, int(what["read_bytes"]), rest_s)
        return Measurement(model, device, tps, read, prefill if 0 < prefill < MAX_TPS else 0.0)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None

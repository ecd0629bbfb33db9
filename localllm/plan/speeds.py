"""Expected decode and prefill speeds: estimates from bandwidth, corrected by benchmarks saved on this machine.

`localllm bench` saves its results in the data folder; chats and servers save the decode speed of their answers. Results
of other machines and unreadable files are ignored. A measured model uses its own numbers, and benchmarks also calibrate
the estimates for other models.
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
from localllm.models.architectures.mixers import CompressedAttention, LatentAttention
from localllm.plan.memory import Memory
from localllm.plan.plan import Plan

# Fraction of the memory bandwidth that decoding reaches. gemma3-270m measured 0.78 on two EPYC cores reading 27 GB/s.
# For an 8B, an H100 takes 0.75 (bfloat16) to 0.90 (NVFP4) of the time estimated with these; other GPUs reach less.
ETA = {"cpu": 0.7, "cuda": 0.75}
MIXED_ETA = 0.5  # the same for MoE models on a GPU: Qwen3-30B-A3B on an H100 takes 0.8 of the time estimated with it
# time per layer and token that bandwidth does not explain: calls, norms, small matmuls
LAYER_S = {"cpu": 30e-6, "cuda": 40e-6}
# one kernel launch by PyTorch, outside fused kernels and graphs: assumed, not measured
LAUNCH_S = {"cpu": 0.0, "cuda": 5e-6}
# moving a layer's rows to the CPU and back: one device sync and one copy each way, over PCIe 4.0 x8
CROSSING_S, LINK_BYTES_S = 60e-6, 12e9
# fraction of the PCIe bandwidth that a copy reaches; fraction of the host bandwidth, since it reads and writes weights
LINK_ETA, COPY_ETA = 0.8, 1 / 3
STREAM_S = 300e-6  # fixed cost of streaming one expert: not measured on a GPU
# Fraction of a GPU's published dense 16-bit FLOPS that prefill reaches. Measured with 4,096 tokens of an 8B on an H100:
# 0.46 (NVFP4), 0.50 (INT4) and 0.69 (bfloat16).
PREFILL_ETA = 0.4
# FLOPS per core during prefill. Measured with Qwen3-1.7B and 4B, Q4_K_M, 256 tokens, two cores: AMX 350e9 to 660e9,
# depending on other tenants' load; VNNI 130e9 on the same CPU, 220e9 on Cascade Lake, 265e9 on Zen 4 (Q8_0 190e9);
# AVX-512 without VNNI 110e9 to 135e9; AVX2 81e9 to 93e9. NEON was not measured.
CORE_FLOPS = {"amx": 350e9, "avx512_vnni": 180e9, "avx512": 100e9, "avx2": 75e9, "neon_dotprod": 40e9}
SLOW_CORE_FLOPS = 4e9
LATENT_LAUNCHES = 9  # of kernels/triton/latent.py for one token
DEFAULT_VOTES = 2  # weight of the assumed value in a median: up to this many benchmarked models leave it in charge
ANSWERS = "answers"  # origin of a file that a chat or a server wrote instead of a benchmark
MAX_FILES = 200
MAX_FILE_BYTES = 1 << 20
MAX_TPS = 1e6
_DECODE = re.compile(r"tg\d+")
_PREFILL = re.compile(r"pp\d+")
_INSTANCE = re.compile(r" MIG (\d)[cg]\.")  # compute slices, out of 7, in the name of a MIG instance


def launches_of(facts: ModelFacts, ctx: int, fused: bool = False) -> int:
    """Kernels launched one by one for a token at position `ctx` when no graph captures them, besides the few that any
    layer has. `fused`: our kernels run latent and compressed attention.
    """
    latents = [mixer for mixer in facts.attention if isinstance(mixer, LatentAttention)]
    mixed = LATENT_LAUNCHES * len(latents) if fused else sum(mixer.launches(ctx) for mixer in latents)
    mixed += sum(mixer.index.launches for mixer in facts.attention if mixer.index is not None)
    compressed = [mixer for mixer in facts.attention if isinstance(mixer, CompressedAttention)]
    mixed += sum(mixer.fused_launches if fused else mixer.launches for mixer in compressed)
    if facts.hyper is not None:
        mixed += 2 * facts.num_layers * facts.hyper.launches
    return mixed + sum(layer.ffn.launches * times for layer, times in facts.kinds if isinstance(layer.ffn, Experts))


def tps_of(bytes_s: float, read_bytes: int, rest_s: float) -> float:
    """Tokens per second when each token reads `read_bytes` at `bytes_s`; 0 if the rate is not known.

    rest_s   time per token on top of reading
    """
    return 1 / (read_bytes / bytes_s + rest_s) if bytes_s else 0.0


def rest_s_of(num_layers: int, launches: int, kind: str) -> float:
    """Seconds per token that bandwidth does not explain."""
    return num_layers * LAYER_S[kind] + launches * LAUNCH_S[kind]


def bytes_s_of(tps: float, read_bytes: int, rest_s: float) -> float:
    """The read rate implied by a measured decode speed (inverse of `tps_of`); 0 if there is none."""
    reading_s = 1 / tps - rest_s if tps > 0 else 0.0
    return read_bytes / reading_s if reading_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Measurement:
    """One benchmark result: model, device and single-stream speeds."""

    model: tuple[str, int, str, int]  # architecture, parameters, stored format, stored bytes
    device: str  # cpu, or the GPU's name
    tps: float
    bytes_s: float  # weight bytes read per second
    prefill_tps: float = 0.0


@dataclass(frozen=True, slots=True)
class Link:
    """Speed of the link between ranks.

    sum_s    latency of one all-reduce
    bytes_s  all-reduce throughput for large tensors
    """

    sum_s: float
    bytes_s: float
    is_measured: bool = False

    def seconds(self, nbytes: float) -> float:
        """Time of one all-reduce of `nbytes`."""
        return self.sum_s + nbytes / self.bytes_s


# "cpu": between processes, measured 100 to 400 us on two EPYC cores. "cuda" and "far" (GPUs with and without
# peer-to-peer access) are not measured.
ASSUMED_LINKS = {"cpu": Link(200e-6, 1e9), "cuda": Link(25e-6, 10e9), "far": Link(40e-6, 5e9)}


@dataclass(frozen=True, slots=True)
class Speeds:
    """Measurements of one machine, newest first."""

    measured: tuple[Measurement, ...] = ()
    links: tuple[tuple[str, Link], ...] = ()  # (name from `link_name`, link)

    def link(self, name: str, kind: str) -> Link:
        """The measured link, else the assumed one for `kind`."""
        return dict(self.links).get(name) or ASSUMED_LINKS[kind]

    def bytes_s(self, facts: ModelFacts, device: str) -> float | None:
        """Weight bytes read per second: the median over models in the same format, else over all."""
        there = [m for m in self.measured if m.device == device and m.bytes_s]
        alike = [m.bytes_s for m in there if m.model[2] == facts.stored_format] or [m.bytes_s for m in there]
        return statistics.median(alike) if alike else None

    def tps(self, facts: ModelFacts, device: str) -> float | None:
        """Decode speed of this very model at the start of its context, from the newest benchmark."""
        wanted = model_key(facts)
        return next((m.tps for m in self.measured if m.device == device and m.model == wanted), None)

    def steady_eta(self, device: str, bandwidth: float, assumed: float) -> float:
        """The bandwidth fraction for comparing models: a median over each model's best benchmark and the assumption.

        Each model counts with its best benchmark because interference only ever slows one down.
        """
        best: dict[tuple[str, int, str, int], float] = {}
        for m in self.measured:
            if m.device == device and m.bytes_s and bandwidth:
                best[m.model] = max(best.get(m.model, 0.0), m.bytes_s / bandwidth)
        return statistics.median([*best.values(), *[assumed] * DEFAULT_VOTES])

    def expected(self, memory: Memory, ctx: int) -> dict[str, Any]:
        """Speed fields of a `Plan`: decode at the start and end of the context and prefill, measured or estimated."""
        facts, kind, gpu = memory.facts, memory.where.kind, memory.where.gpu
        bandwidth, name = (gpu.bandwidth, gpu.name) if gpu else (memory.machine.cpu.bandwidth, "cpu")
        reached, measured = self.bytes_s(facts, name), self.tps(facts, name)
        is_mixed = kind == "cuda" and any(isinstance(layer.ffn, Experts) for layer, _ in facts.kinds)
        assumed = MIXED_ETA if is_mixed else ETA[kind]
        eta = reached / bandwidth if reached and bandwidth else assumed
        steady = self.steady_eta(name, bandwidth, assumed)
        read = memory.weights_and_read[1] + 2 * memory.slot_bytes  # states are read and written
        full = read + memory.sequence_bytes(ctx) - memory.unseen_bytes(ctx)
        fused = gpu is not None and gpu.capability >= 80 and memory.options.deterministic is not True
        first, last = (0 if memory.graph_buckets else launches_of(facts, behind, fused) for behind in (0, ctx))
        start, end, pace = (
            tps_of(share * bandwidth, count, rest_s_of(facts.num_layers, launches, kind))
            for share, count, launches in ((eta, read, first), (eta, full, last), (steady, read, first))
        )
        if memory.host_experts:  # the measurements were taken with all experts on the GPU
            measured = None
            start, end, pace = (_with_host(tps, memory) for tps in (start, end, pace))
        basis = "measured" if measured else "estimate"
        if measured:
            start, end = measured, measured * end / start if start else end
        found = {"decode_tps": start, "decode_tps_full": end, "basis": basis, "eta": eta, "bandwidth": bandwidth}
        found["launches"] = first
        return found | {"pace": pace or start, "prefill_tps": self._prefill(memory, name)}

    def _prefill(self, memory: Memory, name: str) -> float:
        """Prompt tokens per second: measured for this very model, else its FLOPs over the processor's FLOPS."""
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
        share = away / max(1, own + away)  # fraction of the FLOPs that the CPU computes
        on_host = cpu.cores_usable * CORE_FLOPS.get(cpu.isa, SLOW_CORE_FLOPS)
        seconds = (1 - share) / flops + share / on_host if flops else 0.0
        computed = seconds * 2 * max(products, facts.num_params // 8) * facts.active_share
        return 1 / (computed + streamed) if computed else 0.0


def _with_host(tps: float, memory: Memory) -> float:
    """A decode speed with the time added for experts on the CPU and for transferring activations."""
    bandwidth = memory.machine.cpu.bandwidth
    if not (tps and bandwidth):
        return 0.0
    layers = sum(isinstance(layer.ffn, Experts) for layer in memory.facts.layers)
    read = memory.host_and_read[1] / (ETA["cpu"] * bandwidth)
    return 1 / (1 / tps + read + sum(memory.moved_per_token) / LINK_BYTES_S + layers * CROSSING_S)


def _link_bytes_s(memory: Memory) -> float:
    """Bytes per second at which weights are copied from mapped files to the device."""
    gpu, bandwidth = memory.where.gpu, memory.machine.cpu.bandwidth
    lanes = LINK_ETA * gpu.link_bytes_s if gpu and gpu.link_bytes_s else LINK_BYTES_S
    return min(lanes, COPY_ETA * bandwidth) if bandwidth else lanes


def stream_rows(memory: Memory) -> int:
    """Rows from which streaming a host expert to the device is faster than computing it on the CPU; 0: never.

    Deterministic mode never streams: CPU and GPU round differently, so a token's result would depend on the others.
    """
    cpu, gpu = memory.machine.cpu, memory.where.gpu
    if not memory.host_experts or gpu is None or memory.options.deterministic is True:
        return 0
    layers = sum(isinstance(layer.ffn, Experts) for layer in memory.facts.layers)
    values = memory.facts.num_params * expert_share(memory.facts) / (expert_counts(memory.facts)[0] * layers)
    row_s = 2 * values / (cpu.cores_usable * CORE_FLOPS.get(cpu.isa, SLOW_CORE_FLOPS))
    return max(2, math.ceil((memory.expert_bytes / _link_bytes_s(memory) + STREAM_S) / row_s))


def _streaming_s(memory: Memory) -> float:
    """Streaming time per token of a long prompt; 0 if experts get too few rows in a step to be streamed."""
    count, top_k = expert_counts(memory.facts)
    least = stream_rows(memory)
    if not least or memory.rows * top_k / count < least:
        return 0.0
    experts = memory.host_and_read[0] / max(1, memory.expert_bytes)
    return (memory.host_and_read[0] / _link_bytes_s(memory) + experts * STREAM_S) / memory.rows


def model_key(facts: ModelFacts) -> tuple[str, int, str, int]:
    """Identity of a model in benchmark results."""
    return facts.architecture, facts.num_params, facts.stored_format, facts.weight_bytes


def subject(facts: ModelFacts, made: Plan, machine: MachineFacts) -> dict[str, Any]:
    """The `subject` of a saved benchmark, by which `load` finds it again."""
    architecture, params, stored_format, stored_bytes = model_key(facts)
    gpu = None if made.device == "cpu" else machine.gpus[int(made.device.removeprefix("cuda:"))]
    beside = " and the CPU" if made.host_experts else ""  # a separate name, so as not to calibrate other plans
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
    """Save the decode speed of answers for later plans of this model; estimates for other models do not change."""
    what = subject(facts, made, machine)
    name = hashlib.sha256(repr((model_key(facts), what["device"])).encode()).hexdigest()[:16]
    rows = [{"test": "tg64", "tps": round(tps, 1)}]
    with contextlib.suppress(OSError):
        file = paths.data_dir() / "bench" / f"answers-{name}.json"
        paths.replace_file(file, json.dumps({"from": ANSWERS, "subject": what, "rows": rows}))


def load(machine: MachineFacts, folder: Path | None = None) -> Speeds:
    """Load the benchmarks saved on this machine."""
    place = folder or paths.data_dir() / "bench"
    try:
        files = sorted((f for f in place.glob("*.json") if f.is_file()), key=lambda f: f.stat().st_mtime, reverse=True)
    except OSError:
        return Speeds()
    return Speeds(tuple(one for file in files[:MAX_FILES] if (one := _read(file, machine))), tuple(_links()))


def link_name(machine: MachineFacts, gpus: Iterable[GpuFacts]) -> str:
    """Name of the link between these GPUs; without GPUs, between processes on this CPU."""
    return " + ".join(sorted({gpu.name for gpu in gpus})) or f"{machine.cpu.name} x {machine.cpu.cores_usable}"


def remember_link(name: str, link: Link) -> None:
    """Save a measured link for later plans."""
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
    """The measurement in a file; None if it is of another machine or cannot be read."""
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

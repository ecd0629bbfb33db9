"""`Plan`: what runs where, its bytes and the reasons for every choice, and the error for a model that does not fit."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields, replace

from localllm.errors import DoesNotFit
from localllm.terminal import GIB, gib

MIN_CTX = 512  # a smaller context is of no practical use: the plan then reports that the model does not fit


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's part of the model, and the bytes it takes on its device."""

    device: str
    weight_bytes: int
    kv_bytes: int
    work_bytes: int
    margin_bytes: int
    have_bytes: int
    span: tuple[int, int] = (0, 0)  # its layers [first, end) when split by layers
    work_terms: tuple[tuple[str, int], ...] = ()  # the terms of `work_bytes`

    @property
    def need_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.work_bytes + self.margin_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """The execution plan of a model. Bytes are integers and add up: need = weights + KV + work + margin."""

    device: str  # cpu | cuda:N
    dtype: str
    activations: str  # activation quantization of long prompts: fp8 | nvfp4; "" for none
    kv: str
    ctx: int
    page_size: int
    num_pages: tuple[int, ...]  # per cache group
    max_parallel: int
    prefill_budget: int
    threads: int  # compute threads on the CPU
    deterministic: bool
    prefix_cache: bool
    speculation: str  # off | auto (only while it pays) | ngram | draft | mtp
    num_drafts: int  # most draft tokens that one step verifies
    weight_bytes: int
    kv_bytes: int
    work_bytes: int
    margin_bytes: int
    have_bytes: int
    max_ctx: int  # the largest context that fits with any of the formats; 0 when not even the smallest does
    decode_tps: float  # expected tokens per second of one sequence at the start of its context
    decode_tps_full: float  # the same at its end
    pace: float = 0.0  # decode speed for comparing models, robust against one noisy benchmark
    prefill_tps: float = 0.0  # expected prompt tokens per second; 0 when not known
    basis: str = "estimate"  # estimate | measured
    eta: float = 0.0  # fraction of the memory bandwidth that the estimate assumes
    bandwidth: float = 0.0  # bytes per second of the device's memory; 0 when not known
    read_bytes: int = 0  # weight bytes read per decoded token
    launches: int = 0  # kernels launched one by one for a token at the start of the context
    # pages of one sequence at full context plus the minimum of state slots; `kv_bytes` covers every sequence that may
    # run or be kept for reuse
    sequence_bytes: int = 0
    num_slots: int = 0  # state slots for sequences and checkpoints, for models with recurrent layers
    draft_pages: tuple[int, ...] = ()  # per cache group of the draft model; () without one
    draft_slots: int = 0  # state slots of the draft model, if it has recurrent layers
    host_experts: int = 0  # experts per layer that stay in host memory and run on the CPU
    host_bytes: int = 0  # their weights, in addition to `weight_bytes`
    host_read_bytes: int = 0  # bytes of them read per decoded token, on average
    stream_rows: int = 0  # a host expert with at least this many rows in a step is streamed to the device; 0: never
    quant: str = ""  # format that linear layers are quantized to while loading; "" keeps the stored format
    graph_buckets: tuple[int, ...] = ()  # batch sizes whose decode step is captured as a CUDA graph
    guess_buckets: tuple[int, ...] = ()  # token counts of captured verification steps
    work_terms: tuple[tuple[str, int], ...] = ()  # the terms of `work_bytes`
    ranks: tuple[RankPlan, ...] = ()  # one per process of a divided model; the bytes above are those of rank 0
    split: str = "tensor"  # tensor: a part of every layer per rank; layers: some of the layers per rank
    cpus: tuple[int, ...] = ()  # affinity mask of the threads; () for every CPU this process may use
    nodes: tuple[int, ...] = ()  # NUMA nodes to interleave memory over; () for first-touch
    idle: str = ""  # another usable GPU, and what it could do
    link_assumed: bool = False  # the speed of the link between ranks is assumed, not measured
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def first_token_s(self, prompt: int) -> float:
        """Seconds until the first token of an answer to a prompt of `prompt` tokens; 0 when not known."""
        return prompt / self.prefill_tps + 1 / self.decode_tps if self.prefill_tps and self.decode_tps else 0.0

    @property
    def need_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.work_bytes + self.margin_bytes

    @property
    def least_bytes(self) -> int:
        """Need with pages for a single sequence only: with less, the model does not start."""
        return self.need_bytes - self.kv_bytes + self.sequence_bytes

    @property
    def fits(self) -> bool:
        return all(one.need_bytes <= one.have_bytes for one in self.ranks or (self,))

    @property
    def place(self) -> str:
        """Name of the memory in use, for messages."""
        return "this machine" if self.device == "cpu" else f"GPU {self.device.removeprefix('cuda:')}"

    @property
    def computed_by(self) -> str:
        """Device for the run summary: cuda:0, cpu × 8 threads, 2 ranks (cuda:0 + cuda:1, layers)."""
        threads = f" × {self.threads} threads" if self.device == "cpu" else ""
        if not self.ranks:
            return self.device + threads
        devices = " + ".join(dict.fromkeys(rank.device for rank in self.ranks))
        return f"{len(self.ranks)} ranks ({devices}{threads}{', layers' if self.split == 'layers' else ''})"

    def parts(self) -> dict[str, int]:
        return {
            "weights": self.weight_bytes,
            "kv": self.kv_bytes,
            "work": self.work_bytes,
            "margin": self.margin_bytes,
        }

    def terms(self) -> dict[str, int]:
        """Like `parts`, with the work broken down into its terms."""
        return {"weights": self.weight_bytes, "kv": self.kv_bytes, **dict(self.work_terms), "margin": self.margin_bytes}

    def of_rank(self, rank: int) -> Plan:
        """The plan of one rank, as if it ran alone."""
        one = self.ranks[rank]
        return replace(self, ranks=(), **{f.name: getattr(one, f.name) for f in fields(one) if f.name != "span"})

    def error(self, name: str) -> DoesNotFit:
        """The error for a plan that does not fit: need, limit, and commands that would work."""
        fixes: list[tuple[str, str]] = []
        typed = shlex.quote(name)
        if MIN_CTX <= self.max_ctx < self.ctx:
            fixes.append((f"localllm chat {typed} --ctx {self.max_ctx}", "fits"))
        if self.kv == "f32":
            fixes.append((f"localllm chat {typed} --kv bf16", "halves the cache"))
        if self.device != "cpu":
            fixes.append((f"localllm chat {typed} --device cpu", "uses RAM, slower"))
        fixes.append(("localllm plan", "lists models that fit"))
        if self.ranks:
            each = [one.need_bytes - one.have_bytes for one in self.ranks]
            return self.of_rank(each.index(max(each))).error(name)
        sizes = " + ".join(f"{part} {size / GIB:.1f}" for part, size in self.parts().items())
        return DoesNotFit(
            f"{name} needs {gib(self.need_bytes, 1)} at {self.ctx:,} tokens of context,"
            f" but {self.place} has {gib(self.have_bytes, 1)} free",
            fixes[0][0],
            why=f"{sizes} GiB (plan)",
            fixes=fixes,
            context={
                "need_bytes": self.need_bytes,
                "have_bytes": self.have_bytes,
                "ctx": self.ctx,
                "parts": self.parts(),
            },
        )

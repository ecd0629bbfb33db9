"""`Plan`: what runs where, in bytes that add up, a reason for every choice; and the refusal when it does not fit."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields, replace

from localllm.errors import DoesNotFit
from localllm.terminal import GIB, gib

MIN_CTX = 512  # A smaller window is no help to anyone: the plan then says that the model does not fit.


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one of several processes has of a model, and takes of its device."""

    device: str
    weight_bytes: int
    kv_bytes: int
    work_bytes: int
    margin_bytes: int
    have_bytes: int
    span: tuple[int, int] = (0, 0)  # its layers, where each rank has whole ones
    work_terms: tuple[tuple[str, int], ...] = ()  # what `work_bytes` consists of

    @property
    def need_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.work_bytes + self.margin_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """What runs where. Bytes are whole and add up: need = weights + KV + work + margin."""

    device: str  # cpu | cuda:N
    dtype: str
    activations: str  # what those of long prompts are rounded to: fp8 | nvfp4; "" for nothing
    kv: str
    ctx: int
    page_size: int
    num_pages: tuple[int, ...]  # per cache group
    max_parallel: int
    prefill_budget: int
    threads: int  # that compute on a CPU
    deterministic: bool
    prefix_cache: bool
    speculation: str  # auto | ngram | draft | mtp: tokens are guessed, and checked where that pays or always; off
    num_drafts: int  # guessed tokens that a step checks at most
    weight_bytes: int
    kv_bytes: int
    work_bytes: int
    margin_bytes: int
    have_bytes: int
    max_ctx: int  # the largest context that would fit, in any formats; 0 when not even the smallest does
    decode_tps: float  # expected tokens per second of one sequence at the start of its context
    decode_tps_full: float  # the same at its end
    pace: float = 0.0  # the same for choosing among models: one noisy bench does not move it
    prefill_tps: float = 0.0  # expected prompt tokens per second, 0 when not known
    basis: str = "estimate"  # estimate | measured
    eta: float = 0.0  # share of the memory bandwidth behind the estimate
    bandwidth: float = 0.0  # bytes per second of the device's memory, 0 when not known
    read_bytes: int = 0  # weights read for one token
    launches: int = 0  # kernels that are started one by one for a token at the start of the context
    # pages one sequence takes at full context, and the slots that are there at least; `kv_bytes` holds those of all
    # that may run or be kept for reuse
    sequence_bytes: int = 0
    num_slots: int = 0  # for states of sequences and checkpoints, of a model whose layers keep such
    draft_pages: tuple[int, ...] = ()  # per cache group of the draft model; () where none guesses
    draft_slots: int = 0  # for its states, if its layers keep such
    host_experts: int = 0  # of each layer's experts, how many lie in host memory and are computed by the CPU
    host_bytes: int = 0  # weights there, beside `weight_bytes`
    host_read_bytes: int = 0  # of them read for one token, on average
    stream_rows: int = 0  # one with so many rows of a step is computed on the device all the same; 0: none is
    quant: str = ""  # what linear layers become while loading; "" keeps them as they are stored
    graph_buckets: tuple[int, ...] = ()  # batch sizes whose decode step is captured as a CUDA graph
    guess_buckets: tuple[int, ...] = ()  # tokens of steps with guesses that are captured as well
    work_terms: tuple[tuple[str, int], ...] = ()  # what `work_bytes` consists of
    ranks: tuple[RankPlan, ...] = ()  # where several processes compute the model; the bytes above are those of rank 0
    split: str = "tensor"  # what each has: tensor: a part of every layer; layers: some of the layers
    cpus: tuple[int, ...] = ()  # that the threads may use; () for all that this process may
    nodes: tuple[int, ...] = ()  # over which their memory is spread; () for the node of who writes it first
    idle: str = ""  # another usable card, and what it could do
    link_assumed: bool = False  # what is between the ranks was not measured
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def first_token_s(self, prompt: int) -> float:
        """Seconds until the first token of an answer to so many tokens, 0 when not known."""
        return prompt / self.prefill_tps + 1 / self.decode_tps if self.prefill_tps and self.decode_tps else 0.0

    @property
    def need_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.work_bytes + self.margin_bytes

    @property
    def least_bytes(self) -> int:
        """The same with pages for a single sequence: below this it does not start."""
        return self.need_bytes - self.kv_bytes + self.sequence_bytes

    @property
    def fits(self) -> bool:
        return all(one.need_bytes <= one.have_bytes for one in self.ranks or (self,))

    @property
    def place(self) -> str:
        """For people: where the memory is."""
        return "this machine" if self.device == "cpu" else f"GPU {self.device.removeprefix('cuda:')}"

    @property
    def computed_by(self) -> str:
        """For the run summary: cuda:0, cpu × 8 threads, 2 ranks (cuda:0 + cuda:1, layers)."""
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
        """The same with the work in its terms."""
        return {"weights": self.weight_bytes, "kv": self.kv_bytes, **dict(self.work_terms), "margin": self.margin_bytes}

    def of_rank(self, rank: int) -> Plan:
        """What one of the ranks takes, as if it were alone."""
        one = self.ranks[rank]
        return replace(self, ranks=(), **{f.name: getattr(one, f.name) for f in fields(one) if f.name != "span"})

    def error(self, name: str) -> DoesNotFit:
        """The refusal, with both numbers and commands that would work."""
        fixes: list[tuple[str, str]] = []
        typed = shlex.quote(name)
        if MIN_CTX <= self.max_ctx < self.ctx:
            fixes.append((f"localllm chat {typed} --ctx {self.max_ctx}", "fits"))
        if self.kv == "f32":
            fixes.append((f"localllm chat {typed} --kv bf16", "halves the cache"))
        if self.device != "cpu":
            fixes.append((f"localllm chat {typed} --device cpu", "uses RAM, slower"))
        fixes.append(("localllm plan", "which models fit"))
        if self.ranks:
            each = [one.need_bytes - one.have_bytes for one in self.ranks]
            return self.of_rank(each.index(max(each))).error(name)
        sizes = " + ".join(f"{part} {size / GIB:.1f}" for part, size in self.parts().items())
        return DoesNotFit(
            f"{name} needs {gib(self.need_bytes, 1)} at {self.ctx:,} tokens of context,"
            f" {self.place} has {gib(self.have_bytes, 1)} free",
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

"""Where `gpu.py` measures: a card, or for a rehearsal the CPU with the facts of one and Triton's interpreter."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from localllm.boot.assembly import assemble
from localllm.config import EngineOptions
from localllm.device import MachineFacts, machine
from localllm.engine.engine import Engine
from localllm.kernels import table
from localllm.kernels.triton import ops, product, product_tiles
from localllm.kernels.verify.tuning import gpu_seconds
from localllm.models.architectures.facts import ModelFacts
from localllm.models.model import Model
from localllm.plan.plan import Plan
from localllm.plan.planner import Planner

GIB = 1 << 30
ROWS = 32  # of a program of `gemv_kernel` in a rehearsal: the interpreter takes 18 ms for one, of however many


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    batches: tuple[int, ...] = (1, 2, 4, 8, 32, 64)
    contexts: tuple[int, ...] = (512, 4096, 32768)  # of decoding, and prompts to read
    ctx: int = 4096  # of the deciding lines
    deep: int = 32768
    many: tuple[int, int] = (64, 1024)  # sequences, and tokens of each
    rivals: tuple[int, int] = (32, 1024)
    budget: int = 2048  # tokens of a chunk
    answer: int = 96  # tokens of an answer that is timed
    same: int = 64  # tokens of answers that are compared
    prompts: tuple[int, ...] = (3, 300, 17, 64, 130, 5)
    steps: int = 24
    copied: int = 2 * GIB
    matrix: int = 8192
    products: tuple[tuple[int, int], ...] = ((256, 512), (1000, 768), (4096, 4096), (6144, 4096), (4096, 12288))


TINY = Sizes(
    batches=(1, 2), contexts=(24,), ctx=24, deep=40, many=(2, 24), rivals=(2, 24), budget=32, answer=4, same=3,
    prompts=(3, 20), steps=3, copied=8 << 20, matrix=256, products=((16, 256),),
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A card of this machine."""

    device: str = "cuda:0"
    sizes: Sizes = field(default_factory=Sizes)
    is_dry = False
    dtype = "bfloat16"

    @property
    def words(self) -> list[str]:
        """Options that lead another process here."""
        return ["--device", self.device]

    @property
    def name(self) -> str:
        """Of the card."""
        return torch.cuda.get_device_name(self.device)

    @property
    def capability(self) -> int:
        """As 90."""
        major, minor = torch.cuda.get_device_capability(self.device)
        return major * 10 + minor

    def model(self, size: str) -> str:
        """The model that stands for one of this size."""
        return size

    def form(self, wanted: str) -> str:
        """The format of weights that stands for one."""
        return wanted

    def kv(self, wanted: str) -> str:
        """The KV format that stands for one."""
        return wanted

    def machine(self, free_bytes: int = 1 << 62) -> MachineFacts:
        """Its facts, as if no more than this were free on its cards."""
        found = machine()
        return replace(found, gpus=tuple(replace(g, free_bytes=min(g.free_bytes, free_bytes)) for g in found.gpus))

    def plan(self, facts: ModelFacts, free_bytes: int = 1 << 62, **options: Any) -> Plan:
        """For one model. Raises DoesNotFit where the plan says so."""
        wanted = EngineOptions(device=self.planned, quant="", **options)
        made = Planner(self.machine(free_bytes), wanted).plan(facts)
        if not made.fits:
            raise made.error(facts.name)
        return made

    @property
    def planned(self) -> str:
        """The device that plans are for."""
        return self.device

    def wait(self) -> None:
        """Until the card has done what it was given."""
        torch.cuda.synchronize(self.device)

    def free(self) -> None:
        """Give unused memory back."""
        torch.cuda.empty_cache()

    def forget_peak(self) -> None:
        """Count `peak_bytes` from here."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        """Most that torch held at once."""
        return torch.cuda.max_memory_allocated(self.device)

    def seconds(self, call: Callable[[], object], runs: int = 10) -> float:
        """Least seconds of a call, by events."""
        for _ in range(3):
            call()
        events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(runs)]
        for begin, end in events:
            begin.record()
            call()
            end.record()
        self.wait()
        return min(begin.elapsed_time(end) for begin, end in events) / 1e3

    def cold_seconds(self, call: Callable[[], object]) -> float:
        """Median seconds of a call that finds nothing in the L2 cache."""
        return gpu_seconds(call)

    def assembled(self, model: Model, plan: Plan) -> Engine:
        """An engine."""
        return assemble(model, plan)


class Rehearsal(Place):
    """No card: its facts are an H100's, its kernels run in Triton's interpreter on models of two tiny layers.

    Numbers are float16, since that interpreter's bfloat16 is wrong; a graph is its steps, run again.
    """

    is_dry = True
    dtype = "float16"
    words = property(lambda self: ["--dry"])
    name = property(lambda self: f"rehearsal on {platform.processor() or platform.machine()}")
    capability = property(lambda self: 90)

    def __init__(self) -> None:
        super().__init__("cpu", TINY)
        as_on_card()

    def model(self, size: str) -> str:
        """One size stands for all, and one for mixtures."""
        return "tiny mixture" if "-A" in size else "tiny"

    def form(self, wanted: str) -> str:
        """The interpreter needs a second for what multiplies 64 rows of four-bit codes: `check products` has them."""
        return "fp8" if wanted in ("int4", "nvfp4") else wanted

    def kv(self, wanted: str) -> str:
        """What the interpreter can hold."""
        return "fp16" if wanted == "bf16" else wanted

    def machine(self, free_bytes: int = 1 << 62) -> MachineFacts:
        """An H100 with little free: what is planned for it is taken here."""
        return super().machine(min(free_bytes, 4 * GIB))

    planned = property(lambda self: "cuda:0")

    def wait(self) -> None:
        """Nothing is under way."""

    free = forget_peak = wait

    def peak_bytes(self) -> int:
        """Nobody counts."""
        return 0

    def seconds(self, call: Callable[[], object], runs: int = 10) -> float:
        """Of one call."""
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    cold_seconds = seconds

    def assembled(self, model: Model, plan: Plan) -> Engine:
        """An engine on the CPU whose graphs are calls."""
        return assemble(model, replace(plan, device="cpu"), capture=_again)


def place_of(device: str, dry: bool) -> Place:
    """For the options of a command."""
    return Rehearsal() if dry else Place(device)


def as_on_card() -> None:
    """Let this process take Triton's kernels, and the plain ones beside them, as it would on a card of sm_90."""

    def fits(asked: Callable[[Any], str | None], facts: Any) -> str | None:
        return asked(replace(facts, device="cuda", capability=90))

    impls: Mapping[str, Any] = {
        op: tuple(replace(impl, fits=partial(fits, impl.fits)) for impl in found) for op, found in ops.IMPLS.items()
    }
    table.BACK_ENDS = (impls, table.PLAIN)
    usual = product_tiles.gemv_tiles

    def gemv_tiles(*shape: Any, **more: Any) -> tuple[product_tiles.Tile, ...]:
        return tuple({**tile, "rows": ROWS} for tile in usual(*shape, **more))

    product.gemv_tiles = product_tiles.gemv_tiles = gemv_tiles  # type: ignore[assignment]


def _again(run: Callable[[], Any]) -> Any:
    outputs = run()

    def replay() -> None:
        for kept, new in zip(outputs, run(), strict=True):
            kept.copy_(new)

    return outputs, replay

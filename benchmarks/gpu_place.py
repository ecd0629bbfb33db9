"""The place where `gpu.py` measures: a GPU, or for a rehearsal the CPU with a GPU's facts and Triton's interpreter."""

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
from localllm.models.dflash import DFlashModel
from localllm.models.eagle3 import Eagle3Model
from localllm.models.model import Model
from localllm.plan.plan import Plan
from localllm.plan.planner import Planner

GIB = 1 << 30
ROWS = 32  # per program of `gemv_kernel` in a rehearsal: the interpreter takes 18 ms per program of any size


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements."""

    batches: tuple[int, ...] = (1, 2, 4, 8, 32, 64)
    contexts: tuple[int, ...] = (512, 4096, 32768)  # for decoding and prefill
    ctx: int = 4096  # of the rows with targets
    deep: int = 32768
    many: tuple[int, int] = (64, 1024)  # sequences, and tokens per sequence
    rivals: tuple[int, int] = (32, 1024)
    budget: int = 2048  # tokens per chunk
    answer: int = 96  # tokens of a timed answer
    same: int = 64  # tokens of compared answers
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
    """A GPU of this machine."""

    device: str = "cuda:0"
    sizes: Sizes = field(default_factory=Sizes)
    is_dry = False
    dtype = "bfloat16"

    @property
    def words(self) -> list[str]:
        """Command-line options that select this place in another process."""
        return ["--device", self.device]

    @property
    def name(self) -> str:
        """Name of the GPU."""
        return torch.cuda.get_device_name(self.device)

    @property
    def capability(self) -> int:
        """As 90."""
        major, minor = torch.cuda.get_device_capability(self.device)
        return major * 10 + minor

    def model(self, size: str) -> str:
        """The model to use for one of this size."""
        return size

    def form(self, wanted: str) -> str:
        """The weight format to use for `wanted`."""
        return wanted

    def kv(self, wanted: str) -> str:
        """The KV format to use for `wanted`."""
        return wanted

    def machine(self, free_bytes: int = 1 << 62) -> MachineFacts:
        """Facts of the machine, with at most `free_bytes` free on its GPUs."""
        found = machine()
        return replace(found, gpus=tuple(replace(g, free_bytes=min(g.free_bytes, free_bytes)) for g in found.gpus))

    def plan(self, facts: ModelFacts, free_bytes: int = 1 << 62, **options: Any) -> Plan:
        """Plan one model. Raises DoesNotFit if the plan says so."""
        wanted = EngineOptions(device=self.planned, quant="", **options)
        made = Planner(self.machine(free_bytes), wanted).plan(facts)
        if not made.fits:
            raise made.error(facts.name)
        return made

    @property
    def planned(self) -> str:
        """The device to plan for."""
        return self.device

    def wait(self) -> None:
        """Wait until the GPU has finished its work."""
        torch.cuda.synchronize(self.device)

    def free(self) -> None:
        """Free unused memory."""
        torch.cuda.empty_cache()

    def forget_peak(self) -> None:
        """Reset `peak_bytes`."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        """Peak memory allocated by torch."""
        return torch.cuda.max_memory_allocated(self.device)

    def seconds(self, call: Callable[[], object], runs: int = 10) -> float:
        """Shortest time of a call in seconds, by CUDA events."""
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
        """Median seconds of a call with a cold L2 cache."""
        return gpu_seconds(call)

    def assembled(self, model: Model, plan: Plan, draft: DFlashModel | Eagle3Model | None = None) -> Engine:
        """Build an engine."""
        return assemble(model, plan, draft=draft)


class Rehearsal(Place):
    """No GPU: the facts are an H100's, and kernels run in Triton's interpreter on models of two tiny layers.

    Numbers are float16 because the interpreter's bfloat16 is wrong; a graph replays its steps as calls.
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
        """Use one size for all models, one for mixtures and one for models of the catalog."""
        return "tiny mixture" if "-A" in size else "tiny" if size[0].isdigit() else "tiny-hybrid"

    def form(self, wanted: str) -> str:
        """No 4-bit products: the interpreter needs a second for 64 rows of them, and `check products` covers them."""
        return "fp8" if wanted in ("int4", "nvfp4", "mxfp4") else wanted

    def kv(self, wanted: str) -> str:
        """The KV format that the interpreter supports."""
        return "fp16" if wanted == "bf16" else wanted

    def machine(self, free_bytes: int = 1 << 62) -> MachineFacts:
        """An H100 with little free memory, because what is planned for it is allocated here."""
        return super().machine(min(free_bytes, 4 * GIB))

    planned = property(lambda self: "cuda:0")

    def wait(self) -> None:
        """Nothing to wait for."""

    free = forget_peak = wait

    def peak_bytes(self) -> int:
        """Not measured."""
        return 0

    def seconds(self, call: Callable[[], object], runs: int = 10) -> float:
        """Seconds of one call."""
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    cold_seconds = seconds

    def assembled(self, model: Model, plan: Plan, draft: DFlashModel | Eagle3Model | None = None) -> Engine:
        """Build an engine on the CPU whose graphs are calls."""
        return assemble(model, replace(plan, device="cpu"), draft=draft, capture=_again)


def place_of(device: str, dry: bool) -> Place:
    """Return the place for the options of a command."""
    return Rehearsal() if dry else Place(device)


def as_on_card() -> None:
    """Make this process choose Triton kernels and PyTorch ops as it would on an sm_90 GPU."""

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

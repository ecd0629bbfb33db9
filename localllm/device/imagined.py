"""A machine that is not here, for `localllm plan --gpu 4090` and the like: this one with some facts replaced."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches

from localllm.errors import ConfigError
from localllm.terminal import GIB, gib

from .facts import GpuFacts, MachineFacts
from .gpu_table import TABLE, named_gpu

FREE_SHARE = 0.98  # of a card's memory, what is free on one that no screen hangs on: a 5090 has 31.4 of 32 GiB to use
DEFAULT_CAPABILITY = 89
UNIFIED = ("GB10", "Thor", "Orin")


def imagined(
    here: MachineFacts,
    *,
    gpu: str | None = None,
    vram_bytes: int | None = None,
    bandwidth: float | None = None,
    ram_bytes: int | None = None,
) -> MachineFacts:
    """This machine with another GPU, or another amount of memory.

    gpu         a card's name: "4090", "RTX 5070 Ti", "h100"
    vram_bytes  its memory; with `gpu` None, a card of unknown make with that much
    bandwidth   bytes per second of that card's memory
    ram_bytes   RAM, all of it free

    Raises ConfigError for a card that is not in the table, and for a bandwidth without a card.
    """
    machine = here if ram_bytes is None else replace(here, ram_total_bytes=ram_bytes, ram_available_bytes=ram_bytes)
    if gpu is None and vram_bytes is None:
        if bandwidth is None:
            return machine
        if not machine.gpus:
            raise ConfigError("--bw is the speed of a GPU's memory, and there is no GPU here", "add --vram 24G")
        return replace(machine, gpus=tuple(replace(g, bandwidth=bandwidth, bandwidth_basis="given") for g in here.gpus))
    card = _card(gpu, vram_bytes, bandwidth, machine)
    return replace(
        machine,
        gpus=(card,),
        gpu_links=(),
        gpu_error="",
        driver="",
        driver_cuda="",
        torch_cuda="13.0",
        compiler=machine.compiler or "cc",
    )


def _card(gpu: str | None, vram_bytes: int | None, bandwidth: float | None, machine: MachineFacts) -> GpuFacts:
    if gpu is None:
        assert vram_bytes is not None
        size = vram_bytes
        name, capability = f"a GPU with {gib(size, 0)}", DEFAULT_CAPABILITY
        speed, basis = bandwidth or 0.0, "given" if bandwidth else "unknown"
        return GpuFacts(name, capability, size, int(size * FREE_SHARE), speed, basis)
    row = named_gpu(gpu)
    if row is None:
        names = [row.name for row in TABLE]
        near = get_close_matches(gpu.upper(), names, 2, 0.4)
        meant = f"; did you mean {' or '.join(near)}?" if near else ""
        hint = f"localllm plan --gpu {near[0]!r}" if near else "localllm plan --vram 24G --bw 1008"
        raise ConfigError(f"no known GPU is called {gpu!r}{meant}", hint)
    size = vram_bytes or int(row.memory_gib * GIB)
    speed = bandwidth or row.bandwidth_gbs * 1e9
    unified = row.name in UNIFIED
    free = int(size * (0.84 if unified else FREE_SHARE))  # CUDA tells at most 102 of a GB10's 121.7 GiB as free
    return GpuFacts(
        f"NVIDIA {row.name}", row.capability, size, free, speed, "given" if bandwidth else "table", unified=unified
    )

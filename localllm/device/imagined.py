"""Hypothetical machines for `localllm plan --gpu 4090`, `--ram` and `--vram`: this machine with some facts replaced."""

from __future__ import annotations

import re
from dataclasses import replace
from difflib import get_close_matches

from localllm.errors import ConfigError
from localllm.terminal import GIB, gib

from .facts import GpuFacts, MachineFacts
from .foreign import why_not
from .gpu_table import TABLE, GpuModel, foreign_gpu, named_gpu

FREE_SHARE = 0.98  # free fraction of a GPU's memory without a display: an RTX 5090 has 31.4 of 32 GiB
UNKNOWN = GpuModel("", "", capability=89, memory_gib=0, bandwidth_gbs=0)  # a GPU of which only the memory is given
UNIFIED = ("GB10", "Thor", "Orin")
UNIFIED_FREE_SHARE = 0.84  # CUDA reports at most 102 of a GB10's 121.7 GiB as free


def imagined(
    here: MachineFacts,
    *,
    gpu: str | None = None,
    vram_bytes: int | None = None,
    bandwidth: float | None = None,
    ram_bytes: int | None = None,
) -> MachineFacts:
    """This machine with another GPU, or with a different amount of memory.

    gpu         name of a GPU: "4090", "RTX 5070 Ti", "h100"; with its memory: "3060 8GB"; several: "2x 3090"
    vram_bytes  GPU memory; if `gpu` is None, of an unknown GPU
    bandwidth   GPU memory bandwidth in bytes per second
    ram_bytes   RAM, all of it free

    Raises ConfigError for an unsupported or unknown GPU, and for a bandwidth without a GPU.
    """
    machine = here if ram_bytes is None else replace(here, ram_total_bytes=ram_bytes, ram_available_bytes=ram_bytes)
    if gpu is None and vram_bytes is None:
        if bandwidth is None:
            return machine
        if not machine.gpus:
            raise ConfigError("--bw sets GPU memory bandwidth, but this machine has no GPU", "add --vram 24G")
        return replace(machine, gpus=tuple(replace(g, bandwidth=bandwidth, bandwidth_basis="given") for g in here.gpus))
    count, gpu = cards_named(gpu)
    return replace(
        machine,
        gpus=(_card(gpu, vram_bytes, bandwidth),) * count,
        gpu_links=(),
        gpu_error="",
        driver="",
        driver_cuda="",
        torch_cuda="13.0",
        compiler=machine.compiler or "cc",
    )


def cards_named(gpu: str | None) -> tuple[int, str | None]:
    """(number of GPUs, name of one) in "2x 3090" or "3090"."""
    named = re.fullmatch(r"([1-8]) ?[x×] ?(.+)", gpu or "", re.IGNORECASE)
    return (int(named[1]), named[2]) if named else (1, gpu)


def other_sizes(gpu: str | None) -> tuple[float, ...]:
    """The other memory sizes, in GiB, that the GPU of this name is sold with."""
    _, gpu = cards_named(gpu)
    row = named_gpu(gpu) if gpu else None
    return tuple(row.also_gib) if row else ()


def _card(gpu: str | None, vram_bytes: int | None, bandwidth: float | None) -> GpuFacts:
    if gpu and vram_bytes is None and (named := re.fullmatch(r"(.+?)[\s-]+(\d+(?:\.\d+)?) ?Gi?B?", gpu, re.IGNORECASE)):
        gpu, vram_bytes = named[1], int(float(named[2]) * GIB)  # "3060 8GB"
    row = UNKNOWN if gpu is None else named_gpu(gpu)
    if row is None:
        assert gpu is not None
        if other := foreign_gpu(gpu):
            what = f"{other.name} ({other.target})" if other.target else other.name
            hint = f"use --vram {other.memory_gib}G --bw {other.bandwidth_gbs}"
            raise ConfigError(f"cannot plan for {what}: {why_not(other.target)}", hint)
        near = get_close_matches(gpu.upper(), [row.name for row in TABLE], 2, 0.4)
        meant = f"; did you mean {' or '.join(near)}?" if near else ""
        hint = f"use --gpu {near[0]!r}" if near else "use --vram 24G --bw 1008"
        raise ConfigError(f"unknown GPU {gpu!r}{meant}", hint)
    size = vram_bytes or int(row.memory_gib * GIB)
    unified = row.name in UNIFIED
    return GpuFacts(
        name=f"a GPU with {gib(size, 0)}" if gpu is None else f"NVIDIA {row.name}",
        capability=row.capability,
        total_bytes=size,
        free_bytes=int(size * (UNIFIED_FREE_SHARE if unified else FREE_SHARE)),
        bandwidth=bandwidth or row.bandwidth_gbs * 1e9,
        bandwidth_basis="given" if bandwidth else "unknown" if gpu is None else "table",
        unified=unified,
    )

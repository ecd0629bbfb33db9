"""Invented machines for the tests and pages of plan and doctor: LOCALLLM_TESTING=1 LOCALLLM_FAKE_HW=rtx4090."""

from __future__ import annotations

from dataclasses import replace

from localllm.errors import ConfigError

from .facts import CpuFacts, GpuFacts, MachineFacts

GIB = 1 << 30
MIB = 1 << 20

_DESKTOP = CpuFacts("Ryzen 9 7950X", "avx512_vnni", ("avx2", "avx512f", "avx512_vnni"), 16, 32, 32, 0.0, 64 * MIB, 60e9)
_CPU = MachineFacts(
    cpu=_DESKTOP,
    ram_total_bytes=64 * GIB,
    ram_available_bytes=56 * GIB,
    torch_version="2.13.0+cpu",
    compiler="/usr/bin/cc",
    platform="Linux 6.8.0",
    arch="x86_64",
)


def _with_gpu(name: str, capability: int, total_mib: int, free_gib: float, speed: float) -> MachineFacts:
    gpu = GpuFacts(name, capability, total_mib * MIB, int(free_gib * GIB), speed * 1e9, "table")
    return replace(_CPU, gpus=(gpu,), driver="580.95.05", driver_cuda="13.0", torch_version="2.13.0", torch_cuda="13.0")


MACHINES = {
    "cpu": _CPU,
    "cpu-small": replace(
        _CPU,
        cpu=CpuFacts("Core i3-1115G4", "avx512_vnni", ("avx2", "avx512f", "avx512_vnni"), 2, 4, 4, 0.0, 6 * MIB, 18e9),
        ram_total_bytes=4 * GIB,
        ram_available_bytes=int(2.5 * GIB),
    ),
    "rtx4060": _with_gpu("NVIDIA GeForce RTX 4060", 89, 8188, 7.6, 272),
    "rtx4090": _with_gpu("NVIDIA GeForce RTX 4090", 89, 24564, 23.5, 1008),
    "rtx5090": _with_gpu("NVIDIA GeForce RTX 5090", 120, 32607, 31.4, 1792),
    "rtx2070": _with_gpu("NVIDIA GeForce RTX 2070", 75, 8192, 7.5, 448),
    "h100": _with_gpu("NVIDIA H100 80GB HBM3", 90, 81559, 78.0, 3350),
}
MACHINES["4060"], MACHINES["4090"] = MACHINES["rtx4060"], MACHINES["rtx4090"]


def fake_machine(name: str) -> MachineFacts:
    """An invented machine by name; ConfigError for a name that is none."""
    if name not in MACHINES:
        raise ConfigError(f"LOCALLLM_FAKE_HW={name} is no known machine", f"use one of: {', '.join(MACHINES)}")
    return MACHINES[name]

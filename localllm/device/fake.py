"""Invented machines for the tests and pages of plan and doctor: LOCALLLM_TESTING=1 LOCALLLM_FAKE_HW=rtx4090.

Sizes, clocks and versions are those of real machines of that kind; each has one or two of the troubles such machines
are known for, so that their pages show what doctor says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from localllm.errors import ConfigError
from localllm.terminal import GIB

from .facts import CpuFacts, DiskFacts, GpuFacts, GpuLink, GpuProcess, HostFacts, MachineFacts

MIB = 1 << 20
_AVX2 = ("avx", "f16c", "fma", "avx2")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16")
_NEON = ("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve2")

_ZEN4 = CpuFacts("AMD Ryzen 9 7950X 16-Core Processor", "avx512_vnni", _AVX512, 16, 32, 32, 0.0, 64 * MIB, 60e9)
_ZEN3 = CpuFacts("AMD Ryzen 5 5600X 6-Core Processor", "avx2", _AVX2, 6, 12, 12, 0.0, 32 * MIB, 40e9)
_ZEN5 = CpuFacts("AMD Ryzen 9 9950X 16-Core Processor", "avx512_vnni", _AVX512, 16, 32, 32, 0.0, 64 * MIB, 65e9)
_EPYC = CpuFacts("AMD EPYC 9354 32-Core Processor", "avx512_vnni", _AVX512, 26, 26, 26, 0.0, 256 * MIB, 300e9)
_THREADRIPPER = CpuFacts(
    "AMD Ryzen Threadripper PRO 9975WX 32-Cores", "avx512_vnni", _AVX512, 32, 64, 64, 0.0, 128 * MIB, 250e9
)
_MOBILE = CpuFacts("Intel Core Ultra 9 275HX", "avx2", (*_AVX2, "avx_vnni"), 24, 24, 24, 0.0, 36 * MIB, 70e9)
_GRACE = CpuFacts("ARM core 0xd85", "neon_dotprod", _NEON, 20, 20, 20, 0.0, 16 * MIB, 200e9)
_I3 = CpuFacts("11th Gen Intel Core i3-1115G4", "avx512_vnni", _AVX512[:-1], 2, 4, 4, 0.0, 6 * MIB, 18e9)

_CPU = MachineFacts(
    cpu=_ZEN4,
    ram_total_bytes=64 * GIB,
    ram_available_bytes=56 * GIB,
    torch_version="2.13.0+cpu",
    compiler="/usr/bin/cc",
    platform="Linux 6.8.0-45-generic",
    arch="x86_64",
)
_PACKAGES = {"torch": "2.13.0", "triton": "3.9.0", "transformers": "5.23.0", "huggingface-hub": "2.4.0"}
_HOST = HostFacts(
    packages=_PACKAGES,
    programs={"nvidia-smi": "/usr/bin/nvidia-smi"},
    ptxas="13.0",
    python="3.12.8",
    prefix="/home/ada/.venv",
    headers="/usr/include/python3.12/Python.h",
    governor="performance",
    disk=DiskFacts("~/.cache/huggingface/hub", 212 * GIB, 1862 * GIB, "nvme", "ext4"),
    hub_ms=38.0,
)


def _card(name: str, capability: int, total_mib: int, free_gib: float, speed: float, **more: Any) -> GpuFacts:
    given: dict[str, Any] = {"pcie_width": 16, "pcie_width_max": 16, "pcie_gen_max": 4, "temperature_c": 41}
    given |= {"display": False, "bandwidth_basis": "driver"} | more
    return GpuFacts(name, capability, total_mib * MIB, int(free_gib * GIB), speed * 1e9, **given)


def _with(*gpus: GpuFacts, **more: Any) -> MachineFacts:
    given: dict[str, Any] = {"driver": "580.95.05", "driver_cuda": "13.0"}
    given |= {"torch_version": "2.13.0+cu130", "torch_cuda": "13.0"} | more
    numbered = tuple(replace(gpu, index=i, uuid=f"GPU-{i:08d}") for i, gpu in enumerate(gpus))
    return replace(_CPU, gpus=numbered, **given)


def _desktop(free: float, *names: str) -> dict[str, Any]:
    sizes = [int(free / len(names) * GIB)] * len(names)
    held = tuple(GpuProcess(1800 + i, size, name) for i, (name, size) in enumerate(zip(names, sizes, strict=True)))
    return {"display": True, "processes": held}


_RTX5090 = _card(
    "NVIDIA GeForce RTX 5090", 120, 32607, 31.0, 1792, pcie_gen_max=5, power_limit_w=575.0, power_max_w=575.0
)
MACHINES = {
    "cpu": _CPU,
    "cpu-small": replace(_CPU, cpu=_I3, ram_total_bytes=4 * GIB, ram_available_bytes=int(2.5 * GIB)),
    "rtx3060": _with(
        _card("NVIDIA GeForce RTX 3060", 86, 12288, 11.2, 360, power_limit_w=170.0, power_max_w=170.0,
              **_desktop(0.5, "gnome-shell", "Xorg")),
        cpu=_ZEN3, ram_total_bytes=32 * GIB, ram_available_bytes=26 * GIB, driver="570.195.03", driver_cuda="12.8",
        torch_version="2.13.0+cu126", torch_cuda="12.6",
    ),
    "rtx3090": _with(
        _card("NVIDIA GeForce RTX 3090", 86, 24576, 23.7, 936, power_limit_w=200.0, power_max_w=350.0)
    ),
    "rtx4060": _with(_card("NVIDIA GeForce RTX 4060", 89, 8188, 7.6, 272, power_limit_w=115.0, power_max_w=115.0)),
    "rtx4090": _with(
        _card("NVIDIA GeForce RTX 4090", 89, 24564, 23.5, 1008, power_limit_w=300.0, power_max_w=450.0)
    ),
    "rtx5070ti": _with(
        _card("NVIDIA GeForce RTX 5070 Ti", 120, 16303, 15.4, 896, pcie_gen_max=5, power_limit_w=300.0,
              power_max_w=300.0, **_desktop(0.4, "plasmashell")),
        torch_version="2.13.0+cu126", torch_cuda="12.6",
    ),
    "rtx5090": _with(replace(_RTX5090, pcie_width=4), cpu=_ZEN5, ram_total_bytes=96 * GIB,
                     ram_available_bytes=88 * GIB),
    "rtxpro6000": _with(
        _card("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 120, 97887, 94.6, 1792, pcie_gen_max=5, ecc=True,
              power_limit_w=600.0, power_max_w=600.0),
        cpu=_THREADRIPPER, ram_total_bytes=256 * GIB, ram_available_bytes=240 * GIB,
    ),
    "gb10": _with(
        GpuFacts("NVIDIA GB10", 121, int(110 * GIB), int(110 * GIB), 273e9, "table", unified=True, display=False,
                 temperature_c=44),
        cpu=_GRACE, ram_total_bytes=int(121.7 * GIB), ram_available_bytes=int(110 * GIB), arch="aarch64",
        platform="Linux 6.11.0-1016-nvidia",
    ),
    "h100": _with(
        _card("NVIDIA H100 80GB HBM3", 90, 81559, 79.1, 3350, pcie_gen_max=5, ecc=True, power_limit_w=700.0,
              power_max_w=700.0),
        cpu=_EPYC, ram_total_bytes=224 * GIB, ram_available_bytes=215 * GIB, ram_limit="cgroup", container="docker",
        driver="570.172.08", driver_cuda="12.8", torch_version="2.13.0+cu128", torch_cuda="12.8",
    ),
    "rtx5090x2": _with(
        replace(_RTX5090, pcie_width=8, pcie_width_max=16), replace(_RTX5090, pcie_width=8, pcie_width_max=16),
        cpu=_ZEN5, ram_total_bytes=128 * GIB, ram_available_bytes=118 * GIB,
        gpu_links=(GpuLink(0, 1, "PHB", "these cards do not support it"),),
    ),
    "laptop": _with(
        _card("NVIDIA GeForce RTX 5090 Laptop GPU", 120, 24463, 23.2, 896, pcie_width=8, pcie_width_max=8,
              pcie_gen_max=5, power_limit_w=95.0, power_max_w=150.0, temperature_c=87, throttle=("heat",),
              **_desktop(0.3, "gnome-shell")),
        cpu=_MOBILE, ram_total_bytes=64 * GIB, ram_available_bytes=50 * GIB,
    ),
    "wsl2": _with(
        _card("NVIDIA GeForce RTX 4070", 89, 12282, 10.9, 504, power_limit_w=200.0, power_max_w=200.0, display=True),
        cpu=_ZEN3, ram_total_bytes=int(15.5 * GIB), ram_available_bytes=int(13.8 * GIB), swap_total_bytes=4 * GIB,
        swap_free_bytes=4 * GIB, wsl=2, compiler="", platform="Linux 5.15.153.1-microsoft-standard-WSL2",
    ),
    "rtx2070": _with(_card("NVIDIA GeForce RTX 2070", 75, 8192, 7.5, 448, power_limit_w=185.0, power_max_w=185.0)),
}  # fmt: skip
MACHINES["4060"], MACHINES["4090"] = MACHINES["rtx4060"], MACHINES["rtx4090"]
# the machines whose pages are kept as golden files
PROFILES = (
    "rtx3060", "rtx3090", "rtx4090", "rtx5070ti", "rtx5090", "rtxpro6000", "gb10", "h100", "rtx5090x2", "laptop",
    "wsl2", "cpu",
)  # fmt: skip

_HOSTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "governor": "powersave",
        "governor_driver": "acpi-cpufreq",
        "programs": {},
        "ptxas": "",
        "packages": {"torch": "2.13.0+cpu", "triton": "3.9.0"},
    },
    "rtx3060": {
        "programs": {"nvidia-smi": "/usr/bin/nvidia-smi", "ollama": "/usr/local/bin/ollama"},
        "disk": DiskFacts("~/.cache/huggingface/hub", 640 * GIB, 3725 * GIB, "hdd", "ext4"),
    },
    "rtx3090": {"packages": _PACKAGES | {"vllm": "0.27.1", "flashinfer-python": "0.6.18"}},
    "rtx5090": {
        "packages": _PACKAGES | {"vllm": "0.27.1", "flashinfer-python": "0.6.18"},
        "programs": {"nvidia-smi": "/usr/bin/nvidia-smi", "nvcc": "/usr/local/cuda-12.8/bin/nvcc"},
        "toolkit": "12.8",
    },
    "rtxpro6000": {
        "packages": _PACKAGES | {"sglang": "0.5.12", "sgl-kernel": "0.3.21"},
        "variables": {"SGLANG_PYNCCL_SKIP_WARMUP": "1"},
        "numa_nodes": 4,
    },
    "gb10": {
        "ptxas": "12.8",
        "ptxas_variable": "TRITON_PTXAS_BLACKWELL_PATH",
        "variables": {
            "TRITON_PTXAS_PATH": "/usr/local/cuda-12.8/bin/ptxas",
            "TRITON_PTXAS_BLACKWELL_PATH": "/usr/local/cuda-12.8/bin/ptxas",
        },
        "packages": _PACKAGES | {"vllm": "0.24.0"},
    },
    "h100": {
        "ptxas": "12.9", "prefix": "/usr", "variables": {"CUDA_VISIBLE_DEVICES": "0"},
        "disk": DiskFacts("~/.cache/huggingface/hub", 24 * GIB, 100 * GIB, "", "overlay"),
    },
    "rtx5090x2": {
        "packages": _PACKAGES | {"vllm": "0.27.1", "nvidia-nccl-cu13": "2.28.3"},
        "iommu": True,
        "variables": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    },
    "laptop": {"governor": "powersave", "governor_driver": "intel_pstate", "on_battery": True},
    "wsl2": {
        "wsl_release": "5.15.153.1-microsoft-standard-WSL2", "governor": "", "headers": "",
        "disk": DiskFacts("/mnt/c/models/hf/hub", 90 * GIB, 953 * GIB, "network", "9p"),
    },
}  # fmt: skip


def fake_machine(name: str) -> MachineFacts:
    """An invented machine by name; ConfigError for an unknown name."""
    if name not in MACHINES:
        raise ConfigError(f"LOCALLLM_FAKE_HW={name} is not a known machine", f"use one of: {', '.join(MACHINES)}")
    return MACHINES[name]


def fake_host(name: str) -> HostFacts:
    """What surrounds it."""
    given = _HOSTS.get(name, {})
    packages = given.get("packages", _PACKAGES) | {"torch": fake_machine(name).torch_version}
    return replace(_HOST, **(given | {"packages": packages}))

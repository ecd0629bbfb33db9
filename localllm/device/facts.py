"""The values that describe a machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CpuFacts:
    """The CPU as this process may use it."""

    name: str
    isa: str  # the widest instructions our kernels know: avx512_vnni, avx512, avx2, neon_dotprod, neon, or generic
    flags: tuple[str, ...] = ()  # all of the CPU's instruction sets that matter here
    cores_usable: int = 1  # physical cores within the affinity mask and the cgroup's quota, at least 1
    cpus_usable: int = 1  # the same counted in logical CPUs
    cpus_total: int = 1  # logical CPUs of the machine
    quota: float = 0.0  # CPUs' worth of time a cgroup allows; 0 is no limit
    cache_bytes: int = 0  # last-level cache
    bandwidth: float = 0.0  # bytes per second all usable cores read from memory
    bandwidth_basis: str = "guess"  # measured | guess


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """Somebody else's, or our own, hold on a GPU's memory."""

    pid: int
    used_bytes: int  # 0 when the driver does not say
    name: str = ""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One NVIDIA GPU, in the order CUDA would number them with CUDA_DEVICE_ORDER=PCI_BUS_ID."""

    name: str
    capability: int  # 89 for compute capability 8.9
    total_bytes: int
    free_bytes: int
    bandwidth: float = 0.0  # bytes per second; 0 when neither the driver nor the table knows
    bandwidth_basis: str = "unknown"  # driver (memory clock x bus width) | table | unknown
    index: int = 0
    uuid: str = ""
    unified: bool = False  # shares the machine's RAM: free and total are the machine's
    power_limit_w: float = 0.0
    power_max_w: float = 0.0  # the limit it came with; 0 when the driver does not say
    power_draw_w: float = 0.0
    pcie_width: int = 0  # lanes in use; 0 when the driver does not say
    pcie_width_max: int = 0
    pcie_gen_max: int = 0  # what card and board can do together; the one in use falls at rest, so it says nothing
    temperature_c: int = 0
    throttle: tuple[str, ...] = ()  # why clocks are held down right now: heat, power, brake
    ecc: bool | None = None  # None where the card has none or does not say
    mig: bool = False  # cut into instances
    display: bool | None = None  # whether a screen hangs on it
    processes: tuple[GpuProcess, ...] = ()

    @property
    def has_bf16(self) -> bool:
        """sm_80 and later."""
        return self.capability >= 80

    @property
    def has_fp8(self) -> bool:
        """sm_89 and later."""
        return self.capability >= 89

    @property
    def has_fp4(self) -> bool:
        """sm_100 and later."""
        return self.capability >= 100


@dataclass(frozen=True, slots=True)
class GpuLink:
    """How two GPUs reach each other, as the driver tells it."""

    first: int
    second: int  # places in `MachineFacts.gpus`
    path: str  # same board, PIX, PXB, PHB, NODE, SYS: ever farther apart
    p2p: str  # ok, or why one cannot read the other's memory


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Everything the planner and the doctor decide on."""

    cpu: CpuFacts
    ram_total_bytes: int  # the smallest of installed RAM, cgroup limits and `ulimit -v`
    ram_available_bytes: int  # what may still be taken without swapping or breaking a limit
    ram_limit: str = ""  # what makes the total smaller than the RAM: "cgroup", "ulimit", or nothing
    swap_total_bytes: int = 0
    swap_free_bytes: int = 0
    gpus: tuple[GpuFacts, ...] = ()
    gpu_links: tuple[GpuLink, ...] = ()  # one per pair of GPUs
    gpu_error: str = ""  # why the driver did not answer although there is one
    driver: str = ""  # 575.51.03; nothing without an NVIDIA driver
    driver_cuda: str = ""  # newest CUDA the driver supports: 12.9
    torch_version: str = ""  # of the installed torch, nothing when there is none
    torch_cuda: str = ""  # CUDA the installed torch was built with, nothing for a CPU build
    compiler: str = ""  # command of a C compiler (for the CPU kernels and Triton's launcher), nothing without one
    platform: str = ""
    arch: str = ""  # x86_64 | aarch64
    wsl: int = 0  # 1 or 2 inside WSL
    container: str = ""  # docker, podman, kubernetes, lxc, or nothing

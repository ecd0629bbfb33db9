"""The values that describe a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

EFFICIENT = 0.8  # cores below this speed count as efficient ones; those of one kind differ by less


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core."""

    cpus: tuple[int, ...]  # its logical CPUs, those that this process may use
    speed: float = 1.0  # of the fastest core's, as the kernel rates it
    efficient: bool = False  # of the slower kind, on a machine that has two
    node: int = 0  # the memory node beside it


@dataclass(frozen=True, slots=True)
class MemoryNode:
    """Memory that is nearer to some cores than to others."""

    index: int
    total_bytes: int
    free_bytes: int
    near: tuple[int, ...] = ()  # the nodes of its socket, itself among them


@dataclass(frozen=True, slots=True)
class CpuFacts:
    """The CPU as this process may use it."""

    name: str
    isa: str  # the widest instructions our kernels know: amx, avx512_vnni, avx512, avx2, neon_dotprod, neon, or generic
    flags: tuple[str, ...] = ()  # all of the CPU's instruction sets that matter here
    cores_usable: int = 1  # physical cores within the affinity mask and the cgroup's quota, at least 1
    cpus_usable: int = 1  # the same counted in logical CPUs
    cpus_total: int = 1  # logical CPUs of the machine
    cores: tuple[Core, ...] = ()  # those within the affinity mask; () where nobody looked
    nodes: tuple[MemoryNode, ...] = ()  # () where there is one
    quota: float = 0.0  # CPUs' worth of time a cgroup allows; 0 is no limit
    cache_bytes: int = 0  # last-level cache
    bandwidth: float = 0.0  # bytes per second all usable cores read from memory
    bandwidth_basis: str = "guess"  # guess


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """Somebody else's, or our own, hold on a GPU's memory."""

    pid: int
    used_bytes: int  # 0 when the driver does not say
    name: str = ""


PCIE_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}  # bytes per second of one lane


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
    mig: bool = False  # an instance of a card that is cut into several; number, power and heat are the card's
    display: bool | None = None  # whether a screen is attached to it
    processes: tuple[GpuProcess, ...] = ()

    @property
    def link_bytes_s(self) -> float:
        """Bytes per second that the lanes in use carry; 0 when not known."""
        return PCIE_LANE.get(self.pcie_gen_max, 0.0) * self.pcie_width

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
    foreign_gpus: tuple[str, ...] = ()  # those of AMD and Intel, each with the reason why it is not used
    driver: str = ""  # 575.51.03; nothing without an NVIDIA driver
    driver_cuda: str = ""  # newest CUDA the driver supports: 12.9
    torch_version: str = ""  # of the installed torch, nothing when there is none
    torch_cuda: str = ""  # CUDA the installed torch was built with, nothing for a CPU build
    compiler: str = ""  # command of a C compiler (for the CPU kernels and Triton's launcher), nothing without one
    platform: str = ""
    arch: str = ""  # x86_64 | aarch64
    wsl: int = 0  # 1 or 2 inside WSL
    container: str = ""  # docker, podman, kubernetes, lxc, or nothing


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """One file system, as the folder on it sees it."""

    path: str = ""
    free_bytes: int = 0
    total_bytes: int = 0
    kind: str = ""  # nvme, ssd, hdd, network, memory, or nothing when not known
    filesystem: str = ""  # ext4, xfs, btrfs, 9p, ...
    writable: bool = True


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Everything doctor judges beside `MachineFacts`."""

    packages: Mapping[str, str] = field(default_factory=dict)  # installed distributions that matter, name -> version
    programs: Mapping[str, str] = field(default_factory=dict)  # found on PATH, name -> path
    toolkit: str = ""  # version of the CUDA toolkit that nvcc belongs to, nothing without one
    ptxas: str = ""  # version of the assembler that Triton runs for the newest card; nothing when not known
    ptxas_variable: str = ""  # the variable that names it, instead of the one that Triton brings
    python: str = ""
    prefix: str = ""
    headers: str = ""  # Python.h, nothing when it is missing
    governor: str = ""  # of the first CPU: performance, powersave, schedutil, ...
    governor_driver: str = ""  # who carries that out: intel_pstate, amd-pstate-epp, acpi-cpufreq, ...
    conflicts: tuple[str, ...] = ()  # what installed packages ask of each other and do not get
    numa_nodes: int = 1
    kernel_arguments: tuple[str, ...] = ()  # of the boot loader's line, those about PCIe and IOMMU
    iommu: bool = False  # whether DMA goes through an IOMMU
    on_battery: bool = False
    wsl_release: str = ""  # the WSL kernel's release, inside WSL
    wsl_mirrored: bool = False  # WSL's mirrored networking
    disk: DiskFacts = DiskFacts()  # where models are kept
    hub_ms: float = 0.0  # time to open a connection to the hub; 0 when that did not work or was not tried
    hub_error: str = ""
    port_holder: str = ""  # who listens on the server's usual port, nothing when it is free
    # variables of CUDA, NCCL, Triton and other engines; secrets are left out
    variables: Mapping[str, str] = field(default_factory=dict)

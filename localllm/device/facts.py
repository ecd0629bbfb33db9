"""Dataclasses that describe a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

EFFICIENT = 0.8  # cores below this relative speed count as efficiency cores; cores of one kind differ by less


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core."""

    cpus: tuple[int, ...]  # its logical CPUs that this process may use
    speed: float = 1.0  # relative to the fastest core, as rated by the kernel
    efficient: bool = False  # an efficiency core of a hybrid CPU
    node: int = 0  # its NUMA node


@dataclass(frozen=True, slots=True)
class MemoryNode:
    """A NUMA node."""

    index: int
    total_bytes: int
    free_bytes: int
    near: tuple[int, ...] = ()  # all nodes of its socket, including itself


@dataclass(frozen=True, slots=True)
class CpuFacts:
    """The CPU as this process may use it."""

    name: str
    isa: str  # best instruction set that the kernels use: amx, avx512_vnni, avx512, avx2, neon_dotprod, neon or generic
    flags: tuple[str, ...] = ()  # the relevant instruction sets of the CPU
    cores_usable: int = 1  # physical cores within the affinity mask and the cgroup quota, at least 1
    cpus_usable: int = 1  # the same in logical CPUs
    cpus_total: int = 1  # logical CPUs of the machine
    cores: tuple[Core, ...] = ()  # cores within the affinity mask; () if not detected
    nodes: tuple[MemoryNode, ...] = ()  # () if there is only one
    quota: float = 0.0  # CPU time that the cgroup allows, in CPUs; 0 for no limit
    cache_bytes: int = 0  # last-level cache
    bandwidth: float = 0.0  # bytes per second that all usable cores read from memory
    bandwidth_basis: str = "guess"  # guess


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds GPU memory."""

    pid: int
    used_bytes: int  # 0 if the driver does not report it
    name: str = ""


PCIE_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}  # bytes per second per lane


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One NVIDIA GPU. GPUs are ordered as by CUDA with CUDA_DEVICE_ORDER=PCI_BUS_ID."""

    name: str
    capability: int  # 89 for compute capability 8.9
    total_bytes: int
    free_bytes: int
    bandwidth: float = 0.0  # memory bytes per second; 0 if neither the driver nor the table has it
    bandwidth_basis: str = "unknown"  # driver (memory clock x bus width) | table | unknown
    index: int = 0
    uuid: str = ""
    unified: bool = False  # shares RAM with the CPU: total and free are the machine's available memory
    power_limit_w: float = 0.0
    power_max_w: float = 0.0  # default limit; 0 if the driver does not report it
    power_draw_w: float = 0.0
    pcie_width: int = 0  # lanes in use; 0 if the driver does not report them
    pcie_width_max: int = 0
    pcie_gen_max: int = 0  # what GPU and board support together; the current generation drops while the GPU is idle
    temperature_c: int = 0
    throttle: tuple[str, ...] = ()  # reasons for throttling right now: heat, power limit, ...
    ecc: bool | None = None  # None if the GPU has no ECC or does not report it
    mig: bool = False  # a MIG instance; index, power and temperature are those of the whole GPU
    display: bool | None = None  # a display is attached; None if the driver does not report it
    processes: tuple[GpuProcess, ...] = ()

    @property
    def link_bytes_s(self) -> float:
        """Bytes per second over the PCIe lanes in use; 0 if not known."""
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
    """The link between two GPUs, as reported by the driver."""

    first: int
    second: int  # indices into `MachineFacts.gpus`
    path: str  # from near to far: same board, PIX, PXB, PHB, NODE, SYS
    p2p: str  # "ok", or why there is no peer-to-peer access


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The facts that the planner and doctor use."""

    cpu: CpuFacts
    ram_total_bytes: int  # the smallest of installed RAM, cgroup limits and `ulimit -v`
    ram_available_bytes: int  # memory that can be used without swapping or exceeding a limit
    ram_limit: str = ""  # what limits the total below the installed RAM: "cgroup", "ulimit" or ""
    swap_total_bytes: int = 0
    swap_free_bytes: int = 0
    gpus: tuple[GpuFacts, ...] = ()
    gpu_links: tuple[GpuLink, ...] = ()  # one per pair of GPUs
    gpu_error: str = ""  # why the installed driver does not work, or which GPUs have failed besides `gpus`
    foreign_gpus: tuple[str, ...] = ()  # AMD and Intel GPUs, each with the reason why it is not used
    driver: str = ""  # 575.51.03; "" without an NVIDIA driver
    driver_cuda: str = ""  # newest CUDA version that the driver supports: 12.9
    torch_version: str = ""  # version of the installed torch; "" without one
    torch_cuda: str = ""  # CUDA version that torch was built with; "" for a CPU build
    compiler: str = ""  # C compiler command (for the CPU kernels and Triton's launcher); "" without one
    platform: str = ""
    arch: str = ""  # x86_64 | aarch64
    wsl: int = 0  # 1 or 2 inside WSL
    container: str = ""  # docker, podman, kubernetes, lxc, ...; "" outside containers


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """The file system that holds a folder."""

    path: str = ""
    free_bytes: int = 0
    total_bytes: int = 0
    kind: str = ""  # nvme, ssd, hdd, network, memory; "" if not known
    filesystem: str = ""  # ext4, xfs, btrfs, 9p, ...
    writable: bool = True


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Further facts, used by doctor only."""

    packages: Mapping[str, str] = field(default_factory=dict)  # relevant installed packages, name -> version
    programs: Mapping[str, str] = field(default_factory=dict)  # programs on PATH, name -> path
    toolkit: str = ""  # version of nvcc's CUDA toolkit; "" without one
    ptxas: str = ""  # version of the ptxas that Triton runs for the newest GPU; "" if not known
    ptxas_variable: str = ""  # the variable that replaces Triton's bundled ptxas; "" if none is set
    python: str = ""
    prefix: str = ""
    headers: str = ""  # path of Python.h; "" if it is missing
    governor: str = ""  # cpufreq governor of the first CPU: performance, powersave, schedutil, ...
    governor_driver: str = ""  # its cpufreq driver: intel_pstate, amd-pstate-epp, acpi-cpufreq, ...
    conflicts: tuple[str, ...] = ()  # unmet requirements between installed packages
    numa_nodes: int = 1
    kernel_arguments: tuple[str, ...] = ()  # kernel command line arguments about PCIe and IOMMU
    iommu: bool = False  # DMA goes through an IOMMU
    on_battery: bool = False
    gpu_trouble: str = ""  # memory errors or failures of the visible GPUs, as the driver reports them
    wsl_release: str = ""  # the WSL kernel's release, inside WSL
    wsl_mirrored: bool = False  # WSL's mirrored networking
    disk: DiskFacts = DiskFacts()  # where models are kept
    hub_ms: float = 0.0  # time to open a connection to the hub; 0 if it failed or was not tried
    hub_error: str = ""
    port_holder: str = ""  # the process that listens on the server's port; "" if it is free
    # environment variables of CUDA, NCCL, Triton and other engines, without secrets
    variables: Mapping[str, str] = field(default_factory=dict)

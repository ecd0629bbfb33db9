"""Facts about this machine: CPU, memory, GPUs, the process's environment and our processes. No torch, no decisions.

`machine()` takes a few milliseconds without a GPU. `plan` makes decisions from the facts; `doctor` judges them.
"""

from __future__ import annotations

import platform
from pathlib import Path

from localllm.testing import only_in_tests

from .cpu import cpu_facts, read_bandwidth
from .facts import GpuFacts, GpuLink, GpuProcess, MachineFacts
from .foreign import foreign_gpus
from .memory import memory_limits, rss_anon_bytes
from .nvml import gpu_facts
from .surroundings import compiler, container, torch_build, wsl_version

__all__ = [
    "GpuFacts",
    "GpuLink",
    "GpuProcess",
    "MachineFacts",
    "machine",
    "read_bandwidth",
    "rss_anon_bytes",
    "torch_build",
]


def machine(root: Path = Path("/")) -> MachineFacts:
    """Detect this machine's hardware.

    root   the directory that contains /proc and /sys; tests pass their own tree

    Never raises for a missing file or a broken driver: unknown facts are 0, "" or empty; `gpu_error` has the reason.
    LOCALLLM_FAKE_HW selects an invented machine; without LOCALLLM_TESTING=1 it raises ConfigError.
    """
    name = only_in_tests("LOCALLLM_FAKE_HW")
    if name:
        from .fake import fake_machine

        return fake_machine(name)
    memory = memory_limits(root)
    version, cuda = torch_build()
    return MachineFacts(
        cpu=cpu_facts(root),
        **memory._asdict(),
        **gpu_facts(memory.ram_available_bytes, root)._asdict(),
        foreign_gpus=foreign_gpus(root),
        torch_version=version,
        torch_cuda=cuda,
        compiler=compiler(),
        platform=f"{platform.system()} {platform.release()}",
        arch=platform.machine(),
        wsl=wsl_version(root),
        container=container(root),
    )

"""Checks of CPU, memory and power supply."""

from __future__ import annotations

from typing import Any

from localllm.config import load_config
from localllm.errors import ConfigError
from localllm.interface import Check
from localllm.plan.cores import EACH_CORE, chosen_threads, over_quota
from localllm.terminal import GIB, gib

from .finding import HARDWARE, Checks, Survey, ok, warn

CHECKS = Checks(HARDWARE)

LITTLE_RAM = 2 * GIB
# cpufreq drivers whose "powersave" governor still reaches the highest clock
SELF_REGULATING = ("intel_pstate", "amd-pstate", "amd-pstate-epp", "cppc_cpufreq")


@CHECKS.add("cpu.isa")
def cpu_isa(survey: Survey) -> Check:
    """Vector instructions available to the CPU kernels."""
    cpu = survey.machine.cpu
    title = f"{cpu.name}, {cpu.isa.replace('_', '-')}"
    data: dict[str, Any] = {"name": cpu.name, "isa": cpu.isa, "flags": list(cpu.flags)}
    if cpu.isa == "generic":
        title += ": without AVX2 or NEON, expect only a few tokens per second"
        return warn(title, fix="localllm bench smollm2", **data)
    return ok(title, **data)


@CHECKS.add("cpu.cores")
def cpu_cores(survey: Survey) -> Check:
    """Number of cores this process may use."""
    cpu = survey.machine.cpu
    data: dict[str, Any] = {"cores_usable": cpu.cores_usable, "cpus_total": cpu.cpus_total, "quota": cpu.quota}
    if cpu.quota and cpu.quota < 1:
        title = f"the control group allows {cpu.quota:g} of a CPU: expect long pauses"
        return warn(title, fix="docker update --cpus 4 CONTAINER", **data)
    title = f"{cpu.cores_usable} cores usable of {cpu.cpus_total} logical CPUs"
    chosen = chosen_threads(cpu, _threads_wanted(survey))
    if stopped := over_quota(cpu, chosen.count):
        return warn(title, stopped, "localllm config set engine.threads auto", **data)
    is_told = cpu.quota or cpu.cores and chosen.why != EACH_CORE
    return ok(title, "; ".join(chosen.reasons) if is_told else "", threads=chosen.count, **data)


def _threads_wanted(survey: Survey) -> int | str:
    try:
        return load_config(path=survey.settings).engine.threads
    except ConfigError:  # reported by `config.valid`
        return "auto"


@CHECKS.add("cpu.governor", lambda survey: "" if survey.host.governor else "the kernel does not report it")
def cpu_governor(survey: Survey) -> Check:
    """CPU frequency governor: does it limit the clock?"""
    name, driver = survey.host.governor, survey.host.governor_driver
    if name in ("powersave", "conservative") and driver not in SELF_REGULATING:
        fix = "sudo cpupower frequency-set -g schedutil"
        return warn(f"{name}: the clock stays low", "", fix, governor=name, driver=driver)
    return ok(name + (f" ({driver})" if driver else ""), governor=name)


@CHECKS.add("power.mains")
def power_source(survey: Survey) -> Check:
    """Power source of a laptop."""
    if survey.host.on_battery:
        title = "on battery: GPU and CPU run at a fraction of their power"
        return warn(title, fix="plug in the power supply", battery=True)
    return ok("on mains power, or not a laptop", battery=False)


@CHECKS.add("ram")
def ram(survey: Survey) -> Check:
    """Free memory."""
    machine = survey.machine
    title = f"{gib(machine.ram_available_bytes)} of {gib(machine.ram_total_bytes)} free"
    data: dict[str, Any] = {"total_bytes": machine.ram_total_bytes, "available_bytes": machine.ram_available_bytes}
    if machine.ram_available_bytes < LITTLE_RAM:
        title += f": below {gib(LITTLE_RAM)} only the smallest models run"
        return warn(title, fix="localllm plan smollm2", **data)
    return ok(title, **data)


@CHECKS.add("swap")
def swap(survey: Survey) -> Check:
    """Swap use: does the machine already swap?"""
    machine = survey.machine
    if not machine.swap_total_bytes:
        return ok("none")
    used = machine.swap_total_bytes - machine.swap_free_bytes
    title = f"{gib(used)} of {gib(machine.swap_total_bytes)} used"
    if used > machine.swap_total_bytes // 2 and machine.ram_available_bytes < 4 * GIB:
        return warn(f"{title}: a model would swap", fix="free -h", used_bytes=used)
    return ok(title, used_bytes=used)


@CHECKS.add("numa", lambda survey: "" if survey.host.numa_nodes > 1 else "one NUMA node")
def numa(survey: Survey) -> Check:
    """NUMA nodes: memory that is closer to some cores than to others."""
    nodes = survey.host.numa_nodes
    if survey.machine.cpu.nodes:
        return ok(f"{nodes} NUMA nodes", chosen_threads(survey.machine.cpu).placement, nodes=nodes)
    detail = "numactl --cpunodebind=0 --membind=0 localllm ... keeps the model and its threads on one node"
    return ok(f"{nodes} NUMA nodes", detail, nodes=nodes)

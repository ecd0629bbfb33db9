"""Checks of GPUs and their driver."""

from __future__ import annotations

import os
import re
from typing import Any

from localllm.device import GpuFacts, MachineFacts
from localllm.device.gpu_table import generation, table_row
from localllm.interface import Check
from localllm.terminal import counted, gib

from .finding import HARDWARE, Checks, Status, Survey, fail, found, ok, skip, sm, warn

CHECKS = Checks(HARDWARE)

NO_GPU = "No NVIDIA driver; running on the CPU"
HOT_C = 85


def _no_gpu(survey: Survey) -> str:
    return "" if survey.machine.gpus else "no GPU is visible" if survey.machine.driver else NO_GPU


@CHECKS.add("gpu.present")
def gpu_present(survey: Survey) -> Check:
    """GPUs visible to this process."""
    machine = survey.machine
    if machine.gpu_error:
        broken = () if machine.driver else ("the NVIDIA driver is installed but does not work",)
        title = ": ".join((*broken, "; ".join((*map(_describe, machine.gpus), machine.gpu_error))))
        status: Status = "warn" if machine.gpus else "fail"
        return found(status, title, *_cure(machine.gpu_error, machine), error=machine.gpu_error)
    if not machine.gpus and machine.driver:
        setting = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return warn(f"CUDA_VISIBLE_DEVICES={setting!r} hides every GPU", fix="unset CUDA_VISIBLE_DEVICES")
    if not machine.gpus:
        return skip("; ".join((*machine.foreign_gpus, "running on the CPU")) if machine.foreign_gpus else NO_GPU)
    title = "; ".join(map(_describe, machine.gpus))
    detail = ""
    if len(machine.gpus) > 1:
        detail = "a model runs on the GPU with the most free memory; --device cuda:N selects another"
    return ok(title, detail, gpus=[gpu.name for gpu in machine.gpus])


def _cure(error: str, machine: MachineFacts) -> tuple[str, str]:
    """What may help against `gpu_error` or `gpu_trouble`, and the command."""
    if "MIG" in error:
        return "create instances, for example of the largest profile", "sudo nvidia-smi mig -cgi 0 -C"
    if machine.wsl:
        return "update the NVIDIA driver of Windows and WSL, then restart WSL", "wsl.exe --update && wsl.exe --shutdown"
    if "container" in error:
        return "a container gets the driver's libraries with this option", "docker run --gpus all ..."
    if "finds no GPU" in error:
        return "check power, slot and BIOS; after a driver update, restart the machine", "lspci -d 10de:"
    if "(code 4)" in error:  # no permission
        return "the user needs read and write permission; a container gets it with --gpus all", "ls -l /dev/nvidia*"
    if damaged := re.search(r"GPU (\d+) (needs a reset|has \d)", error):
        detail = "stop the programs that use it first; if it happens again, the GPU may be defective"
        return detail, f"sudo nvidia-smi --gpu-reset -i {damaged[1]}"
    if "GPU" in error:
        return "restart the machine; if it happens again, check power, heat and the slot", "sudo dmesg | grep Xid"
    detail = "the fix often helps after a suspend; after a driver update, restart the machine"
    return detail, "sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm"


def _describe(gpu: GpuFacts) -> str:
    speed = f", {gpu.bandwidth / 1e9:,.0f} GB/s" if gpu.bandwidth else ""
    memory = f"{gib(gpu.total_bytes)} ({gib(gpu.free_bytes)} free){', shared with the CPU' if gpu.unified else ''}"
    return f"{gpu.name}, {sm(gpu.capability)}, {memory}{speed}"


@CHECKS.add("gpu.visible")
def cuda_visible_devices(survey: Survey) -> Check:
    """CUDA_VISIBLE_DEVICES: does it hide GPUs?"""
    setting = survey.host.variables.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return skip("CUDA_VISIBLE_DEVICES is not set")
    count = counted(len(survey.machine.gpus), "GPU")
    return ok(f"CUDA_VISIBLE_DEVICES={setting} leaves {count} visible", setting=setting)


@CHECKS.add("gpu.driver")
def gpu_driver(survey: Survey) -> Check:
    """Driver version: does it support the GPUs and the CUDA version of torch?"""
    machine = survey.machine
    if not machine.driver:
        return skip(NO_GPU)
    title = f"{machine.driver} (CUDA up to {machine.driver_cuda or '?'})"
    least = max((generation(gpu.capability).min_driver for gpu in machine.gpus), default=0)
    branch = int(machine.driver.split(".")[0]) if machine.driver.split(".")[0].isdigit() else 0
    data: dict[str, Any] = {"driver": machine.driver, "cuda": machine.driver_cuda, "least_branch": least}
    if branch and branch < least:
        newer = f"install driver {least} or newer, then restart"
        return fail(f"{title}: this GPU needs {least} or newer", fix=newer, **data)
    if machine.torch_cuda and _newer(machine.torch_cuda, machine.driver_cuda):
        title += f": torch was built for CUDA {machine.torch_cuda}, which this driver does not support"
        detail = "driver 580 supports CUDA 13, driver 570 supports CUDA 12.8"
        return fail(title, detail, torch_for(survey), **data)
    return ok(title, **data)


def torch_for(survey: Survey) -> str:
    """The command that installs a torch build for the CUDA version of this driver."""
    cuda = survey.machine.driver_cuda
    newest = [int(part) if part.isdigit() else 0 for part in (*cuda.split("."), "0", "0")[:2]]
    build = "cu130" if newest >= [13, 0] else "cu128" if newest >= [12, 8] else "cu126"
    return f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{build}"


def _newer(wanted: str, has: str) -> bool:
    """True if `wanted` needs a newer driver than `has`: drivers of the same major version are compatible."""
    first = [text.split(".")[0] for text in (wanted, has)]
    return all(part.isdigit() for part in first) and int(first[0]) > int(first[1])


@CHECKS.add("gpu.arch", _no_gpu)
def gpu_arch(survey: Survey) -> Check:
    """Compute capability of the GPUs and the number formats they support."""
    gpus = survey.machine.gpus
    old = [gpu for gpu in gpus if gpu.capability < 75]
    title = ", ".join(f"{gpu.name} has compute capability {gpu.capability / 10:.1f}" for gpu in old)
    title += ", but at least 7.5 is required" if old else ""
    if len(old) == len(gpus):
        return fail(title, fix="localllm chat --device cpu")
    worst = min((gpu for gpu in gpus if gpu not in old), key=lambda gpu: gpu.capability)
    has = {"bf16": worst.has_bf16, "fp8": worst.has_fp8, "fp4": worst.has_fp4}
    formats, lacks = ["fp16", *(n for n in has if has[n])], [n for n in has if not has[n]]
    title = f"{sm(worst.capability)} computes in {', '.join(formats)}" + (f"; {title}" if old else "")
    wide = "bf16" if worst.has_bf16 else "fp16"
    detail = f"weights in {' and '.join(lacks)} also run, computed in {wide}" if lacks else ""
    status: Status = "warn" if old else "ok"
    fix = f"localllm chat --device cuda:{gpus.index(worst)}" if old else ""
    return found(status, title, detail, fix, capability=worst.capability)


@CHECKS.add("gpu.mem", _no_gpu)
def gpu_memory(survey: Survey) -> Check:
    """Free GPU memory, and the processes that hold the rest."""
    gpus = survey.machine.gpus
    others = [p for gpu in gpus for p in gpu.processes if p.pid != os.getpid()]
    held = sum(gpu.total_bytes - gpu.free_bytes for gpu in gpus if not gpu.unified)
    total = sum(gpu.total_bytes for gpu in gpus)
    names = ", ".join(f"{p.name or 'process'} {p.pid} ({gib(p.used_bytes)})" for p in others[:3] if p.used_bytes)
    full = [g for g in gpus if not g.unified and g.total_bytes - g.free_bytes > g.total_bytes // 5]
    if full:  # judged per GPU, since one free GPU does not make up for a full one
        of_full = sum(gpu.total_bytes - gpu.free_bytes for gpu in full), sum(gpu.total_bytes for gpu in full)
        where = f" of {', '.join(gpu.name for gpu in full)}" if len(gpus) > 1 else ""
        title = f"{gib(of_full[0])} of {gib(of_full[1])}{where} in use"
        return warn(title, names, "nvidia-smi", held_bytes=held)
    if all(gpu.unified for gpu in gpus):
        title = f"{gib(total)} free, shared with the CPU; the operating system needs some of it"
        return ok(title, names, held_bytes=0)
    return ok(f"{gib(total - held)} of {gib(total)} free", names, held_bytes=held)


@CHECKS.add("gpu.power", _no_gpu)
def gpu_power(survey: Survey) -> Check:
    """Power limit: does a lowered one cost speed?"""
    known = [gpu for gpu in survey.machine.gpus if gpu.power_limit_w and gpu.power_max_w]
    if not known:
        return skip("the driver does not report it")
    gpu = min(known, key=lambda one: one.power_limit_w / one.power_max_w)
    row = table_row(gpu.name)
    knee = row.knee_w if row else 0
    data: dict[str, Any] = {"limit_w": gpu.power_limit_w, "max_w": gpu.power_max_w, "knee_w": knee or None}
    title = f"limit {gpu.power_limit_w:.0f} W of {gpu.power_max_w:.0f} W"
    if gpu.power_limit_w >= 0.99 * gpu.power_max_w:
        return ok(f"limit {gpu.power_limit_w:.0f} W, the maximum", **data)
    if knee and gpu.power_limit_w >= knee:
        return ok(title, f"decoding loses less than 5 % down to {knee} W, prefill more", **data)
    if not knee and gpu.power_limit_w >= 0.7 * gpu.power_max_w:
        return ok(title, "decoding is limited by memory bandwidth and hardly slows down", **data)
    if "laptop" in gpu.name.lower():
        detail = "laptops set the limit themselves; it is highest on mains power in the performance profile"
        return warn(title, detail, "powerprofilesctl set performance", **data)
    why = f"below {knee} W decoding slows down as well" if knee else "prefill and decoding are slower"
    fix = f"sudo nvidia-smi -i {gpu.index} -pl {knee or round(gpu.power_max_w)}"
    return warn(f"{title}: {why}", "", fix, **data)


@CHECKS.add("gpu.clocks", _no_gpu)
def gpu_clocks(survey: Survey) -> Check:
    """Clock throttling right now, by heat or the power supply."""
    gpus = survey.machine.gpus
    hot = max(gpus, key=lambda gpu: gpu.temperature_c)
    reasons = [r for gpu in gpus for r in gpu.throttle if r != "power limit"]
    degrees = f"{hot.temperature_c} °C" if hot.temperature_c else ""
    data: dict[str, Any] = {"temperature_c": hot.temperature_c, "throttle": list(dict.fromkeys(reasons))}
    fix = "nvidia-smi -q -d PERFORMANCE,TEMPERATURE"
    if reasons:
        title = f"throttled by {' and '.join(dict.fromkeys(reasons))}" + (f" at {degrees}" if degrees else "")
        return warn(title, "improve the airflow, or lower the power limit", fix, **data)
    if hot.temperature_c >= HOT_C:
        return warn(f"{degrees}: close to throttling", "", fix, **data)
    return ok(f"not throttled{f', {degrees}' if degrees else ''}", **data)


@CHECKS.add("gpu.pcie", _no_gpu)
def gpu_pcie(survey: Survey) -> Check:
    """PCIe lanes in use. The generation is not checked, because the link slows down while the GPU is idle."""
    known = [(i, gpu) for i, gpu in enumerate(survey.machine.gpus) if gpu.pcie_width]
    if not known:
        return skip("the driver does not report it")
    number, gpu = min(known, key=lambda pair: pair[1].pcie_width / max(pair[1].pcie_width_max, 1))
    which = f"GPU {number}: " if len(survey.machine.gpus) > 1 else ""
    generation = f"PCIe {gpu.pcie_gen_max}.0 " if gpu.pcie_gen_max else ""
    data: dict[str, Any] = {"width": gpu.pcie_width, "width_max": gpu.pcie_width_max, "generation": gpu.pcie_gen_max}
    if gpu.pcie_width >= gpu.pcie_width_max:
        return ok(f"{which}{generation}×{gpu.pcie_width}", **data)
    title = f"{which}{generation}×{gpu.pcie_width} of ×{gpu.pcie_width_max} lanes"
    if gpu.pcie_width * 2 >= gpu.pcie_width_max and gpu.pcie_width >= 8:
        detail = "normal if two slots share the lanes; loading takes longer, decoding on one GPU does not"
        return ok(title, detail, **data)
    detail = "loading a model and using weights in RAM are slow; check the slot, the riser and the BIOS"
    return warn(title, detail, "nvidia-smi -q -d PCI", **data)


@CHECKS.add("gpu.p2p", _no_gpu)
def gpu_p2p(survey: Survey) -> Check:
    """Peer-to-peer access between GPUs, which tensor parallelism uses, in localllm and in other engines."""
    links = survey.machine.gpu_links
    if not links:
        return skip("one GPU")
    granted = [link for link in links if link.p2p == "ok"]
    far = max(links, key=lambda link: ("same board", "PIX", "PXB", "PHB", "NODE", "SYS", "unknown").index(link.path))
    data: dict[str, Any] = {"links": [[k.first, k.second, k.path, k.p2p] for k in links]}
    if granted and survey.host.iommu and far.path in ("PHB", "NODE", "SYS"):
        title = f"allowed over {far.path}, but an IOMMU is on: tensor parallelism may hang"
        detail = "localllm doctor --deep tests a copy"
        return warn(title, detail, "export NCCL_P2P_DISABLE=1", **data)
    if granted:
        return ok(f"allowed over {far.path}; --deep measures it", **data)
    detail = "copies between GPUs go through RAM; for one model on several GPUs, --split layers transfers the least"
    return ok(f"none over {far.path}: {links[0].p2p}", detail, **data)


@CHECKS.add("gpu.ecc", _no_gpu)
def gpu_ecc(survey: Survey) -> Check:
    """ECC memory, on GPUs that support it: has it had uncorrectable errors, or has a GPU failed since?"""
    states = [gpu.ecc for gpu in survey.machine.gpus if gpu.ecc is not None]
    if said := survey.host.gpu_trouble:
        return fail(said, *_cure(said, survey.machine), error=said)
    if not states:
        return skip("not supported by these GPUs")
    return ok("on" if all(states) else "off", ecc=all(states))


@CHECKS.add("gpu.mig", _no_gpu)
def gpu_mig(survey: Survey) -> Check:
    """GPUs divided into MIG instances."""
    if not any(gpu.mig for gpu in survey.machine.gpus):
        return skip("not divided into MIG instances")
    title = "one MIG instance is used: CUDA shows a process only one"
    detail = "CUDA_VISIBLE_DEVICES=MIG-... selects another; nvidia-smi -L lists them"
    return ok(title, detail, mig=True)


@CHECKS.add("gpu.display", _no_gpu)
def gpu_display(survey: Survey) -> Check:
    """Displays that take GPU memory."""
    gpus = survey.machine.gpus
    if all(gpu.display is None for gpu in gpus):
        return skip("the driver does not report it")
    shown = [gpu for gpu in gpus if gpu.display]
    if not shown:
        return ok("no display is attached", display=False)
    detail = "programs with windows take some of its memory: leave 1 GiB free, or use the CPU's integrated graphics"
    return ok(f"a display is attached to {shown[0].name}", detail, display=True)

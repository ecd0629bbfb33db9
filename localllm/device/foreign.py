"""AMD and Intel GPUs found in /sys, each with the reason why it is not used."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from localllm.terminal import gib

from .procfs import read

AMD, INTEL = "0x1002", "0x8086"
COMPILED = ("gfx942", "gfx1100", "gfx1201")
"""Architectures that the kernels compile for (`make test-aot`), but on which none has run yet."""


def foreign_gpus(root: Path = Path("/")) -> tuple[str, ...]:
    """One clause per GPU, in slot order. Intel GPUs on the processor's own bus are integrated and left out."""
    return tuple(_foreign(root))


def why_not(target: str = "") -> str:
    """Why a GPU of this AMD architecture ("" for Intel) is not used."""
    if target in COMPILED:
        return "the kernels compile for it, but have not been tested on one"
    return "the kernels do not support it" if target else "there are no kernels for it"


def _foreign(root: Path) -> Iterator[str]:
    targets = _amd_targets(root)
    for card in sorted((root / "sys/class/drm").glob("card*"), key=lambda path: (len(path.name), path.name)):
        device = card / "device"
        vendor, slot = read(device / "vendor"), device.resolve().name
        if not re.fullmatch(r"card\d+", card.name):
            continue
        if vendor == INTEL and not re.fullmatch(r"[0-9a-f]{4}:00:.*", slot):
            yield f"an Intel GPU is not used: {why_not()}"
        if vendor != AMD:
            continue
        render = next((path.name.removeprefix("renderD") for path in (device / "drm").glob("renderD*")), "")
        target, size = targets.get(render, ""), read(device / "mem_info_vram_total")
        told = [target or "unknown to the compute driver", gib(int(size)) if size.isdigit() else ""]
        name = read(device / "product_name") or "an AMD GPU"
        what = f"{name} ({', '.join(filter(None, told))})"
        yield f"{what} is not used: {why_not(target or 'unknown')}"


def _amd_targets(root: Path) -> dict[str, str]:
    """Render node number -> architecture such as gfx1100, for GPUs known to the ROCm driver."""
    found = {}
    for file in (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        facts = dict(re.findall(r"^(\w+) (\d+)$", read(file), re.MULTILINE))
        if version := int(facts.get("gfx_target_version", 0)):  # 90402 is gfx942: the last two parts are hexadecimal
            target = f"gfx{version // 10_000}{version // 100 % 100:x}{version % 100:x}"
            found[facts.get("drm_render_minor", "")] = target
    return found

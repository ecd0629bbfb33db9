"""GPUs of AMD and Intel, by what the kernel's drivers show in /sys: named, with the reason why none is used."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from localllm.terminal import gib

from .procfs import read

AMD, INTEL = "0x1002", "0x8086"
COMPILED = ("gfx942", "gfx1100", "gfx1201")
"""architectures that the kernels compile for (`make test-aot`); none of them has run one"""


def foreign_gpus(root: Path = Path("/")) -> tuple[str, ...]:
    """A clause for each card, in the order of their slots; Intel's on the processor's own bus are no cards."""
    return tuple(_foreign(root))


def why_not(target: str = "") -> str:
    """Why a card of this AMD architecture, or one of Intel's, is not used."""
    if target in COMPILED:
        return "no kernel has run on it yet, they only compile"
    return "kernels are not made for it" if target else "there are no kernels for it"


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
        told = [target or "not known to the compute driver", gib(int(size)) if size.isdigit() else ""]
        name = read(device / "product_name") or "an AMD GPU"
        what = f"{name} ({', '.join(filter(None, told))})"
        yield f"{what} is not used: {why_not(target or 'unknown')}"


def _amd_targets(root: Path) -> dict[str, str]:
    """Number of the render node -> architecture as gfx1100, of what ROCm's driver can compute with."""
    found = {}
    for file in (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        facts = dict(re.findall(r"^(\w+) (\d+)$", read(file), re.MULTILINE))
        if version := int(facts.get("gfx_target_version", 0)):  # 90402 is gfx942: the last two in hexadecimal
            target = f"gfx{version // 10_000}{version // 100 % 100:x}{version % 100:x}"
            found[facts.get("drm_render_minor", "")] = target
    return found

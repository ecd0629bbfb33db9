"""Whether this Triton compiles what some versions cannot: tried once in a child process, remembered, never guessed.

Triton 3.6 and 3.7 fail on `dot_scaled` with E4M3 scales for some cards, and earlier ones emulate it with bfloat16.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

from ..verify.records import Records, assembler_key, default_folder

FP8_CAPABILITY = 89  # from here on tensor cores take E4M3
FP4_CAPABILITY = 100  # from here on they take block-scaled E2M1
NVFP4_LABEL = "nvfp4 w4a4 dot_scaled"
NVFP4_INSTRUCTION = "mxf4nvf4.block_scale"
TIMEOUT_S = 120.0


@cache
def nvfp4_reason(capability: int, folder: Path | None = None) -> str | None:
    """Why NVFP4 x NVFP4 cannot run natively on such a card with the Triton installed; None when it can.

    folder   where verdicts are kept; beside the compiled kernels when None
    """
    if capability < FP4_CAPABILITY:
        return f"no FP4 instructions on compute capability {capability / 10}"
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "triton is not installed"
    sources = b"".join((Path(__file__).parent / name).read_bytes() for name in ("narrow.py", "narrow_product.py"))
    depends = {"triton": version, "sources": hashlib.sha256(sources).hexdigest(), "ptxas": assembler_key()}
    known = Records("probe", depends, folder or default_folder())
    key = f"{NVFP4_LABEL} sm_{capability}"
    verdict = known.get(key)
    if verdict is None:
        try:
            verdict = {"reason": _probe(capability, NVFP4_LABEL, NVFP4_INSTRUCTION)}
        except subprocess.TimeoutExpired:  # a machine that is busy today: no verdict
            return f"the compiler took more than {TIMEOUT_S:.0f} s"
        known.put(key, verdict)
        known.save()
    return verdict["reason"] or None


def _probe(capability: int, label: str, instruction: str) -> str:
    """Empty when all kernels of that label compile for the card and use the instruction."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-m", f"{__package__}.aot", str(capability), "--only", label]
    run = subprocess.run(command, capture_output=True, text=True, env=env, timeout=TIMEOUT_S)
    if run.returncode:
        return f"the compiler failed: {run.stderr.strip().splitlines()[-1] if run.stderr.strip() else run.returncode}"
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert rows, f"no kernel is called {label}"
    broken = next((row["reason"] for row in rows if row["reason"]), "")
    if broken:
        return broken
    return "" if all(instruction in row["mma"] for row in rows) else "compiles to instructions without block scales"

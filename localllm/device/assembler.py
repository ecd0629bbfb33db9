"""The ptxas that Triton runs for a GPU, and its version. A ptxas that does not know the GPU kills the process."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

VARIABLE, BLACKWELL_VARIABLE = "TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"
BLACKWELL = 100  # from this compute capability on, Triton 3.5 and newer use ptxas-blackwell; Triton 3.9 from 90 on


class Assembler(NamedTuple):
    """The ptxas that Triton would run."""

    path: Path | None = None
    variable: str = ""  # environment variable that sets it; "" for the one bundled with Triton
    version: str = ""  # "12.9"; "" when not known


def assembler(capability: int) -> Assembler:
    """The ptxas for this compute capability."""
    spec = importlib.util.find_spec("triton")
    folders = spec.submodule_search_locations if spec is not None else None
    bundled = Path(folders[0]) / "backends/nvidia/bin" if folders else None
    second = bundled / "ptxas-blackwell" if bundled is not None else None
    newer = capability >= BLACKWELL and (second is None or second.exists())
    variable = BLACKWELL_VARIABLE if newer else VARIABLE
    named = os.environ.get(variable)
    if named:
        path: Path | None = Path(named)
    else:
        variable, path = "", second if newer else bundled / "ptxas" if bundled is not None else None
    return Assembler(path, variable, version_of(path) if path is not None else "")


def version_of(path: Path) -> str:
    """The version of a ptxas, such as "12.9"; "" if it does not report one."""
    try:
        run = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=2, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"release (\d+\.\d+)", run.stdout)
    return found[1] if found else ""

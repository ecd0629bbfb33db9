"""Which assembler Triton runs for a card, and how new it is: one that does not know the card ends the process."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

VARIABLE, BLACKWELL_VARIABLE = "TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"
BLACKWELL = 100  # the compute capability from which every Triton since 3.5 takes the second one; 3.9 does from 90 on


class Assembler(NamedTuple):
    """ptxas as Triton would call it."""

    path: Path | None = None
    variable: str = ""  # what names it; "" for the one that Triton brings
    version: str = ""  # "12.9"; "" when not known


def assembler(capability: int) -> Assembler:
    """The one for this compute capability."""
    spec = importlib.util.find_spec("triton")
    folders = spec.submodule_search_locations if spec is not None else None
    brought = Path(folders[0]) / "backends/nvidia/bin" if folders else None
    second = brought / "ptxas-blackwell" if brought is not None else None
    newer = capability >= BLACKWELL and (second is None or second.exists())
    variable = BLACKWELL_VARIABLE if newer else VARIABLE
    named = os.environ.get(variable)
    if named:
        path: Path | None = Path(named)
    else:
        variable, path = "", second if newer else brought / "ptxas" if brought is not None else None
    return Assembler(path, variable, version_of(path) if path is not None else "")


def version_of(path: Path) -> str:
    """ "12.9", or nothing where it does not say."""
    try:
        run = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=2, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"release (\d+\.\d+)", run.stdout)
    return found[1] if found else ""

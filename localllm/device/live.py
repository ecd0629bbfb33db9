"""What this process holds and a card draws at this moment: for panels that look several times a second."""

from __future__ import annotations

from ctypes import byref, c_uint, c_void_p
from pathlib import Path
from typing import Any

from .nvml import Nvml, load_library
from .procfs import statm


def resident_bytes(root: Path = Path("/")) -> int:
    """Memory of this process that is its own (a model file mapped into it is not); 0 when unknown."""
    return statm(root, 1) - statm(root, 2)


class PowerMeter:
    """Watts of one card, through one handle kept open. `library` answers instead of the driver's own, in tests."""

    def __init__(self, index: int, library: Any = None) -> None:
        found = library or load_library()
        self._nvml = Nvml(found) if found is not None else None
        self._handle = c_void_p()
        if self._nvml is not None and (
            self._nvml.call("nvmlInit_v2")
            or self._nvml.call("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(self._handle))
        ):
            self._nvml = None

    def watts(self) -> float:
        """Now; 0 where the card does not say."""
        return self._nvml.integer("nvmlDeviceGetPowerUsage", self._handle) / 1000 if self._nvml is not None else 0.0

"""What the driver says of a card that has failed: asked when something went wrong, never before."""

from __future__ import annotations

import threading
from ctypes import c_uint, c_ulonglong
from typing import Any

from .nvml import DEADLINE_S, Nvml, load_library

LOST, RESET_REQUIRED = 15, 16  # NVML's codes of a card
UNCORRECTED, SINCE_DRIVER = c_uint(1), c_uint(0)


def trouble(index: int, library: Any = None) -> str:
    """Why the card of this number cannot go on, in a clause; nothing where the driver knows of nothing.

    library   what answers instead of the driver's own, in tests
    """
    library = library or load_library()
    if library is None:
        return ""
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(_trouble(Nvml(library), index)), daemon=True, name="nvml")
    thread.start()
    thread.join(DEADLINE_S)
    return answers[0] if answers else f"the driver does not answer within {DEADLINE_S:g} s"


def _trouble(nvml: Nvml, index: int) -> str:
    if code := nvml.call("nvmlInit_v2"):
        return f"the driver does not answer: {nvml.reason(code)}"
    try:
        code, handle = nvml.card(index)
        if code == LOST:
            return "the card has fallen off the bus: `dmesg | grep Xid` has the cause (79: power, heat, the slot)"
        if code == RESET_REQUIRED:
            return "the card must be reset: nvidia-smi --gpu-reset, or restart the machine"
        if code:
            return f"the driver has lost the card: {nvml.reason(code)}"
        given = handle, UNCORRECTED, SINCE_DRIVER
        errors = nvml.ask("nvmlDeviceGetTotalEccErrors", *given, kind=c_ulonglong) or 0
        return f"{errors} errors of its memory could not be corrected (nvidia-smi -q -d ECC)" if errors else ""
    finally:
        nvml.call("nvmlShutdown")

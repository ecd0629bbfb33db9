"""Asks the driver why a GPU has failed. Called only after an error."""

from __future__ import annotations

import threading
from ctypes import c_uint, c_ulonglong
from typing import Any

from localllm.terminal import counted

from .nvml import DEADLINE_S, Nvml, load_library

LOST, RESET_REQUIRED = 15, 16  # NVML error codes
UNCORRECTED, SINCE_DRIVER = c_uint(1), c_uint(0)


def trouble(index: int, library: Any = None) -> str:
    """Why the GPU with this index has failed, as a clause; "" if the driver reports no problem.

    library   replaces NVML in tests
    """
    library = library or load_library()
    if library is None:
        return ""
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(_trouble(Nvml(library), index)), daemon=True, name="nvml")
    thread.start()
    thread.join(DEADLINE_S)
    return answers[0] if answers else f"the driver did not respond within {DEADLINE_S:g} s"


def _trouble(nvml: Nvml, index: int) -> str:
    if code := nvml.call("nvmlInit_v2"):
        return f"the driver does not respond: {nvml.reason(code)}"
    try:
        code, handle = nvml.card(index)
        if code == LOST:
            return "the GPU has fallen off the bus: `dmesg | grep Xid` shows the cause (79: power, heat, the slot)"
        if code == RESET_REQUIRED:
            return "the GPU needs a reset: run nvidia-smi --gpu-reset, or restart the machine"
        if code:
            return f"the driver has lost the GPU: {nvml.reason(code)}"
        given = handle, UNCORRECTED, SINCE_DRIVER
        errors = nvml.ask("nvmlDeviceGetTotalEccErrors", *given, kind=c_ulonglong) or 0
        return f"its memory has {counted(errors, 'uncorrectable error')} (nvidia-smi -q -d ECC)" if errors else ""
    finally:
        nvml.call("nvmlShutdown")

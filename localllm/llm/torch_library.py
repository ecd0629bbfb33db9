"""torch's largest library on its way into memory, while other modules are imported."""

from __future__ import annotations

import ctypes
import os
from importlib.util import find_spec


def load_library() -> None:
    """0.24 s without the interpreter's lock. What is wrong with the library will show when torch is imported."""
    found = find_spec("torch")
    load = ctypes.CDLL(None).dlopen
    load.argtypes, load.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for folder in (found.submodule_search_locations or ()) if found else ():  # as torch does it, in this order
        if load(os.fsencode(f"{folder}/lib/libtorch_global_deps.so"), os.RTLD_NOW | os.RTLD_GLOBAL):
            load(os.fsencode(f"{folder}/lib/libtorch_cpu.so"), os.RTLD_NOW)

"""How many CPU threads compute."""

from __future__ import annotations

import torch

from localllm.kernels.cpu.build import is_built, library


def set_threads(count: int) -> None:
    """Give torch's pools and our kernels `count` threads each; they never compute at the same time."""
    torch.set_num_threads(count)
    lib = library().lib
    if lib is not None:
        lib.ll_threads(count)


def kernels_are_built() -> bool:
    """False when the CPU kernels will be compiled at first use, which takes seconds."""
    return is_built()

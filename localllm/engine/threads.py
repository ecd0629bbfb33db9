"""How many CPU threads compute."""

from __future__ import annotations

import torch

from localllm.kernels.cpu.build import library


def set_threads(count: int) -> None:
    """Give torch's pools and our kernels `count` threads each; they never compute at the same time."""
    torch.set_num_threads(count)
    lib = library().lib
    if lib is not None:
        lib.ll_threads(count)

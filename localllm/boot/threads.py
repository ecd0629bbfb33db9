"""How many CPU threads compute."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from localllm.kernels.cpu.build import library

HEAVY = ("qkv", "o", "gate_up", "down", "lm_head", "paged_attention")  # the layer classes that need several threads


def set_threads(count: int) -> None:
    """Give our kernels `count` threads, and torch one.

    torch's pool waits at a barrier after every small operation: beside another busy process on two cores, loading
    smollm2 took 13 to 32 s with two torch threads, and 0.4 s with one. `serve_torch` gives it more where it does the
    heavy work itself.
    """
    torch.set_num_threads(1)
    lib = library().lib
    if lib is not None:
        lib.ll_threads(count)


def serve_torch(kernels: Mapping[str, str], count: int) -> None:
    """Give torch `count` threads when a heavy layer class of the loaded model (class -> implementation) runs on it."""
    if any(kernels.get(name, "").startswith("torch") for name in HEAVY):
        torch.set_num_threads(count)

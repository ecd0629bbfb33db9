"""How many CPU threads compute."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from localllm.kernels.cpu.build import is_built, library

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


def missing_kernels() -> str:
    """Why the CPU kernels are not there, and what helps; "" where they are."""
    reason = library().reason
    return f"{reason}; PyTorch's own products are used, slower" if reason else ""


def kernel_note() -> str:
    """What is less than it could be about the CPU kernels, with what helps; "" where nothing is."""
    return library().note


def kernels_are_built() -> bool:
    """False when the CPU kernels will be compiled at first use, which takes seconds."""
    return is_built()

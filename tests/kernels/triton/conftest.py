"""Kernels run on the card where there is one, else in Triton's interpreter, which must be chosen before they load."""

from __future__ import annotations

import os

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels are tested: the card, or the CPU for the interpreter."""
    return torch.device("cuda" if GPU else "cpu")

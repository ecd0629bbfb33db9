"""Kernels run on the card where there is one, else in Triton's interpreter, which must be chosen before they load."""

from __future__ import annotations

import os
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> Iterator[None]:
    if GPU:
        yield
        return
    file = Path(__file__).parents[3] / "benchmarks/interpreted.py"
    with runpy.run_path(str(file))["quick_interpreter"]():
        yield


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels are tested: the card, or the CPU for the interpreter."""
    return torch.device("cuda" if GPU else "cpu")

"""Kernels run on the card where there is one, else in Triton's interpreter, which must be chosen before they load."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _patched_once_per_launch() -> Iterator[None]:
    """For every call of a jitted function the interpreter looks through the whole language and replaces what a launch
    has replaced before: a third of the time of these tests.
    """
    if GPU:
        yield
        return
    from triton.runtime import interpreter

    patch: Callable[[Any], Any] = interpreter._patch_lang
    inside: list[int] = []  # namespaces patched in the current launch

    def patched(function: Any) -> Any:
        is_launch, namespace = not inside, id(function.__globals__)
        if namespace in inside:
            return None
        scope = patch(function)
        inside.append(namespace)
        if is_launch:
            restore = scope.restore
            scope.restore = lambda: (restore(), inside.clear())
        return scope

    interpreter._patch_lang = patched
    yield
    interpreter._patch_lang = patch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels are tested: the card, or the CPU for the interpreter."""
    return torch.device("cuda" if GPU else "cpu")

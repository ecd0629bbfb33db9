"""Import torch without `torch.export`, which writes programs down: no command needs it.

Importing torch 2.13 takes a Xeon's core SECONDS. Whoever asks it for anything later gets the real module. For the
`localllm` command only: what else imports localllm may need all of torch.

`torch._meta_registrations` takes as long again, but what it brings along is imported in an order that works only from
there: without it `torch.vmap` and `torch.broadcast_shapes` fail.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PART = "torch.export"


class _Later(ModuleType):
    """A module until something in it is asked for."""

    def __getattr__(self, name: str) -> Any:
        is_asked = name == "__path__" and "waits" in vars(self)  # so does the import of what is in it
        if name.startswith("__") and not is_asked:
            raise AttributeError(name)
        _forget()
        return getattr(import_module(PART), name)


def _forget() -> None:
    """What is imported next is the real module."""
    if isinstance(sys.modules.get(PART), _Later):
        sys.modules.pop(PART, None)


class _Finder:
    """Finds the part once, while torch is imported; when that is over, it is as if never asked for."""

    def __init__(self) -> None:
        self._left = {PART}

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The spec of the part that is left out; of what comes behind torch nothing."""
        if name in self._left:
            self._left.discard(name)
            return ModuleSpec(name, self)  # type: ignore[arg-type]
        torch = sys.modules.get("torch")
        if torch is not None and not getattr(torch.__spec__, "_initializing", False):
            # another list: who is going through this one still finds what is behind
            sys.meta_path = [one for one in sys.meta_path if one is not self]
            _forget()
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module that waits."""
        return _Later(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """It is made: from now on questions are meant."""
        vars(module)["waits"] = True


def leave_out() -> None:
    """From now on, where torch is not imported yet."""
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]

"""Import torch without the two of its parts that no command needs, and that take a quarter of the time.

`torch.export` writes programs down; `torch._meta_registrations` says what operations written in Python would give for
tensors without data, and brings all decompositions along. Importing torch 2.13 took a core 2.6 s with both and 1.9
without. Whoever asks either for anything gets the real module, which is then imported.

For the `localllm` command only: a program that imports localllm may compile models of its own with this torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PARTS = ("torch._meta_registrations", "torch.export")


class _Later(ModuleType):
    """A module until something in it is asked for."""

    def __getattr__(self, name: str) -> Any:
        is_asked = name == "__path__" and "waits" in vars(self)  # so does the import of what is in it
        if name.startswith("__") and not is_asked:
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


class _Finder:
    """Finds each part once, while torch is imported; when that is over, the parts are as if never asked for."""

    def __init__(self) -> None:
        self._left = set(PARTS)

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The spec of a part that is left out; of what comes behind torch nothing."""
        if name in self._left:
            self._left.discard(name)
            return ModuleSpec(name, self)  # type: ignore[arg-type]
        torch = sys.modules.get("torch")
        if torch is not None and not getattr(torch.__spec__, "_initializing", False):
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            for part in PARTS:
                if isinstance(sys.modules.get(part), _Later):
                    del sys.modules[part]
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

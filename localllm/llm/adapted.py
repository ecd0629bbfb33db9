"""The LoRA adapters of a loaded model: what `LoadedModel` has of them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from localllm.config import EngineOptions
from localllm.request import LoadProgress, OnProgress

if TYPE_CHECKING:
    from localllm.engine.adapters import Residents
    from localllm.models.adapters import Adapters
    from localllm.models.loader import Model
    from localllm.plan.plan import Plan

SHOWN = 4  # names in the run summary


class AdaptedModel:
    """A model that requests may ask for through an adapter."""

    options: EngineOptions
    plan: Plan
    adapters: Residents
    _model: Model
    _notify: OnProgress

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Let requests name the LoRA adapter in this folder. Raises as `Residents.add` does."""
        self._notify(LoadProgress("adapter", detail=name))
        self.adapters.add(name, os.fspath(path))

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; what runs with it goes on. Raises ModelNotFound."""
        self.adapters.remove(name)

    def _load_adapters(self) -> None:
        """Those that the options name."""
        for name, path in self.options.adapter_paths.items():
            self.load_adapter(name, path)

    def _no_adapters(self) -> Residents:
        """None yet, and room for some."""
        from localllm.engine.adapters import Residents

        return Residents(self._hold_adapters, self._free_bytes)

    def _hold_adapters(self) -> Adapters:
        import torch

        exact = self.options.dtype == "float32"
        device, kept = torch.device(self.plan.device), self.plan.deterministic
        return self._model.hold_adapters(device, deterministic=kept, exact=exact)

    def _free_bytes(self) -> int:
        """Of the memory that adapters go to."""
        import torch

        from localllm.device import machine

        on_cpu = self.plan.device == "cpu"
        return machine().ram_available_bytes if on_cpu else int(torch.cuda.mem_get_info(self.plan.device)[0])

    @property
    def _adapted(self) -> str:
        """The end of the run summary."""
        names = [adapter.name for adapter in self.adapters.known()]
        more = () if len(names) <= SHOWN else (f"{len(names) - SHOWN:,} more",)
        return f" · adapters {', '.join((*names[:SHOWN], *more))}" if names else ""

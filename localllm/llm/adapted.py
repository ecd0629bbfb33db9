"""The LoRA adapter methods of `LoadedModel`."""

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

SHOWN = 4  # adapter names in the run summary


class AdaptedModel:
    """Base class of a model that can run with LoRA adapters."""

    options: EngineOptions
    plan: Plan
    adapters: Residents
    _model: Model
    _notify: OnProgress

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Make the LoRA adapter in a folder available to requests. Raises the errors of `Residents.add`."""
        self.adapters.add(name, os.fspath(path))

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter; running requests keep using it. Raises ModelNotFound."""
        self.adapters.remove(name)

    def _load_adapters(self) -> None:
        """Load the adapters named in the options."""
        for name, path in self.options.adapter_paths.items():
            self._notify(LoadProgress("adapter", detail=name))
            self.load_adapter(name, path)

    def _no_adapters(self) -> Residents:
        """An empty set of adapters, with access to free memory for new ones."""
        from localllm.engine.adapters import Residents

        return Residents(self._hold_adapters, self._free_bytes)

    def _hold_adapters(self) -> Adapters:
        import torch

        exact = self.options.dtype == "float32"
        device, kept = torch.device(self.plan.device), self.plan.deterministic
        return self._model.hold_adapters(device, deterministic=kept, exact=exact)

    def _free_bytes(self) -> int:
        """Free bytes in the memory that holds adapters."""
        import torch

        from localllm.device import machine

        on_cpu = self.plan.device == "cpu"
        return machine().ram_available_bytes if on_cpu else int(torch.cuda.mem_get_info(self.plan.device)[0])

    @property
    def _adapted(self) -> str:
        """The adapter part of the run summary."""
        names = [adapter.name for adapter in self.adapters.known()]
        more = () if len(names) <= SHOWN else (f"{len(names) - SHOWN:,} more",)
        return f" · adapters {', '.join((*names[:SHOWN], *more))}" if names else ""

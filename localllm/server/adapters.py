"""The names of LoRA adapters, which requests may use as the name of a model: NAME, or MODEL:NAME.

A model that is unloaded forgets its adapters; here they stay known, and are loaded again with the first request.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from localllm.errors import InvalidRequest, ModelNotFound
from localllm.llm.llm import LLM

from .pool import ModelPool


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter that may be asked for."""

    name: str
    model: str  # the id of the one that it goes with
    path: str
    created: int = field(default_factory=lambda: int(time.time()))

    def ensure(self, llm: LLM) -> None:
        """Load it where the model does not know it. May read the disk; raises as `LLM.load_adapter` does."""
        if all(one.name != self.name for one in llm.adapters.known()):
            llm.load_adapter(self.name, self.path)


class AdapterNames:
    """The adapters of all models that are served.

    model, paths   those that were named at the start, NAME -> folder, and the model they go with
    """

    def __init__(self, pool: ModelPool, model: str = "", paths: Mapping[str, str] | None = None) -> None:
        self._pool = pool
        self._known = {name: ServedAdapter(name, model, path) for name, path in (paths or {}).items()}

    def all(self) -> list[ServedAdapter]:
        """In the order in which they came; those that a model was loaded with, too."""
        for row in self._pool.loaded():
            for one in () if row.llm is None else row.llm.adapters.known():
                self._known.setdefault(one.name, ServedAdapter(one.name, row.name, one.path))
        return list(self._known.values())

    def find(self, asked: str | None) -> ServedAdapter | None:
        """What a request means that names no model but an adapter."""
        if not asked or self._pool.known(asked) is not None:
            return None
        self.all()
        plain = asked.removesuffix(":latest")  # what Ollama's clients add
        if plain in self._known:
            return self._known[plain]
        base, _, name = plain.rpartition(":")
        found, model = self._known.get(name), self._pool.known(base)
        return found if found is not None and model is not None and model.name == found.model else None

    def load(self, llm: LLM, adapter: ServedAdapter, *, replaces: bool) -> None:
        """Make one known, and load it. Raises InvalidRequest for a name that is taken, else as `LLM.load_adapter`."""
        if self._pool.known(adapter.name) is not None:
            raise InvalidRequest(f"{adapter.name!r} is the name of a model", "choose another name", param="lora_name")
        self.all()
        known = self._known.get(adapter.name)
        if known is not None and known.model != adapter.model:
            raise InvalidRequest(
                f"{adapter.name!r} is an adapter of {known.model}", "choose another name", param="lora_name"
            )
        if known is not None and replaces:
            self.remove(adapter.name)
        try:
            llm.load_adapter(adapter.name, adapter.path)
        except Exception:
            if known is not None and replaces:  # it is loaded again with the next request
                self._known[adapter.name] = known
            raise
        self._known[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """Forget one; what runs with it goes on. Raises ModelNotFound."""
        self.all()
        known = self._known.pop(name, None)
        if known is None:
            raise ModelNotFound(f"no adapter {name[:100]!r} is loaded", "GET /v1/models lists them", param="lora_name")
        llm = self._pool.llm_of(known.model)
        if llm is not None and any(one.name == name for one in llm.adapters.known()):
            llm.unload_adapter(name)

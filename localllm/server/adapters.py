"""Names of LoRA adapters, which requests may use as a model name: NAME, or MODEL:NAME.

An unloaded model loses its adapters; this registry keeps them and loads them again with the next request.
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
    """An adapter that requests may name."""

    name: str
    model: str  # the id of its base model
    path: str
    created: int = field(default_factory=lambda: int(time.time()))

    def ensure(self, llm: LLM) -> None:
        """Load the adapter unless the model has it. May read the disk; raises what `LLM.load_adapter` raises."""
        if not self._is_known(llm):
            try:
                llm.load_adapter(self.name, self.path)
            except InvalidRequest:
                if not self._is_known(llm):  # else another request has loaded it meanwhile
                    raise

    def _is_known(self, llm: LLM) -> bool:
        return any(one.name == self.name for one in llm.adapters.known())


class AdapterNames:
    """The adapters of all served models.

    model, paths   the adapters named at startup, name -> folder, and their base model
    """

    def __init__(self, pool: ModelPool, model: str = "", paths: Mapping[str, str] | None = None) -> None:
        self._pool = pool
        self._known = {name: ServedAdapter(name, model, path) for name, path in (paths or {}).items()}

    def all(self) -> list[ServedAdapter]:
        """All adapters in the order they were added, including those that a model was loaded with."""
        for row in self._pool.loaded():
            for one in () if row.llm is None else row.llm.adapters.known():
                self._known.setdefault(one.name, ServedAdapter(one.name, row.name, one.path))
        return list(self._known.values())

    def find(self, asked: str | None) -> ServedAdapter | None:
        """Find the adapter that a request names; None if the name is a model's or unknown."""
        if not asked or self._pool.known(asked) is not None:
            return None
        self.all()
        plain = asked.removesuffix(":latest")  # added by Ollama clients
        if plain in self._known:
            return self._known[plain]
        base, _, name = plain.rpartition(":")
        found, model = self._known.get(name), self._pool.known(base)
        return found if found is not None and model is not None and model.name == found.model else None

    def load(self, llm: LLM, adapter: ServedAdapter, *, replaces: bool) -> None:
        """Register and load an adapter. Raises InvalidRequest for a taken name, or what `LLM.load_adapter` raises."""
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
            if known is not None and replaces:  # keep the old one, which the next request loads again
                self._known[adapter.name] = known
            raise
        self._known[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """Remove an adapter; running requests keep using it. Raises ModelNotFound."""
        self.all()
        known = self._known.pop(name, None)
        if known is None:
            raise ModelNotFound(f"no adapter {name[:100]!r} is loaded", "GET /v1/models lists them", param="lora_name")
        llm = self._pool.llm_of(known.model)
        if llm is not None and any(one.name == name for one in llm.adapters.known()):
            llm.unload_adapter(name)

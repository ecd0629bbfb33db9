"""A name becomes verified local files: resolve, download, list, remove, repair. The Hugging Face cache is the store.

No torch; httpx and huggingface_hub are imported when the network is really used, and our own modules when they are: a
shell that completes a model's name needs only what looks at folders. `tests/hub/hub_server.py` is a hub with faults to
try it against.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import cache, local
    from .client import Patience, endpoint, is_offline
    from .fetching import Repaired, download, repair
    from .listing import RepoFile
    from .local import LocalModel, default_model, list_local, remember_model
    from .removal import Removal, remove, remove_partials
    from .resolution import Resolved, download_limit, resolve

__all__ = [
    "LocalModel",
    "Patience",
    "Removal",
    "Repaired",
    "RepoFile",
    "Resolved",
    "cache",
    "default_model",
    "download",
    "download_limit",
    "endpoint",
    "is_offline",
    "list_local",
    "local",
    "remember_model",
    "remove",
    "remove_partials",
    "repair",
    "resolve",
]

# module -> the public names it holds
_HOMES = {
    "client": ("Patience", "endpoint", "is_offline"),
    "fetching": ("Repaired", "download", "repair"),
    "listing": ("RepoFile",),
    "local": ("LocalModel", "default_model", "list_local", "remember_model"),
    "removal": ("Removal", "remove", "remove_partials"),
    "resolution": ("Resolved", "download_limit", "resolve"),
}


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is not None:
        return getattr(import_module(f".{home}", __name__), name)
    if name in ("cache", "local"):
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

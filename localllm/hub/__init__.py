"""Model names and files: resolve, download, verify, list, remove and repair. Files live in the Hugging Face cache.

Imports no torch. httpx and huggingface_hub are imported on first network use, and the modules of this package on first
access, because shell completion of model names has to be fast. `tests/hub/hub_server.py` is a test hub that can inject
faults.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import cache as cache
    from . import local as local
    from . import local_model as local_model
    from .client import Patience as Patience
    from .client import endpoint as endpoint
    from .client import is_offline as is_offline
    from .copying import copy as copy
    from .copying import exact as exact
    from .fetching import Repaired as Repaired
    from .fetching import download as download
    from .fetching import repair as repair
    from .listing import RepoFile as RepoFile
    from .local import default_model as default_model
    from .local import list_local as list_local
    from .local import remember_model as remember_model
    from .local_model import PLACES as PLACES
    from .local_model import LocalModel as LocalModel
    from .removal import Removal as Removal
    from .removal import remove as remove
    from .removal import remove_partials as remove_partials
    from .resolution import Judgement as Judgement
    from .resolution import Resolved as Resolved
    from .resolution import download_limit as download_limit
    from .resolution import resolve as resolve

_HOMES = {
    "client": ("Patience", "endpoint", "is_offline"),
    "copying": ("copy", "exact"),
    "fetching": ("Repaired", "download", "repair"),
    "listing": ("RepoFile",),
    "local": ("default_model", "list_local", "remember_model"),
    "local_model": ("PLACES", "LocalModel"),
    "removal": ("Removal", "remove", "remove_partials"),
    "resolution": ("Judgement", "Resolved", "download_limit", "resolve"),
}


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is not None:
        return getattr(import_module(f".{home}", __name__), name)
    if name in ("cache", "local", "local_model"):
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

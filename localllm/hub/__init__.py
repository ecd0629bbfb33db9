"""A name becomes verified local files: resolve, download, list, remove, repair. The Hugging Face cache is the store.

No torch; httpx and huggingface_hub are imported when the network is really used. `tests/hub/hub_server.py` is a hub
with faults to try it against.
"""

from .client import Patience, endpoint, is_offline
from .fetching import Repaired, download, repair
from .listing import RepoFile
from .local import LocalModel, default_model, list_local, remember_model
from .meter import size_text
from .removal import Removal, remove, remove_partials
from .resolution import Resolved, resolve

__all__ = [
    "LocalModel",
    "Patience",
    "Removal",
    "Repaired",
    "RepoFile",
    "Resolved",
    "default_model",
    "download",
    "endpoint",
    "is_offline",
    "list_local",
    "remember_model",
    "remove",
    "remove_partials",
    "repair",
    "resolve",
    "size_text",
]

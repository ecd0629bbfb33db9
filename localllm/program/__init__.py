"""Programs of several model calls: functions that add text, `gen`, `select` and messages to a state, and fork it.

The names follow SGLang's front end. Prefixes shared by calls are computed once: they come from the engine's prefix
cache, and concurrent calls wait until the first of them has read the prefix. Importing
this does not load torch.
"""

from .endpoint import Endpoint
from .expressions import assistant, gen, select, system, user
from .functions import Program, function
from .state import Forks, State, Tokens

__all__ = [
    "Endpoint",
    "Forks",
    "Program",
    "State",
    "Tokens",
    "assistant",
    "function",
    "gen",
    "select",
    "system",
    "user",
]

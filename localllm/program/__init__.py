"""Programs of several model calls: functions that add text, `gen`, `select` and messages to a state, and fork it.

The names are those of SGLang's front end. What calls begin with alike is computed once: it comes from the engine's
prefix cache, and calls that run at the same time wait until the first of them has read it. Importing
this loads no torch.
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

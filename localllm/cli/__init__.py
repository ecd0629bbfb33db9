"""The `localllm` command.

`frame/` is what all commands share, `commands/` holds one module a command; beside them stands what several commands
use. Nothing is loaded before it is needed: a shell that completes a name needs the names of commands and models, help
needs Typer, and only a command that is called needs its own module.
"""

from __future__ import annotations

import gc
import os


def main() -> None:
    """The console script."""
    gc.disable()  # until a command runs: imports leave no garbage, and looking for it takes a sixth of the start
    if "_LOCALLLM_COMPLETE" in os.environ:
        from .frame.completion import answered

        if answered():
            return
    from .frame.program import main as run

    run()

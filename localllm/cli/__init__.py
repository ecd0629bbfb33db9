"""The `localllm` command.

`frame/` holds what all commands share, `commands/` one module per command; the other modules hold what several
commands use. Everything is loaded on demand: completion needs only the names of commands and models, help needs Typer,
and only the command that is called needs its own module.
"""

from __future__ import annotations

import gc
import os


def main() -> None:
    """The console script."""
    gc.disable()  # until a command runs: imports leave no garbage, and looking for it takes a sixth of the startup
    if "_LOCALLLM_COMPLETE" in os.environ:
        from .frame.completion import answered

        if answered():
            return
    from .frame.program import main as run

    run()

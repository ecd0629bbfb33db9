"""The `localllm` command: which commands there are, and the door.

Nothing is loaded before it is needed: a shell that completes a name needs the table below and the names of models, help
needs Typer, and only a command that is called needs its own module.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localllm.cli.frame.command import build
    from localllm.cli.frame.program import app

__all__ = ["ALIASES", "COMMANDS", "app", "build", "main"]

# name, group, module, one line for --help
COMMANDS = (
    ("chat", "Talk", "chat", "Interactive chat (full-screen; --plain for line mode)"),
    ("run", "Talk", "run", "One prompt in, one answer out (pipes, --json)"),
    ("logs", "Talk", "logs", "Search, show and export saved chats"),
    ("serve", "Serve", "serve", "OpenAI-compatible HTTP endpoint"),
    ("ps", "Serve", "ps", "What is loaded, where, how busy"),
    ("stop", "Serve", "ps", "Stop a server, or unload one of its models"),
    ("batch", "Serve", "batch", "Answer a file of requests, resumable"),
    ("connect", "Serve", "connect", "Settings for opencode, Zed, Open WebUI, llm, aider, ..."),
    ("pull", "Models", "pull", "Download a model, verified and resumable"),
    ("ls", "Models", "ls", "Models on this machine"),
    ("show", "Models", "ls", "What a model is: architecture, context, licence, files"),
    ("rm", "Models", "ls", "Remove a model or left-over parts of downloads"),
    ("quantize", "Models", "quantize", "Write a smaller version of a BF16 model"),
    ("eval", "Models", "quantize", "Measure what a weight or KV format costs: perplexity and KL"),
    ("doctor", "This machine", "doctor", "Check hardware, software and settings"),
    ("plan", "This machine", "plan", "What fits here: memory, context, expected speed"),
    ("bench", "This machine", "bench", "Measure prefill, decode and time to first token"),
    ("tune", "This machine", "tune", "Time kernel tile sizes on this card now"),
    ("config", "This machine", "config", "Show and change settings"),
)
ALIASES = {"list": "ls", "fit": "plan"}


def main() -> None:
    """The console script."""
    if "_LOCALLLM_COMPLETE" in os.environ:
        from localllm.cli.frame.completion import answered

        if answered():
            return
    from localllm.cli.frame.program import main as run

    run()


def __getattr__(name: str) -> Any:
    if name == "app":
        from localllm.cli.frame.program import app

        return app
    if name == "build":
        from localllm.cli.frame.command import build

        return build
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

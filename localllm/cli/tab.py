"""The process of one browser tab of `chat --web`: the interface over a pipe to `textual-serve`. Not for people."""

from __future__ import annotations

import argparse
import sys

from localllm.cli.frame import logs
from localllm.cli.frame.command import Env, Options, guarded
from localllm.cli.full_screen import full_screen
from localllm.cli.names import Choice
from localllm.cli.session import Sampling
from localllm.cli.start import new_start


def main() -> None:
    """Parse what `web.py` wrote, and run the interface."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--attach-to", default="")
    parser.add_argument("--model", default="")
    given = parser.parse_args()

    def run(env: Env) -> int:
        config = env.settings({})
        logs.no_stderr()
        start = new_start(config, Sampling(config.sampling.given()), config.chat.system)
        start.attach_to = given.attach_to
        start.choice = Choice(given.model or ("" if given.attach_to else "fake"), given.model or "fake")
        return full_screen(env, config, start)

    sys.exit(guarded(Options(quiet=True), run))


if __name__ == "__main__":
    main()

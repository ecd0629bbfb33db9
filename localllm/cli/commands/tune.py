"""This machine: Time kernel tile sizes on this GPU now"""

from __future__ import annotations

import time
from typing import Annotated

from typer import Option

from localllm.cli.frame.command import Env, command
from localllm.cli.frame.console import picked
from localllm.cli.frame.options import Model, WindowFlags
from localllm.cli.names import choose
from localllm.terminal import clean_line


@command("localllm tune qwen", "localllm tune qwen --seconds 60 --json")
def tune(
    env: Env,
    model: Model,
    seconds: Annotated[float, Option(metavar="S", min=1, help="Time limit in seconds.")] = 20.0,
    window: WindowFlags = WindowFlags(),
) -> int:
    """Time up to eight tile sizes for every kernel and shape of a model on this GPU, and keep the fastest of each.

    Without this command, the same happens in idle moments after the first answer. Ctrl+C stops and keeps the results.
    """
    import torch

    from localllm.cli.loading import load_llm
    from localllm.kernels.verify.tuning import tuner

    console = env.console
    config = env.settings(window.settings())
    choice = choose(env, config, model)
    started = time.monotonic()
    with load_llm(env, choice, config.engine) as llm:
        device = llm.plan.device
        tuned = llm.tune(
            seconds,
            lambda one: console.say(
                f"{one.shape.name}: {one.us:.1f} us with {dict(one.tile)}, {one.first_us:.1f} us with the default"
            ),
        )
        waiting = len(tuner(torch.device(device)).waiting)
    if console.as_json:
        rows = [
            picked(one, "us first_us failed") | picked(one.shape, "op key") | {"tile": dict(one.tile)} for one in tuned
        ]
        took = time.monotonic() - started
        console.emit("tune/1", {"device": device, "tuned": rows, "waiting": waiting, "seconds": took})
    elif device == "cpu":
        console.line("CPU kernels have no tile sizes: nothing to tune.")
    else:
        faster = sum(one.us < one.first_us for one in tuned)
        console.line(f"{len(tuned)} shapes timed, {faster} got a faster tile, {waiting} left for the next run.")
        for one in tuned:
            for reason in one.failed if console.verbose else ():
                console.say(f"  {one.shape.name}: {clean_line(reason)}")
    return 0

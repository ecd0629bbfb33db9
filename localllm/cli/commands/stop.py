"""Serve: Stop a server, or unload one of its models"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Annotated

from typer import Option

from localllm.cli.attach import ask
from localllm.cli.frame.command import Env, command
from localllm.cli.frame.options import model_argument
from localllm.device.processes import Running, running
from localllm.errors import ConfigError, ServerError
from localllm.terminal import clean_line

STOP_S = 40.0  # time allowed to exit: a server drains for 25 seconds


@command("localllm stop", "localllm stop qwen", "localllm stop 8001")
def stop(
    env: Env,
    target: Annotated[str | None, model_argument("[MODEL|PORT|PID]", "Without one, the only server.")] = None,
    park: Annotated[bool, Option("--park", help="Put the model to sleep instead of unloading it.")] = False,
    every: Annotated[bool, Option("--all", help="Stop every server of this user.")] = False,
) -> int:
    """Stop a server after its requests finish, or unload one of its models.

    A number is a port or a process id; anything else is a model.
    """
    servers = [one for one in running() if one.kind == "serve"]
    chat = next((one for one in running() if one.kind != "serve" and one.url and target in _numbers(one)), None)
    if chat is not None:
        raise ServerError(f"{clean_line(chat.url)} belongs to a chat (pid {chat.pid})", "type /serve off in that chat")
    if not servers:
        raise ServerError("no server is running", "`localllm serve` starts one")
    if target is not None and not target.isdigit():
        return _unload(env, servers, target, "park" if park else "unload")
    if park:
        raise ConfigError("--park needs a model", "localllm stop MODEL --park")
    if target is not None:
        chosen = [one for one in servers if target in _numbers(one)]
        if not chosen:
            raise ServerError(f"no server has port or process id {target}", "localllm ps")
    elif len(servers) > 1 and not every:
        names = ", ".join(one.url for one in servers)
        raise ConfigError(f"{len(servers)} servers are running: {names}", "`localllm stop PORT`, or add --all")
    else:
        chosen = servers
    for one in chosen:
        with suppress(ProcessLookupError):  # it has ended since it was listed
            os.kill(one.pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    while (left := {one.pid for one in running()} & {one.pid for one in chosen}) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left:
        raise ServerError(f"process {min(left)} is still answering requests", "run `localllm stop` again to drop them")
    stopped = [{"pid": one.pid, "url": one.url} for one in chosen]
    env.console.emit("stop/1", {"stopped": stopped, "unloaded": []})
    for one in chosen:
        env.console.say(f"stopped {clean_line(one.url)} (pid {one.pid})")
    return 0


def _numbers(one: Running) -> tuple[str, str]:
    """What may be typed for a process: its id or its port."""
    return str(one.pid), one.url.rsplit(":", 1)[-1]


def _unload(env: Env, servers: list[Running], model: str, what: str) -> int:
    done = []
    for one in servers:
        answer = ask(one, "POST", f"/localllm/{what}", {"model": model}, timeout=STOP_S)
        if answer is not None and answer.get("done"):
            done.append({"pid": one.pid, "url": one.url, "model": answer["model"]})
    if not done:
        raise ServerError(f"no server has {clean_line(model)} loaded", "localllm ps")
    env.console.emit("stop/1", {"stopped": [], "unloaded": done})
    for row in done:
        env.console.say(f"{what}ed {clean_line(str(row['model']))} at {clean_line(str(row['url']))}")
    return 0

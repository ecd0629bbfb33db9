"""`localllm ps` and `stop`: what runs on this machine, and how it ends."""

from __future__ import annotations

import os
import signal
import time
from typing import Annotated, Any

import typer

from localllm.cli.frame import options as params
from localllm.cli.frame.command import Env, command
from localllm.errors import ConfigError, ServerError
from localllm.processes import Running, running
from localllm.terminal import clean_line, gib, seconds_short

ASK_S = 2.0
"""how long a server may take to tell about itself"""
STOP_S = 40.0
"""how long it may take to end: it drains for 25 seconds"""
Target = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL|PORT|PID]", help="Nothing: the one server.", autocompletion=params.complete_model),
]


@command("localllm ps", "localllm ps --json")
def ps(env: Env) -> int:
    """What is loaded, where, and how busy it is: servers and chats of this user, and who else uses a GPU."""
    rows = [row for one in running() for row in _rows(one)]
    others = _others({one.pid for one in running()})
    if env.console.as_json:
        env.console.emit("ps/1", {"processes": rows, "gpu_processes": others})
        return 0
    if rows:
        columns = ("PID", "KIND", "MODEL", "DEVICE", "MEMORY", "CTX", "BUSY", "SPEED", "UP", "TTL", "URL")
        spare = ("TTL", "UP", "SPEED", "DEVICE", "MEMORY")
        env.console.table(columns, [_cells(row) for row in rows], right=("PID", "MEMORY"), spare=spare)
    else:
        env.console.say("nothing runs: localllm serve, or localllm chat")
    for other in others:
        name = clean_line(other["name"] or "a process")
        env.console.line(f"other processes on GPU {other['gpu']}: {name} (pid {other['pid']}) {gib(other['bytes'])}")
    return 0


@command("localllm stop", "localllm stop qwen", "localllm stop 8001")
def stop(
    env: Env,
    target: Target = None,
    park: Annotated[bool, typer.Option("--park", help="Put the model to sleep instead of unloading it.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Stop every server of this user.")] = False,
) -> int:
    """Stop a server, letting its requests finish; or unload one of its models.

    A number is a port or a process id, anything else a model.
    """
    servers = [one for one in running() if one.kind == "serve"]
    chat = next((one for one in running() if one.kind != "serve" and one.url and target in _numbers(one)), None)
    if chat is not None:
        raise ServerError(f"{clean_line(chat.url)} is a chat's (pid {chat.pid})", "type /serve off in that chat")
    if not servers:
        raise ServerError("no server is running", "localllm serve starts one")
    if target is not None and not target.isdigit():
        return _unload(env, servers, target, "park" if park else "unload")
    if park:
        raise ConfigError("--park needs a model", "localllm stop MODEL --park")
    if target is not None:
        chosen = [one for one in servers if target in _numbers(one)]
        if not chosen:
            raise ServerError(f"no server has the port or process id {target}", "localllm ps")
    elif len(servers) > 1 and not every:
        names = ", ".join(one.url for one in servers)
        raise ConfigError(f"{len(servers)} servers are running: {names}", "localllm stop PORT, or --all")
    else:
        chosen = servers
    for one in chosen:
        os.kill(one.pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    while (left := {one.pid for one in running()} & {one.pid for one in chosen}) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left:
        raise ServerError(f"process {min(left)} still answers requests", "localllm stop again drops them")
    stopped = [{"pid": one.pid, "url": one.url} for one in chosen]
    if env.console.as_json:
        env.console.emit("stop/1", {"stopped": stopped, "unloaded": []})
    for one in chosen:
        env.console.say(f"stopped {clean_line(one.url)} (pid {one.pid})")
    return 0


def _numbers(one: Running) -> tuple[str, str]:
    """What may be typed for a process: its id, its port."""
    return str(one.pid), one.url.rsplit(":", 1)[-1]


def _unload(env: Env, servers: list[Running], model: str, what: str) -> int:
    done = []
    for one in servers:
        answer = ask(one, "POST", f"/localllm/{what}", {"model": model}, timeout=STOP_S)
        if answer is not None and answer.get("done"):
            done.append({"pid": one.pid, "url": one.url, "model": answer["model"]})
    if not done:
        raise ServerError(f"no server has {clean_line(model)} loaded", "localllm ps")
    if env.console.as_json:
        env.console.emit("stop/1", {"stopped": [], "unloaded": done})
    for row in done:
        word = "parked" if what == "park" else "unloaded"
        env.console.say(f"{word} {clean_line(str(row['model']))} at {clean_line(str(row['url']))}")
    return 0


def ask(one: Running, method: str, path: str, body: Any = None, timeout: float = ASK_S) -> dict[str, Any] | None:
    """What a running server answers its owner; None when it does not, or refuses."""
    import httpx

    unix = one.url.removeprefix("unix:") if one.url.startswith("unix:") else None
    options: dict[str, Any] = {
        "transport": httpx.HTTPTransport(uds=unix) if unix else None,
        "base_url": "http://localhost" if unix else one.url,
        "headers": {"authorization": f"Bearer {one.token}"},
        "timeout": timeout,
        "trust_env": False,
    }
    try:
        with httpx.Client(**options) as client:
            response = client.request(method, path, json=body)
            value = response.json() if response.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _rows(one: Running) -> list[dict[str, Any]]:
    """One row per loaded model; one for a process that has none or says nothing."""
    up = max(0.0, time.time() - one.started)
    base = {"pid": one.pid, "kind": one.kind, "url": one.url or None, "up_s": round(up, 1)}
    told = ask(one, "GET", "/localllm/ps") if one.kind == "serve" and one.url else None
    if told is None:
        return [base | {"model": name, "state": "unknown"} for name in one.models or ("",)]
    speeds = told.get("decode_tps", {})
    rows = [
        base | {key: value for key, value in row.items() if key != "up_s"} | {"decode_tps": speeds.get(row["model"])}
        for row in told["models"]
    ]
    return rows or [base | {"model": "", "state": "draining" if told.get("draining") else "idle"}]


_STATES: dict[Any, str] = {None: "–", "unknown": "–"}
"""state -> how it reads where that is not the word itself"""


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    ctx, parallel = row.get("ctx"), row.get("parallel")
    expires = row.get("expires_in_s")
    tps = row.get("decode_tps")
    ready = row.get("state") == "ready"
    return (
        str(row["pid"]),
        row["kind"],
        row["model"] or "–",
        row.get("device") or "–",
        gib(row["bytes"]) if row.get("bytes") else "–",
        f"{ctx:,} ×{parallel}" if ctx else "–",
        f"{row.get('running', 0)}/{parallel}" if ready else _STATES.get(row.get("state"), str(row.get("state"))),
        f"{tps:.0f} t/s" if tps else "–",
        seconds_short(row["up_s"]),
        seconds_short(expires) if expires is not None else "–",
        row["url"] or "–",
    )


def _others(ours: set[int]) -> list[dict[str, Any]]:
    """Processes of others on the GPUs."""
    from localllm.device import machine

    return [
        {"gpu": index, "pid": process.pid, "name": process.name, "bytes": process.used_bytes}
        for index, gpu in enumerate(machine().gpus)
        for process in gpu.processes
        if process.pid not in ours
    ]

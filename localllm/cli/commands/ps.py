"""Serve: What is loaded, where, how busy"""

from __future__ import annotations

import time
from typing import Any

from localllm.cli.attach import ask
from localllm.cli.frame.command import Env, command
from localllm.device.processes import Running, running
from localllm.engine.page_files import stored_files
from localllm.terminal import clean_line, gib, rate, seconds_short


@command("localllm ps", "localllm ps --json")
def ps(env: Env) -> int:
    """Show what is loaded, where, and how busy it is: this user's servers and chats, and other GPU processes."""
    rows = [row for one in running() for row in _rows(one)]
    others = _others({one.pid for one in running()})
    kept = sum(file.num_bytes for file in stored_files())
    if env.console.emit("ps/1", {"processes": rows, "gpu_processes": others, "kv_store_bytes": kept}):
        return 0
    if rows:
        columns = ("PID", "KIND", "MODEL", "DEVICE", "MEMORY", "CTX", "BUSY", "SPEED", "UP", "TTL", "URL")
        spare = ("TTL", "UP", "SPEED", "DEVICE", "MEMORY")
        env.console.table(columns, [_cells(row) for row in rows], right=("PID", "MEMORY"), spare=spare)
    else:
        env.console.say("nothing is running: localllm serve, or localllm chat")
    for other in others:
        name = clean_line(other["name"] or "a process")
        env.console.line(f"other processes on GPU {other['gpu']}: {name} (pid {other['pid']}) {gib(other['bytes'])}")
    if kept:
        env.console.line(f"conversation pages on disk: {gib(kept)}")
    return 0


def _rows(one: Running) -> list[dict[str, Any]]:
    """One row per loaded model; one row for a process that has none or does not answer."""
    up = max(0.0, time.time() - one.started)
    base = {"pid": one.pid, "kind": one.kind, "url": one.url or None, "up_s": round(up, 1)}
    told = ask(one, "GET", "/localllm/ps") if one.kind == "serve" and one.url else None
    if told is None:
        engine = {"device": one.device, "ctx": one.ctx, "bytes": one.bytes} if one.device else {}
        state = "ready" if engine else "unknown"
        return [base | {"model": name, "state": state, **engine} for name in one.models or ("",)]
    speeds = told.get("decode_tps", {})
    rows = [
        base | {key: value for key, value in row.items() if key != "up_s"} | {"decode_tps": speeds.get(row["model"])}
        for row in told.get("models", ())
    ]
    return rows or [base | {"model": "", "state": "draining" if told.get("draining") else "idle"}]


_STATES: dict[Any, str] = {None: "–", "unknown": "–"}  # state -> its text, where that is not the state itself


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
        (f"{ctx:,} ×{parallel}" if parallel else f"{ctx:,}") if ctx else "–",
        f"{row.get('running', 0)}/{parallel}"
        if ready and parallel
        else _STATES.get(row.get("state"), str(row.get("state"))),
        f"{rate(tps)} tok/s" if tps else "–",
        seconds_short(row["up_s"]),
        seconds_short(expires) if expires is not None else "–",
        row["url"] or "–",
    )


def _others(ours: set[int]) -> list[dict[str, Any]]:
    from localllm.device import machine

    return [
        {"gpu": index, "pid": process.pid, "name": process.name, "bytes": process.used_bytes}
        for index, gpu in enumerate(machine().gpus)
        for process in gpu.processes
        if process.pid not in ours
    ]

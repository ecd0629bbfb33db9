"""Serve: Keep an engine ready in the background"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from localllm import paths
from localllm.cli.attach import ask
from localllm.cli.background import START_S, Service, await_server, installed, log_file, service_file, unit_files
from localllm.cli.frame.command import Env, command
from localllm.device.host import port_holder
from localllm.device.processes import running
from localllm.errors import ConfigError, ServerError
from localllm.terminal import clean_line, counted, seconds_short

ACTIONS = ("install", "status", "remove")
NAME = "localllm"
STOP_S = 40.0  # the server lets its requests finish
# part of the units' seal: a change here makes `_edited` report units of earlier versions
_MARK = "# made by `localllm service install`; a change by hand is kept. "


@command(
    "localllm service install",
    "localllm service install --port 8001 --ttl 10m",
    "localllm service status",
    "localllm service remove",
)
def service(
    env: Env,
    action: Annotated[str, Argument(metavar="install|status|remove", help="What to do.")] = "status",
    port: Annotated[int | None, Option(metavar="N", min=1, max=65535, help="Port; 8000 by default.")] = None,
    ttl: Annotated[
        str | None, Option(metavar="TIME", help="Unload after this idle time, such as 30m; 0 never.")
    ] = None,
    force: Annotated[bool, Option("--force", help="Replace a unit that was edited by hand.")] = False,
) -> int:
    """Keep a server ready that loads models on demand and unloads idle ones; `run` and `chat` use it.

    With systemd it is a user service that starts on the first connection. Otherwise it is a background process that
    runs until it is removed or the machine restarts.
    """
    if action not in ACTIONS:
        raise ConfigError(
            f"service {clean_line(action)}: the action must be one of {', '.join(ACTIONS)}", "localllm service status"
        )
    if action != "install" and (port is not None or ttl is not None):
        raise ConfigError("--port and --ttl need `service install`", "localllm service install --port 8001")
    if action == "install":
        config = env.settings({"server.port": port, "engine.ttl": ttl})
        _install(env, config.server.port or 8000, config.engine.ttl_s, force)
    elif action == "remove":
        removed = _remove(env)
        if not env.console.as_json:
            env.console.line(removed)
            return 0
    _status(env)
    return 0


# --- install ---------------------------------------------------------------------------------------------------------


def _install(env: Env, port: int, ttl_s: float, force: bool) -> None:
    before = installed()
    if before is not None and not force and before.port != port:
        raise ConfigError(f"the service is already installed, on port {before.port}", "`localllm service remove` first")
    if before is not None and before.kind == "process":
        _end(before)
    if before is None and (taken := _port_owner(port)):
        raise ServerError(f"port {port} is taken{taken}", f"localllm service install --port {port + 1}")
    words = [sys.executable, "-m", "localllm", "serve", "--port", str(port), "--ttl", f"{ttl_s:g}s"]
    if env.options.config:
        words += ["--config", str(env.options.config)]
    if _has_systemd():
        _install_units(port, words, force)
        _save(Service("systemd", port))
        return
    env.console.say("systemd is not available for this user: starting a background process")
    log = log_file()
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists():
        log.replace(log.with_suffix(".log.1"))
    with log.open("ab") as file:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True, cwd=Path.home()
        )
    made = Service("process", port, process.pid)
    _save(made)
    if await_server(made, START_S, process) is None:
        process.kill()
        service_file().unlink(missing_ok=True)
        raise _start_error(log)


def _start_error(log: Path) -> ServerError:
    """Build an error from the message and hint that the server wrote to its log."""
    told = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    why = next((line.removeprefix("error: ") for line in told if line.startswith("error: ")), "no reason given")
    hint = next((line.removeprefix("try ").strip() for line in told if line.startswith("try ")), f"see {log}")
    why = why.rpartition("   [")[0] or why  # drop the error code
    return ServerError(f"the server did not start: {clean_line(why)}", clean_line(hint))


def _port_owner(port: int) -> str:
    """Say who listens on a port, for an error message; "" when it is free."""
    holder = port_holder(port)
    ours = next((one for one in running() if one.url.endswith(f":{port}")), None)
    return "" if not holder else f" by localllm {ours.kind} (pid {ours.pid})" if ours else f" by {clean_line(holder)}"


def _save(made: Service) -> None:
    paths.replace_file(service_file(), json.dumps({"kind": made.kind, "port": made.port, "pid": made.pid}))


# --- systemd ---------------------------------------------------------------------------------------------------------


def _has_systemd() -> bool:
    """Return whether this user has a systemd that accepts units."""
    if shutil.which("systemctl") is None:
        return False
    try:
        return (
            subprocess.run(["systemctl", "--user", "show-environment"], capture_output=True, timeout=5).returncode == 0
        )
    except (OSError, subprocess.SubprocessError):
        return False


def units(port: int, words: list[str], variables: dict[str, str]) -> tuple[str, str]:
    """Return the texts of the socket and service units. The socket listens from login on and starts the server on use.

    variables  environment variables that the server needs to find the same models and settings
    """
    quoted = " ".join(_quoted(word).replace("$", "$$") for word in words)
    settings = "".join(f"Environment={_quoted(f'{name}={value}')}\n" for name, value in sorted(variables.items()))
    sock = f"""\
[Unit]
Description=localllm: endpoint of local language models

[Socket]
ListenStream=127.0.0.1:{port}

[Install]
WantedBy=sockets.target
"""
    serve = f"""\
[Unit]
Description=localllm: local language models
Requires={NAME}.socket
After={NAME}.socket

[Service]
Type=exec
ExecStart={quoted}
{settings}Restart=on-failure
RestartSec=5
TimeoutStopSec={STOP_S:.0f}

[Install]
WantedBy=default.target
"""
    return _with_checksum(sock), _with_checksum(serve)


def _quoted(word: str) -> str:
    """Quote a word for a systemd unit (systemd.syntax(7))."""
    for char in ("\\", '"', "%"):
        word = word.replace(char, "%%" if char == "%" else f"\\{char}")
    return f'"{word}"'


def _with_checksum(text: str) -> str:
    return f"{_MARK}{hashlib.sha256(text.encode()).hexdigest()[:16]}\n{text}"


def _edited(path: Path) -> bool:
    """Return whether the unit exists and differs from what we wrote."""
    try:
        text = path.read_text()
    except OSError:
        return False
    return text != _with_checksum(text.partition("\n")[2])


def _install_units(port: int, words: list[str], force: bool) -> None:
    files = unit_files()
    for path in files:
        if _edited(path) and not force:
            raise ConfigError(f"{path} was edited by hand", "localllm service install --force replaces it")
    kept = ("LOCALLLM_", "HF_", "XDG_", "CUDA_VISIBLE_DEVICES", "PYTHONPATH")
    left_out = re.compile("TOKEN|KEY|SECRET|PASSWORD|XDG_RUNTIME_DIR")  # secrets do not belong in a unit
    variables = {
        k: v for k, v in os.environ.items() if k.startswith(kept) and not left_out.search(k) and v.isprintable()
    }
    for path, text in zip(files, units(port, words, variables), strict=True):
        paths.replace_file(path, text, mode=0o600)
    _systemctl("daemon-reload")
    _systemctl("stop", f"{NAME}.service")
    _systemctl("enable", f"{NAME}.socket")
    _systemctl("restart", f"{NAME}.socket")


def _systemctl(*words: str) -> None:
    try:
        done = subprocess.run(["systemctl", "--user", *words], capture_output=True, text=True, timeout=STOP_S + 20)
    except (OSError, subprocess.SubprocessError) as error:
        raise ServerError(
            f"systemctl --user {shlex.join(words)} failed: {clean_line(str(error))}",
            f"`journalctl --user -u {NAME}.service` shows the log",
        ) from None
    if done.returncode != 0:
        why = clean_line(done.stderr) or f"exit status {done.returncode}"
        raise ServerError(
            f"systemctl --user {shlex.join(words)} failed: {why}",
            f"`journalctl --user -u {NAME}.service` shows the log",
        )


# --- remove and status -----------------------------------------------------------------------------------------------


def _remove(env: Env) -> str:
    """Stop the service and remove its files; returns what was done."""
    found = installed()
    units_there = [path for path in unit_files() if path.exists()]
    if found is None and not units_there:
        service_file().unlink(missing_ok=True)
        return "no service is installed"
    if units_there:
        _systemctl("disable", "--now", f"{NAME}.socket")
        _systemctl("stop", f"{NAME}.service")
        for path in units_there:
            if _edited(path):
                path.replace(path.with_suffix(path.suffix + ".bak"))
                env.console.say(f"saved your edited unit as {path}.bak")
            path.unlink(missing_ok=True)
        _systemctl("daemon-reload")
    if found is not None and found.kind == "process":
        _end(found)
    service_file().unlink(missing_ok=True)
    if found is None:
        return "removed the units of a service"
    what = "systemd user service" if found.kind == "systemd" else f"background process (pid {found.pid})"
    return f"stopped and removed the {what} on {found.url}"


def _end(found: Service) -> None:
    """Stop a background process and wait for it to exit."""
    with suppress(ProcessLookupError):  # it has ended since it was looked up
        os.kill(found.pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    while any(one.pid == found.pid for one in running()):
        if time.monotonic() > deadline:
            raise ServerError(f"process {found.pid} is still answering requests", "`localllm stop` drops them")
        time.sleep(0.05)


def _status(env: Env) -> None:
    found = installed()
    server = found.server if found else None
    told = (ask(server, "GET", "/localllm/ps") if server else None) or {}
    models = [str(row.get("model")) for row in told.get("models", [])]
    state = "not installed" if found is None else "running" if server else "waiting"
    fields: dict[str, Any] = {
        "state": state, "kind": found.kind if found else None, "url": found.url if found else None,
        "pid": server.pid if server else None, "models": models,
        "units": [str(path) for path in unit_files() if path.exists()],
    }  # fmt: skip
    if env.console.emit("service/1", fields):
        return
    if found is None:
        env.console.line("not installed: localllm service install")
        return
    how = "systemd user service" if found.kind == "systemd" else "background process"
    if server is None:
        env.console.line(f"{how} on {found.url}; starts on the first connection")
        return
    up = seconds_short(max(0.0, time.time() - server.started))
    loaded = (
        f"{counted(len(models), 'model')} loaded: {', '.join(map(clean_line, models))}" if models else "no model loaded"
    )
    env.console.line(f"{how} on {found.url} (pid {server.pid}), up {up}, {loaded}")

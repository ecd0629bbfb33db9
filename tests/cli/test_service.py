"""`service`: a background process where there is no systemd, units where there is, a socket from systemd."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.cli.background import installed, log_file
from localllm.cli.commands.service import units
from localllm.device.processes import Running

from .conftest import Invoke, process, valid

SYSTEMCTL = """\
#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in *"$REFUSED"*) [ -n "$REFUSED" ] && { echo "Failed: no such unit" >&2; exit 1; };; esac
exit 0
"""


@pytest.fixture
def systemd(tmp_path: Path, empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `systemctl` that writes down what it is asked, and a folder for units. Returns the folder of both."""
    tool = tmp_path / "bin" / "systemctl"
    tool.parent.mkdir()
    tool.write_text(SYSTEMCTL)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("REFUSED", "")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_units_are_installed_and_removed(systemd: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("LOCALLLM_API_KEY", "hidden-one")
    monkeypatch.setenv("HF_TOKEN", "hidden-two")
    result = invoke("service", "install", "--port", str(port), "--ttl", "10m", "--json")
    told = valid(result.stdout, "service-1")
    assert (told["state"], told["kind"], told["url"]) == ("waiting", "systemd", f"http://127.0.0.1:{port}")
    sock, unit = (systemd / "config/systemd/user" / f"localllm.{kind}" for kind in ("socket", "service"))
    assert f"ListenStream=127.0.0.1:{port}" in sock.read_text()
    assert f'ExecStart="{sys.executable}" "-m" "localllm" "serve" "--port" "{port}" "--ttl" "600s"' in unit.read_text()
    assert "LOCALLLM_HOME=" in unit.read_text(), "the same models and settings"
    assert "hidden" not in unit.read_text() and unit.stat().st_mode & 0o077 == 0
    calls = (systemd / "calls").read_text().splitlines()
    assert calls[1:] == [f"--user {words}" for words in (
        "daemon-reload", "stop localllm.service", "enable localllm.socket", "restart localllm.socket"
    )]  # fmt: skip
    assert invoke("service", "install", "--port", str(port)).exit_code == 0, "once more changes nothing"
    assert invoke("service", "install", "--port", str(free_port())).exit_code == 2
    removed = invoke("service", "remove").stdout
    assert re.fullmatch(r"stopped and removed the systemd user service on http://127\.0\.0\.1:\d+\n", removed)
    assert not sock.exists() and not unit.exists() and installed() is None
    assert "disable --now localllm.socket" in (systemd / "calls").read_text()
    assert invoke("service", "remove").stdout == "no service is installed\n"


def test_a_unit_edited_by_hand_is_not_lost(systemd: Path, invoke: Invoke) -> None:
    port = str(free_port())
    assert invoke("service", "install", "--port", port).exit_code == 0
    unit = systemd / "config/systemd/user/localllm.service"
    unit.write_text(unit.read_text() + "Nice=5\n")
    refused = invoke("service", "install", "--port", port)
    assert refused.exit_code == 2 and "edited by hand" in refused.stderr and "--force" in refused.stderr
    assert "Nice=5" in unit.read_text()
    assert invoke("service", "remove").exit_code == 0
    assert not unit.exists() and "Nice=5" in unit.with_name("localllm.service.bak").read_text()
    assert invoke("service", "install", "--port", port).exit_code == 0
    unit.write_text("[Service]\n")
    assert invoke("service", "install", "--port", port, "--force").exit_code == 0
    assert "ExecStart" in unit.read_text()


def test_what_systemctl_refuses_is_told(systemd: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFUSED", "enable")
    result = invoke("service", "install", "--port", str(free_port()))
    assert result.exit_code == 8 and "Failed: no such unit" in result.stderr and "journalctl" in result.stderr


def test_a_port_that_is_taken(systemd: Path, invoke: Invoke) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = invoke("service", "install", "--port", str(port))
    assert result.exit_code == 8 and re.search(rf"port {port} is taken by .*\(pid {os.getpid()}\)", result.stderr)
    assert not (systemd / "config/systemd").exists()


@pytest.mark.parametrize("words", [("start",), ("status", "--port", "8000"), ("install", "--port", "0")])
def test_wrong_words(invoke: Invoke, empty_home: Path, words: tuple[str, ...]) -> None:
    assert invoke("service", *words).exit_code == 2


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "localllm", "serve", "--config", r"""/home/a b/100%$HOME"'\.toml"""]
    for kind, text in zip(("socket", "service"), units(8000, words, {"HF_HOME": '/a "b"\\ 100%'}), strict=True):
        (tmp_path / f"localllm.{kind}").write_text(text)
    files = [str(tmp_path / f"localllm.{kind}") for kind in ("socket", "service")]
    env = dict(os.environ) | {"XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(["systemd-analyze", "verify", "--user", *files], capture_output=True, text=True, env=env)
    ours = [line for line in done.stderr.splitlines() if "localllm.socket" in line or "localllm.service" in line]
    assert done.returncode == 0 and not ours, done.stderr


BIND = """
import os, sys
moved = [os.dup(int(word)) for word in sys.argv[2:]]
for target, source in enumerate(moved, 3):
    os.dup2(source, target)
os.environ |= {"LISTEN_FDS": str(len(moved)), "LISTEN_PID": sys.argv[1] or str(os.getpid())}
from localllm.errors import LocalLLMError
from localllm.server.run import ServeOptions, bind
try:
    print(bind(ServeOptions(port=1)).getsockname())
except LocalLLMError as error:
    print(error.code, error.message)
"""


def bound(*sockets: socket.socket, pid: str = "") -> str:
    """What `bind` makes of these sockets, handed over as systemd does: from descriptor 3 on."""
    numbers = [one.fileno() for one in sockets]
    command = [sys.executable, "-c", BIND, pid, *map(str, numbers)]
    done = subprocess.run(command, pass_fds=numbers, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_socket_of_systemd_is_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.socket() as deaf:
        assert bound(one).strip() == str(one.getsockname())
        assert "cannot be used" in bound(deaf), "it does not listen"
        assert "cannot be used" in bound(one, one)
        assert str(one.getsockname()) not in bound(one, pid="1"), "meant for another process"
    with socket.create_server(("0.0.0.0", 0)) as wide:
        assert "can be reached from the network" in bound(wide)


WRITES = """
import os
from localllm.cli.background import cut_log
os.write(2, b"old" * 100)
cut_log(400)
os.write(2, b"er" * 100)
cut_log(400)
os.write(2, b"new")
"""


def test_a_long_log_of_the_service_begins_anew(empty_home: Path, tmp_path: Path) -> None:
    log, other = log_file(), tmp_path / "other.log"
    log.parent.mkdir(parents=True)
    for file in (log, other):
        with file.open("ab") as stderr:
            subprocess.run([sys.executable, "-c", WRITES], stderr=stderr, check=True)
    assert log.read_bytes() == b"new" and log.with_suffix(".log.1").read_bytes() == b"old" * 100 + b"er" * 100
    assert other.read_bytes().endswith(b"new") and len(other.read_bytes()) == 503, "a log of somebody else's"


@pytest.mark.slow
def test_a_background_process_where_there_is_no_systemd(
    tmp_path: Path, empty_home: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    port = str(free_port())
    none = process("service", "install", "--port", port, engine="")
    assert none.returncode == 8 and b"no model is on this machine" in none.stderr
    assert installed() is None
    folder = empty_home / "data/models/tiny"
    folder.parent.mkdir(parents=True)
    shutil.copytree(tiny_path, folder) if tiny_path.is_dir() else (folder.mkdir(), shutil.copy(tiny_path, folder))
    try:
        made = process("service", "install", "--port", port, "--json", engine="")
        told = valid(made.stdout.decode(), "service-1")
        assert (told["state"], told["kind"]) == ("running", "process"), made.stderr
        again = valid(process("service", "install", "--port", port, "--json", engine="").stdout.decode(), "service-1")
        assert again["pid"] != told["pid"], "replaced"
        assert b"stopped" in log_file().with_suffix(".log.1").read_bytes() and log_file().is_file()
        socket.create_connection(("127.0.0.1", int(port)), timeout=10).close()
    finally:
        removed = process("service", "remove", "--json", engine="")
    assert valid(removed.stdout.decode(), "service-1")["state"] == "not installed"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(port)), timeout=10)


def test_a_server_that_ends_before_the_signal_is_stopped(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    listed = [Running(gone.pid, "serve", "http://127.0.0.1:8000")]
    monkeypatch.setattr("localllm.cli.commands.stop.running", lambda: listed)

    def kill(pid: int, number: int) -> None:
        listed.clear()
        os_kill(pid, number)

    os_kill = os.kill
    monkeypatch.setattr("localllm.cli.commands.stop.os.kill", kill)
    result = invoke("stop")
    assert result.exit_code == 0 and f"stopped http://127.0.0.1:8000 (pid {gone.pid})" in result.stderr

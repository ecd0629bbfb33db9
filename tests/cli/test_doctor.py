"""`doctor` at the prompt: modes, schemas, exit codes, what it asks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from localllm.device.host import HostFacts
from localllm.device.host import host as read
from localllm.doctor import repair

from .conftest import LOCALLLM, Invoke, process, valid

RTX, CPU = {"LOCALLLM_FAKE_HW": "rtx5090"}, {"LOCALLLM_FAKE_HW": "cpu"}


def test_every_finding_that_is_not_good_has_a_cure_and_no_torch_is_loaded(invoke: Invoke, empty_home: Path) -> None:
    start = time.monotonic()
    run = process("doctor", "--json", env=RTX)
    assert time.monotonic() - start < 20, "the line is 2 s"
    document = valid(run.stdout.decode(), "doctor-1")
    assert all(check["fix"]["cmd"] for check in document["checks"] if check["status"] in ("warn", "fail"))
    assert document["rules"] == [
        {"id": "R13", "title": "FlashInfer finds no CUDA architecture to compile for", "confidence": "A"}
    ]
    assert [one["id"] for one in document["advice"]] == ["model", "weights", "power"]
    assert document["host"]["disk"]["kind"] == "nvme"


def test_skipped_checks_are_shown_with_v(invoke: Invoke, empty_home: Path) -> None:
    plain, more = (invoke("doctor", *words, env=CPU).stdout for words in ((), ("-v",)))
    assert "gpu.present" in plain and "gpu.driver" not in plain
    assert "gpu.driver" in more and "numa" in more


def test_only_strict_and_list(invoke: Invoke, empty_home: Path) -> None:
    result = invoke("doctor", "--only", "gpu.pcie,ram", env=RTX)
    assert result.exit_code == 0
    assert "gpu.pcie" in result.stdout and "Advice" not in result.stdout and "2 checks" in result.stdout
    assert invoke("doctor", "--only", "gpu.pcie", "--strict", env=RTX).exit_code == 11
    assert invoke("doctor", "--only", "torch.cuda", env={"LOCALLLM_FAKE_HW": "rtx5070ti"}).exit_code == 11
    assert "gpu.p2p" in invoke("doctor", "--list").stdout.split()


@pytest.mark.parametrize(
    "words",
    [
        ("--log", "x", "--report"),
        ("--for", "vllm", "--apply"),
        ("-n",),
        ("--for", "abacus"),
        ("--log", "/no/such/file"),
    ],
)
def test_what_excludes_each_other_exits_2(invoke: Invoke, words: tuple[str, ...]) -> None:
    result = invoke("doctor", *words, env=RTX)
    assert result.exit_code == 2
    assert "localllm doctor" in result.stderr or "pass a log file" in result.stderr
    assert "cannot be combined" not in result.stderr or f"try   localllm doctor {words[0]} {words[1]}" in result.stderr


LOG = "\x1b[31mERROR\x1b[0m loading:  1%|#  |\rloading: 100%|###|\nRuntimeError: UVA is not available\nmore\n"


def test_an_error_text_is_explained(invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    file.write_text(LOG)
    here = invoke("doctor", "--log", str(file), env={"LOCALLLM_FAKE_HW": "wsl2"})
    assert here.exit_code == 0
    assert "R24" in here.stdout and "VLLM_WSL2_ENABLE_PIN_MEMORY=1" in here.stdout and "line 3:" in here.stdout
    elsewhere = invoke("doctor", "--log", str(file), env=RTX)
    assert "do not apply to this machine" in elsewhere.stdout
    assert "https://github.com/vllm-project/vllm/issues/54652" in invoke(
        "doctor", "--log", str(file), "-v", env={"LOCALLLM_FAKE_HW": "wsl2"}
    ).stdout.replace("\n", " ").replace("  ", "")
    twin = valid(invoke("doctor", "--log", "-", "--json", stdin=LOG, env=RTX).stdout, "diagnosis-1")
    assert [(m["id"], m["applies"], m["doubts"]) for m in twin["matches"]] == [("R24", False, ["wsl"])]
    nothing = invoke("doctor", "--log", "-", stdin="all is well\n")
    assert nothing.exit_code == 11 and "No known problem" in nothing.stdout and "in 1 line\n" in nothing.stderr
    assert invoke("doctor", "--log", "-", stdin="").exit_code == 2
    assert "\x1b" not in here.output


def test_a_hostile_log_writes_nothing_a_terminal_obeys(invoke: Invoke) -> None:
    text = "\x1b]52;c;aGk=\x07\x1b]0;title\x07 custom_all_reduce.cuh:1 'invalid argument' \x9b2J\x1b[2J\u202e[red]\n"
    result = invoke("doctor", "--log", "-", stdin=text, env={"LOCALLLM_FAKE_HW": "rtx5090x2"})
    assert "R28" in result.stdout and "[red]" in result.stdout
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(result.output)


def test_another_engine(invoke: Invoke, empty_home: Path) -> None:
    result = invoke("doctor", "--for", "vllm", "nvidia/Qwen3.6-27B-NVFP4", env=RTX)
    assert result.exit_code == 0
    assert "  vllm serve nvidia/Qwen3.6-27B-NVFP4 \\\n" in result.stdout
    assert "Installed here" in result.stdout and "R13" in result.stdout
    twin = valid(invoke("doctor", "--for", "vllm", "--json", env=RTX).stdout, "launch-1")
    assert twin["command"].startswith("vllm serve ") and twin["memory"]["ctx"] > 32_768
    refused = invoke("doctor", "--for", "sglang", env={"LOCALLLM_FAKE_HW": "rtx2070"})
    assert refused.exit_code == 6
    assert "8.0 or newer" in refused.stderr and "doctor --for llama.cpp" in refused.stderr
    evil = invoke("doctor", "--for", "vllm", "a/b; rm -rf ~", env=RTX)
    assert "vllm serve 'a/b; rm -rf ~' \\" in evil.stdout, "a name is quoted for the shell"


def test_the_report_is_markdown(invoke: Invoke, empty_home: Path) -> None:
    result = invoke("doctor", "--report", env=RTX)
    assert result.stdout.startswith("# localllm doctor\n")
    assert "| `gpu.pcie` | **warning** |" in result.stdout
    assert str(empty_home) not in result.stdout or str(empty_home).startswith("/tmp")


def test_a_model_instead_of_the_machine(invoke: Invoke, smollm2_path: Path, empty_home: Path) -> None:
    result = invoke("doctor", str(smollm2_path), env=CPU)
    assert result.exit_code == 0
    assert "model.fit" in result.stdout and "gpu.present" not in result.stdout and "Advice" not in result.stdout
    assert valid(invoke("doctor", str(smollm2_path), "--json", env=CPU).stdout, "doctor-1")["summary"]["fail"] == 0
    bad = empty_home / "bad.gguf"
    bad.write_bytes(b"GGUF")
    assert invoke("doctor", str(bad), env=CPU).exit_code == 11
    assert invoke("doctor", "no-such-model", env=CPU).exit_code == 3


def test_apply_shows_asks_and_runs(invoke: Invoke, empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(repair, "run", lambda action: ran.append(action.command) or 0)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    wsl = {"LOCALLLM_FAKE_HW": "wsl2"}
    shown = invoke("doctor", "--apply", "-n", env=wsl)
    assert shown.exit_code == 0 and not ran
    assert "pip install ziglang" in shown.stdout and "Commands for your own shell" in shown.stdout
    assert invoke("doctor", "--apply", env=wsl).exit_code == 2, "nobody to ask"
    assert not ran
    agreed = invoke("doctor", "--apply", "-y", env=wsl)
    assert agreed.exit_code == 0
    assert ran == ["pip install ziglang"]
    assert "needs root" in agreed.stderr
    twin = valid(invoke("doctor", "--apply", "-n", "--json", env=wsl).stdout, "repair-1")
    assert twin["dry_run"] is True and twin["done"] == []
    assert {one["kind"] for one in twin["actions"]} == {"command", "root", "shell"}
    assert "Nothing to repair" in invoke("doctor", "--apply", "-n", "--only", "ram", env=wsl).stdout


def test_deep_says_what_it_measures(invoke: Invoke, empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.doctor import probes
    from localllm.interface import Check

    def scripted(survey: Any, tell: Any, only: Any) -> Any:
        asked.append(list(only))
        tell("the moon")
        yield Check("bw.ram", "hardware", "ok", "40 GB/s")

    asked: list[list[str]] = []
    monkeypatch.setattr(probes, "deep_checks", scripted)
    result = invoke("doctor", "--deep", "--only", "ram", env=CPU)
    assert "measuring 1/" in result.stderr and "the moon" in result.stderr
    assert "bw.ram" in result.stdout and "40 GB/s" in result.stdout
    document = json.loads(invoke("doctor", "--deep", "--only", "ram", "--json", env=CPU).stdout)
    assert [check["id"] for check in document["checks"]] == ["ram", "bw.ram"]
    document = json.loads(invoke("doctor", "--deep", "--only", "bw.ram", "--json", env=CPU).stdout)
    assert [check["id"] for check in document["checks"]] == ["bw.ram"]
    assert asked == [[], [], ["bw.ram"]]
    refused = invoke("doctor", "--only", "bw.ram", env=CPU)
    assert refused.exit_code == 2 and "localllm doctor --deep --only bw.ram" in refused.stderr


@pytest.mark.slow
def test_ctrl_c_ends_the_child_that_measures(empty_home: Path) -> None:
    import psutil

    env = dict(os.environ) | {"LOCALLLM_HOME": str(empty_home), "LOCALLLM_FAKE_HW": "rtx4090"}
    command = [*LOCALLLM, "doctor", "--deep", "--only", "ram"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True)
    assert child.stderr
    for line in child.stderr:
        if "matrix multiplication" in line:
            break
    measuring: list[psutil.Process] = []
    while not measuring and child.poll() is None:
        measuring = psutil.Process(child.pid).children()
    child.send_signal(signal.SIGINT)
    out, errors = child.communicate(timeout=30)
    assert child.returncode == 130, errors
    assert "Traceback" not in errors and "stopped" in errors
    assert "bw.ram" in out, "what was measured stays"
    assert measuring
    gone, alive = psutil.wait_procs(measuring, timeout=10)
    assert not alive


def test_troubles_of_other_engines_are_not_named(invoke: Invoke, empty_home: Path) -> None:
    """FlashInfer is no matter of llama.cpp; what a model takes is said for every engine."""
    env = {"LOCALLLM_FAKE_HW": "rtx5090"}
    assert "R13 FlashInfer" in invoke("doctor", "--for", "vllm", env=env).stdout
    shown = invoke("doctor", "--for", "llama.cpp", env=env).stdout
    assert "FlashInfer" not in shown and "GiB available" in shown
    refused = invoke("doctor", "--for", "vllm", "Qwen/Qwen3-32B", env={"LOCALLLM_FAKE_HW": "rtx3060"})
    assert refused.exit_code == 5 and "vllm serve" not in refused.stdout
    assert "Qwen/Qwen3-32B needs 63.5 GiB" in refused.stderr


def test_the_settings_file_that_was_named_is_checked(invoke: Invoke, empty_home: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    for text, code, words in (
        ("x = [", 11, "mine.toml is not valid TOML"), ("nosuch = 1", 0, "unknown key nosuch"),
        ("offline = true", 0, "1 setting"),
    ):  # fmt: skip
        file.write_text(text)
        result = invoke("--config", str(file), "doctor", "--only", "config")
        assert result.exit_code == code and words in " ".join(result.stdout.split())


def test_settings_that_cannot_be_read_keep_nothing_back(invoke: Invoke, empty_home: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("x = [")
    result = invoke("--json", "--config", str(file), "doctor", env=CPU)
    found = valid(result.stdout, "doctor-1")
    [settings] = [check for check in found["checks"] if check["id"] == "config.valid"]
    assert result.exit_code == 11 and settings["status"] == "fail" and found["advice"]


def test_offline_is_kept(invoke: Invoke, empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def recorded(folder: Path, address: str, port: int, *, capability: int = 0) -> HostFacts:
        asked.append(address)
        return read(folder, "", port, capability=capability)

    monkeypatch.setattr("localllm.device.host.host", recorded)
    for words in (("--offline",), ()):
        assert invoke(*words, "doctor", "--only", "net").exit_code == 0
    assert asked[0] == "" and asked[1]


def test_in_a_narrow_terminal_fixes_stand_below_their_finding(invoke: Invoke, empty_home: Path) -> None:
    lines = invoke("doctor", "--only", "models", env=RTX | {"COLUMNS": "40"}).stdout.splitlines()
    assert "    fix: localllm pull smollm2" in lines

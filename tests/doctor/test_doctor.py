"""Doctor's quick checks: every status reached with made-up machines, the JSON document, and what it may not do."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path

import jsonschema
import pytest

from localllm.device import GpuProcess, MachineFacts
from localllm.device.fake import GIB, MACHINES
from localllm.doctor import CHECKS, report, run_checks, summary, verdict
from localllm.errors import ConfigError

CPU, RTX = MACHINES["cpu"], MACHINES["rtx4090"]


def one(check_id: str, facts: MachineFacts = CPU):
    (check,) = run_checks([check_id], facts)
    return check


@pytest.mark.parametrize("name", ["cpu", "cpu-small", "rtx4090", "rtx2070", "h100"])
def test_c12_document_and_fixes(name: str) -> None:
    schema = json.loads(resources.files("localllm.schemas").joinpath("doctor-1.json").read_text())
    checks = run_checks(facts=MACHINES[name])
    document = json.loads(json.dumps(report(checks, MACHINES[name])))
    jsonschema.validate(document, schema)
    assert [c.id for c in checks] == list(CHECKS)
    for check in checks:
        assert check.fix or check.status in ("ok", "skip"), check
        assert "\n" not in check.title + check.fix
    assert sum(summary(checks).values()) == len(checks)
    assert str(len(checks)) in verdict(checks)


def test_c12_quick_without_torch_or_network() -> None:
    code = (
        "import sys, socket\n"
        "def refuse(*a, **k): raise AssertionError('network')\n"
        "socket.socket.connect = refuse\n"
        "from localllm.doctor import run_checks\n"
        "print(sum(c.status == 'fail' for c in run_checks()))\n"
        "print(*sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'triton', 'huggingface_hub', 'textual'}))"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=20)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["0"]


def test_names_are_checked() -> None:
    assert {c.id for c in run_checks(["gpu", "ram"], CPU)} == {
        "gpu.present",
        "gpu.driver",
        "gpu.arch",
        "gpu.mem",
        "ram",
    }
    with pytest.raises(ConfigError, match="nonsense"):
        run_checks(["nonsense"], CPU)


def test_a_check_that_breaks_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(machine: MachineFacts) -> None:
        raise ZeroDivisionError

    monkeypatch.setitem(CHECKS, "ram", broken)
    check = one("ram")
    assert (check.status, check.id) == ("fail", "ram")
    assert "ZeroDivisionError" in check.title
    assert check.fix


GPU = RTX.gpus[0]


@pytest.mark.parametrize(
    ("check_id", "facts", "status", "words"),
    [
        ("gpu.present", CPU, "skip", "the CPU computes"),
        ("gpu.present", RTX, "ok", "RTX 4090, sm_89"),
        ("gpu.present", replace(CPU, gpu_error="mismatch (code 18)"), "fail", "code 18"),
        ("gpu.present", replace(CPU, driver="580.1"), "warn", "CUDA_VISIBLE_DEVICES"),
        ("gpu.driver", RTX, "ok", "580.95.05"),
        ("gpu.driver", replace(RTX, driver="515.1"), "fail", "520 or newer"),
        ("gpu.driver", replace(RTX, driver_cuda="12.4"), "fail", "CUDA 13.0"),
        ("gpu.arch", replace(RTX, gpus=(replace(GPU, capability=61),)), "fail", "6.1"),
        ("gpu.arch", MACHINES["rtx5090"], "ok", "fp4"),
        ("gpu.mem", RTX, "ok", "free"),
        (
            "gpu.mem",
            replace(RTX, gpus=(replace(GPU, free_bytes=2 * GIB, processes=(GpuProcess(1, 20 * GIB, "game"),)),)),
            "warn",
            "of 24.0 GiB are taken",
        ),
        ("torch.cuda", replace(RTX, torch_cuda=""), "warn", "CPU build"),
        ("torch.version", replace(CPU, torch_version="2.4.0"), "fail", "2.11 is needed"),
        ("torch.version", replace(CPU, torch_version=""), "fail", "not installed"),
        ("cpu.isa", replace(CPU, cpu=replace(CPU.cpu, isa="generic")), "warn", "AVX2"),
        ("cpu.cores", replace(CPU, cpu=replace(CPU.cpu, quota=0.5)), "warn", "0.5"),
        ("ram", replace(CPU, ram_available_bytes=GIB), "warn", "1.0 GiB"),
        ("swap", replace(CPU, swap_total_bytes=8 * GIB, ram_available_bytes=GIB), "warn", "would swap"),
        ("compiler", replace(CPU, compiler=""), "warn", "no C compiler"),
        ("wsl", replace(CPU, wsl=1), "fail", "WSL 1"),
        ("wsl", replace(CPU, wsl=2), "ok", "WSL 2"),
        ("container", replace(CPU, container="docker"), "ok", "docker"),
        ("cgroup.mem", replace(CPU, ram_limit="cgroup", ram_total_bytes=GIB), "warn", "cgroup"),
        ("cgroup.mem", replace(CPU, ram_limit="ulimit", ram_total_bytes=GIB), "warn", "ulimit"),
    ],
)
def test_verdicts(check_id: str, facts: MachineFacts, status: str, words: str) -> None:
    check = one(check_id, facts)
    assert check.status == status, check
    assert words in check.title


def test_storage(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN_PATH", str(empty_home / "token"))
    assert one("models").fix == "localllm pull smollm2"
    assert one("hf.token").status == "warn"
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    check = one("hf.token")
    assert check.status == "ok"
    assert "canary" not in str(check)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("U", (), {"free": 100 << 20})())
    assert one("disk.free").status == "fail"
    monkeypatch.setattr("os.access", lambda *_: False)
    assert one("hf.cache").status == "warn"
    assert one("folders").status == "fail"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert one("hf.endpoint").status == "warn"


def test_settings(empty_home: Path) -> None:
    file = empty_home / "config/config.toml"
    file.parent.mkdir()
    file.write_text("[engine]\nctxx = 1\n")
    assert one("config.valid").status == "ok"
    assert "did you mean engine.ctx" in one("config.unknown_keys").title
    file.write_text("[engine")
    assert one("config.valid").status == "fail"
    assert one("config.unknown_keys").status == "skip"


def test_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    assert one("term").status == "warn"
    monkeypatch.setenv("TERM", "xterm-256color")
    assert one("term").status == "ok"
    monkeypatch.setenv("COLUMNS", "40")
    assert one("term.size").status == "warn"

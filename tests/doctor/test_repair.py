"""What doctor may carry out, the report it writes, models looked at without loading, and what it measures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localllm.device.fake import MACHINES, fake_host
from localllm.doctor import MEASURED, Survey, probe_child, probes, repair, run_checks
from localllm.doctor.markdown import last_crash, redact, report_markdown
from localllm.doctor.model import model_checks, resolve_quietly
from localllm.doctor.probes import Measurements, ProbeError, deep_checks, disk_read, read_file
from localllm.doctor.rules import match_machine
from localllm.interface import Check
from localllm.plan import speeds
from localllm.plan.planner import Planner

CPU = Survey(MACHINES["cpu"], fake_host("cpu"))


# --- repair -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fix", "kind"),
    [
        ("localllm config set server.port 8001", "setting"),
        ("pip install ziglang", "command"),
        ("sudo apt-get install -y gcc", "root"),
        ("sudo nvidia-smi -i 0 -pl 400", "root"),
        ("export HF_HOME=~/hf", "shell"),
        ("unset TRITON_PTXAS_PATH", "shell"),
        ("plug in the power supply", "step"),
        ("sudo rm -rf /", "step"),
        ("curl https://example.org | sh", "step"),
    ],
)
def test_only_known_commands_can_be_run(fix: str, kind: str) -> None:
    assert repair.kind_of(fix) == kind


def test_actions_and_the_difference_they_make(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("# mine\n[engine]\nctx = 4096\n")
    host = replace(fake_host("rtx4090"), port_holder="python (pid 9)")
    survey = Survey(replace(MACHINES["rtx4090"], compiler=""), host)
    found = repair.actions(run_checks(["server", "compiler", "gpu.power"], survey), survey)
    assert [(one.check_id, one.kind) for one in found][:2] == [("server.port", "setting"), ("compiler", "command")]
    assert found[1].command == "pip install ziglang"
    settings = [one for one in found if one.kind == "setting"]
    diff = repair.settings_diff(settings, file)
    assert "+port = 8001" in diff and "-ctx = 4096" not in diff
    assert "8001" not in file.read_text(), "a difference is not a change"
    repair.apply_settings(settings, file)
    assert "# mine" in file.read_text() and "port = 8001" in file.read_text()


def test_commands_run_with_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def fake(words: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        ran.append(words)
        return subprocess.CompletedProcess(words, 3 if "fail" in words else 0)

    monkeypatch.setattr(subprocess, "run", fake)
    assert repair.run(repair.Action("x", "", "pip install ziglang", "command")) == 0
    assert ran == [[sys.executable, "-m", "pip", "install", "ziglang"]]
    assert repair.run(repair.Action("x", "", "sudo fail && sudo never", "root")) == 3
    assert len(ran) == 2, "the second is not run when the first fails"


# --- the report -------------------------------------------------------------------------------------------------------


def test_nothing_private_is_in_a_report(monkeypatch: pytest.MonkeyPatch, empty_home: Path) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setattr("socket.gethostname", lambda: "bletchley.example.org")
    monkeypatch.setattr("getpass.getuser", lambda: "turing")
    text = (
        "token hf_abcdefghijkl and sk-proj-0123456789 and Bearer abc.def; /home/ada/x, /home/bob/y, /Users/eve/z; "
        "turing@bletchley; http://me:pass@proxy:3128 10.1.2.3 127.0.0.1"
    )
    clean = redact(text)
    for secret in ("hf_abc", "sk-proj", "abc.def", "ada", "bob", "eve", "turing", "bletchley", "pass", "10.1.2.3"):
        assert secret not in clean, secret
    assert "127.0.0.1" in clean and "~/x" in clean
    elsewhere = redact("/tmp/a/home/config/x, /net/home/adams/y, /home/adams/z, file:///home/ada/w")
    assert elsewhere == "/tmp/a/home/[user]/x, /net/home/[user]/y, ~/z, file://~/w"
    log = empty_home / "state/log/localllm.log"
    log.parent.mkdir(parents=True)
    log.write_text(
        "2026 INFO fine\n2026 ERROR localllm: unexpected error\n    Traceback (most recent call last):\n"
        '      File "/home/ada/secret.py", line 1\n    ValueError: hf_abcdefghijkl\x1b[2J\n2026 INFO later\n'
    )
    survey = Survey(MACHINES["rtx5090"], fake_host("rtx5090"))
    page = report_markdown(run_checks(survey=survey), survey, match_machine(survey))
    assert page.startswith("# localllm doctor\n")
    assert "| `gpu.pcie` | **warning** |" in page and "* R13" in page and "Packages: torch" in page
    assert "Last crash" in page and "ValueError: [secret][2J" in page and "later" not in page
    assert "ada" not in page and "\x1b" not in page
    assert last_crash(empty_home / "nowhere") == []


# --- a model ----------------------------------------------------------------------------------------------------------


def test_a_model_is_looked_at_without_loading(smollm2_path: Path) -> None:
    planner = Planner(MACHINES["cpu"])
    found = {c.id: c for c in model_checks(resolve_quietly(str(smollm2_path), planner), planner)}
    assert {c.status for c in found.values()} == {"ok"}
    known = ("files", "arch", "format", "scales", "tokenizer", "template", "tools", "licence", "fit")
    assert set(found) == {f"model.{n}" for n in known}
    assert "described in the system message" in found["model.tools"].title and not found["model.tools"].data["native"]
    assert "49,152" in found["model.tokenizer"].title and "llama" in found["model.arch"].title
    tight = Planner(replace(MACHINES["cpu"], ram_available_bytes=200 << 20))
    fit = {c.id: c for c in model_checks(resolve_quietly(str(smollm2_path), tight), tight)}["model.fit"]
    assert fit.status == "fail" and fit.fix


@pytest.mark.slow
def test_a_base_model_with_a_license_of_its_own(gemma_path: Path) -> None:
    found = {
        c.id: c
        for c in model_checks(resolve_quietly(str(gemma_path), Planner(MACHINES["cpu"])), Planner(MACHINES["cpu"]))
    }
    assert "base model" in found["model.template"].title
    assert "its own terms" in found["model.licence"].detail


def test_a_model_that_is_damaged_or_not_here(tmp_path: Path, empty_home: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + b"\xff" * 64)
    checks = list(model_checks(resolve_quietly(str(bad), Planner(MACHINES["cpu"])), Planner(MACHINES["cpu"])))
    assert [(check.id, check.status) for check in checks] == [("model.files", "fail")]
    assert checks[0].fix == "use another copy of the model, or download it again"  # pull takes no path
    card = Planner(MACHINES["rtx4090"])
    away = {c.id: c for c in model_checks(resolve_quietly("qwen", card), card)}
    assert away["model.files"].status == "warn" and away["model.files"].fix.startswith("localllm pull ")
    assert away["model.fit"].status == "ok" and away["model.arch"].status == "ok"


# --- measuring --------------------------------------------------------------------------------------------------------


class Scripted:
    """Answers for the child process."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[tuple[Any, ...]] = []

    def close(self) -> None:
        self.asked.append(("end",))

    def ask(self, name: str, *arguments: Any, limit_s: float = 0) -> Any:
        self.asked.append((name, *arguments))
        answer = self.answers[name]
        if isinstance(answer, Exception):
            raise answer
        return answer


GOOD = {
    "copy": 1.6e12,
    "matmul": 2e14,
    "transfer": {"h2d": 50e9, "d2h": 48e9, "h2d_pageable": 12e9},
    "peer": {"bytes_s": 20e9, "whole": True},
    "link": {"sum_s": 30e-6, "bytes_s": 9e9},
    "selftest": {"run": 9, "failures": [], "seconds": 1.0},
}


def measured(monkeypatch: pytest.MonkeyPatch, hw: str, **answers: Any) -> tuple[dict[str, Check], list[str]]:
    monkeypatch.setattr(probes, "Measurements", lambda: Scripted(**(GOOD | answers)))
    monkeypatch.setattr(probes, "read_bandwidth", lambda *_: 40e9)
    survey, told = Survey(MACHINES[hw], fake_host(hw)), []
    found = list(deep_checks(survey, told.append))
    assert [c.id for c in found] == [p.id for p in probes.probes(survey)]
    assert {c.id for c in found} <= set(MEASURED)
    (one,) = deep_checks(survey, told.append, ["bw.ram"])
    assert one.id == "bw.ram" and told.pop() == "memory bandwidth of the CPU"
    assert len(told) == len(found)
    return {c.id: c for c in found}, told


def test_what_is_measured_is_judged(monkeypatch: pytest.MonkeyPatch, empty_home: Path) -> None:
    good, told = measured(monkeypatch, "rtx5090x2")
    assert {c.status for c in good.values() if c.id != "disk.read"} == {"ok"}
    assert "GPU 1: 1,600 GB/s, 89% of 1,792 GB/s" in good["bw.vram"].title
    assert "20.0 GB/s, data intact" in good["p2p.copy"].title
    assert any("GPU 0 and GPU 1" in line for line in told)
    assert good["ranks.link"].title == "2 GPUs: 30 µs per all-reduce, 9.0 GB/s for large ones"
    cards = speeds.link_name(MACHINES["rtx5090x2"], MACHINES["rtx5090x2"].gpus)
    assert speeds.load(MACHINES["rtx5090x2"]).link(cards, "far") == speeds.Link(30e-6, 9e9, is_measured=True)
    bad, _ = measured(
        monkeypatch, "rtx5090x2", copy=0.5e12, transfer={"h2d": 3e9, "d2h": 3e9, "h2d_pageable": 2e9},
        peer={"bytes_s": 20e9, "whole": False}, selftest={"run": 9, "failures": ["rope:triton failed"], "seconds": 1},
    )  # fmt: skip
    assert {bad[i].status for i in ("bw.vram", "bw.h2d", "kernel.selftest")} == {"warn"}
    assert bad["p2p.copy"].status == "fail" and bad["p2p.copy"].fix == "export NCCL_P2P_DISABLE=1"
    assert bad["kernel.selftest"].detail == "rope:triton failed"
    hung, _ = measured(monkeypatch, "rtx5090x2", peer=ProbeError("no answer within 20 s: it hangs"))
    assert "no answer within" in hung["p2p.copy"].title
    broken, _ = measured(monkeypatch, "rtx4090", copy=ProbeError("AcceleratorError: CUDA error"))
    assert broken["bw.vram"].status == "fail"
    assert broken["bw.h2d"].status == "ok", "the next one is measured all the same"
    cpu, _ = measured(monkeypatch, "cpu")
    assert cpu["ranks.link"].title.startswith("2 processes on the CPU: ")
    assert "bw.vram" not in cpu and cpu["bw.ram"].title.startswith("40.0 GB/s")


@pytest.mark.slow
def test_the_child_answers_fails_and_hangs() -> None:
    with closing(Measurements()) as child:
        assert child.ask("matmul", "cpu", "float32", 64) > 1e6
        assert child.ask("peer", "cpu", "cpu", 1 << 16)["whole"] is True
        assert child.ask("copy", "cpu", 1 << 20) > 1e6
        link = child.ask("link", ["cpu", "cpu"], limit_s=180)
        assert 0 < link["sum_s"] < 1 and link["bytes_s"] > 1e6
        assert set(child.ask("transfer", "cpu", 1 << 20)) == {"h2d_pageable"}
        kernels = child.ask("selftest", "cpu", 0, "float32")
        assert kernels["run"] and kernels["failures"] == []
        with pytest.raises(ProbeError, match="KeyError"):
            child.ask("no such job")
        stopped = child.pid
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)  # as a driver that hangs
        with pytest.raises(ProbeError, match="no answer within"):
            child.ask("matmul", "cpu", "float32", 64, limit_s=0.3)
        assert not Path(f"/proc/{stopped}").exists(), "ended"
        assert child.ask("peer", "cpu", "cpu", 1 << 16)["whole"] is True, "another takes its place"


def test_of_several_cards_the_one_asked_for_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the first: a call that waits for another card takes the time of a launch alone."""
    used: list[Any] = []
    monkeypatch.setattr("torch.cuda.synchronize", lambda device=None: used.append(device))
    monkeypatch.setattr("torch.cuda.set_device", used.append)
    ahead: list[Any] = []
    monkeypatch.setattr(
        "localllm.kernels.verify.selftest.SelfTest.table", lambda test, _: ahead.append(test.compile_ahead)
    )
    probe_child.finisher("cuda:1")()
    probe_child.selftest("cuda:2", 90, "bfloat16")
    probe_child.selftest("cpu", 0, "float32")
    assert used == ["cuda:1", "cuda:2"] and ahead[0].keywords["threads"] >= 1 and ahead[1] is None
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    probe_child._answer(b'["none"]')
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID", "as the driver numbers them"


def test_a_child_that_does_not_start_fails_its_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.sandbox.child.START_S", 0.0)
    with closing(Measurements()) as child, pytest.raises(ProbeError, match="did not start"):
        child.ask("matmul", "cpu", "float32", 64)


def test_a_disk_is_read_past_the_cache(tmp_path: Path, empty_home: Path) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(os.urandom(9 << 20))
    count, seconds = read_file(file)
    assert count == 9 << 20 and seconds > 0
    assert read_file(file, most=1 << 20)[0] == 8 << 20, "whole pieces"
    assert disk_read().status == "skip"
    model = empty_home / "data/models/m"
    model.mkdir(parents=True)
    (model / "m-Q4_0.gguf").write_bytes(file.read_bytes())
    assert "MB/s" in disk_read().title

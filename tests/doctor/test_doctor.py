"""Doctor's quick checks: every status reached with made-up machines, the JSON document, and what it may not do."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from localllm.device import GpuLink, GpuProcess, MachineFacts
from localllm.device.disk import DiskFacts
from localllm.device.fake import GIB, MACHINES, fake_host
from localllm.device.host import HostFacts
from localllm.doctor import CHECKS, GROUP_OF, Survey, document, run_checks, summary, verdict, wanted
from localllm.doctor.kernel_table import wanted_capability
from localllm.errors import ConfigError
from localllm.interface import Check
from localllm.plan.placement import unusable

CPU, RTX = MACHINES["cpu"], MACHINES["rtx4090"]


HOST = fake_host("rtx4090")


def one(check_id: str, facts: MachineFacts = CPU, host: HostFacts = HOST) -> Check:
    (check,) = run_checks([check_id], Survey(facts, host))
    return check


@pytest.mark.parametrize("name", ["cpu", "cpu-small", "rtx4090", "rtx2070", "h100"])
def test_the_document_and_its_fixes(name: str) -> None:
    schema = json.loads(resources.files("localllm.schemas").joinpath("doctor-1.json").read_text())
    survey = Survey(MACHINES[name], fake_host(name))
    checks = run_checks(survey=survey)
    made = json.loads(json.dumps(document(checks, survey)))
    jsonschema.validate(made, schema)
    assert [c.id for c in checks] == list(CHECKS)
    for check in checks:
        assert check.fix or check.status in ("ok", "skip"), check
        assert "\n" not in check.title + check.fix
    assert sum(summary(checks).values()) == len(checks)
    assert str(len(checks)) in verdict(checks)


def test_quick_checks_need_no_torch_and_no_network() -> None:
    code = (
        "import sys, socket\n"
        "def refuse(*a, **k): raise AssertionError('network')\n"
        "socket.socket.connect = refuse\n"
        "from localllm.doctor import run_checks\n"
        "print(sum(c.status == 'fail' for c in run_checks()))\n"
        "print(*sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'triton', 'huggingface_hub', 'textual'}))"
    )
    env = dict(os.environ) | {"HF_HUB_OFFLINE": "1"}
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=20, env=env)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["0"]


def test_names_are_checked() -> None:
    ids = {c.id for c in run_checks(["gpu", "ram"], Survey(CPU, HOST))}
    assert {"gpu.present", "gpu.pcie", "gpu.p2p", "ram"} <= ids
    assert all(i == "ram" or i.startswith("gpu.") for i in ids)
    with pytest.raises(ConfigError, match="nonsense"):
        wanted(["nonsense"])
    with pytest.raises(ConfigError, match=r"did you mean gpu\.power"):
        wanted(["gpu.powr"])


def test_a_check_that_breaks_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(survey: Survey) -> None:
        raise ZeroDivisionError

    monkeypatch.setitem(CHECKS, "ram", broken)
    check = one("ram")
    assert (check.status, check.id, check.group) == ("fail", "ram", "hardware")
    assert "ZeroDivisionError" in check.title
    assert check.fix


GPU, LOST = RTX.gpus[0], "GPU 2 has fallen off the bus"


@pytest.mark.parametrize(
    ("check_id", "facts", "status", "words"),
    [
        ("gpu.present", CPU, "skip", "running on the CPU"),
        ("gpu.present", RTX, "ok", "RTX 4090, sm_89"),
        ("gpu.present", replace(CPU, gpu_error="mismatch (code 18)"), "fail", "code 18"),
        ("gpu.present", replace(CPU, driver="580.1", gpu_error=LOST), "fail", LOST),
        ("gpu.present", replace(RTX, gpu_error=LOST), "warn", f"1,008 GB/s; {LOST}"),
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
            "of 24.0 GiB in use",
        ),
        ("gpu.power", RTX, "ok", "limit 300 W of 450 W"),
        ("gpu.power", replace(RTX, gpus=(replace(GPU, power_limit_w=200.0),)), "warn", "below 260 W"),
        ("gpu.power", MACHINES["rtx5090"], "ok", "the maximum"),
        ("gpu.power", MACHINES["laptop"], "warn", "95 W of 150 W"),
        ("gpu.power", MACHINES["gb10"], "skip", "does not report"),
        ("gpu.clocks", MACHINES["laptop"], "warn", "throttled by heat at 87"),
        ("gpu.clocks", replace(RTX, gpus=(replace(GPU, temperature_c=90),)), "warn", "90 °C"),
        ("gpu.clocks", replace(RTX, gpus=(replace(GPU, throttle=("power limit",)),)), "ok", "not throttled"),
        ("gpu.pcie", RTX, "ok", "PCIe 4.0 ×16"),
        ("gpu.pcie", MACHINES["rtx5090"], "warn", "×4 of ×16"),
        ("gpu.pcie", MACHINES["rtx5090x2"], "ok", "×8 of ×16"),
        ("gpu.p2p", RTX, "skip", "one GPU"),
        ("gpu.p2p", MACHINES["rtx5090x2"], "ok", "none over PHB"),
        ("gpu.p2p", replace(MACHINES["rtx5090x2"], gpu_links=(GpuLink(0, 1, "PIX", "ok"),)), "ok", "allowed over PIX"),
        ("gpu.ecc", MACHINES["h100"], "ok", "on"),
        ("gpu.mig", replace(RTX, gpus=(replace(GPU, mig=True),)), "ok", "one MIG instance"),
        ("gpu.display", MACHINES["rtx3060"], "ok", "a display is attached to"),
        ("gpu.display", RTX, "ok", "no display"),
        ("gpu.mem", MACHINES["gb10"], "ok", "shared with the CPU"),
        ("torch.cuda", RTX, "ok", "CUDA 13.0, sm_89"),
        ("torch.cuda", MACHINES["rtx5070ti"], "fail", "no code for sm_120"),
        ("torch.cuda", replace(MACHINES["gb10"], torch_cuda="12.8"), "ok", "sm_121"),
        ("triton.ptxas", CPU, "skip", "no GPU"),
        ("compiler", replace(RTX, compiler=""), "fail", "neither GPU nor CPU kernels"),
        ("torch.cuda", replace(RTX, torch_cuda=""), "warn", "CPU build"),
        ("torch.version", replace(CPU, torch_version="2.4.0"), "fail", "2.11 or newer is required"),
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


def test_what_a_control_group_allows_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = replace(CPU.cpu, cores=(), cores_usable=2, quota=2.5)
    for threads, status in (("auto", "ok"), (3, "warn")):
        monkeypatch.setattr("localllm.doctor.hardware._threads_wanted", lambda survey, threads=threads: threads)
        check = one("cpu.cores", replace(CPU, cpu=cpu))
        assert check.status == status and f"{check.title} {check.detail}".count("the control group allows 2.5") == 1


def test_storage(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN_PATH", str(empty_home / "token"))
    assert one("models").fix == "localllm pull smollm2"
    assert one("hf.token").status == "warn"
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    check = one("hf.token")
    assert check.status == "ok"
    assert "canary" not in str(check)
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
    file.write_text("[engine]\nctx = 'banana'\nkv = 3\nctxx = 1\n[server]\nport = 70000\n")
    assert one("config.valid").status == "warn" and "not 'banana'" in one("config.valid").title
    assert "not 3" in one("config.valid").detail and "not 70000" in one("config.valid").detail
    assert "engine.ctxx" in one("config.unknown_keys").title and not one("config.unknown_keys").detail
    assert verdict([one("config.valid")]).startswith("1 check: 0 ok, 1 warning")
    file.write_text("[engine")
    assert one("config.valid").status == "fail"
    assert "the defaults are in effect" in one("config.valid").detail
    assert one("config.unknown_keys").status == "skip"


def test_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    assert one("term").status == "warn"
    monkeypatch.setenv("TERM", "xterm-256color")
    assert one("term").status == "ok"
    monkeypatch.setenv("COLUMNS", "40")
    assert one("term.size").status == "warn"


def cards(*names: str, **machine: object) -> Survey:
    found = tuple(MACHINES[name].gpus[0] for name in names)
    return Survey(replace(MACHINES["rtx4090"], gpus=found, **machine), fake_host("rtx4090"))  # type: ignore[arg-type]


def test_two_cards_are_judged_one_by_one() -> None:
    """What is wrong with one says nothing of the other, which is the one that runs."""
    both = cards("rtx4090", "rtx5090")
    old = replace(both.machine.gpus[1], name="GTX 1060", capability=61)
    survey = Survey(replace(both.machine, gpus=(old, both.machine.gpus[0])), both.host)
    check = one("gpu.arch", survey.machine)
    assert (check.status, "sm_89" in check.title) == ("warn", True)
    assert "GTX 1060 has compute capability 6.1, but at least 7.5 is required" in check.title
    assert wanted_capability(None, survey.machine) == 89
    alone = Survey(replace(both.machine, gpus=(old,)), both.host)
    assert one("gpu.arch", alone.machine).status == "fail"
    older = cards("rtx4090", "rtx5090", torch_cuda="12.6")
    check = one("torch.cuda", older.machine)
    assert check.status == "warn" and "sm_120" in check.title and check.detail == "sm_89 works"
    assert one("torch.cuda", cards("rtx5090", torch_cuda="12.6").machine).status == "fail"
    full = replace(both.machine.gpus[0], name="T4", total_bytes=16 << 30, free_bytes=1 << 30)
    large = replace(both.machine.gpus[1], total_bytes=96 << 30, free_bytes=95 << 30)
    check = one("gpu.mem", replace(both.machine, gpus=(full, large)))
    assert check.status == "warn" and "of T4 in use" in check.title


def test_code_for_sm_120_is_enough_for_sm_121() -> None:
    """Doctor and the plan say the same of it."""
    machine = replace(MACHINES["gb10"], torch_cuda="12.8", driver_cuda="13.0")
    assert one("torch.cuda", machine).status == "ok"
    assert unusable(machine, machine.gpus[0]) == ""


@pytest.mark.parametrize(
    ("check_id", "host", "status", "words"),
    [
        ("gpu.p2p", {"iommu": True}, "warn", "tensor parallelism may hang"),
        ("gpu.visible", {"variables": {"CUDA_VISIBLE_DEVICES": "0"}}, "ok", "leaves 2"),
        ("gpu.ecc", {"gpu_trouble": LOST}, "fail", LOST),
        ("cpu.governor", {"governor": "powersave", "governor_driver": "acpi-cpufreq"}, "warn", "the clock stays low"),
        ("cpu.governor", {"governor": "powersave", "governor_driver": "intel_pstate"}, "ok", "intel_pstate"),
        ("cpu.governor", {"governor": ""}, "skip", "does not report"),
        ("power.mains", {"on_battery": True}, "warn", "on battery"),
        ("numa", {"numa_nodes": 4}, "ok", "4 NUMA nodes"),
        ("triton.ptxas", {"ptxas": "12.4"}, "fail", "does not know sm_120"),
        ("triton.ptxas", {"ptxas": "12.8"}, "ok", "knows sm_120"),
        ("triton.ptxas", {"ptxas": ""}, "skip", "not known"),
        ("triton.version", {"packages": {}}, "fail", "not installed"),
        ("compiler", {"headers": ""}, "fail", "Python.h"),
        ("libs.conflict", {"conflicts": ("vllm requires torch==2.9, but 2.13 is installed",)}, "warn", "vllm requires"),
        ("libs.conflict", {"packages": {"nvidia-nccl-cu12": "2", "nvidia-nccl-cu13": "2"}}, "warn", "CUDA 12 and"),
        ("disk.free", {"disk": DiskFacts("/x", 100 << 20)}, "fail", "100 MiB free"),
        ("disk.free", {"disk": DiskFacts("/x", 5 << 30)}, "warn", "5.0 GiB free"),
        ("disk.speed", {"disk": DiskFacts("/x", kind="hdd", filesystem="ext4")}, "warn", "50 s to load"),
        ("disk.speed", {"disk": DiskFacts("/x", kind="network", filesystem="nfs4")}, "warn", "network"),
        ("disk.speed", {"disk": DiskFacts("/x", kind="memory", filesystem="tmpfs")}, "warn", "lost after a restart"),
        ("disk.speed", {"disk": DiskFacts("/x", kind="nvme", filesystem="xfs")}, "ok", "NVMe, xfs"),
        ("disk.cache_fs", {"disk": DiskFacts("/x", filesystem="vfat")}, "warn", "symbolic links"),
        ("net.hub", {"hub_ms": 38.0}, "ok", "38 ms"),
        ("net.hub", {"hub_ms": 0.0, "hub_error": "connection refused"}, "warn", "connection refused"),
        ("net.hub", {"hub_ms": 0.0}, "skip", "offline"),
        ("server.port", {"port_holder": ""}, "ok", "free"),
        ("server.port", {"port_holder": "python (pid 9)"}, "warn", "python (pid 9)"),
        ("server.port", {"port_holder": "localllm (pid 9)"}, "ok", "is serving"),
    ],
)
def test_verdicts_on_the_surroundings(check_id: str, host: dict, status: str, words: str) -> None:
    two = replace(MACHINES["rtx5090x2"], gpu_links=(GpuLink(0, 1, "PHB", "ok"),))
    check = one(check_id, two, replace(HOST, **host))
    assert check.status == status, check
    assert words in check.title


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (LOST, "sudo dmesg | grep Xid"),
        ("GPU 0 cannot be used: Unknown Error (code 999)", "sudo dmesg | grep Xid"),
        ("GPU 1 needs a reset: run it", "sudo nvidia-smi --gpu-reset -i 1"),
        ("GPU 0 cannot be used: Insufficient Permissions (code 4)", "ls -l /dev/nvidia*"),
        ("mismatch (code 18)", "sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm"),
    ],
)
def test_what_to_do_about_a_failed_gpu(error: str, fix: str) -> None:
    assert one("gpu.present", replace(RTX, gpu_error=error)).fix == fix


def test_the_driver_is_asked_about_memory_errors(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Damaged:
        nvmlInit_v2 = nvmlDeviceGetHandleByIndex_v2 = lambda *_: 0

        def nvmlDeviceGetTotalEccErrors(self, *given: Any) -> int:
            given[-1]._obj.value = 3
            return 0

    monkeypatch.setattr("localllm.device.trouble.load_library", Damaged)
    (check,) = run_checks(["gpu.ecc"], Survey(MACHINES["h100"], offline=True))
    assert (check.status, check.fix) == ("fail", "sudo nvidia-smi --gpu-reset -i 0")
    assert check.title == "the memory of GPU 0 has 3 uncorrectable errors (nvidia-smi -q -d ECC)"
    monkeypatch.setenv("LOCALLLM_FAKE_HW", "h100")
    assert [check.title for check in run_checks(["gpu.ecc"])] == ["on"], "an invented machine has no driver"


def test_a_server_of_ours_is_named(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.device.processes import Record

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(empty_home))
    record = Record("serve", "http://127.0.0.1:8000")
    record.update(("smollm2",))
    host = replace(HOST, port_holder=f"python (pid {os.getpid()})")
    assert one("server.port", host=host).title == "localllm is serving smollm2 at http://127.0.0.1:8000"
    record.remove()
    assert one("server.port", host=host).status == "warn"


def test_special_machines_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wsl, docker = MACHINES["wsl2"], MACHINES["h100"]
    assert "a Windows disk" in one("disk.speed", wsl, fake_host("wsl2")).title
    assert "lost with the container" in one("disk.speed", docker, fake_host("h100")).title
    assert "mirrored" in one("wsl", wsl, replace(fake_host("wsl2"), wsl_mirrored=True)).detail
    monkeypatch.setenv("HTTPS_PROXY", "http://ada:secret@proxy.example:3128")
    monkeypatch.setenv("HF_ENDPOINT", "https://huggingface.co")
    check = one("net.proxy")
    assert check.title == "http://proxy.example:3128"
    assert "secret" not in str(check) and "ada" not in str(check)
    assert "proxy.example" in one("net.hub").title
    monkeypatch.setenv("NO_PROXY", "localhost,.huggingface.co")
    assert one("net.proxy").status == "skip"


def test_the_database_of_chats(empty_home: Path) -> None:
    assert one("db.ok").status == "skip"
    place = empty_home / "data/chats.db"
    place.parent.mkdir()
    with sqlite3.connect(place) as made:
        made.execute("CREATE TABLE chats (id)")
    made.close()
    before = place.read_bytes()
    assert one("db.ok").status == "ok"
    place.write_bytes(b"no database at all" * 100)
    check = one("db.ok")
    assert (check.status, check.fix) == ("fail", f"mv {place} {place}.broken")
    assert place.read_bytes() != before and list(place.parent.iterdir()) == [place], "nothing was written"


@pytest.mark.parametrize(
    ("code", "said", "fix"),
    [
        (sqlite3.SQLITE_READONLY, "attempt to write a readonly database", "chmod u+rwX {place} {folder}"),
        (sqlite3.SQLITE_CANTOPEN, "unable to open database file", "chmod u+rwX {place} {folder}"),
        (sqlite3.SQLITE_BUSY, "database is locked", "close the program that uses it"),
    ],
)
def test_sound_chats_are_not_to_be_moved_away(
    empty_home: Path, monkeypatch: pytest.MonkeyPatch, code: int, said: str, fix: str
) -> None:
    place = empty_home / "data/chats.db"
    place.parent.mkdir()
    place.touch()
    error = sqlite3.OperationalError(said)
    error.sqlite_errorcode = code

    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(sqlite3, "connect", fails)
    check = one("db.ok")
    assert (check.status, check.fix) == ("fail", fix.format(place=place, folder=place.parent))


def test_a_full_disk_of_our_folders(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The models may be elsewhere: `disk.free` is about those."""
    (empty_home / "data").mkdir()
    (empty_home / "data/chats.db").write_bytes(b"")
    assert one("folders").status == one("db.ok").status == "ok"
    usage = shutil.disk_usage(empty_home)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=70_000))
    for name in ("folders", "db.ok"):
        check = one(name)
        assert (check.status, check.fix) == ("fail", "localllm rm --partial")
        assert "cannot grow: its disk has 68.4 KiB free" in check.title


def test_every_check_of_the_specification_is_there() -> None:
    named = (
        "gpu.present gpu.driver gpu.arch gpu.mem gpu.power gpu.clocks gpu.pcie gpu.ecc gpu.mig gpu.display cpu.isa "
        "cpu.governor ram swap numa disk.free disk.speed disk.cache_fs py.version torch.cuda libs.conflict hf.cache "
        "hf.token hf.endpoint net.hub net.proxy term term.size term.utf8 term.color term.keys term.clipboard "
        "config.valid config.unknown_keys db.ok wsl container cgroup.mem"
    )
    assert set(named.split()) <= set(CHECKS)
    assert set(GROUP_OF) == set(CHECKS)
    for check in run_checks(survey=Survey(CPU, HOST)):
        assert check.group == GROUP_OF[check.id]


def test_a_stream_without_an_encoding_is_no_broken_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The full screen puts one in the place of stdout."""

    class Capture:
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("localllm.doctor.terminal.locale_encoding", lambda: "utf-8")
    monkeypatch.setattr("sys.stdout", Capture())
    (found,) = run_checks(["term.utf8"])
    assert found.status == "ok"

"""What surrounds the process, from made-up trees and from this machine."""

from __future__ import annotations

import os
import re
import socket
import stat
import threading
from pathlib import Path

import pytest

from localllm.device.assembler import assembler
from localllm.device.disk import disk_facts
from localllm.device.fake import MACHINES
from localllm.device.host import connect, host, version_key
from localllm.device.imagined import imagined
from localllm.errors import ConfigError, DeviceError
from localllm.paths import existing

GIB = 1 << 30


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_a_made_up_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n")
    put(tmp_path, "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver", "intel_pstate\n")
    for node in (0, 1):
        (tmp_path / f"sys/devices/system/node/node{node}").mkdir(parents=True)
    (tmp_path / "sys/class/iommu/dmar0").mkdir(parents=True)
    put(tmp_path, "sys/class/power_supply/AC/type", "Mains\n")
    put(tmp_path, "sys/class/power_supply/AC/online", "0\n")
    put(tmp_path, "sys/class/power_supply/BAT0/type", "Battery\n")
    put(tmp_path, "proc/cmdline", "quiet iommu=pt pcie_aspm=off root=/dev/sda1\n")
    put(tmp_path, "proc/sys/kernel/osrelease", "5.15.153.1-microsoft-standard-WSL2\n")
    (tmp_path / "sys/class/net/loopback0").mkdir(parents=True)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    found = host(tmp_path / "models", root=tmp_path)
    assert (found.governor, found.governor_driver, found.numa_nodes) == ("powersave", "intel_pstate", 2)
    assert found.iommu and found.on_battery and found.wsl_mirrored
    assert found.kernel_arguments == ("iommu=pt", "pcie_aspm=off")
    assert found.wsl_release.endswith("WSL2")
    assert found.variables["NCCL_P2P_DISABLE"] == "1"
    assert "secret" not in str(found)
    assert (found.hub_ms, found.hub_error) == (0.0, "")


def test_this_machine(tmp_path: Path) -> None:
    found = host(tmp_path)
    assert found.packages["torch"] and found.packages["triton"]
    assert "vllm" not in found.packages
    assert found.conflicts == ()
    assert found.python.startswith("3.")
    assert found.disk.free_bytes > 0 and found.disk.writable and found.disk.filesystem


def test_a_bare_tree_is_no_error(tmp_path: Path) -> None:
    found = host(tmp_path / "none/at/all", root=tmp_path)
    assert (found.governor, found.iommu, found.on_battery, found.numa_nodes) == ("", False, False, 1)
    assert found.disk.path.endswith("none/at/all") and found.disk.free_bytes


def test_the_toolkit_is_read_from_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "cuda-12.8/bin/nvcc", "#!/bin/sh\n")
    nvcc = tmp_path / "cuda-12.8/bin/nvcc"
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(nvcc.parent))
    assert host(tmp_path).toolkit == "12.8"
    put(tmp_path, "cuda-12.8/version.json", '{"cuda" : {"name": "CUDA SDK", "version" : "12.9.1"}}')
    assert host(tmp_path).toolkit == "12.9"


def test_the_assembler_that_a_variable_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "ptxas"
    script.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.99'\n")
    script.chmod(0o755)
    for variable, capability, other in (
        ("TRITON_PTXAS_PATH", 89, 121),
        ("TRITON_PTXAS_BLACKWELL_PATH", 121, 89),
    ):
        monkeypatch.setenv(variable, str(script))
        assert assembler(capability) == (script, variable, "12.4")
        assert version_key(assembler(other).version) >= (12, 8), "the other one is still Triton's own"
        monkeypatch.setenv(variable, str(tmp_path / "none"))
        assert assembler(capability).version == ""
        monkeypatch.delenv(variable)
        found = assembler(capability)
        assert version_key(found.version) >= (12, 8) and found.variable == "", "what Triton brings"


def test_an_assembler_that_does_not_know_the_card_is_refused_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would end the process, with a line about PTX versions."""
    from localllm.boot.claim import check_assembler

    script = tmp_path / "ptxas"
    script.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.99'\n")
    script.chmod(0o755)
    check_assembler(121)
    monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", str(script))
    with pytest.raises(DeviceError, match=r"is from CUDA 12\.8, .* sm_121: it needs 12\.9") as refused:
        check_assembler(121)
    assert refused.value.hint == "unset TRITON_PTXAS_BLACKWELL_PATH"
    check_assembler(120)
    check_assembler(90)


def test_conflicts_between_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def install(name: str, version: str, *wants: str) -> None:
        lines = [
            "Metadata-Version: 2.1",
            f"Name: {name}",
            f"Version: {version}",
            *(f"Requires-Dist: {w}" for w in wants),
        ]
        put(tmp_path, f"{name}-{version}.dist-info/METADATA", "\n".join(lines))

    install("vllm", "0.27.1", "torch==2.9.0", "triton>=3.0; python_version > '3'", "nonsense @@", "lmdeploy")
    install("torch", "2.13.0+cu130")
    install("triton", "3.9.0")
    monkeypatch.syspath_prepend(tmp_path)  # found before those that are really installed
    facts = host(tmp_path)
    assert {"torch": "2.13.0+cu130", "triton": "3.9.0", "vllm": "0.27.1"}.items() <= facts.packages.items()
    wrong = [text for text in facts.conflicts if text.startswith("vllm")]
    assert wrong == ["vllm requires torch==2.9.0, but 2.13.0+cu130 is installed"]


def test_connecting_and_the_port(tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        accepted = threading.Thread(target=lambda: server.accept()[0].close(), daemon=True)
        accepted.start()
        ms, error = connect(f"http://127.0.0.1:{port}")
        assert ms > 0 and not error
        accepted.join(5)
        found = host(tmp_path, port=port)
        assert str(os.getpid()) in found.port_holder or found.port_holder == "another program"
    ms, error = connect(f"http://127.0.0.1:{port}")
    assert ms == 0 and error
    assert connect("nonsense")[1]
    assert host(tmp_path, f"http://127.0.0.1:{port}", port=port).hub_error
    assert host(tmp_path, port=port).port_holder == ""


@pytest.mark.parametrize(
    ("mounts", "files", "kind", "filesystem"),
    [
        ("/dev/nvme0n1p2 / ext4 rw 0 0", {"nvme0n1p2": ""}, "nvme", "ext4"),
        ("/dev/sda1 / ext4 rw 0 0", {"sda1": "1"}, "hdd", "ext4"),
        ("/dev/sdb1 / xfs rw 0 0", {"sdb1": "0"}, "ssd", "xfs"),
        ("/dev/vda1 / ext4 rw 0 0", {"vda1": "1"}, "", "ext4"),
        ("server:/export / nfs4 rw 0 0", {}, "network", "nfs4"),
        ("C:\\ / 9p rw 0 0", {}, "network", "9p"),
        ("tmpfs / tmpfs rw 0 0", {}, "memory", "tmpfs"),
        ("overlay / overlay rw 0 0", {}, "", "overlay"),
    ],
)
def test_kinds_of_disks(tmp_path: Path, mounts: str, files: dict[str, str], kind: str, filesystem: str) -> None:
    put(tmp_path, "proc/self/mounts", f"{mounts}\nbroken line\n")
    for name, rotational in files.items():
        folder = tmp_path / "sys/class/block" / name
        folder.mkdir(parents=True)
        if rotational:
            put(folder, "queue/rotational", rotational)
    found = disk_facts(tmp_path / "models/hub", tmp_path)
    assert (found.kind, found.filesystem) == (kind, filesystem)
    assert found.free_bytes > 0
    assert existing(tmp_path / "a/b/c") == tmp_path


def test_an_imagined_card() -> None:
    here = MACHINES["cpu"]
    card = imagined(here, gpu="4090").gpus[0]
    assert (card.capability, card.bandwidth, card.total_bytes) == (89, 1008e9, 24 * GIB)
    assert imagined(here, gpu="4090", vram_bytes=48 * GIB, bandwidth=2e12).gpus[0].bandwidth == 2e12
    assert imagined(here, gpu="gb10").gpus[0].unified
    assert imagined(here, vram_bytes=16 * GIB).gpus[0].bandwidth == 0
    assert imagined(here, ram_bytes=8 * GIB).ram_available_bytes == 8 * GIB
    assert imagined(MACHINES["rtx4090"], bandwidth=5e11).gpus[0].bandwidth == 5e11
    assert imagined(here) is here
    with pytest.raises(ConfigError, match="did you mean"):
        imagined(here, gpu="RTX 9090")
    for name, told in (
        ("7900 XTX", "AMD RX 7900 XTX (gfx1100): the kernels compile for it"),
        ("mi300x", "AMD Instinct MI300X (gfx942): the kernels compile for it"),
        ("RX7800XT", "AMD RX 7800 XT (gfx1101): the kernels do not support it"),
        ("Arc B580 12GB", "Intel Arc B580: there are no kernels for it"),
    ):
        with pytest.raises(ConfigError, match=re.escape(told)) as refused:
            imagined(here, gpu=name)
        assert "use --vram" in refused.value.hint
    with pytest.raises(ConfigError, match="has no GPU"):
        imagined(here, bandwidth=1e12)

"""Facts from made-up /proc and /sys trees, and from this machine."""

from __future__ import annotations

import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from localllm.device import machine, read_bandwidth, torch_build
from localllm.device.cgroup import cpu_quota, memory_groups
from localllm.device.cpu import cpu_facts
from localllm.device.fake import MACHINES
from localllm.device.foreign import foreign_gpus
from localllm.device.gpu_table import TABLE, GpuModel, generation, named_gpu, table_row
from localllm.device.memory import memory_limits
from localllm.device.surroundings import container, wsl_version
from localllm.errors import ConfigError, DeviceError
from localllm.plan.placement import chosen_device
from localllm.plan.speeds import CORE_FLOPS

GIB = 1 << 30


MEMINFO = "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\nSwapTotal: 1024 kB\nSwapFree: 512 kB\n"


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_memory_without_limits(tmp_path: Path) -> None:
    put(tmp_path, "proc/meminfo", MEMINFO)
    limits = memory_limits(tmp_path)
    assert limits == (16 * GIB, 8 * GIB, "", 1 << 20, 512 << 10)


def test_cgroup_2_the_smallest_on_the_way_up_counts(tmp_path: Path) -> None:
    put(tmp_path, "proc/meminfo", MEMINFO)
    put(tmp_path, "proc/self/cgroup", "0::/user/app\n")
    put(tmp_path, "sys/fs/cgroup/user/app/memory.max", "max\n")
    put(tmp_path, "sys/fs/cgroup/user/app/cpu.max", "max 100000\n")
    put(tmp_path, "sys/fs/cgroup/user/memory.max", str(4 * GIB))
    put(tmp_path, "sys/fs/cgroup/user/memory.current", str(3 * GIB))
    put(tmp_path, "sys/fs/cgroup/user/memory.stat", f"anon 1\ninactive_file {GIB // 4}\nactive_file {GIB * 3 // 4}\n")
    put(tmp_path, "sys/fs/cgroup/user/cpu.max", "150000 100000\n")
    limits = memory_limits(tmp_path)
    assert (limits.ram_total_bytes, limits.ram_available_bytes, limits.ram_limit) == (4 * GIB, 2 * GIB, "cgroup")
    assert cpu_quota(tmp_path) == 1.5


def test_cgroup_1_and_a_path_from_outside_the_container(tmp_path: Path) -> None:
    put(tmp_path, "proc/meminfo", MEMINFO)
    put(tmp_path, "proc/self/cgroup", "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n")
    put(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", str(2 * GIB))
    put(tmp_path, "sys/fs/cgroup/memory/memory.usage_in_bytes", str(GIB))
    put(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "200000")
    put(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    assert memory_groups(tmp_path) == [(2 * GIB, GIB)]
    put(tmp_path, "sys/fs/cgroup/memory/memory.stat", f"active_file 1\ntotal_active_file {GIB // 2}\n")
    assert memory_groups(tmp_path) == [(2 * GIB, GIB * 3 // 2)]
    assert cpu_quota(tmp_path) == 2.0
    put(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", str(2**63 - 4096))
    put(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1")
    assert memory_groups(tmp_path) == []
    assert cpu_quota(tmp_path) == 0.0


def test_a_quota_limits_the_cores(tmp_path: Path) -> None:
    put(tmp_path, "proc/self/cgroup", "0::/\n")
    put(tmp_path, "sys/fs/cgroup/cpu.max", "50000 100000\n")
    facts = cpu_facts(tmp_path)
    assert (facts.cores_usable, facts.quota) == (1, 0.5)


@pytest.mark.parametrize(
    ("text", "name", "isa"),
    [
        (
            "model name : AMD Ryzen(TM) 9\nflags : avx avx2 fma f16c avx512f avx512bw avx512_vnni\n",
            "AMD Ryzen 9",
            "avx512_vnni",
        ),
        (
            "model name : Xeon\nflags : avx2 fma f16c avx512f avx512bw avx512_vnni amx_bf16 amx_tile amx_int8\n",
            "Xeon",
            "amx",
        ),
        ("model name : Xeon\nflags : avx2 fma f16c avx512f avx512bw\n", "Xeon", "avx512"),
        ("model name : Core i5\nflags : avx2 fma f16c\n", "Core i5", "avx2"),
        ("model name : Core 2\nflags : sse4_1\n", "Core 2", "generic"),
        ("CPU implementer : 0x41\nCPU part : 0xd0c\nFeatures : asimd asimddp\n", "ARM core 0xd0c", "neon_dotprod"),
        ("Features : asimd\n", None, "neon"),
    ],
)
def test_instruction_sets(tmp_path: Path, text: str, name: str | None, isa: str) -> None:
    put(tmp_path, "proc/cpuinfo", "processor : 0\n" + text + "\nprocessor : 1\nflags : none\n")
    facts = cpu_facts(tmp_path)
    assert facts.isa == isa
    assert isa in CORE_FLOPS or isa in ("neon", "generic"), "what is planned with has a speed"
    assert name is None or facts.name == name


def test_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.delenv("container", raising=False)
    put(tmp_path, "proc/sys/kernel/osrelease", "6.6.87.2-microsoft-standard-WSL2\n")
    assert wsl_version(tmp_path) == 2
    assert container(tmp_path) == ""
    put(tmp_path, "proc/1/cgroup", "0::/kubepods/burstable/pod1\n")
    assert container(tmp_path) == "kubernetes"
    put(tmp_path, "run/.containerenv", "")
    assert container(tmp_path) == "podman"


def test_an_empty_tree_breaks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.device.nvml.LIBRARIES", ())
    facts = machine(root=tmp_path)
    assert facts.cpu.cores_usable >= 1
    assert (facts.ram_total_bytes, facts.gpus, facts.gpu_error) == (0, (), "")


def test_this_machine() -> None:
    facts = machine()
    assert 0 < facts.ram_available_bytes <= facts.ram_total_bytes
    assert 1 <= facts.cpu.cores_usable <= facts.cpu.cpus_total
    assert facts.cpu.bandwidth > 1e9
    assert facts.torch_version.startswith("2.")


def test_measured_bandwidth() -> None:
    assert 1e8 < read_bandwidth(machine().cpu.cores_usable, 1 << 20) < 1e13


def test_a_ulimit_is_a_limit() -> None:
    code = (
        "from localllm.device import machine\nm = machine()\n"
        "print(m.ram_limit, m.ram_total_bytes, m.ram_available_bytes)"
    )

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (GIB, GIB))

    run = subprocess.run(
        [sys.executable, "-P", "-c", code], preexec_fn=limit, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    name, total, free = run.stdout.split()
    assert (name, int(total)) == ("ulimit", GIB)
    assert int(free) < GIB


def test_fake_machines_need_the_testing_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_FAKE_HW", "rtx4090")
    assert machine().gpus[0].name.endswith("4090")
    monkeypatch.setenv("LOCALLLM_FAKE_HW", "abacus")
    with pytest.raises(ConfigError, match="abacus"):
        machine()
    monkeypatch.setenv("LOCALLLM_TESTING", "0")
    with pytest.raises(ConfigError, match="for tests only") as caught:
        machine()
    assert "unset LOCALLLM_FAKE_HW" in caught.value.hint


def test_the_table_has_no_row_that_another_hides() -> None:
    names = {"NVIDIA GeForce RTX 4070 Ti": 504, "NVIDIA RTX A6000": 768, "NVIDIA L4": 300, "NVIDIA L40S": 864}
    names |= {"NVIDIA A100-SXM4-80GB": 2039, "NVIDIA A100 80GB PCIe": 1935, "NVIDIA A100-SXM4-40GB": 1555}
    names |= {"NVIDIA RTX PRO 6000 Blackwell Server Edition": 1597, "NVIDIA H100 PCIe": 2039}
    names |= {"NVIDIA GeForce RTX 4080 SUPER": 736, "NVIDIA GeForce RTX 5090 Laptop GPU": 896}
    assert {name: row.bandwidth_gbs for name in names if (row := table_row(name))} == names
    assert table_row("Voodoo") is None
    assert len({row.pattern for row in TABLE}) == len({row.name for row in TABLE}) == len(TABLE)
    assert [generation(c).min_driver for c in (120, 89, 70)] == [570, 520, 0]
    assert [generation(c).min_cuda for c in (121, 120, 86, 70)] == ["12.9", "12.8", "11.1", ""]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_every_card_is_found_by_its_own_name(row: GpuModel) -> None:
    assert named_gpu(row.name) is row
    assert named_gpu(row.name.lower().replace(" ", "")) is row
    assert table_row(f"NVIDIA {row.name}") is row
    assert row.capability >= 75 and row.memory_gib >= 4 and row.bandwidth_gbs >= 100


def test_short_names_of_cards() -> None:
    assert [named_gpu(n).name for n in ("3090", "rtx4090", "5070 ti", "H100")] == [  # type: ignore[union-attr]
        "RTX 3090", "RTX 4090", "RTX 5070 Ti", "H100"
    ]  # fmt: skip
    assert named_gpu("voodoo") is None


def test_torch_is_read_not_imported() -> None:
    version, cuda = torch_build()
    import torch

    assert version == torch.__version__
    assert cuda == (torch.version.cuda or "")


def test_cards_of_others_are_named_with_why_they_are_not_used(tmp_path: Path) -> None:
    def card(number: int, slot: str, **files: str) -> None:
        device = tmp_path / "sys/devices/pci" / slot
        (device / "drm" / f"renderD{128 + number}").mkdir(parents=True)
        for name, text in files.items():
            (device / name).write_text(text + "\n")
        place = tmp_path / f"sys/class/drm/card{number}"
        place.mkdir(parents=True)
        (place / "device").symlink_to(device)

    def node(number: int, **facts: int) -> None:
        folder = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}"
        folder.mkdir(parents=True)
        (folder / "properties").write_text("".join(f"{name} {value}\n" for name, value in facts.items()))

    card(0, "0000:00:02.0", vendor="0x8086")  # in the processor
    card(1, "0000:03:00.0", vendor="0x1002", product_name="Radeon RX 7900 XTX", mem_info_vram_total=str(24 << 30))
    card(2, "0000:04:00.0", vendor="0x1002")
    card(3, "0000:05:00.0", vendor="0x8086")
    card(4, "0000:06:00.0", vendor="0x1002", mem_info_vram_total=str(64 << 30))
    (tmp_path / "sys/class/drm/card1-DP-1").mkdir()
    node(0, cpu_cores_count=16, gfx_target_version=0)
    node(1, gfx_target_version=110000, drm_render_minor=129)
    node(2, gfx_target_version=90010, drm_render_minor=132)
    assert foreign_gpus(tmp_path) == (
        "Radeon RX 7900 XTX (gfx1100, 24.0 GiB) is not used: the kernels compile for it, but"
        " have not been tested on one",
        "an AMD GPU (unknown to the compute driver) is not used: the kernels do not support it",
        "an Intel GPU is not used: there are no kernels for it",
        "an AMD GPU (gfx90a, 64.0 GiB) is not used: the kernels do not support it",
    )
    assert foreign_gpus(tmp_path / "none") == ()
    found = replace(MACHINES["cpu"], foreign_gpus=foreign_gpus(tmp_path)[:1])
    assert chosen_device(found, "auto").reasons == (f"CPU: {found.foreign_gpus[0]}",)
    with pytest.raises(DeviceError, match="cuda:0 not found: Radeon RX 7900 XTX .gfx1100"):
        chosen_device(found, "cuda:0")

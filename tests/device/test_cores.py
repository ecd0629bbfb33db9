"""Cores, their speeds and memory nodes from made-up trees of /sys, and what is chosen on such machines."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from localllm.device.cores import cpu_list, memory_nodes
from localllm.device.cpu import cpu_facts
from localllm.device.facts import Core, CpuFacts
from localllm.device.fake import MACHINES, fake_host
from localllm.doctor import Survey, run_checks
from localllm.plan.cores import Threads, chosen_threads, over_quota
from localllm.terminal import GIB

Tree = dict[str, str]


def cpus(numbers: Iterable[int], first_core: int = 0, package: int = 0, smt: int = 1, **files: object) -> Tree:
    """Logical CPUs, `smt` of them in a row on a core; `files`: what else each has (clock, capacity)."""
    names = {"clock": "cpufreq/cpuinfo_max_freq", "capacity": "cpu_capacity"}
    tree = {}
    for place, cpu in enumerate(numbers):
        base = f"sys/devices/system/cpu/cpu{cpu}"
        tree[f"{base}/topology/physical_package_id"] = str(package)
        tree[f"{base}/topology/core_id"] = str(first_core + place // smt)
        tree |= {f"{base}/{names[name]}": str(value) for name, value in files.items()}
    return tree


def node(index: int, cpulist: str, distance: str, free_gib: int, total_gib: int = 256) -> Tree:
    base = f"sys/devices/system/node/node{index}"
    lines = {"MemTotal": total_gib << 20, "MemFree": (free_gib - 3) << 20, "Inactive(file)": 1 << 20}
    lines["Active(file)"] = 2 << 20  # of a model that ran: it is given back as well
    meminfo = "".join(f"Node {index} {name}:{value:>16} kB\n" for name, value in lines.items())
    return {f"{base}/cpulist": cpulist, f"{base}/distance": distance, f"{base}/meminfo": meminfo}


# two dies whose clocks differ a little, hardware threads numbered behind all cores
RYZEN = {
    **cpus(range(8), clock=5700000), **cpus(range(8, 16), 8, clock=5450000),
    **cpus(range(16, 24), clock=5700000), **cpus(range(24, 32), 8, clock=5450000),
}  # fmt: skip
RAPTOR = cpus(range(16), smt=2, clock=5800000) | cpus(range(16, 32), 8, clock=4300000)
RAPTOR |= {"sys/devices/cpu_core/cpus": "0-15\n", "sys/devices/cpu_atom/cpus": "16-31\n"}
METEOR = cpus(range(12), smt=2, clock=5100000) | cpus(range(12, 20), 6, clock=3800000)  # a Core Ultra 7 165H
METEOR |= cpus((20, 21), 14, clock=2500000)
METEOR |= {"sys/devices/cpu_core/cpus": "0-11\n", "sys/devices/cpu_atom/cpus": "12-21\n"}
FAR, QUARTERS = ("10 32", "32 10"), ("10 12 12 12", "12 10 12 12", "12 12 10 12", "12 12 12 10")
EPYC = cpus(range(4)) | cpus(range(4, 8), 0, package=1) | node(0, "0-3", FAR[0], 100) | node(1, "4-7", FAR[1], 200)
NPS4 = cpus(range(8)) | {k: v for i in range(4) for k, v in node(i, f"{2 * i}-{2 * i + 1}", QUARTERS[i], 50).items()}
PI = cpus(range(4), clock=2400000)
ROCK = cpus(range(4), capacity=414) | cpus(range(4, 8), 4, capacity=1024)  # RK3588: four A55, four A76
CLUSTERS = cpus(range(4), capacity=414) | cpus((4, 5), capacity=1024) | cpus((6, 7), capacity=1024)  # since Linux 6.0
CLUSTERS |= {f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{n}\n" for n in range(8)}
QUOTA = cpus(range(8)) | {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}


def planted(root: Path, tree: Mapping[str, str]) -> Path:
    for name, text in tree.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    root.mkdir(exist_ok=True)
    return root


@pytest.fixture
def read_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def read(tree: Mapping[str, str], allowed: Iterable[int]) -> CpuFacts:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed), raising=False)
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        return cpu_facts(planted(root, tree))

    return read


@pytest.mark.parametrize(
    ("tree", "allowed", "count", "why"),
    [
        (RYZEN, 32, 16, "one per core"),
        (RAPTOR, 32, 24, "8 performance and 16 efficient cores"),
        (METEOR, 22, 14, "6 performance and 8 efficient cores; 2 slower cores left idle, below 50% of the fastest"),
        (PI, 4, 4, "one per core"),
        (ROCK, 8, 4, "4 performance cores; 4 slower cores left idle"),
        (CLUSTERS, 8, 4, "4 performance cores; 4 slower cores left idle"),
        (QUOTA, 8, 1, "the control group allows 1.5 CPUs"),
        ({}, 3, 3, "one per core"),
    ],
    ids=["ryzen", "13900k", "165h", "pi", "rk3588", "rk3588-clusters", "quota", "nothing"],
)
def test_threads(read_tree, tree: Tree, allowed: int, count: int, why: str) -> None:
    cpu = read_tree(tree, range(allowed))
    chosen = chosen_threads(cpu)
    assert chosen.count == count and chosen.why.startswith(why)
    assert (chosen.placement, chosen.nodes) == ("", ())
    slow = {number for core in cpu.cores if core.speed < 0.5 for number in core.cpus}
    assert set(chosen.cpus) == (set(range(allowed)) - slow if slow else set())
    asked = chosen_threads(cpu, 20)
    assert (asked.count, asked.why) == (20, "as requested")
    assert asked.cpus == (() if count < 20 else chosen.cpus)


def test_hardware_threads_of_a_core_are_one(read_tree) -> None:
    assert read_tree(RYZEN, range(32)).cores[0] == Core((0, 16))
    assert [core.cpus for core in read_tree(RYZEN, (0, 16, 17)).cores] == [(0, 16), (17,)]
    atom = read_tree(RAPTOR, range(32)).cores[-1]
    assert (atom.cpus, atom.efficient, round(atom.speed, 2)) == ((31,), True, 0.74)


def test_a_model_stays_on_the_socket_whose_memory_holds_it(read_tree) -> None:
    cpu = read_tree(EPYC, range(8))
    assert [(one.index, one.near, one.free_bytes) for one in cpu.nodes] == [(0, (0,), 100 * GIB), (1, (1,), 200 * GIB)]
    said = "4 cores on other sockets stay idle: the model fits in one socket's memory"
    assert chosen_threads(cpu, "auto", 150 * GIB) == Threads(4, "one per core", said, (4, 5, 6, 7))
    assert chosen_threads(cpu, 3) == Threads(3, "as requested", said, (4, 5, 6, 7))
    assert chosen_threads(cpu, 8) == Threads(8, "as requested", nodes=(0, 1))
    large = chosen_threads(cpu, "auto", 190 * GIB)
    assert (large.count, large.cpus, large.nodes) == (8, (), (0, 1))
    assert "190.0 GiB exceeds one socket's free memory" in large.placement


def test_nodes_of_one_socket_are_used_together(read_tree) -> None:
    chosen = chosen_threads(read_tree(NPS4, range(8)), "auto", 120 * GIB)
    assert (chosen.count, chosen.cpus, chosen.nodes) == (8, (), (0, 1, 2, 3))
    assert chosen_threads(read_tree(NPS4, range(2))).nodes == ()  # a CPU set of one node


@pytest.mark.parametrize(
    "broken",
    [
        {"sys/devices/system/node/node1/meminfo": ""},
        {"sys/devices/system/node/node1/meminfo": "Node 1 MemTotal: many kB\n"},
        {"sys/devices/system/node/node0/cpulist": "0-", "sys/devices/system/node/node1/cpulist": "x"},
    ],
)
def test_what_cannot_be_read_changes_nothing(read_tree, broken: Tree) -> None:
    chosen = chosen_threads(read_tree(EPYC | broken, range(8)))
    assert (chosen.count, chosen.cpus, chosen.nodes) == (8, (), ())


def test_a_clock_that_one_cpu_does_not_tell_says_nothing(read_tree) -> None:
    unknown = {name: "" for name in RAPTOR if name.endswith("cpu31/cpufreq/cpuinfo_max_freq")}
    assert {core.speed for core in read_tree(RAPTOR | unknown, range(32)).cores} == {1.0}


def test_distances_that_are_missing_part_the_nodes(tmp_path: Path) -> None:
    root = planted(tmp_path, EPYC | {"sys/devices/system/node/node0/distance": "10"})
    assert [one.near for one in memory_nodes(root)] == [(0,), (1,)]


def test_lists_of_cpus() -> None:
    assert cpu_list("0-2,7") == {0, 1, 2, 7} and cpu_list("5") == {5}
    assert cpu_list("") == cpu_list("0-") == cpu_list("a") == cpu_list("1-2-3") == frozenset()


def test_doctor_tells_the_choice(read_tree, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(check: str, cpu: CpuFacts, nodes: int = 1):
        host = replace(fake_host("cpu"), numa_nodes=nodes)
        (found,) = run_checks([check], Survey(replace(MACHINES["cpu"], cpu=cpu), host))
        return found

    found = told("cpu.cores", read_tree(ROCK, range(8)))
    assert found.status == "ok" and found.detail.startswith("threads 4: 4 performance cores; 4 slower cores left idle")
    assert told("cpu.cores", read_tree(RYZEN, range(32))).detail == ""
    cpu = read_tree(QUOTA, range(8))
    assert told("cpu.cores", cpu).detail == "threads 1: the control group allows 1.5 CPUs"
    monkeypatch.setenv("LOCALLLM_ENGINE_THREADS", "4")
    found = told("cpu.cores", cpu)
    assert found.status == "warn" and "4 threads, but the control group allows 1.5 CPUs" in found.detail
    assert found.fix == "localllm config set engine.threads auto"
    assert "stay idle" in told("numa", read_tree(EPYC, range(8)), 2).detail


def test_no_more_threads_than_a_quota_has_cpus() -> None:
    cpu = CpuFacts("", "avx2", cores_usable=8, quota=2.5)
    assert over_quota(cpu, 3) and not over_quota(cpu, 2) and not over_quota(replace(cpu, quota=0.5), 1)

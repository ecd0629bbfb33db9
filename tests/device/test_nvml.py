"""The driver's library, played by a small C library with the same functions."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localllm.device import nvml
from localllm.device.fake import MACHINES
from localllm.device.nvml import Answer, gpu_facts, visible
from localllm.device.trouble import trouble
from localllm.errors import DeviceError
from localllm.plan.placement import chosen_device

GIB = 1 << 30


def build(folder: Path, *flags: str) -> ctypes.CDLL:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    out = folder / "libfake-nvml.so"
    source = Path(__file__).with_name("fake_nvml.c")
    subprocess.run([compiler, "-shared", "-fPIC", *flags, "-o", str(out), str(source)], check=True, timeout=60)
    return ctypes.CDLL(str(out))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("nvml"))


def test_facts(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    told = gpu_facts(100 * GIB, library=library)
    assert (told.driver, told.driver_cuda) == ("580.95.05", "13.0")
    card, spark = told.gpus
    for setting, is_named in (("0", False), ("0, 2", True), ("GPU-1", True), ("", False)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
        assert ("GPU 2" in gpu_facts(0, library=library).gpu_error) is is_named, setting
    assert told.gpu_error.startswith("GPU 2 has fallen off the bus: "), "the others are used all the same"
    seen = replace(MACHINES["rtx4090"], gpu_error=told.gpu_error, torch_cuda="12.8")
    assert chosen_device(seen, "auto").reasons[1] == told.gpu_error
    with pytest.raises(DeviceError, match="cuda:1 not found: 1 GPU visible; GPU 2 has fallen off the bus"):
        chosen_device(seen, "cuda:1")
    assert (card.name, card.capability, card.total_bytes) == ("NVIDIA GeForce RTX 4090", 89, 25757220864)
    assert card.bandwidth == pytest.approx(1008e9, rel=0.01)
    assert card.bandwidth_basis == "driver"
    assert card.has_fp8
    assert not card.has_fp4
    assert [p.pid for p in card.processes] == [1, 4194999]
    assert card.processes[1].used_bytes == 0
    assert (spark.capability, spark.unified, spark.free_bytes) == (121, True, 100 * GIB)
    assert (spark.bandwidth, spark.bandwidth_basis) == (273e9, "table")
    assert (card.pcie_width, card.pcie_width_max, card.pcie_gen_max) == (8, 16, 4)
    assert (spark.pcie_width, spark.temperature_c, spark.power_limit_w) == (0, 0, 0), "not told"
    assert (card.temperature_c, card.power_limit_w, card.power_max_w, card.power_draw_w) == (61, 300, 450, 123.456)
    assert card.throttle == ("heat", "power limit")
    assert (card.ecc, card.mig, card.display) == (False, False, True)
    assert (spark.ecc, spark.mig, spark.display) == (None, False, None)
    assert [(k.first, k.second, k.path, k.p2p) for k in told.gpu_links] == [
        (0, 1, "PHB", "these GPUs do not support it")
    ]


@pytest.mark.parametrize(
    ("setting", "chosen"),
    [(None, "MIG-101"), ("0", "MIG-101"), ("MIG-102", "MIG-102"), ("MIG-102,1", "MIG-102"), ("1", "GPU-2000")],
)
def test_a_card_that_is_cut_into_instances(
    setting: str | None, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them is a card with its own memory: CUDA shows a process no more, nor a whole card beside it."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    told = gpu_facts(100 * GIB, library=build(tmp_path, "-DCUT=3"))
    assert [gpu.uuid for gpu in told.gpus] == [chosen] and not told.gpu_links
    assert "MIG" not in told.gpu_error
    for part in told.gpus if setting != "1" else ():
        assert (part.name, part.index, part.capability) == ("NVIDIA GeForce RTX 4090 MIG 1g.5gb", 0, 89)
        assert (part.total_bytes, part.free_bytes, part.unified, part.mig) == (5 * GIB, 4 * GIB, False, True)
        assert (part.bandwidth, part.bandwidth_basis) == (0.0, "unknown"), "only root is told how much the card has"


def test_a_driver_that_refuses_says_why(tmp_path: Path) -> None:
    told = gpu_facts(0, library=build(tmp_path, "-DINIT_CODE=18"))
    assert not told.gpus
    assert "version mismatch" in told.gpu_error


def test_no_driver_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "LIBRARIES", ("libnone-such.so",))
    assert gpu_facts(0, tmp_path) == Answer()
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").touch()
    assert "libnvidia-ml" in gpu_facts(0, tmp_path).gpu_error


@pytest.mark.parametrize(
    ("card", "words"),
    [(0, "the memory of GPU 0 has 3 uncorrectable errors"), (1, ""), (2, "GPU 2 has fallen off the bus"), (7, "")],
)
def test_what_is_wrong_with_a_card(library: Any, card: int, words: str) -> None:
    said = trouble(card, library=library)
    assert words in said if words else not said
    assert said in trouble(1, card, 2, library=library), "a lost one hides no other"


class Card:
    """The library of a driver with one GPU, whose calls return these codes."""

    def __init__(self, handle: int = 0, memory: int = 3, ecc: int = 3, init: int = 0) -> None:
        self.nvmlInit_v2 = lambda: init
        self.nvmlDeviceGetHandleByIndex_v2 = lambda *given: handle
        self.nvmlDeviceGetMemoryInfo = lambda *given: memory
        self.nvmlDeviceGetTotalEccErrors = lambda *given: ecc

    def nvmlDeviceGetCount_v2(self, out: Any) -> int:
        out._obj.value = 1
        return 0


@pytest.mark.parametrize(
    ("card", "words"),
    [
        (Card(handle=15), "GPU 0 has fallen off the bus: "),
        (Card(memory=15), "GPU 0 has fallen off the bus: "),
        (Card(handle=16), "GPU 0 needs a reset: run `nvidia-smi --gpu-reset -i 0`"),
        (Card(handle=4), "GPU 0 cannot be used: NVML returned code 4"),
    ],
)
def test_a_lost_gpu_is_why_the_cpu_is_used(card: Card, words: str) -> None:
    told = gpu_facts(0, library=card)
    assert not told.gpus and told.gpu_error.startswith(words)
    assert trouble(0, library=card) == told.gpu_error
    machine = replace(MACHINES["cpu"], gpu_error=told.gpu_error)
    assert chosen_device(machine, "auto").reasons == (f"CPU: {told.gpu_error}",)


def test_a_gpu_of_other_users_is_no_error(tmp_path: Path) -> None:
    told = gpu_facts(0, library=build(tmp_path, "-DLAST_CODE=4"))
    assert len(told.gpus) == 2 and not told.gpu_error


def test_what_a_driver_without_words_says() -> None:
    assert "GPU 0 has fallen off the bus" in trouble(0, library=Card(ecc=15)), "its memory is all that is asked"
    assert "needs a reset" in trouble(0, library=Card(ecc=16)) and not trouble(0, library=Card())
    assert trouble(0, library=Card(init=999)) == "the driver does not respond: NVML returned code 999"


def test_an_old_library_lacks_functions() -> None:
    class Bare:
        def nvmlInit_v2(self) -> int:
            return 0

    assert gpu_facts(0, library=Bare()) == Answer(gpu_error="the driver is installed, but finds no GPU")


def test_a_hanging_driver_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    class Stuck:
        def nvmlInit_v2(self) -> int:
            over.wait(60)
            return 1

    monkeypatch.setattr(nvml, "DEADLINE_S", 0.01)
    assert "did not answer" in gpu_facts(0, library=Stuck()).gpu_error
    over.set()


@pytest.mark.parametrize(
    ("setting", "chosen"),
    [(None, [0, 1]), ("", []), ("-1", []), ("1", [1]), ("1,0", [1, 0]), ("0,9,1", [0]), ("GPU-2", [1]), ("0,0", [0])],
)
def test_cuda_visible_devices(library: Any, setting: str | None, chosen: list[int]) -> None:
    gpus = gpu_facts(0, library=library).gpus
    assert [g.index for g in visible(gpus, setting)] == chosen


def test_links_are_numbered_among_the_visible_cards(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    told = gpu_facts(0, library=library)
    assert [gpu.index for gpu in told.gpus] == [1, 0]
    assert [(link.first, link.second) for link in told.gpu_links] == [(1, 0)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert gpu_facts(0, library=library).gpu_links == ()

"""The driver's library, played by a small C library with the same functions."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from localllm.device import nvml
from localllm.device.nvml import gpu_facts, visible

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
    gpus, driver, cuda, error = gpu_facts(100 * GIB, library=library)
    assert (driver, cuda, error) == ("580.95.05", "13.0", "")
    card, spark = gpus  # the third one is lost
    assert (card.name, card.capability, card.total_bytes) == ("NVIDIA GeForce RTX 4090", 89, 25757220864)
    assert card.bandwidth == pytest.approx(1008e9, rel=0.01)
    assert card.bandwidth_basis == "driver"
    assert card.has_fp8
    assert not card.has_fp4
    assert [p.pid for p in card.processes] == [1, 4194999]
    assert card.processes[1].used_bytes == 0
    assert (spark.capability, spark.unified, spark.free_bytes) == (121, True, 100 * GIB)
    assert (spark.bandwidth, spark.bandwidth_basis) == (273e9, "table")


def test_a_driver_that_refuses_says_why(tmp_path: Path) -> None:
    gpus, _, _, error = gpu_facts(0, library=build(tmp_path, "-DINIT_CODE=18"))
    assert not gpus
    assert "version mismatch" in error


def test_no_driver_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "LIBRARIES", ("libnone-such.so",))
    assert gpu_facts(0, tmp_path) == ((), "", "", "")
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").touch()
    assert "libnvidia-ml" in gpu_facts(0, tmp_path)[3]


def test_an_old_library_lacks_functions() -> None:
    class Bare:
        def nvmlInit_v2(self) -> int:
            return 0

    assert gpu_facts(0, library=Bare()) == ((), "", "", "the driver is there, but sees no GPU")


def test_a_hanging_driver_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck:
        def nvmlInit_v2(self) -> int:
            time.sleep(0.5)
            return 0

    monkeypatch.setattr(nvml, "DEADLINE_S", 0.05)
    assert "did not answer" in gpu_facts(0, library=Stuck())[3]


@pytest.mark.parametrize(
    ("setting", "chosen"),
    [(None, [0, 1]), ("", []), ("-1", []), ("1", [1]), ("1,0", [1, 0]), ("0,9,1", [0]), ("GPU-2", [1]), ("0,0", [0])],
)
def test_cuda_visible_devices(library: Any, setting: str | None, chosen: list[int]) -> None:
    gpus = tuple(g for g in gpu_facts(0, library=library)[0])
    assert [g.index for g in visible(gpus, setting)] == chosen

"""Doctor's and plan's pages for invented machines are what a person agreed with."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from localllm.device.fake import MACHINES, PROFILES, fake_host, fake_machine

GOLDEN = Path(__file__).parents[1] / "golden"
_spec = importlib.util.spec_from_file_location("make_pages", GOLDEN / "make_pages.py")
assert _spec and _spec.loader
make_pages = importlib.util.module_from_spec(_spec)
sys.modules["make_pages"] = make_pages
_spec.loader.exec_module(make_pages)


NUMBER = re.compile(r"(\d[\d,]*(?:\.\d+)?)( MiB|k\b|)")
LEAST = {" MiB": 96.0, "k": 1.0, "": 0.15}
"""unit -> what a number in it may move by at least: a rest of large numbers moves more than they do"""
AGAIN = "python tests/golden/make_pages.py, and look at what changed"


def difference(page: str, golden: str) -> str:
    """The first line that differs, nothing when none does. Bytes of the plan may move by 3 %: a term of it that is
    measured anew changes no word of a page. Lengths of a bar, and spaces, follow the numbers.
    """
    lines, wanted = page.splitlines(), golden.splitlines()
    for number, (line, want) in enumerate(zip(lines, wanted, strict=False), 1):
        words, expected = (_words(text) for text in (line, want))
        pairs = zip(_numbers(line), _numbers(want), strict=False)
        near = all(abs(a - b) <= max(0.03 * abs(b), LEAST[unit]) for (a, _), (b, unit) in pairs)
        if words != expected or not near:
            return f"line {number}: {line!r}, {want!r} was expected; {AGAIN}"
    return "" if len(lines) == len(wanted) else f"{len(lines)} lines, {len(wanted)} were expected; {AGAIN}"


def _words(line: str) -> str:
    line = re.sub(r"([█▓▒▚▪░])\1*", r"\1", line)
    return " ".join(NUMBER.sub(r"#\2", line).split())


def _numbers(line: str) -> list[tuple[float, str]]:
    return [(float(found.replace(",", "")), unit) for found, unit in NUMBER.findall(line)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("hw", PROFILES)
def test_doctor(hw: str) -> None:
    found = difference(make_pages.doctor_page(hw), (GOLDEN / "doctor" / f"{hw}.txt").read_text())
    assert not found, found


@pytest.mark.one_in(3)
@pytest.mark.parametrize("hw", make_pages.PLANS)
def test_the_plan(hw: str) -> None:
    found = difference(make_pages.plan_page(hw), (GOLDEN / "plan" / f"{hw}.txt").read_text())
    assert not found, found


def test_a_difference_is_seen() -> None:
    page = "VRAM [███▓░] 22.1 GiB\n  x  10.0 ✓\n"
    assert not difference(page, page.replace("███", "██").replace("22.1", "22.2"))
    assert "line 1" in difference(page, page.replace("22.1", "24.0"))
    assert "line 2" in difference(page, page.replace("✓", "✗"))
    assert "lines" in difference(page, page + "more\n")
    assert not difference("18k  20 MiB  40k", "19k  44 MiB  41k")
    assert difference("18k  20 MiB", "20k  20 MiB") and difference("18k  20 MiB", "18k  2.0 GiB")


def test_every_profile_is_a_machine_with_surroundings() -> None:
    wanted = "rtx3060 rtx3090 rtx4090 rtx5070ti rtx5090 rtxpro6000 gb10 h100 rtx5090x2 laptop wsl2 cpu"
    assert set(wanted.split()) == set(PROFILES) <= set(MACHINES)
    for name in PROFILES:
        machine, host = fake_machine(name), fake_host(name)
        assert host.packages["torch"] == machine.torch_version
        assert bool(machine.gpus) is (name != "cpu")
        for gpu in machine.gpus:
            assert gpu.free_bytes <= gpu.total_bytes
            assert gpu.unified or gpu.pcie_width <= gpu.pcie_width_max
    assert all((GOLDEN / "doctor" / f"{name}.txt").exists() for name in PROFILES)
    assert {p.stem for p in (GOLDEN / "doctor").iterdir()} == set(PROFILES), "no page without its machine"


@pytest.mark.parametrize(
    ("hw", "facts"),
    [
        # of the reference tables: what a page of that machine has to say
        ("rtx3060", ["sm_86", "360 GB/s", "Qwen3.5-9B-quantized.w4a16", "weights in fp8 and fp4 also run", "Ollama"]),
        ("rtx3090", ["936 GB/s", "below 290 W", "W4A16 (AWQ, GPTQ), else GGUF"]),
        ("rtx4090", ["1,008 GB/s", "fp8_e4m3", "260 W"]),
        ("rtx5070ti", ["has no code for sm_120", "CUDA 12.8", "cu130"]),
        ("rtx5090", ["1,792 GB/s", "GiB available", "--max-num-batched-tokens 4096", "400 W", "R13"]),
        (
            "rtxpro6000",
            ["sm_120", "--max-model-len 262144", "--async-scheduling", "--sleep-on-idle", "Qwen3.8-27B-FP8"],
        ),
        (
            "gb10",
            [
                "shared with the CPU",
                "does not know sm_121",
                "12.9",
                "--gpu-memory-utilization 0.5",
                "R23",
                "a recipe for this model",
            ],
        ),
        ("h100", ["sm_90", "3,350 GB/s", "lost with the container", "--kv-cache-dtype fp8"]),
        ("rtx5090x2", ["none over PHB", "--tensor-parallel-size 2", "NCCL_P2P_DISABLE=1", "R28", "NCCL_IB_DISABLE"]),
        ("laptop", ["throttled by heat at 87", "on battery", "performance profile"]),
        ("wsl2", ["WSL 2 with 15.5 GiB", "a Windows disk", "no C compiler", "VLLM_WSL2_ENABLE_PIN_MEMORY=1"]),
        ("cpu", ["running on the CPU", "the clock stays low", "llama-server", "-t 16"]),
    ],
)
def test_pages_hold_the_facts(hw: str, facts: list[str]) -> None:
    text = (GOLDEN / "doctor" / f"{hw}.txt").read_text()
    assert [fact for fact in facts if fact not in text] == []

"""`benchmarks/gpu.py` is ready for a card: its parts run on the CPU, and without what a bare machine does not have."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.kernels import LinearFacts

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks/gpu.py"
MISSING = (
    *("textual", "gguf", "llguidance", "fastapi", "starlette", "uvicorn", "platformdirs", "tomlkit", "typer", "rich"),
    *("tokenizers", "huggingface_hub", "httpx", "psutil", "jinja2", "transformers"),
)
BARE = f"""
import sys, importlib.abc, runpy
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in {MISSING!r}:
            raise ImportError(name + " is not on a bare machine")
sys.meta_path.insert(0, Missing())
sys.path.insert(0, {str(SCRIPT.parent)!r})
sys.argv = ["gpu.py", *sys.argv[1:]]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


def bare(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BARE, *words, "--device", "cpu"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_a_group_of_checks_runs_on_a_bare_machine() -> None:
    """torch, triton, numpy and our kernels, quant, models and engine are all it loads."""
    done = bare("--group", "model int4")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    whats = ["self-test of", "graphs of", "kernels of"]
    assert [what.split(",")[0] for what, _ in found] == 2 * [f"{what} Qwen3-tiny-int4" for what in whats]
    assert [what.split(", ")[-1] for what, _ in found] == 3 * ["the fastest kernels"] + 3 * ["rows by themselves"]
    assert all(not said for _, said in found)


def test_every_product_is_tried_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose rows depend on each other, and those that round activations, fit only where that is allowed."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    checks = importlib.import_module("gpu_checks")
    names = []
    for card in (90, 120):
        monkeypatch.setattr(checks, "capability", lambda device, card=card: card)
        monkeypatch.setattr(
            checks, "LinearFacts", lambda *given, **more: LinearFacts(*given, **more | {"device": "cuda"})
        )
        monkeypatch.setattr(checks, "_product_error", lambda impl, facts, weight: names.append(impl.name) or "")
        assert all(not said for _, said in checks.products("cpu", "bfloat16", 0, 1))
    assert {"triton", "triton_invariant", "triton_fp8_w8a8", "triton_nvfp4_w4a4"} <= set(names)


@pytest.mark.slow
def test_a_dry_run_writes_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    for words in (["--check"], ["--minutes", "6", "--lines"]):
        command = [sys.executable, str(SCRIPT), *words, "--device", "cpu", "--workers", "1", "--out", str(file)]
        # a script finds the modules beside it, unless that is switched off
        env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=1500, env=env)
        assert done.returncode in (0, 1), done.stderr
    checked, timed = json.loads(file.read_text())
    assert checked["schema"] == timed["schema"] == "localllm.gpu-bench/1"
    assert all(row["holds"] for row in checked["rows"])
    names = " ".join(row["name"] for row in timed["rows"])
    for word in ("copy bandwidth", "MBU", "attention alone", "prefill", "transformers", "cold start"):
        assert word in names


@pytest.mark.slow
def test_without_a_card_it_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a card")
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "--device cpu is a dry run" in done.stderr


@pytest.mark.slow
def test_instructions_a_weight_are_counted(tmp_path: Path) -> None:
    file, env = tmp_path / "table.json", {**os.environ, "TRITON_INTERPRET": ""}
    words = ["90", "--only", "int4 g128 M=", "--out", str(file)]
    command = [sys.executable, "-P", str(SCRIPT.with_name("gpu_instructions.py")), *words]
    subprocess.run(command, env=env, check=True, timeout=600)
    found = {row["kernel"]: row for row in json.loads(file.read_text())["rows"]}
    assert {"int4 g128 M=1", "int4 g128 M=16"} <= set(found)
    for name, most in (("int4 g128 M=1", 2.2), ("int4 g128 M=16", 3.2)):
        assert 1 < found[name]["instructions"] < most and not found[name]["spill_bytes"], found[name]


@pytest.mark.slow
def test_the_launches_of_a_step_are_those_of_the_code() -> None:
    command = [sys.executable, "-P", str(SCRIPT.with_name("gpu_launches.py")), "--cards", "h100"]
    env = {**os.environ, "TRITON_INTERPRET": ""}
    said = subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=300).stdout
    layer = [line.split()[:2] for line in said.splitlines() if "x 36" in line]
    assert layer == [
        *(["qkv", "gemv_kernel"], ["qkv", "heads"], ["attention", "decode_split"], ["attention", "merge_splits"]),
        *(["o", "gemv_kernel"], ["mlp", "gemv_kernel"], ["mlp", "gemv_kernel"]),
    ]
    assert " 260 launches; bytes alone 1.69 ms" in said

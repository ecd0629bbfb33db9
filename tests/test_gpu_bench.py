"""`benchmarks/gpu.py` is ready for a card: its parts run on the CPU, and without what a bare machine does not have."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
    assert [what.split(",")[0] for what, _ in found] == [
        "self-test of Qwen3-tiny-int4",
        "graphs and steps ahead of Qwen3-tiny-int4",
        "kernels of Qwen3-tiny-int4",
    ]
    assert all(not said for _, said in found)


@pytest.mark.slow
def test_a_dry_run_writes_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    for words in (["--check"], ["--minutes", "6", "--lines"]):
        command = [sys.executable, str(SCRIPT), *words, "--device", "cpu", "--workers", "1", "--out", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
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

"""What loads nothing heavy: the door, the planner, the doctor, the file readers, the interface."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

ENGINE = {"torch", "triton", "transformers", "compressed_tensors"}
HEAVY = ENGINE | {"huggingface_hub", "textual"}
CASES = {
    "localllm": HEAVY | {"numpy"},
    "localllm.cli": HEAVY | {"numpy", "httpx", "tokenizers", "jinja2", "fastapi", "gguf"},
    "localllm.plan.planner": HEAVY,
    "localllm.doctor": HEAVY,
    "localllm.checkpoint": HEAVY,
    "localllm.models.architectures": HEAVY,
    "localllm.tui": ENGINE | {"huggingface_hub"},
}


def loaded_after(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after `statement`."""
    code = f"{statement}\nimport sys\nprint(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


@pytest.mark.parametrize(("module", "forbidden"), CASES.items())
def test_import_stays_light(module: str, forbidden: set[str]) -> None:
    assert not loaded_after(f"import {module}") & forbidden


def test_help_is_light() -> None:
    """Ten times the line of 0.3 s, in processor seconds: other work on the machine does not count."""
    code = (
        "import sys\nfrom localllm.cli import main\nsys.argv = ['localllm', '--help']\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "print(*sorted({m.split('.')[0] for m in sys.modules}), file=sys.stderr)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run.returncode == 0, run.stderr
    assert "Usage" in run.stdout
    assert not set(run.stderr.split()) & CASES["localllm.cli"]
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3

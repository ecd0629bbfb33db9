"""mypy over the package, the four linked folders included."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_types() -> None:
    # mypy keeps errors about modules that have appeared since, so another set of files gets another cache.
    names = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    cache = ROOT / ".cache" / f"mypy-{hashlib.sha256(names.encode()).hexdigest()[:12]}"
    for old in cache.parent.glob("mypy-*"):
        if old != cache:
            shutil.rmtree(old, ignore_errors=True)
    command = [sys.executable, "-P", "-m", "mypy", "--cache-dir", str(cache), "-p", "localllm"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr

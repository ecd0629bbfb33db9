"""mypy over the tree as it ships: the five folders joined under one `localllm/` by links."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_types() -> None:
    # The joined tree stays where it is, below the ignored .cache, so that mypy's own cache stays valid between runs.
    joined = ROOT / ".cache/joined"
    package = joined / "localllm"
    package.mkdir(parents=True, exist_ok=True)
    wanted = {
        e.name: e for e in [*(ROOT / "localllm").iterdir(), *(ROOT / n for n in ("kernels", "quant", "models", "tui"))]
    }
    for link in package.iterdir():
        if link.name not in wanted:
            link.unlink()
    for name, entry in wanted.items():
        if not (package / name).is_symlink():
            (package / name).symlink_to(entry)
    command = [sys.executable, "-P", "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "-p", "localllm"]
    run = subprocess.run(command, cwd=joined, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr

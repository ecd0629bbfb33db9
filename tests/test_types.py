"""mypy over the tree as it ships: the five folders joined under one `localllm/` by links."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


FOLDERS = ("kernels", "quant", "models", "tui")


def test_types() -> None:
    # The joined tree stays where it is, below the ignored .cache, so that mypy's own cache stays valid between runs.
    # mypy keeps errors about modules that have appeared since, so another set of files gets another cache.
    joined = ROOT / ".cache/joined"
    package = joined / "localllm"
    package.mkdir(parents=True, exist_ok=True)
    wanted = {entry.name: entry for entry in [*(ROOT / "localllm").iterdir(), *(ROOT / name for name in FOLDERS)]}
    for link in package.iterdir():
        if link.name not in wanted:
            link.unlink()
    for name, entry in wanted.items():
        if not (package / name).is_symlink():
            (package / name).symlink_to(entry)
    names = sorted(str(p.relative_to(ROOT)) for folder in ("localllm", *FOLDERS) for p in (ROOT / folder).rglob("*.py"))
    cache = ROOT / ".cache" / f"mypy-{hashlib.sha256(repr(names).encode()).hexdigest()[:12]}"
    for old in cache.parent.glob("mypy-*"):
        if old != cache:
            shutil.rmtree(old, ignore_errors=True)
    command = [sys.executable, "-P", "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    command += ["--cache-dir", str(cache), "-p", "localllm"]
    run = subprocess.run(command, cwd=joined, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr

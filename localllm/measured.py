"""What the quality meter (`evaluate`) found about KV formats, for the planner: read from its files, without torch."""

from __future__ import annotations

import json
from pathlib import Path

from localllm import paths


def kl_by_kv(path: Path | str) -> dict[str, float]:
    """KV format -> mean KL of the model whose files lie at `path`, the newest result of each."""
    folder = paths.data_dir() / "quality"
    found: dict[str, float] = {}
    for file in sorted(folder.glob("*.json"), key=lambda p: -p.stat().st_mtime) if folder.is_dir() else ():
        try:
            row = json.loads(file.read_text())
            kv, cost = row["kv"], row["kl_mean"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if row.get("path") == str(path) and isinstance(kv, str) and isinstance(cost, int | float):
            found.setdefault(kv, float(cost))
    return found

"""What the quality meter (`evaluate`) found about KV formats, for the planner: read from its files, without torch."""

from __future__ import annotations

import json
from pathlib import Path

from localllm import paths


def kl_by_kv(path: Path | str) -> dict[str, float]:
    """KV format -> mean KL of the model whose files lie at `path`; of each format the newest result.

    Measured alike: of one kind of weights, over one text and against one reference, those of the newest of all.
    """
    folder = paths.data_dir() / "quality"
    found: dict[str, float] = {}
    alike: tuple[object, ...] | None = None
    for file in sorted(folder.glob("*.json"), key=lambda p: -p.stat().st_mtime) if folder.is_dir() else ():
        try:
            row = json.loads(file.read_text())
            kv, cost = row["kv"], row["kl_mean"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if row.get("path") != str(path) or not isinstance(kv, str) or not isinstance(cost, int | float):
            continue
        how = tuple(row.get(name) for name in ("weights", "text", "reference"))
        alike = alike or how
        if how == alike:
            found.setdefault(kv, float(cost))
    return found

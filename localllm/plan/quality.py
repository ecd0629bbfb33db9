"""Results that `localllm eval` saved on this machine, read without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from localllm import paths


def kl_by_kv(path: Path | str) -> dict[str, float]:
    """KV format -> mean KL of the model at `path`, from the newest result of each format.

    Only results with the same weights, text and reference as the newest one are compared.
    """
    found: dict[str, float] = {}
    alike: tuple[object, ...] | None = None
    for row in saved(path):
        if row["kl_mean"] is None or row.get("activations"):
            continue
        how = tuple(row.get(name) for name in ("weights", "text", "reference"))
        alike = alike or how
        if how == alike:
            found.setdefault(row["kv"], float(row["kl_mean"]))
    return found


def folder() -> Path:
    """The folder of saved results."""
    return paths.data_dir() / "quality"


def saved(path: Path | str = "") -> list[dict[str, Any]]:
    """Saved results, newest first; with `path`, only those of that model. Skips files that cannot be read."""
    rows = []
    for file in sorted(folder().glob("*.json"), key=lambda p: -p.stat().st_mtime) if folder().is_dir() else ():
        row = paths.read_json(file)
        if row.get("schema") == "localllm.quality/1" and (not path or row.get("path") == str(path)) and _sound(row):
            rows.append(row)
    return rows


def _sound(row: dict[str, Any]) -> bool:
    numbers = [row.get("kl_mean"), row.get("kl_p99")]
    whole = all(n is None for n in numbers) or all(isinstance(n, (int, float)) and abs(n) < 1e9 for n in numbers)
    return isinstance(row.get("kv"), str) and whole


def measured(path: Path | str, kv: str = "", weights: str = "", activations: str = "") -> dict[str, Any] | None:
    """The newest result against a reference for the model at `path`, with these quantized activations ("": none).

    `kv` and `weights` restrict the result if given.
    """
    rows = (r for r in saved(path) if r["kl_mean"] is not None and (r.get("activations") or "") == activations)
    return next((r for r in rows if kv in ("", r["kv"]) and weights in ("", r.get("weights"))), None)


def rounding_words(path: Path | str, device: str, dtype: str, rounded: str) -> str:
    """Activations in words for the run summary: dtype, quantization of long prompts ("": none) and its cost."""
    if not rounded:
        return f"{dtype} activations"
    row = measured(path, activations=rounded)
    cost = f"mean KL {row['kl_mean']:.4f}" if row else "KL not measured"
    if device == "cpu":
        return f"{rounded} activations ({cost})"
    return f"{dtype} activations, long prompts {rounded} ({cost})"


def note(path: Path | str, kv: str = "", weights: str = "") -> str:
    """'KL 0.0001, p99 0.001 (KV bf16)' from the result that `measured` finds, else ""."""
    row = measured(path, kv, weights)
    return f"KL {row['kl_mean']:.5f}, p99 {row['kl_p99']:.4f} (KV {row['kv']})" if row else ""

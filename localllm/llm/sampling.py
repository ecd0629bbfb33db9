"""How a model is sampled when nobody says otherwise: its files' values, its vendor's, else those of this program."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.request import RANGES

if TYPE_CHECKING:
    from localllm.models.architectures import ModelFacts

USUAL: Mapping[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
CUTS = ("top_k", "top_p", "min_p")

Recommended = dict[str, tuple[Any, str]]  # name of a parameter -> its value, and who says so


def recommended(facts: ModelFacts, path: Path) -> Recommended:
    """The sampling of a model whose files lie at `path`.

    A file's value wins over the vendor's. The cuts belong together: one that is stated leaves those that are not off.
    """
    place = "generation_config.json" if path.is_dir() else "GGUF metadata"
    found: Recommended = {key: (value, place) for key, value in facts.sampling_defaults.items()}
    vendor = dict(_vendor(facts.name, path))
    why = str(vendor.pop("why", "")) + ("" if vendor.get("verified", True) else ", not checked")
    found = {key: (value, why) for key, value in vendor.items()} | found
    found = {key: said for key, said in found.items() if key in RANGES and said[0] in RANGES[key]}
    has_cuts = any(cut in found for cut in CUTS)
    usual = {key: (value, "default") for key, value in USUAL.items() if not (has_cuts and key in CUTS)}
    return dict(sorted((usual | found).items(), key=lambda item: _ORDER.index(item[0])))


_ORDER = list(RANGES)


def _vendor(name: str, path: Path) -> Mapping[str, Any]:
    """The row of a model: by what its file calls it, by its file or folder, by the repository of the hub's cache."""
    repos = [part.removeprefix("models--") for part in path.parts if part.startswith("models--")]
    names = [re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") for text in (*repos, path.stem, name)]
    for row in _rows():
        if any(re.search(row["match"], one) for one in names):
            return {key: value for key, value in row.items() if key != "match"}
    return {}


@functools.cache
def _rows() -> list[dict[str, Any]]:
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = tomllib.loads(text)["model"]
    return rows

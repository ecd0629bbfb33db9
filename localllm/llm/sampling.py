"""Default sampling parameters: from the model's files, else from the vendor's model card, else built in."""

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

Recommended = dict[str, tuple[Any, str]]  # parameter name -> (value, source)


def recommended(facts: ModelFacts, path: Path) -> Recommended:
    """Return the default sampling parameters of the model at `path`.

    A value in the files overrides the vendor's. If any of top_k, top_p and min_p is recommended, the built-in defaults
    of the other two do not apply.
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
    """Find a model's row by its hub repository, its file or folder name, or the name in its metadata."""
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

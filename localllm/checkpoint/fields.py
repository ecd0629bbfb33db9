"""Typed, range-checked access to a model's hyperparameters, with all limits and their errors in one place."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from localllm.errors import BadModelFile, UnsupportedModel

from .mapped_file import bad, shown

MAX_LAYERS = 1000
MAX_HIDDEN = 1 << 20
MAX_HEADS = 4096
MAX_EXPERTS = 4096
MAX_HEAD_DIM = 4096
MAX_VOCAB = 1 << 24
MAX_CONTEXT = 1 << 27
MAX_CONV = 64  # kernel size of a convolution, in positions


class Fields:
    """The values of a metadata dict, read by key with type and range checks. `path` names the file in errors."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        """Keys are looked up as `prefix + key`."""
        self.path = path
        self.values = values
        self.prefix = prefix

    def raw(self, key: str) -> Any:
        """The value, or None when it is absent or null."""
        return self.values.get(self.prefix + key)

    def fail(self, key: str, what: str) -> BadModelFile:
        return bad(self.path, what, key=self.prefix + key)

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An integer in [low, high]; a per-layer array is accepted if all its entries are equal."""
        value = self.raw(key)
        if isinstance(value, np.ndarray):
            value = self._same_everywhere(key, value)
        value = self._typed(key, value, default, (int,), "an integer")
        if self.raw(key) is not None and not low <= value <= high:
            raise self.fail(key, f"must be {low:,} to {high:,}, not {shown(f'{value:,}', 40)}")
        return int(value)

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number in [low, high]."""
        value = self._typed(key, self.raw(key), default, (int, float), "a number")
        if self.raw(key) is not None and not low <= value <= high:  # False for NaN
            raise self.fail(key, f"must be {low:g} to {high:g}, not {shown(value, 40)}")
        return float(value)

    def optional_number(self, key: str, low: float, high: float) -> float | None:
        return None if self.raw(key) is None else self.number(key, low, high)

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self._typed(key, self.raw(key), default, (bool,), "true or false"))

    def text(self, key: str, default: str = "") -> str:
        return str(self._typed(key, self.raw(key), default, (str,), "text"))

    def _typed(self, key: str, value: Any, default: Any, kinds: tuple[type, ...], what: str) -> Any:
        """Return `value`, or the default if it is None; without a default, the key is required."""
        if value is None:
            if default is None:
                raise self.fail(key, "is missing")
            return default
        if type(value) not in kinds:
            raise self.fail(key, f"must be {what}, not {shown(reprlib.repr(value))}")
        return value

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """One token id, or a list of them, each below `vocab_size`; () when absent."""
        value = self.raw(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        for item in ids:
            if type(item) is not int or not 0 <= item < vocab_size:
                raise self.fail(key, f"token id {shown(reprlib.repr(item))} is not in the vocabulary of {vocab_size:,}")
        return tuple(ids)

    def _same_everywhere(self, key: str, values: np.ndarray) -> int:
        if values.dtype.kind not in "iu" or len(values) == 0:
            raise self.fail(key, f"is an array of {len(values):,} {values.dtype}; it must hold integers")
        if (values != values[0]).any():
            what = f"differs from layer to layer ({int(values.min()):,} to {int(values.max()):,})"
            hint = "this version cannot run models whose layers have different sizes"
            raise bad(self.path, what, key=self.prefix + key, hint=hint, error=UnsupportedModel)
        return int(values[0])

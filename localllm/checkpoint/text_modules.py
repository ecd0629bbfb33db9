"""Reads the sentence-transformers files of an embedding model: modules.json and the folders it names.

Token vectors are pooled, then pass through dense layers; normalization is always available, so it is ignored here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.errors import UnsupportedModel

from .fields import MAX_HIDDEN, Fields
from .json_file import parse_json_object, read_json_object
from .mapped_file import bad, read_small, shown

MODULES_NAME = "modules.json"
MAX_BYTES, MAX_VALUES = 1 << 16, 1000  # limits for modules.json
_POOLING = "pooling_mode_"
# name in Pooling's config.json, as a flag or as `pooling_mode` -> our name
_POOLINGS = {
    "cls_token": "cls", "cls": "cls", "mean_tokens": "mean", "mean": "mean", "lasttoken": "last", "last": "last",
}  # fmt: skip
_ACTIVATIONS = {"Identity": "", "Tanh": "tanh"}


@dataclass(frozen=True)
class Projection:
    """A dense layer after pooling."""

    name: str  # its module name: `2_Dense.linear` is in the folder 2_Dense
    inputs: int
    outputs: int
    bias: bool = False
    activation: str = ""  # "" | tanh


@dataclass(frozen=True)
class TextModules:
    """How token vectors are combined into one."""

    pooling: str = ""  # mean | cls | last; "" when no file states it
    projections: tuple[Projection, ...] = ()


def read_text_modules(path: Path, find: Callable[[str], Path]) -> TextModules:
    """Read modules.json at `path` and the files it names. Raises UnsupportedModel for unsupported modules.

    find   returns the path of a file in the model's folder
    """
    data = b'{"modules": ' + read_small(path, MAX_BYTES) + b"}"
    listed = parse_json_object(path, data, MAX_VALUES)["modules"]
    if not isinstance(listed, list):
        raise bad(path, "must list modules")
    pooling, projections = "", []
    for entry in listed:
        fields = Fields(path, entry if isinstance(entry, dict) else {})
        kind, name = fields.text("type").rpartition(".")[2], fields.text("path")
        if kind in ("Transformer", "Normalize"):
            continue
        if kind not in ("Pooling", "Dense") or (kind == "Dense" and not pooling):
            raise _unsupported(fields, f"the module {shown(kind) or '(unnamed)'} of sentence-transformers")
        if not name.replace("_", "").isalnum() or not name.isascii():
            raise fields.fail("path", f"'{shown(name)}' is not the name of a folder")
        at = find(f"{name}/config.json")
        config = Fields(at, read_json_object(at))
        if kind == "Pooling":
            pooling = _pooling(config)
        else:
            projections.append(_projection(name, config))
    return TextModules(pooling, tuple(projections))


def _pooling(config: Fields) -> str:
    stated = config.raw("pooling_mode")
    modes = [stated] if isinstance(stated, str) else []
    modes = modes or [key.removeprefix(_POOLING) for key, on in config.values.items() if _is_mode(key, on)]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise _unsupported(config, f"pooling by {shown(' and '.join(modes)) or 'nothing'}")
    return _POOLINGS[modes[0]]


def _is_mode(key: str, on: Any) -> bool:
    return key.startswith(_POOLING) and on is True


def _projection(name: str, config: Fields) -> Projection:
    activation = config.text("activation_function", "Tanh").rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise _unsupported(config, f"a dense layer with {shown(activation)}")
    inputs, outputs = (config.integer(f"{end}_features", 1, MAX_HIDDEN) for end in ("in", "out"))
    return Projection(f"{name}.linear", inputs, outputs, config.flag("bias", True), _ACTIVATIONS[activation])


def _unsupported(fields: Fields, what: str) -> UnsupportedModel:
    hint = "choose a model with mean, cls or lasttoken pooling"
    return bad(fields.path, f"{what} is not supported by this version", hint=hint, error=UnsupportedModel)

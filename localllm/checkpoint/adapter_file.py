"""Opens a LoRA adapter in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors.

Names and shapes are checked before any values are read. Anything beyond low-rank updates of linear modules is rejected
with an error that names the key or tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from localllm.errors import REPAIR, ModelNotFound, UnsupportedFormat

from .fields import Fields
from .json_file import read_json_object
from .mapped_file import MappedFile, TensorInfo, bad, pickle_error, shown
from .opening import inside
from .safetensors_file import read_safetensors

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_RANK = 4096
MOST_RESIDENT = 8  # loaded adapters in memory at a time: `kernels.adapters.MOST_ADAPTERS`
MAX_MODULES = 1 << 15
HINT = "train or export an adapter of linear modules only, with PEFT's LoraConfig"
_TENSOR = re.compile(r"base_model\.model\.(.+?)\.(lora_A|lora_B|lora_magnitude_vector)(?:\.default)?(?:\.weight)?")
_LITERAL = re.compile(r"\^?[\w.]{1,512}\$?")
_WIDTHS = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
# keys of the configuration that are used or do not affect the stored weights
_KNOWN = frozenset(
    (
        *("peft_type", "task_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision"),
        *("inference_mode", "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "bias"),
        *("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "init_lora_weights", "layers_to_transform"),
        *("layers_pattern", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("runtime_config", "qalora_group_size"),
    )
)
# settings that change the vocabulary or the base weights -> the reason for rejecting them
_REFUSED = {
    "modules_to_save": "whole modules are replaced",
    "trainable_token_indices": "the vocabulary is changed",
    "layer_replication": "layers are repeated",
    "target_parameters": "parameters other than linear modules are changed",
    "alora_invocation_tokens": "the adapter starts in the middle of a prompt",
    "lora_bias": "biases are changed",
    "fan_in_fan_out": "weights are stored transposed",
}
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # these change the base weights before training


@dataclass(frozen=True, slots=True)
class StoredUpdate:
    """The tensors of one module: weight += scale · up · down, and DoRA's magnitudes of its rows."""

    module: str  # its name in transformers
    down: TensorInfo  # [rank, K]
    up: TensorInfo  # [N, rank]
    magnitude: TensorInfo | None
    scale: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter on disk; checked, with no values read yet."""

    path: Path
    base: str  # the base model named in its configuration; only for messages
    updates: tuple[StoredUpdate, ...]
    file: MappedFile

    @property
    def rank(self) -> int:
        """The largest rank of its modules."""
        return max(update.rank for update in self.updates)

    @property
    def nbytes(self) -> int:
        """Size of its updates in float32."""
        tensors = (t for one in self.updates for t in (one.down, one.up, one.magnitude) if t is not None)
        return sum(4 * math.prod(tensor.shape) for tensor in tensors)

    def read(self, tensor: TensorInfo) -> np.ndarray:
        """Read a tensor as float32. Raises BadModelFile for values that are not finite, and for a truncated file."""
        stored = np.frombuffer(self.file.read(tensor.offset, tensor.nbytes), dtype=_WIDTHS[tensor.dtype])
        if tensor.dtype == "BF16":
            values = (stored.astype(np.uint32) << 16).view(np.float32)
        else:
            values = stored.astype(np.float32)
        if not np.isfinite(values).all():
            raise bad(self.file.path, "holds values that are not finite", key=tensor.name)
        return values.reshape(tensor.shape)


def open_adapter(path: Path | str) -> AdapterFile:
    """Open the adapter in the folder `path`.

    Raises ModelNotFound when there is none, UnsupportedFormat for an unsupported kind, BadModelFile for damage.
    """
    folder = Path(path).expanduser()
    if "\0" in str(folder) or not folder.is_dir() or not (folder / CONFIG_NAME).exists():
        raise ModelNotFound(
            f"{shown(folder, 300)} holds no adapter ({CONFIG_NAME})", f"give a folder with {CONFIG_NAME}"
        )
    config = Fields(folder / CONFIG_NAME, read_json_object(inside(folder, CONFIG_NAME), MAX_CONFIG_BYTES))
    _check(config)
    if not (folder / WEIGHTS_NAME).exists():
        if (folder / "adapter_model.bin").exists():
            raise pickle_error(folder / "adapter_model.bin")
        raise bad(folder, "is missing", key=WEIGHTS_NAME)
    file = MappedFile(inside(folder, WEIGHTS_NAME))
    updates = tuple(_updates(config, file.path, read_safetensors(file)))
    file.close()  # values are read later without the mapping
    return AdapterFile(folder, shown(config.text("base_model_name_or_path"), 200), updates, file)


def _check(config: Fields) -> None:
    kind = config.text("peft_type", "LORA")
    if kind.upper() != "LORA":
        raise _refused(config, "peft_type", f"is {shown(kind, 40)}; only LORA is supported")
    for key, what in _REFUSED.items():
        if config.raw(key):
            raise _refused(config, key, f"{what}: {shown(config.raw(key))}")
    if config.text("bias", "none") != "none":
        raise _refused(config, "bias", f"is {shown(config.raw('bias'), 40)}: biases are changed")
    start = config.raw("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        what = f"is {shown(start, 40)}: the base weights were changed before training"
        raise bad(config.path, what, key="init_lora_weights", hint="convert it with PEFT's save_pretrained("
                  "path_initial_model_for_weight_conversion=...)", error=UnsupportedFormat)  # fmt: skip
    unknown = next((key for key, value in config.values.items() if key not in _KNOWN and value), None)
    if unknown is not None:
        raise _refused(config, unknown, f"is {shown(config.raw(unknown))}, which this version does not support")


def _refused(config: Fields, key: str, what: str) -> UnsupportedFormat:
    return bad(config.path, what, key=key, hint=HINT, error=UnsupportedFormat)


def _updates(config: Fields, path: Path, tensors: Mapping[str, TensorInfo]) -> Iterator[StoredUpdate]:
    found: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            changes = "the vocabulary" if "embed" in name or "lm_head" in name else "more than linear modules"
            what = f"is neither lora_A nor lora_B of a module: the adapter changes {changes}"
            raise bad(path, what, key=name, hint=HINT, error=UnsupportedFormat)
        if match[2] in found.setdefault(match[1], {}):
            raise bad(path, "appears twice", key=name)
        if info.dtype not in _WIDTHS:
            raise bad(path, f"is stored as {info.dtype}, expected one of {', '.join(_WIDTHS)}", key=name)
        found[match[1]][match[2]] = info
    if not found or len(found) > MAX_MODULES:
        raise bad(path, f"changes {len(found):,} modules, expected 1 to {MAX_MODULES:,}")
    default = config.integer("r", 1, MAX_RANK)
    alpha, is_dora = config.number("lora_alpha", 0.0, 1e6, 8.0), config.flag("use_dora")
    ranks, alphas = (_pattern(config, key) for key in ("rank_pattern", "alpha_pattern"))
    for module, parts in found.items():
        down, up, magnitude = (parts.get(f"lora_{name}") for name in ("A", "B", "magnitude_vector"))
        if down is None or up is None:
            raise bad(path, f"lora_{'A' if down is None else 'B'} is missing", key=module)
        rank = _match(ranks, module, default)
        _check_shapes(path, down, up, rank)
        if is_dora is not (magnitude is not None):
            raise bad(path, f"use_dora is {str(is_dora).lower()}; the magnitudes contradict it", key=module)
        if magnitude is not None and math.prod(magnitude.shape) != up.shape[0]:
            what = f"has shape {list(magnitude.shape)}, expected {up.shape[0]:,} values"
            raise bad(path, what, key=magnitude.name)
        over = math.sqrt(rank) if config.flag("use_rslora") else rank
        yield StoredUpdate(module, down, up, magnitude, _match(alphas, module, alpha) / over)


def _check_shapes(path: Path, down: TensorInfo, up: TensorInfo, rank: float) -> None:
    for tensor, axis in ((down, 0), (up, 1)):
        if len(tensor.shape) != 2:
            raise bad(path, f"has shape {list(tensor.shape)}, expected a matrix", key=tensor.name,
                      hint="adapters of convolutions and stacked experts are not supported",
                      error=UnsupportedFormat)  # fmt: skip
        if tensor.shape[axis] != rank:
            raise bad(path, f"has shape {list(tensor.shape)}; its rank must be {rank:g}", key=tensor.name, hint=REPAIR)


def _pattern(config: Fields, key: str) -> dict[str, float]:
    """Read a map from module names, or their suffixes, to numbers; PEFT would also accept regular expressions."""
    values = config.raw(key) or {}
    if not isinstance(values, dict):
        raise config.fail(key, "must be an object of numbers")
    checked = Fields(config.path, values)
    for name in values:
        if not _LITERAL.fullmatch(name):
            raise _refused(config, key, f"{shown(name)} is a regular expression; only plain module names are supported")
    if key == "rank_pattern":
        return {name: checked.integer(name, 1, MAX_RANK) for name in values}
    return {name: checked.number(name, 0.0, 1e6) for name in values}


def _match(pattern: Mapping[str, float], module: str, default: float) -> float:
    """The number of the first name equal to the module's name or to its suffix after a dot; `^` anchors the start."""
    for name, value in pattern.items():
        plain = name.removeprefix("^").removesuffix("$")
        if module == plain or (not name.startswith("^") and module.endswith(f".{plain}")):
            return value
    return default

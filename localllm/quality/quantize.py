"""`quantize`: converts a dense checkpoint to one with quantized linear layers, in a folder that other tools can read.

Works layer by layer, writes shards, and continues where an earlier run stopped. The source is never changed.
Embeddings, norms, biases, the vocabulary projection, and layers that are too small or have an odd shape stay as stored.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors.torch import save_file
from torch import Tensor

from localllm import paths
from localllm.errors import Aborted, BadModelFile, ConfigError, DoesNotFit, InternalError, UnsupportedFormat
from localllm.hub.local_model import QUANTIZED
from localllm.models.architectures import OpenModel, open_model
from localllm.models.architectures.facts import linear_shapes
from localllm.models.architectures.layers import STAY_STORED
from localllm.models.calibration import hessians
from localllm.quant import dequantize
from localllm.quant.encode import Target, encode, relative_error
from localllm.quant.export import configuration
from localllm.quant.export import tensors as stored_tensors
from localllm.quant.stored import read_tensor
from localllm.request import LoadProgress, OnProgress
from localllm.terminal import gib

# a shard is written after the layer with which it holds this much, or which ends this long after the last shard: an
# interruption loses no more than that and one layer
SHARD_BYTES, SHARD_S = 1 << 30, 120.0
# modules of one parent that vLLM or SGLang fuse into a matmul with one per-tensor scale: in NVFP4 they must share it
FUSED = (
    ("q_proj", "k_proj", "v_proj", "g_proj"),  # g_proj: output gates of OLMo Hybrid
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
    ("gate_proj", "up_proj"),  # also those of an expert
)


@dataclass(slots=True)
class Report:
    """Result of a quantization."""

    path: Path
    target: str
    group_size: int
    bytes_before: int  # size of the tensors
    bytes_after: int = 0
    quantised: int = 0  # number of modules
    kept: list[tuple[str, str]] = field(default_factory=list)  # (module, why it was not quantized)
    # module -> relative error of its weight, or, with calibration, of its output on that text
    errors: dict[str, float] = field(default_factory=dict)
    calibration_tokens: int = 0
    seconds: float = 0.0

    @property
    def mean_error(self) -> float:
        return sum(self.errors.values()) / max(1, len(self.errors))

    @property
    def worst(self) -> tuple[str, float]:
        return max(self.errors.items(), key=lambda item: item[1], default=("", 0.0))


def quantize(
    source: Path,
    out: Path,
    target: Target,
    *,
    calibration: Sequence[Sequence[int]] = (),
    device: str = "cpu",
    tell: OnProgress = lambda phase: None,
    cancel: threading.Event | None = None,
) -> Report:
    """Quantize `source` into the new folder `out`. Running it again after an interruption continues.

    source       folder with safetensors whose linear layers are BF16, F16 or F32
    calibration  sequences of token ids; rounding errors are then compensated according to their activations
    tell         gets `LoadProgress("quantize", bytes done, total bytes, detail=layer)`

    Raises UnsupportedFormat for GGUF and for weights that are already quantized, ConfigError if `out` exists,
    DoesNotFit if the disk is too small, Aborted when `cancel` is set, and whatever opening the source raises.
    """
    began = time.monotonic()
    if out.exists():
        raise ConfigError(f"{out} already exists", "choose another folder with -o, or remove it")
    with open_model(source, mmproj="off") as checkpoint:
        work = _Work(checkpoint, out, target, calibration, device, tell, cancel or threading.Event())
        work.check_disk()
        work.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(work.folder.with_name(work.folder.name + ".lock"))
        try:
            with lock.acquire(timeout=0):
                try:
                    work.run()
                    work.report.seconds = time.monotonic() - began
                    work.finish()
                finally:  # only the holder may remove the file: otherwise a third process could lock a new one
                    Path(lock.lock_file).unlink(missing_ok=True)
        except Timeout:
            raise ConfigError(f"another process is writing {out}", "wait for it, or choose another folder") from None
    return work.report


def fused_modules(modules: Iterable[str]) -> list[list[str]]:
    """Group the modules of a layer by the matmul that other engines compute them in."""
    whole = {part: together for together in FUSED for part in together}
    groups: dict[tuple[str, object], list[str]] = {}
    for module in modules:
        parent, _, part = module.rpartition(".")
        groups.setdefault((parent, whole.get(part, part)), []).append(module)
    return list(groups.values())


@dataclass
class _Work:
    """One run: how each tensor is stored, and which shards are done."""

    checkpoint: OpenModel
    out: Path
    target: Target
    calibration: Sequence[Sequence[int]]
    device: str
    tell: OnProgress
    cancel: threading.Event

    def __post_init__(self) -> None:
        self.folder = self.out.with_name(f".{self.out.name}.partial")
        self.report = Report(self.out, self.target.name, self.target.group_size, self.checkpoint.nbytes)
        self.report.calibration_tokens = sum(map(len, self.calibration))
        self.modules = self._modules()
        self.done = 0

    def _modules(self) -> list[dict[str, str]]:
        """Per layer: module under `model.layers.{i}.` -> its name in the file, for the modules to quantize."""
        path = self.checkpoint.path.name
        if self.checkpoint.kind != "safetensors":
            raise UnsupportedFormat(
                f"{path} is a GGUF file; only safetensors can be quantized",
                "name the model's BF16 repository, or make another GGUF with llama-quantize",
            )
        layers: list[dict[str, str]] = []
        for index, facts in enumerate(self.checkpoint.facts.stored_layers):
            layer = {}
            for module, shape in linear_shapes(facts, self.checkpoint.facts.hidden_size).items():
                name = self.checkpoint.names.source(f"model.layers.{index}.{module}")
                found = self.checkpoint.formats.get(name)
                if found is not None and found.kind != "dense":
                    raise UnsupportedFormat(
                        f"{path} is quantized already: {name} is stored as {found.label}",
                        "quantize the BF16 version of this model",
                    )
                if f"{name}.weight" not in self.checkpoint.tensors:
                    continue
                why = STAY_STORED.get(module) or self.target.fits(*shape)
                if why is None:
                    layer[module] = name
                elif index == 0:
                    self.report.kept.append((module, why))
            layers.append(layer)
        if not any(layers):
            reasons = "; ".join(f"{module}: {why}" for module, why in self.report.kept[:3])
            raise UnsupportedFormat(
                f"no layer of {path} can be quantized to {self.target.name} ({reasons})",
                "choose another format with --to",
            )
        return layers

    def check_disk(self) -> None:
        done = sum(f.stat().st_size for f in self.folder.glob("*.safetensors"))
        needed = int((self.expected_bytes() - done) * 1.02)
        folder = next(parent for parent in (self.out, *self.out.parents) if parent.exists())
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise DoesNotFit(
                f"the result needs {gib(needed)}, but {folder} has {gib(free)} free",
                "choose a folder on another disk with -o, or free space with localllm rm",
                context={"need_bytes": needed, "free_bytes": free},
            )

    def expected_bytes(self) -> int:
        tensors = self.checkpoint.tensors
        bits = {"int4": 4.7, "int4-sym": 4.6, "nvfp4": 4.6, "mxfp4": 4.3}.get(self.target.name, 8.2)
        names = [f"{name}.weight" for layer in self.modules for name in layer.values()]
        dense = sum(tensors[name].nbytes for name in names)
        elements = sum(tensors[name].shape[0] * tensors[name].shape[1] for name in names)
        return self.checkpoint.nbytes - dense + int(elements * bits / 8)

    # --- the work ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Write every missing shard: first the tensors that stay as stored, then each layer."""
        state = self._state()
        last = max((row["parts"] for row in state["shards"]), default=-1)
        seen: Iterator[dict[str, Tensor]] = iter(())
        if self.calibration and last < len(self.modules):
            self.tell(LoadProgress("calibrate", detail=f"{self.report.calibration_tokens:,} tokens"))
            seen = hessians(self.checkpoint, self.calibration, self.device)
        tensors: dict[str, Tensor] = {}
        errors: dict[str, float] = {}
        written = time.monotonic()
        for index in range(len(self.modules) + 1):
            self._stop_if_asked()
            layer_hessians = next(seen, {}) if index else {}
            if index <= last:  # its shard was written by an earlier run
                self._count(self._stored(index), "")
                continue
            part, part_errors = self._layer(index - 1, layer_hessians) if index else (self._kept_tensors(state), {})
            tensors |= part
            errors |= part_errors
            full = sum(t.nbytes for t in tensors.values()) >= SHARD_BYTES or time.monotonic() - written >= SHARD_S
            if full or index == len(self.modules):
                self._add(state, tensors, index, errors)
                tensors, errors, written = {}, {}, time.monotonic()
        for row in state["shards"]:
            self.report.errors |= row["errors"]
        self.report.quantised = len(self.report.errors)

    def _stored(self, index: int) -> list[str]:
        """The stored tensors of a part: part 0 is all that stays as stored, the others are each layer's weights."""
        if index:
            return [f"{name}.weight" for name in self.modules[index - 1].values()]
        inside = {f"{name}.weight" for layer in self.modules for name in layer.values()}
        return [name for name in self.checkpoint.tensors if name not in inside]

    def _add(self, state: dict[str, Any], tensors: dict[str, Tensor], parts: int, errors: dict[str, float]) -> None:
        """Write a shard. `parts` is the last part that is complete with it."""
        name = f"shard-{len(state['shards']):05d}.safetensors"
        self._save(name, tensors)
        state["shards"].append({"file": name, "tensors": sorted(tensors), "parts": parts, "errors": errors})
        self._write("state.json", json.dumps(state))

    def _kept_tensors(self, state: dict[str, Any]) -> dict[str, Tensor]:
        """The tensors that stay as stored, without those in shards: with an n-gram table they exceed the memory."""
        written = {name for row in state["shards"] for name in row["tensors"]}
        kept: dict[str, Tensor] = {}
        for name in self._stored(0):
            self._stop_if_asked()
            if name not in written:
                nbytes = self.checkpoint.tensors[name].nbytes
                if kept and nbytes + sum(t.nbytes for t in kept.values()) > SHARD_BYTES:
                    self._add(state, kept, -1, {})
                    kept = {}
                kept[name] = read_tensor(self.checkpoint, name)
            self._count([name], "embeddings and norms")
        return kept

    def _layer(self, index: int, layer_hessians: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Quantize a layer; returns (tensors, error per module)."""
        layer = self.modules[index]
        tensors: dict[str, Tensor] = {}
        errors: dict[str, float] = {}
        amax = self._fused_amax(layer) if self.target.name == "nvfp4" else {}
        for module, name in layer.items():
            self._stop_if_asked()
            stored = read_tensor(self.checkpoint, f"{name}.weight")
            # scales keep the checkpoint's dtype, in which other programs load them
            dtype = stored.dtype if stored.dtype in (torch.bfloat16, torch.float16) else torch.float32
            target = replace(self.target, scale_dtype=dtype)
            values = stored.to(self.device).float()
            hessian = layer_hessians.get(module)
            try:
                weight = encode(values, target, amax=amax.get(module), hessian=hessian)
            except ValueError as error:
                raise BadModelFile(f"{self.checkpoint.path.name}: {name}: {error}") from error
            errors[name] = _error(values, weight, hessian)
            if not math.isfinite(errors[name]):
                raise InternalError(
                    f"{name} has non-finite values as {self.target.name}", "try --calib none, and report this"
                )
            tensors |= {f"{name}.{suffix}": t.cpu().contiguous() for suffix, t in stored_tensors(weight).items()}
            self._count([f"{name}.weight"], f"layer {index + 1}/{len(self.modules)}")
        return tensors, errors

    def _fused_amax(self, layer: dict[str, str]) -> dict[str, float]:
        """Per module, the largest absolute value over all modules that are fused with it."""
        found = {m: float(read_tensor(self.checkpoint, f"{n}.weight").abs().max()) for m, n in layer.items()}
        for members in fused_modules(layer):
            found |= dict.fromkeys(members, max(found[module] for module in members))
        return found

    # --- disk --------------------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        """Load the shards of an earlier run with the same source and options; otherwise start with none."""
        files = sorted({info.file for info in self.checkpoint.tensors.values()})
        stats = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
        asked = [self.target.name, self.target.group_size, [list(ids) for ids in self.calibration]]
        identity = hashlib.sha256(json.dumps([stats, asked]).encode()).hexdigest()
        state = paths.read_json(self.folder / "state.json", 64 << 20)
        kept = state.get("identity") == identity
        for row, last in _final_names(state) if kept else ():
            # a shard has its first name or, after an interrupted `finish`, its final one
            kept &= any((self.folder / name).is_file() for name in (row["file"], last))
        if not kept:
            for old in self.folder.iterdir():
                old.unlink()
            return {"identity": identity, "shards": []}
        return state

    def _write(self, name: str, text: str) -> None:
        with _disk(self.folder):
            paths.replace_file(self.folder / name, text, sync=True)

    def _save(self, name: str, tensors: dict[str, Tensor]) -> None:
        partial = self.folder / f"{name}.part"
        with _disk(self.folder):
            partial.unlink(missing_ok=True)
            partial.touch()
            mode = partial.stat().st_mode  # the user's default mode: safetensors makes files private
            save_file({key: t.contiguous() for key, t in tensors.items()}, partial, metadata={"format": "pt"})
            partial.chmod(mode)
            with partial.open("rb") as file:
                os.fsync(file.fileno())
        partial.replace(self.folder / name)

    def finish(self) -> None:
        """Give the shards their final names, write configuration and index, and move the folder into place."""
        weight_map: dict[str, str] = {}
        for row, name in _final_names(self._state()):
            if (self.folder / row["file"]).is_file():
                (self.folder / row["file"]).replace(self.folder / name)
            weight_map |= dict.fromkeys(row["tensors"], name)
            self.report.bytes_after += (self.folder / name).stat().st_size
        if len(set(weight_map.values())) > 1:
            index = {"metadata": {"total_size": self.report.bytes_after}, "weight_map": weight_map}
            self._write("model.safetensors.index.json", json.dumps(index, indent=2))
        kept = [name for name in self._stored(0) if name.endswith(".weight") and "embed" not in name]
        matrices = [name for name in kept if len(self.checkpoint.tensors[name].shape) == 2]
        ignored = sorted(name.removesuffix(".weight") for name in matrices)
        head = self.checkpoint.names.source("lm_head")
        if self.checkpoint.facts.tied_embeddings and head not in ignored:
            ignored.append(head)
        config = dict(self.checkpoint.config) | {"quantization_config": configuration(self.target, ignored)}
        for name, path in self._companions():
            with _disk(self.folder):
                shutil.copyfile(path, self.folder / name)
        record = asdict(self.report) | {"path": str(self.out), "source": str(self.checkpoint.path)}
        self._write(QUANTIZED, json.dumps(record, indent=2))
        self._write("config.json", json.dumps(config, indent=2))
        (self.folder / "state.json").unlink()
        for left in self.folder.glob("*.part"):  # left by a process that was killed
            left.unlink()
        self.folder.replace(self.out)

    def _companions(self) -> list[tuple[str, Path]]:
        """Files to copy: tokenizer, templates, generation settings and licenses, by name."""
        found = dict(self.checkpoint.tokenizer_files)
        root = self.checkpoint.path if self.checkpoint.path.is_dir() else self.checkpoint.path.parent
        for path in root.iterdir():
            if path.is_file() and (path.name == "generation_config.json" or path.name.upper().startswith("LICENSE")):
                found[path.name] = path
        return sorted(found.items())

    # --- progress and cancellation -----------------------------------------------------------------------------------

    def _count(self, tensors: Sequence[str], detail: str) -> None:
        self.done += sum(self.checkpoint.tensors[name].nbytes for name in tensors)
        self.tell(LoadProgress("quantize", self.done, self.checkpoint.nbytes, detail))

    def _stop_if_asked(self) -> None:
        if self.cancel.is_set():
            raise Aborted("stopped; finished shards are kept", "run the same command again to continue")


def _final_names(state: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Each shard's row, and the final name of its file."""
    count = len(state["shards"])
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    return list(zip(state["shards"], names if count > 1 else ["model.safetensors"], strict=False))


@contextmanager
def _disk(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if "No space left" not in str(error):  # safetensors wraps the OSError in its own type
            raise
        raise DoesNotFit(
            f"no space left for {folder}", "free space with localllm rm, then run the same command again"
        ) from error


def _error(values: Tensor, weight: Any, hessian: Tensor | None) -> float:
    decoded = dequantize(weight)
    if hessian is None:
        return relative_error(values, decoded)
    lost = decoded - values
    total = float(((values @ hessian) * values).sum())
    return max(0.0, float(((lost @ hessian) * lost).sum()) / max(total, 1e-30)) ** 0.5


def calibration_ids(ids: Sequence[int], num_tokens: int, length: int = 512) -> list[list[int]]:
    """Split the first `num_tokens` of a text's ids into sequences of at most `length`."""
    kept = list(ids[:num_tokens])
    return [kept[at : at + length] for at in range(0, len(kept), length)]

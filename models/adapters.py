"""`Adapters`: slots for LoRA adapters on a model's linear layers, and loading an adapter file into one.

Adapter files use Transformers' module names. In a fused product, each module's update applies to that module's output
rows, in the row order of the model file.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from localllm.checkpoint.adapter_file import AdapterFile, StoredUpdate, open_adapter
from localllm.checkpoint.mapped_file import bad
from localllm.errors import BadModelFile, UnsupportedFormat
from localllm.kernels.adapters import AdapterRows, Additions, LowRank
from localllm.kernels.layer_weights import (
    AttentionWeights,
    ExpertsWeights,
    LayerCall,
    Linear,
    MlpWeights,
    Module,
)
from localllm.kernels.table import additions

_MODULE = re.compile(r"(.*?)layers\.(\d{1,6})\.([\w.]+)")
_TEXT = (
    "model.",
    "",
    "language_model.model.",
    "model.language_model.",
    "backbone.",
)  # prefixes of the text model's modules
_COLUMNS = 256  # weight columns processed at a time when computing row norms for DoRA


@dataclass(frozen=True, slots=True)
class _Target:
    """The rows of a product that a module makes up."""

    linear: tuple[int, str, str]  # (layer number, "mixer" or "ffn", field of the product)
    first: int
    module: Module
    inputs: int


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """The low-rank updates of an adapter, by product."""

    pieces: Mapping[tuple[int, str, str], tuple[LowRank, ...]]
    digest: str  # of everything that affects the output

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for pieces in self.pieces.values() for piece in pieces)


class Adapters:
    """The adapter slots of one model; `calls` are its layers extended with them.

    calls          the model's layers without adapters
    deterministic  a row's result does not depend on the other rows of the batch
    exact          nothing may be rounded below float32
    """

    def __init__(
        self, calls: Sequence[LayerCall], device: torch.device, *, deterministic: bool = True, exact: bool = False
    ) -> None:
        self._device, self._plain = device, tuple(calls)
        self._rows, self._wanted = AdapterRows(), AdapterRows()
        self._additions: dict[tuple[int, str, str], Additions] = {}
        # (layer, module) -> its rows in each product that has it: several where layers run several times
        self._targets: dict[tuple[int, str], dict[tuple[int, str, str], _Target]] = {}
        self._make = additions(device, deterministic, exact)
        self.calls: tuple[LayerCall, ...] = tuple(self._with_places(number) for number in range(len(calls)))

    def _with_places(self, number: int) -> LayerCall:
        mixer, ffn, view = self._plain[number]
        mixer = self._extended(number, "mixer", mixer)
        if isinstance(mixer, AttentionWeights) and mixer.second is not None:
            mixer = replace(mixer, second=self._extended(number, "second", mixer.second))
        return mixer, self._extended(number, "ffn", ffn), view

    def _extended(self, number: int, part: str, weights: Any) -> Any:
        """The same weights with adapter slots; a mixture of experts has none and is returned unchanged."""
        if weights is None or isinstance(weights, ExpertsWeights):
            return weights
        is_last, changed = number == len(self._plain) - 1, {}
        plain_layout = isinstance(weights, AttentionWeights | MlpWeights)  # others have a different row order in GGUF
        for field in fields(weights):
            linear = getattr(weights, field.name)
            if not isinstance(linear, Linear):
                continue
            late = is_last and (part == "ffn" or (isinstance(weights, AttentionWeights) and field.name == "out"))
            shape = (linear.out_features, linear.parts[0].shape[1])
            coarse = linear.nbytes < 1.2 * shape[0] * shape[1]  # at most one byte per weight plus scales
            added = self._make(self._wanted if late else self._rows, shape, linear.bias, coarse=coarse)
            key = number, part, field.name
            self._additions[key] = added
            changed[field.name] = replace(linear, additions=added)
            first = 0
            for module in linear.modules:
                for name in module.names if plain_layout or not module.names[-1].startswith("blk.") else ():
                    match = _MODULE.fullmatch(name)
                    if match is not None:
                        places = self._targets.setdefault((int(match[2]), match[3]), {})
                        places[key] = _Target(key, first, module, shape[1])
                first += module.rows
        return replace(weights, **changed)

    # --- a file ------------------------------------------------------------------------------------------------------

    @staticmethod
    def open(path: str) -> AdapterFile:
        """Open an adapter on disk. Raises like `open_adapter`."""
        return open_adapter(path)

    def read(self, file: AdapterFile) -> AdapterWeights:
        """Read the weights of an adapter, ready for a slot.

        Raises BadModelFile or UnsupportedFormat if it is damaged or was made for another model.
        """
        found: defaultdict[tuple[int, str, str], list[tuple[_Target, StoredUpdate]]] = defaultdict(list)
        for update in file.updates:
            for target in self._places(file, update):
                found[target.linear].append((target, update))
        digest = blake2b(digest_size=16)
        # DoRA runs the model's products, in threads whose current GPU may be another one
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            pieces = {key: tuple(self._pieces(key, file, each, digest)) for key, each in found.items()}
        return AdapterWeights(pieces, digest.hexdigest())

    def _places(self, file: AdapterFile, update: StoredUpdate) -> list[_Target]:
        match = _MODULE.fullmatch(update.module)
        known = match is not None and match[1] in _TEXT
        places = self._targets.get((int(match[2]), match[3])) if known and match is not None else None
        made_for = f"; it was made for {file.base}" if file.base else ""
        if places is None:
            vocabulary = update.module.endswith(("embed_tokens", "lm_head"))
            what = "the adapter changes the vocabulary" if vocabulary else "this model has no such linear module"
            hint = "use an adapter that changes only this model's attention and feed-forward layers"
            raise bad(file.file.path, what + made_for, key=update.down.name, hint=hint, error=UnsupportedFormat)
        target, *others = places.values()
        expected = {update.down: (update.rank, target.inputs), update.up: (target.module.rows, update.rank)}
        for tensor, shape in expected.items():
            if tensor.shape != shape:
                what = f"has shape {list(tensor.shape)}, but this model needs {list(shape)}{made_for}"
                raise bad(file.file.path, what, key=tensor.name, hint="use it with the model it was made for",
                          error=BadModelFile)  # fmt: skip
        return [target, *others]

    def _pieces(
        self,
        key: tuple[int, str, str],
        file: AdapterFile,
        updates: Sequence[tuple[_Target, StoredUpdate]],
        digest: blake2b,
    ) -> Iterator[LowRank]:
        pieces, magnitudes = [], []
        for target, update in updates:
            digest.update(f"{update.module} {update.scale!r} {update.rank}".encode())
            stored = [file.read(tensor) for tensor in (update.down, update.up, update.magnitude) if tensor is not None]
            for values in stored:
                digest.update(values.data)
            down, up = (torch.from_numpy(values).to(self._device) for values in stored[:2])
            length = None if update.magnitude is None else torch.from_numpy(stored[2]).flatten()
            order = target.module.order
            if order is not None:
                up, length = up[order.to(self._device)], None if length is None else length[order]
            if target.module.factors is not None:
                factors = target.module.factors.to(self._device)
                up, length = up * factors.unsqueeze(-1), None if length is None else length * factors.cpu()
            pieces.append(LowRank(down, up * update.scale, target.first))
            magnitudes.append(None if length is None else length.to(self._device))
        if any(length is not None for length in magnitudes):
            yield from self._with_gains(key, pieces, magnitudes)
        else:
            yield from pieces

    @torch.inference_mode()
    def _with_gains(
        self, key: tuple[int, str, str], pieces: Sequence[LowRank], magnitudes: Sequence[Tensor | None]
    ) -> Iterator[LowRank]:
        """DoRA: scale every row of base plus update to the norm stored in the file.

        The weight is recovered by running the product on the identity, so its storage format does not matter.
        """
        number, part, name = key
        mixer, ffn, _ = self._plain[number]
        weights = {"mixer": mixer, "second": getattr(mixer, "second", None), "ffn": ffn}[part]
        linear: Linear = getattr(weights, name)
        bias, inputs = linear.bias, linear.parts[0].shape[1]
        squares = [torch.zeros(piece.up.shape[0], device=self._device) for piece in pieces]
        for start in range(0, inputs, _COLUMNS):
            columns = slice(start, min(start + _COLUMNS, inputs))
            unit = torch.eye(inputs, device=self._device)[columns]
            weight = linear(unit).float()
            weight = weight if bias is None else weight - bias
            for piece, square in zip(pieces, squares, strict=True):
                own = weight[:, piece.first : piece.first + piece.up.shape[0]] + (piece.up @ piece.down[:, columns]).T
                square += own.square().sum(0)
        for piece, square, length in zip(pieces, squares, magnitudes, strict=True):
            if length is None:
                yield piece
                continue
            gain = length / square.sqrt().clamp_(min=1e-30)
            yield replace(piece, up=piece.up * gain[:, None], gain=gain)

    # --- slots -------------------------------------------------------------------------------------------------------

    def put(self, place: int, weights: AdapterWeights | None) -> None:
        """Put an adapter into slot `place`; None empties the slot. Called between steps."""
        room = None
        for key, added in self._additions.items():
            if weights is None:
                added.put(place, ())
            else:
                room = room or added.room(weights.nbytes)
                added.put(place, weights.pieces.get(key, ()), room)

    def begin(self, of_tokens: np.ndarray, of_wanted: np.ndarray) -> tuple[LayerCall, ...]:
        """Set the slots of a step's tokens and of its wanted rows, and return the layers to run."""
        self._rows.set(of_tokens)
        self._wanted.set(of_wanted)
        return self.calls

    def exchange(self, layer: int, gate_up: tuple[Linear, ...], down: tuple[Linear, ...]) -> None:
        """Let steps with adapters run the experts that `Model.exchange` has moved. No adapter extends an expert."""
        for name in ("_plain", "calls"):
            calls: tuple[LayerCall, ...] = getattr(self, name)
            mixer, ffn, cache = calls[layer]
            assert isinstance(ffn, ExpertsWeights)
            call = mixer, replace(ffn, gate_up=gate_up, down=down), cache
            setattr(self, name, (*calls[:layer], call, *calls[layer + 1 :]))

    def forget(self, *, pages_only: bool = False) -> None:
        """Drop what fused segments cache on the products."""
        for added in self._additions.values():
            added.forget(pages_only)

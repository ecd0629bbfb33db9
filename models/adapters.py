"""`Adapters`: places for LoRA adapters beside a model's weights, and what of a file goes into one.

Adapters name modules as Transformers does. A product made of several modules gets the updates of each for its rows of
the outputs, in the order in which the model's own file has them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
)  # what the text model's begin with
_COLUMNS = 256  # of a weight, looked at together where its rows' lengths are wanted


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a module's outputs are."""

    linear: tuple[int, str, str]  # number of the layer, which of its two parts, which product of that
    first: int
    module: Module
    inputs: int


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """What an adapter adds to each product."""

    pieces: Mapping[tuple[int, str, str], tuple[LowRank, ...]]
    digest: str  # of all that changes an answer

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for pieces in self.pieces.values() for piece in pieces)


class Adapters:
    """The places for adapters of one model: `calls` are its layers with them.

    calls          as the model has them, without adapters
    deterministic  a row's result does not depend on the rows beside it
    exact          nothing may be rounded below float32
    """

    def __init__(
        self, calls: Sequence[LayerCall], device: torch.device, *, deterministic: bool = True, exact: bool = False
    ) -> None:
        self._device, self._plain = device, tuple(calls)
        self._rows, self._wanted = AdapterRows(), AdapterRows()
        self._additions: dict[tuple[int, str, str], Additions] = {}
        self._targets: dict[tuple[int, str], _Target] = {}
        self._make = additions(device, deterministic, exact)
        self.calls: tuple[LayerCall, ...] = tuple(self._with_places(number) for number in range(len(calls)))

    def _with_places(self, number: int) -> LayerCall:
        mixer, ffn, view = self._plain[number]
        return self._extended(number, "mixer", mixer), self._extended(number, "ffn", ffn), view

    def _extended(self, number: int, part: str, weights: Any) -> Any:
        """The same weights; those of a mixture of experts, which have none, themselves."""
        if weights is None or isinstance(weights, ExpertsWeights):
            return weights
        is_last, changed = number == len(self._plain) - 1, {}
        plain_layout = isinstance(weights, AttentionWeights | MlpWeights)  # else GGUF files have an order of their own
        for field in fields(weights):
            linear = getattr(weights, field.name)
            if not isinstance(linear, Linear):
                continue
            late = is_last and (part == "ffn" or (isinstance(weights, AttentionWeights) and field.name == "out"))
            shape = (linear.out_features, linear.parts[0].shape[1])
            coarse = linear.nbytes < 1.2 * shape[0] * shape[1]  # a byte each, and their scales
            added = self._make(self._wanted if late else self._rows, shape, linear.bias, coarse=coarse)
            key = number, part, field.name
            self._additions[key] = added
            changed[field.name] = replace(linear, additions=added)
            first = 0
            for module in linear.modules:
                for name in module.names if plain_layout or not module.names[-1].startswith("blk.") else ():
                    match = _MODULE.fullmatch(name)
                    if match is not None:
                        self._targets[int(match[2]), match[3]] = _Target(key, first, module, shape[1])
                first += module.rows
        return replace(weights, **changed)

    # --- a file ------------------------------------------------------------------------------------------------------

    @staticmethod
    def open(path: str) -> AdapterFile:
        """An adapter on disk. Raises as `open_adapter` does."""
        return open_adapter(path)

    def read(self, file: AdapterFile) -> AdapterWeights:
        """The weights of an adapter, ready for a place.

        Raises BadModelFile or UnsupportedFormat for one that was made for another model, or damaged since.
        """
        found: defaultdict[tuple[int, str, str], list[tuple[_Target, StoredUpdate]]] = defaultdict(list)
        for update in file.updates:
            target = self._target(file, update)
            found[target.linear].append((target, update))
        digest = blake2b(digest_size=16)
        pieces = {key: tuple(self._pieces(key, file, each, digest)) for key, each in found.items()}
        return AdapterWeights(pieces, digest.hexdigest())

    def _target(self, file: AdapterFile, update: StoredUpdate) -> _Target:
        match = _MODULE.fullmatch(update.module)
        known = match is not None and match[1] in _TEXT
        target = self._targets.get((int(match[2]), match[3])) if known and match is not None else None
        made_for = f"; it was made for {file.base}" if file.base else ""
        if target is None:
            vocabulary = update.module.endswith(("embed_tokens", "lm_head"))
            what = "the adapter changes the vocabulary" if vocabulary else "this model has no such linear module"
            hint = "use an adapter of this model's attention and feed-forward layers"
            raise bad(file.file.path, what + made_for, key=update.down.name, hint=hint, error=UnsupportedFormat)
        expected = {update.down: (update.rank, target.inputs), update.up: (target.module.rows, update.rank)}
        for tensor, shape in expected.items():
            if tensor.shape != shape:
                what = f"has shape {list(tensor.shape)}, this model needs {list(shape)}{made_for}"
                raise bad(file.file.path, what, key=tensor.name, hint="use it with the model it was made for",
                          error=BadModelFile)  # fmt: skip
        return target

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
        """DoRA: every row of base and update together gets the length that the file says.

        What a product makes of the identity is its weight, however that is stored.
        """
        number, part, name = key
        linear: Linear = getattr(self._plain[number][("mixer", "ffn").index(part)], name)
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

    # --- places ------------------------------------------------------------------------------------------------------

    def put(self, place: int, weights: AdapterWeights | None) -> None:
        """From now on rows with this place have this adapter; None empties it. Called between steps."""
        room = None
        for key, added in self._additions.items():
            if weights is None:
                added.put(place, ())
            else:
                room = room or added.room(weights.nbytes)
                added.put(place, weights.pieces.get(key, ()), room)

    def begin(self, of_tokens: np.ndarray, of_wanted: np.ndarray) -> tuple[LayerCall, ...]:
        """The layers for a step whose tokens, and whose wanted rows, have these places."""
        self._rows.set(of_tokens)
        self._wanted.set(of_wanted)
        return self.calls

    def forget(self, *, pages_only: bool = False) -> None:
        """Let go of what fused segments keep with the products."""
        for added in self._additions.values():
            added.forget(pages_only)

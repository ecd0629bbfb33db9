"""Gemma 4 images: `PooledTower` averages squares of patches after its last layer; `Patches` has no layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels.layer_weights import Linear
from localllm.kernels.reference import rms_norm
from localllm.kernels.rope import inverse_frequencies

from .architectures.vision import BOUNDS, LAYER_NORMS, PatchFacts, PooledFacts
from .reader import Reader
from .vision import AnyNorm, Parts, Tower
from .vision_grid import GridTower, turned
from .vision_rows import RowTower

PATCH_EPS = 1e-5  # of the norms in `Patches`


class Clipped(NamedTuple):
    """A linear layer whose inputs and outputs are clamped, if the file has bounds."""

    linear: Linear
    bounds: tuple[float, ...]  # input min and max, output min and max; () for none

    def __call__(self, x: Tensor) -> Tensor:
        if not self.bounds:
            return self.linear(x)
        least, most, lowest, highest = self.bounds
        return self.linear(x.clamp(least, most)).clamp(lowest, highest)


class PooledLayer(NamedTuple):
    """Attention among all patches and a gated feed-forward layer, each between two norms (weights float32 [hidden])."""

    norms: tuple[Tensor, ...]
    q: Clipped
    k: Clipped
    v: Clipped
    out: Clipped
    q_norm: Tensor  # float32 [head_dim]
    k_norm: Tensor
    gate: Clipped
    up: Clipped
    down: Clipped


@dataclass(frozen=True)
class PooledTower:
    """The tower and its projector; everything except the linear layers runs in float32."""

    facts: PooledFacts
    dtype: torch.dtype
    patches: Linear
    columns: Tensor  # float32 [max per row, hidden]: position embedding by column
    rows: Tensor  # by row
    layers: tuple[PooledLayer, ...]
    standard: tuple[Tensor, Tensor] | None  # float32 [hidden] each: bias to subtract, then scale to multiply
    projection: Linear

    @torch.inference_mode()
    def __call__(self, pixels: Tensor) -> Tensor:
        """uint8 [height, width, 3], sized by `PooledFacts.fitted` -> [tokens, hidden of the decoder]."""
        facts, eps = self.facts, self.facts.eps
        rows, columns = pixels.shape[0] // facts.patch_size, pixels.shape[1] // facts.patch_size
        colours = pixels.to(self.rows.device).float().div_(127.5).sub_(1.0)
        places = (self.rows[:rows, None] + self.columns[:columns]).flatten(0, 1)
        squares = _squares(colours, facts.patch_size, facts.planar).to(self.dtype)
        x = (self.patches(squares).float() + places).to(self.dtype)
        del colours, squares, places
        turns = self._rotations(rows, columns)
        for layer in self.layers:
            mixed = layer.out(self._attention(layer, rms_norm(x, layer.norms[0], eps), turns))
            x = x + rms_norm(mixed, layer.norms[1], eps)
            normed = rms_norm(x, layer.norms[2], eps)
            inner = functional.gelu(layer.gate(normed), approximate="tanh").mul_(layer.up(normed))
            x = x + rms_norm(layer.down(inner), layer.norms[3], eps)
        merge = facts.merge
        pooled = x.float().view(rows // merge, merge, columns // merge, merge, -1).mean((1, 3)).flatten(0, 1)
        pooled = pooled * math.sqrt(facts.hidden)
        if self.standard is not None:
            pooled = (pooled - self.standard[0]) * self.standard[1]
        return self.projection(_bare_norm(pooled, eps).to(self.dtype))

    def _rotations(self, rows: int, columns: int) -> tuple[tuple[Tensor, Tensor], ...]:
        """Cosines and sines, each float32 [patches, 1, head_dim / 4]: by column, then by row."""
        frequencies = inverse_frequencies(self.facts.theta, self.facts.head_dim // 2).to(self.rows.device)
        down, along = (torch.arange(count, device=frequencies.device).float() for count in (rows, columns))
        places = along.repeat(rows), down.repeat_interleave(columns)
        angles = [(place[:, None] * frequencies)[:, None] for place in places]
        return tuple((angle.cos(), angle.sin()) for angle in angles)

    def _attention(self, layer: PooledLayer, x: Tensor, turns: tuple[tuple[Tensor, Tensor], ...]) -> Tensor:
        """[patches, hidden] -> [patches, heads * head_dim]; half of a head rotates by column, half by row."""
        facts = self.facts
        q, k, v = (one(x).unflatten(-1, (-1, facts.head_dim)) for one in (layer.q, layer.k, layer.v))
        q, k = rms_norm(q, layer.q_norm, facts.eps), rms_norm(k, layer.k_norm, facts.eps)
        q, k = (
            torch.cat([turned(half, *turn) for half, turn in zip(one.chunk(2, -1), turns, strict=True)], -1)
            for one in (q, k)
        )
        q, k, v = (one.transpose(0, 1)[None] for one in (q, k, _bare_norm(v, facts.eps)))
        grouped = facts.num_heads != facts.num_kv_heads
        mixed = functional.scaled_dot_product_attention(q, k, v, scale=1.0, enable_gqa=grouped)
        return mixed[0].transpose(0, 1).flatten(1)

    @property
    def nbytes(self) -> int:
        """Bytes of the prepared weights."""
        parts = [part for layer in self.layers for part in layer]
        linears = [part.linear.nbytes for part in parts if isinstance(part, Clipped)]
        norms = [norm for layer in self.layers for norm in (*layer.norms, layer.q_norm, layer.k_norm)]
        own = (self.columns, self.rows, *norms, *(self.standard or ()))
        return sum(linears) + self.patches.nbytes + self.projection.nbytes + sum(part.nbytes for part in own)


@dataclass(frozen=True)
class Patches:
    """Squares of pixels, each projected to a vector independently; norms run in float32."""

    facts: PatchFacts
    dtype: torch.dtype
    first: AnyNorm
    dense: Linear
    second: AnyNorm
    columns: Tensor  # float32 [max per row, hidden]
    rows: Tensor
    last: AnyNorm
    projection: Linear

    @torch.inference_mode()
    def __call__(self, pixels: Tensor) -> Tensor:
        """uint8 [height, width, 3], sized by `PatchFacts.fitted` -> [tokens, hidden of the decoder]."""
        size = self.facts.factor
        rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
        squares = _squares(pixels.to(self.rows.device).float().div_(255), size)
        x = self.dense(self.first(squares, PATCH_EPS).to(self.dtype)).float()
        places = (self.rows[:rows, None] + self.columns[:columns]).flatten(0, 1)
        x = self.last(self.second(x, PATCH_EPS) + places, PATCH_EPS)
        return self.projection(_bare_norm(x, self.facts.eps).to(self.dtype))

    @property
    def nbytes(self) -> int:
        """Bytes of the prepared weights."""
        own = (self.columns, self.rows, *self.first, *self.second, *self.last)
        return self.dense.nbytes + self.projection.nbytes + sum(part.nbytes for part in own)


AnyTower = Tower | GridTower | RowTower | PooledTower | Patches


def _squares(pixels: Tensor, size: int, planar: bool = False) -> Tensor:
    """[height, width, 3] -> [squares, size² * 3], row by row; pixels interleave colours, `planar` separates them."""
    rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
    order = (0, 2, 4, 1, 3) if planar else (0, 2, 1, 3, 4)
    return pixels.view(rows, size, columns, size, 3).permute(order).reshape(rows * columns, -1)


def _bare_norm(x: Tensor, eps: float) -> Tensor:
    return rms_norm(x, torch.ones(x.shape[-1], device=x.device), eps)


def load_pooled_tower(reader: Reader, facts: PooledFacts) -> PooledTower:
    """Load the tower."""
    parts = Parts(reader, facts)

    def clipped(name: str) -> Clipped:
        bounds = tuple(float(parts.tensor(f"{name}.{bound}")) for bound in BOUNDS) if facts.clipped else ()
        return Clipped(parts.linear(f"{name}.linear"), bounds)

    def layer(start: str) -> PooledLayer:
        attention, mlp = ([f"{start}{part}_proj" for part in group] for group in (_ATTENTION, _MLP))
        return PooledLayer(
            tuple(parts.tensor(f"{start}{name}.weight") for name in LAYER_NORMS),
            *map(clipped, attention),
            *(parts.tensor(f"{start}self_attn.{name}_norm.weight") for name in "qk"),
            *map(clipped, mlp),
        )

    table = parts.tensor("vision.patch_embedder.position_embedding_table")[:, : facts.tokens * facts.merge].clone()
    return PooledTower(
        facts,
        parts.dtype,
        parts.linear("vision.patch_embedder.input_proj"),
        table[0],
        table[1],
        tuple(layer(f"vision.encoder.layers.{index}.") for index in range(facts.num_layers)),
        (parts.tensor("vision.std_bias"), parts.tensor("vision.std_scale")) if facts.standardized else None,
        parts.linear("projector.embedding_projection"),
    )


_ATTENTION = tuple(f"self_attn.{name}" for name in "qkvo")
_MLP = tuple(f"mlp.{name}" for name in ("gate", "up", "down"))


def load_patches(reader: Reader, facts: PatchFacts) -> Patches:
    """Load the patch embedder."""
    parts = Parts(reader, facts)
    columns, rows = parts.tensor("vision.pos_embedding")[: facts.tokens].unbind(1)
    return Patches(
        facts,
        parts.dtype,
        parts.norm("vision.patch_ln1"),
        parts.linear("vision.patch_dense"),
        parts.norm("vision.patch_ln2"),
        columns.contiguous(),
        rows.contiguous(),
        parts.norm("vision.pos_norm"),
        parts.linear("projector.embedding_projection"),
    )

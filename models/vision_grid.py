"""`GridTower`: an image of any aspect ratio -> the vectors of its tokens (Qwen2.5-VL, Qwen3-VL, Qwen3.5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels.layer_weights import Linear
from localllm.kernels.rope import inverse_frequencies

from .architectures.vision import GridFacts
from .reader import Reader
from .vision import AnyNorm, Parts, TowerLayer


class Merger(NamedTuple):
    """Squares of patches -> one vector each; the norm spans a whole square or a patch, depending on its width."""

    norm: AnyNorm
    fc1: Linear
    fc2: Linear

    def __call__(self, x: Tensor, facts: GridFacts) -> Tensor:
        """[patches, hidden] -> [tokens, hidden of the decoder]"""
        squares = self.norm(x.view(-1, *self.norm.weight.shape), facts.eps).view(-1, facts.hidden * facts.merge**2)
        return self.fc2(functional.gelu(self.fc1(squares)))


@dataclass(frozen=True)
class GridTower:
    """The tower and the mergers that turn a square of patches into one vector; patches are ordered by square."""

    facts: GridFacts
    dtype: torch.dtype
    patches: Tensor  # [hidden, 3 * patch_size²], summed over frames: an image is the same in all frames of a patch
    patch_bias: Tensor | None
    positions: Tensor | None  # [1, hidden, side, side]
    layers: tuple[TowerLayer, ...]
    merger: Merger
    deep: Mapping[int, Merger]  # tower layer -> merger of its output for the decoder (DeepStack)

    @torch.inference_mode()
    def __call__(self, pixels: Tensor) -> Tensor:
        """uint8 [height, width, 3], sized by `GridFacts.fitted` -> [tokens, hidden of the decoder]. With `taps`, one
        more such vector per tap follows along dim 1.
        """
        facts, device = self.facts, self.patches.device
        rows, columns = pixels.shape[0] // facts.patch_size, pixels.shape[1] // facts.patch_size
        mean, std = (torch.tensor(values, device=device) * 255 for values in (facts.mean, facts.std))
        colours = (pixels.to(device).float() - mean) / std
        size, merge = facts.patch_size, facts.merge
        squares = colours.view(rows // merge, merge, size, columns // merge, merge, size, 3)
        patches = squares.permute(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, -1)
        x = functional.linear(patches, self.patches, self.patch_bias)
        if self.positions is not None:
            at = functional.interpolate(self.positions, (rows, columns), mode="bilinear", align_corners=True)[0]
            x += self._by_square(at.permute(1, 2, 0))
        del colours, squares, patches
        x = x.to(self.dtype)
        cos, sin = self._rotations(rows, columns)
        order, windows = self._windows(rows // merge, columns // merge)
        if order is not None:
            x, cos, sin = (one.view(-1, merge**2, *one.shape[1:])[order].flatten(0, 1) for one in (x, cos, sin))
        deep = []
        for index, layer in enumerate(self.layers):
            seen = [(1, x.shape[0])] if order is None or index in facts.whole else windows
            x = x + layer.out(self._attention(layer.qkv(layer.norm1(x, facts.eps)), cos, sin, seen))
            x = x + layer.fc2(self._activation(layer.fc1(layer.norm2(x, facts.eps))))
            if index in self.deep:
                deep.append(self.deep[index](x, facts))
        vectors = torch.cat([self.merger(x, facts), *deep], -1)
        return vectors if order is None else vectors[order.argsort()]

    def _windows(self, rows: int, columns: int) -> tuple[Tensor | None, list[tuple[int, int]]]:
        """Order of the squares by window, with windows of equal size together, and (count, patches each) per size.

        The order is None if no layer uses windows.
        """
        side, order = self.facts.window, []
        sizes: list[tuple[int, int]] = []
        if not side:
            return None, sizes
        squares = torch.arange(rows * columns, device=self.patches.device).view(rows, columns)
        for band in squares.split([rows - rows % side, rows % side]):
            for block in band.split([columns - columns % side, columns % side], 1):
                if block.numel():
                    high, wide = (min(side, count) for count in block.shape)
                    parts = block.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).transpose(1, 2)
                    order.append(parts.flatten())
                    sizes.append((parts.shape[0] * parts.shape[1], high * wide * self.facts.merge**2))
        return torch.cat(order), sizes

    def _activation(self, inner: Tensor) -> Tensor:
        if not self.facts.gated:
            return functional.gelu(inner, approximate="tanh")
        gate, up = inner.chunk(2, -1)
        return functional.silu(gate) * up

    def _by_square(self, values: Tensor) -> Tensor:
        """[rows, columns, n], one entry per patch -> [patches, n], ordered by square"""
        rows, columns, _ = values.shape
        merge = self.facts.merge
        squares = values.reshape(rows // merge, merge, columns // merge, merge, -1)
        return squares.transpose(1, 2).reshape(rows * columns, -1)

    def _rotations(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each float32 [patches, 1, head_dim / 2]: half of the pairs by row, half by column."""
        half = self.facts.hidden // self.facts.num_heads // 2
        frequencies = inverse_frequencies(self.facts.theta, half).to(self.patches.device)
        row, column = (torch.arange(count, device=frequencies.device).float() for count in (rows, columns))
        by_row = (row[:, None, None] * frequencies).expand(rows, columns, -1)
        by_column = (column[None, :, None] * frequencies).expand(rows, columns, -1)
        angles = self._by_square(torch.cat([by_row, by_column], -1))[:, None]
        return angles.cos(), angles.sin()

    def _attention(self, qkv: Tensor, cos: Tensor, sin: Tensor, seen: list[tuple[int, int]]) -> Tensor:
        """[patches, 3 * hidden] -> [patches, hidden]; `seen`: (count, patches each) of the windows in order."""
        q, k, v = qkv.view(qkv.shape[0], 3, self.facts.num_heads, -1).unbind(1)
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        parts = zip(seen, *(one.split([count * size for count, size in seen]) for one in (q, k, v)), strict=True)
        mixed = []
        for (count, _), *rows in parts:
            of_windows = (one.unflatten(0, (count, -1)).transpose(1, 2) for one in rows)
            mixed.append(functional.scaled_dot_product_attention(*of_windows).transpose(1, 2).flatten(0, 1))
        return torch.cat(mixed).flatten(1)

    @property
    def nbytes(self) -> int:
        """Bytes of the prepared weights."""
        mergers = [self.merger, *self.deep.values()]
        linears = [one for layer in self.layers for one in (layer.qkv, layer.out, layer.fc1, layer.fc2)]
        linears += [one for merger in mergers for one in (merger.fc1, merger.fc2)]
        norms = [norm for layer in self.layers for norm in (layer.norm1, layer.norm2)]
        parts = (part for norm in (*norms, *(merger.norm for merger in mergers)) for part in norm)
        own = (one for one in (self.patches, self.patch_bias, self.positions) if one is not None)
        return sum(one.nbytes for one in (*linears, *own, *parts))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [patches, heads, head_dim] by pairs (j, j + head_dim / 2); cos and sin [patches, 1, head_dim / 2]"""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def load_grid_tower(reader: Reader, facts: GridFacts) -> GridTower:
    """Load the tower."""
    parts = Parts(reader, facts)

    def layer(start: str) -> TowerLayer:
        return TowerLayer(
            norm1=parts.norm(f"{start}norm1"),
            qkv=parts.linear(*(f"{start}attn.{name}" for name in facts.attention)),
            out=parts.linear(f"{start}attn.proj"),
            norm2=parts.norm(f"{start}norm2"),
            fc1=parts.linear(*(f"{start}mlp.{name}" for name in facts.feed_forward[:-1])),
            fc2=parts.linear(f"{start}mlp.{facts.feed_forward[-1]}"),
        )

    def merger(start: str) -> Merger:
        fc1, fc2 = (parts.linear(f"{start}.linear_fc{number}") for number in (1, 2))
        return Merger(parts.norm(f"{start}.norm"), fc1, fc2)

    kernels = [parts.tensor(f"vision.patch_embed.proj.weight{end}").sum(2) for end in facts.kernels]
    last, *deep = map(merger, facts.mergers)
    bias = table = None
    if not facts.gated:
        bias, rows = (parts.tensor(f"vision.{name}") for name in ("patch_embed.proj.bias", "pos_embed.weight"))
        table = rows.t().reshape(1, facts.hidden, facts.side, facts.side).contiguous()
    return GridTower(
        facts,
        parts.dtype,
        torch.stack(kernels).sum(0).flatten(1),
        bias,
        table,
        tuple(layer(f"vision.blocks.{index}.") for index in range(facts.num_layers)),
        last,
        dict(zip(facts.taps, deep, strict=True)),
    )

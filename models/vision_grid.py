"""`GridTower`: an image of any proportions -> the vectors of its tokens (the tower of Qwen3-VL and Qwen3.5)."""

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
from .vision import LayerNorm, Parts, TowerLayer


class Merger(NamedTuple):
    """Squares of patches -> a vector each; a norm as wide as a square is one of all of it, else of every patch."""

    norm: LayerNorm
    fc1: Linear
    fc2: Linear

    def __call__(self, x: Tensor, facts: GridFacts) -> Tensor:
        """[patches, hidden] -> [tokens, hidden of the decoder]"""
        squares = self.norm(x.view(-1, *self.norm.weight.shape), facts.eps).view(-1, facts.hidden * facts.merge**2)
        return self.fc2(functional.gelu(self.fc1(squares)))


@dataclass(frozen=True)
class GridTower:
    """The tower and what makes one vector of a square of patches; patches lie square by square."""

    facts: GridFacts
    dtype: torch.dtype
    patches: Tensor  # [hidden, 3 * patch_size²]: an image is the same in all frames of a patch
    patch_bias: Tensor
    positions: Tensor  # [1, hidden, side, side]
    layers: tuple[TowerLayer, ...]
    merger: Merger
    deep: Mapping[int, Merger]  # of layers whose results the decoder gets as well

    @torch.inference_mode()
    def __call__(self, pixels: Tensor) -> Tensor:
        """uint8 [height, width, 3], sizes that `GridFacts.fitted` gives -> [tokens, hidden of the decoder]; with `taps`
        so many for the layers of the decoder behind them.
        """
        facts, device = self.facts, self.positions.device
        rows, columns = pixels.shape[0] // facts.patch_size, pixels.shape[1] // facts.patch_size
        mean, std = (torch.tensor(values, device=device) * 255 for values in (facts.mean, facts.std))
        given = (pixels.to(device).float() - mean) / std
        size, merge = facts.patch_size, facts.merge
        squares = given.view(rows // merge, merge, size, columns // merge, merge, size, 3)
        patches = squares.permute(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, -1)
        at = functional.interpolate(self.positions, (rows, columns), mode="bilinear", align_corners=True)[0]
        x = functional.linear(patches, self.patches, self.patch_bias) + self._by_square(at.permute(1, 2, 0))
        del given, squares, patches, at
        x = x.to(self.dtype)
        cos, sin = self._turns(rows, columns)
        deep = []
        for index, layer in enumerate(self.layers):
            x = x + layer.out(self._attended(layer.qkv(layer.norm1(x, facts.eps)), cos, sin))
            inner = layer.fc1(layer.norm2(x, facts.eps))
            x = x + layer.fc2(functional.gelu(inner, approximate="tanh"))
            if index in self.deep:
                deep.append(self.deep[index](x, facts))
        return torch.cat([self.merger(x, facts), *deep], -1)

    def _by_square(self, values: Tensor) -> Tensor:
        """[rows, columns, n], a patch each -> [patches, n]"""
        rows, columns, _ = values.shape
        merge = self.facts.merge
        squares = values.reshape(rows // merge, merge, columns // merge, merge, -1)
        return squares.transpose(1, 2).reshape(rows * columns, -1)

    def _turns(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each float32 [patches, 1, head_dim / 2]: half of the pairs turn by row, half by column."""
        half = self.facts.hidden // self.facts.num_heads // 2
        frequencies = inverse_frequencies(self.facts.theta, half).to(self.positions.device)
        row, column = (torch.arange(count, device=frequencies.device).float() for count in (rows, columns))
        by_row = (row[:, None, None] * frequencies).expand(rows, columns, -1)
        by_column = (column[None, :, None] * frequencies).expand(rows, columns, -1)
        angles = self._by_square(torch.cat([by_row, by_column], -1))[:, None]
        return angles.cos(), angles.sin()

    def _attended(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[patches, 3 * hidden] -> [patches, hidden]"""
        q, k, v = qkv.view(qkv.shape[0], 3, self.facts.num_heads, -1).unbind(1)
        q, k, v = (one.transpose(0, 1)[None] for one in (turned(q, cos, sin), turned(k, cos, sin), v))
        mixed = functional.scaled_dot_product_attention(q, k, v)[0]
        return mixed.transpose(0, 1).reshape(qkv.shape[0], -1)

    @property
    def nbytes(self) -> int:
        """Bytes of its prepared weights."""
        mergers = [self.merger, *self.deep.values()]
        linears = [one for layer in self.layers for one in (layer.qkv, layer.out, layer.fc1, layer.fc2)]
        linears += [one for merger in mergers for one in (merger.fc1, merger.fc2)]
        norms = [norm for layer in self.layers for norm in (layer.norm1, layer.norm2)]
        parts = (part for norm in (*norms, *(merger.norm for merger in mergers)) for part in norm)
        return sum(one.nbytes for one in (*linears, self.patches, self.patch_bias, self.positions, *parts))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [patches, heads, head_dim] turned by its pairs (j, j + head_dim / 2); cos and sin [patches, 1, head_dim / 2]"""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def load_grid_tower(reader: Reader, facts: GridFacts) -> GridTower:
    """Read the tower."""
    parts = Parts(reader, facts)

    def layer(start: str) -> TowerLayer:
        return TowerLayer(
            norm1=parts.norm(f"{start}norm1"),
            qkv=parts.linear(f"{start}attn.qkv"),
            out=parts.linear(f"{start}attn.proj"),
            norm2=parts.norm(f"{start}norm2"),
            fc1=parts.linear(f"{start}mlp.linear_fc1"),
            fc2=parts.linear(f"{start}mlp.linear_fc2"),
        )

    def merger(start: str) -> Merger:
        fc1, fc2 = (parts.linear(f"{start}.linear_fc{number}") for number in (1, 2))
        return Merger(parts.norm(f"{start}.norm"), fc1, fc2)

    kernels = [parts.tensor(f"vision.patch_embed.proj.weight{end}").sum(2) for end in facts.kernels]
    last, *deep = map(merger, facts.mergers)
    table = parts.tensor("vision.pos_embed.weight").t().reshape(1, facts.hidden, facts.side, facts.side)
    return GridTower(
        facts,
        parts.dtype,
        torch.stack(kernels).sum(0).flatten(1),
        parts.tensor("vision.patch_embed.proj.bias"),
        table.contiguous(),
        tuple(layer(f"vision.blocks.{index}.") for index in range(facts.num_layers)),
        last,
        dict(zip(facts.taps, deep, strict=True)),
    )

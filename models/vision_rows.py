"""`RowTower`: an image of any aspect ratio -> the vectors of its tokens, row by row (Pixtral, in Mistral 3 files)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels.layer_weights import Linear
from localllm.kernels.reference import rms_norm
from localllm.kernels.rope import inverse_frequencies

from .architectures.vision import RowFacts
from .reader import Reader
from .vision import Parts
from .vision_grid import turned

EPS = 1e-5  # of the tower's norms, independent of the decoder's


class RowLayer(NamedTuple):
    """Attention among all patches and a gated feed-forward layer, each after a norm with weight float32 [hidden]."""

    norm1: Tensor
    qkv: Linear
    out: Linear
    norm2: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class RowTower:
    """The tower and its projector; everything except the linear layers runs in float32."""

    facts: RowFacts
    dtype: torch.dtype
    patches: Tensor  # float32 [hidden, 3 * patch_size²], colour planes of a patch one after another
    first_norm: Tensor  # float32 [hidden]
    layers: tuple[RowLayer, ...]
    norm: Tensor
    merger: Linear
    fc1: Linear
    fc2: Linear

    @torch.inference_mode()
    def __call__(self, pixels: Tensor) -> Tensor:
        """uint8 [height, width, 3], sized by `RowFacts.fitted` -> [tokens, hidden of the decoder].

        The break tokens between rows get zeros.
        """
        facts, device, size = self.facts, self.norm.device, self.facts.patch_size
        rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
        mean, std = (torch.tensor(values, device=device) * 255 for values in (facts.mean, facts.std))
        colours = (pixels.to(device).float() - mean) / std
        squares = colours.view(rows, size, columns, size, 3).permute(0, 2, 4, 1, 3).reshape(rows * columns, -1)
        x = rms_norm(functional.linear(squares, self.patches).to(self.dtype), self.first_norm, EPS)
        del colours, squares
        cos, sin = self._rotations(rows, columns)
        for layer in self.layers:
            x = x + layer.out(self._attention(layer.qkv(rms_norm(x, layer.norm1, EPS)), cos, sin))
            gate, up = layer.gate_up(rms_norm(x, layer.norm2, EPS)).chunk(2, -1)
            x = x + layer.down(functional.silu(gate) * up)
        x = rms_norm(x, self.norm, facts.eps)
        merge = facts.merge  # the elements of a square are ordered by hidden dimension, then by patch
        squares = x.view(rows // merge, merge, columns // merge, merge, -1).permute(0, 2, 4, 1, 3)
        merged = self.merger(squares.reshape(-1, facts.hidden * merge**2))
        vectors = self.fc2(functional.gelu(self.fc1(merged)))
        return functional.pad(vectors.unflatten(0, (rows // merge, -1)), (0, 0, 0, 1)).flatten(0, 1)[:-1]

    def _rotations(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each float32 [patches, 1, head_dim / 2]: half of the pairs rotate by row with the even
        frequencies, half by column with the odd ones.
        """
        frequencies = inverse_frequencies(self.facts.theta, self.facts.hidden // self.facts.num_heads)
        frequencies = frequencies.to(self.norm.device)
        row, column = (torch.arange(count, device=frequencies.device).float() for count in (rows, columns))
        by_row = (row[:, None, None] * frequencies[0::2]).expand(rows, columns, -1)
        by_column = (column[None, :, None] * frequencies[1::2]).expand(rows, columns, -1)
        angles = torch.cat([by_row, by_column], -1).flatten(0, 1)[:, None]
        return angles.cos(), angles.sin()

    def _attention(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[patches, 3 * hidden] -> [patches, hidden]"""
        q, k, v = qkv.view(qkv.shape[0], 3, self.facts.num_heads, -1).unbind(1)
        if self.facts.paired:  # a common permutation of queries and keys does not change their scores
            q, k = (one.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for one in (q, k))
        q, k, v = (one.transpose(0, 1)[None] for one in (turned(q, cos, sin), turned(k, cos, sin), v))
        mixed = functional.scaled_dot_product_attention(q, k, v)[0]
        return mixed.transpose(0, 1).reshape(qkv.shape[0], -1)

    @property
    def nbytes(self) -> int:
        """Bytes of the prepared weights."""
        own = (self.patches, self.first_norm, self.norm, self.merger, self.fc1, self.fc2)
        return sum(one.nbytes for one in (*own, *(part for layer in self.layers for part in layer)))


def load_row_tower(reader: Reader, facts: RowFacts) -> RowTower:
    """Load the tower."""
    parts = Parts(reader, facts)

    def layer(start: str) -> RowLayer:
        return RowLayer(
            norm1=parts.tensor(f"{start}attention_norm.weight"),
            qkv=parts.linear(*(f"{start}attention.{name}_proj" for name in "qkv")),
            out=parts.linear(f"{start}attention.o_proj"),
            norm2=parts.tensor(f"{start}ffn_norm.weight"),
            gate_up=parts.linear(*(f"{start}feed_forward.{name}_proj" for name in ("gate", "up"))),
            down=parts.linear(f"{start}feed_forward.down_proj"),
        )

    return RowTower(
        facts,
        parts.dtype,
        parts.tensor("vision.patch_conv.weight").flatten(1),
        parts.tensor("vision.ln_pre.weight"),
        tuple(layer(f"vision.transformer.layers.{index}.") for index in range(facts.num_layers)),
        parts.tensor("projector.norm.weight"),
        parts.linear("projector.patch_merger.merging_layer"),
        parts.linear("projector.linear_1"),
        parts.linear("projector.linear_2"),
    )

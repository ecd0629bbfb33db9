"""`Tower`: an image -> the vectors that replace its tokens' embeddings (SigLIP with Gemma 3's projector)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels.layer_weights import Linear, Norm
from localllm.kernels.reference import rms_norm

from .architectures.vision import ImageFacts, VisionFacts
from .reader import Reader


class LayerNorm(NamedTuple):
    """A LayerNorm's weight and bias, float32 [hidden]."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor, eps: float) -> Tensor:
        return functional.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, eps).to(x.dtype)


class RmsNorm(NamedTuple):
    """An RMSNorm's weight, float32 [hidden]."""

    weight: Tensor

    def __call__(self, x: Tensor, eps: float) -> Tensor:
        return rms_norm(x, self.weight, eps)


AnyNorm = LayerNorm | RmsNorm


class TowerLayer(NamedTuple):
    """Attention among patches, then a feed-forward layer; if it is gated, `fc1` is gate and up."""

    norm1: AnyNorm
    qkv: Linear
    out: Linear
    norm2: AnyNorm
    fc1: Linear
    fc2: Linear


@dataclass(frozen=True)
class Tower:
    """The tower and its projector; everything except the linear layers runs in float32."""

    facts: VisionFacts
    dtype: torch.dtype
    patches: Tensor  # [hidden, 3 * patch_size²], colour planes of a patch one after another
    patch_bias: Tensor
    positions: Tensor  # [patches, hidden]
    layers: tuple[TowerLayer, ...]
    last_norm: AnyNorm
    norm: Norm  # over averaged patches
    projection: Tensor  # [hidden, hidden of the decoder]

    @torch.inference_mode()
    def __call__(self, pixels: Tensor) -> Tensor:
        """uint8 [image_size, image_size, 3] -> [tokens, hidden of the decoder]."""
        facts, size = self.facts, self.facts.patch_size
        colours = pixels.to(self.positions.device).float().div_(127.5).sub_(1.0)
        rows = colours.view(facts.side, size, facts.side, size, 3).permute(0, 2, 4, 1, 3).reshape(facts.side**2, -1)
        x = (functional.linear(rows, self.patches, self.patch_bias) + self.positions).to(self.dtype)
        for layer in self.layers:
            x = x + layer.out(self._attention(layer.qkv(layer.norm1(x, facts.eps))))
            inner = layer.fc1(layer.norm2(x, facts.eps))
            x = x + layer.fc2(functional.gelu(inner, approximate="tanh"))
        return self._project(self.last_norm(x, facts.eps))

    def _attention(self, qkv: Tensor) -> Tensor:
        """[patches, 3 * hidden] -> [patches, hidden]"""
        q, k, v = qkv.view(qkv.shape[0], 3, self.facts.num_heads, -1).permute(1, 2, 0, 3)
        mixed = functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        return mixed.transpose(0, 1).reshape(qkv.shape[0], -1)

    def _project(self, x: Tensor) -> Tensor:
        side, across = self.facts.side, math.isqrt(self.facts.tokens)
        step = side // across
        pooled = x.float().view(across, step, across, step, -1).mean((1, 3)).flatten(0, 1)
        return (rms_norm(pooled, self.norm.weight, self.norm.eps) @ self.projection).to(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the prepared weights."""
        layers = sum(one.nbytes for layer in self.layers for one in (layer.qkv, layer.out, layer.fc1, layer.fc2))
        norms = [self.last_norm, *(norm for layer in self.layers for norm in (layer.norm1, layer.norm2))]
        own = (self.patches, self.patch_bias, self.positions, self.norm.weight, self.projection)
        return layers + sum(t.nbytes for t in (*own, *(part for norm in norms for part in norm)))


class Parts:
    """Access to a tower's tensors by canonical name; shapes were checked when the model was opened."""

    def __init__(self, reader: Reader, facts: ImageFacts) -> None:
        self._reader, self._linears = reader, facts.linears()
        self._vectors = facts.vectors(reader.facts.hidden_size)
        self.dtype: torch.dtype = getattr(torch, reader.options.dtype)

    def tensor(self, name: str) -> Tensor:
        """Read a tensor as float32."""
        return self._reader.tensor(name, self._vectors[name])

    def norm(self, name: str) -> AnyNorm:
        """A LayerNorm if it has a bias, else an RMSNorm."""
        weight, bias = self.tensor(f"{name}.weight"), f"{name}.bias"
        return LayerNorm(weight, self.tensor(bias)) if bias in self._vectors else RmsNorm(weight)

    def linear(self, *names: str) -> Linear:
        """Read modules that share their input as one."""
        return self._reader.linear("vision", names, [self._linears[name] for name in names])


def load_tower(reader: Reader, facts: VisionFacts) -> Tower:
    """Load the tower."""
    parts = Parts(reader, facts)

    def layer(start: str) -> TowerLayer:
        return TowerLayer(
            norm1=parts.norm(f"{start}layer_norm1"),
            qkv=parts.linear(*(f"{start}self_attn.{name}_proj" for name in "qkv")),
            out=parts.linear(f"{start}self_attn.out_proj"),
            norm2=parts.norm(f"{start}layer_norm2"),
            fc1=parts.linear(f"{start}mlp.fc1"),
            fc2=parts.linear(f"{start}mlp.fc2"),
        )

    return Tower(
        facts,
        parts.dtype,
        parts.tensor("vision.embeddings.patch_embedding.weight").flatten(1),
        parts.tensor("vision.embeddings.patch_embedding.bias"),
        parts.tensor("vision.embeddings.position_embedding.weight"),
        tuple(layer(f"vision.encoder.layers.{index}.") for index in range(facts.num_layers)),
        parts.norm("vision.post_layernorm"),
        Norm(parts.tensor("projector.mm_soft_emb_norm.weight") + reader.facts.norm_offset, facts.eps),
        parts.tensor("projector.mm_input_projection_weight"),
    )

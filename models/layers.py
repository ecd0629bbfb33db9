"""What every architecture is made of: `LayerSpec` says what a layer has, `DecoderLayer` holds it.

Weights are the frozen values of `kernels.layer_weights`; nothing here knows how they are stored or computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from localllm.kernels.embedding import Embedding
from localllm.kernels.layer_weights import (
    AttentionWeights,
    HeadWeights,
    Linear,
    LinearPart,
    MlpWeights,
    Norm,
)

__all__ = [
    "AttentionWeights",
    "DecoderLayer",
    "Embedding",
    "HeadWeights",
    "LayerSpec",
    "Linear",
    "LinearPart",
    "MlpWeights",
    "Norm",
]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What a decoder layer consists of, by its names in the checkpoint below `model.layers.{i}.`.

    A bias that is stored is used; one that the spec names must be there.
    """

    attn_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    post_attn_norm: str | None = None
    """on what attention adds to the residual"""
    post_mlp_norm: str | None = None
    """on what the feed-forward layer adds to the residual"""
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and a gated feed-forward layer, each added to the residual stream."""

    attention: AttentionWeights
    mlp: MlpWeights

    @property
    def nbytes(self) -> int:
        """Bytes of its prepared weights, norms included."""
        attention, mlp = self.attention, self.mlp
        norms = (attention.norm, attention.q_norm, attention.k_norm, attention.post_norm, mlp.norm, mlp.post_norm)
        linears = (attention.qkv, attention.out, mlp.gate_up, mlp.down)
        return sum(linear.nbytes for linear in linears) + sum(n.weight.nbytes for n in norms if n is not None)

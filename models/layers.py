"""What every architecture is made of.

Weights are the frozen values of `kernels.layer_weights`; nothing here knows how they are stored or computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from localllm.kernels.embedding import Embedding
from localllm.kernels.layer_weights import AttentionWeights, HeadWeights, Linear, LinearPart, MlpWeights, Norm

__all__ = ["AttentionWeights", "DecoderLayer", "Embedding", "HeadWeights", "Linear", "LinearPart", "MlpWeights", "Norm"]


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

"""`Weight`: one linear layer's weight in canonical form, produced by `quant/` and repacked by `Impl.prepare`.

N = outputs, K = inputs, g = group_size. 4-bit codes: the low nibble of byte j is element 2j, the high one 2j + 1.

form      qweight               other tensors                                         value of element (n, k)
dense     [N, K] f32|bf16|f16                                                         q
int4g     u8 [N, K/2]           scales [N, K/g]; none | zeros u8 [N, K/g] |           s * (q - 8) | s * (q - z) |
                                mins float [N, K/g]                                   s * q + m
int8      i8 [N, K]             scales [N, 1] (row) or [N, K/g]                       s * q
fp4g16    u8 [N, K/2]           scales e4m3 [N, K/16], global_scale f32 [N]           e2m1(q) * s * global_scale[n]
fp4g32    u8 [N, K/2]           scales u8 E8M0 [N, K/32]                              e2m1(q) * 2^(s - 127)
fp8       e4m3 [N, K]           scales f32: [1] | [N, 1] | [ceil N/128, ceil K/128]   q * s
fp8mx     e4m3 [N, K]           scales u8 E8M0 [N, K/32]                              q * 2^(s - 127)
gguf      u8 [N, row_bytes]     block_type names the layout                           see kernels.gguf_blocks
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Weight(NamedTuple):
    """See the table above. x is first multiplied by `pre_scale` [K], then gathered as x[:, perm] (`perm` i32 [K])."""

    form: str
    shape: tuple[int, int]
    qweight: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    mins: Tensor | None = None
    global_scale: Tensor | None = None
    perm: Tensor | None = None
    pre_scale: Tensor | None = None
    group_size: int = 0
    block_type: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self if isinstance(t, Tensor))

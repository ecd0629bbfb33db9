"""`KVPages`: one layer's paged KV cache, in one of the KV formats.

format  k, v                                               scales
f32     float32                                            none
bf16    bfloat16                                           none
fp16    float16                                            none
int8    int8; k rotated by `hadamard` after RoPE, as is q  per token and head: max|x| / 127
fp8     uint8 holding E4M3 bits                            per token and head: max|x| / 448; or one per tensor
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# KV format -> dtype of its pages
KV_DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.uint8,
}
SCALED_FORMATS = frozenset(("int8", "fp8"))


class KVPages(NamedTuple):
    """Keys and values of one layer. With latent attention: k holds latents, v the RoPE parts of the keys, one head.

    k, v                [num_pages, num_kv_heads, page_size, head_dim]   see the table above; v may be narrower
    k_scales, v_scales  float32 [num_pages, num_kv_heads, page_size]; [1] if the checkpoint has one scale per layer
                        (fp8 only); None for formats without scales
    index_keys          float32 or bfloat16 [num_pages, page_size, dim]: index keys of the tokens, if there is an index;
                        [..., 2 dim] with the logits of their weights in a pooled index
    block_keys          the same type [num_pages, page_size / ratio, dim]: those of whole blocks of `ratio` tokens

    Compressed attention keeps in `index_keys` what entries are made of, and in `block_keys` the entries.
    """

    k: Tensor
    v: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None
    index_keys: Tensor | None = None
    block_keys: Tensor | None = None

    @classmethod
    def empty(
        cls,
        kv_format: str,
        num_pages: int,
        num_kv_heads: int,
        page_size: int,
        head_dim: int,
        value_dim: int | None = None,
    ) -> KVPages:
        """Zeros on the CPU, with scales per token and head if the format has scales; `value_dim` None: head_dim."""
        rows, dtype = (num_pages, num_kv_heads, page_size), KV_DTYPES[kv_format]
        scales = [torch.zeros(rows) for _ in range(2)] if kv_format in SCALED_FORMATS else [None, None]
        k, v = (
            torch.zeros((*rows, dim), dtype=dtype) for dim in (head_dim, head_dim if value_dim is None else value_dim)
        )
        return cls(k, v, *scales)

    @property
    def format(self) -> str:
        """f32 | bf16 | fp16 | int8 | fp8"""
        return next(name for name, dtype in KV_DTYPES.items() if dtype is self.k.dtype)


class CompressedPages(NamedTuple):
    """Pages of one layer with compressed attention: those of its last tokens, and those of its entries."""

    window: KVPages
    entries: KVPages

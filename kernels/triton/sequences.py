"""Finds the sequence that a program works for, by binary search in `cu_query_lens`; used by kernels of this folder."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sequence_of(place, cu_query_lens, num_seqs, TOKENS: tl.constexpr, STEPS: tl.constexpr):
    """The last sequence that starts at or before `place`: a token, or with TOKENS a tile of that many of one sequence.

    Sequence s owns the tiles from cu_query_lens[s] // TOKENS + s on. 2^STEPS is at least the number of sequences.
    """
    low = 0
    high = num_seqs
    for _ in range(STEPS):
        middle = (low + high) // 2
        start = tl.load(cu_query_lens + middle)
        if TOKENS:
            start = start // TOKENS + middle
        later = start > place
        low = tl.where(later, low, middle)
        high = tl.where(later, middle, high)
    return low


@triton.jit
def query_of(
    row, cu_query_lens, seq_lens, num_seqs, first_token, BY_TOKEN: tl.constexpr, STEPS: tl.constexpr
):  # fmt: skip
    """(token, sequence, visible keys without a window) of a row: a token, or a sequence (0 keys if several queries)."""
    if BY_TOKEN:
        token = first_token + row
        seq = sequence_of(token, cu_query_lens, num_seqs, 0, STEPS)
        length = tl.load(seq_lens + seq) - (tl.load(cu_query_lens + seq + 1) - token) + 1
    else:
        seq = row
        token = tl.load(cu_query_lens + seq)
        single = tl.load(cu_query_lens + seq + 1) - token == 1
        length = tl.where(single, tl.load(seq_lens + seq), 0)
    return token, seq, length

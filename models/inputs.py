"""Inputs of a forward pass: one step's tokens, and where their keys and values go."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """One cache group's view of the step (full attention or one window size: `models.kv_cache.CacheGroup`)."""

    # int32 [num_seqs, max_pages]; -1 for pages that left the window, and past the end
    block_table: Tensor
    slot_mapping: Tensor  # int64 [num_tokens]; slot = page_id * page_size + offset


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Consecutive tokens of one image in a step: all of them, or the remaining ones not computed yet."""

    sequence: int  # row of the block tables
    first: int  # first row in the step
    position: int  # of the first row, in its sequence
    vectors: Tensor  # [rows, hidden], instead of embeddings; DeepStack vectors for the first layers follow along dim 1


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One forward pass over several sequences, with their new tokens concatenated."""

    token_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]: RoPE positions
    query_lens: tuple[int, ...]  # new tokens per sequence
    seq_lens: tuple[int, ...]  # tokens per sequence, including this step's
    cu_query_lens: Tensor  # int32 [num_seqs + 1]
    seq_lens_tensor: Tensor  # int32 [num_seqs]
    # int64 [num_rows], ascending: token rows whose logits are wanted; per sequence none or its last ones
    logits_indices: Tensor
    groups: tuple[AttentionInputs, ...]  # per cache group
    slots: Tensor | None = None  # int64 [num_seqs]: state slots of the sequences; None if no layer keeps a state
    # int32 [len(slots) + 1]: sequence starts for stateful layers, if all other layers treat each token as a sequence
    state_starts: Tensor | None = None
    images: tuple[ImageRows, ...] = ()
    image_positions: Tensor | None = None  # int64 [2, num_tokens]: row and column positions (M-RoPE)
    ngram_rows: Tensor | None = None  # those of `NGramRows`, where a captured step reads them; None: read them now
    # int32: adapter slot of every token, -1 for none, and the same for `logits_indices`; None: no adapters in this step
    places: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has exactly one new token and its logits are wanted."""
        return len(self.seq_lens) == self.positions.shape[0] and self.wants_every_row

    @property
    def wants_every_row(self) -> bool:
        """Whether the logits of every token are wanted."""
        return self.positions.shape[0] == self.logits_indices.shape[0]

"""What a forward pass is a function of: one step's tokens and where their keys and values go."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """One cache group's view of the step (full attention, or a window W: `models.kv_cache.CacheGroup`)."""

    # int32 [num_seqs, max_pages]; entries of pages that fell out of the window, or past the end, are -1
    block_table: Tensor
    slot_mapping: Tensor  # int64 [num_tokens]; slot = page_id * page_size + offset


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Consecutive tokens of one image in a step: the last of its tokens that are not computed yet, or all."""

    sequence: int  # whose: a row of the block tables
    first: int  # row of the step
    position: int  # in its sequence
    vectors: Tensor  # [rows, hidden], what they have in place of an embedding; then what is added behind first layers


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One forward for many sequences, their new tokens laid end to end."""

    token_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]: what keys turn by
    query_lens: tuple[int, ...]  # new tokens per sequence
    seq_lens: tuple[int, ...]  # tokens per sequence, this step's included
    cu_query_lens: Tensor  # int32 [num_seqs + 1]
    seq_lens_tensor: Tensor  # int32 [num_seqs]
    # int64 [num_rows], ascending: the token rows whose logits are wanted; of every sequence none, or its last ones
    logits_indices: Tensor
    groups: tuple[AttentionInputs, ...]  # per cache group
    slots: Tensor | None = None  # int64 [num_seqs]: where the sequences' states are; None where no layer keeps one
    # int32 [len(slots) + 1]: where sequences begin for layers with states, if each token is one of its own elsewhere
    state_starts: Tensor | None = None
    images: tuple[ImageRows, ...] = ()
    image_positions: Tensor | None = None  # int64 [2, num_tokens]: by rows and columns, where images have them
    # int32: where the adapter of every token is, -1 for none, and the same of `logits_indices`; None: no token has one
    places: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one token here, and its logits are wanted."""
        return len(self.seq_lens) == self.positions.shape[0] and self.wants_every_row

    @property
    def wants_every_row(self) -> bool:
        """Whether the logits of every token are wanted."""
        return self.positions.shape[0] == self.logits_indices.shape[0]

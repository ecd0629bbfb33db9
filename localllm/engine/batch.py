"""A step as tensors: `Step` -> `ForwardBatch`."""

from __future__ import annotations

import numpy as np
import torch

from localllm.models.inputs import AttentionInputs, ForwardBatch

from .draw import from_host
from .scheduler import Scheduled, Step

DTYPES = {np.int64: torch.int64, np.int32: torch.int32}


class BatchBuilder:
    """Lays the scheduled tokens end to end and finds their slots. Holds nothing between steps."""

    def __init__(self, num_groups: int, page_size: int, device: torch.device) -> None:
        self.num_groups = num_groups
        self.page_size = page_size
        self.device = device

    def build(self, step: Step) -> ForwardBatch:
        """Rows of logits come in the order of `step.scheduled`: all of a chunk, or its last token if it ends there."""
        parts = step.scheduled
        token_ids: list[int] = []
        for part in parts:
            known = part.sequence.token_ids[part.start : part.start + part.num_tokens]
            token_ids += known or [0]  # one that is sampled now: `Draw.fill` puts it here
        positions = np.concatenate([np.arange(p.start, p.start + p.num_tokens, dtype=np.int64) for p in parts])
        query_lens = tuple(p.num_tokens for p in parts)
        seq_lens = tuple(p.start + p.num_tokens for p in parts)
        starts = np.zeros(len(parts) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=starts[1:])
        rows: list[int] = []
        for part, start in zip(parts, starts[:-1].tolist(), strict=True):
            rows += row_range(part, start)
        return ForwardBatch(
            token_ids=self._tensor(np.asarray(token_ids, dtype=np.int64)),
            positions=self._tensor(positions),
            query_lens=query_lens,
            seq_lens=seq_lens,
            cu_query_lens=self._tensor(starts),
            seq_lens_tensor=self._tensor(np.asarray(seq_lens, dtype=np.int32)),
            logits_indices=self._tensor(np.asarray(rows, dtype=np.int64)),
            groups=tuple(self._group(parts, group, positions) for group in range(self.num_groups)),
        )

    def _group(self, parts: list[Scheduled], group: int, positions: np.ndarray) -> AttentionInputs:
        tables = [p.sequence.block_tables[group] for p in parts]
        table = np.full((len(parts), max(len(t) for t in tables)), -1, dtype=np.int32)
        for row, pages in zip(table, tables, strict=True):
            row[: len(pages)] = pages
        owner = np.repeat(np.arange(len(parts)), [p.num_tokens for p in parts])
        slots = table[owner, positions // self.page_size].astype(np.int64) * self.page_size + positions % self.page_size
        assert int(slots.min()) >= 0, "a token without a page"
        return AttentionInputs(self._tensor(table), self._tensor(slots))

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return from_host(array, DTYPES[array.dtype.type], self.device)


def row_range(part: Scheduled, start: int) -> range:
    """The token rows, counted over the batch, whose logits `part` needs when its first token is row `start`."""
    end = start + part.num_tokens
    if part.sequence.wants_all_rows:
        if part.start + part.num_tokens > part.sequence.num_prompt_tokens:  # decoding: only the new one
            return range(end - 1, end)
        return range(start, end)
    return range(end - 1, end) if part.is_last_chunk else range(0)

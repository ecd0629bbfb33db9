"""The inputs of decode steps in memory that stays where it is, as captured graphs need it.

One small copy to the device a step; rows of block tables follow only when a sequence got or lost a page. Rows of a
bucket that no sequence fills compute a token of their own, at position 0 of a page that belongs to nobody.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch
from torch import Tensor

from localllm.models.inputs import AttentionInputs, ForwardBatch

from .sampled_tokens import SampledTokens
from .scheduler import Scheduled

# rows of the small buffer; one row of slots per cache group, and one of states
TOKEN, POSITION, LENGTH, SLOTS = range(4)


class DecodeInputs:
    """Buffers for up to `most` sequences.

    max_context   tokens a sequence may hold
    scratch       per cache group: the page that belongs to nobody
    scratch_slot  the same of the states' slots; -1 of a model without states
    """

    def __init__(
        self,
        most: int,
        max_context: int,
        page_size: int,
        scratch: Many[int],
        device: str | torch.device,
        scratch_slot: int = -1,
    ) -> None:
        self.most = most
        self.max_context = max_context
        self.page_size = page_size
        self.scratch = tuple(scratch)
        self.device = torch.device(device)
        width = -(-max_context // page_size)
        self.states = SLOTS + len(self.scratch)  # the row of the states' slots
        self.has_states = scratch_slot >= 0
        self._small = torch.zeros((self.states + 1, most), dtype=torch.int64, device=self.device)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=self.device)
        self._rows = torch.arange(most, dtype=torch.int64, device=self.device)
        self._tables = [torch.full((most, width), -1, dtype=torch.int32, device=self.device) for _ in self.scratch]
        # per row: whose block table lies there, and in which version; None: the scratch page
        self._held: list[tuple[int, int] | None] = [(0, 0)] * most
        self._idle = np.zeros((self.states + 1, most), dtype=np.int64)
        self._idle[self.states] = scratch_slot
        self._idle.view(np.int32)[LENGTH, :most] = 1
        for group, page in enumerate(self.scratch):
            self._idle[SLOTS + group] = page * page_size
        self.load(())

    def load(self, parts: Many[Scheduled], before: SampledTokens | None = None) -> None:
        """Take the parts of a step, one token each, into the first rows; the others become idle."""
        small = self._idle.copy()
        lengths = small.view(np.int32)[LENGTH]
        for row, part in enumerate(parts):
            sequence, at = part.sequence, part.start
            page, offset = divmod(at, self.page_size)
            small[TOKEN, row] = sequence.token_ids[at] if at < len(sequence.token_ids) else 0
            small[POSITION, row] = at + sequence.shift
            lengths[row] = at + 1
            small[self.states, row] = sequence.slot
            for group, table in enumerate(sequence.block_tables):
                assert table[page] >= 0, "a token without a page"
                small[SLOTS + group, row] = table[page] * self.page_size + offset
        self._copy(self._small, small)
        for row in range(self.most):
            self._load_table(row, parts[row] if row < len(parts) else None)
        if before is not None:
            before.fill(self._small[TOKEN], parts)

    def _load_table(self, row: int, part: Scheduled | None) -> None:
        key = None if part is None else (part.sequence.number, part.sequence.table_version)
        if self._held[row] == key:
            return
        self._held[row] = key
        for group, table in enumerate(self._tables):
            pages = np.full(table.shape[1], -1, dtype=np.int32)
            known = [self.scratch[group]] if part is None else part.sequence.block_tables[group]
            pages[: len(known)] = known
            self._copy(table[row], pages)

    def _copy(self, target: Tensor, values: np.ndarray) -> None:
        source = torch.from_numpy(values)
        if self.device.type != "cpu":
            source = source.pin_memory()  # the allocator of pinned memory keeps it until the copy is done
        target.copy_(source, non_blocking=True)

    def batch(self, bucket: int) -> ForwardBatch:
        """The first `bucket` rows as a batch: the same tensors every time."""
        small = self._small[:, :bucket]
        groups = tuple(
            AttentionInputs(table[:bucket], small[SLOTS + group]) for group, table in enumerate(self._tables)
        )
        return ForwardBatch(
            token_ids=small[TOKEN],
            positions=small[POSITION],
            query_lens=(1,) * bucket,
            seq_lens=(self.max_context,) * bucket,
            cu_query_lens=self._starts[: bucket + 1],
            seq_lens_tensor=self._small[LENGTH].view(torch.int32)[:bucket],
            logits_indices=self._rows[:bucket],
            groups=groups,
            slots=small[self.states] if self.has_states else None,
        )

"""The inputs of decode steps in memory that stays where it is, as captured graphs need it.

A row is a token with a length and a block table of its own, so that tokens of one sequence may stand in rows side by
side: all keys of a layer are written before attention reads any. One small copy to the device a step; rows of block
tables follow only when a sequence got or lost a page, or other rows. Rows of a bucket that no sequence fills compute a
token of their own, whose key and value go to a page that belongs to nobody.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch
from torch import Tensor

from localllm.models.inputs import AttentionInputs, ForwardBatch

from .sampled_tokens import SampledTokens
from .scheduler import Scheduled
from .sequence import Sequence

# rows of the small buffer; one row of slots per cache group, and one of states
TOKEN, POSITION, LENGTH, STARTS, SLOTS = range(5)


class DecodeInputs:
    """Buffers for up to `most` tokens.

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
        # per row: whose block table lies there, in which version; None: the scratch page
        self._held: list[tuple[int, int] | None] = [(0, 0)] * most
        self._idle = np.zeros((self.states + 1, most), dtype=np.int64)
        self._idle[self.states] = scratch_slot
        self._idle.view(np.int32)[LENGTH, :most] = 1
        for group, page in enumerate(self.scratch):
            self._idle[SLOTS + group] = page * page_size
        self.load((), rows=most)

    def load(
        self,
        parts: Many[Scheduled],
        before: SampledTokens | None = None,
        rows: int = 0,
        ids: Many[int] | Tensor | None = None,
    ) -> None:
        """Take the tokens of a step, `rows` at most, into the first rows; the others become idle.

        before   gives tokens that are not known yet, one for each part
        ids      in place of the parts' own tokens; a tensor is on the device
        """
        small = self._idle.copy()
        lengths, starts = small.view(np.int32)[LENGTH], small.view(np.int32)[STARTS]
        row = 0
        for number, part in enumerate(parts):
            sequence = part.sequence
            small[self.states, number] = sequence.slot
            starts[number] = row
            own = [*sequence.token_ids[part.start : part.start + part.num_known], *part.drafts]
            small[TOKEN, row : row + len(own)] = own  # none where its one token is not known yet
            for at in range(part.start, part.start + part.num_tokens):
                page, offset = divmod(at, self.page_size)
                small[POSITION, row] = at + sequence.shift
                lengths[row] = at + 1
                for group, table in enumerate(sequence.block_tables):
                    assert table[page] >= 0, "a token without a page"
                    small[SLOTS + group, row] = table[page] * self.page_size + offset
                row += 1
            self._load_tables(row - part.num_tokens, row, part.sequence)
        starts[len(parts)] = row
        starts[len(parts) + 1 :] = rows  # idle rows are one sequence, and there may be empty ones behind it
        self._load_tables(row, max(row, rows), None)
        if ids is not None and not isinstance(ids, Tensor):
            small[TOKEN, :row] = ids
        self._copy(self._small, small)
        if isinstance(ids, Tensor):
            self._small[TOKEN, :row].copy_(ids)
        if before is not None:
            before.fill(self._small[TOKEN], parts)

    def _load_tables(self, first: int, end: int, sequence: Sequence | None) -> None:
        """Give rows [first, end) the block tables of a sequence, or the scratch page: one copy a cache group."""
        key = None if sequence is None else (sequence.number, sequence.table_version)
        if all(held == key for held in self._held[first:end]):
            return
        self._held[first:end] = [key] * (end - first)
        for group, table in enumerate(self._tables):
            pages = np.full((end - first, table.shape[1]), -1, dtype=np.int32)
            known = [self.scratch[group]] if sequence is None else sequence.block_tables[group]
            pages[:, : len(known)] = known
            self._copy(table[first:end], pages)

    def _copy(self, target: Tensor, values: np.ndarray) -> None:
        source = torch.from_numpy(values)
        if self.device.type != "cpu":
            source = source.pin_memory()  # the allocator of pinned memory keeps it until the copy is done
        target.copy_(source, non_blocking=True)

    def batch(self, bucket: int, several: bool = False) -> ForwardBatch:
        """The first `bucket` rows as a batch: the same tensors every time; `several` as of `cuda_graph.Shape`."""
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
            slots=small[self.states, : bucket - several] if self.has_states else None,
            state_starts=self._small[STARTS].view(torch.int32)[:bucket] if several else None,
        )

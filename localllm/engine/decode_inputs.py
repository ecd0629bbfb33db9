"""Inputs of decode steps in fixed memory, as captured graphs need them.

Each row is a token with its own length and block table, so several tokens of one sequence can take adjacent rows: a
layer writes all keys before attention reads any. A step needs one small copy to the device; block tables are copied
only when a sequence's pages or rows change. Padding rows of a bucket compute a dummy token that writes to a scratch
page.
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

# rows of the small buffer, followed by one row of KV slots per cache group and one of state slots
TOKEN, POSITION, LENGTH, STARTS, SLOTS = range(5)
UNKNOWN = (0, 0)  # no sequence's block table


class DecodeInputs:
    """Input buffers for up to `most` tokens.

    max_context   maximum tokens per sequence
    scratch       scratch page per cache group
    scratch_slot  scratch state slot; -1 for models without recurrent layers
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
        self.states = SLOTS + len(self.scratch)  # the row of state slots
        self.has_states = scratch_slot >= 0
        self._small = torch.zeros((self.states + 1, most), dtype=torch.int64, device=self.device)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=self.device)
        self._rows = torch.arange(most, dtype=torch.int64, device=self.device)
        self._tables = [torch.full((most, width), -1, dtype=torch.int32, device=self.device) for _ in self.scratch]
        # per row: (sequence, version) of the block table there; None for the scratch page
        self._held: list[tuple[int, int] | None] = [UNKNOWN] * most
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
        blocks: bool = False,
    ) -> None:
        """Load the tokens of a step into the first rows; the rest, up to `rows`, become padding.

        before   provides tokens not yet known on the host, one per part
        ids      replaces the parts' own tokens; a tensor must be on the device
        blocks   attention sees the whole part from each of its tokens, not only what is before the token
        """
        small = self._idle.copy()
        lengths, starts = small.view(np.int32)[LENGTH], small.view(np.int32)[STARTS]
        row = 0
        for number, part in enumerate(parts):
            sequence = part.sequence
            small[self.states, number] = sequence.slot
            starts[number] = row
            own = [*sequence.token_ids[part.start : part.start + part.num_known], *part.drafts]
            small[TOKEN, row : row + len(own)] = own  # empty if its only token is not known yet
            for at in range(part.start, part.start + part.num_tokens):
                page, offset = divmod(at, self.page_size)
                small[POSITION, row] = at + sequence.shift
                lengths[row] = part.start + part.num_tokens if blocks else at + 1
                for group, table in enumerate(sequence.block_tables):
                    assert table[page] >= 0, "a token without a page"
                    small[SLOTS + group, row] = table[page] * self.page_size + offset
                row += 1
            self._load_tables(row - part.num_tokens, row, part.sequence)
        starts[len(parts)] = row
        starts[len(parts) + 1 :] = rows  # padding rows form one sequence, possibly followed by empty ones
        self._load_tables(row, max(row, rows), None)
        if ids is not None and not isinstance(ids, Tensor):
            small[TOKEN, :row] = ids
        self._copy(self._small, small)
        if isinstance(ids, Tensor):
            self._small[TOKEN, :row].copy_(ids)
        if before is not None:
            before.fill(self._small[TOKEN], parts)

    def _load_tables(self, first: int, end: int, sequence: Sequence | None) -> None:
        """Load a sequence's block tables, or the scratch page, into rows [first, end): one copy per cache group."""
        key = None if sequence is None else (sequence.number, sequence.table_version)
        if all(held == key for held in self._held[first:end]):
            return
        self._held[first:end] = [UNKNOWN] * (end - first)  # until all copies have succeeded
        for group, table in enumerate(self._tables):
            pages = np.full((end - first, table.shape[1]), -1, dtype=np.int32)
            known = [self.scratch[group]] if sequence is None else sequence.block_tables[group]
            pages[:, : len(known)] = known
            self._copy(table[first:end], pages)
        self._held[first:end] = [key] * (end - first)

    def _copy(self, target: Tensor, values: np.ndarray) -> None:
        source = torch.from_numpy(values)
        if self.device.type != "cpu":
            source = source.pin_memory()  # the pinned-memory allocator keeps it alive until the copy is done
        target.copy_(source, non_blocking=True)

    def batch(self, bucket: int, several: bool = False) -> ForwardBatch:
        """The first `bucket` rows as a batch over the same tensors every time; `several` as in `cuda_graph.Shape`."""
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

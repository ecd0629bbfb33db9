"""A step as tensors: `Step` -> `ForwardBatch`."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from localllm.models.inputs import AttentionInputs, ForwardBatch, ImageRows

from .sampled_tokens import from_host
from .scheduler import Scheduled, Step

DTYPES = {np.int64: torch.int64, np.int32: torch.int32}


class Decoding(NamedTuple):
    """The tensors of a decode step of so many sequences, over memory that every such step writes anew."""

    layout: struct.Struct
    memory: bytearray
    rows: tuple[torch.Tensor, ...]  # int64 [sequences] each: token ids, positions, slots of every cache group
    lens: torch.Tensor  # int32 [sequences]

    @classmethod
    def of(cls, num_rows: int, count: int) -> Decoding:
        layout = struct.Struct(f"={num_rows * count}q{count}i")
        memory = bytearray(layout.size)
        rows = torch.frombuffer(memory, dtype=torch.int64, count=num_rows * count).view(num_rows, count)
        lens = torch.frombuffer(memory, dtype=torch.int32, count=count, offset=rows.nbytes)
        return cls(layout, memory, rows.unbind(0), lens)


class BatchBuilder:
    """Lays the scheduled tokens end to end and finds their slots.

    Between steps it holds the block tables of the last decode step: they change every `page_size` tokens. What else can
    be kept is kept: a step begins with cold caches (the weights went through them), and then the smallest tensor op
    takes 10 to 40 us.
    """

    def __init__(self, num_groups: int, page_size: int, device: torch.device) -> None:
        self.num_groups = num_groups
        self.page_size = page_size
        self.device = device
        # whose block tables, in which version; one tensor per cache group
        self._tables: tuple[list[tuple[int, int]], list[torch.Tensor]] = ([], [])
        self._states: tuple[list[int], torch.Tensor] = ([], torch.empty(0))  # slots of the last step's sequences
        self._adapted: tuple[list[int], np.ndarray] = ([], np.empty(0, dtype=np.int32))  # the same of their adapters
        # by number of sequences that decode: `cu_query_lens` and `logits_indices`, which nobody writes to
        self._counts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # the same, on the CPU, where a step is over before the next one is built
        self._decoding: dict[int, Decoding] = {}

    def build(self, step: Step) -> ForwardBatch:
        """Rows of logits come in the order of `step.scheduled`: all of a chunk, or its last token if it ends there."""
        parts = step.scheduled
        if all(part.num_tokens == 1 and part.is_last_chunk for part in parts):
            return self._decode(parts)
        token_ids: list[int] = []
        for part in parts:
            known = part.sequence.token_ids[part.start : part.start + part.num_known]
            token_ids += known or [0]  # one that is sampled now: `SampledTokens.fill` puts it here
            token_ids += part.drafts
        positions = np.concatenate([np.arange(p.start, p.start + p.num_tokens, dtype=np.int64) for p in parts])
        query_lens = tuple(p.num_tokens for p in parts)
        seq_lens = tuple(p.start + p.num_tokens for p in parts)
        starts = np.zeros(len(parts) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=starts[1:])
        rows: list[int] = []
        for part, start in zip(parts, starts[:-1].tolist(), strict=True):
            rows += row_range(part, start)
        turned, of_images = turned_positions(parts, positions)
        places = self._places(parts)
        places = None if places is None else np.repeat(places, query_lens)
        return ForwardBatch(
            token_ids=self._tensor(np.asarray(token_ids, dtype=np.int64)),
            positions=self._tensor(turned),
            image_positions=None if of_images is None else self._tensor(of_images),
            query_lens=query_lens,
            seq_lens=seq_lens,
            cu_query_lens=self._tensor(starts),
            seq_lens_tensor=self._tensor(np.asarray(seq_lens, dtype=np.int32)),
            logits_indices=self._tensor(np.asarray(rows, dtype=np.int64)),
            groups=tuple(self._group(parts, group, positions) for group in range(self.num_groups)),
            slots=self._slots(parts),
            images=tuple(image_rows(parts)),
            places=None if places is None else (places, places[rows]),
        )

    def _decode(self, parts: list[Scheduled]) -> ForwardBatch:
        """One token each, and its logits: the step that runs most often."""
        ids: list[int] = []
        positions: list[int] = []
        lengths: list[int] = []
        slots: list[list[int]] = [[] for _ in range(self.num_groups)]
        for part in parts:
            sequence, at = part.sequence, part.start
            page, offset = divmod(at, self.page_size)
            ids.append(sequence.token_ids[at] if at < len(sequence.token_ids) else 0)  # else sampled now
            positions.append(at + sequence.shift)
            lengths.append(at + 1)
            for table, found in zip(sequence.block_tables, slots, strict=True):
                assert table[page] >= 0, "a token without a page"
                found.append(table[page] * self.page_size + offset)
        (token_ids, where, *slot_mappings), lens = self._decode_tensors(ids, positions, slots, lengths)
        seq_lens = tuple(lengths)
        held = [(part.sequence.number, part.sequence.table_version) for part in parts]
        if held != self._tables[0]:
            self._tables = held, [self._tensor(self._table(parts, group)) for group in range(self.num_groups)]
        count = len(parts)
        if count not in self._counts:
            self._counts[count] = (
                self._tensor(np.arange(count + 1, dtype=np.int32)),
                self._tensor(np.arange(count, dtype=np.int64)),
            )
        starts, rows = self._counts[count]
        places = self._places(parts)
        return ForwardBatch(
            token_ids=token_ids,
            positions=where,
            query_lens=(1,) * count,
            seq_lens=seq_lens,
            cu_query_lens=starts,
            seq_lens_tensor=lens,
            logits_indices=rows,
            groups=tuple(map(AttentionInputs, self._tables[1], slot_mappings)),
            slots=self._slots(parts),
            places=None if places is None else (places, places),
        )

    def _places(self, parts: list[Scheduled]) -> np.ndarray | None:
        """int32 [num_seqs]: where the adapters are, the same array while it says the same; None where none is."""
        places = [part.sequence.place for part in parts]
        if max(places) < 0:
            return None
        if places != self._adapted[0]:
            self._adapted = places, np.array(places, dtype=np.int32)
        return self._adapted[1]

    def _slots(self, parts: list[Scheduled]) -> torch.Tensor | None:
        """int64 [num_seqs], the same tensor while it says the same; None of a model without states."""
        held = [part.sequence.slot for part in parts]
        if min(held) < 0:
            return None
        if held != self._states[0]:
            self._states = held, self._tensor(np.array(held, dtype=np.int64))
        return self._states[1]

    def _decode_tensors(
        self, ids: list[int], positions: list[int], slots: list[list[int]], lengths: list[int]
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """(token ids, positions and each group's slots, int64 [sequences]), (lengths, int32 [sequences])"""
        count = len(ids)
        if self.device.type != "cpu":
            # rows of whole 16 bytes: kernels are compiled again for an address that is not a multiple of them
            rows = np.zeros((2 + len(slots), count + count % 2), dtype=np.int64)
            rows[:, :count] = [ids, positions, *slots]
            return self._tensor(rows)[:, :count].unbind(0), self._tensor(np.array(lengths, dtype=np.int32))
        kept = self._decoding.get(count)
        if kept is None:
            kept = self._decoding[count] = Decoding.of(2 + len(slots), count)
        kept.layout.pack_into(kept.memory, 0, *ids, *positions, *chain.from_iterable(slots), *lengths)
        return kept.rows, kept.lens

    def _group(self, parts: list[Scheduled], group: int, positions: np.ndarray) -> AttentionInputs:
        table = self._table(parts, group)
        owner = np.repeat(np.arange(len(parts)), [p.num_tokens for p in parts])
        slots = table[owner, positions // self.page_size].astype(np.int64) * self.page_size + positions % self.page_size
        assert int(slots.min()) >= 0, "a token without a page"
        return AttentionInputs(self._tensor(table), self._tensor(slots))

    def _table(self, parts: list[Scheduled], group: int) -> np.ndarray:
        """int32 [num_seqs, max_pages], -1 past the end of a sequence."""
        tables = [p.sequence.block_tables[group] for p in parts]
        table = np.full((len(parts), max(len(t) for t in tables)), -1, dtype=np.int32)
        for row, pages in zip(table, tables, strict=True):
            row[: len(pages)] = pages
        return table

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return from_host(array, DTYPES[array.dtype.type], self.device)


def image_rows(parts: list[Scheduled]) -> Iterator[ImageRows]:
    """The images of a step, or what of them it computes."""
    row = 0
    for index, part in enumerate(parts):
        end = part.start + part.num_tokens
        for image in part.sequence.request.images:
            first, last = max(image.start, part.start), min(image.end, end)
            if first < last:
                vectors = image.vectors[first - image.start : last - image.start]
                yield ImageRows(index, row + first - part.start, first, vectors)
        row += part.num_tokens


def turned_positions(parts: list[Scheduled], positions: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """What keys turn by, int64 [num_tokens], and where images differ in rows and columns those, int64 [2, num_tokens].

    All tokens of an image stand at one time, its rows and columns count on from there, and what follows comes after the
    larger of both. `positions` are the tokens' places in their sequences.
    """
    if all(image.grid is None for part in parts for image in part.sequence.request.images):
        return positions, None
    by_axis, row, differs = np.stack([positions] * 3), 0, False
    for part in parts:
        own = by_axis[:, row : row + part.num_tokens]
        for image in part.sequence.request.images:
            first, last = (min(max(0, at - part.start), part.num_tokens) for at in (image.start, image.end))
            if image.grid is not None and first < last:
                within = np.arange(first, last) + part.start - image.start
                own[:, first:last] -= within
                own[1, first:last] += within // image.grid[1]
                own[2, first:last] += within % image.grid[1]
                differs = True
            own[:, last:] += image.shift
        row += part.num_tokens
    return by_axis[0], by_axis[1:] if differs else None


def row_range(part: Scheduled, start: int) -> range:
    """The token rows, counted over the batch, whose logits `part` needs when its first token is row `start`."""
    end = start + part.num_tokens
    if part.sequence.wants_all_rows:
        if part.start + part.num_tokens > part.sequence.num_prompt_tokens:  # decoding: only what is new
            return range(end - 1 - len(part.drafts), end)
        return range(start, end)
    return range(end - 1 - len(part.drafts), end) if part.is_last_chunk else range(0)

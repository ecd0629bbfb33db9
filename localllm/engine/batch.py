"""Converts a `Step` to tensors: `Step` -> `ForwardBatch`."""

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
    """Reusable input tensors of a decode step with a given number of sequences."""

    layout: struct.Struct
    memory: bytearray
    rows: tuple[torch.Tensor, ...]  # int64 [sequences] each: token ids, positions, slots per cache group
    lens: torch.Tensor  # int32 [sequences]

    @classmethod
    def of(cls, num_rows: int, count: int) -> Decoding:
        layout = struct.Struct(f"={num_rows * count}q{count}i")
        memory = bytearray(layout.size)
        rows = torch.frombuffer(memory, dtype=torch.int64, count=num_rows * count).view(num_rows, count)
        lens = torch.frombuffer(memory, dtype=torch.int32, count=count, offset=rows.nbytes)
        return cls(layout, memory, rows.unbind(0), lens)


class BatchBuilder:
    """Concatenates the scheduled tokens and computes their slots.

    It keeps the block tables of the last decode step, which change only every `page_size` tokens, and other reusable
    tensors: a step starts with cold caches, since the weights evicted everything, so even a tiny op takes 10 to 40 us.
    """

    def __init__(self, num_groups: int, page_size: int, device: torch.device) -> None:
        self.num_groups = num_groups
        self.page_size = page_size
        self.device = device
        # (sequence, version) of the block tables, and one tensor per cache group
        self._tables: tuple[list[tuple[int, int]], list[torch.Tensor]] = ([], [])
        self._states: tuple[list[int], torch.Tensor] = ([], torch.empty(0))  # state slots of the last step
        self._adapted: tuple[list[int], np.ndarray] = ([], np.empty(0, dtype=np.int32))  # the same for adapters
        # number of decoding sequences -> `cu_query_lens` and `logits_indices`, which are read-only
        self._counts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # number of decoding sequences -> input tensors; only on the CPU, where a step ends before the next is built
        self._decoding: dict[int, Decoding] = {}

    def build(self, step: Step) -> ForwardBatch:
        """Build the batch of a step. Logit rows follow the order of `step.scheduled` (see `row_range`)."""
        parts = step.scheduled
        if all(part.num_tokens == 1 and part.is_last_chunk for part in parts):
            return self._decode(parts)
        token_ids: list[int] = []
        for part in parts:
            known = part.sequence.token_ids[part.start : part.start + part.num_known]
            token_ids += known or [0]  # a token still being sampled, which `SampledTokens.fill` inserts
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
        """Build a pure decode step with one token per sequence, the most frequent kind."""
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
        """int32 [num_seqs]: places of the adapters, reusing the last array if equal; None without adapters."""
        places = [part.sequence.place for part in parts]
        if max(places) < 0:
            return None
        if places != self._adapted[0]:
            self._adapted = places, np.array(places, dtype=np.int32)
        return self._adapted[1]

    def _slots(self, parts: list[Scheduled]) -> torch.Tensor | None:
        """int64 [num_seqs]: state slots, reusing the last tensor if equal; None for models without recurrent layers."""
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
            # align rows to 16 bytes, because Triton compiles another kernel variant for unaligned addresses
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
        """int32 [num_seqs, max_pages]: block tables, padded with -1."""
        tables = [p.sequence.block_tables[group] for p in parts]
        table = np.full((len(parts), max(len(t) for t in tables)), -1, dtype=np.int32)
        for row, pages in zip(table, tables, strict=True):
            row[: len(pages)] = pages
        return table

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return from_host(array, DTYPES[array.dtype.type], self.device)


def image_rows(parts: list[Scheduled]) -> Iterator[ImageRows]:
    """The images of a step, cut to the rows that it computes."""
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
    """RoPE positions int64 [num_tokens], plus rows and columns int64 [2, num_tokens] if images have a grid (M-RoPE).

    All tokens of an image share one temporal position; rows and columns count up from there, and the text after it
    continues after the larger of them. `positions` are the tokens' indices in their sequences.
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
    """The rows of the batch whose logits `part` needs, if its first token is row `start`."""
    end = start + part.num_tokens
    if part.sequence.wants_all_rows:
        if part.start + part.num_tokens > part.sequence.num_prompt_tokens:  # decoding: only the new tokens
            return range(end - 1 - len(part.drafts), end)
        return range(start, end)
    return range(end - 1 - len(part.drafts), end) if part.is_last_chunk else range(0)

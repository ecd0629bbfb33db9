"""Token masks of a step: filled by a thread of their own while the forward pass runs, one bitmask row a sequence."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from queue import SimpleQueue

import numpy as np

from .sequence import Sequence


class Filling:
    """The rows of one step, perhaps still being filled."""

    def __init__(self, sequences: list[Sequence], num_words: int) -> None:
        self._sequences = sequences
        self._rows = np.zeros((len(sequences), num_words), dtype=np.int32)
        self._done = threading.Event()

    def fill(self) -> None:
        """Fill every row. What a mask raises ends its own sequence only, when it is sampled."""
        for sequence, row in zip(self._sequences, self._rows, strict=True):
            assert sequence.token_mask is not None
            try:
                sequence.mask_row = row if sequence.token_mask.fill(row) else None
            except Exception as error:
                sequence.mask_row = error
        self._done.set()

    def wait(self) -> None:
        self._done.wait()


class MaskFiller:
    """Fills rows beside the engine's thread, which does not start before there is a masked sequence."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self._queue: SimpleQueue[Filling | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, sequences: Iterable[Sequence]) -> Filling | None:
        """Start filling the rows of those that have a mask, to be waited for after the forward pass; None without."""
        filling = self._filling(sequences)
        if filling is not None:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="masks", daemon=True)
                self._thread.start()
            self._queue.put(filling)
        return filling

    def fill(self, sequences: Iterable[Sequence]) -> None:
        """The same at once: for a step whose tokens became known while its forward pass was under way."""
        filling = self._filling(sequences)
        if filling is not None:
            filling.fill()

    def close(self) -> None:
        self._queue.put(None)

    def _filling(self, sequences: Iterable[Sequence]) -> Filling | None:
        masked = [sequence for sequence in sequences if sequence.token_mask is not None]
        return Filling(masked, self._num_words) if masked else None

    def _work(self) -> None:
        while (filling := self._queue.get()) is not None:
            filling.fill()

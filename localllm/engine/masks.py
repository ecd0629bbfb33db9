"""Token masks of a step, one bitmask row per sequence, filled in a separate thread during the forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from .sequence import Sequence


class MaskFiller:
    """Fills mask rows in its own thread, which starts with the first masked sequence."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self._thread = ThreadPoolExecutor(1, "masks")

    def begin(self, sequences: Iterable[Sequence]) -> Future[None] | None:
        """Start filling the rows of masked sequences; wait for the result after the forward pass. None without any."""
        masked = [sequence for sequence in sequences if sequence.token_mask is not None]
        return self._thread.submit(self.fill, masked) if masked else None

    def fill(self, sequences: Iterable[Sequence]) -> None:
        """Fill the rows now, for a step whose tokens became known only during its forward pass.

        An exception of a mask is stored in its row and ends only that sequence, when it is sampled.
        """
        for sequence in sequences:
            if sequence.token_mask is not None:
                row = np.zeros(self._num_words, dtype=np.int32)
                try:
                    sequence.mask_row = row if sequence.token_mask.fill(row) else None
                except Exception as error:
                    sequence.mask_row = error

    def close(self) -> None:
        self._thread.shutdown(wait=False)

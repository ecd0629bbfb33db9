"""Token masks of a step: filled by a thread of their own while the forward pass runs, one bitmask row a sequence."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from .sequence import Sequence


class MaskFiller:
    """Fills rows beside the engine's thread; its thread does not start before there is a masked sequence."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self._thread = ThreadPoolExecutor(1, "masks")

    def begin(self, sequences: Iterable[Sequence]) -> Future[None] | None:
        """Start filling the rows of those that have a mask, to be waited for after the forward pass; None without."""
        masked = [sequence for sequence in sequences if sequence.token_mask is not None]
        return self._thread.submit(self.fill, masked) if masked else None

    def fill(self, sequences: Iterable[Sequence]) -> None:
        """The same at once: for a step whose tokens became known while its forward pass was under way.

        What a mask raises ends its own sequence only, when it is sampled.
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

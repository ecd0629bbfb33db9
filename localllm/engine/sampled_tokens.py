"""`SampledTokens`: the tokens of one step, immediately on the device for the next step, and on the host on demand."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np
import torch
from torch import Tensor

from localllm.request import TokenLogprob

from .scheduler import Scheduled
from .sequence import Sequence

# a row's token with its log-probabilities, or the exception raised by that row alone
RowResult = tuple[int, TokenLogprob | None] | Exception


class SampledTokens:
    """One token for each of `sequences`.

    wait  blocks until the tokens are on the host
    ids   int64 on the device; built from the results if None
    rows  index of each sequence in `ids`; None for consecutive ones
    """

    def __init__(
        self,
        sequences: Many[Sequence],
        wait: Callable[[], list[RowResult]],
        ids: Tensor | None = None,
        rows: Many[int] | None = None,
    ) -> None:
        self.sequences = list(sequences)
        self._wait = wait
        self._ids = ids
        self._rows = range(len(self.sequences)) if rows is None else rows
        self._results: list[RowResult] | None = None

    def results(self) -> list[RowResult]:
        """The tokens, in the order of `sequences`."""
        if self._results is None:
            self._results = self._wait()
        return self._results

    def fill(self, token_ids: Tensor, parts: Many[Scheduled]) -> None:
        """Write the tokens of parts that run ahead into a batch's `token_ids` (int64, one row per part)."""
        row_of = {id(sequence): row for sequence, row in zip(self.sequences, self._rows, strict=True)}
        rows = [row_of[id(part.sequence)] for part in parts]
        ids = self._ids
        if ids is None:
            known = [0 if isinstance(result, Exception) else result[0] for result in self.results()]
            ids = self._ids = from_host(known, torch.int64, token_ids.device)
        if rows != list(range(len(rows))):
            ids = ids.index_select(0, from_host(rows, torch.int64, token_ids.device))
        token_ids[: len(rows)].copy_(ids[: len(rows)])


def from_host(values: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor from numbers or a numpy array; to a GPU it is copied asynchronously through pinned memory."""
    if isinstance(values, np.ndarray) and device.type == "cpu":  # the common case of a CPU step: no copy
        return torch.from_numpy(values).to(dtype)
    tensor = torch.as_tensor(values, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def copied_storages(values: Many[Tensor], new: Callable[[int], Tensor]) -> tuple[Tensor, ...]:
    """Copies of these tensors that share memory as the originals do.

    new   returns the uint8 tensor, of so many bytes, that a storage is copied to, asynchronously if it is pinned
    """
    copies: dict[int, Tensor] = {}
    for value in values:
        storage = value.untyped_storage()
        if storage.data_ptr() not in copies:
            whole = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
            copies[storage.data_ptr()] = new(storage.nbytes()).copy_(whole, non_blocking=True)

    def like(value: Tensor) -> Tensor:
        whole = copies[value.untyped_storage().data_ptr()]
        return whole.view(value.dtype).as_strided(value.shape, value.stride(), value.storage_offset())

    return tuple(map(like, values))


class ToHost:
    """An asynchronous copy of device tensors to the host: of their whole storages, each once."""

    def __init__(self, *values: Tensor) -> None:
        self._event = None
        self._host = values
        if values[0].device.type != "cpu":
            self._host = copied_storages(values, lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True))
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for the copy and return the host tensors."""
        if self._event is not None:
            self._event.synchronize()
        return self._host

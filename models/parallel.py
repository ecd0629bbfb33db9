"""`ParallelModel`: one rank's part of a model. Rank 0 announces each call to the others, and all ranks run it together.

Messages are JSON values; the tensors of a step follow as a broadcast from rank 0. With tensor parallelism, all ranks
run the same calls. With layers split across ranks, a step passes from rank to rank, and the last one sends its rows
back to rank 0, which has the embedding and the LM head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from localllm.errors import LocalLLMError, OutOfMemory, UnsupportedModel
from localllm.kernels.layer_weights import Stepped

from .inputs import AttentionInputs, ForwardBatch, ImageRows
from .kv_cache import CacheGroup, KVCache
from .model import Model
from .ranks import Ranks
from .sleep import SleepingWeights, put_to_sleep

Message = dict[str, Any]


class Lead(Protocol):
    """Rank 0's connection to the other ranks."""

    def tell(self, message: Message) -> None:
        """Send a message to all. Raises the error that `lost` returns."""

    def ask(self, message: Message) -> list[Message]:
        """Send a message and return each rank's answer. Raises the error that `lost` returns."""

    def lost(self, error: Exception) -> Exception:
        """The error that explains why the ranks cannot continue after a joint call failed."""

    def close(self) -> None:
        """Stop the other ranks."""


class ParallelModel(Model):
    """A rank's part of a model. Calls on rank 0 run the whole model."""

    def __init__(self, *parts: Any, ranks: Ranks) -> None:
        super().__init__(*(*parts, ranks.span(parts[0].num_layers)))
        self.ranks = ranks
        self.lead: Lead | None = None  # of rank 0
        self.on_lost: Callable[[Exception], None] | None = None  # called when a rank dies
        self._splits_layers = ranks.share.split == "layers"
        own = range(*ranks.span(self.facts.num_layers))
        self.groups = tuple(_own_layers(group, own) for group in self.groups)
        self.states = tuple(replace(one, layers=tuple(n for n in one.layers if n in own)) for one in self.states)

    # --- calls on all ranks ------------------------------------------------------------------------------------------

    def forward(
        self, batch: ForwardBatch, cache: KVCache, num_layers: int | None = None, every_row: bool = False
    ) -> Tensor:
        with self._joint_call("forward", batch, num_layers=num_layers, every_row=every_row):
            if not self._splits_layers:
                return super().forward(batch, cache, num_layers, every_row)
            return self._run_stages(batch, cache, num_layers, every_row)

    def step(self, batch: ForwardBatch, cache: KVCache, finds_best: bool = False) -> Stepped:
        if self._splits_layers:
            hidden = self.forward(batch, cache)
            return hidden, self.table.head(hidden, self.head), None
        with self._joint_call("step", batch):
            return super().step(batch, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        if self._splits_layers:
            return super().logits(hidden)
        with self._joint_call("logits", rows=hidden.shape[0]):
            return super().logits(self.ranks.told(hidden.contiguous()))

    def new_cache(
        self, num_pages: Sequence[int], page_size: int, kv_format: str, device: torch.device, num_slots: int = 0
    ) -> KVCache:
        formats = {"page_size": page_size, "kv_format": kv_format, "num_slots": num_slots}
        with self._joint_call("cache", None, num_pages=list(num_pages), **formats):
            given = self.groups, num_pages, page_size, kv_format, device, self.states, num_slots
            return _MirroredCache(*given, num_layers=self.facts.num_layers).by(self)

    def forget_pages(self) -> None:
        if self.lead is not None:
            with suppress(LocalLLMError):  # ranks that are gone hold no pages
                self.lead.tell({"do": "forget_pages"})
        self.on_lost = None  # belongs to the engine that owned the pages
        super().forget_pages()

    def forget_layers(self) -> None:
        if self.lead is not None:
            self.lead.close()
            self.lead = None
        super().forget_layers()

    def hold_adapters(self, device: torch.device, **promises: bool) -> Any:
        raise UnsupportedModel(
            f"{self.facts.name} is split across {self.ranks.share.world} ranks, which do not support adapters",
            "use --tensor-parallel 1 with adapters",
        )

    def _run_stages(self, batch: ForwardBatch, cache: KVCache, num_layers: int | None, every_row: bool) -> Tensor:
        ranks, share = self.ranks, self.ranks.share
        count, rows = batch.positions.shape[0], batch.logits_indices
        wanted = None if every_row or rows.shape[0] == count else rows
        alone, last = num_layers is not None, share.rank == share.world - 1  # alone: a measurement on each rank
        hidden = self.facts.hidden_size, self.embedding.dtype, batch.positions.device
        x = _empty(count, *hidden) if share.rank else self.embedded(batch)
        if share.rank and not alone:
            ranks.passed_on(x, share.rank - 1, share.rank)
        calls = self._calls if num_layers is None else self._calls[: max(num_layers, self.num_kinds)]
        x = self._run_layers(x, calls, cache, batch, wanted if last or alone else None, None)
        if alone:
            return x
        if not last:
            ranks.passed_on(x, share.rank, share.rank + 1)
        result = x if last else _empty(count if wanted is None else wanted.shape[0], *hidden)
        ranks.passed_on(result, share.world - 1, 0)
        return result

    @contextmanager
    def _joint_call(self, do: str, batch: ForwardBatch | None = None, **given: Any) -> Iterator[None]:
        if self.lead is None:
            yield
            return
        try:
            if batch is None:
                self.lead.tell({"do": do, **given})
            else:
                self.lead.tell({"do": do, **given, **_description(batch)})
                _send_tensors(batch, self.ranks)
            yield
        except Exception as error:
            raise self.lead.lost(error) from error


def _empty(count: int, hidden: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(count, hidden, dtype=dtype, device=device)


def _own_layers(group: CacheGroup, own: range) -> CacheGroup:
    readers = {reader: source for reader, source in group.readers.items() if reader in own}
    return replace(group, layers=tuple(layer for layer in group.layers if layer in own), readers=readers)


class _MirroredCache(KVCache):
    """The pages of one rank; the other ranks repeat every change that rank 0 makes."""

    def by(self, model: ParallelModel) -> _MirroredCache:
        self._model = model
        return self

    def _tell(self, do: str, *given: Any) -> None:
        if self._model.lead is not None:
            self._model.lead.tell({"do": do, "given": given})

    def touch(self, group_index: int, pages: Sequence[int]) -> None:
        self._tell("touch", group_index, list(pages))
        super().touch(group_index, pages)

    def copy_page(self, group_index: int, src: int, dst: int) -> None:
        self._tell("copy_page", group_index, src, dst)
        super().copy_page(group_index, src, dst)

    def copy_slot(self, src: int, dst: int) -> None:
        self._tell("copy_slot", src, dst)
        super().copy_slot(src, dst)

    def forget(self, group_index: int, pages: Sequence[int]) -> None:
        self._tell("forget", group_index, list(pages))
        super().forget(group_index, pages)

    def forget_slots(self, slots: Sequence[int]) -> None:
        self._tell("forget_slots", list(slots))
        super().forget_slots(slots)


# --- a step's tensors ---------------------------------------------------------------------------------------------


def _integers(batch: ForwardBatch) -> list[Tensor | None]:
    """The integer tensors of a step, in the same order on both sides."""
    groups = [part for group in batch.groups for part in (group.block_table, group.slot_mapping)]
    lens = batch.cu_query_lens, batch.seq_lens_tensor
    return [batch.token_ids, batch.positions, *lens, batch.logits_indices, batch.slots, batch.image_positions, *groups]


def _description(batch: ForwardBatch) -> Message:
    tensors = _integers(batch)
    return {
        "query_lens": batch.query_lens,
        "seq_lens": batch.seq_lens,
        "shapes": [None if one is None else list(one.shape) for one in tensors],
        "wide": [one is not None and one.dtype == torch.int64 for one in tensors],
        "images": [(one.sequence, one.first, one.position, *one.vectors.shape) for one in batch.images],
    }


def _send_tensors(batch: ForwardBatch, ranks: Ranks) -> None:
    ranks.told(torch.cat([one.flatten().long() for one in _integers(batch) if one is not None]))
    for image in batch.images:
        ranks.told(image.vectors.float().contiguous())


def _received(message: Message, ranks: Ranks, device: torch.device) -> ForwardBatch:
    """The batch that rank 0 describes, with its tensors received by broadcast."""
    shapes: list[list[int] | None] = message["shapes"]
    sizes = [0 if shape is None else math.prod(shape) for shape in shapes]
    whole = ranks.told(torch.empty(sum(sizes), dtype=torch.int64, device=device))
    parts = [
        None if shape is None else (part if wide else part.int()).view(shape)
        for part, shape, wide in zip(whole.split(sizes), shapes, message["wide"], strict=True)
    ]
    token_ids, positions, starts, lens, rows, slots, image_positions, *groups = parts
    images = tuple(
        ImageRows(sequence, first, position, ranks.told(torch.empty(*shape, device=device)))
        for sequence, first, position, *shape in message["images"]
    )
    assert token_ids is not None and positions is not None and starts is not None and lens is not None
    assert rows is not None
    pairs = zip(groups[::2], groups[1::2], strict=True)
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        query_lens=tuple(message["query_lens"]),
        seq_lens=tuple(message["seq_lens"]),
        cu_query_lens=starts,
        seq_lens_tensor=lens,
        logits_indices=rows,
        groups=tuple(AttentionInputs(table, into) for table, into in pairs if table is not None and into is not None),
        slots=slots,
        images=images,
        image_positions=image_positions,
    )


class Follower:
    """The loop of a rank other than 0, which repeats rank 0's calls.

    receive  returns the next message
    answer   sends a message to rank 0
    peak     runs a call and returns the peak memory during it
    """

    def __init__(
        self,
        model: ParallelModel,
        device: torch.device,
        receive: Callable[[], Message],
        answer: Callable[[Message], None],
        peak: Callable[[torch.device, Callable[[], None]], int],
    ) -> None:
        self._model, self._device = model, device
        self._receive, self._answer, self._peak = receive, answer, peak
        self._cache: KVCache | None = None
        self._sleeping: SleepingWeights | None = None

    @torch.inference_mode()
    def run(self) -> Message:
        """Follow messages until rank 0 ends the loop or a measurement; return the message that did."""
        while True:
            message = self._receive()
            if message["do"] in ("close", "watched"):
                return message
            if message["do"] == "watch":
                ended = self._watch()
                if ended["do"] == "close":
                    return ended
            else:
                self._follow(message)

    def _watch(self) -> Message:
        """Follow messages and answer with the peak memory."""
        ended: list[Message] = []
        peak, cache = self._peak(self._device, lambda: ended.append(self.run())), self._cache
        assert cache is not None
        left = sum(count * cache.page_bytes(group) for group, count in enumerate(ended[0].get("left", ())))
        self._answer({"weights": self._model.weight_bytes, "kv": cache.nbytes, "peak": peak + left})
        return ended[0]

    def _follow(self, message: Message) -> None:
        do, model, device = message["do"], self._model, self._device
        if do == "cache":
            self._cache = None  # free the previous pages first
            formats = message["page_size"], message["kv_format"], device
            self._cache = model.new_cache(message["num_pages"], *formats, message["num_slots"])
        elif do == "forget_pages":
            self._cache = None
            model.forget_pages()
        elif do == "sleep":
            self._sleeping = put_to_sleep(model)
            self._answer({"nbytes": self._sleeping.nbytes})
        elif do == "wake":
            self._answer(self._wake())
        elif do == "logits":
            size = message["rows"], model.facts.hidden_size
            model.logits(torch.empty(size, dtype=model.embedding.dtype, device=device))
        elif do in ("forward", "step"):
            assert self._cache is not None
            batch = _received(message, model.ranks, device)
            if do == "step":
                model.step(batch, self._cache)
            else:
                model.forward(batch, self._cache, message["num_layers"], message["every_row"])
        else:
            getattr(self._cache, do)(*message["given"])

    def _wake(self) -> Message:
        """The answer to rank 0: empty, or why there is no room. Rank 0 may ask again."""
        try:
            if self._sleeping is not None:
                self._sleeping.wake()
        except (RuntimeError, MemoryError) as error:
            return {"failed": (str(error).splitlines() or [type(error).__name__])[0]}
        self._sleeping = None
        return {}


class SleepingRanks:
    """The sleeping weights of all ranks."""

    def __init__(self, model: ParallelModel, *others: object) -> None:
        lead, model.lead = model.lead, None  # hide it from the walk over reachable objects
        assert lead is not None
        self._lead = lead
        try:
            lead.ask({"do": "sleep"})
            self._own = put_to_sleep((model, *others))
        finally:
            model.lead = lead

    def wake(self) -> None:
        """Like `SleepingWeights.wake`. Raises OutOfMemory if another rank has no room; it can be retried."""
        self._own.wake()
        for rank, answer in enumerate(self._lead.ask({"do": "wake"}), 1):
            if said := answer.get("failed"):
                hint = "close other programs on its GPU"
                raise OutOfMemory(f"rank {rank} has no room for its weights: {said}", hint)


def asleep(model: Model, *others: object) -> SleepingWeights | SleepingRanks:
    """Put models to sleep in host memory, on all ranks of the first."""
    return SleepingRanks(model, *others) if isinstance(model, ParallelModel) else put_to_sleep((model, *others))

"""LoRA adapters of a model: which ones are known, and which are resident. The least recently used one is evicted.

Files are read in a separate thread. A sequence waits while its adapter is not resident, and other sequences may pass
it, but later arrivals never get a place before it. An adapter stays resident until its sequences end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NoReturn

from localllm.errors import BadModelFile, InternalError, InvalidRequest, LocalLLMError, ModelNotFound, OutOfMemory
from localllm.kernels.adapters import MOST_ADAPTERS
from localllm.models.adapters import Adapters, AdapterWeights

from .sequence import Sequence

log = logging.getLogger(__name__)

MOST_KNOWN = 10_000  # adapters that may be known at once, not all of them resident


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter that requests may name."""

    name: str
    path: str
    rank: int
    nbytes: int  # bytes of its weights as float32
    base: str  # base model according to its files
    digest: str  # digest of its weights, part of the prefix cache's salt


def _gone() -> NoReturn:
    raise InvalidRequest("the model is closed", "load it again")


class Residents:
    """The adapters of one model. `add`, `remove`, `find` and `known` may be called from any thread.

    hold   returns the model's `Adapters`, created with the first adapter
    room   returns the free bytes for adapter weights
    """

    def __init__(self, hold: Callable[[], Adapters], room: Callable[[], int]) -> None:
        self._hold, self._free = hold, room
        self._lock = threading.Lock()
        self._known: dict[str, Adapter] = {}
        self._places: dict[int, Adapter] = {}  # resident adapters, most recently used last
        self._loading: dict[Adapter, tuple[int, Future[AdapterWeights]]] = {}
        self._read: dict[Adapter, AdapterWeights] = {}  # read by `add`, not yet resident
        self._gone: set[Adapter] = set()  # removed, possibly still resident
        self._reader: ThreadPoolExecutor | None = None

    def detach(self) -> None:
        """Let go of the model, which is closed."""
        self._hold = self._free = _gone

    # --- called from any thread --------------------------------------------------------------------------------------

    def add(self, name: str, path: str) -> Adapter:
        """Read, check and register an adapter.

        Raises InvalidRequest if the name is taken or invalid, OutOfMemory, ModelNotFound, UnsupportedFormat or
        BadModelFile.
        """
        self._check_name(name)
        held = self._hold()
        file = held.open(path)
        if 2 * file.nbytes > self._free():  # reading needs a second copy
            need, free = 2 * file.nbytes, self._free()
            raise OutOfMemory(
                f"the adapter {name} needs {need:,} bytes, but {free:,} are free", "unload another model or adapter"
            )
        weights = held.read(file)
        adapter = Adapter(name, path, file.rank, file.nbytes, file.base, weights.digest)
        with self._lock:
            self._check_name(name)
            self._known[name] = adapter
            if len(self._places) + len(self._loading) + len(self._read) < MOST_ADAPTERS:
                self._read[adapter] = weights
        return adapter

    def _check_name(self, name: str) -> None:
        if name in self._known:
            hint = "unload it first, or choose another name"
            raise InvalidRequest(f"the adapter {name!r} is already loaded", hint, param="lora_name")
        if not name or len(name) > 200 or not name.isprintable() or name != name.strip():
            hint = "use 1 to 200 printable characters"
            raise InvalidRequest(f"{name[:40]!r} is not a valid adapter name", hint, param="lora_name")
        if len(self._known) >= MOST_KNOWN:
            raise InvalidRequest(f"{MOST_KNOWN:,} adapters are loaded, which is the limit", "unload unused ones")

    def remove(self, name: str) -> None:
        """Remove an adapter; running sequences keep using it. Raises ModelNotFound."""
        with self._lock:
            adapter = self._known.pop(name, None)
            if adapter is not None:
                self._read.pop(adapter, None)
                self._gone.add(adapter)
        if adapter is None:
            raise self._unknown(name)

    def find(self, name: str) -> Adapter:
        """The adapter with this name. Raises ModelNotFound."""
        adapter = self._known.get(name)
        if adapter is None:
            raise self._unknown(name)
        return adapter

    def _unknown(self, name: str) -> ModelNotFound:
        names = ", ".join(list(self._known)[:8]) or "none"
        hint = "load it first: --adapter NAME=PATH, or POST /v1/load_lora_adapter"
        return ModelNotFound(f"adapter {name[:100]!r} is not loaded; loaded adapters: {names}", hint, param="model")

    def known(self) -> list[Adapter]:
        """All known adapters, oldest first."""
        return list(self._known.values())

    # --- the engine's thread -----------------------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """True if adapters were read or removed since the last `settle`."""
        return bool(self._read or self._loading or self._gone)

    def settle(
        self,
        waiting: Iterable[Sequence],
        running: Iterable[Sequence],
        fail: Callable[[Sequence, LocalLLMError], None],
    ) -> None:
        """Assign places to waiting sequences with resident adapters, and start reading others while places last."""
        waiting = [sequence for sequence in waiting if sequence.adapter is not None]
        used = {sequence.place for sequence in (*running, *waiting)}
        failed = self._take_read(used)
        self._free_removed(used, {sequence.adapter for sequence in waiting})
        place_of = {adapter: place for place, adapter in self._places.items()}
        for sequence in [s for s in waiting if s.place < 0]:
            adapter = sequence.adapter
            if adapter in failed:
                fail(sequence, failed[adapter])
            elif adapter in place_of:
                sequence.place = place_of[adapter]
                self._places[sequence.place] = self._places.pop(sequence.place)  # most recently used
                used.add(sequence.place)
            elif adapter not in self._loading:
                room = self._free_place(used)
                if room is None:
                    return
                place_of = {one: at for one, at in place_of.items() if at != room}
                self._begin(adapter, room)

    def _take_read(self, used: set[int]) -> dict[Adapter, LocalLLMError]:
        """Make adapters resident that were read; returns the errors of those that failed."""
        failed: dict[Adapter, LocalLLMError] = {}
        for adapter, (place, future) in list(self._loading.items()):
            if not future.done():
                continue
            del self._loading[adapter]
            try:
                self._make_resident(place, adapter, future.result())
            except LocalLLMError as error:
                failed[adapter] = error
            except Exception as error:
                log.exception("reading an adapter failed")
                failed[adapter] = InternalError(f"the adapter {adapter.name} cannot be read: {error}", "see the log")
        with self._lock:
            read, self._read = self._read, {}
        for adapter, weights in read.items():
            room = self._free_place(used)
            if room is not None:
                try:
                    self._make_resident(room, adapter, weights)
                except Exception:  # read again when a request asks for it
                    log.exception("an adapter was not made resident")
        return failed

    def _free_removed(self, used: set[int], wanted: set[Adapter]) -> None:
        """Free the places of removed adapters that no sequence uses or waits for."""
        with self._lock:
            gone = {adapter for adapter in self._gone if adapter not in wanted and adapter not in self._loading}
            for place, adapter in list(self._places.items()):
                if adapter in gone and place in used:
                    gone.discard(adapter)
                elif adapter in gone:
                    del self._places[place]
                    self._hold().put(place, None)
            self._gone -= gone

    def _free_place(self, used: set[int]) -> int | None:
        """A free place, evicting the least recently used adapter if needed; None if all are in use."""
        taken = {place for place, _ in self._loading.values()}
        free = (place for place in range(MOST_ADAPTERS) if place not in self._places and place not in taken)
        place = next(free, None)
        if place is None:
            place = next((place for place in self._places if place not in used), None)
            if place is not None:
                del self._places[place]
                self._hold().put(place, None)
        return place

    def _begin(self, adapter: Adapter, place: int) -> None:
        held = self._hold()
        self._reader = self._reader or ThreadPoolExecutor(1, "adapters")
        self._loading[adapter] = place, self._reader.submit(lambda: _read_again(held, adapter))

    def _make_resident(self, place: int, adapter: Adapter, weights: AdapterWeights) -> None:
        self._hold().put(place, weights)
        self._places[place] = adapter

    def clear(self) -> None:
        """Free all places; the adapters stay known. Only while no engine is running."""
        for place in list(self._places):
            self._hold().put(place, None)
        self._places.clear()

    def close(self) -> None:
        """Stop the reader thread."""
        if self._reader is not None:
            self._reader.shutdown(wait=False, cancel_futures=True)
            self._reader = None
            self._loading.clear()


def _read_again(held: Adapters, adapter: Adapter) -> AdapterWeights:
    """Read a known adapter again. Raises BadModelFile if its weights have changed."""
    weights = held.read(held.open(adapter.path))
    if weights.digest != adapter.digest:
        raise BadModelFile(
            f"the files of the adapter {adapter.name} have changed since it was loaded", "unload and load it again"
        )
    return weights

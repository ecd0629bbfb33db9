"""Where the models of a chat run: decided anew whenever one is started."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from localllm.backend.placed import Place, PlacedBackend
from localllm.backend.scripted import FakeBackend
from localllm.errors import ServerError
from localllm.interface import ChatEvent, Done, Failed
from localllm.request import LoadProgress


def seen(backend: PlacedBackend, until: Callable[[ChatEvent], bool], seconds: float = 5.0) -> list[ChatEvent]:
    """The events up to the first for which this holds."""
    found: list[ChatEvent] = []
    end = time.monotonic() + seconds
    while not (found and until(found[-1])):
        assert time.monotonic() < end, found
        events = backend.events()
        found += [events.popleft()] if events else []
        time.sleep(0.001)
    return found


def is_ready(event: ChatEvent) -> bool:
    return isinstance(event, LoadProgress) and event.name == "ready"


class Engine(FakeBackend):
    """It notes what it was told to do."""

    def __init__(self) -> None:
        super().__init__(load_s=0, tps=0)
        self.told: list[Any] = []

    def start(self, model: str | None, changes: Any = None) -> None:
        self.told.append((model, changes or {}))
        super().start(model, changes)

    def close(self) -> None:
        self.told += ["closed"] if self.told and self.told[-1] != "closed" else []
        super().close()


def test_a_server_runs_what_it_has_and_this_process_the_rest() -> None:
    here, there = Engine(), Engine()
    backend = PlacedBackend(here, lambda model: Place(there, "theirs", "http://x") if model == "shared" else None)
    backend.start("shared")
    said = [event.detail for event in seen(backend, is_ready) if isinstance(event, LoadProgress)]
    assert "using theirs at http://x" in said and there.told[0] == ("theirs", {}) and not here.told
    assert backend.facts().model == "theirs" and backend.send([{"role": "user", "content": "hi"}]) == 0

    backend.start("mine")
    seen(backend, is_ready)
    assert "closed" in there.told and here.told[0] == ("mine", {}) and backend.facts().model == "mine"

    backend.start("shared")
    seen(backend, is_ready)
    assert backend.now is there and here.told[-1] == "closed", "its memory is free before the server loads"
    backend.close()


def test_settings_of_ones_own_and_an_open_port_stay_here() -> None:
    here = Engine()
    backend = PlacedBackend(here, lambda model: Place(Engine(), model, "http://x"))
    backend.stays = lambda: True
    backend.start("shared")
    seen(backend, is_ready)
    assert here.told[0] == ("shared", {})
    backend.stays = lambda: False
    backend.start("shared", {"ctx": 4096})
    seen(backend, is_ready)
    backend.start("other")
    seen(backend, is_ready)
    assert [told for told in here.told if told != "closed"][-1] == ("other", {}), (
        "what was set for one model holds for the next"
    )
    backend.close()


def test_a_later_choice_wins_while_a_server_is_looked_for() -> None:
    asked, answer = threading.Event(), threading.Event()
    here, there = Engine(), Engine()

    def place(model: str) -> Place | None:
        if model != "first":
            return None
        asked.set()
        assert answer.wait(5)
        return Place(there, model, "http://x")

    backend = PlacedBackend(here, place)
    backend.start("first")
    assert asked.wait(5) and backend.facts().model == ""
    backend.start("second")
    answer.set()
    seen(backend, is_ready)
    assert backend.facts().model == "second" and not there.told
    backend.close()


def test_a_server_that_cannot_be_looked_for_is_told() -> None:
    def place(model: str) -> Place | None:
        raise ServerError("no", "yes")

    backend = PlacedBackend(Engine(), place)
    backend.start("one")
    failed = seen(backend, lambda event: isinstance(event, Failed))[-1]
    assert isinstance(failed, Failed) and (failed.turn, failed.message) == (-1, "no")
    backend.close()


def ends_of(backend: PlacedBackend, turns: set[int]) -> dict[int, ChatEvent]:
    """The terminal event of each turn."""
    found: dict[int, ChatEvent] = {}
    for event in iter(lambda: seen(backend, lambda _: True)[-1], None):
        if isinstance(event, Done | Failed) and event.turn >= 0:
            assert event.turn not in found
            found[event.turn] = event
        if found.keys() >= turns:
            return found
    raise AssertionError


def test_turns_sent_before_the_choice_are_answered() -> None:
    """In order, wherever the model then runs; a stopped one ends at once, and a second start ends the others."""
    hello: list[Any] = [{"role": "user", "content": "hi"}]
    for at in ("here", "there", "nowhere"):
        go, here, there = threading.Event(), Engine(), Engine()

        def place(model: str, at: str = at, go: threading.Event = go, there: Engine = there) -> Place | None:
            assert go.wait(5)
            if at == "nowhere":
                raise ServerError("no", "yes")
            return Place(there, model, "http://x") if at == "there" else None

        backend = PlacedBackend(here, place)
        backend.start("one")
        turns = [backend.send(hello), backend.send(hello)]
        backend.start("two")
        turns += [backend.send(hello), backend.send(hello)]
        backend.stop(turns[3])
        assert turns == [0, 1, 2, 3]
        assert all(isinstance(event, Done) for event in ends_of(backend, {0, 1, 3}).values())
        go.set()
        last = ends_of(backend, {2})[2]
        if at == "nowhere":
            assert isinstance(last, Failed) and last.message == "no"
        else:
            assert isinstance(last, Done) and last.stop != "abort"
        assert backend.send(hello) == 4
        backend.close()

"""The events of one request, token by token or some at a time."""

from __future__ import annotations

import threading
from queue import Empty, Queue

import pytest

from localllm.engine import publisher
from localllm.engine.publisher import RequestStream
from localllm.request import FinishReason, Request, SamplingParams, TokenEvent


@pytest.mark.parametrize("pause", [30.0, 0.001])
def test_gathered_events_are_all_of_them_and_the_last_ones_come_at_once(
    pause: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "GATHER_S", pause)
    stream = RequestStream(Request([1], SamplingParams(n=2)), lambda request: None)
    events = [TokenEvent("r", number % 2, [number]) for number in range(9)]
    events += [TokenEvent("r", index, finish_reason=FinishReason.STOP) for index in (1, 0)]
    found: Queue[TokenEvent] = Queue()
    reader = threading.Thread(target=lambda: [found.put(event) for event in stream.gathered()])
    reader.start()
    for event in events[:-1]:
        stream.put(event)
    if pause < 1:
        assert [found.get(timeout=10) for _ in events[:-1]] == events[:-1]
        events = events[-1:]
    else:
        with pytest.raises(Empty):  # nobody woke
            found.get(timeout=0.02)
    stream.put(events[-1])
    reader.join(10)
    assert [found.get(timeout=10) for _ in events] == events and found.empty()
    assert list(stream.gathered()) == []

"""The events of one request, token by token or some at a time."""

from __future__ import annotations

import threading
import time

import pytest

from localllm.engine import request_stream
from localllm.engine.request_stream import RequestStream
from localllm.request import FinishReason, Request, SamplingParams, TokenEvent


@pytest.mark.parametrize("pause", [30.0, 0.001])
def test_gathered_events_are_all_of_them_and_the_last_ones_come_at_once(
    pause: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_stream, "GATHER_S", pause)
    stream = RequestStream(Request([1], SamplingParams(n=2)), lambda request: None)
    events = [TokenEvent("r", number % 2, [number]) for number in range(9)]
    events += [TokenEvent("r", index, finish_reason=FinishReason.STOP) for index in (1, 0)]
    found: list[TokenEvent] = []
    reader = threading.Thread(target=lambda: found.extend(stream.gathered()))
    reader.start()
    for event in events[:-1]:
        stream.put(event)
    if pause < 1:
        until = time.monotonic() + 10
        while stream._events.qsize() and time.monotonic() < until:
            time.sleep(0.001)
        assert not stream._events.qsize()
    else:
        time.sleep(0.02)
        assert stream._events.qsize() == len(events) - 1  # nobody woke
    stream.put(events[-1])
    reader.join(10)
    assert found == events
    assert list(stream.gathered()) == []

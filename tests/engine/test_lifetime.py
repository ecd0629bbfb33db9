"""An engine goes with its last user: nothing collects a cycle after `gc.freeze`, which servers and chats call."""

import gc
import logging
import weakref
from collections.abc import Iterator

import pytest
import torch

from localllm.request import PromptImage

from . import test_engine as integers
from .test_engine import make, request, run


@pytest.fixture(autouse=True)
def by_count_alone() -> Iterator[None]:
    integers.runs_ahead[0] = integers.guesses[0] = False
    logging.disable()  # pytest keeps what is logged, with its tracebacks
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    logging.disable(logging.NOTSET)


def test_a_stream_that_has_ended_keeps_no_engine():
    engine = make()
    streams = run(engine, request([1, 2, 3], max_tokens=4), request([4], max_tokens=2, n=2))
    gone = weakref.ref(engine)
    del engine
    assert gone() is None and len(streams) == 2


def test_a_call_for_an_engine_that_has_ended_is_dropped():
    engine = make()
    engine.start()
    stop = engine.watch_pages(lambda *_: None)
    gone = weakref.ref(engine)
    engine.close()
    stop()
    del engine, stop
    assert gone() is None


@pytest.mark.parametrize("error", [RuntimeError("wrong"), KeyError("x")])
def test_a_failed_step_keeps_no_engine(error):
    engine = make()

    def fault(step):
        if step == 2:
            raise error

    engine.stepper.fault = fault
    streams = run(engine, request([1, 2, 3], max_tokens=4))
    assert any(event.error is not None for event in streams[0].seen)
    gone = weakref.ref(engine)
    del engine
    assert gone() is None


def test_an_engine_that_died_keeps_nothing():
    engine = make()

    def dies():
        raise SystemError("the machine is on fire")

    engine.start()
    engine._ask(dies)
    engine.join(60)
    assert "on fire" in engine.failure
    gone = weakref.ref(engine)
    failure = engine._dead
    del engine
    assert gone() is None and failure is not None


def test_vectors_of_images_go_with_the_last_answer():
    """A reader may keep its request for long, and vectors lie in the GPU's memory."""
    engine = make()
    image = PromptImage(0, 2, None, b"x", vectors=torch.zeros(2, 8))
    asked = request([1, 2, 3], max_tokens=3, n=2)
    asked.images = (image,)
    held = []
    engine.stepper.fault = lambda step: held.append(image.vectors is not None)
    run(engine, asked)
    assert held and all(held) and image.vectors is None

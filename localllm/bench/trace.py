"""Chrome trace of one step (chrome://tracing, ui.perfetto.dev): time in the engine, the model and each kernel call.

Our C kernels compute a whole forward pass in one call; the trace runs its layers segment by segment instead, with the
same result. On a GPU, torch's profiler adds every kernel.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.errors import ConfigError
from localllm.request import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from localllm.llm.llm import LLM

SETTLE_STEPS = 4  # decode steps before the recorded one
Label = Callable[[str], AbstractContextManager[Any]]  # a name -> the context manager that records work under it


def write_trace(llm: LLM, path: Path, prompt: Sequence[int]) -> None:
    """Record one decode step after `prompt`. Raises ConfigError if the file cannot be written."""
    engine: Any = llm.engine
    recorded = threading.Event()
    plain = engine.stepper.step
    steps = 0

    def step() -> bool:
        nonlocal steps
        steps += any(s.num_output_tokens > 0 for s in engine.scheduler.running)
        if steps <= SETTLE_STEPS or recorded.is_set():
            return bool(plain())
        recorded.set()
        with _recorder(llm, path) as label, _labelled(llm, label):
            return bool(_named(label, "step", plain)())

    try:
        path.write_text("{}")
    except OSError as error:
        raise ConfigError(f"the trace cannot be written: {error}", "pass --trace FILE in a writable folder") from error
    engine.stepper.step = step
    try:
        params = SamplingParams(temperature=0, max_tokens=SETTLE_STEPS + 8, ignore_eos=True)
        llm.submit(prompt, params).answer()
    finally:
        del engine.stepper.step


@contextmanager
def _recorder(llm: LLM, path: Path) -> Iterator[Label]:
    """Record what happens during the block, and write it to `path`."""
    if llm.plan.device == "cpu":
        events: list[dict[str, Any]] = []
        yield partial(_event, events)
        path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))
        return
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        yield record_function
    profiler.export_chrome_trace(str(path))


@contextmanager
def _event(events: list[dict[str, Any]], name: str) -> Iterator[None]:
    started = time.perf_counter_ns()
    try:
        yield
    finally:
        spent = time.perf_counter_ns() - started
        place = {"pid": os.getpid(), "tid": threading.get_native_id()}
        events.append({"name": name, "ph": "X", "ts": started / 1000, "dur": spent / 1000, **place})


def _named(label: Label, name: str, call: Callable[..., Any]) -> Callable[..., Any]:

    def named(*args: Any, **kwargs: Any) -> Any:
        with label(name):
            return call(*args, **kwargs)

    return named


@contextmanager
def _labelled(llm: LLM, label: Label) -> Iterator[None]:
    """Label the parts of a step during the block."""
    engine: Any = llm.engine
    model: Any = engine.runner.model
    places = [(engine.scheduler, "schedule"), (engine.runner.builder, "build"), (model, "forward"), (model, "logits")]
    places += [(model, "step"), *((engine.stepper, name) for name in ("_launch", "_sample", "_commit"))]
    table = model.table
    for owner, name in places:
        known = "forward" if (owner, name) == (model, "step") else name.removeprefix("_")
        setattr(owner, name, _named(label, known, getattr(owner, name)))
    if llm.plan.device == "cpu":
        model.table = _labelled_table(table, label)
    try:
        yield
    finally:
        model.table = table
        for owner, name in places:
            delattr(owner, name)


def _labelled_table(table: Any, label: Label) -> Any:
    """A kernel table with labelled segments, and with a decoder and a step composed of them."""
    from localllm.kernels.segments import COMPOSED, step

    names = [field.name for field in fields(table) if field.name not in ("ops", "decoder", "step")]
    segments = {name: _named(label, name, getattr(table, name)) for name in names}
    decoder, parts = COMPOSED["decoder"]
    layers = _named(label, "decoder", partial(decoder, *(segments[name] for name in parts)))
    return replace(table, **segments, decoder=layers, step=partial(step, layers, segments["head"]))

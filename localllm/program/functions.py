"""`function` makes a program from a Python function; run it once, or for many arguments at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from localllm.errors import InvalidRequest
from localllm.request import SamplingParams

from .calls import Model
from .endpoint import Endpoint
from .in_process import InProcess
from .state import Run, State

if TYPE_CHECKING:
    from localllm.llm.llm import LLM

NUM_THREADS = 16


class Program:
    """A function whose first argument is a `State`. Called with a state, it writes there, so programs can be nested."""

    def __init__(self, body: Callable[..., Any]) -> None:
        functools.update_wrapper(self, body)
        self._body = body

    def __call__(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, State):
            hint = f"{self._body.__name__}.run(llm, ...)"
            raise InvalidRequest(f"{self._body.__name__}(...) is a program and needs a state, not {state!r:.60}", hint)
        return self._body(state, *args, **kwargs)

    def run(self, llm: LLM | Endpoint, /, *args: Any, params: SamplingParams | None = None, **kwargs: Any) -> State:
        """Run to the end and return the state. An error in one call ends all calls.

        params  sampling where `gen` does not say; None: as the model recommends. With a seed, each fork uses
                seed + its index
        """
        return self._run(Run(_model(llm), params), args, kwargs)

    def run_batch(
        self,
        llm: LLM | Endpoint,
        /,
        batch: Sequence[Mapping[str, Any]],
        *,
        params: SamplingParams | None = None,
        num_threads: int = NUM_THREADS,
    ) -> list[State]:
        """Run for each of these keyword arguments, `num_threads` at a time; returns the states in order.

        An error in one run ends all of them.
        """
        if num_threads < 1:
            raise InvalidRequest(f"num_threads must be at least 1, not {num_threads}", "omit it")
        model = _model(llm)
        runs = [Run(model, params) for _ in batch]
        with ThreadPoolExecutor(min(num_threads, len(batch) or 1)) as pool:
            waiting = [pool.submit(self._run, run, (), kwargs) for run, kwargs in zip(runs, batch, strict=True)]
            try:
                return [future.result() for future in waiting]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for run in runs:
                    run.calls.stop()
                raise

    def _run(self, run: Run, args: Sequence[Any], kwargs: Mapping[str, Any]) -> State:
        state = State(run)
        try:
            state.ret_value = self._body(state, *args, **kwargs)
            for one in run.states:
                one.sync()
        except BaseException:
            run.calls.stop()
            raise
        return state


def function(body: Callable[..., Any]) -> Program:
    """Make a program from a function: `@function`; its first argument is the state to write to."""
    return Program(body)


def _model(llm: LLM | Endpoint) -> Model:
    if isinstance(llm, Endpoint):
        return llm
    if not hasattr(llm, "begin_logprobs"):
        raise InvalidRequest(f"a program runs on an LLM or an Endpoint, not on {llm!r:.60}", "program.run(llm, ...)")
    return InProcess(llm)

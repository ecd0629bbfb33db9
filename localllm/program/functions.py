"""`function` makes a program of a Python function; a program is run once, or for many arguments at once."""

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
    """A function whose first argument is a `State`. Called with one, it writes there: programs are made of programs."""

    def __init__(self, body: Callable[..., Any]) -> None:
        functools.update_wrapper(self, body)
        self._body = body

    def __call__(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, State):
            hint = f"{self._body.__name__}.run(llm, ...)"
            raise InvalidRequest(f"{self._body.__name__}(...) is a program and needs a state, not {state!r:.60}", hint)
        return self._body(state, *args, **kwargs)

    def run(self, llm: LLM | Endpoint, /, *args: Any, params: SamplingParams | None = None, **kwargs: Any) -> State:
        """Run it to its end, and give its state. What one of its calls raises ends all of them.

        params  how `gen` samples where it does not say; None: as the model recommends. With a seed each fork has its
                own, seed + its number
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
        """Run it for each of these keyword arguments, `num_threads` at a time; the states in their order.

        What one raises ends all.
        """
        if num_threads < 1:
            raise InvalidRequest(f"num_threads is {num_threads}, it must be at least 1", "leave it out")
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
    """Make a program of a function: `@function`, and its first argument is the state it writes to."""
    return Program(body)


def _model(llm: LLM | Endpoint) -> Model:
    if isinstance(llm, Endpoint):
        return llm
    if not hasattr(llm, "begin_logprobs"):
        raise InvalidRequest(f"a program runs on an LLM or an Endpoint, not on {llm!r:.60}", "program.run(llm, ...)")
    return InProcess(llm)

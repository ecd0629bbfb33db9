"""From a model's name to a running backend, and from a turn to its text: shared by `run`, `chat` and `bench`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from localllm.cli.frame.command import Env
from localllm.cli.frame.progress import Progress
from localllm.conversation.answer import Answer
from localllm.errors import Aborted, LocalLLMError
from localllm.interface import ChatBackend, ChatEvent, Delta, Done, Facts, Failed
from localllm.request import Constraint, LoadProgress, OnProgress, SamplingParams
from localllm.terminal import counted

from .attach import Attached, fake_engine, process_at

if TYPE_CHECKING:
    from localllm.config import UserConfig
    from localllm.llm.llm import LLM

POLL_S = 0.02  # how often the event queue is drained: faster than a reader notices


class BackendError(LocalLLMError):
    """A failure that arrived as an event; its code determines the exit code."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(
            failed.message, failed.hint, why=failed.why, fixes=failed.fixes, context=failed.context, param=failed.param
        )
        self.exit_code, self.number = split_code(failed.code)


def split_code(code: str) -> tuple[int, int]:
    """'E1203' -> (12, 3); (1, 1) for anything that is no code."""
    digits = code[1:] if code.startswith("E") else ""
    return (int(digits[:-2]), int(digits[-2:])) if digits.isdigit() and len(digits) >= 3 else (1, 1)


@dataclass
class Sampling:
    """What the user set on top of the model's recommended sampling."""

    given: dict[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    num_samples: int = 1
    _turns: int = 0

    def next_turn(self) -> dict[str, Any]:
        """The user's values for the next turn: sample i of several gets seed + i."""
        given = dict(self.given) | ({"stop": self.stop} if self.stop else {})
        if self.num_samples > 1 and given.get("seed") is not None:
            given["seed"] += self._turns % self.num_samples
        self._turns += 1
        return given

    def used(self, facts: Facts) -> SamplingParams:
        """The sampling parameters of the first turn with this model."""
        return SamplingParams(**{name: value for name, value, _ in facts.sampling} | self.given | {"stop": self.stop})


@contextmanager
def open_backend(env: Env, config: UserConfig, sampling: Sampling, **more: Any) -> Iterator[ChatBackend]:
    """Open a backend and close it at the end; arguments as in `make_backend`."""

    def on_keep(trouble: str) -> None:
        if trouble:
            env.console.warn(trouble)
        else:
            env.console.say("saving repacked weights for faster starts; Ctrl+C skips this")

    backend = make_backend(env, config, sampling, on_keep=on_keep, **more)
    try:
        yield backend
    except (KeyboardInterrupt, SystemExit, Aborted):
        raise  # the process is ending: do not wait for the backend
    except BaseException:
        backend.close()
        raise
    backend.close()


def make_backend(
    env: Env,
    config: UserConfig,
    sampling: Sampling,
    *,
    completes: bool = False,
    constraint: Constraint | None = None,
    attached: Attached | None = None,
    on_loaded: Callable[[str, LLM], None] = lambda name, llm: None,
    on_keep: Callable[[str], None] | None = None,
) -> ChatBackend:
    """Make the backend: a running server, the engine in this process, or the scripted one.

    completes    a base model continues the text instead of refusing it
    constraint   the constraint on every answer
    attached     the server to use; None for this process
    on_loaded    called with every model that is loaded in this process
    on_keep      see `InProcessBackend`
    """
    if attached is not None:
        from localllm.backend.over_http import RemoteBackend

        return RemoteBackend(
            attached.url, attached.key, given=sampling.next_turn, completes=completes, constraint=constraint,
            pid=process_at(attached.url),
        )  # fmt: skip
    if fake_engine():
        from localllm.backend.scripted import FakeBackend

        return FakeBackend(default_params=lambda: replace(SamplingParams(), **sampling.next_turn()))
    from localllm.backend.in_process import InProcessBackend

    return InProcessBackend(
        default_params=lambda llm: replace(llm.default_params(), **sampling.next_turn()),
        completes=completes,
        constraint=constraint,
        on_loaded=on_loaded,
        on_keep=on_keep,
        offline=env.offline,
        options=config.engine,
    )


def wait_ready(backend: ChatBackend, progress: Progress, on_progress: OnProgress | None = None) -> tuple[Facts, float]:
    """Show phases until the model is ready. Returns its facts and the loading time; raises why loading failed."""
    start = time.monotonic()
    try:
        while True:
            for event in drain(backend):
                if isinstance(event, Failed):
                    raise BackendError(event)
                if isinstance(event, LoadProgress):
                    progress.update(event)
                    if on_progress is not None:
                        on_progress(event)
                    if event.name == "ready":  # later events belong to a turn
                        return backend.facts(), time.monotonic() - start
            progress.tick()
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        raise Aborted(progress.interrupted() or "stopped") from None
    finally:
        progress.close()


def drain(backend: ChatBackend) -> Iterator[ChatEvent]:
    """Yield everything in the queue now."""
    events = backend.events()
    while events:
        yield events.popleft()


def follow(
    backend: ChatBackend,
    turns: list[int],
    on_event: Callable[[ChatEvent], None],
    so_far: Mapping[int, Answer] | None = None,
) -> list[Answer]:
    """Drain events until every turn has ended. Raises the first failure; stops the turns when interrupted.

    `so_far` holds the partial answers, even after an interruption; pass it again to continue.
    """
    answers = {turn: Answer() for turn in turns} if so_far is None else so_far
    open_turns = set(turns)
    try:
        while open_turns:
            for event in drain(backend):
                if isinstance(event, Failed) and event.turn in (-1, *open_turns):
                    raise BackendError(event)
                on_event(event)
                if isinstance(event, Delta | Done) and event.turn in open_turns:
                    answers[event.turn].add(event)
                    if isinstance(event, Done):
                        open_turns.discard(event.turn)
            if open_turns:
                time.sleep(POLL_S)
    except BaseException:
        for turn in open_turns:
            backend.stop(turn)
        raise
    return [answers[turn] for turn in turns]


def stats_line(answer: Answer, facts: Facts) -> str:
    """'41 tokens, 91.2 tok/s, TTFT 38 ms, prompt 12, ctx 1 %'."""
    usage, timing = answer.usage, answer.timing
    cached = f" (cached {usage.cached_tokens:,})" if usage.cached_tokens else ""
    parts = [
        counted(usage.completion_tokens, "token"),
        *([f"{timing.decode_tps:.1f} tok/s"] if timing.decode_tps else []),  # a single token has no speed
        f"TTFT {timing.ttft_s * 1000:.0f} ms",
        f"prompt {usage.prompt_tokens:,}{cached}",
    ]
    if timing.draft_tokens:
        share = timing.accepted_tokens * 100 // timing.draft_tokens
        by = "".join(f" by {name}" for name in ["+".join(timing.drafters)] if name)
        parts.append(f"{share} % of {timing.draft_tokens:,} draft tokens{by} accepted")
    if facts.ctx:
        parts.append(f"ctx {(usage.prompt_tokens + usage.completion_tokens) * 100 // facts.ctx} %")
    return ", ".join(parts)

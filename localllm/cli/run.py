"""`localllm run`: one prompt in, one answer out; made for pipes."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from localllm.config import UserConfig
from localllm.console import Console
from localllm.errors import ConfigError, ConstraintUnmet
from localllm.request import ChatBackend, ChatEvent, Delta, Done, Facts, Message, Phase, Prefill
from localllm.terminal import Cleaner, dumb

from . import params
from .command import Env, command
from .progress import make_progress, phase_event
from .session import Answered, Sampling, follow, open_backend, stats_line, wait_ready

MAX_SAMPLES = 64


@command(
    'localllm run qwen "Why is the sky blue?"',
    'git diff | localllm run qwen "write a commit message"',
    "localllm run qwen -f notes.txt 'summarise this' --json",
    "localllm run gemma3-270m 'Once upon a time' --max-tokens 64",
)
def run(
    env: Env,
    model: params.Model,
    prompt: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT...]", help="The question; - takes standard input only.")
    ] = None,
    system: params.System = None,
    file: Annotated[
        list[Path] | None, typer.Option("-f", "--file", metavar="PATH", help="Text put before the prompt.")
    ] = None,
    samples: Annotated[int, typer.Option("-n", metavar="N", min=1, max=MAX_SAMPLES, help="Answers to give.")] = 1,
    temp: params.Temp = None,
    top_p: params.TopP = None,
    top_k: params.TopK = None,
    min_p: params.MinP = None,
    repetition_penalty: params.Repeat = None,
    seed: params.Seed = None,
    max_tokens: params.MaxTokens = None,
    stop: params.Stop = None,
    ctx: params.Ctx = None,
    kv: params.Kv = None,
    dtype: params.Dtype = None,
    threads: params.Threads = None,
    debug_invariants: params.DebugInvariants = False,
    stream: Annotated[
        bool | None, typer.Option("--stream/--no-stream", help="Print as it is made; with --json one event a line.")
    ] = None,
    stats: Annotated[bool | None, typer.Option("--stats/--no-stats", help="Speeds on stderr.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No Markdown styles on a terminal.")] = False,
    hide_thinking: Annotated[
        bool | None, typer.Option("--hide-thinking/--show-thinking", help="Leave reasoning out.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 10 when the answer was cut by --max-tokens.")] = False,
) -> int:
    """Answer one prompt and end: the answer on stdout, everything else on stderr.

    Standard input is put before the prompt. A base model, which has no chat template, continues the text instead.
    """
    # `values` carries the arguments that are settings for one command
    env.debug_invariants = debug_invariants
    values = {
        "temp": temp, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed, "max_tokens": max_tokens,
        "repetition_penalty": repetition_penalty, "ctx": ctx, "kv": kv, "dtype": dtype, "threads": threads,
    }  # fmt: skip
    config = env.settings(params.sampling_flags(values) | params.engine_flags(values))
    text = gather_prompt(prompt or [], file or [])
    console = env.console
    job = Job(
        messages=messages_of(params.text_or_file(system, "--system") or config.chat.system, text),
        sampling=Sampling(config.sampling.given(), tuple(stop or ()), samples),
        ctx=ctx,
        stream=bool(stream) if stream is not None else console.out_tty and samples == 1,
        show_thinking=not hide_thinking if hide_thinking is not None else console.out_tty,
        stats=stats if stats is not None else console.out_tty,
        markdown=console.out_tty and not raw and not dumb() and console.colored(console.stdout),
        strict=strict,
    )
    return answer(env, config, model, job)


@dataclass
class Job:
    """One prompt and how its answer is shown."""

    messages: list[Message]
    sampling: Sampling
    ctx: str | None = None
    stream: bool = False
    show_thinking: bool = False
    stats: bool = False
    markdown: bool = False
    strict: bool = False


def messages_of(system: str, text: str) -> list[Message]:
    """A conversation of one question."""
    return [*([Message(role="system", content=system)] if system else []), Message(role="user", content=text)]


def gather_prompt(words: Sequence[str], files: Sequence[Path]) -> str:
    """Standard input, then files, then the words, with a blank line between. Raises ConfigError when all are empty."""
    parts = [piped_text(), *(params.read_text(path, "-f") for path in files)]
    if list(words) != ["-"]:
        parts.append(" ".join(words))
    text = "\n\n".join(part.rstrip("\n") for part in parts if part.strip())
    if not text:
        raise ConfigError(
            "there is nothing to say: no prompt, and nothing on standard input", 'localllm run MODEL "Hello"'
        )
    return text


def piped_text() -> str:
    """What was piped in; nothing when standard input is a terminal or closed."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return ""
    binary = getattr(sys.stdin, "buffer", None)
    return binary.read().decode("utf-8", "replace") if binary is not None else sys.stdin.read()


def answer(env: Env, config: UserConfig, model: str | None, job: Job) -> int:
    """Load the model, answer, show. Returns the exit code."""
    from .names import choose

    console = env.console
    choice = choose(env, config, model)
    events = EventLines(console) if console.as_json and job.stream else None
    progress = make_progress(console, env.options.progress or "auto", choice.shown)
    with open_backend(env, config, job.sampling, ctx=job.ctx, completes=True) as backend:
        backend.start(choice.name)
        facts, load_s = wait_ready(backend, progress, events.phase if events else None)
        if events is not None:
            events.ready(facts)
        for warning in facts.warnings:
            console.warn(warning)
        view = events or (Text(console, job) if not console.as_json else Silent())
        turns = [backend.send(job.messages) for _ in range(job.sampling.num_samples)]
        answers = follow(backend, turns, view.event)
        view.close(answers)
        if console.as_json and events is None:
            console.emit("run/1", envelope(choice, job, facts, answers, load_s))
        elif job.stats and not console.as_json:
            for one in answers:
                console.say(console.style(f"[{stats_line(one, backend.facts())}]", "dim", err=True))
        if any(one.stop == "length" for one in answers) and job.strict:
            limit = job.sampling.used.max_tokens
            raise ConstraintUnmet(f"the answer was cut at {limit or facts.ctx:,} tokens", "raise --max-tokens")
    return 0


def envelope(choice: Any, job: Job, facts: Facts, answers: Sequence[Answered], load_s: float) -> dict[str, Any]:
    """The fields of run/1."""
    usage = [one.usage for one in answers]
    first = answers[0].timing
    used = job.sampling.used
    shown = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "max_tokens", "stop")
    return {
        "model": choice.shown,
        "revision": choice.revision,
        "quant": choice.quant,
        "device": facts.device,
        "output": [
            {"text": one.text, "reasoning": one.reasoning, "tool_calls": one.tool_calls, "stop": one.stop}
            for one in answers
        ],
        "usage": {
            "prompt": usage[0].prompt_tokens,
            "cached": usage[0].cached_tokens,
            "completion": sum(u.completion_tokens for u in usage),
            "reasoning": sum(u.reasoning_tokens for u in usage),
        },
        "timing": {
            "load_s": round(load_s, 3),
            "ttft_ms": round(first.ttft_s * 1000, 1),
            "prefill_tps": round(first.prefill_tps, 1),
            "decode_tps": round(first.decode_tps, 1),
            "total_s": round(max(one.timing.total_s for one in answers), 3),
        },
        "params": {key: value for key, value in asdict(used).items() if key in shown} | {"ctx": facts.ctx},
    }


# --- ways to show an answer ------------------------------------------------------------------------------------------


class Silent:
    """Nothing until the envelope."""

    def event(self, event: ChatEvent) -> None:
        """Nothing."""

    def close(self, answers: Sequence[Answered]) -> None:
        """Nothing."""


class EventLines:
    """`--json --stream`: every event as one line on stdout."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._start = time.monotonic()

    def phase(self, phase: Phase) -> None:
        """A phase of loading."""
        if phase.name != "ready":
            self._write(phase_event(phase, self._elapsed()))

    def ready(self, facts: Facts) -> None:
        """The model can answer."""
        line = {"t": round(self._elapsed(), 3), "event": "ready", "device": facts.device, "ctx": facts.ctx}
        self._write(line | {"detail": facts.truth_line})

    def event(self, event: ChatEvent) -> None:
        """An event of a turn."""
        line: dict[str, Any] = {"t": round(self._elapsed(), 3)}
        if isinstance(event, Prefill):
            line |= {"event": "prefill", "done": event.done, "total": event.total}
        elif isinstance(event, Delta):
            line |= {"event": "token", "kind": event.kind, "text": event.text}
        elif isinstance(event, Done):
            usage, timing = event.usage, event.timing
            line |= {
                "event": "done",
                "stop": str(event.stop),
                "usage": {
                    "prompt": usage.prompt_tokens,
                    "cached": usage.cached_tokens,
                    "completion": usage.completion_tokens,
                    "reasoning": usage.reasoning_tokens,
                },
                "timing": {
                    "ttft_ms": round(timing.ttft_s * 1000, 1),
                    "prefill_tps": round(timing.prefill_tps, 1),
                    "decode_tps": round(timing.decode_tps, 1),
                    "total_s": round(timing.total_s, 3),
                },
            }
        else:
            return
        if hasattr(event, "turn"):
            line["index"] = event.turn
        self._write(line)

    def close(self, answers: Sequence[Answered]) -> None:
        """Nothing: `done` was the end."""

    def _elapsed(self) -> float:
        return time.monotonic() - self._start

    def _write(self, line: dict[str, Any]) -> None:
        import json

        from localllm.terminal import json_safe

        self._console.raw(json_safe(json.dumps(line, ensure_ascii=False)) + "\n")


class Text:
    """The answer as text: as it comes, or whole; on a terminal with styles and without anything it would obey."""

    def __init__(self, console: Console, job: Job) -> None:
        self._console = console
        self._job = job
        self._kind = ""
        self._ends_line = True
        self._cleaner = Cleaner()
        self._styles = None
        if job.markdown:
            from .markdown import MarkdownStream

            self._styles = MarkdownStream()

    def event(self, event: ChatEvent) -> None:
        """Print a piece when streaming."""
        if self._job.stream and isinstance(event, Delta):
            self._piece(event.kind, event.text)

    def close(self, answers: Sequence[Answered]) -> None:
        """Print what streaming did not, and end the line."""
        if not self._job.stream:
            for number, one in enumerate(answers):
                if number:
                    self._end_line()
                    self._console.raw("\n---\n\n")
                if one.reasoning:
                    self._piece("reasoning", one.reasoning)
                self._piece("content", one.text)
                self._kind = ""
        self._end_line()

    def _piece(self, kind: str, text: str) -> None:
        if kind == "reasoning" and not self._job.show_thinking:
            return
        if kind != self._kind and self._kind == "reasoning":
            self._end_line()
            self._console.raw("\n")
        self._kind = kind
        if self._console.out_tty:
            text = self._cleaner.push(text)
            if kind == "reasoning":
                self._console.raw(self._console.style(text, "dim"))
            elif self._styles is not None:
                self._console.raw(self._styles.push(text))
            else:
                self._console.raw(text)
        else:
            self._console.answer(text)
        if text:
            self._ends_line = text.endswith("\n")

    def _end_line(self) -> None:
        if self._styles is not None:
            self._console.raw(self._styles.flush())
        if not self._ends_line:
            self._console.raw("\n")
            self._ends_line = True


def question(backend: ChatBackend, messages: Sequence[Message], view: Text) -> Answered:
    """One turn of a conversation in line mode."""
    answers = follow(backend, [backend.send(messages)], view.event)
    view.close(answers)
    return answers[0]

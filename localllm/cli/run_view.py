"""Ways to show a run's answer: in the final envelope only, as events, or as text."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.cli.frame.console import Console
from localllm.cli.frame.progress import phase_event
from localllm.conversation.answer import Answer, Call
from localllm.interface import ChatEvent, Delta, Done, Facts, Prefill
from localllm.request import LoadProgress, Timing, Usage
from localllm.terminal import Cleaner

if TYPE_CHECKING:
    from localllm.cli.question import Job


def usage_json(usage: Usage) -> dict[str, int]:
    """Token counts for run/1 and its events."""
    return {
        "prompt": usage.prompt_tokens,
        "cached": usage.cached_tokens,
        "completion": usage.completion_tokens,
        "reasoning": usage.reasoning_tokens,
    }


def timing_json(timing: Timing) -> dict[str, float]:
    """Times for run/1 and its events."""
    return {
        "ttft_ms": round(timing.ttft_s * 1000, 1),
        "prefill_tps": round(timing.prefill_tps, 1),
        "decode_tps": round(timing.decode_tps, 1),
        "total_s": round(timing.total_s, 3),
        "draft_tokens": timing.draft_tokens,
        "accepted_tokens": timing.accepted_tokens,
    }


class StartTrace:
    """How long each phase of a start took, from process start to the first token."""

    def __init__(self) -> None:
        self._begun: list[tuple[str, float]] = [("start", process_begun())]

    def phase(self, phase: LoadProgress) -> None:
        if phase.name != self._begun[-1][0]:
            self._begun.append((phase.name, time.monotonic()))

    def line(self, timing: Timing) -> str:
        """'start 0.46 s, resolve 0.06 s, import 1.37 s, weights 0.05 s, first token 0.54 s, total 2.48 s'."""
        names, begins = zip(*self._begun, strict=True)
        took = [end - begin for begin, end in pairwise(begins)]
        parts = [*zip(names, took, strict=False), ("first token", timing.ttft_s), ("total", sum(took) + timing.ttft_s)]
        return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in parts)


def process_begun() -> float:
    """When this process started, on the monotonic clock; now, where the system does not say."""
    now = time.monotonic()
    try:
        began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return now - max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, ValueError, AttributeError):
        return now


class RunEvents:
    """`--json --stream`: every event as one line on stdout."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def phase(self, phase: LoadProgress) -> None:
        if phase.name != "ready":
            self._console.event(phase_event(phase), self._console.stdout)

    def ready(self, facts: Facts) -> None:
        self._console.event(
            {"event": "ready", "device": facts.device, "ctx": facts.ctx, "detail": facts.run_summary},
            self._console.stdout,
        )

    def result(self, call: Call) -> None:
        line = {"event": "tool_result", "id": call.id, "name": call.name, "arguments": call.arguments}
        self._console.event(line | {"result": call.result or "", "failed": call.failed}, self._console.stdout)

    def event(self, event: ChatEvent) -> None:
        if isinstance(event, Prefill):
            line: dict[str, Any] = {"event": "prefill", "done": event.done, "total": event.total}
        elif isinstance(event, Delta):
            line = {"event": "token", "kind": event.kind, "text": event.text}
        elif isinstance(event, Done):
            line = {"event": "done", "stop": str(event.stop)}
            line |= {"usage": usage_json(event.usage), "timing": timing_json(event.timing)}
        else:
            return
        self._console.event(line | {"index": event.turn}, self._console.stdout)


class Text:
    """The answer as text, streamed or whole; on a terminal, cleaned and with styles."""

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
        if self._job.stream and isinstance(event, Delta):
            self._piece(event.kind, event.text)

    def close(self, answers: Sequence[Answer]) -> None:
        """Print what was not streamed, and end the line."""
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
        if kind == "tool_call" or (kind == "reasoning" and not self._job.show_thinking):
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

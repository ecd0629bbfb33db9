"""Sentences about a conversation: the line below an answer, a failure with its fixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localllm.errors import LocalLLMError
from localllm.interface import Failed
from localllm.request import Timing, Usage
from localllm.terminal import counted


def number(value: Any) -> str:
    """A setting's value for people: 0.3, 0, 42."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def answer_stats(usage: Usage, timing: Timing, stop: str) -> str:
    """The line below an answer: '↑ 1,204 (cached 1,024)  ↓ 312  ·  91.4 tok/s  ·  TTFT 41 ms'."""
    cached = f" (cached {usage.cached_tokens:,})" if usage.cached_tokens else ""
    parts = [f"↑ {usage.prompt_tokens:,}{cached}  ↓ {usage.completion_tokens:,}"] if usage.prompt_tokens else []
    if timing.decode_tps:
        parts.append(f"{timing.decode_tps:.1f} tok/s")
    if usage.completion_tokens and timing.total_s:
        parts.append(f"TTFT {timing.ttft_s * 1000:.0f} ms")
    ends = {
        "abort": f"stopped by you · {counted(usage.completion_tokens, 'token')} · /continue · /regen",
        "length": f"reached the limit of {counted(usage.completion_tokens, 'token')} · /continue",
        "partial": "cut off when the program ended · /continue",
        "edited": "edited by you",
        "unanswered": "not answered · /regen",
    }
    return "  ·  ".join([*parts, *([ends[stop]] if stop in ends else [])])


def complaint(error: LocalLLMError) -> str:
    """An error of the user's, in one line."""
    return f"! {error.message}" + (f" ({error.hint})" if error.hint else "")


def failure_lines(failed: Failed) -> Sequence[str]:
    """A failure as lines: what, and what to do next."""
    steps = [failed.hint] if failed.hint else []
    why = [f"  why  {failed.why}"] if failed.why else []
    steps += [f"{command}   {note}".rstrip() for command, note in failed.fixes if command != failed.hint]
    return [
        f"✗ {failed.message}   [{failed.code}]",
        *why,
        *(f"  {'try' if i == 0 else '   '}  {s}" for i, s in enumerate(steps)),
    ]

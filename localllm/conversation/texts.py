"""Sentences about a conversation: the line below an answer, a failure with its fixes, what a summary says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from localllm.interface import Failed
from localllm.request import Timing, Usage


def number(value: Any) -> str:
    """A setting's value for people: 0.3, 0, 42."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def counted(many: int, word: str) -> str:
    """'1 turn', '2,000 turns'."""
    return f"{many:,} {word}{'' if many == 1 else 's'}"


def code_blocks(text: str) -> list[str]:
    """The contents of the fenced blocks of a Markdown text; one that is left open counts."""
    return [block for _, block in fenced_blocks(text)]


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """(what stands behind the fence, such as "python"; contents) of the fenced blocks of a Markdown text."""
    blocks: list[tuple[str, list[str]]] = []
    fence = ""
    for line in text.split("\n"):
        bare = line.strip()
        if not fence and bare.startswith(("```", "~~~")):
            mark = bare.lstrip(bare[0])
            fence = bare[: len(bare) - len(mark)]
            blocks.append((mark.strip(), []))
        elif fence and bare.startswith(fence) and not bare.strip(fence[0]):
            fence = ""
        elif fence:
            blocks[-1][1].append(line)
    return [(mark, "\n".join(lines)) for mark, lines in blocks]


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


def summary(usages: Iterable[Usage], timings: Iterable[Timing]) -> str:
    """'3 turns · 120 tokens · 90 tok/s avg'; empty before the first answer."""
    done = [usage.completion_tokens for usage in usages if usage.completion_tokens]
    if not done:
        return ""
    rates = [timing.decode_tps for timing in timings if timing.decode_tps]
    rate = f" · {sum(rates) / len(rates):.0f} tok/s avg" if rates else ""
    return f"{counted(len(done), 'turn')} · {counted(sum(done), 'token')}{rate}"


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

"""Streamed answers to reasoning and content: `reasoning_tags(template, prompt_tail)` -> tags for a `ReasoningParser`.

Which tags a model thinks in is read from its chat template. A template may have opened the tag itself: then the prompt
ends with it, and the answer begins inside. The concatenated pieces do not depend on how the text was cut.
"""

from __future__ import annotations

from typing import Literal, Protocol

Part = tuple[str, str]  # ("reasoning" | "content" | "tool_call", text); of a call the JSON of a delta
State = Literal["start", "opened", "reasoning", "closed", "content"]

_NAMES = ("think", "thinking", "thought", "thoughts", "reasoning", "reason", "reflection", "seed:think")
_TAGS = tuple((f"<{name}>", f"</{name}>") for name in _NAMES)
# (opens, closes)
TAGS = (
    *_TAGS,
    ("<think:opensource>", "</think:opensource>"),
    ("<mm:think>", "</mm:think>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("◁think▷", "◁/think▷"),
)
_LINE_ENDS = "\r\n"
_MAX_HELD = 64  # line ends before a closing tag, or white space before an opening one, beyond which they count as text


def reasoning_tags(template: str, prompt_tail: str = "") -> tuple[str, str] | None:
    """The tags that the prompt ends with, or that a template speaks of; None for a model that does not think."""
    tail = prompt_tail.rstrip()
    for opens, closes in TAGS:
        if tail.endswith((opens, closes)):
            return opens, closes
    found = [(template.find(closes), opens, closes) for opens, closes in TAGS if closes in template]
    found += [(template.find(opens), opens, closes) for opens, closes in TAGS if opens in template]
    return min(found)[1:] if found else None


class Splitter(Protocol):
    """What takes one answer apart: a `ReasoningParser`, a parser of tool calls, or both in a row."""

    def push(self, text: str) -> list[Part]:
        """The parts that this text completes, in order."""
        ...

    def finish(self) -> list[Part]:
        """What was held back."""
        ...


class ChainedParser:
    """Reasoning first, then what the content consists of.

    A model may begin a call without closing its reasoning. So calls are looked for in there, too: what follows a whole
    one is held until a closing tag says that it was reasoning, or the end of the answer that it was not.
    """

    def __init__(self, reasoning: ReasoningParser, content: Splitter, thought: Splitter | None = None) -> None:
        """`thought` reads the reasoning as if it were content; without it, calls in there are not looked for."""
        self._reasoning = reasoning
        self._content = content
        self._thought = thought
        self._unsaid = ""  # reasoning that was not given out
        self._found: list[Part] = []  # from the first call in it on

    def push(self, text: str) -> list[Part]:
        return self._split(self._reasoning.push(text))

    def finish(self) -> list[Part]:
        made = self._split(self._reasoning.finish())
        if self._thought is not None and self._reasoning.in_reasoning:
            made += self._listen(self._thought.finish())
            if self._found:
                return made + self._found
        return [*made, *self._close(), *self._content.finish()]

    def _split(self, parts: list[Part]) -> list[Part]:
        made: list[Part] = []
        for kind, text in parts:
            if kind != "reasoning":
                made += [*self._close(), *self._content.push(text)]
            elif self._thought is None:
                made.append((kind, text))
            else:
                self._unsaid += text
                made += self._listen(self._thought.push(text))
        if self._reasoning.is_closed:
            made += self._close()
        return made

    def _listen(self, parts: list[Part]) -> list[Part]:
        """What of the reasoning is certain to be nothing else."""
        size = 0
        for part in parts:
            if part[0] == "tool_call" or self._found:
                self._found.append(part)
            else:
                size += len(part[1])
        said, self._unsaid = self._unsaid[:size], self._unsaid[size:]
        return [("reasoning", said)] if said else []

    def _close(self) -> list[Part]:
        """The reasoning is over: all of it was reasoning."""
        said, self._unsaid, self._thought = self._unsaid, "", None
        self._found.clear()
        return [("reasoning", said)] if said else []


class ReasoningParser:
    """Splits one answer as it comes.

    Only a tag at the very beginning opens reasoning: later ones are text about tags. A closing tag there says that
    there is none. Line ends next to the tags belong to neither side. At most 64 line ends and a part of a tag wait for
    what follows.
    """

    def __init__(self, opens: str = "<think>", closes: str = "</think>", *, opened: bool = False) -> None:
        """`opened`: the prompt has opened the tag already."""
        self.opens, self.closes = opens, closes
        self._state: State = "opened" if opened else "start"
        self._held = ""

    @property
    def in_reasoning(self) -> bool:
        """Whether the text is inside the tags now."""
        return self._state in ("opened", "reasoning")

    @property
    def is_closed(self) -> bool:
        """Whether the reasoning is over, or there is none."""
        return self._state in ("closed", "content")

    def push(self, text: str) -> list[Part]:
        text, self._held = self._held + text, ""
        parts: list[Part] = []
        while text:
            if self._state == "start":
                text = self._start(text)
            elif self._state == "opened":
                text = self._opened(text)
            elif self._state == "reasoning":
                text = self._reasoning(text, parts)
            elif self._state == "closed":
                text = text.lstrip(_LINE_ENDS)
                self._state = "content" if text else "closed"
            else:
                parts.append(("content", text))
                break
        return parts

    def finish(self) -> list[Part]:
        """A tag that was never closed leaves everything reasoning."""
        held, self._held = self._held, ""
        kind = "reasoning" if self.in_reasoning else "content"
        return [(kind, held)] if held else []

    def _start(self, text: str) -> str:
        """Before anything was said: an opening tag, perhaps after white space, a closing one alone, or content."""
        said = text.lstrip()
        if len(text) - len(said) <= _MAX_HELD:
            if said.startswith(self.opens):
                self._state = "opened"
                return said[len(self.opens) :]
            if said.startswith(self.closes):
                self._state = "closed"
                return said[len(self.closes) :]
            if self.opens.startswith(said) or self.closes.startswith(said):
                self._held = text
                return ""
        self._state = "content"
        return text

    def _opened(self, text: str) -> str:
        """At the beginning of the reasoning: line ends, and an opening tag that the prompt has already."""
        text = text.lstrip(_LINE_ENDS)
        if text.startswith(self.opens):
            return text[len(self.opens) :]
        if text and self.opens.startswith(text):
            self._held = text
            return ""
        if text:
            self._state = "reasoning"
        return text

    def _reasoning(self, text: str, parts: list[Part]) -> str:
        close = text.find(self.closes)
        if close >= 0:
            self._state = "closed"
            said, rest = text[: self._before_line_ends(text, close)], text[close + len(self.closes) :]
            parts += [("reasoning", said)] if said else []
            return rest
        begun = range(len(self.closes) - 1, 0, -1)
        end = len(text) - next((size for size in begun if text.endswith(self.closes[:size])), 0)
        keep = self._before_line_ends(text, end)
        self._held = text[keep:]
        parts += [("reasoning", text[:keep])] if keep else []
        return ""

    @staticmethod
    def _before_line_ends(text: str, end: int) -> int:
        """Where the line ends before `end` begin, going back at most `_MAX_HELD`."""
        begin = max(end - _MAX_HELD, 0)
        return begin + len(text[begin:end].rstrip(_LINE_ENDS))

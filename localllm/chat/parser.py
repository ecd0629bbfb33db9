"""Splits streamed answers into reasoning and content: `reasoning_tags` finds the tags for a `ReasoningParser`.

The tags are read from the chat template. If the template opens the tag itself, the prompt ends with it and the answer
starts inside the reasoning. The concatenated parts do not depend on how the text was split into pieces.
"""

from __future__ import annotations

from typing import Literal, Protocol

Part = tuple[str, str]  # ("reasoning" | "content" | "tool_call", text); for a call, the text is a delta as JSON
State = Literal["start", "opened", "reasoning", "closed", "content"]

_NAMES = (
    *("think", "thinking", "thought", "thoughts", "reasoning", "reason", "reflection", "seed:think"),
    *("ifm|think", "ifm|think_fast", "ifm|think_faster"),  # K2-Horizon, by effort; the prompt ends with one
)
_TAGS = tuple((f"<{name}>", f"</{name}>") for name in _NAMES)
# (opening, closing)
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
_MAX_HELD = 64  # characters of white space next to a tag; any beyond that are text


def reasoning_tags(template: str, prompt_tail: str = "") -> tuple[str, str] | None:
    """Return the tags that the prompt ends with or the template mentions; None for a model without reasoning."""
    tail = prompt_tail.rstrip()
    for opens, closes in TAGS:
        if tail.endswith((opens, closes)):
            return opens, closes
    found = [(template.find(closes), opens, closes) for opens, closes in TAGS if closes in template]
    found += [(template.find(opens), opens, closes) for opens, closes in TAGS if opens in template]
    return min(found)[1:] if found else None


class Splitter(Protocol):
    """Splits one answer into parts: a `ReasoningParser`, a tool call parser, or both chained."""

    def push(self, text: str) -> list[Part]:
        """Add text and return the parts it completes, in order."""
        ...

    def finish(self) -> list[Part]:
        """End the answer and return the parts that were held back."""
        ...


class ChainedParser:
    """Splits off reasoning first, then passes the content to another splitter.

    A model may start a call without closing its reasoning, so reasoning is searched for calls as well. Everything from
    the first complete call on is held until a closing tag shows that it was reasoning, or the answer ends without one.
    """

    def __init__(self, reasoning: ReasoningParser, content: Splitter, thought: Splitter | None = None) -> None:
        """`thought` parses the reasoning as if it were content; without it, reasoning is not searched for calls."""
        self._reasoning = reasoning
        self._content = content
        self._thought = thought
        self._pending = ""  # reasoning not returned yet
        self._held_parts: list[Part] = []  # parts from the first call in it on

    def push(self, text: str) -> list[Part]:
        return self._split(self._reasoning.push(text))

    def finish(self) -> list[Part]:
        made = self._split(self._reasoning.finish())
        if self._thought is not None and self._reasoning.in_reasoning:
            made += self._settled_reasoning(self._thought.finish())
            if self._held_parts:
                return made + self._held_parts
        return [*made, *self._close(), *self._content.finish()]

    def _split(self, parts: list[Part]) -> list[Part]:
        made: list[Part] = []
        for kind, text in parts:
            if kind != "reasoning":
                made += [*self._close(), *self._content.push(text)]
            elif self._thought is None:
                made.append((kind, text))
            else:
                self._pending += text
                made += self._settled_reasoning(self._thought.push(text))
        if self._reasoning.is_closed:
            made += self._close()
        return made

    def _settled_reasoning(self, parts: list[Part]) -> list[Part]:
        """Return the reasoning that is certain not to be part of a call."""
        size = 0
        for part in parts:
            if part[0] == "tool_call" or self._held_parts:
                self._held_parts.append(part)
            else:
                size += len(part[1])
        said, self._pending = self._pending[:size], self._pending[size:]
        return [("reasoning", said)] if said else []

    def _close(self) -> list[Part]:
        """End the reasoning; everything held was reasoning."""
        said, self._pending, self._thought = self._pending, "", None
        self._held_parts.clear()
        return [("reasoning", said)] if said else []


class ReasoningParser:
    """Splits one streamed answer into reasoning and content.

    Only a tag at the very start opens reasoning; later ones are ordinary text. A closing tag at the start means there
    is no reasoning. Line ends next to the tags belong to neither part. At most 64 line ends and a partial tag are held
    back.
    """

    def __init__(self, opens: str = "<think>", closes: str = "</think>", *, opened: bool = False) -> None:
        """`opened`: the prompt has already opened the tag."""
        self.opens, self.closes = opens, closes
        self._state: State = "opened" if opened else "start"
        self._held = ""

    @property
    def in_reasoning(self) -> bool:
        """True while the text is inside the tags."""
        return self._state in ("opened", "reasoning")

    @property
    def is_closed(self) -> bool:
        """True when the reasoning has ended or there is none."""
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
        """End the answer. If the tag was never closed, the rest is reasoning."""
        held, self._held = self._held, ""
        kind = "reasoning" if self.in_reasoning else "content"
        return [(kind, held)] if held else []

    def _start(self, text: str) -> str:
        """At the start of the answer: an opening tag (perhaps after white space), a lone closing tag, or content."""
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
        """At the start of the reasoning: skip line ends and a repetition of the prompt's opening tag."""
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
        """The start of the line ends before `end`, at most `_MAX_HELD` characters back."""
        begin = max(end - _MAX_HELD, 0)
        return begin + len(text[begin:end].rstrip(_LINE_ENDS))

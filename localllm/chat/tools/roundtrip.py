"""Probes a chat template's tool support: renders a call, parses it back, and renders its result."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from localllm.errors import LocalLLMError
from localllm.tokenizer.tokenizer import Tokenizer

from ..parser import reasoning_tags
from ..template import ChatTemplate, encode_chat
from .formats import GENERIC, ToolFormat, find_format
from .messages import plain_messages, template_messages, template_tools
from .parser import answer_parser

_NAME, _RESULT, _THOUGHT = "look_up_weather", "RAIN-4711", "Look outside."
_ARGUMENTS = {"city": "Oslo", "days": 2}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": _NAME,
            "description": "The weather of a place",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Where"},
                    "days": {"type": "integer", "description": "How many"},
                },
                "required": ["city", "days"],
            },
        },
    }
]
_CALL = {"id": "aB3dE6gH9", "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
_QUESTION = {"role": "user", "content": "Is an umbrella needed?"}


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """The tool support of a template. Plain data, for `show` and doctor."""

    format: str  # the name of the `ToolFormat`
    native: bool  # the template renders tools; else they are described in the system message
    reads_back: bool  # a call rendered by the template was parsed back as the same call
    answers: bool  # the result of a call is in the next prompt
    keeps_prefix: bool  # the next prompt starts with the tokens of this one and of the call, so nothing is recomputed
    note: str = ""  # the failure, in a sentence
    as_text: bool = False  # the template omits calls: they are written into the text of their messages

    @property
    def works(self) -> bool:
        """True if a conversation with tools works."""
        return self.reads_back and self.answers

    @property
    def line(self) -> str:
        if not self.works:
            return f"no: {self.note}"
        how = f"{self.format} format" if self.native else "described in the system message"
        return f"{how}, {'cached prefix kept' if self.keeps_prefix else 'cached prefix lost: ' + self.note}"


NO_TEMPLATE = ToolSupport("none", False, False, False, False, "the model has no chat template")


def renders_tools(template: ChatTemplate) -> bool:
    """True if the template renders the tools passed to it."""
    try:
        return _NAME in template.render([_QUESTION], tools=_TOOLS)
    except LocalLLMError:
        return False


def check_tools(template: ChatTemplate, tokenizer: Tokenizer) -> ToolSupport:
    """Try a conversation with one call. Never raises because of the template."""
    tool_format = find_format(template.chosen(_TOOLS))
    if not renders_tools(template):
        return _Trial(template, tokenizer, GENERIC, native=False).verdict()
    trials = [
        _Trial(template, tokenizer, tool_format),
        _Trial(template, tokenizer, tool_format, as_text=True),
        _Trial(template, tokenizer, GENERIC, native=False),
    ]
    if tool_format is GENERIC:  # the notation that the template describes is unknown
        del trials[1]
    verdicts = (trial.verdict() for trial in trials)
    first = next(verdicts)
    return first if first.works else next((one for one in verdicts if one.works), first)


@dataclass(frozen=True, slots=True)
class _Trial:
    """One way to render the conversation."""

    template: ChatTemplate
    tokenizer: Tokenizer
    tool_format: ToolFormat
    native: bool = True
    as_text: bool = False

    def verdict(self) -> ToolSupport:
        """Run the trial."""
        template, tool_format = self.template, self.tool_format

        def verdict(note: str, reads_back: bool = False, answers: bool = False, keeps: bool = False) -> ToolSupport:
            return ToolSupport(tool_format.name, self.native, reads_back, answers, keeps, note, self.as_text)

        try:
            first, first_ids = self._rendered([_QUESTION])
            tags = reasoning_tags(template.template, first[-64:])
            thinks = tags is not None and not first.rstrip().endswith(tags[1])
            thought = {"reasoning_content": _THOUGHT} if thinks else {}
            turns: list[dict[str, Any]] = [
                {"role": "assistant", "content": "", **thought, "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": _CALL["id"], "name": _NAME, "content": _RESULT},
            ]
            after, after_ids = self._rendered([_QUESTION, *turns])
        except LocalLLMError as error:
            return verdict(f"the template rejects a conversation with a call: {error.message[:120]}")
        answers = _RESULT in after
        opening = tool_format.opening(first)
        if not after.startswith(first):
            calls = _read(tool_format, after[_first_difference(tool_format, first, after) :])
            note = "the template renders the turn of a call differently from its generation prompt"
            return verdict(note, _is_expected(calls), answers)
        rest = after[len(first) :].split(_RESULT)[0]
        calls = _read(tool_format, opening + rest)
        if not _is_expected(calls):
            return verdict("the call that the template renders cannot be parsed back", answers=answers)
        if not answers:
            return verdict("the template omits the result of a call", reads_back=True)
        if tool_format.write(_NAME, _ARGUMENTS) not in (opening + rest).replace("[TOOL_CALLS] [", "[TOOL_CALLS]["):
            return verdict("the template renders a call differently from how models write it", True, True)
        if thinks and _THOUGHT not in after:
            return verdict("the template drops the reasoning before a call", True, True)
        keeps = after_ids[: len(first_ids)] == first_ids
        return verdict("" if keeps else "the next prompt is tokenized differently", True, True, keeps)

    def _rendered(self, messages: list[dict[str, Any]]) -> tuple[str, list[int]]:
        if self.native:
            shaped = template_messages(messages, self.tool_format, as_text=self.as_text)
            text = self.template.render(shaped, tools=template_tools(_TOOLS))
        else:
            text = self.template.render(plain_messages(messages, _TOOLS))
        return text, encode_chat(self.tokenizer, text)


def _read(tool_format: ToolFormat, text: str) -> list[tuple[str, str]]:
    """Parse the calls in a text as (name, arguments)."""
    parser = answer_parser(tool_format, _TOOLS)
    calls: list[tuple[str, str]] = []
    for kind, part in parser.push(text) + parser.finish():
        if kind == "tool_call":
            delta = json.loads(part)
            name, arguments = ("", "") if "name" in delta else calls.pop()
            calls.append((delta.get("name") or name, arguments + delta["arguments"]))
    return calls


def _is_expected(calls: list[tuple[str, str]]) -> bool:
    return len(calls) == 1 and calls[0][0] == _NAME and json.loads(calls[0][1]) == _ARGUMENTS


def _first_difference(tool_format: ToolFormat, one: str, other: str) -> int:
    """The position where two texts start to differ; if it is inside a mark of the format, the start of the mark."""
    both = enumerate(zip(one, other, strict=False))
    at = next((i for i, (a, b) in both if a != b), min(len(one), len(other)))
    marks = [mark for mark in (tool_format.open, *tool_format.triggers) if mark]
    return next((i for i in range(max(at - 64, 0), at) if any(other.startswith(mark, i) for mark in marks)), at)

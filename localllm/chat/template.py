"""Renders messages and tools to prompt text, and tokenizes it without turning message text into control tokens.

`ChatTemplate.render` renders the template in the child process (`render.py`). Control-token texts in the messages are
first wrapped in two private-use characters. These are removed from the result and their positions recorded, which tells
`encode_chat` which control tokens the template itself wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from localllm.errors import InvalidRequest
from localllm.tokenizer.tokenizer import ControlText, Span, Tokenizer

from .parser import TAGS
from .render_child import RenderChild, shared_child

Finder = Callable[[str], list[Span]]
# names under which clients send a message's reasoning; templates read the first, gpt-oss's the second
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_OUTSIDERS = frozenset(["user", "tool", "function", "ipython", "observation"])
_REASONING_TAGS = frozenset(tag for tags in TAGS for tag in tags)
_PRIVATE = range(0x10F800, 0x10FFF0, 2)


class RenderedPrompt(str):
    """Prompt text that records where message text looks like control tokens."""

    # (begin, end), in order; an empty span separates two pieces that must not join into a control token
    as_text: tuple[Span, ...] = ()

    @classmethod
    def of(cls, text: str, as_text: Iterable[Span] = ()) -> RenderedPrompt:
        made = cls(text)
        made.as_text = tuple(as_text)
        return made


class WrittenText(str):
    """Message text that contains parts of ours, whose control tokens are real."""

    own: tuple[Span, ...] = ()

    @classmethod
    def of(cls, pieces: Iterable[tuple[str, bool]]) -> WrittenText:
        """Join pieces of (text, whether it is ours)."""
        texts, spans, at = [], [], 0
        for text, is_own in pieces:
            texts.append(text)
            spans += [(at, at + len(text))] if is_own else []
            at += len(text)
        made = cls("".join(texts))
        made.own = tuple(spans)
        return made


class ChatTemplate:
    """One model's chat template."""

    def __init__(self, tokenizer: Tokenizer, template: str | None = None, *, child: RenderChild | None = None) -> None:
        """Use `template`, or the tokenizer's own if it is None; renders nothing yet.

        Raises InvalidRequest when there is neither.
        """
        text = template if template is not None else tokenizer.chat_template
        if text is None:
            raise InvalidRequest(
                "this is a base model without a chat template",
                "use `localllm run`, or give a template",
            )
        self.template = text
        # additional named templates; "tool_use" is used when there are tools
        self._templates = tokenizer.chat_templates if template is None else {}
        self._named_tokens = tokenizer.named_tokens  # bos_token, eos_token, ... -> text; variables for the template
        self._control = tokenizer.control_text
        self._added = tokenizer.added_text
        self._child = child or shared_child()

    def warm_up(self) -> None:
        """Start the child in advance for the first rendering. Returns at once."""
        self._child.start()

    def chosen(self, tools: Sequence[Any] | None = None) -> str:
        """The template text to use: with tools, the one named "tool_use" if there is one."""
        return self._templates.get("tool_use", self.template) if tools is not None else self.template

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> RenderedPrompt:
        """Render the prompt text, byte for byte as `apply_chat_template` of transformers does.

        continue_final_message  end the text with the last message, for the model to continue
        kwargs                  more template variables: enable_thinking (also for templates with another name for it),
                                documents, reasoning_effort, ...

        Raises InvalidRequest for messages that are malformed, rejected by the template or over its limits, and for a
        final message that cannot be continued because the template changes it; BadModelFile for a broken or forbidden
        template.
        """
        template = self.chosen(tools)
        shaped = [_shape(message, number) for number, message in enumerate(_checked(messages))]
        given = {"documents": None, **_thinking_variables(template, kwargs), **kwargs, "tools": tools}
        marker = _Marker([shaped, given])
        find = self._finders(template)
        variables = {
            **self._named_tokens,
            **marker.mark(given, find["application"]),
            "documents": marker.mark(given["documents"], find["outsider"]),
            "messages": [self._mark(marker, message, find) for message in shaped],
            "add_generation_prompt": add_generation_prompt,
        }
        if continue_final_message:
            if not isinstance(shaped[-1].get("content"), str):
                raise _not_continuable()
            variables["messages"][-1]["content"] += marker.end_of_open
        text = self._child.render(template, variables)
        if continue_final_message:
            text = marker.opened(text, shaped[-1]["content"])
        return marker.unmark(text) if marker.marked else RenderedPrompt.of(text)

    def _finders(self, template: str) -> dict[str, Finder]:
        """Return finders for the control-token texts to wrap, for application, assistant, and outside messages.

        For users and tools they include added tokens that the template uses, such as `<tool_response>`; white space is
        never among these. For the assistant they exclude reasoning tags, because templates search for those and the
        white space around them.
        """
        used = {text: index for text, index in self._added.ids.items() if text in template}
        both = ControlText({**used, **self._control.ids}) if used else self._control
        others = {text: index for text, index in self._control.ids.items() if text not in _REASONING_TAGS}
        said = self._control if len(others) == len(self._control.ids) else ControlText(others)
        found = {"application": self._control, "assistant": said, "outsider": both}
        return {whose: partial(_places, tokens) for whose, tokens in found.items()}

    def _mark(self, marker: _Marker, message: dict[str, Any], find: Mapping[str, Finder]) -> dict[str, Any]:
        role = message["role"]
        if marker.mark(role, find["outsider"]) != role:
            raise InvalidRequest(
                f"the role {role!r:.40} contains a control token", "use user, assistant, system or tool"
            )
        rest = {key: value for key, value in message.items() if key != "role"}
        whose = "outsider" if role in _OUTSIDERS else "assistant" if role == "assistant" else "application"
        return {"role": role, **marker.mark(rest, find[whose])}


def encode_chat(tokenizer: Tokenizer, rendered: RenderedPrompt) -> list[int]:
    """Tokenize a rendered chat: only the template's own control tokens become control tokens. BOS is added once."""
    ids = tokenizer.encode_mixed(rendered, rendered.as_text)
    bos = tokenizer.bos_token_id
    if tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
        ids.insert(0, bos)
    return ids


def _thinking_variables(template: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Map `enable_thinking` to the names used by other templates: DeepSeek V3.1 and Granite 3; Seed-OSS."""
    on = values.get("enable_thinking")
    if on is None or "enable_thinking" in template:
        return {}
    return {"thinking": on} if on else {"thinking": on, "thinking_budget": 0}


class _Marker:
    """Wraps control-token texts in two characters that do not occur in the request, and finds them again."""

    def __init__(self, given: Any) -> None:
        everything = _dumps(given)
        pairs = ((chr(code), chr(code + 1)) for code in _PRIVATE)
        unused = (pair for pair in pairs if not any(form in everything for char in pair for form in _forms(char)))
        self._begin, self._end = next(unused, ("", ""))
        if not self._begin:
            raise InvalidRequest("the messages use every private-use character", "send plain text")
        self.marked: set[str] = set()  # the texts that were wrapped

    @property
    def end_of_open(self) -> str:
        """The marker placed at the end of a message to be continued."""
        return 2 * self._begin

    def opened(self, text: str, message: str) -> str:
        """Return the text up to the end of the message to be continued, restoring white space that templates strip.

        Raises InvalidRequest if the template did not write the message unchanged.
        """
        said, found, _ = text.rpartition(self.end_of_open)
        stands, said = message.rstrip(), said.rstrip()
        plain = said.replace(self._begin, "").replace(self._end, "")
        if not stands or not found or not plain.endswith(stands.lstrip()):
            raise _not_continuable()
        return said + message[len(stands) :]

    def mark(self, value: Any, find: Finder) -> Any:
        """Return a copy in which the texts that `find` finds are wrapped, including those in keys."""
        if isinstance(value, str):
            return self._mark_text(value, find)
        if isinstance(value, Mapping):
            return {self.mark(key, find): self.mark(one, find) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item, find) for item in value]
        return value

    def _mark_text(self, text: str, find: Finder) -> str:
        places = find(text)
        if isinstance(text, WrittenText):
            places = [(a, b) for a, b in places if not any(begin <= a and b <= end for begin, end in text.own)]
        if not places:
            return text
        pieces, at = [], 0
        for begin, end in places:
            self.marked.add(text[begin:end])
            pieces += [text[at:begin], self._begin, text[begin:end], self._end]
            at = end
        return "".join([*pieces, text[at:]])

    def unmark(self, text: str) -> RenderedPrompt:
        """Remove the marks and record their positions.

        If a template separated two marks or changed the text between them, only their positions are kept, as empty
        spans.
        """
        names = {form: char for char in (self._begin, self._end) for form in _forms(char)}
        spans: list[Span] = []
        pieces: list[str] = []
        length, opened = 0, -1
        for part in re.split("(" + "|".join(map(re.escape, names)) + ")", text):
            char = names.get(part)
            if char is None:
                pieces.append(part)
                length += len(part)
            elif char == self._end and opened >= 0 and "".join(pieces[opened:]) in self.marked:
                spans[-1] = (spans[-1][0], length)
                opened = -1
            else:
                spans.append((length, length))
                opened = len(pieces) if char == self._begin else -1
        return RenderedPrompt.of("".join(pieces), spans)


def _not_continuable() -> InvalidRequest:
    return InvalidRequest("this model's template does not allow an answer to be continued", "ask for a new answer")


def _forms(char: str) -> tuple[str, str, str]:
    """A character as is, as `tojson(ensure_ascii=true)` writes it, and as Python's repr of a list does."""
    return char, json.dumps(char)[1:-1], repr(char)[1:-1]


def _places(tokens: ControlText, text: str) -> list[Span]:
    """Spans of control-token texts in a string, including a partial one at its end that the template could complete."""
    places = [(begin, end) for begin, end, _ in tokens.find(text)]
    tail = tokens.open_end(text)
    begin = len(text) - tail
    return [*places, (begin, len(text))] if tail and (not places or places[-1][1] <= begin) else places


def _checked(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequest("messages is empty: a chat needs at least one message", "send a message", param="messages")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            what = f"messages[{number}] is not an object with a role"
            raise InvalidRequest(what, 'send {"role": "user", "content": "..."}', param=f"messages[{number}]")
    return messages


def _shape(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Shape a message as transformers does: drop keys without a value, pass reasoning under the name templates read."""
    if not all(isinstance(key, str) for key in message):
        raise InvalidRequest(f"messages[{number}] has a key that is not text", "send JSON", param=f"messages[{number}]")
    shaped = {key: value for key, value in message.items() if value is not None}
    reasoning = next((shaped[name] for name in _REASONING_NAMES if name in shaped), None)
    return shaped if reasoning is None else {"thinking": reasoning, **shaped, "reasoning_content": reasoning}


def _dumps(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest("the messages are not plain data (text, numbers, lists, objects)", "send JSON") from error

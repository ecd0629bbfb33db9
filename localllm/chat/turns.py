"""Adapts agents' conversations to strict templates: joins multiple system messages and consecutive same-role messages.

Codex sends its rules in two system messages and starts with two user messages; Claude Code adds rules later on. Many
templates reject that (Gemma 3, Qwen3.5, Mistral) or silently drop a system message (Gemma 4, gpt-oss).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from localllm.chat.template import ChatTemplate
from localllm.errors import LocalLLMError

_RULES = ("Rule-7302", "Rule-7303", "Rule-7304")
_QUESTIONS = ("Question-41", "Question-42")


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


class Turns:
    """The message orders a template accepts, probed on first use (a few milliseconds)."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def fitted(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return the messages unchanged if the template renders all of them.

        Otherwise leading system messages are joined, later ones become user messages, and consecutive messages of the
        same role are joined.
        """
        roles = [message.get("role") for message in messages]
        row = any(role == other != "tool" for role, other in zip(roles, roles[1:], strict=False))
        if "system" in roles[1:] and not self._takes_system_anywhere:
            return _joined(messages, rows=not self._takes_rows)
        return _joined(messages, rows=True) if row and not self._takes_rows else messages

    @cached_property
    def _takes_system_anywhere(self) -> bool:
        begin = [_message("system", rule) for rule in _RULES[:2]]
        turns = [_message("user", _QUESTIONS[0]), _message("assistant", "Yes."), _message("system", _RULES[2])]
        return self._shows([*begin, *turns, _message("user", _QUESTIONS[1])], _RULES)

    @cached_property
    def _takes_rows(self) -> bool:
        return self._shows([_message("user", text) for text in _QUESTIONS], _QUESTIONS)

    def _shows(self, messages: list[dict[str, Any]], texts: Sequence[str]) -> bool:
        try:
            shown = self._template.render(messages)
        except LocalLLMError:
            return False
        return all(text in shown for text in texts)


def _joined(messages: Sequence[Mapping[str, Any]], *, rows: bool) -> list[dict[str, Any]]:
    """Join messages. `rows`: also join consecutive messages of the same role that involve no system message."""
    made: list[dict[str, Any]] = []
    was_moved = False
    for message in messages:
        begins = all(one.get("role") == "system" for one in made)
        is_moved = message.get("role") == "system" and not begins
        one = {**message, "role": "user"} if is_moved else dict(message)
        last = made[-1] if made else {}
        joins = rows or is_moved or was_moved or one.get("role") == "system"
        if joins and last.get("role") == one.get("role") != "tool" and not last.get("tool_calls"):
            made[-1] = {**last, **one, "content": _joined_content(last.get("content") or "", one.get("content") or "")}
        else:
            made.append(one)
        was_moved = is_moved
    return made


def _joined_content(first: Any, second: Any) -> Any:
    """Join the content of two messages: as text, or as a list of parts if either is one."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}" if first and second else first or second
    texts = ([{"type": "text", "text": part}] if isinstance(part, str) else part for part in (first, second) if part)
    return [part for parts in texts for part in parts]
